"""The second step of attention: which positions each query sees, and how these are cut into tasks."""
from libc.stdint cimport int64_t, uint64_t

from kvfast.attention.chosen cimport Chosen
from kvfast.attention.request cimport Request, kv_request
from kvfast.attention.tasks cimport kv_call, kv_given, kv_item, kv_keys, kv_query
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport kv_context, kv_layout


cdef class Plan:
    cdef kv_call call
    cdef kv_given given
    cdef kv_keys *keys         # of the items
    cdef Workspace workspace
    cdef object keepalive      # arrays that the items point into
    cdef Py_ssize_t work       # see `work_of`; more for many rows
    cdef Py_ssize_t context    # tokens of all contexts
    cdef Py_ssize_t uncounted  # of these, tokens that `advance` has not counted
    cdef bint wide             # whether some tasks have panels
    cdef int bad               # whether the output is not finite
    cdef const int64_t[:, ::1] spans   # starts and stops, for the next `ask`
    cdef Py_ssize_t num_spans
    cdef const uint64_t[::1] ancestors  # of each draft of a tree, a bit for each draft, its own included; for the next `ask`
    cdef Py_ssize_t num_drafts
    cdef Chosen chosen         # or None
    cdef bint packed           # whether packed codes keep the matrix unit from being used

    cdef bint begin(self, const kv_request *request, const kv_layout *layout, Py_ssize_t contexts) noexcept nogil
    cdef bint reserve_queries(self, Py_ssize_t queries, Py_ssize_t contexts) noexcept nogil
    cdef int use_spans(self, object spans, str name, Py_ssize_t length) except -1
    cdef int use_parents(self, object parents, str name, Py_ssize_t num_queries) except -1
    cdef int choose(self, Request request) except -1
    cdef void sees_tree(self, kv_query *query, Py_ssize_t tree, uint64_t ancestors) noexcept nogil
    cdef void sees(self, kv_query *query, Py_ssize_t position, Py_ssize_t length) noexcept nogil
    cdef void ask(self, Py_ssize_t length, Py_ssize_t first_query, Py_ssize_t num_queries) noexcept nogil
    cdef void add(self, const kv_context *context, Py_ssize_t first_query, Py_ssize_t num_queries, Py_ssize_t begin,
                 int part) noexcept nogil
    cdef kv_item *open_item(self, const kv_context *context) noexcept nogil
    cdef void join(self, Py_ssize_t first_item) noexcept nogil
    cdef void close(self, kv_item *item, Py_ssize_t end) noexcept nogil
    cdef Py_ssize_t deal(self, int threads) noexcept nogil
    cdef bint prepare(self, Workspace scratch, int threads) noexcept nogil


cdef Plan open_plan(Request request, const kv_layout *layout, Workspace workspace, Py_ssize_t contexts)
cdef object no_memory()
