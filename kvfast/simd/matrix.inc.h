/* Attention of many query rows by the matrix unit (AMX).

   A product of tiles multiplies 16 rows of activations with 16 lanes of codes over 64 depths, in int8. The
   keys and values of KV_TILE tokens are laid out once as its operands, for all panels of 16 query
   rows that read them:

     of 1 part    codes less their bias: the activations' high and low parts are multiplied with them
     of 2 parts   16-bit integers 256 x high + low, of rows that are stored as floats and of keys with channel
                  scales: high x high, high x low and low x high; the low parts' product, 2^-16 of the whole, is
                  left out

   The sums over these tokens stay integers: of 1 part exact as in activations.inc.h; of 2 parts, in units of 256,
       |sum k x| / 256 <= 512 * 32639 * 32639 / 256 = 2 130 618 000 < 2^31, and what is left out is
   at most 64 * 512. So the softmax is corrected once for every KV_TILE tokens, relative to their own maximum. */

/* Tile registers, which the intrinsics want as literals. The CPU renames them: products of one lane tile start
   while the sums of the one before are stored. */
#define SUM_HIGH 0
#define SUM_LOW 1
#define OPERAND 2
#define X_HIGH_0 4 /* activations of the first two tiles of depth */
#define X_LOW_0 5
#define X_HIGH_1 6
#define X_LOW_1 7

static void KV(configure_tiles)(void)
{
    struct __attribute__((packed)) {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = TILE_DEPTH, config.rows[tile] = 16;
    _tile_loadconfig(&config);
}

/* Makes a panel of query rows, (KV_ROWS, padded_dim) floats, ready. */
static void KV(prepare_panel)(const kv_side *side, const float *rows, float factor, kv_panel *panel)
{
    const int n = side->padded_dim, tiles = (n + TILE_DEPTH - 1) / TILE_DEPTH;
    for (int r = 0; r < KV_ROWS; r++, rows += n) {
        const float largest = kv_bits_float((uint32_t)KV(max_magnitude_bits)(rows, n));
        /* A scale is not negative, so that the greatest product is the greatest score. */
        const vf inverse = vf_set1(factor < 0 ? -KV_INVERSE(largest) : KV_INVERSE(largest));
        panel->scale[r] = largest / KV_MAX_ACTIVATION * __builtin_fabsf(factor);
        for (int i = 0; i < tiles; i++) {
            vi x[4];
            for (int j = 0; j < 4; j++) {
                const int at = i * TILE_DEPTH + j * W;
                x[j] = at < n ? vf_round(vf_mul(vf_load(rows + at), inverse)) : vi_set1(0);
                if (side->means && at < n) {
                    float turned[W];
                    vf_store(turned, vi_to_float(x[j]));
                    for (int c = 0; c < W; c++) panel->turned[(at + c) * KV_ROWS + r] = turned[c];
                }
            }
            KV(put_bytes)(x[0], x[1], x[2], x[3], panel->parts + i * TILE_BYTES + r * TILE_DEPTH,
                          panel->parts + (tiles + i) * TILE_BYTES + r * TILE_DEPTH);
        }
    }
}

/* Sums of a lane tile, 16 rows x 16 lanes. */
typedef struct {
    KV_ALIGNED int32_t high[KV_ROWS * KV_LANES];
    KV_ALIGNED int32_t low[KV_ROWS * KV_LANES];
} KV(lane_sums);

/* Activations of 16 rows, (2, tiles, 16, 64) with `part` bytes between the parts, stay in registers for all lanes
   that they are multiplied with if they have no more than two tiles of depth. */
static inline void KV(hold)(const int8_t *x, ptrdiff_t part, int tiles)
{
    if (tiles > 2) return;
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

/* Products of activations, held if there are few, with a lane tile of operands, (parts, tiles, 16, 64) with `part`
   bytes between the parts. */
static inline __attribute__((always_inline)) void KV(multiply)(
    const int8_t *codes, ptrdiff_t part, int parts, const int8_t *x, ptrdiff_t x_part, int tiles, KV(lane_sums) *sums)
{
    _tile_zero(SUM_HIGH);
    _tile_zero(SUM_LOW);
    if (tiles > 2) {
        for (; tiles > 0; tiles--, codes += TILE_BYTES, x += TILE_BYTES) {
            _tile_loadd(X_HIGH_0, x, TILE_DEPTH);
            _tile_loadd(X_LOW_0, x + x_part, TILE_DEPTH);
            MULTIPLY_TILE(X_HIGH_0, X_LOW_0, codes);
        }
    } else {
        MULTIPLY_TILE(X_HIGH_0, X_LOW_0, codes);
        if (tiles == 2) MULTIPLY_TILE(X_HIGH_1, X_LOW_1, codes + TILE_BYTES);
    }
    _tile_stored(SUM_HIGH, sums->high, 64);
    _tile_stored(SUM_LOW, sums->low, 64);
}
#undef MULTIPLY_TILE

static inline vf KV(total)(const KV(lane_sums) *sums, int row)
{
    return vi_to_float(vi_add(_mm512_slli_epi32(_mm512_load_si512(sums->high + row * KV_LANES), 8),
                              _mm512_load_si512(sums->low + row * KV_LANES)));
}

/* Scores of the tokens begin to end, in units of the rows' scales. While the products of a lane tile,
   16 tokens, are under way, the sums of the one before become scores. */
static void KV(score_tokens)(const kv_operands *operands, const kv_panel *panel, int begin, int end,
                             KV(lane_sums) sums[2], float *scores)
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
    KV(hold)(panel->parts, part, tiles);
    for (int lane = begin / KV_LANES; lane <= end / KV_LANES; lane++) {
        if (lane < end / KV_LANES)
            KV(multiply)(operands->keys + lane * operands->key_parts * part, part, operands->key_parts, panel->parts,
                         part, tiles, sums + (lane & 1));
        if (lane == begin / KV_LANES) continue;
        const KV(lane_sums) *done = sums + ((lane - 1) & 1);
        const vf scale = vf_load(operands->key_scales + (lane - 1) * KV_LANES);
        const float *row_shift = shift + operands->means_of[lane - 1] * KV_ROWS;
        float *row = scores + (lane - 1) * KV_LANES;
        if (operands->num_means)
            for (int r = 0; r < KV_ROWS; r++, row += KV_TILE)
                vf_store(row, vf_fma(KV(total)(done, r), scale, vf_set1(row_shift[r])));
        else
            for (int r = 0; r < KV_ROWS; r++, row += KV_TILE) vf_store(row, vf_mul(KV(total)(done, r), scale));
    }
}

/* 2^x for -126 <= x <= 0 and smaller, which become 2^-126: interpolates 2^r, r = x - floor(x), in the
   Chebyshev nodes of 0 to 1 (relative error 3.5e-6, a fifth of the activations' rounding). */
static inline vf KV(exp2_of_scores)(vf x)
{
    x = vf_max(x, vf_set1(-126.0f));
    const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    vf y = vf_set1(0.0136703094f);
    y = vf_fma(y, r, vf_set1(0.0517449975f));
    y = vf_fma(y, r, vf_set1(0.241604358f));
    y = vf_fma(y, r, vf_set1(0.692972898f));
    y = vf_fma(y, r, vf_set1(1.00000346f));
    return _mm512_scalef_ps(y, x);
}

/* Of 16 rows of 16 floats each the sum, or the greatest. */
static inline __attribute__((always_inline)) vf KV(reduce_rows)(const float *rows, const int maximum)
{
#define JOIN(x, y) (maximum ? vf_max(x, y) : vf_add(x, y))
    vf a[16];
    for (int i = 0; i < 16; i++) a[i] = vf_load(rows + 16 * i);
    /* Row r ends in lane r: its bits 3 and 2 choose the 128-bit lane, 1 and 0 the place there. */
    for (int i = 0; i < 16; i += 2)
        a[i / 2] = JOIN(_mm512_unpacklo_ps(a[i], a[i + 1]), _mm512_unpackhi_ps(a[i], a[i + 1]));
    for (int i = 0; i < 8; i += 2)
        a[i / 2] = JOIN(_mm512_shuffle_ps(a[i], a[i + 1], 0x44), _mm512_shuffle_ps(a[i], a[i + 1], 0xEE));
    for (int i = 0; i < 4; i += 2)
        a[i / 2] = JOIN(_mm512_shuffle_f32x4(a[i], a[i + 1], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 1], 0xDD));
    return JOIN(_mm512_shuffle_f32x4(a[0], a[1], 0x88), _mm512_shuffle_f32x4(a[0], a[1], 0xDD));
#undef JOIN
}

/* Softcap, ALiBi and what a row may not see; false where its scores are natural ones then. */
static inline int KV(bend_row)(const kv_panel *panel, int r, float position, int begin, int end, float *scores)
{
    const int from = panel->start[r], to = panel->stop[r];
    const int bent = panel->options.softcap > 0 || panel->options.slopes;
    const vi lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (bent) {
        const vf scale = vf_set1(panel->scale[r]);
        for (int t = begin; t < end; t += W) vf_store(scores + t, vf_mul(vf_load(scores + t), scale));
        KV(bend_scores)(scores, begin, end, from, to, r, position, &panel->options);
    }
    if (from > begin || to < end)
        for (int t = begin; t < end; t += W) {
            const vi at = vi_add(vi_set1(t), lanes);
            const __mmask16 before = _mm512_cmplt_epi32_mask(at, vi_set1(from));
            const __mmask16 behind = _mm512_cmpge_epi32_mask(at, vi_set1(to));
            vf_store(scores + t, _mm512_mask_mov_ps(vf_load(scores + t), before | behind, vf_set1(-INFINITY)));
        }
    return !bent;
}

/* Scores become exp(score - maximum of these tokens) times the values' scales, then activations: (2, KV_TILE / 64,
   KV_ROWS, 64) bytes. Returns the maxima; `sum`: of the weights; `peak`: the activations' scales. */
static vf KV(weigh_tokens)(const kv_operands *operands, const kv_panel *panel, float position, int begin, int end,
                           float *scores, int8_t *x, vf *sum, vf *peak)
{
    KV_ALIGNED float most[KV_ROWS * W], sums[KV_ROWS * W], factor[KV_ROWS], base[KV_ROWS], inverse[KV_ROWS];
    const float log2e = 1.44269504f;
    const vf none = vf_set1(-INFINITY);
    int natural = 1;
    for (int r = 0; r < KV_ROWS; r++) {
        float *row = scores + r * KV_TILE;
        natural &= KV(bend_row)(panel, r, position, begin, end, row);
        vf a = none, b = none;
        for (int t = begin; t < end; t += 4 * W) {
            a = vf_max(a, vf_max(vf_load(row + t), vf_load(row + t + W)));
            b = vf_max(b, vf_max(vf_load(row + t + 2 * W), vf_load(row + t + 3 * W)));
        }
        vf_store(most + r * W, vf_max(a, b));
    }
    const vf largest = KV(reduce_rows)(most, 1), unit = natural ? vf_load(panel->scale) : vf_set1(1.0f);
    const __mmask16 blind = _mm512_cmp_ps_mask(largest, none, _CMP_EQ_OQ);
    vf_store(factor, vf_mul(unit, vf_set1(log2e)));
    vf_store(base, _mm512_maskz_mov_ps(~blind, largest));
    for (int r = 0; r < KV_ROWS; r++) {
        float *row = scores + r * KV_TILE;
        vf total = vf_set1(0.0f), top = total;
        for (int t = begin; t < end; t += W) {
            const vf below = vf_sub(vf_load(row + t), vf_set1(base[r]));
            const vf weight = KV(exp2_of_scores)(vf_mul(below, vf_set1(factor[r])));
            const vf scaled = vf_mul(weight, vf_load(operands->value_scales + t));
            total = vf_add(total, weight);
            top = vf_max(top, scaled);
            vf_store(row + t, scaled);
        }
        vf_store(sums + r * W, total);
        vf_store(most + r * W, top);
    }
    *sum = KV(reduce_rows)(sums, 0);
    const vf top = KV(reduce_rows)(most, 1);
    *peak = vf_mul(top, vf_set1(1.0f / KV_MAX_ACTIVATION));
    vf_store(inverse, vf_zero_below(vf_div(vf_set1(KV_MAX_ACTIVATION), top), top, 0x1p-100f));
    for (int t = begin; t < end; t += TILE_DEPTH)
        for (int r = 0; r < KV_ROWS; r++) {
            const float *row = scores + r * KV_TILE + t;
            const vf scale = vf_set1(inverse[r]);
            int8_t *at = x + t / TILE_DEPTH * TILE_BYTES + r * TILE_DEPTH;
            KV(put_bytes)(vf_round(vf_mul(vf_load(row), scale)), vf_round(vf_mul(vf_load(row + W), scale)),
                          vf_round(vf_mul(vf_load(row + 2 * W), scale)), vf_round(vf_mul(vf_load(row + 3 * W), scale)),
                          at, at + TOKEN_TILES * TILE_BYTES);
        }
    return _mm512_mask_mov_ps(vf_mul(largest, unit), blind, none);
}

/* Adds weights times values to the panel's sums. `now`, `sum`, `peak`: what weigh_tokens told. */
static void KV(add_values)(const kv_operands *operands, kv_panel *panel, int begin, int end, const int8_t *x, vf now,
                           vf sum, vf peak, KV(lane_sums) sums[2])
{
    KV_ALIGNED float weight[KV_ROWS], rescale[KV_ROWS];
    const vf before = vf_load(panel->m), most = vf_max(before, now), one = vf_set1(1.0f);
    const __mmask16 same = _mm512_cmp_ps_mask(before, most, _CMP_EQ_OQ);
    const vf base = _mm512_mask_mov_ps(most, _mm512_cmp_ps_mask(most, vf_set1(-INFINITY), _CMP_EQ_OQ), one);
    /* Exactly 1 where the maximum stays, so that a tile of which a row sees nothing changes nothing. */
    const vf keep = _mm512_mask_mov_ps(KV(exp)(vf_sub(before, base)), same, one);
    const vf add = KV(exp)(vf_sub(now, base));
    vf_store(panel->m, most);
    vf_store(panel->l, vf_fma(vf_load(panel->l), keep, vf_mul(sum, add)));
    vf_store(rescale, keep);
    vf_store(weight, vf_mul(peak, add));
    const int tiles = (end - begin) / TILE_DEPTH, lanes = operands->dim / KV_LANES;
    const ptrdiff_t part = TOKEN_TILES * TILE_BYTES;
    const int8_t *values = operands->values + begin * KV_LANES;
    x += begin * KV_ROWS;
    KV(hold)(x, part, tiles);
    for (int lane = 0; lane <= lanes; lane++) {
        if (lane < lanes)
            KV(multiply)(values + lane * operands->value_parts * part, part, operands->value_parts, x, part, tiles,
                         sums + (lane & 1));
        if (lane == 0) continue;
        const KV(lane_sums) *done = sums + ((lane - 1) & 1);
        float *target = panel->acc + (lane - 1) * KV_LANES;
        if (same == 0xFFFF)
            for (int r = 0; r < panel->rows; r++, target += operands->dim)
                vf_store(target, vf_fma(KV(total)(done, r), vf_set1(weight[r]), vf_load(target)));
        else
            for (int r = 0; r < panel->rows; r++, target += operands->dim)
                vf_store(target, vf_fma(KV(total)(done, r), vf_set1(weight[r]),
                                        vf_mul(vf_load(target), vf_set1(rescale[r]))));
    }
}

static void KV(attend_panel)(const kv_operands *operands, kv_panel *panel, float position)
{
    KV(lane_sums) sums[2];
    KV_ALIGNED float scores[KV_ROWS * KV_TILE];
    KV_ALIGNED int8_t x[2 * TOKEN_TILES * TILE_BYTES];
    vf sum, peak;
    /* What a row of the panel sees, in whole tiles of depth. */
    int begin = KV_TILE, end = 0;
    for (int r = 0; r < panel->rows; r++)
        if (panel->start[r] < panel->stop[r]) {
            begin = panel->start[r] < begin ? panel->start[r] : begin;
            end = panel->stop[r] > end ? panel->stop[r] : end;
        }
    if (begin >= end) return;
    begin = begin / TILE_DEPTH * TILE_DEPTH;
    end = (end + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;
    KV(score_tokens)(operands, panel, begin, end, sums, scores);
    const vf most = KV(weigh_tokens)(operands, panel, position, begin, end, scores, x, &sum, &peak);
    KV(add_values)(operands, panel, begin, end, x, most, sum, peak, sums);
}

/* One part in `parts` of each block of a tile. */
static inline void KV(prefetch_blocks)(const kv_side *side, const kv_tile *tile, int part, int parts)
{
    const ptrdiff_t begin = side->bytes * part / parts / 64 * 64, end = side->bytes * (part + 1) / parts;
    for (int token = -tile->first, i = 0; token < tile->count; token += side->block_size, i++)
        for (ptrdiff_t at = begin; at < end; at += 64) __builtin_prefetch(tile->base + tile->at[i] + at, 0, 2);
}

static void KV(attend_panels)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,
                            const kv_tile *next_keys, const kv_tile *next_values, float position, kv_operands *operands,
                            kv_panel *panels, int num_panels)
{
    operands->dim = k->padded_dim;
    KV(load_keys)(k, keys, operands);
    KV(load_values)(v, values, operands);
    KV(configure_tiles)();
    for (int i = 0; i < num_panels; i++) {
        KV(prefetch_blocks)(k, next_keys, i, num_panels);
        KV(prefetch_blocks)(v, next_values, i, num_panels);
        KV(attend_panel)(operands, panels + i, position);
    }
    _tile_release();
}

/* `steps` times products of 16 x 16 over 64 depths, from registers; see machine.inc.h. */
static double KV(multiply_tiles)(ptrdiff_t steps, float *sink)
{
    KV_ALIGNED int8_t x[TILE_BYTES];
    KV_ALIGNED int32_t sums[KV_ROWS * KV_LANES];
    for (int i = 0; i < TILE_BYTES; i++) x[i] = (int8_t)((float)(i % 100) + *sink);
    KV(configure_tiles)();
    _tile_zero(SUM_HIGH);
    _tile_zero(SUM_LOW);
    _tile_loadd(X_HIGH_0, x, TILE_DEPTH);
    _tile_loadd(OPERAND, x, 64);
    for (ptrdiff_t i = 0; i < steps; i += 2) {
        _tile_dpbssd(SUM_HIGH, X_HIGH_0, OPERAND);
        _tile_dpbssd(SUM_LOW, X_HIGH_0, OPERAND);
    }
    _tile_stored(SUM_HIGH, sums, 64);
    *sink = (float)sums[0];
    _tile_release();
    return 2.0 * (double)((steps + 1) / 2 * 2) * (KV_ROWS * KV_LANES * TILE_DEPTH);
}
