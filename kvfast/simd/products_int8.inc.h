/* Products of codes on the matrix unit: 16 rows of activations by 16 lanes over 64 depths, in int8. The keys and
   values of KV_TILE tokens, operands.inc.h, are

     of 1 part    codes less their bias: the activations' high and low parts are multiplied with them
     of 2 parts   16-bit integers 256 x high + low, of rows that are stored as floats and of keys with channel
                  scales: high x high, high x low and low x high; the low parts' product, 2^-16 of the whole, is
                  left out

   The sums over these tokens stay integers: of 1 part exact as in activations.inc.h; of 2 parts, in units of 256,
       |sum k x| / 256 <= 512 * 32639 * 32639 / 256 = 2 130 618 000 < 2^31, and what is left out is
   at most 64 * 512. */

/* Tile registers, which the intrinsics want as literals. The CPU renames them: products of one lane tile start
   while the sums of the one before are stored. */
#define SUM_HIGH 0
#define SUM_LOW 1
#define OPERAND 2
#define X_HIGH_0 4 /* activations of the first two tiles of depth */
#define X_LOW_0 5
#define X_HIGH_1 6
#define X_LOW_1 7

/* Row r of a panel times `inverse` as integers, (2, tiles, rows, 64), and where they are wanted as (n, rows) floats. */
static inline void KV(cut_query)(const float *row, int n, vf inverse, int r, int8_t *parts, float *turned)
{
    const int tiles = (n + TILE_DEPTH - 1) / TILE_DEPTH;
    for (int i = 0; i < tiles; i++) {
        vi x[4];
        for (int j = 0; j < 4; j++) {
            const int at = i * TILE_DEPTH + j * W;
            x[j] = at < n ? vf_round(vf_mul(vf_load(row + at), inverse)) : vi_set1(0);
            if (turned && at < n) {
                float column[W];
                vf_store(column, vi_to_float(x[j]));
                for (int c = 0; c < W; c++) turned[(at + c) * KV_ROWS + r] = column[c];
            }
        }
        KV(put_bytes)(x[0], x[1], x[2], x[3], parts + i * TILE_BYTES + r * TILE_DEPTH,
                      parts + (tiles + i) * TILE_BYTES + r * TILE_DEPTH);
    }
}

/* Makes a panel of query rows, (KV_ROWS, padded_dim) floats, ready. The rotary part has the scale of the whole row, so
   that the products of both are in one unit. */
static void KV(prepare_panel)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows,
                              float factor, kv_panel *panel)
{
    const int n = side->padded_dim, m = rope ? rope->padded_dim : 0;
    for (int r = 0; r < KV_ROWS; r++, rows += n, rope_rows += m) {
        const int32_t one = KV(max_magnitude_bits)(rows, n), other = m ? KV(max_magnitude_bits)(rope_rows, m) : 0;
        const float largest = kv_bits_float((uint32_t)(one > other ? one : other));
        /* A scale is not negative, so that the greatest product is the greatest score. */
        const vf inverse = vf_set1(factor < 0 ? -KV_INVERSE(largest) : KV_INVERSE(largest));
        panel->scale[r] = largest / KV_MAX_ACTIVATION * __builtin_fabsf(factor);
        KV(cut_query)(rows, n, inverse, r, panel->parts, side->means ? panel->turned : NULL);
        if (m) KV(cut_query)(rope_rows, m, inverse, r, panel->rope, NULL);
    }
}

/* Sums of a lane tile, 16 rows x 16 lanes. */
typedef struct {
    KV_ALIGNED int32_t high[KV_ROWS * KV_LANES];
    KV_ALIGNED int32_t low[KV_ROWS * KV_LANES];
} KV(lane_sums);

/* Activations of 16 rows, (2, tiles, 16, 64) with `part` bytes between the parts, of one or two tiles of depth, stay in
   registers for all lanes that they are multiplied with. */
static inline void KV(hold)(const int8_t *x, ptrdiff_t part, int tiles)
{
    _tile_loadd(X_HIGH_0, x, TILE_DEPTH);
    _tile_loadd(X_LOW_0, x + part, TILE_DEPTH);
    if (tiles < 2) return;
    _tile_loadd(X_HIGH_1, x + TILE_BYTES, TILE_DEPTH);
    _tile_loadd(X_LOW_1, x + TILE_BYTES + part, TILE_DEPTH);
}

#define MULTIPLY_TILE(x_high, x_low, codes)      \
    do {                                         \
        _tile_loadd(OPERAND, codes, 64);         \
        _tile_dpbssd(SUM_HIGH, x_high, OPERAND); \
        _tile_dpbssd(SUM_LOW, x_low, OPERAND);   \
        if (parts == 2) {                        \
            _tile_loadd(OPERAND, codes + part, 64);  \
            _tile_dpbssd(SUM_LOW, x_high, OPERAND);  \
        }                                        \
    } while (0)

/* Products of held activations with a lane tile of operands, (parts, tiles, 16, 64) with `part` bytes between the
   parts. */
static inline __attribute__((always_inline)) void KV(multiply)(const int8_t *codes, ptrdiff_t part, int parts, int tiles,
                                                               KV(lane_sums) *sums)
{
    _tile_zero(SUM_HIGH);
    _tile_zero(SUM_LOW);
    MULTIPLY_TILE(X_HIGH_0, X_LOW_0, codes);
    if (tiles == 2) MULTIPLY_TILE(X_HIGH_1, X_LOW_1, codes + TILE_BYTES);
    _tile_stored(SUM_HIGH, sums->high, 64);
    _tile_stored(SUM_LOW, sums->low, 64);
}
#undef MULTIPLY_TILE

/* The same of two lane tiles, `stride` bytes apart, of many tiles of depth: with four sums under way no instruction
   waits for the one before it, and activations are loaded once for both. */
static inline __attribute__((always_inline)) void KV(multiply_pair)(
    const int8_t *codes, ptrdiff_t stride, ptrdiff_t part, int parts, const int8_t *x, ptrdiff_t x_part, int tiles,
    KV(lane_sums) *sums)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; tiles > 0; tiles--, codes += TILE_BYTES, x += TILE_BYTES) {
        _tile_loadd(4, x, TILE_DEPTH);
        _tile_loadd(6, codes, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, codes + stride, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_loadd(5, x + x_part, TILE_DEPTH);
        _tile_dpbssd(1, 5, 6);
        _tile_dpbssd(3, 5, 7);
        if (parts == 2) {
            _tile_loadd(6, codes + part, 64);
            _tile_dpbssd(1, 4, 6);
            _tile_loadd(7, codes + part + stride, 64);
            _tile_dpbssd(3, 4, 7);
        }
    }
    _tile_stored(0, sums[0].high, 64);
    _tile_stored(1, sums[0].low, 64);
    _tile_stored(2, sums[1].high, 64);
    _tile_stored(3, sums[1].low, 64);
}

static inline vf KV(total)(const KV(lane_sums) *sums, int row)
{
    return vi_to_float(vi_add(_mm512_slli_epi32(_mm512_load_si512(sums->high + row * KV_LANES), 8),
                              _mm512_load_si512(sums->low + row * KV_LANES)));
}

/* Sums of a lane tile, 16 tokens, become scores in units of the rows' scales; with `shift` of each block's means. */
static inline void KV(put_scores)(const kv_operands *operands, const KV(lane_sums) *done, int lane, const float *shift,
                                  float *scores)
{
    const vf scale = vf_load(operands->key_scales + lane * KV_LANES);
    const float *row_shift = shift + operands->means_of[lane] * KV_ROWS;
    float *row = scores + lane * KV_LANES;
    if (operands->num_means)
        for (int r = 0; r < KV_ROWS; r++, row += KV_TILE)
            vf_store(row, vf_fma(KV(total)(done, r), scale, vf_set1(row_shift[r])));
    else
        for (int r = 0; r < KV_ROWS; r++, row += KV_TILE) vf_store(row, vf_mul(KV(total)(done, r), scale));
}

/* Scores of the tokens begin to end. While the products of a lane tile, or of two, are under way, the sums of those
   before become scores. */
static void KV(score_tokens)(const kv_operands *operands, const kv_panel *panel, int begin, int end,
                             KV(lane_sums) sums[4], float *scores)
{
    KV_ALIGNED float shift[KV_TILE / KV_LANES * KV_ROWS]; /* (blocks, KV_ROWS) means times queries */
    const int tiles = (operands->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const ptrdiff_t part = tiles * TILE_BYTES;
    for (int i = 0; i < operands->num_means; i++) {
        vf sum = vf_set1(0.0f), other = sum;
        const float *means = operands->means + i * KV_MAX_HEAD_DIM;
        for (int c = 0; c < operands->dim; c += 2) {
            sum = vf_fma(vf_set1(means[c]), vf_load(panel->turned + c * KV_ROWS), sum);
            other = vf_fma(vf_set1(means[c + 1]), vf_load(panel->turned + (c + 1) * KV_ROWS), other);
        }
        vf_store(shift + i * KV_ROWS, vf_add(sum, other));
    }
    const ptrdiff_t stride = operands->key_parts * part;
    const int first = begin / KV_LANES, last = end / KV_LANES;
    if (tiles > 2) {
        for (int lane = first; lane <= last; lane += 2) {
            if (lane < last)
                KV(multiply_pair)(operands->keys + lane * stride, stride, part, operands->key_parts, panel->parts, part,
                                  tiles, sums + (lane & 2));
            if (lane == first) continue;
            KV(put_scores)(operands, sums + ((lane - 2) & 2), lane - 2, shift, scores);
            KV(put_scores)(operands, sums + ((lane - 2) & 2) + 1, lane - 1, shift, scores);
        }
        return;
    }
    KV(hold)(panel->parts, part, tiles);
    for (int lane = first; lane <= last; lane++) {
        if (lane < last)
            KV(multiply)(operands->keys + lane * stride, part, operands->key_parts, tiles, sums + (lane & 1));
        if (lane > first) KV(put_scores)(operands, sums + ((lane - 1) & 1), lane - 1, shift, scores);
    }
}

/* Adds the products of the rotary part of latent rows, whose sums are integers of their own, to the scores. */
static void KV(add_rope_scores)(const kv_operands *operands, const kv_panel *panel, int begin, int end,
                                KV(lane_sums) sums[2], float *scores)
{
    const int tiles = (operands->rope_dim + TILE_DEPTH - 1) / TILE_DEPTH; /* 1 or 2: held */
    const ptrdiff_t part = tiles * TILE_BYTES;
    KV(hold)(panel->rope, part, tiles);
    for (int lane = begin / KV_LANES; lane <= end / KV_LANES; lane++) {
        if (lane < end / KV_LANES)
            KV(multiply)(operands->rope + lane * operands->rope_parts * part, part, operands->rope_parts, tiles,
                         sums + (lane & 1));
        if (lane == begin / KV_LANES) continue;
        const KV(lane_sums) *done = sums + ((lane - 1) & 1);
        const vf scale = vf_load(operands->rope_scales + (lane - 1) * KV_LANES);
        float *row = scores + (lane - 1) * KV_LANES;
        for (int r = 0; r < KV_ROWS; r++, row += KV_TILE) vf_store(row, vf_fma(KV(total)(done, r), scale, vf_load(row)));
    }
}

/* Adds weights times values to the panel's sums. */
static void KV(add_values)(const kv_operands *operands, kv_panel *panel, int begin, int end, const int8_t *x,
                           const KV(correction) *correction, KV(lane_sums) sums[2])
{
    const float *weight = correction->unit, *rescale = correction->rescale;
    const int tiles = (end - begin) / TILE_DEPTH, lanes = operands->dim / KV_LANES;
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
        if (!correction->changed)
            for (int r = 0; r < KV_ROWS; r++, target += KV_LANES)
                vf_store(target, vf_fma(KV(total)(done, r), vf_set1(weight[r]), vf_load(target)));
        else
            for (int r = 0; r < KV_ROWS; r++, target += KV_LANES)
                vf_store(target, vf_fma(KV(total)(done, r), vf_set1(weight[r]),
                                        vf_mul(vf_load(target), vf_set1(rescale[r]))));
    }
}
