/* Scores of float rows in float32, where the rounding to words can have moved them too far. */

/* Scores of a panel's rows and the tokens of a tile. */
typedef struct {
    KV_ALIGNED float weights[KV_TILE * KV_ROWS];   /* (tokens, rows): scores, then weights times the values' units */
    KV_ALIGNED float most[KV_TILE / 8 * KV_ROWS];  /* of 8 tokens each: the largest score */
} KV(word_scores);

/* 16 query rows that multiply some tokens: as words with their units, and the products with the mean that the keys are less. */
typedef struct {
    const int8_t *words;
    vf unit, shift;
} KV(word_queries);

/* Products of a key and 16 query rows. */
static inline __attribute__((always_inline)) vf KV(multiply_dtype)(const char *key, const float *rows, ptrdiff_t n, const int dtype)
{
    KV_ALIGNED float parts[KV_ROWS * KV_LANES];
    vf sum[KV_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < KV_ROWS; r++) sum[r] = vf_set1(0.0f);
    for (ptrdiff_t i = 0; i < n; i += W) {
        const vf element = KV(load_as)(key, i, dtype);
#pragma GCC unroll 16
        for (int r = 0; r < KV_ROWS; r++) sum[r] = vf_fma(vf_load(rows + r * n + i), element, sum[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < KV_ROWS; r++) vf_store(parts + r * KV_LANES, sum[r]);
    return KV(reduce_rows)(parts, 0);
}

static vf KV(multiply_rows_exactly)(const char *key, int dtype, const float *rows, ptrdiff_t n)
{
    if (dtype == KV_FLOAT32) return KV(multiply_dtype)(key, rows, n, KV_FLOAT32);
    if (dtype == KV_FLOAT16) return KV(multiply_dtype)(key, rows, n, KV_FLOAT16);
    return KV(multiply_dtype)(key, rows, n, KV_BFLOAT16);
}
