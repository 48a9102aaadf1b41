"""Memory of a caller for the blocks of a pool, which holds no numbers at first."""

import contextlib
import ctypes
import mmap

import numpy as np
from cache_kinds import ANY_BLOCK

# Formats without float rows: the integers that are packed, too.
FORMATS = [*ANY_BLOCK, "int2-plain", "int6", "float16/int8", "int8/float32"]
CANARY = 0xA5


def aligned(nbytes, fill=255):
    """Memory of a caller, which holds no numbers: its bytes are NaN in every dtype of floats."""
    memory = np.full(nbytes + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


@contextlib.contextmanager
def before_a_page(nbytes):
    """Memory of `nbytes`, between pages that nobody may touch, of which the second begins where it ends."""
    page = mmap.PAGESIZE
    pages = -(-nbytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for border in (start, start + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(border), ctypes.c_size_t(page), 0) == 0
    at = (pages + 1) * page - nbytes
    assert at % 64 == 0
    yield np.frombuffer(memory, np.uint8)[at : at + nbytes]
    for border in (start, start + (pages + 1) * page):
        libc.mprotect(ctypes.c_void_p(border), ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)


def strided(layout, gap, by_layer):
    """(one array per layer, all their memory): with a gap after each block, block after block or layer after layer."""
    size = max(layout.block_nbytes) + gap
    layers = len(layout.block_nbytes)
    outer, inner = (layers, layout.num_blocks) if by_layer else (layout.num_blocks, layers)
    memory = aligned(outer * inner * size, CANARY).reshape(outer, inner, size)
    blocks = memory if by_layer else memory.swapaxes(0, 1)
    arrays = [blocks[i, :, :n] for i, n in enumerate(layout.block_nbytes)]
    for one in arrays:
        one[:] = 255
    return arrays, memory


def outside(memory, arrays):
    """The bytes of memory that belong to no block."""
    arrays = [one.copy() for one in arrays], arrays
    for one in arrays[1]:
        one[:] = CANARY
    rest = memory.copy()
    for one, given_ in zip(arrays[1], arrays[0]):
        one[:] = given_
    return rest
