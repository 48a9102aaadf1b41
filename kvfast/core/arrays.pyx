# cython: language_level=3, boundscheck=False, cdivision=True
"""Opens and checks array arguments, once, at the Python boundary."""
import numpy as np

from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t

from kvfast.core.dlpack cimport DLTensor, read_tensor
from kvfast.core.interrupt cimport check_stopped, is_stopped, kv_watch, watch_of
from kvfast.core.kernels cimport KV_BFLOAT16, KV_FLOAT16, KV_FLOAT32, active, kv_kernels
from kvfast.core.limits cimport KV_MAX_HEAD_DIM

from kvfast.core import slow_paths
from kvfast.errors import DimensionMismatchError, NonFiniteInputError
from kvfast.core.interchange import as_floats

cdef enum:
    # Codes of types in DLPack.
    FLOAT = 2
    BFLOAT = 4

cdef bint _LOGS = slow_paths.LOGS

cdef object _ndarray = np.ndarray

_DTYPES = {"f": KV_FLOAT32, "e": KV_FLOAT16, "H": KV_BFLOAT16}  # uint16: the bits of bfloat16


cdef class Rows:
    """A float array of shape (tokens, heads, dim), held open as a buffer."""

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.buffer)


cdef int dtype_of(object array) except -1:
    """Storage dtype of an array that `as_floats` returned."""
    return _DTYPES[array.dtype.char]


cdef bint rows_overlap(const kv_rows *rows) noexcept nogil:
    """Whether two rows share memory, or could: in slices of an array all steps of one axis lie within one step of the other."""
    cdef Py_ssize_t near = max(rows.head_stride, -rows.head_stride), inner = rows.heads
    cdef Py_ssize_t far = max(rows.token_stride, -rows.token_stride), outer = rows.tokens
    if near > far:
        near, inner, far, outer = far, outer, near, inner
    return inner > 1 and near < width_of(rows) or outer > 1 and far < (inner - 1) * near + width_of(rows)


cdef bint _open_tensor(Rows self, object array, bint writable) except -1:
    """Open a tensor of another library where it lies. False for what `open_rows` has to look at, or to refuse."""
    cdef DLTensor tensor
    cdef Py_ssize_t itemsize
    cdef bint is_contiguous
    if not read_tensor(array, &tensor, writable) or tensor.ndim != 3 or tensor.lanes != 1:
        return False
    if tensor.code == FLOAT and tensor.bits == 32:
        self.rows.dtype = KV_FLOAT32
    elif tensor.bits == 16 and (tensor.code == FLOAT or tensor.code == BFLOAT):
        self.rows.dtype = KV_FLOAT16 if tensor.code == FLOAT else KV_BFLOAT16
    else:
        return False
    itemsize, is_contiguous = tensor.bits // 8, tensor.strides == NULL
    self.rows.data = <char *>tensor.data + tensor.byte_offset
    self.rows.tokens, self.rows.heads, self.rows.dim = tensor.shape[0], tensor.shape[1], tensor.shape[2]
    self.rows.head_stride = itemsize * (tensor.shape[2] if is_contiguous else tensor.strides[1])
    self.rows.token_stride = itemsize * (tensor.shape[1] * tensor.shape[2] if is_contiguous else tensor.strides[0])
    if (self.rows.tokens == 0 or self.rows.heads == 0 or self.rows.dim == 0 or self.rows.dim > KV_MAX_HEAD_DIM
            or <Py_ssize_t>self.rows.data % itemsize
            or not is_contiguous and tensor.strides[2] != 1 and self.rows.dim > 1
            or writable and rows_overlap(&self.rows)):
        return False
    self.owner = array
    return True


cdef Rows open_output(object array, str name):
    """Open what is written to: an ndarray, `Rows`, or a tensor of another library."""
    cdef Rows self
    if isinstance(array, (np.ndarray, Rows)):
        return open_rows(array, name, True)
    self = Rows.__new__(Rows)
    if not _open_tensor(self, array, True):
        raise TypeError(f"{name} must be a NumPy array, or a tensor of three dimensions whose library has the C functions of DLPack "
                        f"1.2, writable, on the CPU, of float32, float16 or bfloat16, and its last axis contiguous, got "
                        f"{type(array).__name__}")
    return self


cdef Rows open_rows(object array, str name, bint writable=False, Py_ssize_t most=KV_MAX_HEAD_DIM):
    """Open `array` of shape (tokens, heads, dim), `most` dims at most. Rows that are not contiguous are copied; `Rows` are returned as
    they are."""
    if type(array) is Rows:
        return array
    cdef Rows self = Rows.__new__(Rows)
    cdef int flags = PyBUF_STRIDES | (PyBUF_WRITABLE if writable else 0)
    cdef int itemsize
    if type(array) is not _ndarray and not writable and _open_tensor(self, array, False):
        return self
    if type(array) is not _ndarray or array.dtype.char not in _DTYPES or not array.dtype.isnative:
        array = as_floats(array, name, not writable)
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} must be writable, got a read-only array")
    PyObject_GetBuffer(array, &self.buffer, flags)
    self.is_open = True
    self.rows.dtype = dtype_of(array)
    if self.buffer.ndim != 3:
        way = f": of (batch, num_heads, num_tokens, head_dim) pass {name}[0].transpose(1, 0, 2)" if self.buffer.ndim == 4 else ""
        raise DimensionMismatchError(f"{name} must have 3 dimensions (num_tokens, num_heads, head_dim), got shape {array.shape}{way}")
    itemsize = <int>self.buffer.itemsize
    if (self.buffer.strides[2] != itemsize and self.buffer.shape[2] > 1
            or <Py_ssize_t>self.buffer.buf % itemsize or self.buffer.strides[0] % itemsize
            or self.buffer.strides[1] % itemsize):
        if writable:
            raise ValueError(f"{name} must be aligned and its last axis contiguous, got strides {array.strides}")
        if _LOGS:
            slow_paths.log_gathered(name)
        return open_rows(np.array(array, order="C"), name, False, most)
    self.rows.data = <char *>self.buffer.buf
    self.rows.tokens = self.buffer.shape[0]
    self.rows.heads = self.buffer.shape[1]
    self.rows.dim = self.buffer.shape[2]
    self.rows.token_stride = self.buffer.strides[0]
    self.rows.head_stride = self.buffer.strides[1]
    if self.rows.tokens == 0 or self.rows.heads == 0 or self.rows.dim == 0:
        raise DimensionMismatchError(f"{name} must hold at least one token, head and dimension, "
                                     f"got shape {array.shape}")
    if self.rows.dim > most:
        raise DimensionMismatchError(f"head_dim of {name} must be at most {most}, "
                                     f"got shape {array.shape}")
    if writable and rows_overlap(&self.rows):
        raise ValueError(f"the rows of {name} must not overlap each other, got shape {array.shape} with strides {array.strides}")
    return self


def check_writable(array, str name):
    """Refuse what `open_rows` refuses to write to."""
    open_rows(array, name, True)


cdef Py_ssize_t find_unstorable(const kv_rows *rows, float limit, float *row, Py_ssize_t *index, kv_watch *watch,
                                const int64_t *slots=NULL) noexcept nogil:
    """Find the first element that is NaN or beyond the limit. Returns its row, token * heads + head, or -1 if there is none;
    writes the row to `row`, and the element's index in it to `index`. Tokens whose slot is below 0 are left out."""
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t i
    cdef const char *source
    for i in range(rows.tokens * rows.heads):
        if is_stopped(watch):
            break
        if slots != NULL and slots[i // rows.heads] < 0:
            continue
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


cdef int check_finite(Rows array, str name, float limit, str limit_of, const int64_t *slots=NULL) except -1:
    """Refuse NaN, infinity and magnitudes above `limit`, the largest that `limit_of` can store. See `find_unstorable`."""
    cdef float row[KV_MAX_HEAD_DIM]
    cdef Py_ssize_t bad, index
    cdef kv_watch memory
    cdef kv_watch *watch = watch_of(&memory, 4.0 * array.rows.tokens * array.rows.heads * array.rows.dim)
    with nogil:
        bad = find_unstorable(&array.rows, limit, row, &index, watch, slots)
    check_stopped(watch)
    if bad < 0:
        return 0
    value = row[index]
    position = (bad // array.rows.heads, bad % array.rows.heads, index)
    if value - value == 0:
        raise NonFiniteInputError(f"{name}{list(position)} is {value:g}, beyond the range of {limit_of} "
                                  f"(+-{limit:g})")
    raise NonFiniteInputError(f"{name} must be finite, got {value} at {list(position)}")


cdef Rows zero_unstorable(Rows array, float limit):
    """The same rows if all can be stored; else a copy as float32 in which those with NaN, infinity or magnitudes above `limit` are
    zeros."""
    cdef float row[KV_MAX_HEAD_DIM]
    cdef Py_ssize_t bad, index, token, head
    cdef const kv_kernels *kernels = active()
    cdef float[:, :, ::1] view
    with nogil:
        bad = find_unstorable(&array.rows, limit, row, &index, NULL)
    if bad < 0:
        return array
    copy = view = np.empty((array.rows.tokens, array.rows.heads, array.rows.dim), np.float32)
    for token in range(array.rows.tokens):
        for head in range(array.rows.heads):
            kernels.to_float[array.rows.dtype](array.rows.data + token * array.rows.token_stride + head * array.rows.head_stride,
                                               array.rows.dim, &view[token, head, 0])
            if kernels.find_unstorable(&view[token, head, 0], array.rows.dim, limit) >= 0:
                view[token, head] = 0
    return open_rows(copy, "array")


cdef bint overlap(const kv_rows *a, const kv_rows *b) noexcept nogil:
    """Whether the memory ranges of two arrays overlap."""
    cdef char *a_low = a.data
    cdef char *a_high = a.data
    cdef char *b_low = b.data
    cdef char *b_high = b.data
    _extent(a, &a_low, &a_high)
    _extent(b, &b_low, &b_high)
    return a_low < b_high and b_low < a_high


cdef void _extent(const kv_rows *rows, char **low, char **high) noexcept nogil:
    cdef Py_ssize_t tokens = (rows.tokens - 1) * rows.token_stride, heads = (rows.heads - 1) * rows.head_stride
    low[0] += min(tokens, 0) + min(heads, 0)
    high[0] += max(tokens, 0) + max(heads, 0) + width_of(rows)


cdef int check_apart(const kv_rows *out, const kv_rows *given, str name) except -1:
    """Refuse an `out` that shares memory with an input, which is still read when `out` is written."""
    if overlap(out, given):
        raise ValueError(f"out must not share memory with {name}")
    return 0
