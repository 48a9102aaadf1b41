/* Sizes and limits of kvfast, each written once. C reads them here, Cython through core/limits.pxd, Python through
   kvfast.core.limits. */
#ifndef KVFAST_LIMITS_H
#define KVFAST_LIMITS_H

#include <float.h>
#include <stddef.h>

/* A library that is built with the float kernels alone may need wider rows and shorter tiles. */
#ifndef KV_WIDEST_HEAD
#define KV_WIDEST_HEAD 512
#endif
#ifndef KV_LONGEST_TILE
#define KV_LONGEST_TILE 256
#endif

/* Sizes of kernels. */
enum {
    KV_LANES = 16,         /* lanes of a tile; tokens come in multiples of it */
    KV_TILE = KV_LONGEST_TILE, /* 256: most tokens between two softmax corrections */
    KV_MATRIX_TILE = 128,  /* the same for many query rows on a matrix unit */
    KV_WORD_GROUP = 32,    /* tokens of it whose weights share a unit as words, where values were rounded */
    KV_ROWS = 16,          /* most query rows that share one pass over a block */
    KV_MAX_HEAD_DIM = KV_WIDEST_HEAD, /* 512: bound of the int32 accumulators, see activations.inc.h */
    KV_MAX_ROPE_DIM = 128, /* width of the rotary part of latent rows: two tiles of a matrix unit */
    KV_QUAD = 4,           /* query rows whose activations are interleaved */
    KV_MAX_PANELS = 32,    /* most panels of KV_ROWS query rows that share the operands of a tile, as words */
    KV_MATRIX_PANELS = 16, /* the same for a matrix unit that reads codes */
    KV_TASK_ROWS = KV_ROWS * KV_MAX_PANELS, /* most query rows of a task */
    KV_MAX_CENTROIDS = 256 /* of a codebook: codes are bytes */
};

/* Sizes of caches. */
enum {
    KV_MIN_BLOCK_SIZE = KV_LANES, /* tokens of a block, a power of two */
    KV_MAX_BLOCK_SIZE = 256,
    KV_PIECE = 16,                /* tokens of a piece of float rows */
    /* A block that is sealed is read as float rows until at least this number of tokens follow it, and as codes from then on. So a
       rollback of this many tokens is exact, and as many queries in one call see what each would see alone. */
    KV_OPEN_TOKENS = 16,
    KV_MAX_RECENT_TOKENS = 1024, /* most tokens that a format may let follow it */
    KV_FEW_QUERIES = KV_OPEN_TOKENS, /* most queries of a call that see what each would see alone */
    KV_MAX_FLOAT_TOKENS = KV_PIECE,  /* first tokens of a sequence that always stay floats */
    KV_SLAB_SHIFT = 3,
    KV_SLAB_BLOCKS = 1 << KV_SLAB_SHIFT, /* memory is allocated for multiples of this number of blocks or pieces */
    KV_MAX_LAYERS = 1 << 16,
    KV_MAX_KV_HEADS = 1 << 16,
    KV_MAX_Q_HEADS = 1 << 20
};
#define KV_MAX_TOKENS ((ptrdiff_t)1 << 40) /* most tokens of a sequence, and most blocks of a pool */
#define KV_UNLIMITED ((ptrdiff_t)1 << 60)  /* limit of a count without a limit of its own */

/* Largest magnitudes of elements. */
#define KV_MAX_FLOAT32 FLT_MAX
#define KV_MAX_FLOAT16 65504.0f
#define KV_MAX_BFLOAT16 3.3895314e38f
#define KV_MAX_ROTATED 6e35f /* in a row that will be rotated back: sums of KV_MAX_HEAD_DIM of them are finite */

#endif
