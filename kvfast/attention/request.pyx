# cython: language_level=3, boundscheck=False, cdivision=True
"""The first step of attention: the arguments of a call, checked.

`misfit` needs no interpreter, so the C interface asks it, too. `open_request` converts Python's arguments, and raises for what
`misfit` finds.
"""
import math
from contextlib import suppress

import numpy as np

from libc.math cimport isfinite
from libc.string cimport memset

from kvfast.attention.options cimport Options
from kvfast.codec.blocks cimport kv_layout, values_of
from kvfast.codec.dtypes cimport parse_dtype
from kvfast.core.arrays cimport Rows, check_apart, check_finite, find_unstorable, kv_rows, open_output, open_rows, overlap
from kvfast.core.checks cimport check_count, check_number, check_per_head
from kvfast.core.kernels cimport KV_BFLOAT16
from kvfast.core.limits cimport KV_MAX_FLOAT32, KV_MAX_HEAD_DIM, KV_MAX_Q_HEADS, KV_MAX_TOKENS
from kvfast.core.threads cimport most_threads

from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError

cdef enum:
    MOST_SPLITS = 1 << 30


cdef bint _is_finite(const float *values, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count if values != NULL else 0):
        if not isfinite(values[i]):
            return False
    return True


cdef bint has_finite_queries(const kv_request *request) noexcept nogil:
    """Whether all queries are finite; `open_request` tells by `check_finite`, which can be interrupted."""
    cdef float row[KV_MAX_HEAD_DIM]
    cdef Py_ssize_t at
    return (find_unstorable(&request.q, KV_MAX_FLOAT32, row, &at, NULL) < 0
            and (request.rope_q.data == NULL or find_unstorable(&request.rope_q, KV_MAX_FLOAT32, row, &at, NULL) < 0))


cdef kv_misfit _misfit_of_q(const kv_rows *q, const kv_layout *layout) noexcept nogil:
    if q.dim != layout.k.head_dim:
        return DIM_OF_Q
    return HEADS_OF_Q if q.heads % layout.num_kv_heads else FITS


cdef kv_misfit misfit(const kv_request *request, const kv_layout *layout) noexcept nogil:
    """The first thing in a request that does not fit a layout, or FITS."""
    cdef const kv_rows *q = &request.q
    cdef const kv_rows *out = &request.out
    cdef kv_misfit found = _misfit_of_q(q, layout)
    if found != FITS:
        return found
    if (request.window < 0 or not 0 <= request.num_splits <= MOST_SPLITS or request.threads < 1 or not isfinite(request.scale)
            or not 0 <= request.softcap <= KV_MAX_FLOAT32 or not _is_finite(request.sinks, q.heads)
            or not _is_finite(request.slopes, q.heads)):
        return NUMBERS
    if q.data == NULL:
        return FITS
    if out.tokens != q.tokens or out.heads != q.heads or out.dim != values_of(layout).head_dim:
        return SHAPE_OF_OUT
    if overlap(out, q):
        return OUT_OVER_Q
    return OUT_OVER_ROPE if request.rope_q.data != NULL and overlap(out, &request.rope_q) else FITS


cdef Request open_request(const kv_layout *layout, object q, Options options, object sink_q=None, object rope_q=None):
    """Check the arguments of a call on a layout.

    `q` has the shape (tokens, heads, head_dim); for `explain`, it is `imagined_rows`. `sink_q` are the queries for the sink tokens, and
    `rope_q` the rotary part of queries to latent rows, (tokens, heads, rope_dim).
    """
    cdef Request self = Request.__new__(Request)
    cdef kv_request *c = &self.c
    cdef float[:, ::1] lse_view
    cdef const float[::1] view
    memset(c, 0, sizeof(kv_request))
    self.num_threads = given = options.num_threads  # `run_plan` checks it
    c.threads = most_threads(given if type(given) is int and 0 < given <= 1024 else 0)
    self.q = open_rows(q, "q")
    c.q = self.q.rows
    _refuse(self, _misfit_of_q(&c.q, layout), layout)
    c.scale = 1.0 / math.sqrt(c.q.dim) if options.scale is None else check_number(options.scale, "scale", False)
    if options.softcap is not None and (check_number(options.softcap, "softcap", False) != 0 or options.softcap != 0):
        c.softcap = check_number(options.softcap, "softcap", True)
    if options.sliding_window is not None:
        c.window = check_count(options.sliding_window, "sliding_window", 1)
    c.num_sink_tokens, c.chunk, c.causal = options.num_sink_tokens, options.attention_chunk_size, options.causal
    c.clamp_spans, self.spans, self.parents = options.clamp_spans, options.spans, options.parents
    c.chooses, self.chosen, self.chosen_run = options.chosen is not None, options.chosen, options.chosen_run
    c.precision = options.precision
    c.num_splits = check_count(options.num_splits, "num_splits", 0, MOST_SPLITS)
    if options.sinks is not None:
        self.sinks = view = check_per_head(options.sinks, "sinks", c.q.heads)
        c.sinks = &view[0]
    if options.alibi_slopes is not None:
        self.slopes = view = check_per_head(options.alibi_slopes, "alibi_slopes", c.q.heads)
        c.slopes = &view[0]
    if sink_q is not None:
        self.sink_q = open_rows(sink_q, "q")
        c.sink_q = self.sink_q.rows
    if rope_q is not None:
        self.rope_q = open_rows(rope_q, "q")
        c.rope_q = self.rope_q.rows
    if c.q.data != NULL:
        check_finite(self.q, "q", KV_MAX_FLOAT32, "float32")
        if rope_q is not None:
            check_finite(self.rope_q, "the rotary part of q", KV_MAX_FLOAT32, "float32")
        self.out = options.out
        if self.out is None:
            self.out = np.empty((c.q.tokens, c.q.heads, values_of(layout).head_dim), np.float32)
        self.target = open_output(self.out, "out")
        c.out = self.target.rows
    _refuse(self, misfit(c, layout), layout)
    if type(options.out) is np.ndarray and (np.may_share_memory(self.out, self.sinks) or np.may_share_memory(self.out, self.slopes)):
        raise ValueError("out must not share memory with sinks or alibi_slopes")
    if options.return_lse and c.q.data != NULL:
        self.lse = lse_view = np.empty((c.q.tokens, c.q.heads), np.float32)
        c.lse = &lse_view[0, 0]
    return self


cdef int _refuse(Request self, kv_misfit found, const kv_layout *layout) except -1:
    """Raise for what does not fit. Those of the NUMBERS that are beyond float32 are the only ones that have passed their conversion."""
    cdef const kv_rows *q = &self.c.q
    cdef const kv_rows *out = &self.c.out
    if found == DIM_OF_Q:
        raise DimensionMismatchError(f"q must have head_dim {layout.k.head_dim}, got {q.dim}")
    if found == HEADS_OF_Q:
        swapped = q.tokens % layout.num_kv_heads == 0
        raise DimensionMismatchError(f"the heads of q, its second axis, must be a multiple of the {layout.num_kv_heads} KV heads, got "
                                     f"{q.heads}" + (": if the first has them, pass q.transpose(1, 0, 2)" if swapped else ""))
    if found == NUMBERS:
        raise ValueError(f"scale and softcap must be within float32 (+-{KV_MAX_FLOAT32:g}), got {self.c.scale:g} and "
                         f"{self.c.softcap:g}")
    if found == SHAPE_OF_OUT:
        raise DimensionMismatchError(f"out must have shape ({q.tokens}, {q.heads}, {values_of(layout).head_dim}), "
                                     f"got ({out.tokens}, {out.heads}, {out.dim})")
    if found == OUT_OVER_Q:
        check_apart(out, q, "q")
    if found == OUT_OVER_ROPE:
        check_apart(out, &self.c.rope_q, "q")
    return 0


cdef Rows imagined_rows(object q, object num_q_heads, object dtype, const kv_layout *layout):
    """Rows without data, from an array, a shape or a number of tokens."""
    cdef Rows self = Rows.__new__(Rows), given
    if num_q_heads is not None:
        check_count(num_q_heads, "num_q_heads", 1, KV_MAX_Q_HEADS)
    if getattr(q, "ndim", 0):  # an array, of NumPy or another library
        given = open_rows(q, "q")
        self.rows = given.rows
        self.rows.data = NULL
        return self
    shape = q
    if not isinstance(q, (tuple, list)):
        shape = q, layout.num_kv_heads if num_q_heads is None else num_q_heads, layout.k.head_dim
    if len(shape) != 3:
        raise DimensionMismatchError(f"q must have 3 dimensions (num_tokens, num_heads, head_dim), got shape {shown(q)}")
    self.rows.tokens = check_count(shape[0], "the tokens of q", 1, KV_MAX_TOKENS)
    self.rows.heads = check_count(shape[1], "the heads of q", 1, KV_MAX_Q_HEADS)
    self.rows.dim = check_count(shape[2], "the head_dim of q", 1, 1 << 20)
    self.rows.dtype = KV_BFLOAT16 + 1
    with suppress(ValueError):  # its text names what caches store
        self.rows.dtype = parse_dtype(dtype)
    if self.rows.dtype > KV_BFLOAT16:
        raise ValueError(f"dtype is that of queries, float32, float16 or bfloat16, got {shown(dtype)}")
    return self
