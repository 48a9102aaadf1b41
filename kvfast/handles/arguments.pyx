# cython: language_level=3, boundscheck=False, cdivision=True
"""Rows and options of C, as those of attention and storage. What a function without the interpreter only refuses, others explain."""
import numpy as np

from libc.math cimport pow, sqrt
from libc.stdint cimport int64_t, intptr_t
from libc.string cimport memcpy, memset

from kvfast.attention.options cimport Options
from kvfast.attention.request cimport kv_request
from kvfast.core.arrays cimport Rows, kv_rows, overlap, rows_overlap
from kvfast.core.kernels cimport FAST, KV_BFLOAT16, KV_FLOAT32, UNSET
from kvfast.core.limits cimport KV_MAX_HEAD_DIM, KV_MAX_Q_HEADS, KV_MAX_TOKENS
from kvfast.core.threads cimport most_threads
from kvfast.handles.header cimport (KVFAST_BUSY, KVFAST_ERROR, KVFAST_FULL, KVFAST_INVALID, KVFAST_NO_LAYER, KVFAST_NO_MEMORY,
                                    KVFAST_NOT_FINITE, KVFAST_SHAPE, kvfast_options, kvfast_rows)

from kvfast.core.kernels import name_of_precision
from kvfast.core.text import shown
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


cdef Py_ssize_t itemsize_of(int dtype) noexcept nogil:
    return 4 if dtype == KV_FLOAT32 else 2


cdef bint convert(const kvfast_rows *given, kv_rows *rows) noexcept nogil:
    """Convert a caller's rows to kv_rows; False if they are invalid."""
    cdef Py_ssize_t itemsize
    if given == NULL or given.data == NULL or not KV_FLOAT32 <= given.dtype <= KV_BFLOAT16:
        return False
    itemsize = itemsize_of(given.dtype)
    if (given.num_tokens < 1 or given.num_heads < 1 or given.dim < 1 or given.dim > 2 * KV_MAX_HEAD_DIM
            or given.num_tokens > KV_MAX_TOKENS or given.num_heads > KV_MAX_Q_HEADS
            or <intptr_t>given.data % itemsize or given.token_stride % itemsize or given.head_stride % itemsize):
        return False
    rows.data, rows.dtype = <char *>given.data, given.dtype
    rows.tokens, rows.heads, rows.dim = given.num_tokens, given.num_heads, given.dim
    rows.head_stride = given.head_stride or given.dim * itemsize
    rows.token_stride = given.token_stride or given.num_heads * rows.head_stride
    return True


cdef bint convert_output(const kvfast_rows *given, kv_rows *rows) noexcept nogil:
    """`convert` for rows that are written to."""
    return convert(given, rows) and not rows_overlap(rows)


cdef object unfit(const kvfast_rows *given, str name):
    """The error for rows that `convert` or `Handle.split` refused."""
    if given == NULL or given.data == NULL:
        return ValueError(f"{name} must not be NULL")
    if not KV_FLOAT32 <= given.dtype <= KV_BFLOAT16:
        return TypeError(f"{name} must be KVFAST_FLOAT32, KVFAST_FLOAT16 or KVFAST_BFLOAT16, got dtype {given.dtype}")
    shape = given.num_tokens, given.num_heads, given.dim
    size = itemsize_of(given.dtype)
    if <intptr_t>given.data % size or given.token_stride % size or given.head_stride % size:
        return ValueError(f"{name} must be aligned to its elements of {size} bytes, got strides {given.token_stride} and "
                          f"{given.head_stride} at address {<intptr_t>given.data:#x}")
    return DimensionMismatchError(f"{name} must have a shape (num_tokens, num_heads, dim) that fits the cache, got {shape}")


cdef bint _are_floats(const float *values) noexcept nogil:
    return <intptr_t>values % <intptr_t>sizeof(float) == 0


cdef bint _touches(const float *lse, const kv_rows *q, const kv_rows *rows) noexcept nogil:
    """Whether the log-sum-exp of these queries would share memory with some rows."""
    cdef kv_rows sums
    sums.data, sums.dtype, sums.tokens, sums.heads, sums.dim = <char *>lse, KV_FLOAT32, q.tokens, q.heads, 1
    sums.head_stride, sums.token_stride = sizeof(float), q.heads * <Py_ssize_t>sizeof(float)
    return lse != NULL and overlap(&sums, rows)


cdef float _scale(const kvfast_options *options, const kv_rows *q, const kv_rows *rope_q) noexcept nogil:
    """The scale of the options, or the default of the caches."""
    if options.scale != 0:
        return options.scale
    if rope_q.data != NULL:
        return <float>pow(<double>(q.dim + rope_q.dim), -0.5)
    return <float>(1.0 / sqrt(<double>q.dim))


cdef bint request_of(const kvfast_options *options, const kv_rows *q, const kv_rows *rope_q, const kv_rows *out, int precision,
                     kv_request *request) noexcept nogil:
    """Convert the arguments of a call without spans, parents and chosen tokens; False if they are invalid, or if there are some.
    `precision`: that of the cache."""
    if options.num_spans or options.num_parents or options.num_chosen or not 0 <= options.precision <= <int>FAST:
        return False
    if options.chosen != NULL or options.chosen_heads or options.chosen_run or not -1 <= options.num_sink_tokens:
        return False
    if not _are_floats(options.sinks) or not _are_floats(options.alibi_slopes) or not _are_floats(options.lse):
        return False
    if _touches(options.lse, q, q) or _touches(options.lse, q, out) or (rope_q.dim and _touches(options.lse, q, rope_q)):
        return False
    memset(request, 0, sizeof(kv_request))
    request.q, request.out, request.lse = q[0], out[0], options.lse
    if rope_q.dim:
        request.rope_q = rope_q[0]
    request.scale, request.softcap = _scale(options, q, rope_q), options.softcap
    request.sinks, request.slopes = options.sinks, options.alibi_slopes
    request.window, request.num_splits, request.causal = options.sliding_window, options.num_splits, not options.not_causal
    request.num_sink_tokens = -1 if options.num_sink_tokens == 0 else max(options.num_sink_tokens, 0)
    request.precision = precision if options.precision == UNSET else options.precision
    request.threads, request.chunk = most_threads(options.num_threads), options.attention_chunk_size
    return 0 <= options.num_threads <= 1024 and (request.chunk == 0 or (request.chunk > 0 and request.causal and not rope_q.dim))


cdef Options options_of(const kvfast_options *options, Rows out, Rows q, Rows rope_q, list spans, list parents):
    """The options of Python; `spans` and `parents` are those of the sequence, or of each sequence of a batch."""
    cdef Py_ssize_t sinks = options.num_sink_tokens
    for name, fits in (("sinks", _are_floats(options.sinks)), ("alibi_slopes", _are_floats(options.alibi_slopes)),
                       ("lse", _are_floats(options.lse))):
        if not fits:
            raise ValueError(f"{name} must be aligned to its elements of {sizeof(float)} bytes")
    for name, touches in (("q", _touches(options.lse, &q.rows, &q.rows)), ("out", _touches(options.lse, &q.rows, &out.rows)),
                          ("q", rope_q.rows.dim and _touches(options.lse, &q.rows, &rope_q.rows))):
        if touches:
            raise ValueError(f"lse must not share memory with {name}: it takes {q.rows.tokens} x {q.rows.heads} floats of its own")
    return Options(
        out=out, scale=<float>_scale(options, &q.rows, &rope_q.rows), causal=not options.not_causal,
        softcap=options.softcap, sliding_window=options.sliding_window or None,
        num_sink_tokens=None if sinks == 0 else 0 if sinks == -1 else sinks,
        sinks=_per_head(options.sinks, q.rows.heads), alibi_slopes=_per_head(options.alibi_slopes, q.rows.heads),
        return_lse=options.lse != NULL, num_splits=options.num_splits, num_threads=options.num_threads or None,
        attention_chunk_size=options.attention_chunk_size or None, spans=spans, clamp_spans=options.clamp_spans != 0, parents=parents,
        chosen=_chosen(options, q.rows.tokens), chosen_run=options.chosen_run or 1, precision=_precision(options.precision))


cdef object _precision(int precision):
    """The precision of the options, as Python has it."""
    if not 0 <= precision <= <int>FAST:
        raise ValueError(f"precision must be 0, KVFAST_EXACT or KVFAST_FAST, got {precision}")
    return name_of_precision(precision)


cdef object _chosen(const kvfast_options *options, Py_ssize_t num_queries):
    """The chosen tokens of each query, as Python has them."""
    cdef Py_ssize_t count = options.num_chosen, heads = options.chosen_heads or 1
    cdef int64_t[:, :, ::1] view
    if count == 0 and options.chosen == NULL:
        if options.chosen_heads not in (0, 1) or options.chosen_run not in (0, 1):
            raise ValueError(f"chosen_heads and chosen_run are for chosen tokens, which are NULL, got {options.chosen_heads} and "
                             f"{options.chosen_run}")
        return None
    if options.chosen == NULL or count < 1 or heads < 1 or <intptr_t>options.chosen % sizeof(int64_t):
        raise ValueError(f"chosen must point to num_chosen aligned positions of each query and of each of its chosen_heads, got "
                         f"{count} of {heads} heads at address {<intptr_t>options.chosen:#x}")
    rows = view = np.empty((num_queries, heads, count), np.int64)
    memcpy(&view[0, 0, 0], options.chosen, rows.nbytes)
    return rows[:, 0] if heads == 1 else rows


cdef object _per_head(const float *values, Py_ssize_t heads):
    return None if values == NULL else [values[i] for i in range(heads)]


cdef object ids_of(const int64_t *token_ids, Py_ssize_t n):
    """The ids of tokens, as Python has them."""
    cdef int64_t[::1] view
    if n < 0 or (token_ids == NULL and n > 0):
        raise ValueError(f"token_ids must point to n of them, got {n} and {'NULL' if token_ids == NULL else 'an address'}")
    ids = view = np.empty(n, np.int64)
    if n:
        memcpy(&view[0], token_ids, ids.nbytes)
    return ids


cdef list integers(const Py_ssize_t *given, Py_ssize_t count, int width, str name):
    """An array of an option, as Python has it: `count` numbers, or rows of `width` numbers; None for an empty one."""
    if count < 0 or (given == NULL and count > 0):
        raise ValueError(f"{name} must point to num_{name} of them, got {count} and {'NULL' if given == NULL else 'an address'}")
    if width == 1:
        return [given[i] for i in range(count)] or None
    return [[given[width * i + j] for j in range(width)] for i in range(count)] or None


cdef list divided(list given, const Py_ssize_t *counts, Py_ssize_t num_sequences, str name):
    """An array of an option, cut into the parts of the sequences of a batch; None if there is none."""
    cdef Py_ssize_t i, at = 0
    cdef list parts = []
    if given is None and counts == NULL:
        return None
    numbers = [counts[i] for i in range(num_sequences)] if counts != NULL else None  # Python's, whose sum is exact
    if numbers is None or min(numbers) < 0 or sum(numbers) != len(given or ()):
        raise ValueError(f"{name[:-1]}_counts must have a number for each of the {num_sequences} sequences, together the "
                         f"{len(given or ())} {name} of the options, got {'NULL' if numbers is None else shown(numbers)}")
    if given is None:
        return None
    for number in numbers:
        parts.append(given[at:at + number])
        at += number
    return parts


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
