/* Products of codes on the matrix unit: 16 rows of activations by 16 lanes over 64 depths, in int8. The keys and
   values of KV_MATRIX_TILE tokens, operands.inc.h, are

     of 1 part    codes minus their bias: they are multiplied by the activations' high and low parts
     of 2 parts   16-bit integers 256 x high + low, for values that are stored as floats: high x high, high x low and
                  low x high are multiplied; the low parts' product, 2^-16 of the whole, is left out

   The sums over these tokens stay integers. With 1 part they are exact as in activations.inc.h. With 2 parts, in units of 256,
       |sum v x| / 256 <= 128 * 32639 * 32639 / 256 = 532 654 500 < 2^31, and what is left out is
   at most 64 * 128.

   Activations of the fast precision are one part, the high one. With values of 2 parts,
       |sum v x| <= 128 * 32639 * 127 < 2^30.

   Keys that are stored as floats are multiplied in bfloat16, products_bfloat16.inc.h: with one channel louder than the
   others, an integer would leave the others few bits. Queries are rounded as in activations.inc.h, and their rounding
   errors are multiplied as well where they matter. */

/* Tile registers, which the intrinsics need as literals. The CPU renames them: the products of one lane tile start
   while the sums of the previous one are stored. */
#define SUM_HIGH 0
#define SUM_LOW 1
#define OPERAND 2
#define X_HIGH_0 4 /* activations of the first two tiles of depth */
#define X_LOW_0 5
#define X_HIGH_1 6
#define X_LOW_1 7

/* Cuts row r of a panel times `inverse` into integers, (2, tiles, rows, 64). */
static inline void KV(cut_query)(const float *row, int n, vf inverse, int r, int8_t *parts)
{
    const int tiles = (n + TILE_DEPTH - 1) / TILE_DEPTH;
    for (int i = 0; i < tiles; i++) {
        vi x[4];
        for (int j = 0; j < 4; j++) {
            const int at = i * TILE_DEPTH + j * W;
            x[j] = at < n ? vf_round(vf_mul(vf_load(row + at), inverse)) : vi_set1(0);
        }
        KV(cut_activations)(x[0], x[1], x[2], x[3], parts + i * TILE_BYTES + r * TILE_DEPTH,
                      parts + (tiles + i) * TILE_BYTES + r * TILE_DEPTH);
    }
}

/* Prepares 16 query rows: times the softmax scale, as integers with their units, and in bfloat16. */
static void KV(prepare_rows)(const float *rows, int n, float factor, float *scaled, float *unit, float *inverse,
                             int8_t *parts, int8_t *halves)
{
    for (int r = 0; r < KV_ROWS; r++, rows += n, scaled += n) {
        KV(scale_row)(rows, n, factor, NULL, scaled);
        const float largest = kv_bits_float((uint32_t)KV(max_magnitude_bits)(scaled, n));
        inverse[r] = KV_INVERSE(largest);
        unit[r] = largest / KV_MAX_ACTIVATION;
        KV(cut_query)(scaled, n, vf_set1(inverse[r]), r, parts);
        KV(halve_query)(scaled, n, vf_set1(1.0f), r, halves);
    }
}

/* Prepares a panel of query rows, (KV_ROWS, padded_dim) floats. */
static void KV(prepare_panel)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows,
                              float factor, int exact, kv_panel *panel)
{
    (void)exact;
    KV(prepare_rows)(rows, side->padded_dim, factor, panel->queries, panel->unit, panel->inverse, panel->parts, panel->halves);
    if (rope)
        KV(prepare_rows)(rope_rows, rope->padded_dim, factor, panel->rope_queries, panel->rope_unit, panel->rope_inverse,
                         panel->rope, panel->rope_halves);
}

/* Sums of a lane tile, 16 rows x 16 lanes. */
typedef struct {
    KV_ALIGNED int32_t high[KV_ROWS * KV_LANES];
    KV_ALIGNED int32_t low[KV_ROWS * KV_LANES];
} KV(lane_sums);

/* Loads activations of 16 rows, (2, tiles, 16, 64) with `part` bytes between the parts and one or two tiles of depth, into
   registers. They stay there for all lanes. */
static inline void KV(hold)(const int8_t *x, ptrdiff_t part, int tiles)
{
    _tile_loadd(X_HIGH_0, x, TILE_DEPTH);
    if (!KV_FAST) _tile_loadd(X_LOW_0, x + part, TILE_DEPTH);
    if (tiles < 2) return;
    _tile_loadd(X_HIGH_1, x + TILE_BYTES, TILE_DEPTH);
    if (!KV_FAST) _tile_loadd(X_LOW_1, x + TILE_BYTES + part, TILE_DEPTH);
}

/* Whether products of operands of `parts` parts have a sum of low ones. */
#define KV_HAS_LOW(parts) (!KV_FAST || (parts) == 2)

#define MULTIPLY_TILE(x_high, x_low, codes)                  \
    do {                                                     \
        _tile_loadd(OPERAND, codes, 64);                     \
        _tile_dpbssd(SUM_HIGH, x_high, OPERAND);             \
        if (!KV_FAST) _tile_dpbssd(SUM_LOW, x_low, OPERAND); \
        if (parts == 2) {                                    \
            _tile_loadd(OPERAND, codes + part, 64);          \
            _tile_dpbssd(SUM_LOW, x_high, OPERAND);          \
        }                                                    \
    } while (0)

/* Multiplies the held activations by a lane tile of operands, (parts, tiles, 16, 64) with `part` bytes between the
   parts. */
static inline __attribute__((always_inline)) void KV(multiply)(const int8_t *codes, ptrdiff_t part, int parts, int tiles,
                                                               KV(lane_sums) *sums)
{
    _tile_zero(SUM_HIGH);
    if (KV_HAS_LOW(parts)) _tile_zero(SUM_LOW);
    MULTIPLY_TILE(X_HIGH_0, X_LOW_0, codes);
    if (tiles == 2) MULTIPLY_TILE(X_HIGH_1, X_LOW_1, codes + TILE_BYTES);
    _tile_stored(SUM_HIGH, sums->high, 64);
    if (KV_HAS_LOW(parts)) _tile_stored(SUM_LOW, sums->low, 64);
}
#undef MULTIPLY_TILE

/* The same for two lane tiles of one part, `stride` bytes apart, with many tiles of depth. With four sums in progress no
   instruction waits for the one before it, and activations are loaded once for both lane tiles. */
static inline __attribute__((always_inline)) void KV(multiply_pair)(
    const int8_t *codes, ptrdiff_t stride, const int8_t *x, ptrdiff_t x_part, int tiles, KV(lane_sums) *sums)
{
    _tile_zero(0);
    if (!KV_FAST) _tile_zero(1);
    _tile_zero(2);
    if (!KV_FAST) _tile_zero(3);
    for (; tiles > 0; tiles--, codes += TILE_BYTES, x += TILE_BYTES) {
        _tile_loadd(4, x, TILE_DEPTH);
        _tile_loadd(6, codes, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, codes + stride, 64);
        _tile_dpbssd(2, 4, 7);
        if (KV_FAST) continue;
        _tile_loadd(5, x + x_part, TILE_DEPTH);
        _tile_dpbssd(1, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0].high, 64);
    if (!KV_FAST) _tile_stored(1, sums[0].low, 64);
    _tile_stored(2, sums[1].high, 64);
    if (!KV_FAST) _tile_stored(3, sums[1].low, 64);
}

static inline vf KV(total)(const KV(lane_sums) *sums, int row, int parts)
{
    if (!KV_HAS_LOW(parts)) return vi_to_float(_mm512_load_si512(sums->high + row * KV_LANES));
    return vi_to_float(vi_add(_mm512_slli_epi32(_mm512_load_si512(sums->high + row * KV_LANES), 8),
                              _mm512_load_si512(sums->low + row * KV_LANES)));
}

/* What turns sums of keys and activations into scores. */
typedef struct {
    const int8_t *keys;        /* lane tiles */
    const int8_t *x;           /* (2, tiles, rows, 64) */
    int dim;
    const float *scales;       /* of the tokens */
    const float *unit;         /* of each row of x */
    const float *shift;        /* of each row, or NULL */
    const float *most;         /* of each row, the largest score so far, or -infinity; see least_errors */
    float error;               /* what makes a unit times a token's scale a standard error */
    kv_room *room;
} KV(key_products);

enum { SETS, ADDS, REFINES }; /* what becomes of scores: they are written, added to others, or added where the rounding matters */

/* Turns the sums of a lane tile, 16 tokens, into scores. */
static inline __attribute__((always_inline)) void KV(put_scores)(const KV(key_products) *p, const KV(lane_sums) *done, int lane,
                                                                 float *scores, const int shifts, const int use)
{
    const vf scale = vf_load(p->scales + lane * KV_LANES);
    float *row = scores + lane * KV_LANES;
    for (int r = 0; r < KV_ROWS; r++, row += KV_MATRIX_TILE) {
        const vf total = KV(total)(done, r, 1), factor = vf_mul(scale, vf_set1(p->unit[r]));
        if (use == REFINES) {
            const vf excess = vf_sub(vf_mul(factor, vf_set1(p->error)), KV(least_errors)(vf_load(row), vf_set1(p->most[r])));
            vf_store(row, vf_add(vf_load(row), vf_zero_below(vf_mul(total, factor), excess, 0.0f)));
        } else if (use == ADDS) vf_store(row, vf_fma(total, factor, vf_load(row)));
        else if (shifts) vf_store(row, vf_fma(total, factor, vf_set1(p->shift[r])));
        else vf_store(row, vf_mul(total, factor));
    }
}

/* Scores of the lane tiles first to last. While the products of one or two lane tiles are computed, the sums of those before
   become scores. With more than two tiles of depth the number of lane tiles is even. */
static inline __attribute__((always_inline)) void KV(score_lanes)(const KV(key_products) *p, int first, int last, float *scores,
                                                                  const int shifts, const int use)
{
    KV(lane_sums) sums[4];
    const int tiles = (p->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const ptrdiff_t stride = tiles * TILE_BYTES;
    KV_SETTLE(p->x);
    if (tiles > 2) {
        for (int lane = first; lane <= last; lane += 2) {
            if (lane < last) KV(multiply_pair)(p->keys + lane * stride, stride, p->x, stride, tiles, sums + (lane & 2));
            if (lane == first) continue;
            KV(put_scores)(p, sums + ((lane - 2) & 2), lane - 2, scores, shifts, use);
            KV(put_scores)(p, sums + ((lane - 2) & 2) + 1, lane - 1, scores, shifts, use);
        }
        return;
    }
    KV(hold)(p->x, stride, tiles);
    for (int lane = first; lane <= last; lane++) {
        if (lane < last) KV(multiply)(p->keys + lane * stride, stride, 1, tiles, sums + (lane & 1));
        if (lane > first) KV(put_scores)(p, sums + ((lane - 1) & 1), lane - 1, scores, shifts, use);
    }
}

/* Adds to the scores the rounding errors of the rows, times `inverse`, where they matter; see activations.inc.h. `scale` is
   the largest scale of the tokens. */
static __attribute__((noinline)) void KV(refine_lanes)(const KV(key_products) *rounded, const float *rows, const float *inverse,
                                                       float scale, int first, int last, float *scores)
{
    typedef struct { KV_ALIGNED int8_t x[KV_ROWS * KV_MAX_HEAD_DIM * 2]; } rest;
    int8_t *const x = KV_IN(rounded->room->again, rest)->x;
    float left[KV_MAX_HEAD_DIM], unit[KV_ROWS], least[KV_ROWS];
    KV(key_products) p = *rounded;
    int begin = last, end = first; /* lane tiles with scores that may count; pairs of them, as score_lanes wants */
    for (int r = 0; r < KV_ROWS; r++) least[r] = KV(least_score)(p.error * scale * p.unit[r], p.most[r]);
    for (int lane = first; lane < last; lane++) {
        vf above = vf_set1(-1.0f);
        for (int r = 0; r < KV_ROWS; r++)
            above = vf_max(above, vf_sub(vf_load(scores + r * KV_MATRIX_TILE + lane * KV_LANES), vf_set1(least[r])));
        if (vf_hmax(above) < 0.0f) continue;
        begin = begin < last ? begin : lane - (lane - first) % 2;
        end = lane + 2 - (lane - first) % 2;
    }
    end = end < last ? end : last;
    if (begin >= end) return;
    for (int r = 0; r < KV_ROWS; r++) {
        KV(leave_rounding)(rows + r * p.dim, 0, 1, p.dim, inverse + r, left);
        KV(cut_query)(left, p.dim, vf_set1(1.0f), r, x);
        unit[r] = p.unit[r] * (0.5f / KV_MAX_ACTIVATION);
    }
    p.x = x, p.unit = unit, p.error *= 2.0f * KV_MAX_ACTIVATION;
    KV(score_lanes)(&p, begin, end, scores, 0, REFINES);
}

/* Scores of the lane tiles first to last, from rows that are cut as p describes. */
static inline __attribute__((always_inline)) void KV(score_rows)(const KV(key_products) *p, const float *rows, const float *inverse,
                                                                 int first, int last, float *scores, const int shifts, const int use)
{
    vf scales = vf_set1(0.0f);
    KV(score_lanes)(p, first, last, scores, shifts, use);
    if (KV_FAST) return;
    for (int lane = first; lane < last; lane++) scales = vf_max(scales, vf_load(p->scales + lane * KV_LANES));
    const float scale = vf_hmax(scales);
    if (vf_hmax(vf_load(p->unit)) * scale * p->error * 1.001f >= KV_LEAST_ERROR)
        KV(refine_lanes)(p, rows, inverse, scale, first, last, scores);
}

/* A panel's rows folded with a key block's statistics. */
typedef struct {
    KV_ALIGNED float shift[KV_ROWS], unit[KV_ROWS], inverse[KV_ROWS];
    KV_ALIGNED float rows[KV_ROWS * KV_MAX_HEAD_DIM];
    KV_ALIGNED int8_t parts[KV_ROWS * KV_MAX_HEAD_DIM * 2];
} KV(folded_panel);

/* What the task's room holds while a panel reads a tile: scores, then weights; weights in the order of the matrix unit. */
typedef struct {
    KV_ALIGNED float scores[KV_ROWS * KV_MATRIX_TILE];
    KV_ALIGNED int8_t x[2 * TOKEN_HALVES * TILE_BYTES];
    KV(folded_panel) folded;
    KV(lane_sums) sums[2];
} KV(panel_room);

static void KV(fold_panel)(const kv_operands *operands, const kv_panel *panel, int block, KV(folded_panel) *folded)
{
    KV_ALIGNED float sums[KV_ROWS * W], most[KV_ROWS * W];
    const float *means = operands->means + block * KV_MAX_HEAD_DIM, *scales = operands->channels + block * KV_MAX_HEAD_DIM;
    const int n = operands->dim;
    for (int r = 0; r < KV_ROWS; r++) {
        const float *row = panel->queries + r * n;
        float *product = folded->rows + r * n;
        vf sum = vf_set1(0.0f), largest = sum;
        for (int c = 0; c < n; c += W) {
            const vf x = vf_load(row + c);
            sum = vf_fma(x, vf_load(means + c), sum);
            if (!operands->has_channels) continue;
            const vf scaled = vf_mul(x, vf_load(scales + c));
            largest = vf_max(largest, vf_abs(scaled));
            vf_store(product + c, scaled);
        }
        vf_store(sums + r * W, sum);
        vf_store(most + r * W, largest);
    }
    vf_store(folded->shift, KV(reduce_rows)(sums, 0));
    if (!operands->has_channels) return;
    const vf top = KV(reduce_rows)(most, 1);
    vf_store(folded->unit, vf_mul(top, vf_set1(1.0f / KV_MAX_ACTIVATION)));
    vf_store(folded->inverse, vf_zero_below(vf_div(vf_set1(KV_MAX_ACTIVATION), top), top, 0x1p-100f));
    for (int r = 0; r < KV_ROWS; r++)
        KV(cut_query)(folded->rows + r * n, n, vf_set1(folded->inverse[r]), r, folded->parts);
}

/* Scores of the tokens begin to end, whose keys are codes. */
static void KV(score_tokens)(const kv_operands *operands, const kv_panel *panel, int begin, int end, float *scores)
{
    const int first = begin / KV_LANES, last = end / KV_LANES;
    const float *most = operands->rope_dim || kv_bends(&panel->options) ? KV(no_scores) : panel->m;
    KV(key_products) p = {operands->keys, panel->parts, operands->dim, operands->key_scales, panel->unit, NULL, most, operands->error,
                          operands->room};
    KV(folded_panel) *const folded = &KV_IN(operands->room->pass, KV(panel_room))->folded;
    if (operands->num_blocks == 0) KV(score_rows)(&p, panel->queries, panel->inverse, first, last, scores, 0, SETS);
    for (int lane = first, stop; operands->num_blocks && lane < last; lane = stop) {
        for (stop = lane + 1; stop < last && operands->block_of[stop] == operands->block_of[lane];) stop++;
        KV(fold_panel)(operands, panel, operands->block_of[lane], folded);
        p.shift = folded->shift;
        if (operands->has_channels) p.x = folded->parts, p.unit = folded->unit;
        KV(score_rows)(&p, operands->has_channels ? folded->rows : panel->queries,
                       operands->has_channels ? folded->inverse : panel->inverse, lane, stop, scores, 1, SETS);
    }
}

/* Adds the products of the rotary part of latent rows, codes, to the scores. */
static void KV(add_rope_scores)(const kv_operands *operands, const kv_panel *panel, int begin, int end, float *scores)
{
    const KV(key_products) p = {operands->rope, panel->rope, operands->rope_dim, operands->rope_scales, panel->rope_unit, NULL,
                                KV(no_scores), operands->rope_error, operands->room};
    KV(score_rows)(&p, panel->rope_queries, panel->rope_inverse, begin / KV_LANES, end / KV_LANES, scores, 0, ADDS);
}

/* Adds weights times values to the panel's sums, and the sums before times `rescale`, or as they are if it is NULL. */
static inline __attribute__((always_inline)) void KV(add_products)(
    const kv_operands *operands, kv_panel *panel, int begin, int end, const int8_t *x, const float *unit, const float *rescale,
    KV(lane_sums) sums[2])
{
    const int tiles = (end - begin) / TILE_DEPTH, lanes = operands->value_dim / KV_LANES;
    const ptrdiff_t part = TOKEN_TILES * TILE_BYTES;
    const int8_t *values = operands->values + begin * KV_LANES;
    x += begin * KV_ROWS;
    KV(hold)(x, part, tiles);
    for (int lane = 0; lane <= lanes; lane++) {
        if (lane < lanes)
            KV(multiply)(values + lane * operands->value_parts * part, part, operands->value_parts, tiles,
                         sums + (lane & 1));
        if (lane == 0) continue;
        const KV(lane_sums) *done = sums + ((lane - 1) & 1);
        float *target = panel->acc + (lane - 1) * (KV_ROWS * KV_LANES);
        if (!rescale)
            for (int r = 0; r < KV_ROWS; r++, target += KV_LANES)
                vf_store(target, vf_fma(KV(total)(done, r, operands->value_parts), vf_set1(unit[r]), vf_load(target)));
        else
            for (int r = 0; r < KV_ROWS; r++, target += KV_LANES)
                vf_store(target, vf_fma(KV(total)(done, r, operands->value_parts), vf_set1(unit[r]),
                                        vf_mul(vf_load(target), vf_set1(rescale[r]))));
    }
}
