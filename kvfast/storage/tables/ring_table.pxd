"""A block table that evicts tokens before the sliding window."""
from kvfast.storage.tables.block_table cimport BlockTable


cdef class RingTable(BlockTable):
    cdef readonly Py_ssize_t window          # tokens
    cdef readonly Py_ssize_t num_sink_tokens
    cdef readonly Py_ssize_t rollback
    cdef readonly Py_ssize_t evicted         # positions below this and outside the sink tokens are gone

    cdef int evict(self, Py_ssize_t window) except -1
    cdef Py_ssize_t _evicted_at(self, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t _skipped_at(self, Py_ssize_t length) noexcept nogil
    cdef Py_ssize_t _gone(self, Py_ssize_t evicted) noexcept nogil
