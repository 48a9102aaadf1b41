"""Thread-count policy: the one door to OpenMP's settings."""

cdef int threads_for(object num_threads, double work) except -1
cdef int num_threads_for(object num_threads, double work) except -1
cdef int take_threads(int num_threads, double work) noexcept nogil
