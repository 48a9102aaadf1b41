# cython: language_level=3, boundscheck=False, cdivision=True
"""INT8 and INT4 codecs for arrays: symmetric, one scale per row (per token per head)."""
import numpy as np

from libc.stdint cimport int8_t, uint8_t
from libc.stdlib cimport free, malloc

from kvfast.core.arrays cimport dtype_of
from kvfast.core.checks cimport check_count
from kvfast.core.interrupt cimport is_stopped, kv_watch
from kvfast.core.kernels cimport KV_FLOAT32, STREAMED_BYTES, active, kv_kernels
from kvfast.core.limits cimport KV_MAX_FLOAT32
from kvfast.core.threads cimport STATIC, for_each, gather, kv_team

from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError, NonFiniteInputError
from kvfast.core.interchange import aligned, as_array, as_float32, as_floats, check_unmasked

cdef enum:
    ROWS_PER_TASK = 256


ctypedef struct kv_codec_call:
    const kv_kernels *kernels
    int dtype                  # of the floats
    int bits
    Py_ssize_t rows
    Py_ssize_t dim             # floats per row
    Py_ssize_t width           # bytes of codes per row
    char *floats
    char *codes
    float *scales
    bint nontemporal           # floats are written past the caches


cdef enum:                     # flags of tasks that ended early
    NOT_FINITE = 1             # a row is not finite; the scale of the first such row is negative
    NO_MEMORY = 2


cdef int _quantize_rows(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """Quantise up to ROWS_PER_TASK rows."""
    cdef const kv_codec_call *call = <const kv_codec_call *>shared
    cdef Py_ssize_t first = index * ROWS_PER_TASK, last = min(first + ROWS_PER_TASK, call.rows), row, j
    cdef int ended = 0
    cdef Py_ssize_t half = call.width
    cdef int itemsize = 4 if call.dtype == KV_FLOAT32 else 2
    cdef int8_t *codes
    cdef uint8_t *packed
    cdef const float *values
    cdef char *scratch = NULL
    if call.bits == 4 or itemsize == 2:
        scratch = <char *>malloc(call.dim * 5 + 1)
        if scratch == NULL:
            return NO_MEMORY
    for row in range(first, last):
        if is_stopped(watch):
            break
        values = <const float *>(call.floats + row * call.dim * itemsize)
        if itemsize == 2:
            call.kernels.to_float[call.dtype](values, call.dim, <float *>scratch)
            values = <const float *>scratch
        codes = <int8_t *>(scratch + call.dim * 4) if call.bits == 4 else <int8_t *>(call.codes + row * call.width)
        call.scales[row] = call.kernels.quantize(values, call.dim, 7 if call.bits == 4 else 127, codes)
        if call.scales[row] < 0:
            ended = NOT_FINITE
            break
        if call.bits == 4:
            codes[call.dim] = 0  # the nibble after the last of an odd row
            packed = <uint8_t *>(call.codes + row * half)
            for j in range(half):
                packed[j] = <uint8_t>((codes[j] + 8) | (codes[half + j] + 8) << 4)
    free(scratch)
    return ended


cdef int _dequantize_rows(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    cdef const kv_codec_call *call = <const kv_codec_call *>shared
    cdef Py_ssize_t first = index * ROWS_PER_TASK, last = min(first + ROWS_PER_TASK, call.rows), row, j
    cdef Py_ssize_t half = call.width
    cdef int8_t *codes
    cdef const uint8_t *packed
    cdef float *floats = <float *>malloc((call.dim * sizeof(float) if call.nontemporal else 0)
                                         + (2 * half if call.bits == 4 else 1))
    cdef int8_t *scratch = <int8_t *>(floats + (call.dim if call.nontemporal else 0))
    if floats == NULL:
        return NO_MEMORY
    for row in range(first, last):
        if is_stopped(watch):
            break
        codes = <int8_t *>(call.codes + row * half)
        if call.bits == 4:
            packed = <const uint8_t *>codes
            for j in range(half):
                scratch[j] = <int8_t>((packed[j] & 15) - 8)
                scratch[half + j] = <int8_t>((packed[j] >> 4) - 8)
            codes = scratch
        if call.nontemporal:
            call.kernels.dequantize(codes, call.dim, call.scales[row], floats)
            call.kernels.store_nontemporal(floats, call.dim, <float *>call.floats + row * call.dim)
        else:
            call.kernels.dequantize(codes, call.dim, call.scales[row], <float *>call.floats + row * call.dim)
    if call.nontemporal:
        call.kernels.store_nontemporal(NULL, 0, NULL)
    free(floats)
    return 0


cdef char *_address(object array):
    return <char *><Py_ssize_t>array.ctypes.data


def quantize(x, bits=8):
    """Quantise rows to INT8 or INT4, symmetric, with one scale per row.

    Parameters
    ----------
    x : array of shape (..., head_dim), float32, float16 or bfloat16
        bfloat16 as ml_dtypes or as its bits in uint16.
    bits : {8, 4}

    Returns
    -------
    codes : ndarray
        int8 of x's shape, values -127..127; or uint8 of shape (..., ceil(head_dim / 2)): the low nibble of
        byte j is element j, the high one element j + ceil(head_dim / 2), each stored + 8, values -7..7.
    scales : ndarray of shape x.shape[:-1], float32
        max|row| / 127 or max|row| / 7; 0 for a row of zeros. An element is code * scale, off by at most
        half a scale.

    Raises
    ------
    NonFiniteInputError
        For NaN or infinity, with its position.
    """
    cdef kv_codec_call call
    cdef kv_team team
    cdef int ended
    if not isinstance(bits, (int, np.integer)) or bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, got {shown(bits)}")
    array = as_floats(x, "x")
    call.dtype = dtype_of(array)
    if array.ndim == 0 or array.size == 0:
        raise DimensionMismatchError(f"x must have shape (..., head_dim) and at least one element, got shape {array.shape}")
    array = aligned(array)
    call.kernels = active()
    call.bits = bits
    call.dim = array.shape[-1]
    call.rows = array.size // call.dim
    call.width = call.dim if bits == 8 else (call.dim + 1) // 2
    codes = np.empty(array.shape[:-1] + (call.width,), np.int8 if bits == 8 else np.uint8)
    scales = np.empty(array.shape[:-1], np.float32)
    call.floats, call.codes, call.scales = _address(array), _address(codes), <float *>_address(scales)
    gather(&team, None, <double>array.nbytes)
    ended = for_each(&team, _quantize_rows, &call, (call.rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK, STATIC)
    if ended & NO_MEMORY:
        raise MemoryError("cannot allocate the working memory of quantize")
    if ended:
        bad = np.flatnonzero(scales.reshape(-1) < 0)[0]  # tasks before that of this row have all of their scales
        row = as_float32(array.reshape(-1, call.dim)[bad], "x")
        column = int(np.flatnonzero(~np.isfinite(row))[0])
        position = [int(i) for i in np.unravel_index(bad, scales.shape)] + [column]
        raise NonFiniteInputError(f"x must be finite, got {row[column]} at {position}")
    return codes, scales


def dequantize(codes, scales, out=None, *, head_dim=None):
    """Floats of what `quantize` made.

    Parameters
    ----------
    codes : array of int8, shape (..., head_dim), or of uint8, shape (..., ceil(head_dim / 2))
        INT8 or packed INT4 codes.
    scales : array of float32, shape codes.shape[:-1]
    out : ndarray of shape (..., head_dim), float32, C-contiguous, optional
    head_dim : int, optional
        Of INT4 codes; the last dimension of `out`, or twice that of `codes`, when not given.

    Returns
    -------
    ndarray of shape (..., head_dim), float32
        `out` if given.

    Raises
    ------
    DimensionMismatchError, TypeError, ValueError
    NonFiniteInputError
        If an element is beyond float32, or a scale is not finite, with the position. `out` is written by then.
    """
    cdef kv_codec_call call
    cdef kv_team team
    codes, scales = aligned(as_array(codes, "codes")), aligned(as_array(scales, "scales"))
    if codes.dtype != np.int8 and codes.dtype != np.uint8:
        raise TypeError(f"codes must be int8 (INT8) or uint8 (packed INT4), got {codes.dtype}")
    if scales.dtype != np.float32:
        raise TypeError(f"scales must be float32, got {scales.dtype}")
    if codes.ndim == 0 or codes.size == 0 or scales.shape != codes.shape[:-1]:
        raise DimensionMismatchError(f"scales must have the shape of codes without its last dimension, "
                                     f"{codes.shape[:-1]}, got {scales.shape}")
    call.kernels = active()
    call.bits = 8 if codes.dtype == np.int8 else 4
    call.width = codes.shape[-1]
    if head_dim is not None:
        head_dim = check_count(head_dim, "head_dim", 1)
    else:
        head_dim = out.shape[-1] if isinstance(out, np.ndarray) and out.ndim else call.width * (2 if call.bits == 4 else 1)
    if (head_dim != call.width) if call.bits == 8 else ((head_dim + 1) // 2 != call.width):
        raise DimensionMismatchError(f"head_dim must fit {call.width} bytes of INT{call.bits} codes per row, "
                                     f"got {head_dim}")
    call.dim = head_dim
    call.rows = codes.size // call.width
    shape = codes.shape[:-1] + (head_dim,)
    check_unmasked(out, "out", "pass out.data")
    if out is None:
        out = np.empty(shape, np.float32)
    elif not isinstance(out, np.ndarray) or out.dtype != np.float32:
        raise TypeError(f"out must be a float32 ndarray, got {getattr(out, 'dtype', type(out).__name__)}")
    elif out.shape != shape:
        raise DimensionMismatchError(f"out must have shape {shape}, got {out.shape}")
    elif not out.flags.carray or np.may_share_memory(out, codes) or np.may_share_memory(out, scales):
        raise ValueError("out must be C-contiguous, aligned and writable, and must not share memory with codes or scales")
    call.floats, call.codes, call.scales = _address(out), _address(codes), <float *>_address(scales)
    call.nontemporal = out.nbytes >= STREAMED_BYTES
    gather(&team, None, <double>out.nbytes)
    if for_each(&team, _dequantize_rows, &call, (call.rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK, STATIC):
        raise MemoryError("cannot allocate the working memory of dequantize")
    if not np.abs(scales).max() * np.float64(127) <= KV_MAX_FLOAT32 and not np.isfinite(out).all():
        at = np.argwhere(~np.isfinite(out))[0].tolist()
        raise NonFiniteInputError(f"code times scale must be within float32, got {out[tuple(at)]} at {at}, of the scale "
                                  f"{scales[tuple(at[:-1])]}")
    return out
