"""Memory that calls of attention work in."""


cdef enum:
    ITEMS
    QUERIES
    PARTIALS
    WIDE
    ROPE
    NUM_WORKSPACES


cdef class Workspace:
    """Memory of one cache for its calls, one at a time; grows, never shrinks."""
    cdef int lent              # for `lend` alone
    cdef void *data[NUM_WORKSPACES]
    cdef bint secure           # wiped before it is given back
    cdef Py_ssize_t sizes[NUM_WORKSPACES]
    cdef void release(self, int which) noexcept nogil
    cdef Workspace lend(self)
    cdef void *reserve(self, int which, Py_ssize_t size) noexcept nogil  # NULL: cannot be had
