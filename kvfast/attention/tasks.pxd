"""The walk of attention, which ``walk/`` has in C, and the structs of kvfast's own source of rows."""
from libc.stdint cimport int32_t, int64_t, uint16_t

from kvfast.attention.request cimport kv_request
from kvfast.codec.blocks cimport kv_context, kv_layout, kv_slab
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport (kv_kernels, kv_panel, kv_room, kv_rope_scratch, kv_score_options, kv_scratch, kv_side, kv_transform,
                                  kv_wide_scratch)
from kvfast.core.limits cimport KV_FEW_QUERIES, KV_MAX_HEAD_DIM, KV_ROWS, KV_TASK_ROWS


cdef extern from "attention/walk/walk.h" nogil:
    void kv_touch(const char *at, Py_ssize_t n)

    ctypedef struct kv_call
    ctypedef struct kv_task

    ctypedef struct kv_stretch:
        Py_ssize_t first, count, shift

    ctypedef struct kv_query:
        Py_ssize_t token, position, sink_stop, start, stop, partial
        int parts
        const kv_stretch *stretches
        int num_stretches
        Py_ssize_t tree

    ctypedef struct kv_item:
        const void *keys           # a kv_keys
        const int32_t *members
        Py_ssize_t first_query, num_queries, begin, end, split_tokens
        int run, least_run
        Py_ssize_t first_split, splits, row_blocks, first_task
        int part, block_rows, continues

    ctypedef struct kv_source:
        void (*read)(kv_task *task) noexcept nogil
        void (*write)(const kv_call *call, const kv_query *query, Py_ssize_t q_head, float *row, float top, float l) noexcept nogil

    ctypedef struct kv_call:
        const kv_kernels *kernels
        const kv_source *source
        const void *given          # a kv_given
        const kv_side *values
        const float *sinks
        Py_ssize_t num_q_heads, num_items, num_queries, num_tasks
        int group
        kv_item *items
        kv_query *queries
        double *partials
        int own_folds
        int *unfinished

    ctypedef struct kv_task:
        const kv_call *call
        const kv_kernels *kernels
        const kv_item *item
        int head, rows
        Py_ssize_t first_row, first_split, end_split, split, begin, end
        int loaded
        kv_score_options options
        kv_scratch *narrow
        kv_wide_scratch *wide
        float *rest
        double *folds
        void *own                  # a kv_own

    int kv_num_blocks(const kv_task *task)
    void kv_pass_rows(const kv_task *task, kv_panel *panel, bint back)
    Py_ssize_t kv_query_of(const kv_call *call, const kv_item *item, Py_ssize_t row)
    Py_ssize_t kv_split_begin(const kv_item *item, Py_ssize_t split)
    Py_ssize_t kv_split_at(const kv_item *item, Py_ssize_t position)
    void kv_cut_context(kv_item *item, Py_ssize_t end)
    void kv_add_tasks(kv_call *call, kv_item *item)
    void kv_open_task(kv_task *task, const kv_call *call, Py_ssize_t index)
    void kv_read_split(kv_task *task, Py_ssize_t split)
    void kv_each_split(kv_task *task, void (*take)(kv_task *task, Py_ssize_t split) noexcept nogil)
    void kv_attend_task(kv_task *task)
    Py_ssize_t kv_partial_size(const kv_side *values)
    Py_ssize_t kv_count_slots(kv_call *call, Py_ssize_t num_tokens)
    void kv_clear_partials(const kv_call *call, Py_ssize_t num_tokens)
    void kv_count_tasks(const kv_call *call, Py_ssize_t num_tokens)


# Where the keys of an item are.
ctypedef struct kv_keys:
    kv_context context
    kv_transform rotation      # of the queries, back to where its keys were rotated; cos NULL: none


# What a call reads and computes, counted over all passes.
ctypedef struct kv_traffic:
    Py_ssize_t codes           # bytes
    Py_ssize_t scales          # bytes of scales of tokens and channels, and of means
    Py_ssize_t floats          # bytes of float rows
    double operations          # multiplications and additions of scores and sums


# A block of chosen tokens: a layout of blocks of KV_LANES tokens, as many as a tile has, which lie in memory of the task.
ctypedef struct kv_gathered:
    kv_layout layout
    kv_slab slab
    int tile                   # tokens; 0: the layout of the call needs none of this kind


# What chosen tokens are read from: codes; keys of codes whose block has statistics, decoded; float rows.
cdef enum:
    KV_CODES
    KV_DECODED_KEYS
    KV_OWN_FLOATS
    KV_NUM_KINDS


# The tokens that were chosen for each query.
ctypedef struct kv_chosen:
    int64_t *positions         # ascending
    int64_t *firsts            # (queries, heads) where they begin there,
    int64_t *counts            # and how many of them there are
    Py_ssize_t heads           # 1: the same tokens for all KV heads
    kv_gathered kinds[KV_NUM_KINDS]
    char *room                 # (threads, room_bytes)
    Py_ssize_t room_bytes


# What a call is given besides what every walk has.
ctypedef struct kv_given:
    const kv_layout *layout
    kv_request request
    int tile                   # tokens between two softmax corrections
    int float_tile             # the same for float rows
    int panel_kind             # what panels read, KV_PANELS_OF_CODES and so on
    void **scratch             # (threads,) memory for a kv_own each
    double *folds              # (threads, folds_size), see `kv_task`
    Py_ssize_t folds_size
    kv_wide_scratch *wide      # (threads,), or NULL where no item has more than KV_ROWS rows in a task
    kv_rope_scratch *rope      # (threads,), or NULL without a rotary part
    uint16_t *decoded          # (threads, decoded_size) a tile of each thread, or NULL where rows are read where they lie
    Py_ssize_t decoded_size    # elements of a tile
    const kv_chosen *chosen    # or NULL: queries see ranges of positions
    int *bad                   # set when a row of the output is not finite
    kv_traffic *traffic        # where `explain` counts, else NULL
    kv_watch *watch            # or NULL


# What a task works in, with up to KV_ROWS query rows, or KV_TASK_ROWS in the wide scratch. It is too large for a stack.
ctypedef struct kv_own:
    kv_scratch scratch
    kv_room room
    const kv_side *prepared    # the keys for which the scratch has the rows, or NULL
    float rest[2 * KV_ROWS * KV_MAX_HEAD_DIM]
    float firsts[KV_TASK_ROWS]             # each row's score of the first token, or -infinity
    Py_ssize_t starts[KV_TASK_ROWS]        # what each row sees of an item
    Py_ssize_t stops[KV_TASK_ROWS]
    Py_ssize_t sink_stops[KV_TASK_ROWS]
    Py_ssize_t from_floats[KV_TASK_ROWS]   # of a span: where each row begins to read float rows,
    Py_ssize_t lower[KV_TASK_ROWS]         # and what it sees of a range
    Py_ssize_t upper[KV_TASK_ROWS]
    kv_rope_scratch *rope      # or NULL
    uint16_t *decoded          # or NULL
    char *gathered             # chosen tokens of the tile, or NULL
    float slopes[KV_TASK_ROWS]
    int64_t query_at[KV_TASK_ROWS]    # position of each row's query
    Py_ssize_t tokens[KV_TASK_ROWS]   # query of each row
    Py_ssize_t q_heads[KV_TASK_ROWS]


cdef inline const kv_given *given_of(const kv_task *task) noexcept nogil:
    return <const kv_given *>task.call.given


cdef inline kv_own *own_of(const kv_task *task) noexcept nogil:
    return <kv_own *>task.own


cdef inline const kv_keys *keys_of(const kv_task *task) noexcept nogil:
    return <const kv_keys *>task.item.keys


cdef inline bint panels_read_floats(const kv_task *task) noexcept nogil:
    """Whether panels read the float rows next to codes, which they round: in formats whose prompts depend on their cut, and not for
    a few queries, which get the bits that each would get alone."""
    return task.wide != NULL and given_of(task).layout.floats_of_steps and task.item.num_queries > KV_FEW_QUERIES
