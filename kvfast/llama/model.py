"""A Llama-family decoder in NumPy whose keys and values live in a kvfast cache.

This file is the whole model. `LlamaModel.forward` is the loop over the layers, and
`LlamaModel._attention` is where a runtime meets kvfast: `append` the new keys and values, then
`attend` with the queries.
"""

from __future__ import annotations

import numpy as np

from .gguf_file import GGUFFile
from .weights import LlamaConfig, Weights, read_config, read_weights


class LlamaModel:
    """A Llama-family model. It holds weights only; the caller's cache holds the conversation.

    Parameters
    ----------
    config : LlamaConfig
    weights : Weights

    Examples
    --------
    >>> model = LlamaModel.from_gguf("model.gguf")
    >>> cache = kvfast.KVCache(*model.cache_shape, max_seq_len=4096, dtype="int8")
    >>> hidden = model.prefill(tokens, cache)
    >>> next_token = model.logits(hidden).argmax()
    """

    def __init__(self, config: LlamaConfig, weights: Weights):
        self.config = config
        self.weights = weights

    @classmethod
    def from_gguf(cls, source):
        """Read a model from a GGUF file, a path or an open `GGUFFile`."""
        file = source if isinstance(source, GGUFFile) else GGUFFile(source)
        config = read_config(file)
        return cls(config, read_weights(file, config))

    @property
    def cache_shape(self):
        """(num_layers, num_kv_heads, head_dim): the first arguments of a cache for this model."""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    def forward(self, tokens, cache):
        """Run tokens through the model, extending the context in `cache`.

        Parameters
        ----------
        tokens : sequence of int, length num_tokens
            The tokens that follow the `len(cache)` tokens already there.
        cache : kvfast.KVCache
            Made with `cache_shape`. If the call fails, or is interrupted, the cache keeps the
            context it had.

        Returns
        -------
        ndarray, shape (num_tokens, hidden_size), float32
            The final hidden states, normalised: what `logits` takes.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise ValueError("tokens should be a sequence of at least one token id")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(f"token ids should lie in 0..{self.config.vocab_size - 1}")
        start = len(cache)
        rotation = self._rotation(start, len(tokens))
        eps = self.config.norm_eps
        x = self.weights.embedding[tokens]  # (num_tokens, hidden_size), a copy: added to below
        try:
            for index, layer in enumerate(self.weights.layers):
                x += self._attention(rms_norm(x, layer.attn_norm, eps), rotation, index, cache)
                x += self._feed_forward(rms_norm(x, layer.ffn_norm, eps), layer)
            cache.advance(len(tokens))
        except BaseException:
            cache.truncate(start)  # drops what some layers appended and others did not
            raise
        return rms_norm(x, self.weights.output_norm, eps)

    def prefill(self, tokens, cache, chunk_size=512):
        """Run a long prompt in chunks, so that scratch memory does not grow with its length.

        Parameters
        ----------
        tokens : sequence of int
        cache : kvfast.KVCache
        chunk_size : int
            Tokens per call of `forward`.

        Returns
        -------
        ndarray, shape (hidden_size,), float32
            The final hidden state of the last token.
        """
        if not len(tokens):
            raise ValueError("the prompt is empty: there is no token to start from")
        for start in range(0, len(tokens), chunk_size):
            hidden = self.forward(tokens[start : start + chunk_size], cache)
        return hidden[-1]

    def logits(self, hidden):
        """Score every token of the vocabulary as the next one.

        Parameters
        ----------
        hidden : ndarray, shape (..., hidden_size), float32

        Returns
        -------
        ndarray, shape (..., vocab_size), float32
        """
        return hidden @ self.weights.output.T

    def _attention(self, x, rotation, index, cache):
        """x: (num_tokens, hidden_size), normalised. Returns the same shape."""
        config, layer = self.config, self.weights.layers[index]
        num_q, num_kv = config.num_q_heads, config.num_kv_heads
        qkv = x @ layer.qkv.T
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        qkv = qkv.reshape(len(x), num_q + 2 * num_kv, config.head_dim)
        qk = qkv[:, : num_q + num_kv]  # a view: queries and keys are normed and rotated alike
        if layer.qk_norm is not None:
            qk[:] = rms_norm(qk, layer.qk_norm, config.norm_eps)
        rotate(qk, *rotation)

        cache.append(index, qkv[:, num_q : num_q + num_kv], qkv[:, num_q + num_kv :])
        out = cache.attend(index, qkv[:, :num_q])  # (num_tokens, num_q_heads, head_dim)
        return out.reshape(len(x), -1) @ layer.attn_output.T

    def _feed_forward(self, x, layer):
        """x: (num_tokens, hidden_size), normalised. Returns the same shape."""
        gate, up = np.split(x @ layer.gate_up.T, 2, axis=1)
        return (silu(gate) * up) @ layer.ffn_down.T

    def _rotation(self, start, num_tokens):
        """Cosines and sines of positions start.., each (num_tokens, 1, rope_dims // 2) float32."""
        positions = np.arange(start, start + num_tokens)
        # float64 angles: at position 8000 a float32 angle is already off by 5e-4 radians.
        angles = np.multiply.outer(positions, self.weights.rope_frequencies)[:, None]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rms_norm(x, weight, eps):
    """Scale the last axis of x to a root mean square of 1, then by `weight`."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def rotate(x, cos, sin):
    """Rotary position embedding in place: dimension i turns with dimension i + rope_dims // 2.

    Parameters
    ----------
    x : ndarray, shape (num_tokens, num_heads, head_dim), float32
    cos, sin : ndarray, shape (num_tokens, 1, rope_dims // 2), float32
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = first * cos - second * sin
    second[:] = second * cos + first * sin
    first[:] = turned


def silu(x):
    """x * sigmoid(x), written with tanh because exp(-x) overflows for a very negative x."""
    return x * (0.5 * np.tanh(0.5 * x) + 0.5)
