cdef int spread(char *data, size_t nbytes) except -1
