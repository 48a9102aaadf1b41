"""Pools over memory that another program holds, for the C interface."""

import sys

import numpy as np

from kvfast.caches.buffer_layout import buffer_layout
from kvfast.caches.paged import PagedKVCache


class _Memory:
    """Memory at an address, for NumPy, and whose it is."""

    def __init__(self, address, shape, stride, owner):
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "strides": (stride, 1), "data": (address, False)}
        self.owner = owner


def pool_over(addresses, block_stride, owner, **arguments):
    """A `PagedKVCache` over memory that begins at an address for each layer, or with none over its own. The pool keeps `owner` alive.

    `block_stride`: bytes from block to block, or 0 if blocks lie one after the other.
    """
    layout, buffer = buffer_layout(**arguments), []
    for layer, address in enumerate(addresses):
        if not address:
            raise ValueError(f"layers[{layer}] must not be NULL")
        nbytes = layout.block_nbytes[layer]
        if address + (layout.num_blocks - 1) * (block_stride or nbytes) + nbytes > sys.maxsize:
            raise ValueError(
                f"layers[{layer}] must have {layout.num_blocks} blocks within the addresses of a process, got {address:#x} and "
                f"block_stride {block_stride}"
            )
        buffer.append(np.asarray(_Memory(address, (layout.num_blocks, nbytes), block_stride or nbytes, owner)))
    return PagedKVCache(**arguments, buffer=buffer or None)
