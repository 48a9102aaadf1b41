"""The caches of one sequence: names, documentation and properties over the compiled buffers."""

import numpy as np

from .errors import DimensionMismatchError
from .fused import Transform, rotated
from .plan import Options, check_size
from .pool import BlockPool, per_layer
from .ring import RingTable
from .rope import RotaryTables
from .sequence import SequenceBuffer
from .table import BlockTable

__all__ = ["KVCache", "RingKVCache"]

# Tokens of a block of the caches that own their memory, and blocks that a growing cache starts with.
BLOCK_SIZE = 64
GROW_BLOCKS = 8


def _size(nbytes):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024


def _same(names):
    return names[0] if len(set(names)) == 1 else tuple(names)


class SequenceCache:
    """What the caches of one sequence have in common."""

    __slots__ = ("_buffer", "__weakref__")

    is_paged = False

    # What a cache that rotates queries and keys itself does differently.

    def _transform(self, layer, num_tokens, norm, eps):
        """What becomes of `num_tokens` new keys, or None."""
        return None

    def _rotated(self, layer, q, options):
        """Queries for the window, and for the sinks where they differ."""
        return q, None

    def _unrotated(self, layer, k):
        """Keys as they were given."""
        return k

    def append(self, layer, k, v):
        """Store the keys and values of one or more tokens behind those of a layer.

        Parameters
        ----------
        layer : int
        k, v : arrays of shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
            Any strides; bfloat16 as ml_dtypes or as its bits in uint16.

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError
            If shape, dtype or layer do not fit.
        NonFiniteInputError
            For NaN, infinity, or a value beyond the range of a float16 or bfloat16 cache.
        CacheFullError
            If `max_seq_len` would be passed.
        """
        n = np.shape(k)[0] if np.ndim(k) == 3 else 1
        self._buffer.append(layer, k, v, self._transform(layer, n, None, 0.0))

    def write(self, layer, qkv, *, num_q_heads=None, cos=None, sin=None, positions=None, q_norm=None, k_norm=None,
              eps=1e-6, interleaved=False, out=None, num_threads=None):
        """Split a fused projection, normalise and rotate its queries and keys, and store keys and values.

        The same as `kvfast.split_qkv_norm_rope` followed by `append`, without arrays between.

        Parameters
        ----------
        layer : int
        qkv : array of shape (num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim), float32, float16 or bfloat16
            All query heads of a token, then its key heads, then its value heads.
        num_q_heads : int, optional
            Checked against the width of `qkv`, from which it follows.
        cos, sin : arrays of shape (num_positions, rotary_dim // 2), float32, optional
            Of the rotary angles; None for no rotation.
        positions : integers of shape (num_tokens,), optional
            Row of `cos` and `sin` for each token; by default its position in the layer.
        q_norm, k_norm, eps, interleaved
            As in `kvfast.split_qkv_norm_rope`.
        out : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16, optional
            Where to write the queries.
        num_threads : int, optional
            Most threads of the split.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, head_dim), float32, or `out`
            The queries, for `attend`.

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError, ValueError, NonFiniteInputError, CacheFullError
        """
        of_q = Transform(self.head_dim, q_norm, eps, cos, sin, positions, interleaved, "q_norm")
        of_k = self._transform(layer, len(qkv), k_norm, eps)
        if of_k is None:
            of_k = Transform(self.head_dim, k_norm, eps, name="k_norm", rotation=of_q)
        elif cos is not None or sin is not None:
            raise ValueError('a cache with rope="cache" turns queries and keys itself: leave out cos and sin')
        return self._buffer.write(layer, qkv, num_q_heads, of_q, of_k, out, num_threads)

    def attend(self, layer, q, *, out=None, scale=None, causal=True, softcap=None, sliding_window=None,
               num_sink_tokens=None, sinks=None, alibi_slopes=None, return_lse=False, num_splits=0, num_threads=None):
        """Attention of the last tokens to all that a layer holds, computed on the stored bytes.

        Parameters
        ----------
        layer : int
        q : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
            Queries of the last `num_tokens` tokens of the layer (append them first). Query head h reads KV
            head ``h // (num_q_heads // num_kv_heads)``.
        out : array of q's shape, float32, float16 or bfloat16, optional
            Where to write the output.
        scale : float, optional
            Factor of the scores; ``head_dim ** -0.5`` by default.
        causal : bool
            A query at position p sees the keys up to p; else all of them.
        softcap : float, optional
            Scores become ``softcap * tanh(score / softcap)``.
        sliding_window : int, optional
            A query at position p sees no key before ``p - sliding_window + 1``, but for the sinks.
        num_sink_tokens : int, optional
            With a sliding window: the first so many tokens stay visible (StreamingLLM, arXiv 2309.17453).
        sinks : array of shape (num_q_heads,), optional
            Logits that join the softmax's denominator only.
        alibi_slopes : array of shape (num_q_heads,), optional
            ``slope * (key position - query position)`` is added to the scores (arXiv 2108.12409).
        return_lse : bool
            Also return the log-sum-exp of the scores, for `kvfast.merge_states`.
        num_splits : int
            Parts that the context is cut into; 0 lets kvfast choose, from the lengths alone.
        num_threads : int, optional
            Most threads of this call. The result is the same bits for every number.

        Returns
        -------
        ndarray of shape (num_tokens, num_q_heads, head_dim), float32, or `out`
            With `return_lse` a tuple of it and float32 of shape (num_tokens, num_q_heads).

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError, NonFiniteInputError, ValueError
        """
        options = Options(out, scale, causal, softcap, sliding_window, num_sink_tokens, sinks, alibi_slopes, return_lse,
                          num_splits, num_threads)
        return self._buffer.attend(layer, *self._rotated(layer, q, options), options)

    def advance(self, n=1):
        """Count `n` tokens as complete; every layer must have got exactly that many.

        Raises
        ------
        ValueError
            Naming the layers that hold more or fewer.
        """
        self._buffer.advance(n)

    def k(self, layer):
        """Keys of a layer, tokens that are not yet advanced included.

        Returns
        -------
        ndarray of shape (layer_length(layer), num_kv_heads, head_dim), float32
            A read-only view for float32 storage with `max_seq_len`; else a decoded copy. A view shows what
            is stored now: truncating and appending again changes it.
        """
        return self._unrotated(layer, self._buffer.rows(layer, False))

    def v(self, layer):
        """Values of a layer; see `k`."""
        return self._buffer.rows(layer, True)

    def layer_length(self, layer):
        """Tokens that a layer holds, advanced or not."""
        return self._buffer.layer_length(layer)

    def truncate(self, n):
        """Keep the first `n` complete tokens; tokens that are not yet advanced go too.

        The bytes of the kept tokens do not change.
        """
        self._buffer.truncate(n)

    def clear(self):
        """Drop all tokens; the memory is kept for the next."""
        self._buffer.truncate(0)

    def copy(self):
        """An independent deep copy."""
        other = object.__new__(type(self))
        for name in type(self).__slots__:
            setattr(other, name, getattr(self, name))
        other._buffer = self._buffer.copy()
        return other

    __copy__ = copy

    def __deepcopy__(self, memo):
        return self.copy()

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled")

    def __len__(self):
        return self._buffer.length

    def __bool__(self):
        return self._buffer.length > 0

    @property
    def is_empty(self):
        """Whether the cache holds no complete token."""
        return self._buffer.length == 0

    @property
    def num_layers(self):
        return self._buffer.num_layers

    @property
    def num_kv_heads(self):
        return self._buffer.num_kv_heads

    @property
    def head_dim(self):
        return self._buffer.head_dim

    @property
    def entry_size(self):
        """Elements of one token's keys in one layer: num_kv_heads * head_dim."""
        return self._buffer.num_kv_heads * self._buffer.head_dim

    @property
    def max_seq_len(self):
        """Most tokens, or None for a cache that grows."""
        return self._buffer.max_seq_len

    @property
    def block_size(self):
        """Tokens of a block."""
        return self._buffer.block_size

    @property
    def context_lens(self):
        """Tokens of each layer, advanced or not: int32 of shape (num_layers,)."""
        return np.array([self._buffer.layer_length(layer) for layer in range(self.num_layers)], np.int32)

    def capacity(self, layer=0):
        """Tokens that the memory reserved for a layer has room for."""
        return self._buffer.capacity(layer)

    def block_indices(self, layer=0):
        """Blocks that hold a layer's tokens, in their order: int32 of shape (num_blocks,)."""
        return self._buffer.block_ids(layer)

    @property
    def bytes_per_element(self):
        """Bytes that one number of a key or value takes, scales and padding included."""
        return self.bytes_per_token / (2 * self.num_layers * self.entry_size)

    @property
    def nbytes(self):
        """Bytes reserved for keys and values, scales and padding included."""
        return self._buffer.nbytes

    @property
    def bytes_per_token(self):
        """Bytes that one token takes over all layers, scales and padding included."""
        return self._buffer.bytes_per_token

    @property
    def k_dtype(self):
        """Storage dtype of the keys: a name, or a tuple of one per layer where layers differ."""
        return _same(self._buffer.dtypes(False))

    @property
    def v_dtype(self):
        """Storage dtype of the values; see `k_dtype`."""
        return _same(self._buffer.dtypes(True))

    @property
    def dtype(self):
        """Storage dtype, ``"int8"`` or ``"int8/int4"`` for K/V, or a tuple of one per layer."""
        pairs = zip(self._buffer.dtypes(False), self._buffer.dtypes(True))
        return _same([k if k == v else f"{k}/{v}" for k, v in pairs])

    @property
    def dtype_name(self):
        """`dtype` as one word, for logs: ``"mixed"`` where layers differ."""
        return self.dtype if isinstance(self.dtype, str) else "mixed"

    def _shape(self):
        return f"{self.dtype_name}, {self.num_layers} layers x {self.num_kv_heads} heads x {self.head_dim}"


class KVCache(SequenceCache):
    """Contiguous key/value cache of one sequence.

    Parameters
    ----------
    num_layers, num_kv_heads : int
    head_dim : int
        1 to 512; a multiple of 16 is stored without padding.
    max_seq_len : int, optional
        Most tokens; all memory is then reserved at once and appending allocates nothing. Without it the
        cache grows by blocks and never copies what it holds.
    dtype : str, dtype, or a list of them with one per layer
        Storage: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"`` or ``"int4"``, or a usual alias.
        The integers keep one float32 scale per token per KV head.
    k_dtype, v_dtype : optional
        Storage of keys and values apart; each defaults to `dtype`.

    Raises
    ------
    ValueError
        For a size out of range or an unknown dtype.
    MemoryError
        If the memory cannot be had.

    Notes
    -----
    Each layer keeps its own length: append to every layer, then `advance`. All checks run before anything
    is written; a refused call leaves the cache as it was.

    Thread safety: distinct caches may be used from distinct threads; a second thread that enters a cache in
    use gets a RuntimeError.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> cache = kvfast.KVCache(num_layers=1, num_kv_heads=2, head_dim=64, dtype="int8")
    >>> k = v = np.ones((3, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.attend(0, np.ones((1, 8, 64), np.float32)).shape
    (1, 8, 64)
    >>> cache.advance(3)
    >>> len(cache)
    3
    """

    __slots__ = ()

    def __init__(self, num_layers, num_kv_heads, head_dim, max_seq_len=None, dtype="int8", k_dtype=None, v_dtype=None):
        num_layers = check_size(num_layers, "num_layers", 1, 1 << 16)
        k_dtypes = per_layer(dtype if k_dtype is None else k_dtype, num_layers, "k_dtype")
        v_dtypes = per_layer(dtype if v_dtype is None else v_dtype, num_layers, "v_dtype")
        num_blocks = GROW_BLOCKS
        if max_seq_len is not None:
            max_seq_len = check_size(max_seq_len, "max_seq_len", 1, 1 << 40)
            num_blocks = -(-max_seq_len // BLOCK_SIZE)
        pool = BlockPool(num_layers, num_kv_heads, head_dim, BLOCK_SIZE, k_dtypes, v_dtypes, num_blocks, max_seq_len is None)
        table = BlockTable(pool)
        self._buffer = SequenceBuffer([table], [(table, layer) for layer in range(num_layers)], max_seq_len)

    def __repr__(self):
        most = "" if self.max_seq_len is None else f"/{self.max_seq_len}"
        return f"KVCache({self._shape()}, {len(self)}{most} tokens, {_size(self.nbytes)})"


class RingKVCache(SequenceCache):
    """Key/value cache of a sliding window: constant memory for endless generation.

    Keeps the last `window` tokens, the first `num_sink_tokens` for ever (attention sinks, StreamingLLM, arXiv
    2309.17453), and `rollback` tokens behind the window, so that going back is exact. Positions stay absolute:
    ``len(cache)`` counts all tokens that were ever complete, less those taken back.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        As in `KVCache`.
    window : int, or a list with one per layer
        Tokens that a query sees, itself included. None in a list is a layer that keeps everything, for models
        that mix local and global layers.
    num_sink_tokens : int
        First tokens that the layers with a window keep and see for ever, at most the smallest window.
    dtype, k_dtype, v_dtype
        As in `KVCache`.
    rollback : int
        How far `truncate` can go back from the longest the cache has been.
    rope : {None, "cache"}
        ``"cache"``: keys and queries come without rotary embedding and are turned here, as if by the position
        inside what the cache holds: the sinks stay directly before the window, however far it has moved.
    rope_theta, rotary_dim, rope_frequencies, rope_interleaved
        For ``rope="cache"``: base of the angles, dimensions that turn (all of head_dim by default), radians per
        position for each pair instead of `rope_theta`, and whether dimension 2i turns with 2i + 1 instead of
        i with i + rotary_dim // 2.

    Raises
    ------
    ValueError
        For a window of 0, sinks that are more than a window, or a size out of range.

    Notes
    -----
    A query sees its own window whatever was appended since, so a prompt may come in chunks of any size; while a
    chunk is in progress the memory grows by it, and `advance` gives that back.

    Keys under ``rope="cache"`` are stored turned by their absolute position, which leaves all distances inside
    the window as they are; the sinks are read with a second set of queries, turned by the position inside the
    cache. Scores depend on distances only, so this is what turning every key again would give, without
    the work.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> cache = kvfast.RingKVCache(1, 2, 64, window=16, num_sink_tokens=4)
    >>> k = v = np.ones((100, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.attend(0, np.ones((100, 8, 64), np.float32)).shape
    (100, 8, 64)
    >>> cache.advance(100)
    >>> cache.positions(0)
    array([ 0,  1,  2,  3, 84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 94, 95, 96,
           97, 98, 99])
    """

    __slots__ = ("_windows", "_num_sink_tokens", "_rollback", "_rope", "_interleaved")

    def __init__(self, num_layers, num_kv_heads, head_dim, window, num_sink_tokens=0, dtype="int8", k_dtype=None,
                 v_dtype=None, rollback=64, rope=None, rope_theta=10000.0, rotary_dim=None, rope_frequencies=None,
                 rope_interleaved=False):
        num_layers = check_size(num_layers, "num_layers", 1, 1 << 16)
        head_dim = check_size(head_dim, "head_dim", 1, 512)
        windows = list(window) if isinstance(window, (list, tuple)) else [window] * num_layers
        if len(windows) != num_layers:
            raise DimensionMismatchError(f"window must be one number or a list of {num_layers}, one per layer, "
                                         f"got {len(windows)}")
        windows = [one if one is None else check_size(one, "window", 1, 1 << 40) for one in windows]
        local = [one for one in windows if one is not None]
        if not local:
            raise ValueError("window must be a number for one layer at least; a KVCache keeps everything")
        num_sink_tokens = check_size(num_sink_tokens, "num_sink_tokens", 0, 1 << 40)
        if num_sink_tokens > min(local):
            raise ValueError(f"num_sink_tokens must be at most the window of {min(local)}, got {num_sink_tokens}")
        rollback = check_size(rollback, "rollback", 0, 1 << 40)
        if rope not in (None, "cache"):
            raise ValueError(f'rope must be None or "cache", got {rope!r}')
        self._rope = None
        if rope:
            rotary_dim = head_dim if rotary_dim is None else check_size(rotary_dim, "rotary_dim", 2, head_dim)
            if rope_frequencies is None and rotary_dim % 2:
                raise ValueError(f"rotary_dim must be even, got {rotary_dim}")
            self._rope = RotaryTables(rotary_dim, rope_theta, rope_frequencies)
        self._interleaved = bool(rope_interleaved)
        self._windows, self._num_sink_tokens, self._rollback = windows, num_sink_tokens, rollback

        k_dtypes = per_layer(dtype if k_dtype is None else k_dtype, num_layers, "k_dtype")
        v_dtypes = per_layer(dtype if v_dtype is None else v_dtype, num_layers, "v_dtype")
        tables, places = {}, []
        for one in windows:
            if one not in tables:
                group = [layer for layer in range(num_layers) if windows[layer] == one]
                held = GROW_BLOCKS if one is None else _ring_blocks(one + rollback, num_sink_tokens)
                pool = BlockPool(len(group), num_kv_heads, head_dim, BLOCK_SIZE, [k_dtypes[i] for i in group],
                                 [v_dtypes[i] for i in group], held, True)
                tables[one] = BlockTable(pool) if one is None else RingTable(pool, one, num_sink_tokens, rollback)
            places.append((tables[one], windows[: len(places)].count(one)))
        self._buffer = SequenceBuffer(list(tables.values()), places)

    def _transform(self, layer, num_tokens, norm, eps):
        if self._rope is None:
            return None
        cos, sin = self._rope(self.layer_length(layer), num_tokens)
        return Transform(self.head_dim, norm, eps, cos, sin, np.arange(num_tokens), self._interleaved, "k_norm")

    def _rotated(self, layer, q, options):
        if self._rope is None:
            return q, None
        n, length = np.shape(q)[0] if np.ndim(q) == 3 else 1, self.layer_length(layer)
        first = max(0, length - n)
        at_window = rotated(q, *self._rope(first, n), self._interleaved)
        window, num_sink_tokens = options.window_or(self._windows[layer]), options.sinks_or(self._num_sink_tokens)
        if window is None or not num_sink_tokens or length <= window:
            return at_window, None
        # The last place of a cache that holds the sinks and the window before the query.
        return at_window, rotated(q, *self._rope(first, n, num_sink_tokens + window - 1), self._interleaved)

    def _unrotated(self, layer, k):
        if self._rope is None or not len(k):
            return k
        cos, sin = self._rope.at(self._buffer.positions(layer))
        return rotated(k, cos, -sin, self._interleaved)

    def positions(self, layer=0):
        """Absolute positions of the tokens that a layer shows, in the order of `k` and `v`.

        Returns
        -------
        ndarray of shape (num_tokens,), int64
            The sinks, then the window; what `rollback` keeps behind the window is not among them.
        """
        return self._buffer.positions(layer)

    @property
    def window(self):
        """Window in tokens: one number, or a tuple with one per layer, None for a layer without."""
        return _same(self._windows)

    @property
    def num_sink_tokens(self):
        """First tokens that are kept for ever."""
        return self._num_sink_tokens

    @property
    def rollback(self):
        """How many tokens `truncate` can go back from the longest the cache has been."""
        return self._rollback

    def __repr__(self):
        window = self.window if not isinstance(self.window, tuple) else "mixed"
        sinks = f" + {self._num_sink_tokens} sinks" if self._num_sink_tokens else ""
        return f"RingKVCache({self._shape()}, window {window}{sinks}, {len(self)} tokens seen, {_size(self.nbytes)})"


def _ring_blocks(held, num_sink_tokens):
    """Blocks of a ring in steady state, with room for chunks of a prompt: a multiple of 8."""
    blocks = -(-held // BLOCK_SIZE) - (-num_sink_tokens // BLOCK_SIZE) + 2
    return -(-(blocks + min(blocks // 4, 8)) // 8) * 8
