"""Blocks that are encoded as a whole, from the float rows of their tokens."""
from libc.stdint cimport int16_t, int32_t

from kvfast._kernels cimport kv_kernels
from kvfast.blocks cimport kv_store


cdef enum:
    # Queries read the codes of a block when so many tokens more follow on it, and its float rows before: that far a
    # sequence goes back exactly, as when drafted tokens are refused, and so many queries read what each alone would.
    OPEN_TOKENS = 16


cdef int finish_blocks(const kv_store *stores, Py_ssize_t num_layers, const int32_t *blocks, Py_ssize_t count,
                       bint at_start, const int16_t *kept) except -1
cdef int restore_floats(const kv_store *stores, Py_ssize_t num_layers, int32_t block, bint at_start,
                        Py_ssize_t count) except -1
cdef void decode_token(const kv_kernels *kernels, const kv_store *store, int32_t block, Py_ssize_t place, bint floats,
                       bint values, float *out) noexcept nogil
