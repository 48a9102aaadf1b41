/* kvfast/simd: arithmetic on one row or one tile of a block, compiled once per instruction set.

   This header is the whole interface of simd/: the layout of a block and the table of kernels, with the storage dtypes in
   dtypes.h and the sizes in limits.h.  Nothing above it knows an instruction set; nothing below it knows Python or
   OpenMP.

   A block holds block_size tokens (a multiple of 16) of one layer and one KV head.  Its two sides,
   K and V, are stored apart. A kv_side describes each:

     float dtypes    (block_size, padded_dim) rows, row_stride bytes from token to token
     integer dtypes  a matrix of codes in lane tiles, then their scales: one per token (float32; bfloat16
                     for GAUSS4 and packed codes), or for keys with per-channel scales one per channel, a
                     15-bit fraction of a bfloat16 that is in the top bits of the first 16; in sealed key
                     blocks also a float16 per channel, which is added to all tokens of the channel

   Lane tiles: 16 lanes x 4 consecutive depths make one 64-byte line, so that one multiply-
   accumulate instruction serves 16 results and no sum across lanes is ever needed.

                lanes     depth       line of (lane, depth)
     K side     tokens    head_dim    [lane/16][depth/4][lane%16][depth%4]     INT8, 1 byte
     V side     head_dim  tokens      [lane/16][depth/8][lane%16][depth%4]     INT4, depths 0-3 of
                                      each 8 in the low nibbles, 4-7 in the high ones

   Codes are stored biased (INT8 +128, INT4 +8), as u8 x s8 instructions need them; kernels subtract
   bias x sum(activations) again.  padded_dim is head_dim rounded up to 16; the padding holds code
   zero, so no kernel has a tail.

   GAUSS4 is stored like INT4, but its codes are indices into a table of 16 int8 levels, the best for a
   Gaussian (Lloyd, Least squares quantization in PCM, 1982; Max 1960). Rotated rows are close to one.

   INT2, INT3, INT5, INT6 and INT7 have the same lines, but their codes are cut into planes of bits: see packed.h.
   Their scales are bfloat16, their levels even or the best for a Gaussian.

   Latent rows (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434) are keys and values at once. They are stored
   on the K side, and read from there as values, too. The rotary part, which only the scores use, is on the V side in
   the layout of keys.

   A sealed block is encoded by seal_k when all its tokens are there; it may have statistics of its own (means, channel
   scales). It is read like any other block. Lines of keys with channel scales differ in their bits, see keys.h. */
#ifndef KVFAST_KERNELS_H
#define KVFAST_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "dtypes.h"
#include "limits.h"

/* What panels read: codes, and float rows next to them; the same where some codes are packed; float rows alone. */
enum { KV_PANELS_OF_CODES, KV_PANELS_OF_PACKED, KV_PANELS_OF_ROWS, KV_PANEL_KINDS };

/* Vectors that do not straddle cache lines. */
#define KV_ALIGNED __attribute__((aligned(64)))

typedef struct {
    int dtype;
    int family;            /* of the dtype */
    int block_size;        /* tokens */
    int head_dim;          /* at most KV_MAX_HEAD_DIM */
    int padded_dim;
    int rotated;           /* callers rotate rows before they encode them; the kernels do not read this */
    int in_basis;          /* keys are stored in a basis of a calibration: their elements are not rotary pairs */
    int gaussian;          /* packed codes: the levels are those of a Gaussian, not even */
    int as_keys;           /* for a V side: it holds the rotary part of latent rows, in the layout of keys */
    int clip_search;       /* INT4 and GAUSS4: try several scales and take the one with the least squared error */
    ptrdiff_t row_stride;  /* float dtypes: bytes from token to token */
    ptrdiff_t scales;      /* integer dtypes: byte offset of the tokens' scales, after the codes */
    int scale_bytes;       /* per token: those of the dtype, or 0 with channel scales */
    ptrdiff_t means;       /* byte offset of the channels' means: (padded_dim,) float16; 0: none */
    ptrdiff_t channels;    /* byte offset of the channels' scales: (padded_dim,) uint16; 0: none */
    ptrdiff_t bytes;       /* of one block of this side */
} kv_side;

/* Working memory of a task's kernels that is too large for a stack: musl gives a thread 128 KB, and all of a call has to do with 24.
   Each part belongs to one kernel at a time. */
typedef struct {
    KV_ALIGNED char tiles[2][KV_TILE * (KV_MAX_HEAD_DIM + sizeof(float)) + 1024]; /* expanded to INT8; and transposed */
    KV_ALIGNED char pass[160 << 10];  /* of a kernel that reads a tile, or encodes a block */
    KV_ALIGNED char again[20 << 10]; /* of one that it calls, to read again what rounding left out */
} kv_room;

/* A part of the room as a type, which fits. */
#define KV_IN(part, type) ((type *)(void *)((part) + 0 * sizeof(char[sizeof(type) <= sizeof(part) ? 1 : -1])))

/* Query rows made ready for the K side's dtype: floats times the softmax scale, or 16-bit integers
   cut into the parts the instruction set multiplies (see activations.inc.h). */
typedef struct {
    union KV_ALIGNED {
        float values[KV_ROWS * KV_MAX_HEAD_DIM];      /* (rows, padded_dim) */
        int8_t parts[KV_ROWS * KV_MAX_HEAD_DIM * 2];  /* (rows/4, padded_dim/4, 4 rows, 8 bytes) */
    };
    const float *rows;     /* (rows, padded_dim) as given to prepare, 0 in the padding; they must stay valid */
    float factor;          /* the softmax scale */
    float scale[KV_ROWS];  /* of the integers, softmax scale included */
    float inverse[KV_ROWS]; /* factor that made the rows these integers */
    int32_t sum[KV_ROWS];  /* of the integers, times the code bias */
    const float *most;     /* (rows,) the largest scores so far, or -infinity; see least_errors */
    unsigned whole;        /* bit r: row r sees the whole tile, and `most` grows with its scores */
    kv_room *room;         /* prepare leaves it as it is */
} kv_queries;

/* Running softmax of a set of query rows: out = acc / l, lse = m + log(l). */
typedef struct {
    float m[KV_ROWS];
    double l[KV_ROWS];
    float rescale[KV_ROWS];                /* exp(m_before - m_now) of the last tile */
    /* Or NULL; (2, KV_ROWS * KV_MAX_HEAD_DIM): what sums of float32 values lose to rounding, (rows, padded_dim), and the sums of a
       tile, which are finite before the first. */
    float *rest;
    int seen[KV_ROWS];                     /* tokens of the last tile that the row sees */
    double noise[KV_ROWS];                 /* sum of the squares of the weights' rounding; see activations.inc.h */
    unsigned refined;                      /* bit r: what the rounding of the weights of row r leaves out is added */
    kv_room *room;
    KV_ALIGNED float weights[KV_ROWS * KV_TILE]; /* (rows, KV_TILE): scores, then exp(score - m) */
} kv_softmax;

/* Working memory of one task of attention. */
typedef struct {
    kv_queries queries;
    kv_softmax softmax;
    KV_ALIGNED float acc[KV_ROWS * KV_MAX_HEAD_DIM];   /* (rows, padded_dim) sum of weight x value */
    KV_ALIGNED float rows[KV_ROWS * KV_MAX_HEAD_DIM];  /* (rows, padded_dim) queries as given */
} kv_scratch;

/* The same for the rotary part of latent rows. */
typedef struct {
    kv_queries queries;
    KV_ALIGNED float scores[KV_ROWS * KV_TILE];        /* (rows, KV_TILE) */
    KV_ALIGNED float rows[KV_ROWS * KV_MAX_ROPE_DIM];  /* (rows, padded_dim) queries as given */
} kv_rope_scratch;

typedef struct {
    float softcap;         /* 0: off */
    const float *slopes;   /* (rows,) ALiBi slopes or NULL */
    const int64_t *query_at; /* (rows,) position of each query, for ALiBi */
    const float *bias;     /* (rows, KV_TILE), added to the scores of the tile, or NULL */
} kv_score_options;

/* Whether the scores that become weights are others than the products of queries and keys. */
static inline int kv_bends(const kv_score_options *options) { return options->softcap > 0 || options->slopes || options->bias; }

/* One side of a tile, the tokens between two softmax corrections. `count` tokens from slot `first`, a multiple
   of 16, of the block at base + at[0]; or whole blocks, with `first` 0. */
typedef struct {
    const char *base;
    ptrdiff_t at[KV_TILE / KV_LANES];
    int first, count;
} kv_tile;

/* A tile as bytes to prefetch: `piece` bytes at `offset` of each block, `bytes` in total, and after each piece
   scale_bytes at `scales`. */
typedef struct {
    const char *base;
    const ptrdiff_t *at;
    ptrdiff_t offset, piece, bytes, scales, scale_bytes;
} kv_prefetch;

/* KV_ROWS query rows of a task that has many, and their running softmax. */
typedef struct {
    int rows;
    int start[KV_ROWS], stop[KV_ROWS];            /* the tokens of the tile that each row sees */
    kv_score_options options;                     /* of its rows */
    float unit[KV_ROWS], inverse[KV_ROWS];        /* of the integers: the value of 1, and the factor that made them */
    float rope_unit[KV_ROWS], rope_inverse[KV_ROWS];
    float word_unit[KV_ROWS], rope_word_unit[KV_ROWS]; /* of words that multiply float rows: the value of 1, */
    float square[KV_ROWS], rope_square[KV_ROWS];  /* and the square of the norm of each row */
    KV_ALIGNED float m[KV_ROWS];
    double l[KV_ROWS];
    double noise[KV_ROWS];                        /* as in kv_softmax */
    float factor;                                 /* the softmax scale */
    /* (rows, padded_dim) as given */
    KV_ALIGNED float queries[KV_ROWS * KV_MAX_HEAD_DIM];
    KV_ALIGNED float rope_queries[KV_ROWS * KV_MAX_ROPE_DIM];
    KV_ALIGNED float columns[KV_ROWS * KV_MAX_HEAD_DIM]; /* (padded_dim, rows) as given, where words multiply codes */
    KV_ALIGNED float rope_columns[KV_ROWS * KV_MAX_ROPE_DIM];
    KV_ALIGNED int8_t left[KV_ROWS * KV_MAX_HEAD_DIM * 2]; /* words: what the rounding of `columns` to integers left out */
    KV_ALIGNED int8_t rope_left[KV_ROWS * KV_MAX_ROPE_DIM * 2];
    /* The same as integers: in bytes, (high and low, depth/64, rows, 64), or in words, (depth/2, rows, 2) */
    KV_ALIGNED int8_t parts[KV_ROWS * KV_MAX_HEAD_DIM * 2];
    KV_ALIGNED int8_t rope_parts[KV_ROWS * KV_MAX_ROPE_DIM * 2];  /* the same for the rotary part of latent rows */
    /* Words that multiply float rows; or in bfloat16, (high and low, depth/32, rows, 64). */
    KV_ALIGNED int8_t words[KV_ROWS * KV_MAX_HEAD_DIM * 4];
    KV_ALIGNED int8_t rope_words[KV_ROWS * KV_MAX_ROPE_DIM * 4];
    /* (padded_dim/16, KV_ROWS, 16) sum of weight x value. In lane tiles, because a processor confuses the addresses of
       stores and loads that are a multiple of a page apart, as whole rows would be */
    KV_ALIGNED float acc[KV_ROWS * KV_MAX_HEAD_DIM];
} kv_panel;

/* Keys and values of a tile, of KV_MATRIX_TILE tokens or, of codes, KV_TILE, as their family has them; see the operands.inc.h of
   each. */
typedef struct {
    kv_room *room;
    int dim, value_dim;                 /* padded, of keys and of values */
    int key_parts, rope_parts, value_parts; /* of bytes */
    int key_bf16_parts;                 /* parts of the keys in bfloat16, or 0: they are bytes */
    int latent;                         /* whether the values are the keys */
    int rope_dim, rope_bf16_parts;      /* of the rotary part of latent rows, or 0 */
    int num_blocks;                     /* with means */
    int block_of[KV_TILE / KV_LANES];
    int folds;                          /* whether queries take the scales of a block's channels */
    float error, rope_error;            /* see error_of_unit */
    float code_size;                    /* of values; see there */
    int tile;                           /* tokens of a whole tile of codes */
    int group;                          /* of words: the tokens whose weights share a unit */
    float usual_size, most_weights;     /* of float rows as words: code_size for rows that see a part of the tile; the largest sum of a
                                           group's weights */
    KV_ALIGNED int8_t keys[KV_MATRIX_TILE * KV_MAX_HEAD_DIM * 4];
    KV_ALIGNED int8_t values[(KV_MATRIX_TILE * 4 + 4) * KV_MAX_HEAD_DIM]; /* lines of words are not a multiple of a page apart */
    KV_ALIGNED int8_t rope[KV_MATRIX_TILE * KV_MAX_ROPE_DIM * 4];
    KV_ALIGNED float rows[KV_LANES * (KV_MAX_HEAD_DIM + KV_LANES)];         /* of words: some keys before they are rounded */
    KV_ALIGNED float key_scales[KV_TILE];
    KV_ALIGNED float rope_scales[KV_TILE];
    KV_ALIGNED float value_scales[KV_TILE];
    KV_ALIGNED int32_t key_starts[2 * KV_MATRIX_TILE], rope_starts[2 * KV_MATRIX_TILE]; /* of vectors: what sums of bytes begin with */
    KV_ALIGNED float means[KV_TILE / KV_LANES * KV_MAX_HEAD_DIM];    /* (blocks, KV_MAX_HEAD_DIM) of key blocks */
    KV_ALIGNED float channels[KV_TILE / KV_LANES * KV_MAX_HEAD_DIM];
} kv_operands;

/* Working memory of a task of many query rows; too large for a stack. */
typedef struct {
    kv_operands operands;
    kv_panel panels[KV_MAX_PANELS];
    KV_ALIGNED float rows[KV_ROWS * KV_MAX_HEAD_DIM]; /* (rows, padded_dim) queries of a panel as given */
    KV_ALIGNED float rope_rows[KV_ROWS * KV_MAX_ROPE_DIM];
} kv_wide_scratch;

/* RMS norm, x / sqrt(mean(x^2) + eps) * norm, then rotation of element i with element i + pairs, or of 2i
   with 2i + 1, by the angle of cos[i] and sin[i]. */
typedef struct {
    const float *norm; /* or NULL */
    float eps;
    const float *cos, *sin; /* or NULL */
    ptrdiff_t pairs;
    int interleaved;
} kv_transform;

#if defined(__GNUC__)
#define KV_HIDDEN __attribute__((visibility("hidden"))) /* so that kernels read it without a table of addresses */
#else
#define KV_HIDDEN
#endif
/* How attention asks for memory. kvfast/core/prefetching.py sets it; no bit of a result depends on it. */
KV_HIDDEN extern int kv_prefetch_level; /* of the caches that prefetches fill, 1 or 2 */

/* The Golay-Rudin-Shapiro sequence: -1 where an odd number of neighbours among the bits of i are both 1, else 1. Sums of it by rows
   of Sylvester's matrix are all small (Rudin, Some theorems on Fourier coefficients, 1959). */
KV_HIDDEN extern const float kv_signs[KV_MAX_HEAD_DIM];

/* What a kernel prefetches while it reads its side of a tile: the sides that will be read next, from
   `lead` bytes into the first of them. */
typedef struct {
    kv_prefetch next, after;
    ptrdiff_t lead;
} kv_ahead;

/* Centroids of one subvector: (count, dim). */
typedef struct {
    const float *centroids;
    int count, dim;
} kv_pq_codebook;

/* Codes of tokens, `stride` bytes from token to token: one for each subvector, bytes or (packed) nibbles, the first low.
   Subvector j has the elements bounds[j] to bounds[j + 1]. `width` is their number if it is the same for all subvectors,
   else 0. The `count` centroids of its codebook, float16, start at element count * bounds[j]. */
typedef struct {
    const uint8_t *data;
    ptrdiff_t stride;
    int subvectors, count, packed, width;
    const int *bounds;
    const uint16_t *centroids;
} kv_codes;

/* Attention of many query rows on one tile, by a family of panels, `family`. */
typedef struct {
    const char *family; /* NULL: none; vectors take a few rows at a time */
    int tile;           /* most tokens of a tile of codes */
    void (*prepare)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows, float scale, int mixed,
                    kv_panel *panel); /* rope NULL: no latent rows; mixed: float rows lie next to codes */
    void (*attend)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values, const kv_tile *next_keys,
                   const kv_tile *next_values, int64_t position, kv_operands *operands, kv_panel *panels, int num_panels);
} kv_panel_kernels;

typedef struct kv_kernels {
    const char *isa;
    const struct kv_kernels *base; /* or NULL; the tier that has what this one has not of its own, see kv_begin */
    const struct kv_kernels *exact; /* this table, or of one of the fast precision that of the exact one */

    /* Codec: rows of n floats, of the float dtypes. */
    void (*to_float[KV_NUM_DTYPES])(const void *source, ptrdiff_t n, float *row);
    void (*from_float[KV_NUM_DTYPES])(const float *row, ptrdiff_t n, void *target);
    /* Index of the first element that is NaN or beyond +-limit, or -1. */
    ptrdiff_t (*find_unstorable)(const float *row, ptrdiff_t n, float limit);
    /* Symmetric codes in -levels..levels; returns the scale, or -1 for a NaN or infinity. */
    float (*quantize)(const float *row, ptrdiff_t n, int levels, int8_t *codes);
    void (*dequantize)(const int8_t *codes, ptrdiff_t n, float scale, float *row);
    /* Copies n floats past the caches if the target is aligned to 16 bytes. The same function in all tiers. Call it with
       NULL, 0, NULL after the last copy. */
    void (*store_nontemporal)(const float *row, ptrdiff_t n, float *target);

    /* Encode rows of head_dim floats, `stride` floats apart, into a block from `slot` on; decode one row of it. seal_k
       encodes a side with means. */
    void (*encode_k)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride, int count);
    void (*encode_v)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride, int count);
    void (*decode_k)(const kv_side *side, const char *block, int slot, float *row);
    void (*decode_v)(const kv_side *side, const char *block, int slot, float *row);
    /* Encodes all keys of a block: its statistics if it has means, then its codes. If `kept` is above 0, the first `kept`
       tokens keep their codes and the block its statistics. Returns 0 if another row does not fit these: a value is more
       than 1.25 steps beyond the codes of its channel; such rows get no codes. A block without channel scales fits all rows.
       seal_k leaves no value more than one step beyond the codes, so sealing the same rows again changes nothing. */
    int (*seal_k)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride, int kept, kv_room *room);
    /* Copies a token's codes and scale into a block, perhaps of another size; `values`: it is the V side. */
    void (*copy_token)(const kv_side *side, const char *source, int slot, const kv_side *to, char *target,
                       int to_slot, int values);
    /* Copies KV_LANES tokens, from a slot on that is a multiple of them, and the statistics of their block, to a block of KV_LANES. */
    void (*copy_run)(const kv_side *side, const char *source, int slot, const kv_side *to, char *target, int values);

    /* Rotates rows: an orthogonal transform that is its own inverse and spreads each element over all. For n = 2^a m with
       m odd, the Hadamard transform of 2^a (Sylvester) x the Hartley transform of m. Before and after it, elements are multiplied by
       kv_signs: without them a row of equal elements would become its mean in one element. `out` may be the rows themselves. */
    void (*rotate)(const float *rows, ptrdiff_t stride, ptrdiff_t num_rows, ptrdiff_t n, float *out,
                   ptrdiff_t out_stride);
    /* Multiplies rows of n floats by a matrix of n rows of n columns, padded to a multiple of KV_LANES. `out` may be the rows
       themselves. */
    void (*change_basis)(const float *rows, ptrdiff_t stride, ptrdiff_t num_rows, ptrdiff_t n, const float *matrix,
                     float *out, ptrdiff_t out_stride);
    /* Normalises rows of n floats of Q or K, `stride` floats apart, and applies RoPE; see kv_transform. `out` may be the
       rows themselves. */
    void (*transform)(const float *rows, ptrdiff_t stride, ptrdiff_t num_rows, ptrdiff_t n,
                      const kv_transform *transform, float *out, ptrdiff_t out_stride);

    /* Attention on one tile. In the fast precision a score that the rounding of its query may move too far is NaN; see
       activations.inc.h. */
    void (*prepare[KV_NUM_DTYPES])(const kv_side *side, const float *rows, int num_rows, float scale,
                                   kv_queries *queries);
    void (*scores[KV_NUM_DTYPES])(const kv_side *side, const kv_queries *queries, int num_rows,
                                  const kv_tile *tile, const kv_ahead *ahead, float *scores);
    void (*softmax)(kv_softmax *state, int num_rows, int count, const int *from, const int *to,
                    int64_t position, const kv_score_options *options);
    void (*accumulate[KV_NUM_DTYPES])(const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile,
                                      const kv_ahead *ahead, float *acc);
    /* The same for latent rows: reads the values from the K side. */
    void (*accumulate_latent[KV_NUM_DTYPES])(const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile,
                                             const kv_ahead *ahead, float *acc);
    /* Rows whose rounding of weights is large next to their n sums of values, a bit for each; see activations.inc.h. 16 sums of a
       row are `stride` floats from the next 16. */
    unsigned (*rows_to_refine)(const float *acc, ptrdiff_t row_stride, ptrdiff_t stride, ptrdiff_t n, const double *noise,
                               int num_rows);
    int has_matrix; /* whether panels are multiplied by a matrix unit */
    kv_panel_kernels panels[KV_PANEL_KINDS];
    void (*scale_add)(float *target, float target_scale, const float *source, float source_scale,
                      ptrdiff_t n);
    /* The same for sums in double. */
    void (*scale_add_double)(double *target, double target_scale, const float *source, double source_scale, ptrdiff_t n);

    /* Product quantisation, see pq.inc.h. Points are (dim, n), `stride` floats from one dimension to the next, n a multiple
       of KV_LANES. Finds the nearest centroid of each point, the first of several, and half its squared distance minus half
       the point's squared norm. */
    void (*nearest)(const float *points, ptrdiff_t stride, ptrdiff_t n, const kv_pq_codebook *book, const float *half_norms,
                    uint8_t *codes, float *distances);
    void (*decode_codes)(const kv_codes *codes, ptrdiff_t n, char *rows, ptrdiff_t stride);

    /* Measure the machine: read n bytes (a multiple of 256) as the kernels do; multiply and add integers or float32 in
       registers alone, and return the number of operations. */
    uint32_t (*read_bytes)(const char *source, ptrdiff_t n);
    double (*multiply[2])(ptrdiff_t steps, float *sink);
} kv_kernels;

/* The tiers of this build, best first, NULL-terminated. kv_supported returns whether this CPU and its
   operating system can run one. */
extern const kv_kernels *const kv_all_kernels[];
int kv_supported(const kv_kernels *kernels);
/* The table of a tier in the fast precision, whose activations have one byte (activations.inc.h). */
const kv_kernels *kv_fast(const kv_kernels *exact);
/* Completes all tables; call it before the first kernel. What a tier has not of its own comes from its base, and what the fast
   precision has not from the exact one. */
void kv_begin(void);

typedef struct { char vendor[13]; int family, model; } kv_cpu_identity;
/* What an x86 processor calls itself; others have no vendor. */
kv_cpu_identity kv_identify_cpu(void);
typedef struct { const char *name; int present; } kv_cpu_feature;
/* Features of this CPU that kvfast knows; ends with a NULL name. */
const kv_cpu_feature *kv_cpu_features(void);

#endif
