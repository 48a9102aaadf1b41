"""Fused attention over a layer's blocks, wherever they come from."""
from kvfast.blocks cimport kv_layer


cdef class Workspace:
    """Memory of one cache for the partial results of splits; grows, never shrinks."""
    cdef float *data
    cdef Py_ssize_t size
    cdef int reserve(self, Py_ssize_t size) except -1


cdef object attend_layer(const kv_layer *layer, Workspace workspace, object q, object out, object scale,
                         bint causal, object softcap, object sliding_window, object sinks,
                         object alibi_slopes, bint return_lse, object num_splits, object num_threads)
