"""The tokens that were chosen for each query."""
from libc.stdint cimport int64_t

from kvfast.attention.tasks cimport kv_call, kv_chosen


cdef class Chosen:
    cdef kv_chosen c
    cdef int64_t[::1] positions
    cdef int64_t[:, ::1] firsts, counts

    cdef bint split(self, Py_ssize_t query, Py_ssize_t row, Py_ssize_t end, Py_ssize_t base) noexcept nogil
    cdef Py_ssize_t most_of(self, Py_ssize_t query) noexcept nogil


cdef Chosen open_chosen(object given, Py_ssize_t run, const kv_call *call, Py_ssize_t num_queries)
