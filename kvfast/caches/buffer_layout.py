"""The layout that memory of a caller must have for the blocks of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfast.codec.blocks import BLOCK_ALIGNMENT, block_nbytes
from kvfast.codec.formats import block_size_of, formats_of
from kvfast.core.checks import check_block_size, check_size
from kvfast.core.limits import MAX_LAYERS, MAX_TOKENS
from kvfast.core.text import shown
from kvfast.storage.kinds import BLOCK_SIZE
from kvfast.storage.settings import latent


@dataclass(frozen=True)
class BufferLayout:
    """The layout that the `buffer` of a `PagedKVCache` or `PagedMLAKVCache` must have; made by `buffer_layout`.

    Attributes
    ----------
    num_blocks, block_size : int
    block_nbytes : tuple of int
        Bytes of one block of each layer, scales and padding included: head after head, the keys of a head before its values.
        In latent rows, the latents come before the rotary parts.
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


def buffer_layout(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_blocks: int,
    block_size: int | None = None,
    dtype: Any = "int8",
    k_dtype: Any = None,
    v_dtype: Any = None,
    v_head_dim: int | None = None,
    rope_dim: int | None = None,
) -> BufferLayout:
    """Size and alignment of memory for the blocks of a `PagedKVCache`, or with `rope_dim` of a `PagedMLAKVCache`.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim, num_blocks, block_size, dtype, k_dtype, v_dtype, v_head_dim
        As in `PagedKVCache`; float rows of a format do not lie in this memory.
    rope_dim : int, optional
        As in `PagedMLAKVCache`, whose `latent_dim` is the `head_dim` here; `num_kv_heads` is then 1.

    Examples
    --------
    >>> import kvfast, numpy as np
    >>> from kvfast.caches.buffer_layout import buffer_layout
    >>> layout = buffer_layout(2, num_kv_heads=2, head_dim=64, num_blocks=16, dtype="int8")
    >>> layout.block_nbytes, layout.nbytes, layout.alignment
    ((17408, 17408), 557056, 64)
    >>> memory = np.empty((2, 16, 17408 + 64), np.uint8)          # 64 bytes follow each block
    >>> start = -memory.ctypes.data % layout.alignment            # NumPy aligns less
    >>> pool = kvfast.PagedKVCache(2, 2, 64, num_blocks=16, dtype="int8", buffer=memory[:, :, start : start + 17408])
    """
    num_layers = check_size(num_layers, "num_layers", 1, MAX_LAYERS)
    num_blocks = check_size(num_blocks, "num_blocks", 1, MAX_TOKENS)
    if rope_dim is None:
        formats = formats_of(dtype, k_dtype, v_dtype, num_layers)
    else:
        if num_kv_heads != 1 or not (k_dtype is v_dtype is v_head_dim is None):
            raise ValueError(
                f"latent rows (rope_dim={shown(rope_dim)}) have one head and no values of their own, got "
                f"num_kv_heads={shown(num_kv_heads)}, k_dtype={shown(k_dtype)}, v_dtype={shown(v_dtype)}, "
                f"v_head_dim={shown(v_head_dim)}"
            )
        formats = latent(num_layers, head_dim, rope_dim, dtype)["dtype"]
    block_size = check_block_size(block_size_of(formats, block_size, BLOCK_SIZE))
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = tuple(block_nbytes(one, num_kv_heads, head_dim, v_head_dim, block_size, rope_dim) for one in formats)
    return BufferLayout(num_blocks, block_size, sizes, BLOCK_ALIGNMENT)
