/* Products of float rows on the matrix unit, in bfloat16.

   A tile holds 16 rows of activations, or 16 lanes of keys or values, of 32 depths: pairs of depth j and 16 + j. A
   float is high + low, each rounded to bfloat16's 8 bits, to within 2^-17 of itself:

     bfloat16     high alone; it is multiplied by the high and low parts of the activations
     float16      11 bits are exactly high + low; high x high, high x low and low x high are multiplied, and the part
                  left out is at most 2^-16 of the product

   An instruction sums 16 products of even and 16 of odd depths, each rounded to nearest, adds these two sums, and
   adds the result to the tile: n depths add an error of at most (17 + 3 n / 32) x 2^-24 of the sum of all |products|.
   Numbers below 2^-126 count as 0. bfloat16 can hold such numbers, float16 cannot.
   The exponential of weights.inc.h adds 3.5e-6 of a weight.

   Measured against float64 (1,500 tokens, 16 to 512 dims): on rows from a normal distribution outputs are off by 4e-6
   relative in bfloat16 and 5.5e-6 in float16, the worst by 1.2e-5. If every 13th channel is 10 times the others, so
   that scores reach 20, they are off by 5e-6 and 1e-5, the worst by 2.7e-4. */

/* Loads keys: (16 tokens, parts, padded_dim / 32, 16 lines, 64); returns the number of parts. */
static int KV(load_key_halves)(const kv_side *side, const kv_tile *tile, kv_room *room, int8_t *out)
{
    const int n = side->padded_dim, tiles = (n + HALVES_DEPTH - 1) / HALVES_DEPTH, dtype = side->dtype;
    const char *rows[KV_MATRIX_TILE];
    const int count = KV(find_rows)(side, tile, TILE_DEPTH, rows);
    typedef struct { KV_ALIGNED int8_t lines[2][KV_MAX_HEAD_DIM / HALVES_DEPTH][TILE_BYTES]; } pass;
    int8_t(*const lines)[KV_MAX_HEAD_DIM / HALVES_DEPTH][TILE_BYTES] = KV_IN(room->pass, pass)->lines;
    const int parts = dtype == KV_BFLOAT16 ? 1 : 2;
    for (int token = 0; token < count; token += KV_LANES) {
        for (int t = 0; t < KV_LANES; t++)
            for (int i = 0, d = 0; i < tiles; i++, d += HALVES_DEPTH) {
                const vf a = KV(load_element)(rows[token + t], d, dtype);
                const vf b = d + W < n ? KV(load_element)(rows[token + t], d + W, dtype) : vf_set1(0.0f);
                KV(put_halves)(a, b, lines[0][i] + 64 * t, lines[1][i] + 64 * t);
            }
        for (int part = 0; part < parts; part++)
            for (int i = 0; i < tiles; i++, out += TILE_BYTES) KV(transpose_lines)(lines[part][i], out);
    }
    return parts;
}

/* Loads values: (padded_dim / 16, parts, KV_MATRIX_TILE / 32, 16 lines, 64). */
static void KV(load_value_halves)(const kv_side *side, const kv_tile *tile, kv_operands *operands)
{
    const int dtype = side->dtype;
    const char *rows[KV_MATRIX_TILE];
    const int count = KV(find_rows)(side, tile, TILE_DEPTH, rows);
    KV_ALIGNED int8_t unused[64];
    operands->value_parts = dtype == KV_BFLOAT16 ? 1 : 2;
    for (int t = 0; t < count; t += HALVES_DEPTH)
        for (int line = 0; line < 16; line++) {
            int8_t *out = operands->values + t / HALVES_DEPTH * TILE_BYTES + 64 * line;
            for (int d = 0; d < side->padded_dim; d += W) {
                int8_t *low = out + TOKEN_HALVES * TILE_BYTES;
                KV(put_halves)(KV(load_element)(rows[t + line], d, dtype),
                               KV(load_element)(rows[t + 16 + line], d, dtype), out,
                               dtype == KV_BFLOAT16 ? unused : low);
                out += operands->value_parts * (TOKEN_HALVES * TILE_BYTES);
            }
        }
}

/* Prepares a panel of query rows, (KV_ROWS, padded_dim) floats. */
static void KV(prepare_halves)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows,
                               float factor, int exact, kv_panel *panel)
{
    (void)exact;
    const int n = side->padded_dim, m = rope ? rope->padded_dim : 0;
    for (int r = 0; r < KV_ROWS; r++, rows += n, rope_rows += m) {
        KV(halve_query)(rows, n, vf_set1(factor), r, panel->halves);
        if (m) KV(halve_query)(rope_rows, m, vf_set1(factor), r, panel->rope_halves);
    }
}

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
static inline void KV(multiply_halves)(const int8_t *operand, ptrdiff_t stride, ptrdiff_t part, int parts, int lanes,
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
static void KV(score_halves)(const kv_operands *operands, const kv_panel *panel, int begin, int end, float *scores, int adds)
{
    const int tiles = (operands->dim + HALVES_DEPTH - 1) / HALVES_DEPTH, parts = operands->key_halves;
    const ptrdiff_t part = tiles * TILE_BYTES, stride = parts * part;
    const int rope_tiles = (operands->rope_dim + HALVES_DEPTH - 1) / HALVES_DEPTH, rope_parts = operands->rope_halves;
    const ptrdiff_t rope_part = rope_tiles * TILE_BYTES, rope_stride = rope_parts * rope_part;
    KV_SETTLE(scores);
    for (int t = begin; t < end; t += 4 * KV_LANES) {
        if (adds) {
            _tile_loadd(0, scores + t, KV_MATRIX_TILE * 4);
            _tile_loadd(1, scores + t + KV_LANES, KV_MATRIX_TILE * 4);
            _tile_loadd(2, scores + t + 2 * KV_LANES, KV_MATRIX_TILE * 4);
            _tile_loadd(3, scores + t + 3 * KV_LANES, KV_MATRIX_TILE * 4);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            KV(multiply_halves)(operands->keys + t / KV_LANES * stride, stride, part, parts, 4, panel->halves, part, tiles);
        }
        if (rope_parts)
            KV(multiply_halves)(operands->rope + t / KV_LANES * rope_stride, rope_stride, rope_part, rope_parts, 4,
                                panel->rope_halves, rope_part, rope_tiles);
        _tile_stored(0, scores + t, KV_MATRIX_TILE * 4);
        _tile_stored(1, scores + t + KV_LANES, KV_MATRIX_TILE * 4);
        _tile_stored(2, scores + t + 2 * KV_LANES, KV_MATRIX_TILE * 4);
        _tile_stored(3, scores + t + 3 * KV_LANES, KV_MATRIX_TILE * 4);
    }
}

/* Adds weights times values to the panel's sums. */
static void KV(add_value_halves)(const kv_operands *operands, kv_panel *panel, int begin, int end, const int8_t *x,
                                 const KV(correction) *correction)
{
    const int n = operands->value_dim, parts = operands->value_parts, tiles = (end - begin) / HALVES_DEPTH;
    const ptrdiff_t part = TOKEN_HALVES * TILE_BYTES, stride = parts * part;
    for (unsigned changed = correction->changed; changed; changed &= changed - 1) {
        const int r = __builtin_ctz(changed);
        const vf rescale = vf_set1(correction->rescale[r]);
        for (float *at = panel->acc + r * KV_LANES, *stop = at + n * KV_ROWS; at < stop; at += KV_ROWS * KV_LANES)
            vf_store(at, vf_mul(vf_load(at), rescale));
        KV_SETTLE(panel->acc);
    }
    const int8_t *values = operands->values + begin / HALVES_DEPTH * TILE_BYTES;
    x += begin / HALVES_DEPTH * TILE_BYTES;
    for (int d = 0, lanes; d < n; d += lanes * KV_LANES) {
        float *acc = panel->acc + d * KV_ROWS;
        lanes = (n - d) / KV_LANES < 4 ? (n - d) / KV_LANES : 4;
        _tile_loadd(0, acc, 64);
        if (lanes > 1) _tile_loadd(1, acc + KV_ROWS * KV_LANES, 64);
        if (lanes > 2) _tile_loadd(2, acc + 2 * KV_ROWS * KV_LANES, 64);
        if (lanes > 3) _tile_loadd(3, acc + 3 * KV_ROWS * KV_LANES, 64);
        KV(multiply_halves)(values + d / KV_LANES * stride, stride, part, parts, lanes, x, part, tiles);
        _tile_stored(0, acc, 64);
        if (lanes > 1) _tile_stored(1, acc + KV_ROWS * KV_LANES, 64);
        if (lanes > 2) _tile_stored(2, acc + 2 * KV_ROWS * KV_LANES, 64);
        if (lanes > 3) _tile_stored(3, acc + 3 * KV_ROWS * KV_LANES, 64);
    }
}
