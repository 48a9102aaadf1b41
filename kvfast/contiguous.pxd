"""Contiguous buffer: position p of a layer is slot p % block_size of block p // block_size."""
from kvfast._arrays cimport Rows
from kvfast.attention cimport Workspace
from kvfast.blocks cimport kv_layer


cdef class ContiguousBuffer:
    cdef readonly Py_ssize_t num_layers
    cdef readonly Py_ssize_t num_kv_heads
    cdef readonly Py_ssize_t head_dim
    cdef readonly object max_seq_len       # tokens, or None: grows
    cdef readonly Py_ssize_t length        # complete tokens
    cdef kv_layer *layers
    cdef Py_ssize_t *offsets               # (num_layers, 2): where K and V of a layer start in a chunk
    cdef Py_ssize_t chunk_tokens           # a multiple of every block size
    cdef Py_ssize_t chunk_bytes
    cdef list chunks                       # of Arena
    cdef Workspace workspace
    cdef bint busy

    cdef kv_layer *_layer(self, object index) except NULL
    cdef int _enter(self) except -1
    cdef int _reserve(self, Py_ssize_t tokens) except -1
    cdef int _check_shape(self, Rows array, str name) except -1
