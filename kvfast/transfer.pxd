"""Stored tokens from one pool to another."""
from libc.stdint cimport int32_t

from kvfast.blocks cimport kv_store

cdef int copy_slots(const kv_store *source, const int32_t *from_blocks, const kv_store *target, const int32_t *to_blocks,
                    Py_ssize_t num_layers, Py_ssize_t num_slots, Py_ssize_t encoded, bint may_stop) except -1
cdef int copy_piece(const kv_store *source, int32_t from_piece, const kv_store *target, int32_t to_piece,
                    Py_ssize_t num_layers, Py_ssize_t count) except -1
