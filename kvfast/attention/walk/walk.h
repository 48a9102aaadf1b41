/* The walk of attention, once for the blocks of kvfast and for the tensors of ggml (llama_cpp/backend).

   Streaming softmax straight on the stored bytes (FlashAttention, arXiv 2205.14135, and its split form for decoding, Flash-Decoding).
   The query rows of a KV head, its query heads x the query tokens, share every pass over a tile. A task is an item, a KV head, a split
   of the context and a block of these rows (cut.inc.h). It resets its rows (rows.inc.h), has the source of the call read its split, and
   leaves output rows, or partial results that are merged in order (merge.inc.h): the same bits for every number of threads. There are
   no threads here: whoever includes this has the loop over tasks. */
#ifndef KVFAST_WALK_H
#define KVFAST_WALK_H

#include <math.h>
#include <string.h>

#include "simd/kernels.h"

typedef struct kv_call kv_call;
typedef struct kv_task kv_task;

/* Bits of the ancestors of a draft, see kv_query. */
static inline int kv_count_bits(uint64_t bits) { return __builtin_popcountll(bits); }
static inline int kv_first_bit(uint64_t bits) { return bits ? __builtin_ctzll(bits) : 64; }

/* One query token. It sees the positions below sink_stop and those from start to stop. In a spliced sequence a token has one
   for each segment that it sees, with the positions of that segment's table. */
typedef struct {
    ptrdiff_t token;             /* its row of q and of the output */
    ptrdiff_t position, sink_stop, start, stop;
    ptrdiff_t partial;           /* partial results of the queries before it, per query head */
    int parts;                   /* number of its own partial results, per query head */
    uint64_t ancestors;          /* of a tree: what a draft sees of it besides, itself included: a bit for each position from tree on */
    ptrdiff_t tree;
} kv_query;

/* Queries that read the same keys: those of one sequence, or of several sequences that share a prefix. */
typedef struct {
    const void *keys;            /* where these are, for the source */
    const int32_t *members;      /* (num_queries,) indices of queries, or NULL: from first_query on */
    ptrdiff_t first_query, num_queries;
    ptrdiff_t begin, end;        /* positions read: begin, a multiple of KV_TILE, to end, and the sink tokens before */
    ptrdiff_t split_tokens;      /* a multiple of KV_TILE */
    ptrdiff_t splits, row_blocks, first_task;
    int part;                    /* index of its first split among the partial results of its queries */
    int continues;               /* the tasks of the item before it read it, too: the same rows, rotated for another segment */
    int block_rows;              /* query rows of a task: KV_ROWS, or more in panels or in several blocks */
} kv_item;

/* Where the rows of a call come from, and where they go. */
typedef struct {
    /* Loads the query rows of the task, and adds to their state what they see of its split of task->item. */
    void (*read)(kv_task *task);
    /* Writes an output row; the log-sum-exp is top + log(l). */
    void (*write)(const kv_call *call, const kv_query *query, ptrdiff_t q_head, float *row, float top, float l);
    int refines_blocks; /* rows that are read again take all of their KV_ROWS along: without rounded weights, sums differ */
} kv_source;

/* One call of attention. */
struct kv_call {
    const kv_kernels *kernels;
    const kv_source *source;
    const void *given;           /* what the source knows besides */
    const kv_side *values;       /* the side that is summed up; its rows are as wide as those of the output */
    const float *sinks;          /* (num_q_heads,) logits, or NULL */
    ptrdiff_t num_q_heads;
    int group;                   /* query heads per KV head */
    int heads_together;          /* KV heads whose tasks follow each other, as their rows lie side by side; 0: row blocks do */
    kv_item *items;
    ptrdiff_t num_items;
    kv_query *queries;           /* (num_queries,) the first of each token, then the others */
    ptrdiff_t num_queries, num_tasks;
    float *partials;             /* (tokens, num_q_heads, parts, padded_dim of values + 2) */
};

/* The query rows of a task: in blocks of KV_ROWS, or in panels. */
struct kv_task {
    const kv_call *call;
    const kv_item *item;
    int head, rows;
    ptrdiff_t first_row, split;  /* of the item */
    kv_score_options options;
    kv_scratch *narrow;          /* (blocks,) */
    kv_wide_scratch *wide;       /* panels, or NULL: vectors take the rows */
    float *rest;                 /* of sums of float32 values, see kv_softmax; or NULL */
    void *own;                   /* what the source works in */
};

#include "cut.inc.h"
#include "merge.inc.h"
#include "rows.inc.h"

/* Reads a split of the task's item, and of those that continue it. */
static inline void kv_read_items(kv_task *task)
{
    const kv_item *const first = task->item, *const end = task->call->items + task->call->num_items;
    do task->call->source->read(task);
    while (++task->item < end && task->item->continues);
    task->item = first;
}

/* Ends those rows of a block whose bit is set. */
static inline void kv_end_rows(const kv_task *task, int block, unsigned ended)
{
    const kv_call *call = task->call;
    for (int r = 0; r < kv_rows_of(task, block); r++) {
        const ptrdiff_t row = task->first_row + block * KV_ROWS + r, q_head = task->head * call->group + row % call->group;
        const kv_query *query = call->queries + kv_query_of(call, task->item, row);
        float m, l, *sums;
        if (!(ended >> r & 1)) continue;
        sums = kv_sums_of(task, block * KV_ROWS + r, &m, &l);
        if (query->parts == 1) kv_write_row(call, query, q_head, sums, m, l);
        else kv_write_partial(call, query, q_head, task->item->part + task->split, sums, m, l);
    }
}

/* Attends, after kv_open_task. Rows whose rounding of weights counts are read again, with those of their block, as few rows are. */
static inline void kv_attend_task(kv_task *task)
{
    unsigned again[KV_PANELS];
    const int rows = task->rows, blocks = kv_num_blocks(task);
    kv_begin_rows(task, 0);
    kv_read_items(task);
    for (int b = 0; b < blocks; b++) {
        again[b] = kv_rows_to_refine(task, b);
        kv_end_rows(task, b, ~again[b]);
    }
    task->wide = NULL;
    for (int b = 0; b < blocks; b++, task->first_row += KV_ROWS) {
        if (!again[b]) continue;
        task->rows = rows - b * KV_ROWS < KV_ROWS ? rows - b * KV_ROWS : KV_ROWS;
        kv_begin_rows(task, again[b]);
        kv_read_items(task);
        kv_end_rows(task, 0, again[b]);
    }
}

#endif
