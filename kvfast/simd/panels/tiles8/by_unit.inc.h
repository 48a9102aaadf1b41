/* Products of bytes on the matrix unit. */

/* Tile registers of 16 rows. */
static void KV(begin_tiles)(void)
{
    struct __attribute__((packed)) {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = TILE_DEPTH, config.rows[tile] = KV_ROWS;
    KV_SETTLE(&config);
    _tile_loadconfig(&config);
}

static void KV(end_tiles)(void)
{
    _tile_release();
}

/* Tile registers, which the intrinsics need as literals. The CPU renames them: the products of one lane tile start
   while the sums of the previous one are stored. */
#define SUM_HIGH 0
#define SUM_LOW 1
#define OPERAND 2
#define X_HIGH_0 4 /* activations of the first two tiles of depth */
#define X_LOW_0 5
#define X_HIGH_1 6
#define X_LOW_1 7

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

/* Adds weights times values to the panel's sums, and the sums before times `rescale`, or as they are if it is NULL. */
static inline __attribute__((always_inline)) void KV(add_products)(
    const kv_operands *operands, kv_panel *panel, int begin, int end, const int8_t *x, const float *unit, const float *rescale,
    KV(lane_sums) *sums)
{
    const int tiles = (end - begin) / TILE_DEPTH, lanes = operands->value_dim / KV_LANES;
    const ptrdiff_t part = TOKEN_TILES * TILE_BYTES;
    const int8_t *values = operands->values + begin * KV_LANES;
    x += begin * KV_ROWS;
    if (tiles > 2) { /* of one part; with an odd number of lane tiles, the last sums are not used */
        for (int lane = 0; lane < lanes + 2; lane += 2) {
            if (lane < lanes) KV(multiply_pair)(values + lane * part, part, x, part, tiles, sums + (lane & 2));
            for (int done = lane - 2; done >= 0 && done < lane && done < lanes; done++)
                KV(add_lane_tile)(sums + (done & 3), 1, unit, rescale, panel->acc + done * (KV_ROWS * KV_LANES));
        }
        return;
    }
    KV(hold)(x, part, tiles);
    for (int lane = 0; lane <= lanes; lane++) {
        if (lane < lanes)
            KV(multiply)(values + lane * operands->value_parts * part, part, operands->value_parts, tiles,
                         sums + (lane & 1));
        if (lane == 0) continue;
        KV(add_lane_tile)(sums + ((lane - 1) & 1), operands->value_parts, unit, rescale,
                          panel->acc + (lane - 1) * (KV_ROWS * KV_LANES));
    }
}

/* Multiplies 16 x 16 over 64 depths `steps` times, from registers; see measure.inc.h. */
static double KV(multiply_tiles)(ptrdiff_t steps, float *sink)
{
    KV_ALIGNED int8_t x[TILE_BYTES];
    KV_ALIGNED int32_t sums[KV_ROWS * KV_LANES];
    for (int i = 0; i < TILE_BYTES; i++) x[i] = (int8_t)((float)(i % 100) + *sink);
    KV(begin_tiles)();
    KV_SETTLE(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, x, TILE_DEPTH);
    _tile_loadd(3, x, 64);
    for (ptrdiff_t i = 0; i < steps; i += 2) {
        _tile_dpbssd(0, 2, 3);
        _tile_dpbssd(1, 2, 3);
    }
    _tile_stored(0, sums, 64);
    *sink = (float)sums[0];
    KV(end_tiles)();
    return 2.0 * (double)((steps + 1) / 2 * 2) * (KV_ROWS * KV_LANES * TILE_DEPTH);
}
