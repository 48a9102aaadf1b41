/* Scores of rows of ggml's blocks by 8-bit products, with AVX-512 VNNI. Codes are transposed once, into panels of 32 tokens, so that
   an instruction multiplies 4 codes of 16 tokens by a broadcast piece of a query row, and no sum across lanes is needed.

   Queries are 16-bit integers cut into high and low bytes, with one scale per row (activations.inc.h). Codes are unsigned: those
   of q8_0 + 128. A block's sum: 32 x 255 x 128 of high bytes is below 2^20, times 256 below 2^28. */

enum { KV(CODES_8), KV(CODES_4) };

/* The unsigned codes of two blocks of a token; of one where there is no second. */
static inline __attribute__((always_inline)) vi KV(load_codes)(const char *block, int second, const int kind)
{
    if (kind == KV(CODES_8)) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)((const block_q8_0 *)block)->qs);
        const __m256i b = second ? _mm256_loadu_si256((const __m256i *)((const block_q8_0 *)block)[1].qs) : a;
        return _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), _mm512_set1_epi8((char)128));
    }
    const __m128i a = _mm_loadu_si128((const __m128i *)((const block_q4_0 *)block)->qs);
    const __m128i b = second ? _mm_loadu_si128((const __m128i *)((const block_q4_0 *)block)[1].qs) : a;
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
    /* Nibbles in the order of the elements: low of a, high of a, low of b, high of b. */
    const vi twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(both));
    const vi moved = _mm512_mask_srli_epi16(twice, 0xFF00FF00, twice, 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8(15));
}

/* Codes and scales of KV_LANES tokens as half of the columns of a panel: dwords of 4 codes, (n/4, KV_COLUMNS), and (n/32, KV_COLUMNS).
   The last of `count` tokens stands for those beyond. */
static inline __attribute__((always_inline)) void KV(transpose_codes)(
    const char *keys, ptrdiff_t stride, int n, int count, kv_lines ahead, char *panel, uint16_t *scales, const int kind)
{
    const ptrdiff_t block_bytes = kind == KV(CODES_8) ? sizeof(block_q8_0) : sizeof(block_q4_0);
    const int blocks = n / 32;
    /* Fetched with each piece of a row, and once more: 16 pieces of q8_0 take 17 lines. */
    const ptrdiff_t pieces = (KV_LANES + 1) * ((blocks + 1) / 2), step = (ahead.bytes + pieces - 1) / pieces;
    const char *rows[KV_LANES];
    for (int i = 0; i < KV_LANES; i++) rows[i] = keys + (i < count ? i : count - 1) * stride;
    for (ptrdiff_t b = 0; b < blocks; b += 2, panel += 16 * KV_COLUMNS * 4, scales += 2 * KV_COLUMNS) {
        const int second = b + 1 < blocks;
        kv_prefetch(ahead.at), ahead.at += step;
        vi codes[16]; /* dwords i, 4 + i, 8 + i, 12 + i of rows 4 g to 4 g + 3 are codes[4 g + i] */
        KV_FOR4(g, 4,
            vi x[4];
            KV_FOR4(i, 4,
                const char *block = rows[4 * g + i] + b * block_bytes;
                kv_prefetch(ahead.at), ahead.at += step;
                x[i] = KV(load_codes)(block, second, kind);
                memcpy(scales + 4 * g + i, block, 2);
                if (second) memcpy(scales + KV_COLUMNS + 4 * g + i, block + block_bytes, 2););
            const vi even = _mm512_unpacklo_epi32(x[0], x[1]), odd = _mm512_unpackhi_epi32(x[0], x[1]);
            const vi even_2 = _mm512_unpacklo_epi32(x[2], x[3]), odd_2 = _mm512_unpackhi_epi32(x[2], x[3]);
            codes[4 * g] = _mm512_unpacklo_epi64(even, even_2);
            codes[4 * g + 1] = _mm512_unpackhi_epi64(even, even_2);
            codes[4 * g + 2] = _mm512_unpacklo_epi64(odd, odd_2);
            codes[4 * g + 3] = _mm512_unpackhi_epi64(odd, odd_2););
        KV_FOR4(i, 4,
            const vi even = _mm512_shuffle_i32x4(codes[i], codes[4 + i], 0x88), odd = _mm512_shuffle_i32x4(codes[i], codes[4 + i], 0xDD);
            const vi even_2 = _mm512_shuffle_i32x4(codes[8 + i], codes[12 + i], 0x88);
            const vi odd_2 = _mm512_shuffle_i32x4(codes[8 + i], codes[12 + i], 0xDD);
            char *line = panel + i * KV_COLUMNS * 4;
            _mm512_storeu_si512(line, _mm512_shuffle_i32x4(even, even_2, 0x88));
            _mm512_storeu_si512(line + 4 * KV_COLUMNS * 4, _mm512_shuffle_i32x4(odd, odd_2, 0x88));
            if (second) {
                _mm512_storeu_si512(line + 8 * KV_COLUMNS * 4, _mm512_shuffle_i32x4(even, even_2, 0xDD));
                _mm512_storeu_si512(line + 12 * KV_COLUMNS * 4, _mm512_shuffle_i32x4(odd, odd_2, 0xDD));
            });
    }
}

/* Scores of the tokens of a panel, of `rows` query rows that are interleaved; `x` as kv_queries.parts has them. */
static inline __attribute__((always_inline)) void KV(multiply_code_rows)(
    const int8_t *x, const int32_t *sums, const float *units, int blocks, const char *codes, const uint16_t *scales, const int rows,
    float *scores)
{
    vf score[KV_PANEL][2];
    KV_FOR4(r, rows, score[r][0] = score[r][1] = vf_set1(0.0f););
    for (int b = 0; b < blocks; b++, scales += KV_COLUMNS) {
        vi high[KV_PANEL][2], low[KV_PANEL][2];
        KV_FOR4(r, rows,
            high[r][0] = high[r][1] = vi_set1(0);
            low[r][0] = low[r][1] = vi_set1(-sums[r * blocks + b]););
        for (int i = 0; i < 8; i++, x += KV_PANEL * 8, codes += KV_COLUMNS * 4) {
            const vi first = vi_load(codes), second = vi_load(codes + 64);
            KV_FOR4(r, rows,
                const vi over = vi_set1(kv_load32(x + r * 8)), under = vi_set1(kv_load32(x + r * 8 + 4));
                high[r][0] = _mm512_dpbusd_epi32(high[r][0], first, over);
                high[r][1] = _mm512_dpbusd_epi32(high[r][1], second, over);
                low[r][0] = _mm512_dpbusd_epi32(low[r][0], first, under);
                low[r][1] = _mm512_dpbusd_epi32(low[r][1], second, under););
        }
        const vf first = vf_load_float16(scales), second = vf_load_float16(scales + KV_LANES);
        KV_FOR4(r, rows,
            score[r][0] = vf_fma(vi_to_float(vi_add(_mm512_slli_epi32(high[r][0], 8), low[r][0])), first, score[r][0]);
            score[r][1] = vf_fma(vi_to_float(vi_add(_mm512_slli_epi32(high[r][1], 8), low[r][1])), second, score[r][1]););
    }
    KV_FOR4(r, rows,
        vf_store(scores + r * KV_TILE, vf_mul(score[r][0], vf_set1(units[r])));
        vf_store(scores + r * KV_TILE + KV_LANES, vf_mul(score[r][1], vf_set1(units[r]))););
}

static void KV(multiply_codes_by_queries)(const kv_row_queries *queries, int num_rows, int n, const char *panel, const uint16_t *scales,
                                          float *scores)
{
    const int blocks = n / 32;
    for (int row = 0; row < num_rows; row += KV_PANEL) {
        const int8_t *x = queries->prepared.parts + row * n * 2;
        const int32_t *sums = queries->block_sums + row * blocks;
        const float *units = queries->prepared.scale + row;
        float *at = scores + row * KV_TILE;
#define KV_MULTIPLY_ROWS(R) KV(multiply_code_rows)(x, sums, units, blocks, panel, scales, R, at)
        switch (num_rows - row) {
        case 1: KV_MULTIPLY_ROWS(1); break;
        case 2: KV_MULTIPLY_ROWS(2); break;
        case 3: KV_MULTIPLY_ROWS(3); break;
        default: KV_MULTIPLY_ROWS(4);
        }
#undef KV_MULTIPLY_ROWS
    }
}

static void KV(transpose_q8_0)(const char *keys, ptrdiff_t stride, int n, int count, kv_lines ahead, char *panel, uint16_t *scales)
{
    KV(transpose_codes)(keys, stride, n, count, ahead, panel, scales, KV(CODES_8));
}

static void KV(transpose_q4_0)(const char *keys, ptrdiff_t stride, int n, int count, kv_lines ahead, char *panel, uint16_t *scales)
{
    KV(transpose_codes)(keys, stride, n, count, ahead, panel, scales, KV(CODES_4));
}

/* Queries as kv_queries of INT8, and the sum of each of their blocks times the codes' bias. */
static inline void KV(prepare_codes)(const float *rows, int num_rows, int n, float scale, int bias, kv_row_queries *queries)
{
    const kv_side side = {.padded_dim = n};
    KV(prepare_int8)(&side, rows, num_rows, scale, &queries->prepared);
    const int blocks = n / 32;
    const int8_t *x = queries->prepared.parts;
    for (int row = 0; row < num_rows; row += KV_PANEL)
        for (int b = 0; b < blocks; b++) {
            vi both = vi_set1(0); /* dwords of each row's high bytes and its low ones, of even and odd pieces */
            for (int i = 0; i < 8; i += 2, x += 64) both = _mm512_dpbusd_epi32(both, _mm512_set1_epi8(1), vi_load(x));
            KV_ALIGNED int32_t sums[16];
            _mm512_store_si512(sums, both);
            for (int r = 0; r < KV_PANEL && row + r < num_rows; r++) { /* at most 32 x 32639 */
                const int32_t *at = sums + 2 * r;
                queries->block_sums[(row + r) * blocks + b] = (256 * (at[0] + at[8]) + at[1] + at[9]) * bias;
            }
        }
}

static void KV(prepare_q8_0)(const float *rows, int num_rows, int n, float scale, kv_row_queries *queries)
{
    KV(prepare_codes)(rows, num_rows, n, scale, 128, queries);
}

static void KV(prepare_q4_0)(const float *rows, int num_rows, int n, float scale, kv_row_queries *queries)
{
    KV(prepare_codes)(rows, num_rows, n, scale, 8, queries);
}
