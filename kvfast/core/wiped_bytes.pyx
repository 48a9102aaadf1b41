# cython: language_level=3, boundscheck=False
"""Memory that is overwritten before it is given back."""
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdlib cimport free, malloc

from kvfast.core.wipe cimport kv_wipe


cdef class WipedBytes:
    """A writable buffer of `nbytes` bytes."""
    cdef void *data
    cdef Py_ssize_t nbytes

    def __cinit__(self, Py_ssize_t nbytes):
        self.data = malloc(max(nbytes, <Py_ssize_t>1))
        if self.data == NULL:
            raise MemoryError(f"cannot allocate {nbytes} bytes")
        self.nbytes = nbytes

    def __dealloc__(self):
        if self.data != NULL:
            kv_wipe(self.data, self.nbytes)
            free(self.data)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.nbytes, False, flags)
