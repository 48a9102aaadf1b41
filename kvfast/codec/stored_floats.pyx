# cython: language_level=3, boundscheck=False, cdivision=True
"""Checks the floats in blocks that come from outside the process: rows, scales, means. No kernel checks what it reads."""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.float cimport FLT_MAX
from libc.stdint cimport int16_t, int32_t, uint16_t
from libc.string cimport memcpy

from kvfast.codec.dtypes cimport dtype_limit
from kvfast.core.kernels cimport KV_FLOAT16, KV_FLOAT32, KV_FLOAT_ROWS, kv_side
from kvfast.core.limits cimport KV_LANES, KV_MAX_FLOAT16

from kvfast.errors import CorruptFileError

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    /* Without its sign, a float is the larger the larger its bits are as an integer, and infinity and NaN are above all. The loops
       have no branch, so that compilers make vectors of them. Values of a store are not aligned. */
    __attribute__((noinline)) static int kv_within_32(const char *floats, ptrdiff_t count, int32_t most)
    {
        int32_t beyond = 0, bits;
        for (ptrdiff_t i = 0; i < count; i++) {
            memcpy(&bits, floats + 4 * i, 4);
            beyond |= (bits & 0x7fffffff) > most;
        }
        return !beyond;
    }
    __attribute__((noinline)) static int kv_within_16(const char *floats, ptrdiff_t count, int16_t most)
    {
        int16_t largest = 0, bits;
        for (ptrdiff_t i = 0; i < count; i++) {
            memcpy(&bits, floats + 2 * i, 2);
            bits &= 0x7fff;
            largest = bits > largest ? bits : largest;
        }
        return largest <= most;
    }
    static int32_t kv_float_bits(float value)
    {
        int32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        return bits;
    }
    """
    bint kv_within_32(const char *floats, Py_ssize_t count, int32_t most) noexcept nogil
    bint kv_within_16(const char *floats, Py_ssize_t count, int16_t most) noexcept nogil
    int32_t kv_float_bits(float value) noexcept nogil

cdef enum:
    LARGEST_FLOAT16 = 0x7BFF  # its bits


cdef inline bint _are_within(int dtype, const char *floats, Py_ssize_t nbytes, float most) noexcept nogil:
    """Whether floats of a dtype are numbers of at most this magnitude."""
    if dtype == KV_FLOAT32:
        return kv_within_32(floats, nbytes // 4, kv_float_bits(most))
    if dtype == KV_FLOAT16:
        return kv_within_16(floats, nbytes // 2, LARGEST_FLOAT16)
    return kv_within_16(floats, nbytes // 2, <int16_t>(kv_float_bits(most) >> 16))  # bfloat16


cdef bint are_storable(const kv_side *side, const char *blocks, Py_ssize_t count) noexcept nogil:
    """Whether all floats in `count` blocks of a side that follow each other are numbers."""
    cdef Py_ssize_t _i, lane
    cdef uint16_t common, channel
    if side.family == KV_FLOAT_ROWS:
        return _are_within(side.dtype, blocks, count * side.bytes, dtype_limit(side.dtype))
    for _i in range(count):
        if side.scale_bytes == 4 and not kv_within_32(blocks + side.scales, side.block_size, kv_float_bits(FLT_MAX)):
            return False
        if side.scale_bytes == 2 and not kv_within_16(blocks + side.scales, side.block_size, <int16_t>(kv_float_bits(FLT_MAX) >> 16)):
            return False
        if side.means and not kv_within_16(blocks + side.means, side.padded_dim, LARGEST_FLOAT16):
            return False
        if side.channels:  # the bfloat16 in their top bits; with a larger one, a code of 0 could stand for NaN
            common = 0
            for lane in range(KV_LANES):
                memcpy(&channel, blocks + side.channels + 2 * lane, sizeof(channel))
                common |= (channel >> 15) << lane
            if (common & 0x7FFF) > kv_float_bits(2 * KV_MAX_FLOAT16) >> 16:
                return False
        blocks += side.bytes
    return True


cdef class StoredFloats:
    """Checks the bytes of whole blocks of a side. Any number of threads may call it."""

    def __call__(self, data):
        """Raise CorruptFileError unless all floats in `data`, contiguous memory, are numbers."""
        cdef Py_buffer view
        cdef bint good
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                good = are_storable(self.side, <const char *>view.buf, view.len // self.side.bytes if self.side.bytes else 0)
        finally:
            PyBuffer_Release(&view)
        if not good:
            raise CorruptFileError("it holds NaN or infinity")
