/* Adds weights times the codes of ggml's blocks by 8-bit products, with AVX-512 VBMI. One instruction puts the codes of four tokens side
   by side, 16 elements of them, and the next multiplies them by the four weights of a query row, of which there is one in each lane.

   A token's weight takes the scale of a block, and is an integer of 16 bits relative to the largest of the tile, as in activations.inc.h:
   its rounding error is carried on to the next token, and is noise. Codes are unsigned, those of q8_0 + 128; with at most 256 tokens,
       |sum w c| <= 256 * 32639 * 255 = 2 130 673 920 < 2^31. */

/* Elements 0 to 15 of a block of four tokens, and 16 to 31: dwords of four tokens. */
static inline __attribute__((always_inline)) void KV(gather_codes)(const char *tokens, ptrdiff_t stride, vi codes[2], const int type)
{
    /* Bytes 4 e to 4 e + 3 are element e of the four tokens, which are 16 bytes apart here. */
    const vi apart = _mm512_setr_epi32(0x30201000, 0x31211101, 0x32221202, 0x33231303, 0x34241404, 0x35251505, 0x36261606, 0x37271707,
                                       0x38281808, 0x39291909, 0x3A2A1A0A, 0x3B2B1B0B, 0x3C2C1C0C, 0x3D2D1D0D, 0x3E2E1E0E, 0x3F2F1F0F);
    if (type == GGML_TYPE_Q4_0) {
#define KV_NIBBLES(i) _mm_loadu_si128((const __m128i *)((const block_q4_0 *)(tokens + i * stride))->qs)
        vi x = _mm512_castsi128_si512(KV_NIBBLES(0));
        x = _mm512_inserti32x4(x, KV_NIBBLES(1), 1);
        x = _mm512_inserti32x4(x, KV_NIBBLES(2), 2);
        x = _mm512_permutexvar_epi8(apart, _mm512_inserti32x4(x, KV_NIBBLES(3), 3));
#undef KV_NIBBLES
        codes[0] = _mm512_and_si512(x, _mm512_set1_epi8(15));
        codes[1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
        return;
    }
#define KV_BYTES(i) _mm256_loadu_si256((const __m256i *)((const block_q8_0 *)(tokens + i * stride))->qs)
    const vi a = _mm512_inserti64x4(_mm512_castsi256_si512(KV_BYTES(0)), KV_BYTES(1), 1);
    const vi b = _mm512_inserti64x4(_mm512_castsi256_si512(KV_BYTES(2)), KV_BYTES(3), 1);
#undef KV_BYTES
    /* 32 bytes apart: twice as far. */
    const vi ends = _mm512_add_epi8(apart, _mm512_and_si512(apart, _mm512_set1_epi8(0x30)));
    codes[0] = _mm512_xor_si512(_mm512_permutex2var_epi8(a, ends, b), _mm512_set1_epi8((char)128));
    codes[1] = _mm512_xor_si512(_mm512_permutex2var_epi8(a, _mm512_add_epi8(ends, _mm512_set1_epi8(16)), b), _mm512_set1_epi8((char)128));
}

/* The codes of a tile as gather_codes has them, (n/32, count/4, 128 bytes), and their scales, (n/32, KV_TILE): once for all blocks of
   rows. */
static inline __attribute__((always_inline)) void KV(gather_values)(
    const char *values, ptrdiff_t stride, int n, int count, kv_lines ahead, char *codes, float *scales, const int type)
{
    const ptrdiff_t block_bytes = type == GGML_TYPE_Q8_0 ? sizeof(block_q8_0) : sizeof(block_q4_0);
    const ptrdiff_t step = ahead.bytes / ((count + 3) / 4 * (n / 32)) + 1;
    for (int b = 0; b < n / 32; b++, values += block_bytes, scales += KV_TILE) {
        char tail[4 * sizeof(block_q8_0)] = {0};
        KV(load_block_scales)(values, stride, count, scales);
        for (int t = 0; t < count; t += 4, codes += 128, ahead.at += step) {
            const bool whole = count - t >= 4;
            for (int i = 0; !whole && i < count - t; i++)
                memcpy(tail + i * block_bytes, values + (t + i) * stride, (size_t)block_bytes);
            vi both[2];
            for (ptrdiff_t at = 0; at < step; at += 64) kv_prefetch(ahead.at + at);
            KV(gather_codes)(whole ? values + t * stride : tail, whole ? stride : block_bytes, both, type);
            _mm512_store_si512(codes, both[0]);
            _mm512_store_si512(codes + 64, both[1]);
        }
    }
}

/* Adds a block of `count` tokens to `rows` rows of `acc`; `x` and `sums` are those of put_activations. `gathered`: the codes of four
   tokens are 128 bytes, and nothing is fetched. */
static inline __attribute__((always_inline)) void KV(add_code_block)(
    const char *values, ptrdiff_t stride, int count, const int8_t *x, const int32_t *sums, const float *units, const float *rescale,
    const int rows, kv_lines ahead, float *acc, ptrdiff_t n, const int type, const int gathered)
{
    const ptrdiff_t block_bytes = type == GGML_TYPE_Q8_0 ? sizeof(block_q8_0) : sizeof(block_q4_0);
    char tail[4 * sizeof(block_q8_0)] = {0};
    vacc high[KV_QUAD][2], low[KV_QUAD][2];
    KV_FOR4(r, rows,
        high[r][0] = high[r][1] = (vacc)vi_set1(0);
        low[r][0] = low[r][1] = (vacc)vi_set1(sums[r] * (type == GGML_TYPE_Q8_0 ? -128 : -8)););
    for (int t = 0; gathered && t < count; t += 4, values += 128, x += 8 * KV_QUAD) {
        const vi first = vi_load(values), second = vi_load(values + 64);
        KV_FOR4(r, rows, vacc_dot(high[r][0], low[r][0], first, x + r * 8); vacc_dot(high[r][1], low[r][1], second, x + r * 8););
    }
    for (int t = 0; !gathered && t < count; t += 4, values += 4 * stride, x += 8 * KV_QUAD) {
        if (count - t < 4) { /* those beyond have no weight, but nothing may be read there */
            for (int i = 0; i < count - t; i++) memcpy(tail + i * block_bytes, values + i * stride, (size_t)block_bytes);
            values = tail, stride = block_bytes;
        }
        vi codes[2];
        kv_prefetch(ahead.at);
        kv_prefetch(ahead.at + ahead.bytes);
        kv_prefetch(ahead.at + 2 * ahead.bytes);
        ahead.at += 3 * ahead.bytes;
        KV(gather_codes)(values, stride, codes, type);
        KV_FOR4(r, rows, vacc_dot(high[r][0], low[r][0], codes[0], x + r * 8); vacc_dot(high[r][1], low[r][1], codes[1], x + r * 8););
    }
    KV_FOR4(r, rows,
        for (int v = 0; v < 2; v++) {
            float *to = acc + r * n + v * W;
            const vf sum = vi_to_float(vacc_total(high[r][v], low[r][v]));
            vf_store(to, vf_fma(sum, vf_set1(units[r]), vf_mul(vf_load(to), vf_set1(rescale[r]))));
        });
}

static inline __attribute__((always_inline)) void KV(add_codes)(
    kv_softmax *state, int num_rows, const char *values, ptrdiff_t stride, const float *gathered, int n, int count, kv_lines ahead,
    float *acc, const int type)
{
    const ptrdiff_t block_bytes = gathered ? stride : type == GGML_TYPE_Q8_0 ? sizeof(block_q8_0) : sizeof(block_q4_0);
    const int whole = kv_whole_lanes(count);
    const ptrdiff_t pieces = (count + 3) / 4 * 3, step = ahead.bytes / (pieces * (n / 32)) + 1; /* three with four tokens of a block */
    KV_ALIGNED float own[KV_TILE], weights[KV_QUAD * KV_TILE];
    KV_ALIGNED int8_t parts[KV_QUAD * KV_TILE * 2];
    for (int b = 0; b < n / 32; b++, values += block_bytes) {
        const float *scales = gathered ? gathered + b * KV_TILE : own;
        if (!gathered) KV(load_block_scales)(values, stride, count, own);
        for (int row = 0; row < num_rows; row += KV_QUAD) {
            const int rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
            float inverse[KV_QUAD], units[KV_QUAD];
            int32_t sums[KV_QUAD];
            for (int r = 0; r < rows; r++) {
                vf largest = vf_set1(0.0f);
                for (int t = 0; t < whole; t += W) {
                    const vf weight = vf_mul(vf_load(state->weights + (row + r) * KV_TILE + t), vf_load(scales + t));
                    vf_store(weights + r * KV_TILE + t, weight);
                    largest = vf_max(largest, vf_abs(weight));
                }
                const float peak = vf_hmax(largest);
                inverse[r] = KV_INVERSE_OF(KV_MAX_WEIGHT, peak);
                units[r] = peak / KV_MAX_WEIGHT;
                state->noise[row + r] += KV(noise_of)(units[r], KV_CODE_SIZE(type == GGML_TYPE_Q8_0 ? KV_INT8 : KV_INT4),
                                                      state->seen[row + r]) * 32 / n;
            }
            KV(put_activations)(weights, KV_TILE, rows, whole, inverse, parts, sums, 1, NULL);
            const kv_lines lines = {ahead.at + b * pieces * step, row == 0 ? step : 0};
            float *at = acc + (ptrdiff_t)row * n + b * 32;
#define KV_ADD_BLOCK(R) \
    KV(add_code_block)(values, stride, count, parts, sums, units, state->rescale + row, R, lines, at, n, type, gathered != NULL)
            switch (rows) {
            case 1: KV_ADD_BLOCK(1); break;
            case 2: KV_ADD_BLOCK(2); break;
            case 3: KV_ADD_BLOCK(3); break;
            default: KV_ADD_BLOCK(4);
            }
#undef KV_ADD_BLOCK
        }
    }
}

#define KV_VALUE_CODES(name, type)                                                                                                        \
    static void KV(gather_##name)(const char *values, ptrdiff_t stride, int n, int count, kv_lines ahead, char *codes, float *scales)     \
    {                                                                                                                                     \
        KV(gather_values)(values, stride, n, count, ahead, codes, scales, type);                                                          \
    }                                                                                                                                     \
    static void KV(add_codes_##name)(kv_softmax *state, int num_rows, const char *values, ptrdiff_t stride, int n, int count,             \
                                     kv_lines ahead, float *acc)                                                                          \
    {                                                                                                                                     \
        KV(add_codes)(state, num_rows, values, stride, NULL, n, count, ahead, acc, type);                                                 \
    }                                                                                                                                     \
    static void KV(add_gathered_##name)(kv_softmax *state, int num_rows, const char *codes, int gathered, const float *scales, int n,     \
                                        int count, float *acc)                                                                            \
    {                                                                                                                                     \
        KV(add_codes)(state, num_rows, codes, (gathered + 3) / 4 * 128, scales, n, count, (kv_lines){codes, 0}, acc, type);               \
    }
KV_VALUE_CODES(q8_0, GGML_TYPE_Q8_0)
KV_VALUE_CODES(q4_0, GGML_TYPE_Q4_0)
#undef KV_VALUE_CODES
