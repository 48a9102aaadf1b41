/* Where the codes of one token go in a block (see kernels.h). */

/* Line of (lane, depth) in a matrix of `depths` depths, with the byte inside it. */
static inline uint8_t *KV(locate)(uint8_t *codes, int depths, int lane, int depth, int per_line)
{
    return codes + ((ptrdiff_t)(lane / KV_LANES) * (depths / per_line) + depth / per_line) * 64 +
           lane % KV_LANES * 4 + depth % 4;
}

/* Quantises a row into padded codes; returns its scale. */
static float KV(code_row)(const kv_side *side, const float *row, int8_t *codes)
{
    memset(codes + side->head_dim, 0, (size_t)(side->padded_dim - side->head_dim));
    return KV(quantize)(row, side->head_dim, side->dtype == KV_INT8 ? 127 : 7, codes);
}

static int KV(encode_floats)(const kv_side *side, char *block, int slot, const float *row)
{
    char *target = block + slot * side->row_stride;
    if (side->dtype == KV_FLOAT32) KV(from_float32)(row, side->head_dim, target);
    else if (side->dtype == KV_FLOAT16) KV(from_float16)(row, side->head_dim, target);
    else if (side->dtype == KV_BFLOAT16) KV(from_bfloat16)(row, side->head_dim, target);
    return side->dtype < KV_NUM_FLOATS;
}

static int KV(decode_floats)(const kv_side *side, const char *block, int slot, float *row)
{
    const char *source = block + slot * side->row_stride;
    if (side->dtype == KV_FLOAT32) KV(to_float32)(source, side->head_dim, row);
    else if (side->dtype == KV_FLOAT16) KV(to_float16)(source, side->head_dim, row);
    else if (side->dtype == KV_BFLOAT16) KV(to_bfloat16)(source, side->head_dim, row);
    return side->dtype < KV_NUM_FLOATS;
}

static void KV(encode_k)(const kv_side *side, char *block, int slot, const float *row)
{
    if (KV(encode_floats)(side, block, slot, row)) return;
    int8_t codes[KV_MAX_HEAD_DIM];
    ((float *)(block + side->scales))[slot] = KV(code_row)(side, row, codes);
    const int dims = side->padded_dim;
    uint8_t *line = (uint8_t *)block;
    if (side->dtype == KV_INT8) {
        line = KV(locate)(line, dims, slot, 0, 4);
        for (int d = 0; d < dims; d += 4, line += 64)
            for (int j = 0; j < 4; j++) line[j] = (uint8_t)(codes[d + j] + 128);
    } else {
        line = KV(locate)(line, dims, slot, 0, 8);
        for (int d = 0; d < dims; d += 8, line += 64)
            for (int j = 0; j < 4; j++) line[j] = (uint8_t)((codes[d + j] + 8) | (codes[d + 4 + j] + 8) << 4);
    }
}

static void KV(encode_v)(const kv_side *side, char *block, int slot, const float *row)
{
    if (KV(encode_floats)(side, block, slot, row)) return;
    int8_t codes[KV_MAX_HEAD_DIM];
    ((float *)(block + side->scales))[slot] = KV(code_row)(side, row, codes);
    uint8_t *bytes = (uint8_t *)block;
    for (int d = 0; d < side->padded_dim; d++) {
        if (side->dtype == KV_INT8)
            *KV(locate)(bytes, side->block_size, d, slot, 4) = (uint8_t)(codes[d] + 128);
        else
            kv_put_nibble(KV(locate)(bytes, side->block_size, d, slot, 8), codes[d] + 8, slot / 4 % 2);
    }
}

static void KV(decode_k)(const kv_side *side, const char *block, int slot, float *row)
{
    if (KV(decode_floats)(side, block, slot, row)) return;
    const float scale = ((const float *)(block + side->scales))[slot];
    uint8_t *bytes = (uint8_t *)block;
    for (int d = 0; d < side->head_dim; d++) {
        int code = side->dtype == KV_INT8 ? *KV(locate)(bytes, side->padded_dim, slot, d, 4) - 128
                                          : kv_get_nibble(KV(locate)(bytes, side->padded_dim, slot, d, 8), d / 4 % 2) - 8;
        row[d] = (float)code * scale;
    }
}

static void KV(decode_v)(const kv_side *side, const char *block, int slot, float *row)
{
    if (KV(decode_floats)(side, block, slot, row)) return;
    const float scale = ((const float *)(block + side->scales))[slot];
    uint8_t *bytes = (uint8_t *)block;
    for (int d = 0; d < side->head_dim; d++) {
        int code = side->dtype == KV_INT8 ? *KV(locate)(bytes, side->block_size, d, slot, 4) - 128
                                          : kv_get_nibble(KV(locate)(bytes, side->block_size, d, slot, 8), slot / 4 % 2) - 8;
        row[d] = (float)code * scale;
    }
}
