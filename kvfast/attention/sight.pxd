"""What a query sees: sink tokens, a window, a chunk, spans, its ancestors in a tree; in each segment of a spliced sequence."""
from libc.stdint cimport uint64_t

from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.request cimport kv_request
from kvfast.attention.tasks cimport kv_query, kv_stretch
from kvfast.attention.workspace cimport kv_workspace
from kvfast.codec.blocks cimport kv_context
from kvfast.core.kernels cimport kv_transform


# Positions of a spliced sequence whose keys lie one after the other in one context.
ctypedef struct kv_segment:
    kv_context context
    kv_transform rotation      # of the queries, back to where its keys were rotated; cos NULL: none
    Py_ssize_t start           # its first position in the sequence
    Py_ssize_t first, last     # the same token's position in the context, and where it ends there
    bint is_newest             # the tokens since the last splice, which lie where they were computed


# A sequence of a call: its keys, and the queries of its last tokens. A single sequence is a batch of one.
ctypedef struct kv_member:
    kv_context context         # of its newest tokens
    Py_ssize_t length          # its tokens
    Py_ssize_t uncounted       # of these, tokens that `advance` has not counted
    Py_ssize_t held_from       # the first position from which on all tokens are there
    const kv_segment *segments  # or NULL: the context has all tokens
    Py_ssize_t num_segments
    Py_ssize_t first_query, num_queries
    const Py_ssize_t *stops    # (num_queries,) where what each query sees ends, or NULL
    bint is_foreign            # queries of another text, any number of them
    Py_ssize_t shareable       # number of first blocks that all of its queries see in full
    # The plan sets the rest.
    const Py_ssize_t *spans    # (num_spans, 2) in ascending order
    Py_ssize_t num_spans
    const uint64_t *ancestors  # of each draft of a tree, a bit for each draft, its own included
    kv_stretch *stretches       # of each draft, see `kv_query`
    Py_ssize_t num_drafts
    Py_ssize_t begin           # its own item begins here
    int parts                  # partial results before its own item


cdef bint open_sight(const kv_request *request, kv_workspace *workspace, kv_member *members, Py_ssize_t count,
                     kv_refusal *refusal) noexcept nogil
cdef void see(const kv_request *request, const kv_member *member, kv_query *queries) noexcept nogil
cdef int views_of(const kv_request *request, const kv_member *member, const kv_segment *segment) noexcept nogil
cdef void narrow(kv_query *query, const kv_segment *segment, bint as_sinks) noexcept nogil
cdef Py_ssize_t end_of(const kv_segment *segment) noexcept nogil

cdef enum:
    AS_SINKS = 1               # a view of a segment: of the sink tokens in it alone
    AS_WINDOW = 2              # or of all that is seen of it
