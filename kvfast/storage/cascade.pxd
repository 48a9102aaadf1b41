"""Prefixes that sequences of a batch share."""
from kvfast.attention.call cimport AttendCall
from kvfast.codec.blocks cimport kv_context

cdef enum:
    MAX_SHARED_QUERIES = 8     # with more queries, arithmetic limits a sequence, not reading


cdef class Context:
    cdef kv_context c
    cdef Py_ssize_t first_query, num_queries
    cdef Py_ssize_t shareable  # number of first blocks that all of its queries see in full


cdef int read_together(AttendCall call, list contexts, list members, Py_ssize_t depth, Py_ssize_t size, list begins, list parts,
                       list keepalive) except -1
