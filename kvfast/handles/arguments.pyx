# cython: language_level=3, boundscheck=False, cdivision=True
"""Rows of C as rows of attention and storage, and errors of Python as codes of C."""
import numpy as np

from libc.stdint cimport int64_t, intptr_t
from libc.string cimport memcpy

from kvfast.core.arrays cimport kv_rows
from kvfast.core.kernels cimport KV_BFLOAT16, KV_FLOAT32
from kvfast.core.limits cimport KV_MAX_HEAD_DIM, KV_MAX_Q_HEADS, KV_MAX_TOKENS
from kvfast.handles.header cimport (KVFAST_BUSY, KVFAST_ERROR, KVFAST_FULL, KVFAST_INVALID, KVFAST_NO_LAYER, KVFAST_NO_MEMORY,
                                    KVFAST_NOT_FINITE, KVFAST_SHAPE, kvfast_rows)

from kvfast.errors import CacheFullError, DimensionMismatchError, NonFiniteInputError

_CODES = (
    (CacheFullError, KVFAST_FULL),
    (DimensionMismatchError, KVFAST_SHAPE),
    (NonFiniteInputError, KVFAST_NOT_FINITE),
    (MemoryError, KVFAST_NO_MEMORY),
    (IndexError, KVFAST_NO_LAYER),
    ((ValueError, TypeError), KVFAST_INVALID),
    (RuntimeError, KVFAST_BUSY),
)


cdef Py_ssize_t _itemsize_of(int dtype) noexcept nogil:
    return 4 if dtype == KV_FLOAT32 else 2


cdef bint convert(const kvfast_rows *given, kv_rows *rows) noexcept nogil:
    """Convert a caller's rows to kv_rows; False if they are invalid."""
    cdef Py_ssize_t itemsize
    if given == NULL or given.data == NULL or not KV_FLOAT32 <= given.dtype <= KV_BFLOAT16:
        return False
    itemsize = _itemsize_of(given.dtype)
    if (given.num_tokens < 1 or given.num_heads < 1 or given.dim < 1 or given.dim > 2 * KV_MAX_HEAD_DIM
            or given.num_tokens > KV_MAX_TOKENS or given.num_heads > KV_MAX_Q_HEADS
            or <intptr_t>given.data % itemsize or given.token_stride % itemsize or given.head_stride % itemsize):
        return False
    rows.data, rows.dtype = <char *>given.data, given.dtype
    rows.tokens, rows.heads, rows.dim = given.num_tokens, given.num_heads, given.dim
    rows.head_stride = given.head_stride or given.dim * itemsize
    rows.token_stride = given.token_stride or given.num_heads * rows.head_stride
    return True


cdef object unfit(const kvfast_rows *given, str name):
    """The error for rows that `convert` refused, or that have another shape than the cache."""
    if given == NULL or given.data == NULL:
        return ValueError(f"{name} must not be NULL")
    if not KV_FLOAT32 <= given.dtype <= KV_BFLOAT16:
        return TypeError(f"{name} must be KVFAST_FLOAT32, KVFAST_FLOAT16 or KVFAST_BFLOAT16, got dtype {given.dtype}")
    shape = given.num_tokens, given.num_heads, given.dim
    size = _itemsize_of(given.dtype)
    if <intptr_t>given.data % size or given.token_stride % size or given.head_stride % size:
        return ValueError(f"{name} must be aligned to its elements of {size} bytes, got strides {given.token_stride} and "
                          f"{given.head_stride} at address {<intptr_t>given.data:#x}")
    return DimensionMismatchError(f"{name} must have a shape (num_tokens, num_heads, dim) that fits the cache, got {shape}")


cdef object ids_of(const int64_t *token_ids, Py_ssize_t n):
    """The ids of tokens, as Python has them."""
    cdef int64_t[::1] view
    if n < 0 or (token_ids == NULL and n > 0):
        raise ValueError(f"token_ids must point to n of them, got {n} and {'NULL' if token_ids == NULL else 'an address'}")
    ids = view = np.empty(n, np.int64)
    if n:
        memcpy(&view[0], token_ids, ids.nbytes)
    return ids


cdef int code_of(object error, char *text, Py_ssize_t room) noexcept:
    """The code of an error, whose text is written to `text`."""
    cdef bytes told
    try:  # some errors of Python's own, as of Ctrl-C, have no text
        told = (str(error) or type(error).__name__).encode(errors="replace")[:room - 1]
    except BaseException:
        told = b"out of memory"
    memcpy(text, <const char *>told, len(told) + 1)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return KVFAST_ERROR
