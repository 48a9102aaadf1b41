/* Scores of float rows in float32, where the rounding to words can have moved them too far: of single rows, or of all 16 of a panel. */

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

/* Sixteen parts of the product of a key and a query row. The same bits as those of multiply_rows_exactly. */
static inline vf KV(multiply_exactly)(const char *key, const int dtype, const float *query, ptrdiff_t n)
{
    vf sum = vf_set1(0.0f);
#define KV_MULTIPLY(dtype) for (ptrdiff_t i = 0; i < n; i += W) sum = vf_fma(vf_load(query + i), KV(load_as)(key, i, dtype), sum)
    KV_BY_DTYPE(dtype, KV_MULTIPLY);
#undef KV_MULTIPLY
    return sum;
}

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

/* Scores of a panel's rows that are computed in float32. */
typedef struct {
    const KV(word_keys) *keys;
    const float *rows;         /* the queries as they are */
    float factor;
    float *scores;
    int count;
    unsigned places[(KV_MATRIX_TILE + 1) * KV_ROWS]; /* token x KV_ROWS + row */
} KV(exact_scores);

/* Computes the scores of a token and those rows whose bit is set. */
static void KV(score_token)(const KV(exact_scores) *exact, unsigned token, __mmask16 rows)
{
    const KV(word_keys) *keys = exact->keys;
    const vf products = KV(multiply_rows_exactly)(keys->rows[token], keys->dtype, exact->rows, keys->dim);
    _mm512_mask_storeu_ps(exact->scores + token * KV_ROWS, rows, vf_mul(products, vf_set1(exact->factor)));
}

/* Computes the scores at the places. */
static void KV(score_places)(const KV(exact_scores) *exact)
{
    KV_ALIGNED float parts[KV_ROWS * KV_LANES], products[KV_ROWS];
    const KV(word_keys) *keys = exact->keys;
    for (int first = 0; first < exact->count; first += KV_ROWS) {
        const int here = exact->count - first < KV_ROWS ? exact->count - first : KV_ROWS;
        const unsigned *places = exact->places + first;
        for (int i = 0; i < here; i++) {
            const float *row = exact->rows + places[i] % KV_ROWS * keys->dim;
            vf_store(parts + i * KV_LANES, KV(multiply_exactly)(keys->rows[places[i] / KV_ROWS], keys->dtype, row, keys->dim));
        }
        vf_store(products, vf_mul(KV(reduce_rows)(parts, 0), vf_set1(exact->factor)));
        for (int i = 0; i < here; i++) exact->scores[places[i]] = products[i];
    }
}
