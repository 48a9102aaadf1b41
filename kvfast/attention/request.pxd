"""The first step of attention: what a call asks for, checked. `plan` cuts the work, and `run` does it."""
from kvfast.attention.options cimport kvfast_options
from kvfast.attention.refusals cimport kv_refusal
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport Rows, kv_rows


# What a call asks for, from Python and from C.
ctypedef struct kv_request:
    kvfast_options options     # with `scale` set, see `default_scale`
    kv_rows q                  # data NULL: `explain` asks, and nothing is read
    kv_rows sink_q             # queries for the sink tokens; data NULL: q
    kv_rows rope_q             # rotary part of the queries to latent rows; data NULL: none
    kv_rows out
    int threads                # that may work, at most
    bint is_batch
    const Py_ssize_t *span_counts    # of a batch: how many each sequence has, or NULL
    const Py_ssize_t *parent_counts


cdef class Request:
    """A request of Python, and the arrays that it points into."""
    cdef kv_request c
    cdef Rows q, sink_q, rope_q, target
    cdef readonly object out
    cdef object lse
    cdef int num_kv_heads
    cdef list arrays
    cdef str of                # what the queries read, in texts


cdef float default_scale(const kv_layout *layout) noexcept nogil
cdef void split_queries(const kv_layout *layout, kv_request *request) noexcept nogil
cdef bint fits(const kv_request *request, const kv_layout *layout, kv_refusal *refusal) noexcept nogil
cdef bint has_finite_queries(const kv_request *request, kv_refusal *refusal) noexcept nogil
cdef Request open_request(const kv_layout *layout, object q, dict options, str of, int precision=*, object sink_q=*,
                          Py_ssize_t num_sequences=*)
cdef Rows imagined_rows(object q, object num_q_heads, object dtype, const kv_layout *layout)
cdef int raise_refusal(const kv_refusal *refusal, Request request) except -1
