"""Memory that calls of attention work in."""


cdef enum:
    ITEMS
    QUERIES
    PARTIALS
    COUNTS                     # tasks of each query and KV head
    WIDE
    ROPE
    DECODED
    SCRATCH                    # pointers to the threads' scratch, while a call runs
    MEMBERS                    # of a batch
    GATHERED                   # chosen tokens of each thread
    NUM_WORKSPACES


cdef class Workspace:
    """Memory of one cache for its calls, one call at a time. It grows and never shrinks."""
    cdef int lent              # whether a call has it; set by `lend`
    cdef void *data[NUM_WORKSPACES]
    cdef bint secure           # wipe memory before it is freed
    cdef bint used             # since the last `wipe`
    cdef Py_ssize_t sizes[NUM_WORKSPACES]
    cdef void release(self, int which) noexcept nogil
    cdef Workspace lend(self)
    cdef void wipe(self) noexcept nogil
    cdef void *reserve(self, int which, Py_ssize_t nbytes) noexcept nogil  # NULL: out of memory
