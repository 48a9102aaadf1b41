"""The caches: names, documentation and properties over the compiled buffers."""

from .contiguous import ContiguousBuffer

__all__ = ["KVCache"]


def _size(nbytes):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024


class KVCache:
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

    __slots__ = ("_buffer", "__weakref__")

    def __init__(self, num_layers, num_kv_heads, head_dim, max_seq_len=None, dtype="int8", k_dtype=None, v_dtype=None):
        self._buffer = ContiguousBuffer(
            num_layers,
            num_kv_heads,
            head_dim,
            max_seq_len,
            dtype if k_dtype is None else k_dtype,
            dtype if v_dtype is None else v_dtype,
        )

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
        self._buffer.append(layer, k, v)

    def attend(self, layer, q, *, out=None, scale=None, causal=True, softcap=None, sliding_window=None, sinks=None,
               alibi_slopes=None, return_lse=False, num_splits=0, num_threads=None):
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
            A query at position p sees no key before ``p - sliding_window + 1``.
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
        return self._buffer.attend(layer, q, out, scale, causal, softcap, sliding_window, sinks, alibi_slopes,
                                   return_lse, num_splits, num_threads)

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
        return self._buffer.rows(layer, False)

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
        other._buffer = self._buffer.copy()
        return other

    __copy__ = copy

    def __deepcopy__(self, memo):
        return self.copy()

    def __reduce__(self):
        raise TypeError("a KVCache cannot be pickled")

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

    def __repr__(self):
        dtype = self.dtype if isinstance(self.dtype, str) else "mixed dtypes"
        most = "" if self.max_seq_len is None else f"/{self.max_seq_len}"
        return (
            f"KVCache({dtype}, {self.num_layers} layers x {self.num_kv_heads} heads x {self.head_dim}, "
            f"{len(self)}{most} tokens, {_size(self.nbytes)})"
        )


def _same(names):
    return names[0] if len(set(names)) == 1 else tuple(names)
