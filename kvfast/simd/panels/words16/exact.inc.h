/* Scores in float32, where the rounding to words can have moved them too far: of single rows, or of all 16 of a panel. */

/* Scores of a panel's rows and the tokens of a tile. */
typedef struct {
    KV_ALIGNED float weights[KV_MATRIX_TILE * KV_ROWS];              /* (tokens, rows): scores, then weights times the values' units */
    KV_ALIGNED float most[KV_MATRIX_TILE / 8 * KV_ROWS];             /* of 8 tokens each: the largest score */
    KV_ALIGNED float shifts[KV_MATRIX_TILE / KV_LANES * KV_ROWS];    /* of each block: the products with the mean of its keys */
} KV(word_scores);

/* 16 query rows: as they are, (16, dim), and as words with their units. */
typedef struct {
    const float *rows;
    const int8_t *words;
    vf unit;
    float factor;
} KV(word_queries);

/* A key as it was before it became words, or less its mean: floats, or (KV_INT8) codes, (dim / 64, tokens, 64), times the channels'
   scales. */
typedef struct {
    const char *row;
    const float *scales;
    int dtype;
    float unit;
} KV(exact_key);

static inline __attribute__((always_inline)) vf KV(load_exact)(const KV(exact_key) *key, ptrdiff_t i, const int dtype)
{
    if (dtype != KV_INT8) return KV(load_as)(key->row, i, dtype);
    const __m128i codes = _mm_load_si128((const __m128i *)(key->row + (i & ~63) * KV_MATRIX_TILE + (i & 63)));
    return vf_mul(vi_to_float(_mm512_cvtepi8_epi32(codes)), vf_load(key->scales + i));
}

/* Calls multiply(dtype) with a constant dtype of a key. */
#define KV_BY_KEY(key, multiply)                              \
    do {                                                      \
        if ((key)->dtype == KV_INT8) multiply(KV_INT8);       \
        else KV_BY_DTYPE((key)->dtype, multiply);             \
    } while (0)

/* Sixteen parts of the product of a key and a query row. The same bits as those of multiply_exact_rows. */
static inline vf KV(multiply_exact_row)(const KV(exact_key) *key, const float *query, ptrdiff_t n)
{
    vf sum = vf_set1(0.0f);
#define KV_MULTIPLY(dtype) for (ptrdiff_t i = 0; i < n; i += W) sum = vf_fma(vf_load(query + i), KV(load_exact)(key, i, dtype), sum)
    KV_BY_KEY(key, KV_MULTIPLY);
#undef KV_MULTIPLY
    return vf_mul(sum, vf_set1(key->unit));
}

static inline __attribute__((always_inline)) void KV(multiply_dtype)(const KV(exact_key) *key, const float *rows, ptrdiff_t n,
                                                                     float *parts, int adds, const int dtype)
{
    vf sum[KV_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < KV_ROWS; r++) sum[r] = vf_set1(0.0f);
    for (ptrdiff_t i = 0; i < n; i += W) {
        const vf element = KV(load_exact)(key, i, dtype);
#pragma GCC unroll 16
        for (int r = 0; r < KV_ROWS; r++) sum[r] = vf_fma(vf_load(rows + r * n + i), element, sum[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < KV_ROWS; r++) {
        const vf product = vf_mul(sum[r], vf_set1(key->unit));
        vf_store(parts + r * KV_LANES, adds ? vf_add(vf_load(parts + r * KV_LANES), product) : product);
    }
}

/* Parts of the products of a key and 16 query rows, (16 rows, 16). */
static void KV(multiply_exact_rows)(const KV(exact_key) *key, const float *rows, ptrdiff_t n, float *parts, int adds)
{
#define KV_MULTIPLY(dtype) KV(multiply_dtype)(key, rows, n, parts, adds, dtype)
    KV_BY_KEY(key, KV_MULTIPLY);
#undef KV_MULTIPLY
}

/* Products of the mean of a block's keys with the query rows, times the softmax scale. */
static vf KV(multiply_mean)(const float *mean, const KV(word_queries) *queries, int n)
{
    KV_ALIGNED float parts[KV_ROWS * KV_LANES];
    const KV(exact_key) key = {(const char *)mean, NULL, KV_FLOAT32, 1.0f};
    KV(multiply_dtype)(&key, queries->rows, n, parts, 0, KV_FLOAT32);
    return vf_mul(KV(reduce_rows)(parts, 0), vf_set1(queries->factor));
}

/* Finds a key as it was; `buffer` is for one row. */
static KV(exact_key) KV(find_key)(const KV(word_keys) *keys, unsigned token, float *buffer)
{
    const int block = keys->block_of[token / KV_LANES];
    if (keys->family == KV_FLOAT_ROWS) return (KV(exact_key)){keys->rows[token], NULL, keys->dtype, 1.0f};
    if (keys->has_channels)
        return (KV(exact_key)){(const char *)keys->codes + token * 64, keys->channels + block * KV_MAX_HEAD_DIM, KV_INT8,
                               keys->block_units[block]};
    KV(load_word_row)(keys, (int)token, buffer);
    return (KV(exact_key)){(const char *)buffer, NULL, KV_FLOAT32, keys->units[token]};
}

/* Scores of a panel's rows that are computed in float32. */
typedef struct {
    const KV(word_keys) *keys, *rope;
    const KV(word_queries) *queries, *rope_queries;
    KV(word_scores) *scores;
    int count;
    unsigned places[(KV_MATRIX_TILE + 1) * KV_ROWS]; /* token x KV_ROWS + row */
} KV(exact_scores);

/* The product of a block's mean with the query rows, which the scores of its tokens have. Float rows are read with their mean. */
static inline const float *KV(shifts_of)(const KV(exact_scores) *exact, unsigned token)
{
    static const KV_ALIGNED float none[KV_ROWS];
    if (!exact->keys->has_means || exact->keys->family == KV_FLOAT_ROWS) return none;
    return exact->scores->shifts + exact->keys->block_of[token / KV_LANES] * KV_ROWS;
}

/* Computes the scores of a token and those rows whose bit is set. */
static void KV(score_token)(const KV(exact_scores) *exact, unsigned token, __mmask16 rows)
{
    KV_ALIGNED float parts[KV_ROWS * KV_LANES], buffer[KV_MAX_HEAD_DIM];
    KV(exact_key) key = KV(find_key)(exact->keys, token, buffer);
    KV(multiply_exact_rows)(&key, exact->queries->rows, exact->keys->dim, parts, 0);
    if (exact->rope) {
        key = KV(find_key)(exact->rope, token, buffer);
        KV(multiply_exact_rows)(&key, exact->rope_queries->rows, exact->rope->dim, parts, 1);
    }
    float *at = exact->scores->weights + token * KV_ROWS;
    const vf products = vf_mul(KV(reduce_rows)(parts, 0), vf_set1(exact->queries->factor));
    vf_store(at, _mm512_mask_add_ps(vf_load(at), rows, products, vf_load(KV(shifts_of)(exact, token))));
}

/* Computes the scores at the places. */
static void KV(score_places)(const KV(exact_scores) *exact)
{
    KV_ALIGNED float parts[KV_ROWS * KV_LANES], products[KV_ROWS], buffer[KV_MAX_HEAD_DIM];
    for (int first = 0; first < exact->count; first += KV_ROWS) {
        const int here = exact->count - first < KV_ROWS ? exact->count - first : KV_ROWS;
        const unsigned *places = exact->places + first;
        for (int i = 0; i < here; i++) {
            const unsigned token = places[i] / KV_ROWS, r = places[i] % KV_ROWS;
            KV(exact_key) key = KV(find_key)(exact->keys, token, buffer);
            vf part = KV(multiply_exact_row)(&key, exact->queries->rows + r * exact->keys->dim, exact->keys->dim);
            if (exact->rope) {
                key = KV(find_key)(exact->rope, token, buffer);
                part = vf_add(part, KV(multiply_exact_row)(&key, exact->rope_queries->rows + r * exact->rope->dim, exact->rope->dim));
            }
            vf_store(parts + i * KV_LANES, part);
        }
        vf_store(products, vf_mul(KV(reduce_rows)(parts, 0), vf_set1(exact->queries->factor)));
        for (int i = 0; i < here; i++)
            exact->scores->weights[places[i]] = products[i] + KV(shifts_of)(exact, places[i] / KV_ROWS)[places[i] % KV_ROWS];
    }
}
