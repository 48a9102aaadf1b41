"""The contiguous cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfast.caches.sequence_cache import SequenceCache
from kvfast.storage.kinds import storage_of
from kvfast.storage.settings import full, with_states


class KVCache(SequenceCache):
    """Contiguous key/value cache of one sequence.

    Parameters
    ----------
    num_layers : int
    num_kv_heads, head_dim : int, or a list with one per layer
        head_dim is 1 to 512; a multiple of 16 is stored without padding.
    max_seq_len : int, optional
        Largest number of tokens. The memory of codes is then reserved at once; formats with float tokens take float rows as tokens
        come, for all tokens of an append until its `advance`. Without it the cache grows by blocks and never copies what it holds.
    dtype : str, dtype or KVFormat, or a list of them with one per layer
        Storage format: a name in `kvfast.PRESETS` (``"int4"``, ``"k4v3"``, ``"int3"``, ``"k8v4"``, ``"int8"``, ``"int8-centred"``,
        ``"int4-recent"``, ``"int8-rotated"``, ``"k8v4-rotated"``, or ``"int8-plain"`` and ``"int4-plain"``, which have only a scale per
        token per KV head), ``"float32"``, ``"float16"`` or ``"bfloat16"``, two plain dtypes for keys and values (``"int8/int4"``), or a
        `KVFormat`.
    k_dtype, v_dtype : optional
        Plain dtypes for keys and for values. If only one is given, the other side is plain `dtype`.
    block_size : int, optional
        Tokens of a block, the unit that is stored, shared with snapshots and copied: 16, 32, 64, 128 or 256. By default
        64, or what the format requires.
    secure : bool
        Overwrite memory before it is used again: the memory of freed, dropped, truncated and evicted tokens, and the scratch
        memory of calls. This costs one write of the memory that is given back.
    v_head_dim : int, or a list with one per layer, optional
        head_dim of the values if it differs from that of the keys, as in multi-head latent attention without absorbed
        projections (DeepSeek: 192 and 128). The output of `attend` is as wide as the values.
    max_state_bytes : int, optional
        For a model that also has recurrent layers: the most bytes that the checkpoints of their states take, see `add_checkpoint`.
        Where there are more, the cache drops those that lie close to others, and keeps the most among the newest tokens.

    Notes
    -----
    Each layer keeps its own length: append to every layer, then `advance`. All checks run before anything
    is written; a refused call leaves the cache as it was. Every method of every cache raises DimensionMismatchError for a wrong
    shape, TypeError for a wrong type, IndexError for a layer that is not there, NonFiniteInputError for NaN and infinity, and
    ValueError for a value out of range. MemoryError says that memory cannot be allocated.

    A format that seals blocks, such as ``"int4"`` (see `KVFormat`), encodes a block when it is full. Queries read its tokens as
    float16 until 48 further tokens follow the block. If `truncate` goes back further than that, the block's remaining tokens have
    only their codes, and keep these codes. New tokens in that block stay float16 if its scales do not fit them.

    Thread safety: different threads may use different caches, and any number of threads may read one cache
    (`attend`, `k`, `v`, `copy`). A thread that changes a cache must be its only user: the second thread gets a
    RuntimeError.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> cache = kvfast.KVCache(num_layers=1, num_kv_heads=2, head_dim=64)
    >>> k = v = np.ones((3, 2, 64), np.float32)
    >>> cache.append(0, k, v)
    >>> cache.attend(0, np.ones((1, 8, 64), np.float32)).shape
    (1, 8, 64)
    >>> cache.advance(3)
    >>> len(cache)
    3
    """

    __slots__ = ()

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        max_seq_len: int | None = None,
        dtype: Any = "int4",
        k_dtype: Any = None,
        v_dtype: Any = None,
        block_size: int | None = None,
        secure: bool = False,
        v_head_dim: int | None | Sequence[int | None] = None,
        max_state_bytes: int | None = None,
    ) -> None:
        layers = full(num_layers, num_kv_heads, head_dim, dtype, k_dtype, v_dtype, v_head_dim)
        settings = with_states(layers, max_state_bytes)
        self._open(settings, storage_of(settings, block_size, max_seq_len, secure, max_state_bytes))
