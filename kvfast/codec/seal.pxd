"""Seals blocks: encodes them as a whole, from the float rows of their tokens."""
from libc.stdint cimport int32_t, uint8_t

from kvfast.codec.blocks cimport kv_layout


cdef int seal_blocks(const kv_layout *layout, const int32_t *blocks, Py_ssize_t num_blocks, Py_ssize_t num_starts,
                     uint8_t *unfit) except -1
