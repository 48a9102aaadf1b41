"""Blocks that are encoded as a whole, from the float rows of their tokens, and what tokens are decoded to."""
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t

from kvfast.codec.blocks cimport kv_store


cdef enum:
    # Queries read the codes of a block when so many tokens more follow on it, and its float rows before: that far a
    # sequence goes back exactly, as when drafted tokens are refused, and so many queries read what each alone would.
    OPEN_TOKENS = 16


cdef int seal_blocks(const kv_store *stores, Py_ssize_t num_layers, const int32_t *blocks, Py_ssize_t count,
                     bint at_start, const int16_t *kept_codes, uint8_t *unfit) except -1
cdef int restore_floats(const kv_store *stores, Py_ssize_t num_layers, int32_t block, bint at_start,
                        Py_ssize_t count) except -1
cdef object decode_tokens(const kv_store *store, const int64_t[::1] positions, const int64_t[::1] slots, Py_ssize_t floats_begin,
                          bint values)
