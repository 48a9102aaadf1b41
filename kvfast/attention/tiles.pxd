"""The structs of a call of attention, and how one of its tasks reads keys and values."""
from libc.stdint cimport int32_t, int64_t, uint16_t

from kvfast.attention.request cimport kv_request
from kvfast.codec.blocks cimport kv_context, kv_store
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport (kv_kernels, kv_panel, kv_room, kv_rope_scratch, kv_score_options, kv_scratch, kv_softmax,
                                  kv_transform, kv_wide_scratch)
from kvfast.core.limits cimport KV_MAX_HEAD_DIM, KV_ROWS, KV_TASK_ROWS


# One query token. It sees the positions below sink_stop and those from start to stop. In a spliced sequence a token has one
# for each segment that it sees, with the positions of that segment's table.
ctypedef struct kv_query:
    Py_ssize_t token           # its row of q and of the output
    Py_ssize_t position
    Py_ssize_t sink_stop
    Py_ssize_t start
    Py_ssize_t stop
    Py_ssize_t partial         # partial results of the queries before it, per query head
    int parts                  # number of its own partial results, per query head


# Queries that read the same keys: those of one sequence, or of several sequences that share a prefix.
ctypedef struct kv_item:
    kv_context context
    const int32_t *members     # (num_queries,) indices of queries, or NULL: from first_query on
    Py_ssize_t first_query
    Py_ssize_t num_queries
    Py_ssize_t begin           # positions read: begin, a multiple of KV_TILE, to end, and the sink tokens before
    Py_ssize_t end
    Py_ssize_t split_tokens    # a multiple of KV_TILE
    Py_ssize_t splits
    int part                   # index of its first split among the partial results of its queries
    bint continues             # the tasks of the item before it read it, too: the same rows, rotated for another segment
    int block_rows             # query rows of a task: KV_ROWS, or more in panels
    Py_ssize_t row_blocks
    Py_ssize_t first_task
    kv_transform rotation      # of the queries, back to where its keys were rotated; cos NULL: none


# What a call reads and computes, counted over all passes.
ctypedef struct kv_traffic:
    Py_ssize_t codes           # bytes
    Py_ssize_t scales          # bytes of scales of tokens and channels, and of means
    Py_ssize_t floats          # bytes of float rows
    double operations          # multiplications and additions of scores and sums


# One call of attention.
ctypedef struct kv_call:
    const kv_kernels *kernels
    const kv_store *store
    kv_request request
    int group                  # query heads per KV head
    int tile                   # tokens between two softmax corrections
    int float_tile             # the same for float rows
    kv_item *items
    Py_ssize_t num_items
    kv_query *queries          # (num_queries,) the first of each token, then the others
    Py_ssize_t num_queries
    Py_ssize_t num_tasks
    float *partials            # (tokens, num_q_heads, parts, padded_dim of values + 2)
    void **scratch             # (threads,) memory for a kv_task each
    kv_wide_scratch *wide      # (threads,), or NULL where no item has more than KV_ROWS rows in a task
    kv_rope_scratch *rope      # (threads,), or NULL without a rotary part
    uint16_t *decoded          # (threads, decoded_size) a tile of each thread, or NULL where rows are read where they lie
    Py_ssize_t decoded_size    # elements of a tile
    int wide_kind              # KV_INTEGERS or KV_HALVES: what panels are multiplied with
    int *bad                   # set when a row of the output is not finite
    kv_traffic *traffic        # where `measure_tasks` counts, else NULL
    kv_watch *watch            # or NULL


# Positions begin to end of a sequence, which are read from one store tile by tile.
ctypedef struct kv_range:
    const kv_store *store
    int tile
    Py_ssize_t begin, end


# What the rows of a task see of an item.
ctypedef struct kv_seen:
    Py_ssize_t starts[KV_TASK_ROWS]
    Py_ssize_t stops[KV_TASK_ROWS]
    Py_ssize_t sink_stops[KV_TASK_ROWS]
    Py_ssize_t begin, end, sinks_end


# The query rows of a task: up to KV_ROWS, or KV_TASK_ROWS in the wide scratch. It is too large for a stack.
ctypedef struct kv_task:
    const kv_call *call
    const kv_item *item
    int head
    int rows
    kv_score_options options
    kv_scratch scratch
    kv_room room
    float rest[2 * KV_ROWS * KV_MAX_HEAD_DIM]  # of sums of float32 values, see kv_softmax
    kv_seen seen
    Py_ssize_t zeros[KV_TASK_ROWS]
    Py_ssize_t from_floats[KV_TASK_ROWS]   # of a span: where each row begins to read float rows,
    Py_ssize_t lower[KV_TASK_ROWS]         # and what it sees of a range
    Py_ssize_t upper[KV_TASK_ROWS]
    kv_wide_scratch *wide      # or NULL
    kv_rope_scratch *rope      # or NULL
    uint16_t *decoded          # or NULL
    float slopes[KV_TASK_ROWS]
    int64_t query_at[KV_TASK_ROWS]    # position of each row's query
    Py_ssize_t tokens[KV_TASK_ROWS]   # query of each row
    Py_ssize_t q_heads[KV_TASK_ROWS]


cdef inline int num_panels(const kv_task *task) noexcept nogil:
    """Panels that a task fills, or 0 if it has few rows."""
    return (task.rows + KV_ROWS - 1) // KV_ROWS if task.wide != NULL else 0


cdef void copy_rows(const kv_softmax *state, const float *acc, Py_ssize_t dim, unsigned rows, kv_panel *panel) noexcept nogil
cdef int step_of(const kv_task *task) noexcept nogil
cdef void touch(const kv_task *task, Py_ssize_t position, Py_ssize_t tokens) noexcept nogil
cdef void touch_first_floats(const kv_task *task) noexcept nogil
cdef void touch_sinks(const kv_task *task, Py_ssize_t tokens) noexcept nogil
cdef void attend_range(kv_task *task, const kv_range *range_, const Py_ssize_t *starts, const Py_ssize_t *stops,
                       const kv_range *following) noexcept nogil
