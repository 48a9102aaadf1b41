# cython: language_level=3, boundscheck=False, cdivision=True
"""Checks of array arguments, once, at the Python boundary."""
import numpy as np

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from kvfast._interrupt cimport check_stopped, is_stopped, kv_watch, watch_of
from kvfast._kernels cimport KV_BFLOAT16, KV_FLOAT16, KV_FLOAT32, KV_MAX_HEAD_DIM, active, kv_kernels

from kvfast import slow_paths
from kvfast.errors import DimensionMismatchError, NonFiniteInputError
from kvfast.interchange import as_array

cdef bint _LOGS = slow_paths.LOGS


cdef class Rows:
    """A float array of shape (tokens, heads, dim), held open as a buffer."""

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.buffer)


cdef int _dtype_of(const char *format):
    """Storage dtype of a buffer format, or -1. uint16 is the bits of bfloat16."""
    if format == NULL:
        return -1
    if format[0] in b"@=<" and format[0] != 0:
        format += 1
    if format[0] == 0 or format[1] != 0:
        return -1
    if format[0] == c"f":
        return KV_FLOAT32
    if format[0] == c"e":
        return KV_FLOAT16
    if format[0] == c"H":
        return KV_BFLOAT16
    return -1


cdef object _as_buffer(object array, str name):
    """The array as something with a buffer: ml_dtypes' bfloat16 has none of its own."""
    if not isinstance(array, np.ndarray):
        try:
            array = as_array(array, name)
        except Exception as error:
            raise TypeError(f"{name} must be an array of float32, float16 or bfloat16, "
                            f"got {type(array).__name__}: {error}") from None
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    if array.dtype.kind not in "fu" or not array.dtype.isnative:
        raise TypeError(f"{name} must be float32, float16 or bfloat16 (ml_dtypes, or its bits as uint16), "
                        f"got {array.dtype}")
    return array


cdef Rows open_rows(object array, str name, bint writable=False):
    """Open `array` of shape (tokens, heads, dim); rows that do not lie in one piece are copied. `Rows` are open already."""
    if type(array) is Rows:
        return array
    cdef Rows self = Rows.__new__(Rows)
    cdef int flags = PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
    cdef int itemsize
    if type(array) is not np.ndarray or array.dtype.char not in "feH":
        array = _as_buffer(array, name)
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} must be writable, got a read-only array")
    PyObject_GetBuffer(array, &self.buffer, flags)
    self.is_open = True
    self.rows.dtype = _dtype_of(self.buffer.format)
    if self.rows.dtype < 0:
        raise TypeError(f"{name} must be float32, float16 or bfloat16 (ml_dtypes, or its bits as uint16), "
                        f"got {array.dtype}")
    if self.buffer.ndim != 3:
        raise DimensionMismatchError(f"{name} must have 3 dimensions (num_tokens, num_heads, head_dim), "
                                     f"got shape {array.shape}")
    itemsize = <int>self.buffer.itemsize
    if (self.buffer.strides[2] != itemsize and self.buffer.shape[2] > 1
            or <Py_ssize_t>self.buffer.buf % itemsize or self.buffer.strides[0] % itemsize
            or self.buffer.strides[1] % itemsize):
        if writable:
            raise ValueError(f"the last axis of {name} must be contiguous, got strides {array.strides}")
        if _LOGS:
            slow_paths.log_gathered(name)
        return open_rows(np.array(array, order="C"), name)
    self.rows.data = <char *>self.buffer.buf
    self.rows.tokens = self.buffer.shape[0]
    self.rows.heads = self.buffer.shape[1]
    self.rows.dim = self.buffer.shape[2]
    self.rows.token_stride = self.buffer.strides[0]
    self.rows.head_stride = self.buffer.strides[1]
    if self.rows.tokens == 0 or self.rows.heads == 0 or self.rows.dim == 0:
        raise DimensionMismatchError(f"{name} must hold at least one token, head and dimension, "
                                     f"got shape {array.shape}")
    if self.rows.dim > KV_MAX_HEAD_DIM:
        raise DimensionMismatchError(f"head_dim of {name} must be at most {KV_MAX_HEAD_DIM}, "
                                     f"got shape {array.shape}")
    return self


cdef Py_ssize_t find_unstorable(const kv_rows *rows, float limit, float *row, Py_ssize_t *index,
                                kv_watch *watch) noexcept nogil:
    """The first row, token * heads + head, with an element that is NaN or beyond the limit, that row and the element; or -1."""
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t i
    cdef const char *source
    for i in range(rows.tokens * rows.heads):
        if is_stopped(watch):
            break
        source = rows.data + i // rows.heads * rows.token_stride + i % rows.heads * rows.head_stride
        if rows.dtype == KV_FLOAT32:
            index[0] = kernels.find_unstorable(<const float *>source, rows.dim, limit)
        else:
            kernels.to_float[rows.dtype](source, rows.dim, row)
            index[0] = kernels.find_unstorable(row, rows.dim, limit)
        if index[0] >= 0:
            kernels.to_float[rows.dtype](source, rows.dim, row)
            return i
    return -1


cdef int check_finite(Rows array, str name, float limit, str limit_of) except -1:
    """Refuse NaN, infinity and magnitudes above `limit`, the largest that `limit_of` can store."""
    cdef float row[512]
    cdef Py_ssize_t bad, index
    cdef kv_watch memory
    cdef kv_watch *watch = watch_of(&memory, 4.0 * array.rows.tokens * array.rows.heads * array.rows.dim)
    with nogil:
        bad = find_unstorable(&array.rows, limit, row, &index, watch)
    check_stopped(watch)
    if bad < 0:
        return 0
    value = row[index]
    position = (bad // array.rows.heads, bad % array.rows.heads, index)
    if value - value == 0:
        raise NonFiniteInputError(f"{name}{list(position)} is {value:g}, beyond the range of {limit_of} "
                                  f"(+-{limit:g})")
    raise NonFiniteInputError(f"{name} must be finite, got {value} at {list(position)}")
