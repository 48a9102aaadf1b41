"""Float rows of a caller's arrays. All array arguments go through this file.

A `Rows` holds the buffer of its array while a call runs, so that the memory stays.
"""
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t

from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport KV_FLOAT32


ctypedef struct kv_rows:
    char *data                 # element [0, 0, 0]
    Py_ssize_t tokens          # shape (tokens, heads, dim)
    Py_ssize_t heads
    Py_ssize_t dim
    Py_ssize_t token_stride    # bytes; the elements of a row are contiguous
    Py_ssize_t head_stride
    int dtype                  # KV_FLOAT32, KV_FLOAT16 or KV_BFLOAT16


cdef class Rows:
    cdef kv_rows rows
    cdef Py_buffer buffer
    cdef bint is_open
    cdef object owner          # of memory that is not a buffer


cdef inline Py_ssize_t width_of(const kv_rows *rows) noexcept nogil:
    """Bytes of a row."""
    return rows.dim * (4 if rows.dtype == KV_FLOAT32 else 2)


cdef bint rows_overlap(const kv_rows *rows) noexcept nogil
cdef int dtype_of(object array) except -1
cdef Rows open_rows(object array, str name, bint writable=*, Py_ssize_t most=*)
cdef Rows open_output(object array, str name)
cdef Py_ssize_t find_unstorable(const kv_rows *rows, float limit, float *row, Py_ssize_t *index, kv_watch *watch,
                                const int64_t *slots=*) noexcept nogil
cdef int check_finite(Rows array, str name, float limit, str limit_of, const int64_t *slots=*) except -1
cdef Rows zero_unstorable(Rows array, float limit)
cdef bint overlap(const kv_rows *a, const kv_rows *b) noexcept nogil
cdef int check_apart(const kv_rows *out, const kv_rows *given, str name) except -1
