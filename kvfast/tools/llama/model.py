"""A Llama-family decoder in NumPy whose keys and values live in a kvfast cache.

This file is the whole model. `LlamaModel._layers` is the loop over the layers; `LlamaModel.forward` and
`forward_batch` are where a runtime meets kvfast: `write` a fused projection, which keeps its keys and
values, then `attend` with the queries that come back.
"""

from contextlib import contextmanager
from functools import cached_property

import numpy as np

from kvfast import Rope
from kvfast.codec.rope import RotaryTables
from kvfast.engine import as_array, check_flag
from kvfast.planning.gguf_file import GGUFFile
from kvfast.tools.llama.product_threads import ProductThreads
from kvfast.tools.llama.weights import LlamaConfig, Weights, read_config, read_weights

# A product of at most this number of rows is made row by row, each the same bits as alone. BLAS would round them
# otherwise than one row, and up to here takes longer: it reads a weight faster for a vector than for a matrix.
FEW_TOKENS = 8
# Each row reads the weight in blocks that stay in the processor's cache for the next. OpenBLAS leaves much less
# than this to a single thread.
BLOCK_BYTES = 2 << 20
# Rows of a block are a multiple of this, so that 1, 2, 4 and 8 threads of OpenBLAS round a row in the same way, where a weight has
# such a multiple of rows: it takes rows by eight, and what is left over otherwise.
BLOCK_ROWS = 64


class LlamaModel:
    """A Llama-family model. It holds weights only; the caller's cache holds the conversation.

    Parameters
    ----------
    config : LlamaConfig
    weights : Weights
    batch_invariant : bool
        Give a token the same result whatever else is in its batch, of any size. Few tokens are otherwise
        multiplied one by one and many at once, which rounds in another way; this multiplies eight at a time,
        which makes prompts and single tokens slower, and lets sequences read what they share each for itself.

    Examples
    --------
    >>> model = LlamaModel.from_gguf("model.gguf")
    >>> cache = kvfast.KVCache(*model.cache_shape, max_seq_len=4096)
    >>> hidden = model.prefill(tokens, cache)
    >>> next_token = model.logits(hidden).argmax()
    """

    def __init__(self, config: LlamaConfig, weights: Weights, batch_invariant=False):
        self.config = config
        self.batch_invariant = check_flag(batch_invariant, "batch_invariant")
        self.weights = weights
        self._threads = ProductThreads()
        self._rotation = RotaryTables(weights.rope_frequencies)

    @classmethod
    def from_gguf(cls, source):
        """Read a model from a GGUF file, a path or an open `GGUFFile`."""
        file = source if isinstance(source, GGUFFile) else GGUFFile(source)
        config = read_config(file)
        return cls(config, read_weights(file, config))

    @cached_property
    def fingerprint(self):
        """Checksum of the configuration and the weights (XXH3): caches of other models are of no use to this one."""
        from xxhash import xxh3_128

        checksum = xxh3_128(repr(self.config).encode())
        for array in self.weights.arrays():
            checksum.update(np.ascontiguousarray(array))
        return checksum.hexdigest()

    @property
    def cache_shape(self):
        """(num_layers, num_kv_heads, head_dim): the first arguments of a cache for this model."""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    @cached_property
    def rope(self):
        """How the model rotates queries and keys, for `KVCache.splice` and `KVCache.drop`."""
        return Rope(frequencies=self.weights.rope_frequencies)

    def forward(self, tokens, cache, tree_parents=None):
        """Run tokens through the model, extending the context in `cache`.

        Up to `FEW_TOKENS` tokens get the bits that they would get one by one.

        Parameters
        ----------
        tokens : sequence of int, length num_tokens
            The tokens that follow the `len(cache)` tokens already there.
        cache : kvfast.KVCache, kvfast.RingKVCache or kvfast.Sequence
            Made with `cache_shape`. If the call fails, or is interrupted, the cache keeps the
            context it had.
        tree_parents : list of int, optional
            The last tokens are a tree of drafts: for each of them the number of the draft that it follows, -1 for
            the token before the tree. Their position is their depth. None of the tokens is counted then:
            ``cache.truncate(len(cache), keep=...)`` keeps those that are right, and `advance` counts them.

        Returns
        -------
        ndarray, shape (num_tokens, hidden_size), float32
            The final hidden states, normalised: what `logits` takes.
        """
        tokens = self.checked(tokens)
        positions = len(cache) + np.arange(len(tokens))
        for draft, parent in enumerate(tree_parents or (), len(tokens) - len(tree_parents or ())):
            positions[draft] = positions[parent + len(tokens) - len(tree_parents)] + 1
        with whole_or_not(cache):
            hidden = self._layers(tokens, positions, _attention_to(cache, tree_parents))
            if tree_parents is None:
                cache.advance(len(tokens))
        return hidden

    def forward_each(self, tokens, caches):
        """Run the same tokens through the model with each of several caches, as `forward` does with one.

        Returns hidden states of shape (len(caches), num_tokens, hidden_size).
        """
        tokens = self.checked(tokens)
        count = len(tokens)
        positions = np.concatenate([len(cache) + np.arange(count) for cache in caches])

        def attention(index, qkv, positions, **transform):
            out = []
            for i, cache in enumerate(caches):
                rows = slice(i * count, (i + 1) * count)
                q = cache.write(index, qkv[rows], positions=positions[rows], **transform)
                out.append(cache.attend(index, q))
            return np.concatenate(out)

        with whole_or_not(*caches):
            hidden = self._layers(np.tile(tokens, len(caches)), positions, attention)
            for cache in caches:
                cache.advance(count)
        return hidden.reshape(len(caches), count, -1)

    def forward_batch(self, tokens, sequences, counts):
        """Run the next tokens of several sequences through the model at once.

        Parameters
        ----------
        tokens : sequence of int, length sum(counts)
            Of each sequence the tokens that follow those it holds, sequence after sequence.
        sequences : list of kvfast.Sequence
            Of one pool, made with `cache_shape`. If the call fails, they keep the contexts they had.
        counts : list of int
            How many of the tokens each sequence gets.

        Returns
        -------
        ndarray, shape (sum(counts), hidden_size), float32
            The final hidden states, normalised.
        """
        tokens = self.checked(tokens)
        pool = sequences[0].pool
        slots = pool.slot_mapping(sequences, counts)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        positions = np.concatenate([start + np.arange(count) for start, count in zip(pool.seq_lens(sequences), counts, strict=True)])

        def attention(index, qkv, **transform):
            q = pool.write_batch(index, qkv, slots, **transform)
            return pool.attend_batch(index, q, sequences, cu_seqlens_q=bounds, cascade=not self.batch_invariant)

        with whole_or_not(*sequences):
            hidden = self._layers(tokens, positions, attention)
            for sequence, first, last in zip(sequences, bounds[:-1], bounds[1:], strict=True):
                sequence.advance(last - first, tokens[first:last])
        return hidden

    def prefill(self, tokens, cache, chunk_size=512):
        """Run a long prompt in chunks of `forward`, so that scratch memory does not grow with its length.

        Returns the final hidden state of the last token, (hidden_size,).
        """
        if not len(tokens):
            raise ValueError("the prompt is empty: there is no token to start from")
        for start in range(0, len(tokens), chunk_size):
            hidden = self.forward(tokens[start : start + chunk_size], cache)
        return hidden[-1]

    def logits(self, hidden):
        """Score every token of the vocabulary as the next one: hidden states (..., hidden_size) give (..., vocab_size), float32."""
        return self._linear(hidden, self.weights.output)

    def checked(self, tokens):
        """Token ids as an array; ValueError for those that are not in the vocabulary."""
        tokens = as_array(tokens, "tokens")
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be a sequence of at least one token id, got {tokens.dtype} of shape {tokens.shape}")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.config.vocab_size - 1}, got {tokens.min()} to {tokens.max()}")
        return tokens

    def _layers(self, tokens, positions, attention):
        """All layers: `attention(index, qkv, **transform)` keeps the keys and values, and
        returns (num_tokens, num_q_heads, head_dim)."""
        config = self.config
        rotation = self._rotation.at(positions)  # one row per token
        rows = np.arange(len(tokens))
        x = self.weights.embedding[tokens]  # (num_tokens, hidden_size), a copy: added to below
        for index in range(config.num_layers):
            layer = self.weights.layers[index]
            qkv = self._linear(rms_norm(x, layer.attn_norm, config.norm_eps), layer.qkv)
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias
            out = attention(
                index,
                qkv,
                cos=rotation[0],
                sin=rotation[1],
                positions=rows,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=config.norm_eps,
            )
            x += self._linear(out.reshape(len(x), -1), layer.attn_output)
            x += self._feed_forward(rms_norm(x, layer.ffn_norm, config.norm_eps), layer)
        return rms_norm(x, self.weights.output_norm, config.norm_eps)

    def _feed_forward(self, x, layer):
        """x: (num_tokens, hidden_size), normalised. Returns the same shape."""
        gate, up = np.split(self._linear(x, layer.gate_up), 2, axis=1)
        return self._linear(silu(gate) * up, layer.ffn_down)

    def _linear(self, x, weight):
        """x: (..., inputs), weight: (outputs, inputs). Returns (..., outputs)."""
        rows = x.reshape(-1, x.shape[-1])
        if self.batch_invariant:
            out = eight_by_eight(rows, weight)  # by all threads, always: their number changes how some kernels round
        elif len(rows) <= FEW_TOKENS:
            out = self._threads.call(row_by_row, rows, weight)
        else:
            out = self._threads.call(np.matmul, rows, weight.T)
        return out.reshape(*x.shape[:-1], -1)


@contextmanager
def whole_or_not(*caches):
    """Drop what caches get inside if that fails or is interrupted: some layers may have appended then, and others not."""
    lengths = [len(cache) for cache in caches]
    try:
        yield
    except BaseException:
        for cache, length in zip(caches, lengths):
            cache.truncate(length)
        raise


def _attention_to(cache, tree_parents=None):
    """The function that `LlamaModel._layers` calls with the projections of one sequence."""

    def attention(index, qkv, **transform):
        q = cache.write(index, qkv, **transform)
        return cache.attend(index, q) if tree_parents is None else cache.attend(index, q, tree_parents=tree_parents)

    return attention


def row_by_row(x, weight):
    """``x @ weight.T`` for few rows: each gets the same bits whatever the others are."""
    out = np.empty((len(x), len(weight)), np.result_type(x, weight))
    step = -(-len(weight) // max(1, weight.nbytes // BLOCK_BYTES))
    step = -(-step // BLOCK_ROWS) * BLOCK_ROWS
    for start in range(0, len(weight), step):
        block = weight[start : start + step]
        for row, products in zip(x, out, strict=True):
            np.dot(block, row, out=products[start : start + step])
    return out


def eight_by_eight(x, weight):
    """``x @ weight.T`` for any number of rows: each gets the same bits whatever the others are.

    OpenBLAS rounds a row by its place in a product where that has more than eight (its kernels for AVX2 do).
    """
    filler = np.zeros((-len(x) % 8, x.shape[1]), x.dtype)
    blocks = np.concatenate([x, filler]).reshape(-1, 8, x.shape[1])
    return np.matmul(blocks, weight.T).reshape(-1, len(weight))[: len(x)]


def rms_norm(x, weight, eps):
    """Scale the last axis of x to a root mean square of 1, then by `weight`."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def silu(x):
    """x * sigmoid(x), written with tanh because exp(-x) overflows for a very negative x."""
    return x * (0.5 * np.tanh(0.5 * x) + 0.5)
