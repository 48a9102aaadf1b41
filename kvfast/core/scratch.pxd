cdef enum:
    SCRATCH_BYTES = 768 << 10  # of a thread; the system gives memory to those pages that are used


cdef bint take_scratch(void **blocks, Py_ssize_t count) noexcept nogil   # False: out of memory, and nothing is taken
cdef void give_scratch(void **blocks, Py_ssize_t count) noexcept nogil
