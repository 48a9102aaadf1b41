/* Where the codes of one token go in a block (see kernels.h). */

/* Line of (lane, depth) in a matrix of `depths` depths, with the byte inside it. */
static inline uint8_t *KV(locate)(uint8_t *codes, int depths, int lane, int depth, int per_line)
{
    return codes + ((ptrdiff_t)(lane / KV_LANES) * (depths / per_line) + depth / per_line) * 64 +
           lane % KV_LANES * 4 + depth % 4;
}

/* What a row of n codes stands for, before scales and means: in place, as int8. */
static inline void KV(levels)(const kv_side *side, uint8_t *codes, ptrdiff_t n)
{
    if (side->dtype == KV_INT8)
        for (ptrdiff_t i = 0; i < n; i++) codes[i] ^= 0x80;
    else if (side->dtype == KV_INT4)
        for (ptrdiff_t i = 0; i < n; i++) codes[i] = (uint8_t)(codes[i] - 8);
    else
        for (ptrdiff_t i = 0; i < n; i++) codes[i] = kv_gauss_levels[codes[i]] ^ 0x80;
}

static inline void KV(put_scale)(const kv_side *side, char *block, int slot, float scale)
{
    char *scales = block + side->scales;
    if (side->dtype == KV_GAUSS4) ((uint16_t *)scales)[slot] = kv_to_bfloat16(scale);
    else ((float *)scales)[slot] = scale;
}

/* A token's scale. */
static inline float KV(get_scale)(const kv_side *side, const char *block, int slot)
{
    const char *scales = block + side->scales;
    return side->dtype == KV_GAUSS4 ? kv_from_bfloat16(((const uint16_t *)scales)[slot]) : ((const float *)scales)[slot];
}

/* What the channel scales of a block count: a bfloat16, in the top bits of the first 16. */
static inline float KV(unit_of)(const uint16_t *scales)
{
    return kv_from_bfloat16((uint16_t)KV(top_bits)(scales));
}

static int KV(encode_floats)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride, int count)
{
    if (side->dtype >= KV_NUM_FLOATS) return 0;
    char *target = block + slot * side->row_stride;
    for (; count > 0; count--, rows += stride, target += side->row_stride) {
        if (side->dtype == KV_FLOAT32) KV(from_float32)(rows, side->head_dim, target);
        else if (side->dtype == KV_FLOAT16) KV(from_float16)(rows, side->head_dim, target);
        else KV(from_bfloat16)(rows, side->head_dim, target);
    }
    return 1;
}

static int KV(decode_floats)(const kv_side *side, const char *block, int slot, float *row)
{
    const char *source = block + slot * side->row_stride;
    if (side->dtype == KV_FLOAT32) KV(to_float32)(source, side->head_dim, row);
    else if (side->dtype == KV_FLOAT16) KV(to_float16)(source, side->head_dim, row);
    else if (side->dtype == KV_BFLOAT16) KV(to_bfloat16)(source, side->head_dim, row);
    return side->dtype < KV_NUM_FLOATS;
}

/* A token's padded codes into the K side. */
static inline void KV(put_k)(const kv_side *side, char *block, int slot, const uint8_t *codes)
{
    const int dims = side->padded_dim, per_line = side->dtype == KV_INT8 ? 4 : 8;
    uint8_t *line = KV(locate)((uint8_t *)block, dims, slot, 0, per_line);
    for (int d = 0; d < dims; d += per_line, line += 64) {
        uint32_t packed = (uint32_t)kv_load32(codes + d);
        if (per_line == 8) packed |= (uint32_t)kv_load32(codes + d + 4) << 4;
        memcpy(line, &packed, 4);
    }
}

static void KV(encode_k)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride, int count)
{
    if (KV(encode_floats)(side, block, slot, rows, stride, count)) return;
    uint8_t codes[KV_MAX_HEAD_DIM + KV_LANES];
    for (const int end = slot + count; slot < end; slot++, rows += stride) {
        KV(put_scale)(side, block, slot, KV(code_row)(side, rows, codes));
        KV(put_k)(side, block, slot, codes);
    }
}

/* The codes of 4 tokens as 4-byte depths: 16 lanes, one line. */
static inline void KV(depths)(const uint8_t *codes, ptrdiff_t stride, uint32_t *line)
{
    for (int i = 0; i < KV_LANES; i++)
        line[i] = (uint32_t)codes[i] | (uint32_t)codes[stride + i] << 8 | (uint32_t)codes[2 * stride + i] << 16 |
                  (uint32_t)codes[3 * stride + i] << 24;
}

static void KV(encode_v)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride, int count)
{
    if (KV(encode_floats)(side, block, slot, rows, stride, count)) return;
    enum { STRIDE = KV_MAX_HEAD_DIM + KV_LANES };
    uint8_t codes[8 * STRIDE];
    const int dims = side->padded_dim, per_line = side->dtype == KV_INT8 ? 4 : 8;
    const int line_step = side->block_size / per_line * 64; /* from lane tile to lane tile */
    for (int here; count > 0; count -= here, slot += here, rows += here * stride) {
        /* Whole lines at once; before the first and behind the last, token by token. */
        here = slot % per_line == 0 && count >= per_line ? per_line : 1;
        for (int t = 0; t < here; t++)
            KV(put_scale)(side, block, slot + t, KV(code_row)(side, rows + t * stride, codes + t * STRIDE));
        uint8_t *line = KV(locate)((uint8_t *)block, side->block_size, 0, slot, per_line);
        for (int d = 0; d < dims; d += KV_LANES, line += line_step) {
            if (here == 1 && per_line == 4) {
                for (int i = 0; i < KV_LANES; i++) line[4 * i] = codes[d + i];
            } else if (here == 1) {
                for (int i = 0; i < KV_LANES; i++) kv_put_nibble(line + 4 * i, codes[d + i], slot / 4 % 2);
            } else {
                uint32_t low[KV_LANES], high[KV_LANES];
                KV(depths)(codes + d, STRIDE, low);
                if (per_line == 8) {
                    KV(depths)(codes + 4 * STRIDE + d, STRIDE, high);
                    for (int i = 0; i < KV_LANES; i++) low[i] |= high[i] << 4;
                }
                memcpy(line, low, sizeof low);
            }
        }
    }
}

/* The other way round: what put_k was given, and the same for the V side. */
static inline void KV(get_k)(const kv_side *side, const char *block, int slot, uint8_t *codes)
{
    const int dims = side->padded_dim, per_line = side->dtype == KV_INT8 ? 4 : 8;
    const uint8_t *line = KV(locate)((uint8_t *)block, dims, slot, 0, per_line);
    for (int d = 0; d < dims; d += per_line, line += 64) {
        const uint32_t packed = (uint32_t)kv_load32(line), low = per_line == 4 ? packed : packed & 0x0F0F0F0F;
        const uint32_t high = packed >> 4 & 0x0F0F0F0F;
        memcpy(codes + d, &low, 4);
        if (per_line == 8) memcpy(codes + d + 4, &high, 4);
    }
}

static inline void KV(get_v)(const kv_side *side, const char *block, int slot, uint8_t *codes)
{
    const int dims = side->padded_dim, per_line = side->dtype == KV_INT8 ? 4 : 8, shift = slot / 4 % 2 * 4;
    const uint8_t *line = KV(locate)((uint8_t *)block, side->block_size, 0, slot, per_line);
    for (int d = 0; d < dims; d += KV_LANES, line += side->block_size / per_line * 64)
        for (int i = 0; i < KV_LANES; i++) codes[d + i] = per_line == 4 ? line[4 * i] : line[4 * i] >> shift & 15;
}

static void KV(decode_k)(const kv_side *side, const char *block, int slot, float *row)
{
    if (KV(decode_floats)(side, block, slot, row)) return;
    uint8_t codes[KV_MAX_HEAD_DIM];
    KV_ALIGNED float means[KV_MAX_HEAD_DIM];
    KV(get_k)(side, block, slot, codes);
    if (side->means) KV(to_float16)(block + side->means, side->padded_dim, means);
    if (side->channels) { /* of which the codes are 0..15 */
        const uint16_t *channels = (const uint16_t *)(block + side->channels);
        const float unit = KV(unit_of)(channels);
        for (int d = 0; d < side->head_dim; d++)
            row[d] = (float)codes[d] * ((float)(channels[d] & 0x7FFF) * unit) + means[d];
        return;
    }
    KV(levels)(side, codes, side->head_dim);
    KV(dequantize)((const int8_t *)codes, side->head_dim, KV(get_scale)(side, block, slot), row);
    if (side->means) KV(scale_add)(row, 1.0f, means, 1.0f, side->head_dim);
}

static void KV(decode_v)(const kv_side *side, const char *block, int slot, float *row)
{
    if (KV(decode_floats)(side, block, slot, row)) return;
    uint8_t codes[KV_MAX_HEAD_DIM];
    KV(get_v)(side, block, slot, codes);
    KV(levels)(side, codes, side->head_dim);
    KV(dequantize)((const int8_t *)codes, side->head_dim, KV(get_scale)(side, block, slot), row);
}

/* One token from a block to one of another size; neither codes nor scale change. */
static void KV(copy_token)(const kv_side *side, const char *source, int slot, const kv_side *to, char *target,
                           int to_slot, int values)
{
    if (side->dtype < KV_NUM_FLOATS) {
        memcpy(target + to_slot * to->row_stride, source + slot * side->row_stride, (size_t)side->row_stride);
        return;
    }
    memcpy(target + to->scales + to_slot * to->scale_bytes, source + side->scales + slot * side->scale_bytes,
           (size_t)side->scale_bytes);
    const int per_line = side->dtype == KV_INT8 ? 4 : 8;
    uint8_t *from = (uint8_t *)source, *into = (uint8_t *)target;
    if (!values) {
        for (int d = 0; d < side->padded_dim; d += per_line)
            memcpy(KV(locate)(into, side->padded_dim, to_slot, d, per_line),
                   KV(locate)(from, side->padded_dim, slot, d, per_line), 4);
        return;
    }
    for (int d = 0; d < side->padded_dim; d++) {
        const uint8_t *code = KV(locate)(from, side->block_size, d, slot, per_line);
        uint8_t *place = KV(locate)(into, to->block_size, d, to_slot, per_line);
        if (per_line == 4) *place = *code;
        else kv_put_nibble(place, kv_get_nibble(code, slot / 4 % 2), to_slot / 4 % 2);
    }
}
