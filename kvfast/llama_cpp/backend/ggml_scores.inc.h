/* Scores of rows of ggml's blocks by 8-bit products, with AVX-512 VNNI. 16 tokens at a time, their codes are transposed, so that
   an instruction multiplies 4 codes of each by a broadcast piece of a query row, and no sum across lanes is needed.

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

/* 16 rows of 16 dwords, transposed: dword l of row r becomes dword r of row l. */
static inline void KV(transpose_codes)(vi a[16])
{
    vi b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* a[4 g + i] holds dwords i, 4 + i, 8 + i, 12 + i of rows 4 g to 4 g + 3 */
        const vi even_0 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), odd_0 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xDD);
        const vi even_1 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88), odd_1 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xDD);
        b[i] = _mm512_shuffle_i32x4(even_0, even_1, 0x88);
        b[8 + i] = _mm512_shuffle_i32x4(even_0, even_1, 0xDD);
        b[4 + i] = _mm512_shuffle_i32x4(odd_0, odd_1, 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(odd_0, odd_1, 0xDD);
    }
    for (int i = 0; i < 16; i++) a[i] = b[i];
}

/* Adds the products of 16 tokens' block with up to 4 query rows to their scores; `x` as kv_queries.parts has it. */
static inline __attribute__((always_inline)) void KV(score_block)(
    const vi *codes, const int8_t *x, const int32_t *sums, ptrdiff_t sum_stride, const float *units, vf scale, const int rows,
    float *scores)
{
    vacc high[KV_PANEL], low[KV_PANEL];
    KV_FOR4(r, rows, high[r] = low[r] = (vacc)_mm512_setzero_si512(););
    for (int i = 0; i < 8; i++, x += KV_PANEL * 8)
        KV_FOR4(r, rows, vacc_dot(high[r], low[r], codes[i], x + r * 8););
    KV_FOR4(r, rows,
        const vi total = vi_sub(vacc_total(high[r], low[r]), vi_set1(sums[r * sum_stride]));
        const vf product = vf_mul(vi_to_float(total), vf_set1(units[r]));
        vf_store(scores + r * KV_TILE, vf_fma(product, scale, vf_load(scores + r * KV_TILE))););
}

static inline __attribute__((always_inline)) void KV(score_codes)(
    const kv_row_queries *queries, int num_rows, const char *keys, ptrdiff_t stride, int n, int count, kv_lines ahead, float *scores,
    const int kind)
{
    const ptrdiff_t block_bytes = kind == KV(CODES_8) ? sizeof(block_q8_0) : sizeof(block_q4_0);
    const int blocks = n / 32;
    const ptrdiff_t step = ahead.bytes / (KV_LANES * ((blocks + 1) / 2)) + 1; /* fetched with each piece of a row */
    for (int t = 0; t < count; t += KV_LANES) {
        const int last = count - t < KV_LANES ? count - t - 1 : KV_LANES - 1; /* stands for tokens beyond the tile */
        for (int r = 0; r < num_rows; r++) vf_store(scores + r * KV_TILE + t, vf_set1(0.0f));
        for (int b = 0; b < blocks; b += 2) {
            const int second = b + 1 < blocks;
            KV_ALIGNED uint16_t scales[2][KV_LANES];
            vi codes[16];
            for (int i = 0; i < KV_LANES; i++) {
                const char *block = keys + (t + (i < last ? i : last)) * stride + b * block_bytes;
                kv_prefetch(ahead.at), ahead.at += step;
                codes[i] = KV(load_codes)(block, second, kind);
                memcpy(&scales[0][i], block, 2);
                memcpy(&scales[1][i], block + second * block_bytes, 2);
            }
            KV(transpose_codes)(codes);
            for (int half = 0; half <= second; half++) {
                const vf scale = vf_load_float16(scales[half]);
                for (int row = 0; row < num_rows; row += KV_PANEL) {
                    const int8_t *x = queries->prepared.parts + row * n * 2 + (b + half) * (8 * KV_PANEL * 8);
                    const int32_t *sums = queries->block_sums + row * blocks + b + half;
                    const float *units = queries->prepared.scale + row;
                    float *at = scores + row * KV_TILE + t;
#define KV_SCORE_BLOCK(R) KV(score_block)(codes + 8 * half, x, sums, blocks, units, scale, R, at)
                    switch (num_rows - row) {
                    case 1: KV_SCORE_BLOCK(1); break;
                    case 2: KV_SCORE_BLOCK(2); break;
                    case 3: KV_SCORE_BLOCK(3); break;
                    default: KV_SCORE_BLOCK(4);
                    }
#undef KV_SCORE_BLOCK
                }
            }
        }
    }
}

/* Queries as kv_queries of INT8, and the sum of each of their blocks times the codes' bias. */
static inline void KV(prepare_codes)(const float *rows, int num_rows, int n, float scale, int bias, kv_row_queries *queries)
{
    const kv_side side = {.padded_dim = n};
    KV(prepare_int8)(&side, rows, num_rows, scale, &queries->prepared);
    for (int r = 0; r < num_rows; r++)
        for (int b = 0; b < n / 32; b++) {
            const int8_t *x = queries->prepared.parts + r / KV_PANEL * KV_PANEL * n * 2 + (b * 8 * KV_PANEL + r % KV_PANEL) * 8;
            int32_t sum = 0; /* at most 32 x 32639 */
            for (int i = 0; i < 8; i++, x += KV_PANEL * 8)
                for (int j = 0; j < 4; j++) sum += 256 * x[j] + x[4 + j];
            queries->block_sums[r * (n / 32) + b] = sum * bias;
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

static void KV(score_q8_0)(const kv_row_queries *queries, int num_rows, const char *keys, ptrdiff_t stride, int n, int count,
                           kv_lines ahead, float *scores)
{
    KV(score_codes)(queries, num_rows, keys, stride, n, count, ahead, scores, KV(CODES_8));
}

static void KV(score_q4_0)(const kv_row_queries *queries, int num_rows, const char *keys, ptrdiff_t stride, int n, int count,
                           kv_lines ahead, float *scores)
{
    KV(score_codes)(queries, num_rows, keys, stride, n, count, ahead, scores, KV(CODES_4));
}
