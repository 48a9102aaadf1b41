/* The walk of attention, once for the blocks of kvfast and for the tensors of ggml (llama_cpp/backend).

   Streaming softmax straight on the stored bytes (FlashAttention, arXiv 2205.14135, and its split form for decoding, Flash-Decoding).
   The query rows of a KV head, its query heads x the query tokens, share every pass over a tile. The context is cut into splits. A task
   is an item, a KV head, a run of splits and a block of these rows (cut.inc.h). For each split it resets its rows (rows.inc.h) and has
   the source of the call read them. Each split leaves a partial result, and those of a row are folded in order, by the task or by the
   last one to end (merge.inc.h). So the bits depend on the splits, and not on the runs or the threads. There are no threads here:
   whoever includes this has the loop over tasks. */
#ifndef KVFAST_WALK_H
#define KVFAST_WALK_H

#include <math.h>
#include <string.h>

#include "simd/kernels.h"

typedef struct kv_call kv_call;
typedef struct kv_task kv_task;

/* Asks for memory that is read soon. */
static inline void kv_touch(const char *at, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i += 64) __builtin_prefetch(at + i);
}

/* Positions that a draft sees of its tree: count ancestors, which follow each other, from tree + first on. Their distances are those of
   a query at position + shift. */
typedef struct {
    ptrdiff_t first, count, shift;
} kv_stretch;

/* One query token. It sees the positions below sink_stop, those from start to stop, and those of its stretches. In a spliced sequence a
   token has one for each segment that it sees, with the positions of that segment's table. */
typedef struct {
    ptrdiff_t token;             /* its row of q and of the output */
    ptrdiff_t position, sink_stop, start, stop;
    ptrdiff_t partial;           /* slots of the queries before it, per query head */
    int parts;                   /* number of its own partial results, per query head */
    int folded;                  /* number of these, from the first on, that one task folds as it computes them */
    const kv_stretch *stretches;
    int num_stretches;
    ptrdiff_t tree;              /* where the stretches count from */
} kv_query;

/* Queries that read the same keys: those of one sequence, or of several sequences that share a prefix. */
typedef struct {
    const void *keys;            /* where these are, for the source */
    const int32_t *members;      /* (num_queries,) indices of queries, or NULL: from first_query on */
    ptrdiff_t first_query, num_queries;
    ptrdiff_t begin, end;        /* positions read: begin, a multiple of KV_TILE, to end, and the sink tokens before */
    ptrdiff_t split_tokens;      /* of a split, a multiple of KV_TILE; splits are counted from position 0 on */
    int run, least_run;          /* splits of a task; at least, as they were one that had too many tokens */
    ptrdiff_t first_split, splits, row_blocks, first_task;
    int part;                    /* index of its first split among the partial results of its queries */
    int continues;               /* the tasks of the item before it take all of its splits, too: the same rows, for another segment */
    int block_rows;              /* query rows of a task: KV_ROWS, or more in panels or in several blocks */
} kv_item;

/* Where the rows of a call come from, and where they go. */
typedef struct {
    /* Loads the query rows of the task if they are not loaded, and adds to their state what they see from task->begin to task->end. */
    void (*read)(kv_task *task);
    /* Writes an output row; the log-sum-exp is top + log(l). */
    void (*write)(const kv_call *call, const kv_query *query, ptrdiff_t q_head, float *row, float top, float l);
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
    ptrdiff_t num_queries, num_tasks, num_slots; /* the latter per query head */
    double *partials;            /* of each token and query head, see merge.inc.h */
    int own_folds;               /* whether tasks have room to fold in */
    int *unfinished;             /* (tokens, KV heads) tasks that have still to end */
};

/* The query rows of a task: in blocks of KV_ROWS, or in panels. */
struct kv_task {
    const kv_call *call;
    const kv_kernels *kernels;   /* those of the call, or for rows that are read again its exact ones */
    const kv_item *item;
    int head, rows;
    ptrdiff_t first_row;         /* of the item */
    ptrdiff_t first_split, end_split; /* of the item */
    ptrdiff_t split, begin, end; /* the split that is read, and its positions */
    int loaded;                  /* whether the rows are */
    kv_score_options options;
    kv_scratch *narrow;          /* (blocks,) */
    kv_wide_scratch *wide;       /* panels, or NULL: vectors take the rows */
    float *rest;                 /* of sums of float32 values, see kv_softmax; or NULL */
    double *folds;               /* (rows, kv_partial_size) where it folds rows whose parts it takes all, if the call says so */
    void *own;                   /* what the source works in */
};

#include "cut.inc.h"
#include "merge.inc.h"
#include "rows.inc.h"

/* Reads a split of the task's item. */
static inline void kv_read_split(kv_task *task, ptrdiff_t split)
{
    task->split = split;
    kv_find_split(task);
    task->call->source->read(task);
    task->loaded = 1;
}

/* Takes the splits of a task in order: those of its item, and of the items that continue it. */
static inline void kv_each_split(kv_task *task, void (*take)(kv_task *task, ptrdiff_t split))
{
    const kv_item *const first = task->item, *const last = task->call->items + task->call->num_items - 1;
    for (;;) {
        for (ptrdiff_t split = task->first_split; split < task->end_split; split++) take(task, split);
        if (task->item == last || !task->item[1].continues) break;
        task->item++, task->loaded = 0, task->first_split = 0, task->end_split = task->item->splits;
    }
    task->item = first;
}

/* Ends those rows of a block whose bit is set: of the split that was read. */
static inline void kv_end_rows(const kv_task *task, int block, unsigned ended)
{
    for (int r = 0; r < kv_rows_of(task, block); r++) {
        float m, l, *sums;
        if (!(ended >> r & 1)) continue;
        sums = kv_sums_of(task, block * KV_ROWS + r, &m, &l);
        kv_end_row(task, task->first_row + block * KV_ROWS + r, sums, m, l);
    }
}

/* Attends to a split. Rows whose rounding counts are read again, with those of their block, as few rows are, and exactly. */
static inline void kv_attend_split(kv_task *task, ptrdiff_t split)
{
    unsigned again[KV_MAX_PANELS], any = 0;
    kv_wide_scratch *const wide = task->wide;
    const ptrdiff_t first_row = task->first_row;
    const kv_kernels *const kernels = task->kernels;
    const int rows = task->rows, blocks = kv_num_blocks(task), changes_rows = wide || blocks > 1 || kernels != kernels->exact;
    kv_begin_rows(task, 0);
    kv_read_split(task, split);
    for (int b = 0; b < blocks; b++) {
        any |= again[b] = kv_rows_to_refine(task, b);
        kv_end_rows(task, b, ~again[b]);
    }
    if (!any) return;
    if (changes_rows) task->wide = NULL, task->kernels = kernels->exact, task->loaded = 0;
    for (int b = 0; b < blocks; b++, task->first_row += KV_ROWS) {
        if (!again[b]) continue;
        task->rows = rows - b * KV_ROWS < KV_ROWS ? rows - b * KV_ROWS : KV_ROWS;
        kv_begin_rows(task, again[b]);
        kv_read_split(task, split);
        kv_end_rows(task, 0, again[b]);
        if (changes_rows) task->loaded = 0;
    }
    task->wide = wide, task->kernels = kernels, task->first_row = first_row, task->rows = rows;
}

/* Attends, after kv_open_task. */
static inline void kv_attend_task(kv_task *task)
{
    kv_each_split(task, kv_attend_split);
    kv_end_task(task);
}

#endif
