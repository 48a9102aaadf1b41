# cython: language_level=3, boundscheck=False, cdivision=True
"""Memory of a caller that a pool keeps its blocks in."""
import numpy as np

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uintptr_t
from libc.string cimport memset

from kvfast.codec.blocks cimport arena_at, k_block_at, kv_layout, v_block_at
from kvfast.core.kernels cimport KV_FLOAT_ROWS, kv_dtypes, kv_side
from kvfast.core.limits cimport KV_LANES

from kvfast.codec.blocks import BLOCK_ALIGNMENT
from kvfast.core.interchange import as_array, check_unmasked, is_lazy
from kvfast.errors import DimensionMismatchError


def buffer_layers(buffer, list sizes, Py_ssize_t num_blocks):
    """Where the blocks of each layer lie in a caller's memory, as `PagedKVCache` describes it: an Arena for each, which keeps a
    reference to the memory, and the bytes from block to block. `sizes`: bytes of a block of each layer."""
    cdef Py_ssize_t stride
    cdef uintptr_t address
    parts = _split(_opened(buffer, "buffer"), sizes, num_blocks) if _is_one(buffer) else list(buffer)
    if len(parts) != len(sizes):
        raise DimensionMismatchError(f"buffer must be one piece of memory or {len(sizes)} arrays, one per layer, got {len(parts)}")
    layers, strides, pieces = [], [], []
    for i, (part, size) in enumerate(zip(parts, sizes)):
        array = _opened(part, f"buffer[{i}]")
        address, stride = array.__array_interface__["data"][0], _stride_of(array, f"buffer[{i}]", size, num_blocks)
        if address % BLOCK_ALIGNMENT or stride % BLOCK_ALIGNMENT:
            raise ValueError(f"the blocks of buffer[{i}] must be aligned to {BLOCK_ALIGNMENT} bytes, got them from address "
                             f"{int(address):#x} on, {stride} bytes apart")
        layers.append(arena_at(array, <char *>address, (num_blocks - 1) * stride + size))
        strides.append(stride)
        pieces.append((int(address), int(address) + (num_blocks - 1) * stride + size, stride, size, i))
    _check_apart(pieces)
    return layers, strides


def _is_one(buffer):
    """Whether a buffer is one piece of memory for all layers."""
    return not isinstance(buffer, (list, tuple)) and (not hasattr(buffer, "ndim") or buffer.ndim < 2)


def _opened(memory, str name):
    """An ndarray over writable memory, not over a copy of it."""
    check_unmasked(memory, name, f"pass {name}.data")
    if isinstance(memory, np.ndarray):
        array = memory
    elif hasattr(memory, "__dlpack__"):
        array = as_array(memory, name)
        if array.base is None or is_lazy(memory):
            raise TypeError(f"{name} must be memory that NumPy can share, got a copy of a {type(memory).__name__}")
    else:
        try:
            array = np.asarray(memoryview(memory))
        except (TypeError, ValueError, BufferError, NotImplementedError) as error:
            raise TypeError(f"{name} must be an array or a buffer of bytes, got {type(memory).__name__}"
                            f"{'' if isinstance(error, TypeError) else f': {error}'}") from None
    if array.dtype.hasobject:
        raise TypeError(f"{name} must hold bytes or numbers, got {array.dtype}")
    if not array.flags.writeable:
        raise ValueError(f"{name} must be writable, got read-only memory")
    return array


def _split(array, sizes, num_blocks):
    """One array per layer of one piece of memory."""
    needed = num_blocks * sum(sizes)
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise DimensionMismatchError(f"buffer must be one piece of memory, or an array per layer, got shape {array.shape} with "
                                     f"strides {array.strides}")
    if array.nbytes < needed:
        raise ValueError(f"buffer must have at least {needed:,} bytes for {num_blocks} blocks of {sum(sizes):,} bytes, got "
                         f"{array.nbytes:,}")
    array, parts, at = array.view(np.uint8), [], 0
    for size in sizes:
        parts.append(array[at:at + num_blocks * size].reshape(num_blocks, size))
        at += num_blocks * size
    return parts


def _stride_of(array, name, size, num_blocks):
    """Bytes from block to block of an array of one layer."""
    if array.ndim < 1 or array.shape[0] != num_blocks or array.nbytes != num_blocks * size:
        raise DimensionMismatchError(f"{name} must have {num_blocks} blocks of {size:,} bytes in its first axis, got {array.dtype} "
                                     f"of shape {array.shape}")
    if not array[0].flags.c_contiguous:
        raise ValueError(f"each block of {name} must lie in one piece, got strides {array.strides} of shape {array.shape}")
    stride = size if num_blocks == 1 else array.strides[0]
    if stride < size:
        raise ValueError(f"the blocks of {name} must not overlap: {stride} bytes apart, they have {size:,} bytes")
    return stride


def _check_apart(pieces):
    """Refuse layers with a byte in common. Those whose blocks alternate have one stride."""
    last = []
    for begin, end, stride, size, layer in sorted(pieces):
        last = [one for one in last if one[1] > begin]
        for other_begin, _, other_stride, other_size, other in last:
            ahead = (begin - other_begin) % stride
            if stride != other_stride or ahead < other_size or stride - ahead < size:
                raise ValueError(f"the layers of buffer must not overlap, and buffer[{min(layer, other)}] and "
                                 f"buffer[{max(layer, other)}] do")
        last.append((begin, end, stride, size, layer))


cdef void clean_slots(const kv_layout *layout, const int64_t *slots, Py_ssize_t n) noexcept nogil:
    """Make the bytes that kernels read next to a new token finite: a caller's memory may hold NaN, and 0 x NaN is NaN.
    These bytes are the padding of a float row, and the scales of a lane tile. Finite bytes stay, as they may belong to a token."""
    cdef Py_ssize_t i, head
    cdef int64_t slot
    cdef int32_t block
    cdef int offset
    for i in range(n):
        slot = slots[i]
        if slot < 0:
            continue
        block, offset = <int32_t>(slot >> layout.block_shift), <int>(slot & (layout.k.block_size - 1))
        for head in range(layout.num_kv_heads):
            _clean_token(&layout.k, k_block_at(layout, block, head), offset)
            _clean_token(&layout.v, v_block_at(layout, block, head), offset)


cdef inline void _clean_token(const kv_side *side, char *block, int offset) noexcept nogil:
    cdef Py_ssize_t used
    cdef int other
    cdef uint32_t *wide
    cdef uint16_t *narrow
    if side.family == KV_FLOAT_ROWS:
        used = side.head_dim * (kv_dtypes[side.dtype].bits // 8)
        memset(block + offset * side.row_stride + used, 0, side.row_stride - used)
        return
    if (offset + 1) % KV_LANES == 0 or side.scale_bytes == 0:
        return
    if side.scale_bytes == 4:
        wide = <uint32_t *>(block + side.scales)
        for other in range(offset + 1, offset - offset % KV_LANES + KV_LANES):
            if wide[other] & 0x7F800000 == 0x7F800000:
                wide[other] = 0
    else:
        narrow = <uint16_t *>(block + side.scales)
        for other in range(offset + 1, offset - offset % KV_LANES + KV_LANES):
            if narrow[other] & 0x7F80 == 0x7F80:
                narrow[other] = 0
