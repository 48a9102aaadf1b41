# cython: language_level=3, boundscheck=False, cdivision=True
"""The first step of attention: what a call asks for, checked.

`fits` needs no interpreter, so the C interface asks it, too. `open_request` converts Python's arguments, and raises for what `fits`
finds.
"""
from contextlib import suppress

import numpy as np

from libc.math cimport isfinite, pow, sqrt
from libc.stdint cimport int64_t, intptr_t
from libc.string cimport memset

from kvfast.attention.options cimport KVFAST_INVARIANT, kvfast_options
from kvfast.attention.refusals cimport BAD_QUERIES, DIMENSION, MEMORY, NOT_FINITE, VALUE, kv_refusal, refuse
from kvfast.codec.blocks cimport kv_layout, values_of
from kvfast.codec.encode cimport split_latent
from kvfast.codec.dtypes cimport dtype_limit, dtype_name, parse_dtype
from kvfast.core.arrays cimport Rows, check_finite, find_unstorable, kv_rows, open_output, open_rows, overlap
from kvfast.core.checks cimport check_count, check_flag, check_integers, check_number, check_vector
from kvfast.core.kernels cimport KV_BFLOAT16, KV_FLOAT32, UNSET, parse_precision
from kvfast.core.limits cimport KV_LANES, KV_MAX_FLOAT32, KV_MAX_HEAD_DIM, KV_MAX_Q_HEADS, KV_MAX_TOKENS
from kvfast.core.threads cimport most_threads

from kvfast.attention.options import AttendOptions
from kvfast.core.interchange import as_array
from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError, NonFiniteInputError

cdef enum:
    MOST_SPLITS = 1 << 30
    MOST_THREADS = 1024


cdef float default_scale(const kv_layout *layout) noexcept nogil:
    """``head_dim ** -0.5``; of latent rows, whose rotary part counts."""
    if layout.latent:
        return <float>pow(<double>(layout.k.head_dim + layout.v.head_dim), -0.5)
    return <float>(1.0 / sqrt(<double>layout.k.head_dim))


cdef void split_queries(const kv_layout *layout, kv_request *request) noexcept nogil:
    """Split queries to latent rows from their rotary part."""
    if layout.latent:
        split_latent(layout, &request.q, &request.rope_q)
        if request.rope_q.dim == 0:
            request.rope_q.data = NULL


cdef bint _are_finite(const float *values, Py_ssize_t count, kv_refusal *refusal) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count if values != NULL else 0):
        refusal.value = values[i]
        if not isfinite(values[i]):
            return False
    return True


cdef bint has_finite_queries(const kv_request *request, kv_refusal *refusal) noexcept nogil:
    """Whether all queries are finite; `open_request` tells by `check_finite`, which can be interrupted."""
    cdef float row[KV_MAX_HEAD_DIM]
    cdef Py_ssize_t at
    return ((find_unstorable(&request.q, KV_MAX_FLOAT32, row, &at, NULL) < 0
             and (request.rope_q.data == NULL or find_unstorable(&request.rope_q, KV_MAX_FLOAT32, row, &at, NULL) < 0))
            or refuse(refusal, BAD_QUERIES, b"q must be finite"))


cdef bint _fits_q(const kv_request *request, const kv_layout *layout, kv_refusal *refusal) noexcept nogil:
    cdef const kv_rows *q = &request.q
    if layout.latent and q.dim + request.rope_q.dim != layout.k.head_dim + layout.v.head_dim:
        return refuse(refusal, DIMENSION, b"q must have shape (num_tokens, num_q_heads, {0} + {1}), got ({2}, {3}, {4})",
                      layout.k.head_dim, layout.v.head_dim, q.tokens, q.heads, q.dim)
    if q.dim != layout.k.head_dim:
        return refuse(refusal, DIMENSION, b"q must have head_dim {0}, got {1}", layout.k.head_dim, q.dim)
    if q.heads % layout.num_kv_heads:
        return refuse(refusal, DIMENSION, b"the heads of q, its second axis, must be a multiple of the {0} KV heads, got {1}{swapped}",
                      layout.num_kv_heads, q.heads, q.tokens % layout.num_kv_heads == 0)
    return True


cdef bint _fit_arrays(const kvfast_options *o, const kv_layout *layout, Py_ssize_t heads, kv_refusal *refusal) noexcept nogil:
    """The arrays of the options, before anything in them is read."""
    if <intptr_t>o.sinks % <intptr_t>sizeof(float):
        return refuse(refusal, VALUE, b"sinks must be aligned to its elements of 4 bytes")
    if <intptr_t>o.alibi_slopes % <intptr_t>sizeof(float):
        return refuse(refusal, VALUE, b"alibi_slopes must be aligned to its elements of 4 bytes")
    if <intptr_t>o.lse % <intptr_t>sizeof(float):
        return refuse(refusal, VALUE, b"lse must be aligned to its elements of 4 bytes")
    if not _are_finite(o.sinks, heads, refusal):
        return refuse(refusal, NOT_FINITE, b"sinks must be finite, got {value}")
    if not _are_finite(o.alibi_slopes, heads, refusal):
        return refuse(refusal, NOT_FINITE, b"alibi_slopes must be finite, got {value}")
    if not 0 <= o.num_spans <= KV_MAX_TOKENS or (o.spans == NULL and o.num_spans > 0):
        return refuse(refusal, VALUE, b"spans must point to num_spans of them, got {0} and {where}", o.num_spans, <Py_ssize_t>o.spans)
    if not 0 <= o.num_parents <= KV_MAX_TOKENS or (o.tree_parents == NULL and o.num_parents > 0):
        return refuse(refusal, VALUE, b"tree_parents must point to num_parents of them, got {0} and {where}", o.num_parents,
                      <Py_ssize_t>o.tree_parents)
    if o.indices == NULL and o.num_indices == 0:
        if not 0 <= o.index_heads <= 1 or not 0 <= o.index_block <= 1:
            return refuse(refusal, VALUE, b"index_heads and index_block are for chosen tokens, which are NULL, got {0} and {1}",
                          o.index_heads, o.index_block)
        return True
    if (o.indices == NULL or not 1 <= o.num_indices <= KV_MAX_TOKENS or o.index_heads < 0
            or <intptr_t>o.indices % <intptr_t>sizeof(int64_t)):
        return refuse(refusal, VALUE, b"indices must point to num_indices aligned positions of each query and of each of its "
                      b"index_heads, got {0} of {1} heads at address {2:#x}", o.num_indices, max(o.index_heads, 1),
                      <Py_ssize_t>o.indices)
    if o.index_heads > 1 and o.index_heads != layout.num_kv_heads:
        return refuse(refusal, DIMENSION, b"index_heads must be 0, 1 or the {0} KV heads of the cache, got {1}", layout.num_kv_heads,
                      o.index_heads)
    if o.index_block not in (0, 1, KV_LANES):
        return refuse(refusal, VALUE, b"index_block must be 1, or with indices 16, got {0}", o.index_block)
    if o.num_parents or o.alibi_slopes != NULL:
        return refuse(refusal, VALUE, b"indices need tree_parents=None and alibi_slopes=None: a query sees chosen positions alone")
    return True


cdef bint _fit_numbers(const kvfast_options *o, kv_refusal *refusal) noexcept nogil:
    refusal.value = o.scale
    if not isfinite(o.scale):
        return refuse(refusal, VALUE, b"scale must be a finite number of float32, got {value:g}")
    refusal.value = o.softcap
    if not 0 <= o.softcap <= KV_MAX_FLOAT32:
        return refuse(refusal, VALUE, b"softcap must be a positive finite number of float32, got {value:g}")
    if o.sliding_window < 0:
        return refuse(refusal, VALUE, b"sliding_window must be at least 1, got {0}", o.sliding_window)
    if o.num_sink_tokens < -1:
        return refuse(refusal, VALUE, b"num_sink_tokens must be at least 0, got {0}", o.num_sink_tokens)
    if not 0 <= o.num_splits <= MOST_SPLITS:
        return refuse(refusal, VALUE, b"num_splits must be between 0 and {1}, got {0}", o.num_splits, MOST_SPLITS)
    if not 0 <= o.num_threads <= MOST_THREADS:
        return refuse(refusal, VALUE, b"num_threads must be between 1 and 1024, got {0}", o.num_threads)
    if o.attention_chunk_size < 0:
        return refuse(refusal, VALUE, b"attention_chunk_size must be at least 1, got {0}", o.attention_chunk_size)
    if not 0 <= o.precision <= KVFAST_INVARIANT:
        return refuse(refusal, VALUE, b"precision must be 0, KVFAST_EXACT, KVFAST_FAST or KVFAST_INVARIANT, got {0}", o.precision)
    if o.not_causal and o.attention_chunk_size:
        return refuse(refusal, VALUE, b"attention_chunk_size needs causal=True, got causal=False")
    if o.not_causal and o.num_spans:
        return refuse(refusal, VALUE, b"spans need causal=True, got causal=False, with which every query sees all keys")
    if o.not_causal and o.num_parents:
        return refuse(refusal, VALUE, b"tree_parents need causal=True and spans=None: a draft sees its ancestors alone")
    return True


cdef bint fits(const kv_request *request, const kv_layout *layout, kv_refusal *refusal) noexcept nogil:
    """Whether a request fits a layout. Queries are not read, see `has_finite_queries`."""
    cdef const kv_rows *q = &request.q
    cdef const kv_rows *out = &request.out
    cdef kv_rows sums
    if not (_fits_q(request, layout, refusal) and _fit_numbers(&request.options, refusal)
            and _fit_arrays(&request.options, layout, q.heads, refusal)):
        return False
    if q.data == NULL:
        return True
    if out.tokens != q.tokens or out.heads != q.heads or out.dim != values_of(layout).head_dim:
        return refuse(refusal, DIMENSION, b"out must have shape ({0}, {1}, {2}), got ({3}, {4}, {5})", q.tokens, q.heads,
                      values_of(layout).head_dim, out.tokens, out.heads, out.dim)
    if overlap(out, q) or (request.rope_q.data != NULL and overlap(out, &request.rope_q)):
        return refuse(refusal, VALUE, b"out must not share memory with q")
    if request.options.lse != NULL:
        sums.data, sums.dtype, sums.tokens, sums.heads, sums.dim = <char *>request.options.lse, KV_FLOAT32, q.tokens, q.heads, 1
        sums.head_stride, sums.token_stride = sizeof(float), q.heads * <Py_ssize_t>sizeof(float)
        if overlap(&sums, q) or (request.rope_q.data != NULL and overlap(&sums, &request.rope_q)):
            return refuse(refusal, VALUE, b"lse must not share memory with q: it takes {0} x {1} floats of its own", q.tokens, q.heads)
        if overlap(&sums, out):
            return refuse(refusal, VALUE, b"lse must not share memory with out: it takes {0} x {1} floats of its own", q.tokens,
                          q.heads)
    return True


cdef int _check_dimensions(const kv_layout *layout, object shape) except -1:
    if len(shape) != 3:
        dims = f"{layout.k.head_dim} + {layout.v.head_dim}" if layout.latent else "head_dim"
        raise DimensionMismatchError(f"q must have 3 dimensions (num_tokens, num_q_heads, {dims}), got shape {shown(shape)}")
    return 0


cdef Rows _open_queries(const kv_layout *layout, object q):
    if layout.latent:
        _check_dimensions(layout, getattr(q, "shape", (0, 0, 0)))
    return open_rows(q, "q", False, (1 + layout.latent) * KV_MAX_HEAD_DIM)


cdef Request open_request(const kv_layout *layout, object q, dict options, str of, int precision=UNSET, object sink_q=None,
                          Py_ssize_t num_sequences=-1):
    """Check the arguments of a call on a layout: its queries and `AttendOptions`. `of`: what it reads, for texts; `precision`: that of
    calls that name none.

    `q` has the shape (tokens, heads, head_dim), with the rotary part for latent rows; for `explain`, it is `imagined_rows`. `sink_q`
    are the queries for the sink tokens. `num_sequences`: those of a batch.
    """
    cdef Request self = Request.__new__(Request)
    cdef kv_request *c = &self.c
    cdef kv_refusal refusal
    cdef bint wants_sums = False
    cdef float[:, ::1] lse_view
    memset(c, 0, sizeof(kv_request))
    self.q, self.arrays, self.of = _open_queries(layout, q), [], of
    c.q, c.is_batch, self.num_kv_heads = self.q.rows, num_sequences >= 0, layout.num_kv_heads
    split_queries(layout, c)
    if not _fits_q(c, layout, &refusal):
        raise_refusal(&refusal, self)
    c.options.scale, c.options.precision = default_scale(layout), precision
    for name, value in options.items():
        if name == "return_lse":
            wants_sums = check_flag(value, "return_lse")
        else:
            _set_option(self, name, value, num_sequences)
    c.threads = most_threads(c.options.num_threads)
    if c.options.indices == NULL and c.options.index_block > 1:
        raise ValueError(f"index_block must be 1, or with indices {KV_LANES}, got {c.options.index_block}")
    if sink_q is not None:
        self.sink_q = open_rows(sink_q, "q")
        c.sink_q = self.sink_q.rows
    if c.q.data != NULL:
        _check_queries(self)
        if self.out is None:
            self.out = np.empty((c.q.tokens, c.q.heads, values_of(layout).head_dim), np.float32)
        self.target = open_output(self.out, "out")
        c.out = self.target.rows
        if wants_sums:
            self.lse = lse_view = np.empty((c.q.tokens, c.q.heads), np.float32)
            c.options.lse = &lse_view[0, 0]
    if not fits(c, layout, &refusal):
        raise_refusal(&refusal, self)
    if "out" in options:
        _check_out(self)
    return self


cdef int _check_queries(Request self) except -1:
    """Refuse queries that are not finite, and say where."""
    cdef Rows part = Rows.__new__(Rows)
    part.rows = self.c.q
    check_finite(part, "q", KV_MAX_FLOAT32, "float32")
    if self.c.rope_q.data != NULL:
        part.rows = self.c.rope_q
        check_finite(part, "the rotary part of q", KV_MAX_FLOAT32, "float32")
    return 0


cdef int _check_out(Request self) except -1:
    for array in self.arrays if type(self.out) is np.ndarray else ():
        if np.may_share_memory(self.out, array):
            raise ValueError("out must not share memory with sinks or alibi_slopes")
    return 0


cdef int _set_option(Request self, str name, object value, Py_ssize_t num_sequences) except -1:
    """Set an option from its keyword. None keeps its default, but of truth values and of numbers that have a value by default."""
    cdef kvfast_options *o = &self.c.options
    if name == "causal":
        o.not_causal = not check_flag(value, "causal")
    elif name == "clamp_spans":
        o.clamp_spans = check_flag(value, "clamp_spans")
    elif name == "num_splits":
        o.num_splits = check_count(value, "num_splits", 0, MOST_SPLITS)
    elif name == "index_block":
        o.index_block = <int>min(check_count(value, "index_block", 1), <Py_ssize_t>KV_MAX_TOKENS)
    elif value is None and name in AttendOptions.__optional_keys__:
        return 0
    elif name == "out":
        self.out = value
    elif name == "num_threads":
        o.num_threads = <int>check_count(value, "num_threads", 1, MOST_THREADS)
    elif name == "scale":
        o.scale = check_number(value, "scale", False)
    elif name == "precision":
        o.precision = parse_precision(value)
    elif name == "sliding_window":
        o.sliding_window = check_count(value, "sliding_window", 1)
    elif name == "num_sink_tokens":
        o.num_sink_tokens = check_count(value, "num_sink_tokens", 0) or -1
    elif name == "attention_chunk_size":
        o.attention_chunk_size = check_count(value, "attention_chunk_size", 1)
    elif name == "softcap":
        if check_number(value, "softcap", False) != 0 or value != 0:
            o.softcap = check_number(value, "softcap", True)
    elif name == "sinks":
        o.sinks = _floats_of(self, check_vector(value, "sinks", self.c.q.heads, ", one per query head"))
    elif name == "alibi_slopes":
        o.alibi_slopes = _floats_of(self, check_vector(value, "alibi_slopes", self.c.q.heads, ", one per query head"))
    elif name == "indices":
        _set_chosen(self, value)
    elif name == "spans":
        o.spans = _integers_of(self, value, "spans", 2, num_sequences, &o.num_spans, &self.c.span_counts)
    elif name == "tree_parents":
        o.tree_parents = _integers_of(self, value, "tree_parents", 1, num_sequences, &o.num_parents, &self.c.parent_counts)
    else:
        raise TypeError(f"attend takes no option {shown(name)}: see AttendOptions")
    return 0


cdef const float *_floats_of(Request self, object array) except? NULL:
    cdef const float[::1] view = array
    self.arrays.append(array)
    return &view[0]


cdef int _set_chosen(Request self, object value) except -1:
    """Positions of each query, in ascending order."""
    cdef const int64_t[:, :, ::1] view
    array = as_array(value, "indices")
    shape = array.shape
    if array.ndim == 2:
        array = array[:, None]
    if array.ndim != 3 or array.shape[0] != self.c.q.tokens or array.shape[1] not in (1, self.num_kv_heads) or array.shape[2] == 0:
        raise DimensionMismatchError(f"indices must have shape ({self.c.q.tokens}, k), or ({self.c.q.tokens}, {self.num_kv_heads}, k) "
                                     f"with a choice for each KV head, got {shape}")
    array = check_integers(array, "indices", np.int64, 3)
    array.sort(axis=2)
    view = array
    self.arrays.append(array)
    self.c.options.indices, self.c.options.num_indices, self.c.options.index_heads = &view[0, 0, 0], view.shape[2], <int>view.shape[1]
    return 0


cdef const Py_ssize_t *_integers_of(Request self, object value, str name, int width, Py_ssize_t num_sequences, Py_ssize_t *count,
                                    const Py_ssize_t **counts) except? NULL:
    """An option of rows of `width` integers, or for a batch of a list of them, with one entry for each sequence."""
    cdef const Py_ssize_t[::1] view
    if num_sequences < 0:
        rows = _rows_of(value, name, width)
    else:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a list with one entry per sequence, got {type(value).__name__}")
        if len(value) != num_sequences:
            raise DimensionMismatchError(f"{name} must have one entry for each of the {num_sequences} sequences, got {len(value)}")
        parts = [_rows_of(() if one is None else one, f"{name}[{i}]", width) for i, one in enumerate(value)]
        numbers = view = np.array([len(part) // width for part in parts], np.intp)
        self.arrays.append(numbers)
        counts[0] = &view[0]
        rows = np.concatenate(parts)
    count[0] = len(rows) // width
    if count[0] == 0:
        return NULL
    view = rows
    self.arrays.append(rows)
    return &view[0]


cdef object _rows_of(object value, str name, int width):
    """Rows of integers, one after the other."""
    given = as_array(value, name)
    if given.shape[:1] == (0,):
        return np.empty(0, np.intp)
    given = check_integers(given, name, np.intp, width)
    if width > 1 and given.shape[1] != width:
        raise DimensionMismatchError(f"{name} must have shape (num_spans, 2), a start and a stop of each, got {given.shape}")
    return given.reshape(-1)


cdef dict _ERRORS = {VALUE: ValueError, DIMENSION: DimensionMismatchError, NOT_FINITE: NonFiniteInputError,
                     BAD_QUERIES: NonFiniteInputError, MEMORY: MemoryError}


cdef object _counts_at(Py_ssize_t address, Py_ssize_t count):
    return "NULL" if address == 0 else shown([(<const Py_ssize_t *>address)[i] for i in range(count)])


cdef int raise_refusal(const kv_refusal *refusal, Request request) except -1:
    """Raise the error of a refusal, whose text has names for what depends on its numbers, or on the request."""
    cdef int dtype = request.c.out.dtype
    n = [refusal.numbers[i] for i in range(6)]
    if refusal.error == BAD_QUERIES:
        _check_queries(request)
    raise _ERRORS[<int>refusal.error](refusal.text.decode().format(
        *n, value=refusal.value, of=request.of, member=refusal.member, at=f"[{refusal.member}]" if refusal.member >= 0 else "",
        dtype=f"{dtype_name(dtype)} (+-{dtype_limit(dtype):g})", where="an address" if n[1] else "NULL",
        counts=_counts_at(n[2], n[0]) if b"{counts}" in refusal.text else "",
        swapped=": if the first has them, pass q.transpose(1, 0, 2)" if n[2] else "",
        query=f"query {n[0]}" + (f" in KV head {n[1]}" if n[1] >= 0 else ""), first=f", and those before {n[5]}" if n[5] else "",
        multiples=f"multiples of {n[3]}" if n[3] > 1 else "positions"))


cdef Rows imagined_rows(object q, object num_q_heads, object dtype, const kv_layout *layout):
    """Rows without data, from an array, a shape or a number of tokens."""
    cdef Rows self = Rows.__new__(Rows), given
    cdef Py_ssize_t dim = layout.k.head_dim + layout.v.head_dim if layout.latent else layout.k.head_dim
    if num_q_heads is not None:
        check_count(num_q_heads, "num_q_heads", 1, KV_MAX_Q_HEADS)
    if getattr(q, "ndim", 0):  # an array, of NumPy or another library
        given = _open_queries(layout, q)
        self.rows = given.rows
        self.rows.data = NULL
        return self
    shape = q
    if not isinstance(q, (tuple, list)):
        shape = q, layout.num_kv_heads if num_q_heads is None else num_q_heads, dim
    _check_dimensions(layout, shape)
    self.rows.tokens = check_count(shape[0], "the tokens of q", 1, KV_MAX_TOKENS)
    self.rows.heads = check_count(shape[1], "the heads of q", 1, KV_MAX_Q_HEADS)
    self.rows.dim = check_count(shape[2], "the head_dim of q", 1, 1 << 20)
    self.rows.dtype = KV_BFLOAT16 + 1
    with suppress(ValueError):  # its text names what caches store
        self.rows.dtype = parse_dtype(dtype)
    if self.rows.dtype > KV_BFLOAT16:
        raise ValueError(f"dtype is that of queries, float32, float16 or bfloat16, got {shown(dtype)}")
    return self
