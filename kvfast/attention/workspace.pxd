cdef enum:
    ITEMS
    QUERIES
    SIGHT                      # see `sight`
    CHOSEN                     # chosen tokens in order
    PARTIALS
    FOLDS                      # partial results of each thread's rows
    COUNTS                     # tasks of each query and KV head
    WIDE
    ROPE
    DECODED
    SCRATCH                    # pointers to the threads' scratch, while a call runs
    GATHERED                   # chosen tokens of each thread
    NUM_WORKSPACES


# Memory for one call at a time. It grows and never shrinks.
ctypedef struct kv_workspace:
    void *data[NUM_WORKSPACES]
    Py_ssize_t sizes[NUM_WORKSPACES]
    int lent                   # whether a call has it; set by `lend`
    bint secure                # wipe memory before it is freed
    bint used                  # since the last `wipe`


cdef class Workspace:
    """The kv_workspace of a cache."""
    cdef kv_workspace c
    cdef void wipe(self) noexcept nogil


cdef kv_workspace *lend(kv_workspace *workspace, kv_workspace *other) noexcept nogil
cdef void give_back(kv_workspace *workspace, kv_workspace *other) noexcept nogil
cdef void *reserve(kv_workspace *workspace, int which, Py_ssize_t nbytes) noexcept nogil  # NULL: out of memory
cdef void release(kv_workspace *workspace, int which) noexcept nogil
