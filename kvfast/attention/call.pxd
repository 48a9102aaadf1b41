"""One call of `attend`: checks its arguments and cuts its work into tasks."""
from kvfast.attention.options cimport Options
from kvfast.attention.tiles cimport kv_call, kv_item, kv_query
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport kv_context, kv_store
from kvfast.core.arrays cimport Rows, kv_rows


cdef class AttendCall:
    cdef kv_call call
    cdef Options options
    cdef Workspace workspace
    cdef Rows q, sink_q, rope_q, result
    cdef object out, lse, sinks, slopes
    cdef object keepalive      # arrays that the items point into
    cdef Py_ssize_t window, num_splits, work, context
    cdef Py_ssize_t uncounted  # tokens of the contexts that `advance` has not counted
    cdef int threads           # that may work, at most
    cdef bint wide
    cdef int bad               # whether the output is not finite
    cdef bint packed           # whether packed codes keep the matrix unit from being used

    cdef bint begin(self, const kv_store *store, Py_ssize_t contexts) noexcept nogil
    cdef bint reserve_queries(self, Py_ssize_t queries, Py_ssize_t contexts) noexcept nogil
    cdef void sees(self, kv_query *query, Py_ssize_t position, Py_ssize_t length) noexcept nogil
    cdef void ask(self, const kv_context *context, Py_ssize_t first_query, Py_ssize_t num_queries) noexcept nogil
    cdef void add(self, const kv_context *context, Py_ssize_t first_query, Py_ssize_t num_queries, Py_ssize_t begin,
                 int part) noexcept nogil
    cdef Py_ssize_t _split_tokens(self, Py_ssize_t num_queries, Py_ssize_t span) noexcept nogil
    cdef Py_ssize_t _begin_of(self, const kv_query *query, Py_ssize_t begin) noexcept nogil
    cdef bint _cut_alike(self, const kv_query *a, const kv_query *b, Py_ssize_t begin) noexcept nogil
    cdef void join(self, Py_ssize_t first_item) noexcept nogil
    cdef void _cut_rows(self, kv_item *item) noexcept nogil
    cdef Py_ssize_t _choose_row_blocks(self, Py_ssize_t panels, Py_ssize_t splits) noexcept nogil
    cdef int set_rope(self, object rope_q) except -1
    cdef void close(self, kv_item *item, Py_ssize_t end) noexcept nogil
    cdef Py_ssize_t _count_parts(self) noexcept nogil
    cdef bint prepare(self, Workspace scratch, int threads) noexcept nogil
    cdef object run(self)
    cdef object explain(self, str storage)
    cdef list _notes(self, int threads)


cdef bint LOGS                 # whether calls log slow paths
cdef AttendCall open_call(const kv_store *store, Workspace workspace, object q, Options options, Py_ssize_t contexts)
cdef Rows imagined_rows(object q, object num_q_heads, object dtype, const kv_store *store)
