/* One call of the operation, cut into tasks.

   A task is a stream, a KV head, up to MAX_BLOCKS x KV_ROWS query rows (the query heads of the KV head x query tokens, token by
   token) and a split of the context. It walks its split tile by tile: all its rows share every pass over keys and values. Splits
   depend on shapes alone and are merged in order, so that the bits are the same for every number of threads. */
#ifndef KVFAST_GGML_CALL_H
#define KVFAST_GGML_CALL_H

#include "attention.h"
#include "ggml_rows.h"

enum { MAX_BLOCKS = KV_MATRIX_PANELS }; /* blocks of KV_ROWS query rows of a task */

/* One side of the cache: keys or values. */
typedef struct {
    const struct ggml_tensor *tensor;
    kv_side rows;         /* as the kernels read them */
    ptrdiff_t row_bytes;  /* of one head of a token */
    kv_decode_row decode; /* into float rows; NULL: the kernels read the stored rows */
    /* Kernels of ggml's blocks, or NULL. */
    kv_prepare_rows prepare;
    kv_add_rows add, add_rounded;
    kv_transpose_codes transpose;
} side;

typedef struct {
    const struct ggml_tensor *q, *mask, *sinks, *out;
    side k, v;
    kv_tier tier;
    float scale, softcap, max_bias;
    int64_t tokens, group, rows; /* of the context; query heads per KV head; query rows per KV head */
    int64_t blocks, splits, split_tokens, num_tasks;
    int block_rows, tile;         /* rows and tokens of a pass */
    bool matrix, products;        /* by the matrix unit or as words; as products with panels of floats */
    int64_t partial_floats;
    float *partials;
    char *scratch;                /* of all threads */
    size_t scratch_bytes;
} call;

/* What one thread works in. */
typedef struct {
    int from[MAX_BLOCKS * KV_ROWS], to[MAX_BLOCKS * KV_ROWS];
    int seen[MAX_BLOCKS];    /* where the last token of the tile that a row of the block sees ends; 0: it sees none */
    char biased[MAX_BLOCKS]; /* blocks with a row that has a bias */
    KV_ALIGNED float rows[KV_LANES * KV_MAX_HEAD_DIM];
    KV_ALIGNED float keys[KV_TILE * KV_MAX_HEAD_DIM];
    KV_ALIGNED uint16_t scales[KV_TILE * KV_MAX_HEAD_DIM / 32];
    KV_ALIGNED float values[KV_TILE * KV_MAX_HEAD_DIM];
    KV_ALIGNED float bias[MAX_BLOCKS * KV_ROWS * KV_TILE];
    KV_ALIGNED float out[KV_MAX_HEAD_DIM];
    kv_row_queries queries[MAX_BLOCKS];
    kv_room room;            /* of the panels' kernels; those of float rows need none */
    union {
        kv_scratch narrow[MAX_BLOCKS];
        kv_wide_scratch wide;
    };
} scratch;

typedef struct {
    const call *call;
    scratch *own;
    int64_t stream, head, first_row, split;
    int rows;
    bool matrix;     /* as the call says, but for rows that are computed again */
    kv_add_rows add; /* the values; NULL: by kvfast's kernels of rows */
} task;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* masks.c: finds what the rows see of a tile; returns whether any sees any of it. */
bool kv_find_seen(const task *t, int64_t token, int count);

/* tasks.c */
void kv_run_task(const call *c, int64_t index, scratch *own);
/* Merges the splits of one query row, in order. */
void kv_merge_row(const call *c, int64_t row, scratch *own);

#endif
