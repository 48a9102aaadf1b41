/* Scores of rows of ggml's blocks by 8-bit products, with AVX-512 VNNI. Codes are transposed once, into strips of 32 tokens, so that
   an instruction multiplies 4 codes of 16 tokens by a broadcast piece of a query row, and no sum across lanes is needed.

   Queries are 16-bit integers cut into high and low bytes, with one scale per row (activations.inc.h). Codes are unsigned: those
   of q8_0 + 128. A block's sum: 32 x 255 x 128 of high bytes is below 2^20, times 256 below 2^28. */

enum { KV(CODES_8), KV(CODES_4) };

/* 16 bytes of 16 tokens as 4 lines: dword t of line i is dword i of token t. The lanes of a vector come from memory, so that half of
   the shuffles are loads (bench/bench_ggml_attention.py). */
static inline __attribute__((always_inline)) void KV(transpose_bytes)(const char *bytes, ptrdiff_t stride, kv_lines *ahead, vi lines[4])
{
    vi x[4]; /* of tokens i, 4 + i, 8 + i and 12 + i */
    KV_FOR4(i, 4,
#define KV_BYTES(lane) _mm_loadu_si128((const __m128i *)(bytes + (4 * lane + i) * stride))
        kv_prefetch(ahead->at), ahead->at += ahead->bytes;
        x[i] = _mm512_inserti32x4(_mm512_castsi128_si512(KV_BYTES(0)), KV_BYTES(1), 1);
        x[i] = _mm512_inserti32x4(x[i], KV_BYTES(2), 2);
        x[i] = _mm512_inserti32x4(x[i], KV_BYTES(3), 3););
#undef KV_BYTES
    const vi even = _mm512_unpacklo_epi32(x[0], x[1]), odd = _mm512_unpackhi_epi32(x[0], x[1]);
    const vi even_2 = _mm512_unpacklo_epi32(x[2], x[3]), odd_2 = _mm512_unpackhi_epi32(x[2], x[3]);
    lines[0] = _mm512_unpacklo_epi64(even, even_2);
    lines[1] = _mm512_unpackhi_epi64(even, even_2);
    lines[2] = _mm512_unpacklo_epi64(odd, odd_2);
    lines[3] = _mm512_unpackhi_epi64(odd, odd_2);
}

/* Codes and scales of KV_LANES tokens as half of the columns of a strip: dwords of 4 codes, (n/4, KV_COLUMNS), and (n/32, KV_COLUMNS).
   The last of `count` tokens stands for those beyond. */
static inline __attribute__((always_inline)) void KV(transpose_codes)(
    const char *keys, ptrdiff_t stride, int n, int count, kv_lines ahead, char *strip, uint16_t *scales, const int kind)
{
    enum { LINE = KV_COLUMNS * 4 };
    const ptrdiff_t block_bytes = kind == KV(CODES_8) ? sizeof(block_q8_0) : sizeof(block_q4_0);
    const ptrdiff_t codes_at = kind == KV(CODES_8) ? offsetof(block_q8_0, qs) : offsetof(block_q4_0, qs);
    const ptrdiff_t row_bytes = n / 32 * block_bytes;
    char rows[KV_LANES * (KV_MAX_HEAD_DIM / 32) * sizeof(block_q8_0)];
    if (count < KV_LANES) {
        for (int i = 0; i < KV_LANES; i++)
            memcpy(rows + i * row_bytes, keys + (i < count ? i : count - 1) * stride, (size_t)row_bytes);
        keys = rows, stride = row_bytes;
    }
    /* Fetched with every four tokens of each 16 bytes, and once more. */
    const ptrdiff_t pieces = n / 32 * (kind == KV(CODES_8) ? 9 : 5);
    ahead.bytes = (ahead.bytes + pieces - 1) / pieces;
    for (int b = 0; b < n / 32; b++, keys += block_bytes, strip += 8 * LINE, scales += KV_COLUMNS) {
        vi lines[8];
        for (int i = 0; i < KV_LANES; i++) memcpy(scales + i, keys + i * stride, 2);
        kv_prefetch(ahead.at), ahead.at += ahead.bytes;
        KV(transpose_bytes)(keys + codes_at, stride, &ahead, lines);
        if (kind == KV(CODES_8)) {
            KV(transpose_bytes)(keys + codes_at + 16, stride, &ahead, lines + 4);
            for (int i = 0; i < 8; i++) _mm512_storeu_si512(strip + i * LINE, _mm512_xor_si512(lines[i], _mm512_set1_epi8((char)128)));
        } else {
            const vi nibble = _mm512_set1_epi8(15);
            for (int i = 0; i < 4; i++) { /* elements 0 to 15, and 16 to 31 */
                _mm512_storeu_si512(strip + i * LINE, _mm512_and_si512(lines[i], nibble));
                _mm512_storeu_si512(strip + (4 + i) * LINE, _mm512_and_si512(_mm512_srli_epi16(lines[i], 4), nibble));
            }
        }
    }
}

/* Scores of the tokens of a strip, of `rows` query rows that are interleaved; `x` as kv_queries.parts has them. */
static inline __attribute__((always_inline)) void KV(multiply_code_rows)(
    const int8_t *x, const int32_t *sums, const float *units, int blocks, const char *codes, const uint16_t *scales, const int rows,
    float *scores)
{
    vf score[KV_QUAD][2];
    KV_FOR4(r, rows, score[r][0] = score[r][1] = vf_set1(0.0f););
    for (int b = 0; b < blocks; b++, scales += KV_COLUMNS) {
        vacc high[KV_QUAD][2], low[KV_QUAD][2];
        KV_FOR4(r, rows,
            high[r][0] = high[r][1] = (vacc)vi_set1(0);
            low[r][0] = low[r][1] = (vacc)vi_set1(-sums[r * blocks + b]););
        for (int i = 0; i < 8; i++, x += KV_QUAD * 8, codes += KV_COLUMNS * 4) {
            const vi first = vi_load(codes), second = vi_load(codes + 64);
            KV_FOR4(r, rows, vacc_dot(high[r][0], low[r][0], first, x + r * 8); vacc_dot(high[r][1], low[r][1], second, x + r * 8););
        }
        const vf first = vf_load_float16(scales), second = vf_load_float16(scales + KV_LANES);
        KV_FOR4(r, rows,
            score[r][0] = vf_fma(vi_to_float(vacc_total(high[r][0], low[r][0])), first, score[r][0]);
            score[r][1] = vf_fma(vi_to_float(vacc_total(high[r][1], low[r][1])), second, score[r][1]););
    }
    KV_FOR4(r, rows,
        vf_store(scores + r * KV_TILE, vf_mul(score[r][0], vf_set1(units[r])));
        vf_store(scores + r * KV_TILE + KV_LANES, vf_mul(score[r][1], vf_set1(units[r]))););
}

static void KV(multiply_codes_by_queries)(const kv_row_queries *queries, int num_rows, int n, const char *strip, const uint16_t *scales,
                                          float *scores)
{
    const int blocks = n / 32;
    for (int row = 0; row < num_rows; row += KV_QUAD) {
        const int8_t *x = queries->prepared.parts + row * n * 2;
        const int32_t *sums = queries->block_sums + row * blocks;
        const float *units = queries->prepared.scale + row;
        float *at = scores + row * KV_TILE;
#define KV_MULTIPLY_ROWS(R) KV(multiply_code_rows)(x, sums, units, blocks, strip, scales, R, at)
        switch (num_rows - row) {
        case 1: KV_MULTIPLY_ROWS(1); break;
        case 2: KV_MULTIPLY_ROWS(2); break;
        case 3: KV_MULTIPLY_ROWS(3); break;
        default: KV_MULTIPLY_ROWS(4);
        }
#undef KV_MULTIPLY_ROWS
    }
}

static void KV(transpose_q8_0)(const char *keys, ptrdiff_t stride, int n, int count, kv_lines ahead, char *strip, uint16_t *scales)
{
    KV(transpose_codes)(keys, stride, n, count, ahead, strip, scales, KV(CODES_8));
}

static void KV(transpose_q4_0)(const char *keys, ptrdiff_t stride, int n, int count, kv_lines ahead, char *strip, uint16_t *scales)
{
    KV(transpose_codes)(keys, stride, n, count, ahead, strip, scales, KV(CODES_4));
}

/* Queries as kv_queries of INT8, and the sum of each of their blocks times the codes' bias. */
static inline void KV(prepare_codes)(const float *rows, int num_rows, int n, float scale, int bias, kv_row_queries *queries)
{
    const kv_side side = {.padded_dim = n};
    KV(prepare_int8)(&side, rows, num_rows, scale, &queries->prepared);
    const int blocks = n / 32;
    const int8_t *x = queries->prepared.parts;
    for (int row = 0; row < num_rows; row += KV_QUAD)
        for (int b = 0; b < blocks; b++) {
            vi both = vi_set1(0); /* dwords of each row's high bytes and its low ones, of even and odd pieces */
            for (int i = 0; i < 8; i += 2, x += 64) both = _mm512_dpbusd_epi32(both, _mm512_set1_epi8(1), vi_load(x));
            KV_ALIGNED int32_t sums[16];
            _mm512_store_si512(sums, both);
            for (int r = 0; r < KV_QUAD && row + r < num_rows; r++) { /* at most 32 x 32639 */
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
