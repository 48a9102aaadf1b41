"""Prefixes that sequences of a batch share."""
from libc.stdint cimport int32_t

from kvfast.attention.plan cimport Plan
from kvfast.codec.blocks cimport kv_context

cdef enum:
    MAX_SHARED_QUERIES = 8     # with more queries, arithmetic limits a sequence, not reading


# The keys that one sequence of a batch sees, and its queries.
ctypedef struct kv_member:
    kv_context context
    Py_ssize_t first_query
    Py_ssize_t num_queries
    Py_ssize_t shareable       # number of first blocks that all of its queries see in full
    Py_ssize_t begin           # its own item begins here
    int parts                  # partial results before its own item


cdef class SharedPrefix:
    cdef const int32_t[::1] members, queries
    cdef Py_ssize_t begin, end  # positions


cdef bint share_nothing(const kv_member *members, Py_ssize_t count, Py_ssize_t size) noexcept nogil
cdef list shared_prefixes(const kv_member *members, Py_ssize_t count, Py_ssize_t size)
cdef void read_together(Plan plan, list prefixes, kv_member *members)
