/* Products of bytes: 16 rows of activations by 16 lanes over 64 depths. The matrix unit takes them at once, by_unit.inc.h; for the fast
   precision vectors do, too, by_vectors.inc.h. The keys and values of a tile, operands.inc.h, are

     of 1 part    codes minus their bias: they are multiplied by the activations' high and low parts
     of 2 parts   16-bit integers 256 x high + low, for what is stored as floats: high x high, high x low and
                  low x high are multiplied; the low parts' product, 2^-16 of the whole, is left out

   The sums over these tokens stay integers. With 1 part they are exact as in activations.inc.h, and scores, weights and sums of values
   are computed in the same order: in the exact precision, rows on codes have the bits that vectors give them. With 2 parts, in units of
   256,
       |sum v x| / 256 <= 128 * 32639 * 32639 / 256 = 532 654 500 < 2^31, and what is left out is
   at most 64 * 128.

   Activations of the fast precision are one part, the high one. With 2 parts, of 512 elements of a key or 128 tokens,
       |sum v x| <= 512 * 32639 * 127 = 2 122 317 696 < 2^31.

   Keys that are stored as floats are multiplied in bfloat16 where there is a matrix unit, tiles_bf16: with one channel
   louder than the others, an integer would leave the others few bits. Vectors have 16 bits for them. Queries are rounded as in
   activations.inc.h, and their rounding errors are multiplied as well where they matter. */

#define KV_ABOVE_ZERO ((int)0x80808080) /* 128 in each byte */

/* Cuts row r of a panel times `inverse` into integers, (2, tiles, rows, 64). For vectors they are 128 more, as their first factor has
   no sign. */
static inline void KV(cut_query)(const float *row, int n, vf inverse, int r, int8_t *parts)
{
    const ptrdiff_t tiles = (n + TILE_DEPTH - 1) / TILE_DEPTH;
    int8_t *at = parts + r * TILE_DEPTH;
    for (; n > 0; n -= TILE_DEPTH, row += TILE_DEPTH, at += TILE_BYTES) {
        vi x[4];
        KV_FOR4(j, 4, x[j] = n >= TILE_DEPTH || j * W < n ? vf_round(vf_mul(vf_load(row + j * W), inverse)) : vi_set1(0););
        KV(cut_activations)(x[0], x[1], x[2], x[3], at, at + tiles * TILE_BYTES);
        if (!KV_TILE_UNIT) _mm512_store_si512(at, _mm512_xor_si512(_mm512_load_si512(at), vi_set1(KV_ABOVE_ZERO)));
    }
}

/* Prepares 16 query rows: as integers with their units, and times the softmax scale in bfloat16, which multiplies float rows. */
static void KV(prepare_rows)(const float *rows, int n, float factor, int floats, float *unit, float *inverse, int8_t *parts,
                             int8_t *words)
{
    KV(find_units)(rows, n, KV_ROWS, factor, inverse, unit);
    for (int r = 0; r < KV_ROWS; r++, rows += n) {
        KV(cut_query)(rows, n, vf_set1(inverse[r]), r, parts);
        if (KV_TILE_UNIT && floats) KV(cut_query_bf16)(rows, n, vf_set1(factor), r, words);
    }
}

/* Prepares a panel of query rows, (KV_ROWS, padded_dim) floats. */
static void KV(prepare_tiles8)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows,
                              float factor, int mixed, kv_panel *panel)
{
    panel->factor = factor;
    memcpy(panel->queries, rows, KV_ROWS * (size_t)side->padded_dim * sizeof(float));
    KV(prepare_rows)(rows, side->padded_dim, factor, mixed || side->family == KV_FLOAT_ROWS, panel->unit, panel->inverse, panel->parts,
                     panel->words);
    if (!rope) return;
    memcpy(panel->rope_queries, rope_rows, KV_ROWS * (size_t)rope->padded_dim * sizeof(float));
    KV(prepare_rows)(rope_rows, rope->padded_dim, factor, mixed || rope->family == KV_FLOAT_ROWS, panel->rope_unit,
                     panel->rope_inverse, panel->rope_parts, panel->rope_words);
}

/* Sums of a lane tile, 16 rows x 16 lanes. */
typedef struct {
    KV_ALIGNED int32_t high[KV_ROWS * KV_LANES];
    KV_ALIGNED int32_t low[KV_ROWS * KV_LANES];
} KV(lane_sums);

/* Whether products of operands of `parts` parts have a sum of low ones. */
#define KV_HAS_LOW(parts) (!KV_FAST || (parts) == 2)

static inline vf KV(total)(const KV(lane_sums) *sums, int row, int parts)
{
    if (!KV_HAS_LOW(parts)) return vi_to_float(_mm512_load_si512(sums->high + row * KV_LANES));
    return vi_to_float(vi_add(_mm512_slli_epi32(_mm512_load_si512(sums->high + row * KV_LANES), 8),
                              _mm512_load_si512(sums->low + row * KV_LANES)));
}

/* What turns sums of keys and activations into scores. */
typedef struct {
    const int8_t *keys;        /* lane tiles, (16 tokens, parts, tiles, 16 lines, 64) */
    const int8_t *x;           /* (2, tiles, rows, 64) */
    int dim, parts;
    const int32_t *starts;     /* of vectors: what the sums of each part begin with, (parts, KV_MATRIX_TILE) */
    const float *scales;       /* of the tokens */
    const float *unit;         /* of each row of x */
    const float *shift;        /* of each row, or NULL */
    const float *most;         /* of each row, the largest score before this tile, or -infinity; see least_errors */
    unsigned whole;            /* bit r: row r sees the whole tile, and its largest score grows with it */
    float error;               /* what makes a unit times a token's scale a standard error */
    kv_room *room;
} KV(key_products);

enum { SETS, REFINES }; /* what becomes of scores: they are written, or added to others where the rounding matters */

/* By how much the errors of row r's scores of 16 tokens, which have these scales, are above the largest that may be left. */
static inline vf KV(excess_of)(const KV(key_products) *p, vf scales, const float *scores, int r)
{
    const vf size = vf_mul(scales, vf_set1(__builtin_fabsf(p->unit[r]) * p->error));
    return vf_sub(size, KV(least_errors)(vf_load(scores), vf_set1(p->most[r])));
}

/* Turns the sums of a lane tile, 16 tokens, into scores. */
static inline __attribute__((always_inline)) void KV(put_scores)(const KV(key_products) *p, const KV(lane_sums) *done, int lane,
                                                                 float *scores, const int shifts, const int use)
{
    const vf scale = vf_load(p->scales + lane * KV_LANES);
    float *row = scores + lane * KV_LANES;
    for (int r = 0; r < KV_ROWS; r++, row += TILE_TOKENS) {
        const vf total = KV(total)(done, r, p->parts), factor = vf_mul(scale, vf_set1(p->unit[r]));
        if (use == REFINES) {
            const vf rest = vf_zero_below(vf_mul(total, factor), KV(excess_of)(p, scale, row, r), 0.0f);
            vf_store(row, vf_fma(rest, vf_set1(0.5f / KV_MAX_ACTIVATION), vf_load(row)));
        } else if (shifts) vf_store(row, vf_fma(total, factor, vf_set1(p->shift[r])));
        else vf_store(row, vf_mul(total, factor));
    }
}

/* Adds the sums of a lane tile of values to a panel's, and the sums before times `rescale`, or as they are if it is NULL. */
static inline __attribute__((always_inline)) void KV(add_lane_tile)(const KV(lane_sums) *done, int parts, const float *unit,
                                                               const float *rescale, float *target)
{
    if (!rescale)
        for (int r = 0; r < KV_ROWS; r++, target += KV_LANES)
            vf_store(target, vf_fma(KV(total)(done, r, parts), vf_set1(unit[r]), vf_load(target)));
    else
        for (int r = 0; r < KV_ROWS; r++, target += KV_LANES)
            vf_store(target, vf_fma(KV(total)(done, r, parts), vf_set1(unit[r]), vf_mul(vf_load(target), vf_set1(rescale[r]))));
}
