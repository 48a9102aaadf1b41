"""The first step of attention: the arguments of a call, checked. `plan` cuts the work, and `run` does it."""
from kvfast.attention.options cimport Options
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport Rows, kv_rows


# What a call asks for.
ctypedef struct kv_request:
    kv_rows q                  # data NULL: `explain` asks, and nothing is read
    kv_rows sink_q             # queries for the sink tokens; data NULL: q
    kv_rows rope_q             # rotary part of the queries to latent rows; data NULL: none
    kv_rows out
    float *lse                 # (tokens, num_q_heads) or NULL
    float scale
    float softcap              # 0: none
    const float *sinks         # (num_q_heads,) or NULL
    const float *slopes        # (num_q_heads,) or NULL
    Py_ssize_t window          # tokens that a query sees, itself included; 0: all
    Py_ssize_t num_sink_tokens  # first tokens that it sees besides; -1: those that the storage keeps
    Py_ssize_t chunk           # attention_chunk_size; 0: none
    Py_ssize_t num_splits      # 0: as many as are fast
    bint causal
    bint clamp_spans           # tokens of a span see no key before their window or chunk
    bint chooses               # each query reads tokens that were chosen for it
    int threads                # that may work, at most
    int precision              # a kv_precision


# Why a request does not fit a layout.
cdef enum kv_misfit:
    FITS
    DIM_OF_Q
    HEADS_OF_Q
    NUMBERS                    # of the options
    SHAPE_OF_OUT
    OUT_OVER_Q
    OUT_OVER_ROPE


cdef class Request:
    """A request, and the arrays that it points into."""
    cdef kv_request c
    cdef Rows q, sink_q, rope_q, target
    cdef object out, lse, sinks, slopes, num_threads
    cdef object spans, parents  # as given, of the sequence or of each sequence of a batch; see `Plan.use_spans` and `Plan.use_parents`
    cdef object chosen          # as given, for all queries; see `Plan.choose`
    cdef Py_ssize_t chosen_run


cdef kv_misfit misfit(const kv_request *request, const kv_layout *layout) noexcept nogil
cdef bint has_finite_queries(const kv_request *request) noexcept nogil
cdef Request open_request(const kv_layout *layout, object q, Options options, object sink_q=*, object rope_q=*)
cdef Rows imagined_rows(object q, object num_q_heads, object dtype, const kv_layout *layout)
