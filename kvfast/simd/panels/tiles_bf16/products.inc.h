/* Products of bfloat16 parts on the matrix unit, operands.inc.h. */

#define HIGH 4
#define LOW 5
#define FIRST 6
#define SECOND 7
#define MULTIPLY_LANE(sum, lane)                                        \
    if (lanes > (lane)) {                                               \
        _tile_loadd(FIRST, operand + (lane) * stride, 64);              \
        _tile_dpbf16ps(sum, HIGH, FIRST);                               \
        _tile_dpbf16ps(sum, LOW, FIRST);                                \
        if (parts == 2) {                                               \
            _tile_loadd(SECOND, operand + (lane) * stride + part, 64);  \
            _tile_dpbf16ps(sum, HIGH, SECOND);                          \
        }                                                               \
    }

/* Multiplies activations, (2, tiles, 16, 64) with x_part bytes between the parts, by up to 4 lane tiles of operands,
   `stride` bytes apart and each (parts, tiles, 16, 64). Adds the products to the sum tiles 0 to 3. */
static inline void KV(multiply_bf16)(const int8_t *operand, ptrdiff_t stride, ptrdiff_t part, int parts, int lanes,
                                       const int8_t *x, ptrdiff_t x_part, int tiles)
{
    for (; tiles > 0; tiles--, operand += TILE_BYTES, x += TILE_BYTES) {
        _tile_loadd(HIGH, x, 64);
        _tile_loadd(LOW, x + x_part, 64);
        MULTIPLY_LANE(0, 0)
        MULTIPLY_LANE(1, 1)
        MULTIPLY_LANE(2, 2)
        MULTIPLY_LANE(3, 3)
    }
}
#undef MULTIPLY_LANE
#undef HIGH
#undef LOW
#undef FIRST
#undef SECOND

/* Scores of the tokens begin to end; with `adds`, adds the scores of the rotary part to those of codes. */
static void KV(score_bf16)(const kv_operands *operands, const kv_panel *panel, int begin, int end, float *scores, int adds)
{
    const int tiles = (operands->dim + BF16_DEPTH - 1) / BF16_DEPTH, parts = operands->key_bf16_parts;
    const ptrdiff_t part = tiles * TILE_BYTES, stride = parts * part;
    const int rope_tiles = (operands->rope_dim + BF16_DEPTH - 1) / BF16_DEPTH, rope_parts = operands->rope_bf16_parts;
    const ptrdiff_t rope_part = rope_tiles * TILE_BYTES, rope_stride = rope_parts * rope_part;
    KV_SETTLE(scores);
    for (int t = begin; t < end; t += 4 * KV_LANES) {
        if (adds) {
            _tile_loadd(0, scores + t, TILE_TOKENS * 4);
            _tile_loadd(1, scores + t + KV_LANES, TILE_TOKENS * 4);
            _tile_loadd(2, scores + t + 2 * KV_LANES, TILE_TOKENS * 4);
            _tile_loadd(3, scores + t + 3 * KV_LANES, TILE_TOKENS * 4);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            KV(multiply_bf16)(operands->keys + t / KV_LANES * stride, stride, part, parts, 4, panel->words, part, tiles);
        }
        if (rope_parts)
            KV(multiply_bf16)(operands->rope + t / KV_LANES * rope_stride, rope_stride, rope_part, rope_parts, 4,
                                panel->rope_words, rope_part, rope_tiles);
        _tile_stored(0, scores + t, TILE_TOKENS * 4);
        _tile_stored(1, scores + t + KV_LANES, TILE_TOKENS * 4);
        _tile_stored(2, scores + t + 2 * KV_LANES, TILE_TOKENS * 4);
        _tile_stored(3, scores + t + 3 * KV_LANES, TILE_TOKENS * 4);
    }
}

/* Adds weights times values to the panel's sums. */
static void KV(add_values_bf16)(const kv_operands *operands, kv_panel *panel, int begin, int end, const int8_t *x,
                                 const KV(correction) *correction)
{
    const int n = operands->value_dim, parts = operands->value_parts, tiles = (end - begin) / BF16_DEPTH;
    const ptrdiff_t part = BF16_TOKEN_TILES * TILE_BYTES, stride = parts * part;
    for (unsigned changed = correction->changed; changed; changed &= changed - 1) {
        const int r = __builtin_ctz(changed);
        const vf rescale = vf_set1(correction->rescale[r]);
        for (float *at = panel->acc + r * KV_LANES, *stop = at + n * KV_ROWS; at < stop; at += KV_ROWS * KV_LANES)
            vf_store(at, vf_mul(vf_load(at), rescale));
        KV_SETTLE(panel->acc);
    }
    const int8_t *values = operands->values + begin / BF16_DEPTH * TILE_BYTES;
    x += begin / BF16_DEPTH * TILE_BYTES;
    for (int d = 0, lanes; d < n; d += lanes * KV_LANES) {
        float *acc = panel->acc + d * KV_ROWS;
        lanes = (n - d) / KV_LANES < 4 ? (n - d) / KV_LANES : 4;
        _tile_loadd(0, acc, 64);
        if (lanes > 1) _tile_loadd(1, acc + KV_ROWS * KV_LANES, 64);
        if (lanes > 2) _tile_loadd(2, acc + 2 * KV_ROWS * KV_LANES, 64);
        if (lanes > 3) _tile_loadd(3, acc + 3 * KV_ROWS * KV_LANES, 64);
        KV(multiply_bf16)(values + d / KV_LANES * stride, stride, part, parts, lanes, x, part, tiles);
        _tile_stored(0, acc, 64);
        if (lanes > 1) _tile_stored(1, acc + KV_ROWS * KV_LANES, 64);
        if (lanes > 2) _tile_stored(2, acc + 2 * KV_ROWS * KV_LANES, 64);
        if (lanes > 3) _tile_stored(3, acc + 3 * KV_ROWS * KV_LANES, 64);
    }
}
