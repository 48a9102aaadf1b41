/* Latent rows, which are keys and values at once. As keys they are read like any others. As values, float rows are read as
   they are. A tile of codes is transposed to a block of INT8 values in the processor's cache, which INT8's kernels read. A
   latent has many query heads, so this costs little compared with the attention itself. */

/* Transposes four lines of INT8 keys, 16 tokens x 16 depths, to four lines of values: dwords of 4 depths of a token become
   dwords of 4 tokens of a depth. */
static inline void KV(transpose_square)(const void *lines, void *out)
{
#if W == 16
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const char *from = lines;
    const __m512i a = _mm512_shuffle_epi8(_mm512_loadu_si512(from), order);
    const __m512i b = _mm512_shuffle_epi8(_mm512_loadu_si512(from + 64), order);
    const __m512i c = _mm512_shuffle_epi8(_mm512_loadu_si512(from + 128), order);
    const __m512i d = _mm512_shuffle_epi8(_mm512_loadu_si512(from + 192), order);
    /* 128-bit lane h of the line of depths 4 g becomes lane g of the line of tokens 4 h */
    const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), ab2 = _mm512_shuffle_i32x4(a, b, 0xEE);
    const __m512i cd = _mm512_shuffle_i32x4(c, d, 0x44), cd2 = _mm512_shuffle_i32x4(c, d, 0xEE);
    _mm512_storeu_si512(out, _mm512_shuffle_i32x4(ab, cd, 0x88));
    _mm512_storeu_si512((char *)out + 64, _mm512_shuffle_i32x4(ab, cd, 0xDD));
    _mm512_storeu_si512((char *)out + 128, _mm512_shuffle_i32x4(ab2, cd2, 0x88));
    _mm512_storeu_si512((char *)out + 192, _mm512_shuffle_i32x4(ab2, cd2, 0xDD));
#else
    for (int g = 0; g < 4; g++)
        for (int h = 0; h < 4; h++)
            kv_transpose_4x4_bytes((const uint8_t *)lines + 64 * g + 16 * h, (uint8_t *)out + 64 * h + 16 * g);
#endif
}

/* Widens two lines of INT4 or GAUSS4 to four of INT8. */
static inline void KV(widen_lines)(const char *lines, const int dtype, uint8_t *out)
{
    for (int line = 0; line < 2; line++, lines += 64, out += 128)
        for (int half = 0; half < 64; half += 32) {
            KV(half_line) codes;
            memcpy(&codes, lines + half, 32);
            for (int i = 0; i < 2; i++, codes >>= 4) {
                KV(half_line) nibbles = codes & 0x0F0F0F0F;
                if (dtype == KV_GAUSS4) {
                    KV(put_levels)(&nibbles, 4, kv_gauss_levels, out + 64 * i + half);
                } else {
                    nibbles <<= 4; /* 16 times the code, with the bias of INT8 */
                    memcpy(out + 64 * i + half, &nibbles, 32);
                }
            }
        }
}

static inline __attribute__((always_inline)) void KV(transpose_lanes)(const kv_side *side, const char *codes, uint8_t *out,
                                                                      ptrdiff_t stride, const int dtype)
{
    KV_ALIGNED uint8_t square[4 * 64];
    for (int d = 0; d < side->padded_dim; d += KV_LANES, codes += KV_LANES / KV_DEPTHS(dtype) * 64, out += stride) {
        if (dtype == KV_INT8) {
            KV(transpose_square)(codes, out);
        } else {
            KV(widen_lines)(codes, dtype, square);
            KV(transpose_square)(square, out);
        }
    }
}

/* Transposes a tile of codes to a block of INT8 values that holds nothing else. */
static void KV(transpose_tile)(const kv_side *side, const kv_tile *tile, KV(expanded) *transposed)
{
    const int tokens = kv_whole_lanes(tile->count);
    const ptrdiff_t lane_bytes = (ptrdiff_t)(side->padded_dim / KV_DEPTHS(side->dtype)) * 64, stride = tokens * KV_LANES;
    float *scales = (float *)(transposed->block + tokens * side->padded_dim);
    for (int t = 0, slot = tile->first, block = 0; t < tokens; t += KV_LANES) {
        const char *at = tile->base + tile->at[block], *codes = at + slot / KV_LANES * lane_bytes;
        uint8_t *out = transposed->block + t * KV_LANES;
        if (side->dtype == KV_INT8) KV(transpose_lanes)(side, codes, out, stride, KV_INT8);
        else if (side->dtype == KV_INT4) KV(transpose_lanes)(side, codes, out, stride, KV_INT4);
        else KV(transpose_lanes)(side, codes, out, stride, KV_GAUSS4);
        for (int i = 0; i < KV_LANES; i++)
            scales[t + i] = KV(get_scale)(side, at, slot + i) * (side->dtype == KV_INT4 ? 1.0f / 16 : 1.0f);
        slot += KV_LANES;
        if (slot == side->block_size) slot = 0, block++;
    }
    KV(describe_expanded)(side, tile, tokens, transposed);
}

static __attribute__((noinline)) void KV(transpose_packed)(const kv_side *side, const kv_tile *tile, const kv_ahead *ahead,
                                                           kv_room *room, KV(expanded) *transposed)
{
    KV(expanded) *const keys = KV_IN(room->tiles[0], KV(expanded));
    KV(expand_tile)(side, tile, ahead, 0, keys);
    KV(transpose_tile)(&keys->side, &keys->tile, transposed);
}

static __attribute__((noinline)) void KV(accumulate_transposed)(
    const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile, const kv_ahead *ahead, float *acc)
{
    KV(expanded) *const transposed = KV_IN(state->room->tiles[1], KV(expanded));
    if (side->family == KV_PACKED_CODES) KV(transpose_packed)(side, tile, ahead, state->room, transposed);
    else KV(transpose_tile)(side, tile, transposed);
    KV(accumulate_int8)(&transposed->side, state, num_rows, &transposed->tile, &transposed->ahead, acc);
}
