/* Products of bytes with vectors (vpdpbusd), for the fast precision where there is no matrix unit. The first factor has no sign:
   weights are not negative, and query rows are 128 more than they are. So the sums of a key begin with -128 times the sum of its
   elements:
       |sum| <= 255 * 128 * 512 = 16 711 680 for each part. */

static inline void KV(begin_tiles)(void) {}
static inline void KV(end_tiles)(void) {}

/* What the sums of each part of `count` keys begin with, (parts, KV_MATRIX_TILE). */
static void KV(find_starts)(const int8_t *keys, int parts, int count, int dim, int32_t *starts)
{
    const int tiles = (dim + TILE_DEPTH - 1) / TILE_DEPTH;
    for (int token = 0; token < count; token += KV_LANES)
        for (int part = 0; part < parts; part++, keys += tiles * TILE_BYTES) {
            vacc sum = (vacc)vi_set1(0);
            for (int line = 0; line < dim / 4; line++)
                sum = (vacc)_mm512_dpbusd_epi32((__m512i)sum, vi_set1(KV_ABOVE_ZERO), _mm512_load_si512(keys + line * 64));
            _mm512_store_si512(starts + part * KV_MATRIX_TILE + token, vi_sub(vi_set1(0), (vi)sum));
        }
}

/* Sums of 4 rows and `lanes` lane tiles, `stride` bytes apart, over `lines` lines; activations are (tiles, rows, 64). */
static inline __attribute__((always_inline)) void KV(multiply_rows)(const int8_t *codes, ptrdiff_t stride, const int lanes, int lines,
                                                                    const int8_t *x, const int32_t *starts, int32_t *sums)
{
    vacc sum[4][4];
#pragma GCC unroll 4
    for (int lane = 0; lane < lanes; lane++) {
        const vi start = starts ? _mm512_load_si512(starts + lane * KV_LANES) : vi_set1(0);
        KV_FOR4(r, 4, sum[lane][r] = (vacc)start;);
    }
    for (; lines > 0; lines -= 16, x += TILE_BYTES)
        for (int line = 0; line < 16 && line < lines; line++, codes += 64) {
            vi row[4];
            KV_FOR4(r, 4, row[r] = vi_set1(kv_load32(x + r * TILE_DEPTH + line * 4)););
#pragma GCC unroll 4
            for (int lane = 0; lane < lanes; lane++) {
                const vi at = _mm512_load_si512(codes + lane * stride);
                KV_FOR4(r, 4, sum[lane][r] = (vacc)_mm512_dpbusd_epi32((__m512i)sum[lane][r], row[r], at););
            }
        }
    KV_NOTHING_SOONER;
#pragma GCC unroll 4
    for (int lane = 0; lane < lanes; lane++)
        KV_FOR4(r, 4, _mm512_store_si512(sums + lane * (int)(sizeof(KV(lane_sums)) / 4) + r * KV_LANES, (vi)sum[lane][r]););
}

/* The same of all rows and of both parts, `part` bytes apart, if there are two. Returns the number of lane tiles, 4 or, where fewer are
   left, 1. */
static inline __attribute__((always_inline)) int KV(multiply_lanes)(const int8_t *codes, ptrdiff_t part, int parts, int left, int lines,
                                                                    const int8_t *x, const int32_t *starts, KV(lane_sums) *sums)
{
    const ptrdiff_t stride = parts * part;
    for (int i = 0; i < parts; i++, codes += part, starts = starts ? starts + KV_MATRIX_TILE : NULL)
        for (int r = 0; r < KV_ROWS; r += 4) {
            int32_t *to = (i ? sums->low : sums->high) + r * KV_LANES;
            if (left < 4) KV(multiply_rows)(codes, stride, 1, lines, x + r * TILE_DEPTH, starts, to);
            else KV(multiply_rows)(codes, stride, 4, lines, x + r * TILE_DEPTH, starts, to);
        }
    return left < 4 ? 1 : 4;
}

/* Scores of the lane tiles first to last. */
static inline __attribute__((always_inline)) void KV(score_lanes)(const KV(key_products) *p, int first, int last, float *scores,
                                                                  const int shifts, const int use)
{
    KV(lane_sums) sums[4];
    const ptrdiff_t part = (p->dim + TILE_DEPTH - 1) / TILE_DEPTH * TILE_BYTES;
    for (int lane = first, lanes; lane < last; lane += lanes) {
        lanes = KV(multiply_lanes)(p->keys + lane * p->parts * part, part, p->parts, last - lane, p->dim / 4, p->x,
                                   p->starts + lane * KV_LANES, sums);
        for (int i = 0; i < lanes; i++) KV(put_scores)(p, sums + i, lane + i, scores, shifts, use);
    }
}

/* Adds weights times values to the panel's sums, and the sums before times `rescale`, or as they are if it is NULL. */
static inline __attribute__((always_inline)) void KV(add_products)(
    const kv_operands *operands, kv_panel *panel, int begin, int end, const int8_t *x, const float *unit, const float *rescale,
    KV(lane_sums) *sums)
{
    const ptrdiff_t part = TOKEN_TILES * TILE_BYTES;
    const int all = operands->value_dim / KV_LANES, parts = operands->value_parts;
    const int8_t *values = operands->values + begin * KV_LANES;
    x += begin * KV_ROWS;
    for (int lane = 0, lanes; lane < all; lane += lanes) {
        lanes = KV(multiply_lanes)(values + lane * parts * part, part, parts, all - lane, (end - begin) / 4, x, NULL, sums);
        for (int i = 0; i < lanes; i++)
            KV(add_lane_tile)(sums + i, parts, unit, rescale, panel->acc + (lane + i) * (KV_ROWS * KV_LANES));
    }
}
