"""Pools over the blocks in a tensor."""

import numpy as np
import torch

from kvfast import DimensionMismatchError, KVFormat
from kvfast.engine import MAX_TOKENS, TensorCalls, buffer_layout, check_block_size, check_size, codes_alone, floats_of, pool_over

# A pool has no tokens of its own, so it may be made anew at any time. A compiled graph may copy a tensor to another address.
_MOST_POOLS = 4096
_pools = {}


def new_blocks(num_blocks, num_kv_heads, head_dim, dtype="int8", *, block_size=64, v_head_dim=None):
    """A tensor for the keys and values of one layer.

    Parameters
    ----------
    num_blocks, num_kv_heads, head_dim : int
    dtype : str
        As in `kvfast.PagedKVCache`, without float rows: ``"int8"`` and ``"k8v4"`` with codes alone, ``"int4-plain"``, ``"bfloat16"``
        and others. Float rows belong to no block: a format with them is a ValueError.
    block_size : int
        Tokens of a block: 16, 32, 64, 128 or 256.
    v_head_dim : int, optional
        Elements of a value, by default those of a key.

    Returns
    -------
    tensor of shape (num_blocks, num_kv_heads, block_size, nbytes), uint8
        `nbytes` of a token and KV head. The bytes of a head lie together, in the order of `kvfast.caches.buffer_layout`; the axis of
        the tokens only tells their number.
    """
    num_blocks, block_size = check_size(num_blocks, "num_blocks", 1, MAX_TOKENS), check_block_size(block_size)
    width = _width(head_dim, head_dim if v_head_dim is None else v_head_dim, block_size, dtype)
    return torch.zeros(num_blocks, check_size(num_kv_heads, "num_kv_heads", 1, MAX_TOKENS), block_size, width, dtype=torch.uint8)


def calls_of(blocks, head_dim, v_head_dim, dtype):
    """The calls of a pool over the blocks of a tensor; the pool is made at the first one."""
    key = blocks.data_ptr(), blocks.dtype, blocks.shape, blocks.stride(), head_dim, v_head_dim, dtype
    calls = _pools.get(key)
    if calls is None:
        calls = TensorCalls(_new_pool(blocks, head_dim, v_head_dim, dtype))
        if len(_pools) >= _MOST_POOLS:
            _pools.clear()
        _pools[key] = calls
    return calls


def _new_pool(blocks, head_dim, v_head_dim, dtype):
    if blocks.dtype != torch.uint8 or blocks.device.type != "cpu" or blocks.ndim != 4:
        raise DimensionMismatchError(
            f"blocks must be uint8 on the CPU of shape (num_blocks, num_kv_heads, block_size, nbytes), as new_blocks makes them, got "
            f"{blocks.dtype} on {blocks.device} of shape {tuple(blocks.shape)}"
        )
    num_blocks, num_kv_heads, block_size, nbytes = blocks.shape
    width = _width(head_dim, v_head_dim, block_size, dtype)
    if nbytes != width:
        raise DimensionMismatchError(
            f"blocks must have {width} bytes of a token and head for {dtype} with head_dim={head_dim} and v_head_dim={v_head_dim}, got "
            f"{nbytes}"
        )
    if not blocks[0].is_contiguous():
        raise ValueError(f"each block must lie in one piece, got blocks of shape {tuple(blocks.shape)} with strides {blocks.stride()}")
    pool = pool_over(
        [blocks.data_ptr()],
        blocks.stride(0),
        None,  # each call brings the tensor
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=codes_alone(KVFormat.of(dtype)),
    )
    pool.take_blocks(np.empty(0, np.int64))  # from now on it reads any block
    return pool


def _width(head_dim, v_head_dim, block_size, dtype):
    """Bytes of a token and KV head."""
    fmt = codes_alone(KVFormat.of(dtype))
    if floats_of(fmt) is not None:
        raise ValueError(
            f"dtype={dtype!r} keeps some tokens as floats, which no block can hold: choose int8, k8v4, int4-plain, or floats such as "
            f"bfloat16"
        )
    nbytes = buffer_layout(1, 1, head_dim, 1, block_size, fmt, v_head_dim=v_head_dim).nbytes
    if nbytes % block_size:
        raise ValueError(f"{block_size} tokens of {dtype} with head_dim={head_dim} take {nbytes} bytes: choose a larger block_size")
    return nbytes // block_size
