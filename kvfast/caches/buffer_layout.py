"""What memory of a caller must be like for the blocks of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfast.caches.paged_storage import BLOCK_SIZE
from kvfast.codec.blocks import BLOCK_ALIGNMENT, block_nbytes
from kvfast.codec.formats import block_size_of, formats_of
from kvfast.core.checks import check_block_size, check_size
from kvfast.core.limits import MAX_LAYERS, MAX_TOKENS

__all__ = ["BufferLayout", "buffer_layout"]


@dataclass(frozen=True)
class BufferLayout:
    """What the `buffer` of a `PagedKVCache` must be like; made by `buffer_layout`.

    Attributes
    ----------
    num_blocks : int
    block_size : int
        Tokens of a block.
    block_nbytes : tuple of int
        Bytes of one block of each layer, scales and padding included: head after head, the keys of a head before its values.
    alignment : int
        What the address of each block must be a multiple of, in bytes.
    """

    num_blocks: int
    block_size: int
    block_nbytes: tuple[int, ...]
    alignment: int

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks of all layers."""
        return self.num_blocks * sum(self.block_nbytes)


def buffer_layout(num_layers: int, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int | None = None,
                  dtype: Any = "int8", k_dtype: Any = None, v_dtype: Any = None, v_head_dim: int | None = None) -> BufferLayout:
    """Size and alignment of memory for the blocks of a `PagedKVCache`.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, num_blocks, block_size, dtype, k_dtype, v_dtype, v_head_dim
        As in `PagedKVCache`; the format must have no float rows, so `dtype` cannot be ``"int4"``.

    Returns
    -------
    BufferLayout

    Raises
    ------
    ValueError, TypeError
        As in `PagedKVCache`.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> layout = kvfast.buffer_layout(2, num_kv_heads=2, head_dim=64, num_blocks=16, dtype="int8")
    >>> layout.block_nbytes, layout.nbytes, layout.alignment
    ((8704, 8704), 278528, 64)
    >>> memory = np.empty((2, 16, 8704 + 64), np.uint8)          # each block with 64 bytes behind it
    >>> start = -memory.ctypes.data % layout.alignment            # NumPy aligns less
    >>> pool = kvfast.PagedKVCache(2, 2, 64, num_blocks=16, dtype="int8", buffer=memory[:, :, start : start + 8704])
    """
    num_layers = check_size(num_layers, "num_layers", 1, MAX_LAYERS)
    num_blocks = check_size(num_blocks, "num_blocks", 1, MAX_TOKENS)
    formats = formats_of(dtype, k_dtype, v_dtype, num_layers)
    block_size = check_block_size(block_size_of(formats, block_size, BLOCK_SIZE))
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = tuple(block_nbytes(one, num_kv_heads, head_dim, v_head_dim, block_size) for one in formats)
    return BufferLayout(num_blocks, block_size, sizes, BLOCK_ALIGNMENT)
