"""What the caches of one sequence have in common: names, documentation and properties over the compiled buffer."""

import numpy as np

from .errors import IncompatibleSnapshotError
from .fused import Transform
from .plan import Options
from .snapshot import Snapshot
from .state import from_arrays
from .storage_properties import StorageProperties

# Tokens of a block of the caches that own their memory, unless the format asks for others, and blocks that a growing
# cache starts with.
BLOCK_SIZE = 64
GROW_BLOCKS = 8


class SequenceCache(StorageProperties):
    """What the caches of one sequence have in common."""

    __slots__ = ("__weakref__", "_buffer")

    is_paged = False

    # What a cache that rotates queries and keys itself does differently.

    def _transform(self, layer, array, norm, eps):
        """What becomes of the new keys of `array`, or None."""
        return

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
        self._buffer.append(layer, k, v, self._transform(layer, k, None, 0.0))

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
        of_k = self._transform(layer, qkv, k_norm, eps)
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

    def explain(self, q_shape=1, layer=0, *, num_q_heads=None, dtype="float32", causal=True, sliding_window=None,
                num_sink_tokens=None, num_splits=0, num_threads=None):
        """What `attend` would do now: its kernels, tasks, threads, the bytes it would read, and slow paths it would take.

        Parameters
        ----------
        q_shape : tuple of int, array or int
            Shape of q, (num_tokens, num_q_heads, head_dim); or q itself; or the number of its tokens.
        layer : int
        num_q_heads : int, optional
            With a number of tokens; one for each KV head by default.
        dtype : str or dtype
            Of q, where `q_shape` is no array.
        causal, sliding_window, num_sink_tokens, num_splits, num_threads
            As in `attend`.

        Returns
        -------
        AttendPlan
            Print it, or look at its fields.

        Raises
        ------
        DimensionMismatchError, TypeError, IndexError, ValueError
            As `attend`.

        Examples
        --------
        >>> import kvfast, numpy as np
        >>> cache = kvfast.KVCache(num_layers=1, num_kv_heads=8, head_dim=128, dtype="int8")
        >>> cache.append(0, *np.ones((2, 4096, 8, 128), np.float32))
        >>> plan = cache.explain((1, 32, 128), num_threads=1)
        >>> plan.kernels, plan.num_tasks, plan.bytes_read
        (('scores_int8', 'accumulate_int8'), 8, 8650752)
        """
        options = Options(None, None, causal, None, sliding_window, num_sink_tokens, None, None, False, num_splits,
                          num_threads)
        return self._buffer.explain(layer, q_shape, num_q_heads, dtype, options)

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
        return self._with_buffer(self._buffer.copy())

    def _with_buffer(self, buffer):
        """A cache of the same settings with other contents."""
        other = object.__new__(type(self))
        for name in type(self).__slots__:
            setattr(other, name, getattr(self, name))
        other._buffer = buffer
        return other

    def snapshot(self, token_ids=None, metadata=None):
        """The complete tokens, as they are now.

        Takes no copy but of the block table: blocks are shared, and copied when this cache writes to them.

        Parameters
        ----------
        token_ids : integers of shape (len(cache),), optional
            What the tokens are, to be kept with them.
        metadata : dict of str to str, optional
            Anything else that is to be kept, the name of the model for example.

        Returns
        -------
        Snapshot
        """
        return Snapshot(self._with_buffer(self._buffer.share()), token_ids, metadata)

    def restore(self, snapshot):
        """Go to where a snapshot was taken, of this cache or of another with the same settings.

        A snapshot of this cache is shared as it was; another's bytes are copied. A snapshot of a `KVCache` can be
        restored into a `Sequence`, and the other way round.

        Parameters
        ----------
        snapshot : Snapshot

        Raises
        ------
        IncompatibleSnapshotError
            If layers, heads, head_dim, dtypes, or windows differ, or there is no room for the tokens; the cache is
            as it was.
        CacheFullError
            If the pool of a `Sequence` has too few blocks.
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"restore needs a Snapshot, got {type(snapshot).__name__}")
        snapshot._check_fits(self)
        self._buffer.restore(snapshot._cache._buffer)

    def save(self, path, token_ids=None, metadata=None):
        """Write the complete tokens to a file, as they are stored: safetensors, with checksums.

        If the process dies on the way, the file is the old one or the new one.

        Parameters
        ----------
        path : path-like
        token_ids, metadata
            As in `snapshot`.

        Raises
        ------
        OSError
        ModuleNotFoundError
            Without the packages of ``kvfast[files]``.
        """
        self.snapshot(token_ids, metadata).save(path)

    def state_dict(self):
        """The stored bytes as plain arrays; see `Snapshot.state_dict`."""
        return self.snapshot().state_dict()

    @classmethod
    def from_state_dict(cls, arrays):
        """A cache from what `state_dict` returned.

        Raises
        ------
        CorruptFileError, IncompatibleSnapshotError
            If that cannot be.
        """
        cache, _, _ = from_arrays(arrays)
        if type(cache) is not cls:
            raise IncompatibleSnapshotError(f"this is the state of a {type(cache).__name__}, not of a {cls.__name__}")
        return cache

    def _shape_settings(self, kind):
        """What must be the same for the bytes of one cache to be good in another."""
        return {
            "kind": kind,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": [one.to_dict() for one in self._buffer.formats],
        }

    __copy__ = copy

    def __deepcopy__(self, memo):
        return self.copy()

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled; save() writes it to a file that is safe to load")

    def __len__(self):
        return self._buffer.length

    def __bool__(self):
        return self._buffer.length > 0

    @property
    def is_empty(self):
        """Whether the cache holds no complete token."""
        return self._buffer.length == 0

    @property
    def max_seq_len(self):
        """Most tokens, or None for a cache that grows."""
        return self._buffer.max_seq_len

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
    def _storage(self):
        return self._buffer
