"""Which blocks hold known prefixes."""
from libc.stdint cimport int32_t


cdef class PrefixIndex:
    cdef bytes _secret
    cdef dict _block_of                # block by digest
    cdef list _digest_of               # (num_blocks,) digest, or None for a block that is not known
    cdef readonly Py_ssize_t num_idle  # known blocks without an owner
    cdef int32_t *_next                # (num_blocks + 1,) ring of these from the least recently used on: entry 0 is its head,
    cdef int32_t *_previous            # entry b + 1 block b

    cdef bint knows(self, int32_t block) noexcept nogil
    cdef bint retain_known(self, int32_t block) noexcept
    cdef void take_known(self, int32_t block) noexcept
    cdef int32_t evict(self) except -1
