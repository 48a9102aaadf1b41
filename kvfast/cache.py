"""The contiguous cache."""

from .plan import check_block_size, check_size
from .pool import BlockPool, per_layer
from .sequence import SequenceBuffer
from .sequence_cache import BLOCK_SIZE, GROW_BLOCKS, SequenceCache
from .state import KINDS
from .storage_properties import size_text
from .table import BlockTable

__all__ = ["KVCache"]


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
    block_size : int
        Tokens that are stored, shared with snapshots and copied together: 16, 32, 64, 128 or 256.

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

    def __init__(self, num_layers, num_kv_heads, head_dim, max_seq_len=None, dtype="int8", k_dtype=None, v_dtype=None,
                 block_size=BLOCK_SIZE):
        num_layers = check_size(num_layers, "num_layers", 1, 1 << 16)
        k_dtypes = per_layer(dtype if k_dtype is None else k_dtype, num_layers, "k_dtype")
        v_dtypes = per_layer(dtype if v_dtype is None else v_dtype, num_layers, "v_dtype")
        block_size = check_block_size(block_size)
        num_blocks = GROW_BLOCKS
        if max_seq_len is not None:
            max_seq_len = check_size(max_seq_len, "max_seq_len", 1, 1 << 40)
            num_blocks = -(-max_seq_len // block_size)
        pool = BlockPool(num_layers, num_kv_heads, head_dim, block_size, k_dtypes, v_dtypes, num_blocks, max_seq_len is None)
        table = BlockTable(pool)
        self._buffer = SequenceBuffer([table], [(table, layer) for layer in range(num_layers)], max_seq_len)

    def _settings(self):
        return self._shape_settings("full")

    @classmethod
    def _from_settings(cls, settings, block_size, max_seq_len):
        return cls(**settings, block_size=block_size, max_seq_len=max_seq_len)

    def __repr__(self):
        most = "" if self.max_seq_len is None else f"/{self.max_seq_len}"
        return f"KVCache({self._shape()}, {len(self)}{most} tokens, {size_text(self.nbytes)})"


KINDS["full"] = KVCache
