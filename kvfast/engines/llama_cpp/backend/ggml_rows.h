/* Rows of ggml's caches, read by kvfast's kernels.

   Each file of simd/tiers/ compiles kvfast's kernels for an instruction set, and with them what is special to the blocks of
   ggml (ggml_rows.inc.h); kernels.c chooses between them. */
#ifndef KVFAST_GGML_ROWS_H
#define KVFAST_GGML_ROWS_H

#include "ggml.h"
#include "simd/kernels.h"

/* n elements of a row in ggml's blocks as floats. */
typedef void (*kv_decode_row)(const void *row, ptrdiff_t n, float *out);

/* Query rows for products with the codes of blocks; see ggml_scores.inc.h. */
typedef struct {
    kv_queries prepared;
    int32_t block_sums[KV_ROWS * KV_MAX_HEAD_DIM / 32]; /* (rows, blocks) of the integers, times the codes' bias */
} kv_row_queries;

/* Memory to fetch while a kernel computes; no bytes of it: none. */
typedef struct {
    const char *at;
    ptrdiff_t bytes;
} kv_lines;

/* Rows of n floats, times the softmax scale. */
typedef void (*kv_prepare_rows)(const float *rows, int num_rows, int n, float scale, kv_row_queries *queries);
/* Corrects the sums (num_rows, n) of the tiles before, and adds the weights times `count` values. Where it rounds weights, it adds up
   the noise of that. */
typedef void (*kv_add_rows)(kv_softmax *state, int num_rows, const char *values, ptrdiff_t stride, int n, int count, kv_lines ahead,
                            float *acc);

/* The codes of a tile, and their scales, as the next kernel reads them for each block of rows: what add_rounded does, with its bits. */
typedef void (*kv_gather_values)(const char *values, ptrdiff_t stride, int n, int count, kv_lines ahead, char *codes, float *scales);
typedef void (*kv_add_gathered)(kv_softmax *state, int num_rows, const char *codes, int gathered, const float *scales, int n, int count,
                                float *acc);

/* Columns of a strip (ggml_products.inc.h): the elements of a block of ggml, or as many tokens. */
enum { KV_COLUMNS = 32 };
/* c[r][j] = c[r][j] x factors[r] (0 without factors) + sum a[r][i] b[i][j], for the columns j of a strip b of `depth` rows. */
typedef void (*kv_multiply)(const float *a, ptrdiff_t a_stride, int rows, const float *b, int depth, const float *factors, float *c,
                            ptrdiff_t c_stride);
/* Scores of the tokens of a strip, in the order of kvfast's own kernel for few rows: c is (rows, KV_TILE). */
typedef void (*kv_multiply_in_order)(const float *a, int rows, int depth, const float *b, float *c);
/* Makes KV_LANES rows of n floats columns of a strip. */
typedef void (*kv_transpose_rows)(const float *rows, ptrdiff_t stride, int n, float *strip);

/* The same of codes of `count` tokens, at most KV_LANES; then the scores of a strip of codes. See ggml_scores.inc.h. */
typedef void (*kv_transpose_codes)(const char *keys, ptrdiff_t stride, int n, int count, kv_lines ahead, char *strip, uint16_t *scales);
typedef void (*kv_multiply_codes)(const kv_row_queries *queries, int num_rows, int n, const char *strip, const uint16_t *scales,
                                  float *scores);

typedef struct {
    const char *isa;
    kv_decode_row decode[GGML_TYPE_COUNT]; /* NULL: not one of those that are read here */
    /* On the stored rows; NULL: they are decoded first. */
    kv_prepare_rows prepare[GGML_TYPE_COUNT];
    kv_add_rows add[GGML_TYPE_COUNT];
    kv_add_rows add_rounded[GGML_TYPE_COUNT]; /* the same with integers; NULL: none */
    kv_gather_values gather[GGML_TYPE_COUNT]; /* NULL: none */
    kv_add_gathered add_gathered[GGML_TYPE_COUNT];
    kv_multiply multiply;
    kv_multiply_in_order multiply_in_order; /* NULL: none */
    kv_transpose_rows transpose_rows;
    kv_transpose_codes transpose_codes[GGML_TYPE_COUNT]; /* NULL: none */
    kv_multiply_codes multiply_codes;
} kv_row_kernels;

/* The kernels of one tier. */
typedef struct {
    const kv_kernels *attention, *fast; /* the latter with the panels of the fast precision */
    const kv_row_kernels *rows;
} kv_tier;

/* The tier in use: the best that this machine has, or the one that KVFAST_ISA names. */
kv_tier kv_active_tier(void);
/* Uses another tier from now on; returns 0 if there is none of that name, or the machine cannot run it. */
int kv_use_tier(const char *isa);
/* Exact; fast for prompts on quantised keys and values; or exact with the same bits for any number of queries in a call. */
typedef enum { KV_PRECISION_UNSET, KV_PRECISION_EXACT, KV_PRECISION_FAST, KV_PRECISION_INVARIANT } kv_precision;
/* The precision that the caller or KVFAST_PRECISION names, else exact. */
kv_precision kv_active_precision(void);
/* Uses "exact", "fast" or "invariant" from now on; returns 0 for another name. */
int kv_use_precision(const char *name);

/* The configuration of this thread's matrix unit, which others (ggml) may have set and rely on. No-ops without one. */
typedef struct { KV_ALIGNED char bytes[64]; } kv_matrix_state;
void kv_save_matrix(const kv_tier *tier, kv_matrix_state *state);
void kv_restore_matrix(const kv_tier *tier, const kv_matrix_state *state);

#endif
