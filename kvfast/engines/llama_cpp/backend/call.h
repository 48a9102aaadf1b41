/* One call of the operation, for the walk of attention/walk.

   An item is a stream. A task has up to MAX_BLOCKS x KV_ROWS query rows, and all of them share every pass over keys and values. Splits
   depend on shapes alone. */
#ifndef KVFAST_GGML_CALL_H
#define KVFAST_GGML_CALL_H

#include "attention.h"
#include "attention/walk/walk.h"
#include "ggml_rows.h"

enum { MAX_BLOCKS = KV_MATRIX_PANELS }; /* blocks of KV_ROWS query rows of a task */

/* One side of the cache: keys or values. */
typedef struct {
    const struct ggml_tensor *tensor;
    kv_side rows, packed; /* as the kernels read them: where they lie, or one after the other */
    ptrdiff_t row_bytes;  /* of one head of a token */
    kv_decode_row decode; /* into float rows; NULL: the kernels read the stored rows */
    bool strips;          /* of floats, or of codes of keys: one after the other, for the rows of all blocks */
    int tile;             /* most tokens of a tile that few rows read */
    /* Kernels of ggml's blocks, or NULL. */
    kv_prepare_rows prepare;
    kv_add_rows add, add_rounded; /* the latter rounds weights, where it can */
    kv_transpose_codes transpose;
    kv_gather_values gather;
    kv_add_gathered add_gathered;
} side;

typedef struct {
    kv_call walk; /* whose `given` is this */
    kv_item item; /* as each stream is cut; in an invariant call, as queries are that see the whole context */
    const struct ggml_tensor *q, *mask, *out;
    side k, v;
    kv_tier tier;
    float scale, softcap, max_bias;
    int64_t tokens, rows;  /* of the context; query rows per KV head */
    int tile;              /* tokens of a pass */
    bool invariant;        /* the number of queries changes no bit; where a mask shows one query tokens here and there, */
    bool strict;           /* only then */
    bool grows;            /* splits of long contexts are longer than others */
    bool matrix, products; /* by the matrix unit or as words; as products with strips of floats */
    char *scratch;         /* of all threads */
    size_t scratch_bytes, packed_at; /* the latter in the scratch of a thread: room for the packed rows of a tile, keys first */
} call;

/* The rows of a tile on one side. */
typedef struct {
    const kv_side *side;
    const char *at;
    ptrdiff_t stride;
    int64_t left;   /* tokens after them */
    kv_lines ahead; /* what kernels fetch meanwhile */
} tile_rows;

/* What one thread works in. */
typedef struct {
    int32_t tokens[KV_TILE]; /* of packed rows */
    int from[MAX_BLOCKS * KV_ROWS], to[MAX_BLOCKS * KV_ROWS];
    int seen[MAX_BLOCKS];    /* where the last token of the tile that a row of the block sees ends; 0: it sees none */
    char biased[MAX_BLOCKS]; /* blocks with a row that has a bias */
    KV_ALIGNED float rows[KV_LANES * KV_MAX_HEAD_DIM];
    KV_ALIGNED float keys[KV_TILE * KV_MAX_HEAD_DIM];
    KV_ALIGNED uint16_t scales[KV_TILE * KV_MAX_HEAD_DIM / 32];
    KV_ALIGNED float values[KV_TILE * KV_MAX_HEAD_DIM];
    KV_ALIGNED float value_scales[KV_TILE * KV_MAX_HEAD_DIM / 32];
    KV_ALIGNED float bias[MAX_BLOCKS * KV_ROWS * KV_TILE];
    kv_row_queries queries[MAX_BLOCKS];
    kv_room room;            /* of the panels' kernels; those of float rows need none */
    union {
        kv_scratch narrow[MAX_BLOCKS];
        kv_wide_scratch wide;
    };
} scratch;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* The stream of a task, and the query of its row there. */
static inline int64_t stream_of(const kv_task *t) { return t->item->first_query / ((const call *)t->call->given)->q->ne[1]; }
static inline int64_t query_of(const kv_task *t, int64_t row)
{
    return kv_query_of(t->call, t->item, row) % ((const call *)t->call->given)->q->ne[1];
}

/* masks.c: where the last token that a query sees ends, from 1 to the length of the context. */
int64_t kv_end_of(const call *c, int64_t stream, int64_t query);
/* Finds what the rows see of a tile; returns whether any sees any of it. */
bool kv_find_seen(const kv_task *t, int64_t token, int count);
/* The mask of all rows of a task, if it is the same, and shows less than half of the tokens from `begin` to `stop`; else NULL. */
const uint16_t *kv_sparse_mask(const kv_task *t, int64_t begin, int64_t stop);
/* The next tokens that such a mask shows, at most `most`; *token goes on to the one after them. */
int kv_next_seen(const uint16_t *mask, int64_t *token, int64_t stop, int most, int32_t *tokens);
/* Lets all rows see all of a tile. */
void kv_see_all(const kv_task *t, int count);

/* tiles.c */
extern const kv_source kv_ggml_rows;

#endif
