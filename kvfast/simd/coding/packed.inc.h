/* Encodes rows as codes of 2, 3, 5, 6 or 7 bits, and decodes them; see packed.h. */

/* Index of the level above 0 that is nearest to each t >= 0, and the level. With even levels t is in steps, below `half`. */
static inline __attribute__((always_inline)) vi KV(nearest_packed)(vf t, const float *magnitudes, int half, float step,
                                                                   vf *level)
{
    if (step != 0.0f) {
        const vi cell = vf_truncate(vf_min(vf_mul(t, vf_set1(1.0f / step)), vf_set1((float)half - 0.5f)));
        *level = vf_mul(vf_add(vi_to_float(cell), vf_set1(0.5f)), vf_set1(step));
        return cell;
    }
    vi cell = vi_set1(0);
    vf found = vf_set1(magnitudes[0]);
    for (int i = 1; i < half; i++) {
        const vi above = vi_count_above(vi_set1(0), t, vf_set1(0.5f * (magnitudes[i - 1] + magnitudes[i])));
        found = vf_fma(vi_to_float(above), vf_set1(magnitudes[i] - magnitudes[i - 1]), found);
        cell = vi_add(cell, above);
    }
    *level = found;
    return cell;
}

/* Padded codes of a row; returns its scale, a bfloat16. Like KV(search), tries the scale that clips nothing and scales for a
   Gaussian of the row's size, refits these to their codes, and takes the one with the least squared error. */
static float KV(code_packed_row)(const kv_side *side, const float *row, uint8_t *codes)
{
    static const float spreads[] = {0.0f, 1.0f, 0.85f, 1.2f};
    const int bits = kv_dtypes[side->dtype].bits, half = 1 << (bits - 1);
    const int n = side->padded_dim, padding = n - side->head_dim;
    const uint8_t *table = kv_packed_table(side);
    const float step = table ? 0.0f : (float)(256 >> bits);
    KV_ALIGNED float unit[KV_MAX_HEAD_DIM];
    float magnitudes[16] = {0.5f * step};
    for (int i = 0; table && i < half; i++) magnitudes[i] = (float)(table[half + i] - 128);
    const int32_t largest_bits = KV(max_magnitude_bits)(row, side->head_dim);
    if (largest_bits == 0) {
        memset(codes, half, (size_t)n);
        return 0.0f;
    }
    int exponent = (largest_bits >> 23) - 127; /* a power of two brings the row near 1 */
    exponent = exponent < -100 ? -100 : exponent > 126 ? 126 : exponent;
    const float down = kv_bits_float((uint32_t)(127 - exponent) << 23), up = kv_bits_float((uint32_t)(127 + exponent) << 23);
    KV(scale_row)(row, side->head_dim, down, NULL, unit);
    memset(unit + side->head_dim, 0, (size_t)padding * sizeof(float));
    const float largest = kv_bits_float((uint32_t)largest_bits) * down, smallest = 0x1p-126f * down;
    const float spread = kv_packed_spread(side) * __builtin_sqrtf(KV(sum_squares)(unit, n) / (float)side->head_dim);

    float scale = 0.0f, gain = -INFINITY;
    for (int i = 0; i < 4; i++) {
        float s = i ? spread * spreads[i] : largest / (table ? magnitudes[half - 1] : 128.0f), product, square;
        for (int refits = i > 0;; refits--) {
            s = kv_from_bfloat16(kv_to_bfloat16(s));
            s = s > smallest ? s : smallest; /* so that s times `up` is a normal float */
            const vf inverse = vf_set1(1.0f / s);
            KV(lanes) products, squares;
            for (int lane = 0; lane < KV(PIECES); lane++) {
                vf sum = vf_set1(0.0f), sum_squares = sum, level;
                for (int d = lane * W; d < n; d += KV_LANES) {
                    const vf x = vf_abs(vf_load(unit + d));
                    (void)KV(nearest_packed)(vf_mul(x, inverse), magnitudes, half, step, &level);
                    sum = vf_fma(x, level, sum);
                    sum_squares = vf_fma(level, level, sum_squares);
                }
                products.piece[lane] = sum, squares.piece[lane] = sum_squares;
            }
            product = KV(sum_of)(products);
            square = KV(sum_of)(squares) - (float)padding * (magnitudes[0] * magnitudes[0]);
            if (refits == 0) break;
            s = product / square;
        }
        if (s * (2.0f * product - s * square) > gain) {
            gain = s * (2.0f * product - s * square);
            scale = s;
        }
    }
    const vf inverse = vf_set1(1.0f / scale);
    for (int d = 0; d < n; d += W) {
        vf level;
        const vf x = vf_load(unit + d);
        const vi cell = KV(nearest_packed)(vf_mul(vf_abs(x), inverse), magnitudes, half, step, &level);
        const vf code = vf_sign_of(vf_add(vi_to_float(cell), vf_set1(0.5f)), x);
        vi_store_int8((int8_t *)codes + d, vf_round(vf_add(code, vf_set1((float)half - 0.5f))));
    }
    return scale * up;
}

/* Codes of a row, and its scale in the block. */
static void KV(code_packed)(const kv_side *side, char *block, int slot, const float *row, uint8_t *codes)
{
    ((uint16_t *)(block + side->scales))[slot] = kv_to_bfloat16(KV(code_packed_row)(side, row, codes));
}

static void KV(encode_packed)(const kv_side *side, char *block, int slot, const float *row, int values)
{
    uint8_t codes[KV_MAX_HEAD_DIM];
    const int bits = kv_dtypes[side->dtype].bits;
    KV(code_packed)(side, block, slot, row, codes);
    for (int d = 0; d < side->padded_dim; d++)
        if (values) kv_put_packed((uint8_t *)block, bits, side->block_size, d, slot, codes[d]);
        else kv_put_packed((uint8_t *)block, bits, side->padded_dim, slot, d, codes[d]);
}

/* Half a line. */
typedef uint32_t KV(half_line) __attribute__((vector_size(32)));

/* Writes a unit of INT3 from its lines, a byte a code. */
static inline void KV(put_threes)(const uint8_t *line0, const uint8_t *line1, const uint8_t *line2, const uint8_t *line3,
                                  uint8_t *unit)
{
    KV(half_line) lines[4], nibbles[2];
    for (int half = 0; half < 2; half++) {
        memcpy(lines, line0 + half * 32, 32);
        memcpy(lines + 1, line1 + half * 32, 32);
        memcpy(lines + 2, line2 + half * 32, 32);
        memcpy(lines + 3, line3 + half * 32, 32);
        nibbles[half] = lines[2] | (lines[3] & 0x04040404) << 1;
        lines[0] |= lines[1] << 3 | (lines[3] & 0x03030303) << 6;
        memcpy(unit + half * 32, lines, 32);
    }
    nibbles[0] |= nibbles[1] << 4;
    memcpy(unit + 64, nibbles, 32);
}

/* Encodes 16 tokens of values in INT3 from a slot on that is a multiple of 16. */
static void KV(encode_threes)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride)
{
    enum { STRIDE = KV_MAX_HEAD_DIM + KV_LANES };
    uint8_t codes[KV_UNIT * STRIDE], lines[4 * 64];
    for (int t = 0; t < KV_UNIT; t++) KV(code_packed)(side, block, slot + t, rows + t * stride, codes + t * STRIDE);
    for (int d = 0; d < side->padded_dim; d += KV_LANES) {
        for (int line = 0; line < 4; line++) kv_transpose_bytes(codes + 4 * line * STRIDE + d, STRIDE, lines + line * 64);
        KV(put_threes)(lines, lines + 64, lines + 128, lines + 192,
                       kv_packed_unit((uint8_t *)block, 3, side->block_size, d, slot));
    }
}

/* The unit of the channel scales of a block: a bfloat16, in the top bits of the first 16. */
static inline float KV(unit_of)(const uint16_t *scales)
{
    return kv_from_bfloat16((uint16_t)KV(top_bits)(scales));
}

/* Decodes a row of keys with channel scales. */
static void KV(decode_key)(const kv_side *side, const char *block, int slot, float *row)
{
    KV_ALIGNED float offsets[KV_MAX_HEAD_DIM];
    const uint16_t *channels = (const uint16_t *)(block + side->channels);
    const float unit = KV(unit_of)(channels);
    uint8_t codes[KV_MAX_HEAD_DIM];
    kv_key_order order;
    kv_read_key_order(channels, side->padded_dim, &order);
    kv_get_key((const uint8_t *)block, &order, kv_dtypes[side->dtype].bits, side->padded_dim, slot, codes);
    KV(to_float16)(block + side->means, side->padded_dim, offsets);
    for (int d = 0; d < side->head_dim; d++) row[d] = (float)codes[d] * ((float)(channels[d] & KV_FACTOR) * unit) + offsets[d];
}

static void KV(decode_packed)(const kv_side *side, const char *block, int slot, float *row, int values)
{
    uint8_t codes[KV_MAX_HEAD_DIM];
    int8_t levels[KV_MAX_HEAD_DIM];
    const uint8_t *stored = (const uint8_t *)block, *table = kv_packed_table(side);
    const int bits = kv_dtypes[side->dtype].bits;
    for (int d = 0; d < side->padded_dim; d++)
        codes[d] = (uint8_t)(values ? kv_get_packed(stored, bits, side->block_size, d, slot)
                                    : kv_get_packed(stored, bits, side->padded_dim, slot, d));
    for (int d = 0; d < side->head_dim; d++) levels[d] = (int8_t)(kv_packed_level(table, bits, codes[d]) ^ 0x80);
    KV(dequantize)(levels, side->head_dim, kv_from_bfloat16(((const uint16_t *)(block + side->scales))[slot]), row);
}

static void KV(copy_packed)(const kv_side *side, const char *source, int slot, const kv_side *to, char *target,
                            int to_slot, int values)
{
    const int bits = kv_dtypes[side->dtype].bits;
    const uint8_t *from = (const uint8_t *)source;
    uint8_t *into = (uint8_t *)target;
    for (int d = 0; d < side->padded_dim; d++)
        if (values)
            kv_put_packed(into, bits, to->block_size, d, to_slot, kv_get_packed(from, bits, side->block_size, d, slot));
        else
            kv_put_packed(into, bits, side->padded_dim, to_slot, d, kv_get_packed(from, bits, side->padded_dim, slot, d));
}
