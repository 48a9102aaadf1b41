/* Where the codes of one token go in a block (see kernels.h). */

/* Line of (lane, depth) in a matrix of `depths` depths, with the byte inside it. */
static inline uint8_t *KV(locate)(uint8_t *codes, int depths, int lane, int depth, int per_line)
{
    return codes + ((ptrdiff_t)(lane / KV_LANES) * (depths / per_line) + depth / per_line) * 64 +
           lane % KV_LANES * 4 + depth % 4;
}

/* Replaces a row of n codes by their levels as int8, before scales and means. */
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
    if (side->scale_bytes == 2) ((uint16_t *)scales)[slot] = kv_to_bfloat16(scale);
    else ((float *)scales)[slot] = scale;
}

/* A token's scale. */
static inline float KV(get_scale)(const kv_side *side, const char *block, int slot)
{
    const char *scales = block + side->scales;
    return side->scale_bytes == 2 ? kv_from_bfloat16(((const uint16_t *)scales)[slot]) : ((const float *)scales)[slot];
}

static int KV(encode_floats)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride, int count)
{
    if (side->family != KV_FLOAT_ROWS) return 0;
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
    return side->family == KV_FLOAT_ROWS;
}

/* Packs the nibbles of a row of n codes: each 8 codes become 4 bytes. */
static inline void KV(pack_nibbles)(const uint8_t *codes, ptrdiff_t n, uint8_t *packed)
{
    for (ptrdiff_t d = 0; d < n; d += 8, packed += 4) {
        const uint64_t both = (uint64_t)kv_load64(codes + d);
        const uint32_t word = (uint32_t)both | (uint32_t)(both >> 32) << 4;
        memcpy(packed, &word, 4);
    }
}

/* Writes the padded codes of a token to the K side, as bytes of the lines, INT4 packed. */
static inline void KV(put_words_k)(uint8_t *line, const uint8_t *packed, ptrdiff_t nbytes)
{
    for (ptrdiff_t d = 0; d < nbytes; d += 4, line += 64) memcpy(line, packed + d, 4);
}

static void KV(encode_k)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride, int count)
{
    if (KV(encode_floats)(side, block, slot, rows, stride, count)) return;
    if (side->family == KV_PACKED_CODES) {
        for (; count > 0; count--, slot++, rows += stride) KV(encode_packed)(side, block, slot, rows, 0);
        return;
    }
    enum { STRIDE = KV_MAX_HEAD_DIM + KV_LANES };
    uint8_t codes[4 * STRIDE], packed[STRIDE];
    const int dims = side->padded_dim, per_line = side->dtype == KV_INT8 ? 4 : 8, nbytes = dims * 4 / per_line;
    for (int here; count > 0; count -= here, slot += here, rows += here * stride) {
        here = count >= 4 && slot % 4 == 0 ? 4 : 1; /* of one lane tile */
        for (int t = 0; t < here; t++) {
            uint8_t *row = codes + t * STRIDE;
            KV(put_scale)(side, block, slot + t, KV(code_row)(side, rows + t * stride, per_line == 8 ? packed : row));
            if (per_line == 8) KV(pack_nibbles)(packed, dims, row);
        }
        uint8_t *line = KV(locate)((uint8_t *)block, dims, slot, 0, per_line);
        int d = 0;
        if (here == 4)
            for (; d + 16 <= nbytes; d += 16, line += 4 * 64) kv_transpose_4x4_dwords(codes + d, STRIDE, line, 64);
        for (int t = 0; t < here && d < nbytes; t++) KV(put_words_k)(line + 4 * t, codes + t * STRIDE + d, nbytes - d);
    }
}

static void KV(encode_v)(const kv_side *side, char *block, int slot, const float *rows, ptrdiff_t stride, int count)
{
    if (side->as_keys) {
        KV(encode_k)(side, block, slot, rows, stride, count);
        return;
    }
    if (KV(encode_floats)(side, block, slot, rows, stride, count)) return;
    if (side->family == KV_PACKED_CODES) {
        for (int here; count > 0; count -= here, slot += here, rows += here * stride) {
            here = side->dtype == KV_INT3 && slot % KV_UNIT == 0 && count >= KV_UNIT ? KV_UNIT : 1;
            if (here > 1) KV(encode_threes)(side, block, slot, rows, stride);
            else KV(encode_packed)(side, block, slot, rows, 1);
        }
        return;
    }
    enum { STRIDE = KV_MAX_HEAD_DIM + KV_LANES };
    uint8_t codes[8 * STRIDE];
    const int dims = side->padded_dim, per_line = side->dtype == KV_INT8 ? 4 : 8;
    const int line_step = side->block_size / per_line * 64; /* from lane tile to lane tile */
    for (int here; count > 0; count -= here, slot += here, rows += here * stride) {
        /* Whole lines at once; tokens before the first and after the last whole line one by one. */
        here = slot % per_line == 0 && count >= per_line ? per_line : 1;
        for (int t = 0; t < here; t++)
            KV(put_scale)(side, block, slot + t, KV(code_row)(side, rows + t * stride, codes + t * STRIDE));
        if (here == 8) { /* the nibbles of tokens 4 apart into the bytes of the first */
            for (int t = 0; t < 4; t++)
                for (int d = 0; d < dims; d++)
                    codes[t * STRIDE + d] = (uint8_t)(codes[t * STRIDE + d] | codes[(t + 4) * STRIDE + d] << 4);
        }
        uint8_t *line = KV(locate)((uint8_t *)block, side->block_size, 0, slot, per_line);
        for (int d = 0; d < dims; d += KV_LANES, line += line_step) {
            if (here > 1) kv_transpose_bytes(codes + d, STRIDE, line);
            else if (per_line == 4) kv_put_column(line - slot % 4, codes + d, 0xFF, slot % 4 * 8);
            else kv_put_column(line - slot % 4, codes + d, 15, slot % 4 * 8 + slot / 4 % 2 * 4);
        }
    }
}

/* Reads a token's codes; get_v does so for the V side. */
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
    const int dims = side->padded_dim, per_line = side->dtype == KV_INT8 ? 4 : 8;
    const int shift = slot % 4 * 8 + (per_line == 4 ? 0 : slot / 4 % 2 * 4);
    const uint8_t *line = KV(locate)((uint8_t *)block, side->block_size, 0, slot, per_line);
    const uint32_t bits = per_line == 4 ? 0xFF : 15;
    line -= slot % 4;
    for (int d = 0; d < dims; d += KV_LANES, line += side->block_size / per_line * 64) {
        const kv_dword *dwords = (const kv_dword *)line;
        for (int i = 0; i < KV_LANES; i++) codes[d + i] = (uint8_t)(dwords[i] >> shift & bits);
    }
}

static void KV(decode_k)(const kv_side *side, const char *block, int slot, float *row)
{
    if (KV(decode_floats)(side, block, slot, row)) return;
    if (side->channels) {
        KV(decode_key)(side, block, slot, row);
        return;
    }
    if (side->family == KV_PACKED_CODES) {
        KV(decode_packed)(side, block, slot, row, 0);
        return;
    }
    uint8_t codes[KV_MAX_HEAD_DIM];
    KV_ALIGNED float means[KV_MAX_HEAD_DIM];
    KV(get_k)(side, block, slot, codes);
    if (side->means) KV(to_float16)(block + side->means, side->padded_dim, means);
    KV(levels)(side, codes, side->head_dim);
    KV(dequantize)((const int8_t *)codes, side->head_dim, KV(get_scale)(side, block, slot), row);
    if (side->means) KV(scale_add)(row, 1.0f, means, 1.0f, side->head_dim);
}

static void KV(decode_v)(const kv_side *side, const char *block, int slot, float *row)
{
    if (side->as_keys) {
        KV(decode_k)(side, block, slot, row);
        return;
    }
    if (KV(decode_floats)(side, block, slot, row)) return;
    if (side->family == KV_PACKED_CODES) {
        KV(decode_packed)(side, block, slot, row, 1);
        return;
    }
    uint8_t codes[KV_MAX_HEAD_DIM];
    KV(get_v)(side, block, slot, codes);
    KV(levels)(side, codes, side->head_dim);
    KV(dequantize)((const int8_t *)codes, side->head_dim, KV(get_scale)(side, block, slot), row);
}

/* Copies a token to a block that may have another size; neither codes nor scale change. */
static void KV(copy_token)(const kv_side *side, const char *source, int slot, const kv_side *to, char *target,
                           int to_slot, int values)
{
    values &= !side->as_keys;
    if (side->family == KV_FLOAT_ROWS) {
        memcpy(target + to_slot * to->row_stride, source + slot * side->row_stride, (size_t)to->row_stride);
        return;
    }
    memcpy(target + to->scales + to_slot * to->scale_bytes, source + side->scales + slot * side->scale_bytes,
           (size_t)side->scale_bytes);
    if (side->family == KV_PACKED_CODES) {
        KV(copy_packed)(side, source, slot, to, target, to_slot, values);
        return;
    }
    const int per_line = side->dtype == KV_INT8 ? 4 : 8;
    uint8_t *from = (uint8_t *)source, *into = (uint8_t *)target;
    if (!values) {
        for (int d = 0; d < side->padded_dim; d += per_line)
            memcpy(KV(locate)(into, side->padded_dim, to_slot, d, per_line),
                   KV(locate)(from, side->padded_dim, slot, d, per_line), 4);
        return;
    }
    uint8_t codes[KV_MAX_HEAD_DIM];
    uint8_t *line = KV(locate)(into, to->block_size, 0, to_slot, per_line) - to_slot % 4;
    KV(get_v)(side, source, slot, codes);
    for (int d = 0; d < side->padded_dim; d += KV_LANES, line += to->block_size / per_line * 64)
        if (per_line == 4) kv_put_column(line, codes + d, 0xFF, to_slot % 4 * 8);
        else kv_put_column(line, codes + d, 15, to_slot % 4 * 8 + to_slot / 4 % 2 * 4);
}

/* Copies KV_LANES tokens, from a slot on that is a multiple of them, to a block of as many: their lines, and the block's statistics. */
static void KV(copy_run)(const kv_side *side, const char *source, int slot, const kv_side *to, char *target, int values)
{
    if (side->family == KV_FLOAT_ROWS) {
        for (int t = 0; t < KV_LANES; t++)
            memcpy(target + t * to->row_stride, source + (slot + t) * side->row_stride, (size_t)to->row_stride);
        return;
    }
    const ptrdiff_t token = 2 * kv_dtypes[side->dtype].bits, lane_tiles = side->padded_dim / KV_LANES; /* of 16 depths */
    if (values && !side->as_keys)
        for (ptrdiff_t i = 0; i < lane_tiles; i++)
            memcpy(target + i * KV_LANES * token, source + (i * side->block_size + slot) * token, (size_t)(KV_LANES * token));
    else memcpy(target, source + slot * lane_tiles * token, (size_t)(KV_LANES * lane_tiles * token));
    memcpy(target + to->scales, source + side->scales + slot * side->scale_bytes, (size_t)(KV_LANES * side->scale_bytes));
    if (side->means) memcpy(target + to->means, source + side->means, (size_t)(side->bytes - side->means));
}
