/* Attention on float32, float16 and bfloat16 rows, converted in registers, summed in float32. */

static inline __attribute__((always_inline)) vf KV(load_as)(const char *row, ptrdiff_t index, const int dtype)
{
    if (dtype == KV_FLOAT32) return vf_load((const float *)row + index);
    if (dtype == KV_FLOAT16) return vf_load_float16((const uint16_t *)row + index);
    return vf_load_bfloat16((const uint16_t *)row + index);
}

#ifdef vhalves
/* Whether n floats are all bfloat16. */
static inline int KV(are_halves)(const float *row, ptrdiff_t n)
{
    vi rest = vi_set1(0);
    for (ptrdiff_t i = 0; i < n; i += W) rest = vi_max(rest, vi_and(vf_bits(vf_load(row + i)), vi_set1(0xFFFF)));
    return vi_hmax(rest) == 0;
}

/* Rows to multiply keys in bfloat16: those that are bfloat16 are stored so, with the softmax scale as their scale, others as floats
   with the scale 0. Each row decides for itself, so that a query has the same bits with others and alone. */
static void KV(prepare_halves_of)(const kv_side *side, const float *rows, int num_rows, float scale, kv_queries *queries)
{
    const ptrdiff_t n = side->padded_dim;
    for (int r = 0; r < num_rows; r++, rows += n) {
        float *values = queries->values + r * n;
        queries->scale[r] = KV(are_halves)(rows, n) ? scale : 0.0f;
        if (queries->scale[r] != 0.0f) KV(from_bfloat16)(rows, n, values);
        else for (ptrdiff_t i = 0; i < n; i += W) vf_store(values + i, vf_mul(vf_load(rows + i), vf_set1(scale)));
    }
}

/* As score_quad, by products of matrices: two tokens by two query rows, 4 depths. They are exact, and each row has the bits that it
   has alone. */
static inline __attribute__((always_inline)) void KV(score_halves)(
    const char *keys, ptrdiff_t row_stride, int padded_dim, const float *q, const float *scale, const int rows, const int tokens,
    const char *ahead, float *scores)
{
    const int level = kv_prefetch_level;
    vf acc[4][2][2]; /* [each 4 of 16 depths][pairs of rows][pairs of tokens]: a product waits long for the last of its sum */
    for (int i = 0; i < 16; i++) acc[i / 4][i / 2 % 2][i % 2] = vf_set1(0.0f);
    for (int i = 0; i < padded_dim; i += 16) {
        if (i % 32 == 0) {
            kv_prefetch_lines(ahead, tokens, level);
            ahead += tokens * 64;
        }
        for (int part = 0; part < 2; part++) {
            const int at = i + 8 * part;
            vhalves key[4], row[KV_QUAD];
            KV_FOR4(t, 4, key[t] = vhalves_load((const uint16_t *)(keys + (t < tokens ? t : 0) * row_stride) + at););
            KV_FOR4(r, KV_QUAD, row[r] = vhalves_load((const uint16_t *)(q + (r < rows ? r : 0) * padded_dim) + at););
            for (int pair = 0; pair < rows; pair += 2)
                for (int t = 0; t < tokens; t += 2) {
                    vf *low = &acc[2 * part][pair / 2][t / 2], *high = &acc[2 * part + 1][pair / 2][t / 2];
                    *low = vhalves_dot(*low, vhalves_low(row[pair], row[pair + 1]), vhalves_low(key[t], key[t + 1]));
                    *high = vhalves_dot(*high, vhalves_high(row[pair], row[pair + 1]), vhalves_high(key[t], key[t + 1]));
                }
        }
    }
    for (int r = 0; r < rows; r++) {
        vf sum[2];
        for (int t = 0; t < 2; t++)
            sum[t] = vf_add(vf_add(acc[0][r / 2][t], acc[1][r / 2][t]), vf_add(acc[2][r / 2][t], acc[3][r / 2][t]));
        const vf sums = r % 2 ? vhalves_second(sum[0], sum[1]) : vhalves_first(sum[0], sum[1]);
        KV_ALIGNED float four[4];
        vf_store(four, vf_mul(sums, vf_set1(scale[r])));
        memcpy(scores + r * KV_TILE, four, (size_t)tokens * sizeof(float));
    }
}
#endif

static void KV(prepare_floating)(const kv_side *side, const float *rows, int num_rows, float scale, kv_queries *queries)
{
    queries->rows = rows;
    queries->factor = scale;
#ifdef vhalves
    if (side->dtype == KV_BFLOAT16) {
        KV(prepare_halves_of)(side, rows, num_rows, scale, queries);
        return;
    }
#endif
    for (ptrdiff_t i = 0; i < (ptrdiff_t)num_rows * side->padded_dim; i += W)
        vf_store(queries->values + i, vf_mul(vf_load(rows + i), vf_set1(scale)));
}

/* rows x tokens dot products over padded_dim. */
static inline __attribute__((always_inline)) void KV(score_quad)(
    const char *keys, ptrdiff_t row_stride, int padded_dim, const float *q, const int rows, const int tokens,
    const char *ahead, float *scores, const int dtype)
{
    const int itemsize = dtype == KV_FLOAT32 ? 4 : 2, level = kv_prefetch_level;
    vf acc[KV_QUAD][FLOAT_TOKENS];
    for (int r = 0; r < KV_QUAD; r++)
        for (int t = 0; t < FLOAT_TOKENS; t++) acc[r][t] = vf_set1(0.0f);
    for (int i = 0; i < padded_dim; i += W) {
        vf key[FLOAT_TOKENS];
        if (i * itemsize % 64 == 0) {
            kv_prefetch_lines(ahead, tokens, level);
            ahead += tokens * 64;
        }
        for (int t = 0; t < tokens; t++) {
            const char *row = keys + t * row_stride;
            key[t] = KV(load_as)(row, i, dtype);
        }
        for (int r = 0; r < rows; r++) {
            vf query = vf_load(q + r * padded_dim + i);
            for (int t = 0; t < tokens; t++) acc[r][t] = vf_fma(query, key[t], acc[r][t]);
        }
    }
    if (tokens == 1) {
        /* Sum in the same order as for more tokens: a token's score does not depend on how many come with it. */
        for (int r = 0; r < rows; r++) {
            float sums[4];
            KV(vf_sum4)(acc[r][0], acc[r][0], acc[r][0], acc[r][0], sums);
            scores[r * KV_TILE] = sums[0];
        }
        return;
    }
    for (int r = 0; r < rows; r += 4 / FLOAT_TOKENS) {
        float sums[4];
#if FLOAT_TOKENS == 4
        KV(vf_sum4)(acc[r][0], acc[r][1], acc[r][2], acc[r][3], sums);
        memcpy(scores + r * KV_TILE, sums, 16);
#else
        KV(vf_sum4)(acc[r][0], acc[r][1], acc[r + 1][0], acc[r + 1][1], sums);
        memcpy(scores + r * KV_TILE, sums, 8);
        if (r + 1 < rows) memcpy(scores + (r + 1) * KV_TILE, sums + 2, 8);
#endif
    }
}

/* rows x (vectors x W) output dimensions over count tokens. */
static inline __attribute__((always_inline)) void KV(value_quad)(
    const char *values, ptrdiff_t row_stride, int count, const float *weights, const int rows, const int vectors,
    const char *ahead, const float *rescale, float *acc, int padded_dim, const int dtype)
{
    const int itemsize = dtype == KV_FLOAT32 ? 4 : 2, level = kv_prefetch_level;
    vf sum[KV_QUAD][FLOAT_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vf_mul(vf_load(acc + r * padded_dim + v * W), vf_set1(rescale[r]));
    for (int t = 0; t < count; t++) {
        const int lines = (vectors * W * itemsize + 63) / 64;
        vf value[FLOAT_VECTORS];
        kv_prefetch_lines(ahead, lines, level);
        ahead += lines * 64;
        for (int v = 0; v < vectors; v++) value[v] = KV(load_as)(values, v * W, dtype);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vf_fma(vf_set1(weights[r * KV_TILE + t]), value[v], sum[r][v]);
        values += row_stride;
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) vf_store(acc + r * padded_dim + v * W, sum[r][v]);
}

/* Every number of rows is a quad of its own, so that its accumulators stay in registers. */
#define KV_EACH_ROWS(rows, quad, ...)         \
    switch (rows) {                           \
    case 1: quad(1, __VA_ARGS__) break;       \
    case 2: quad(2, __VA_ARGS__) break;       \
    case 3: quad(3, __VA_ARGS__) break;       \
    default: quad(4, __VA_ARGS__)             \
    }

/* The part of a tile that lies in one block: from token *t of the tile on. */
static inline const char *KV(rows_in_block)(const kv_side *side, const kv_tile *tile, int t, int *count)
{
    const int slot = t ? 0 : tile->first;
    *count = side->block_size - slot < tile->count - t ? side->block_size - slot : tile->count - t;
    return tile->base + tile->at[(tile->first + t) / side->block_size] + slot * side->row_stride;
}

/* Bytes that are read of a row; rows of some caches lie further apart. What is prefetched lies side by side. */
static inline __attribute__((always_inline)) ptrdiff_t KV(row_bytes)(const kv_side *side, const int dtype)
{
    return side->padded_dim * (dtype == KV_FLOAT32 ? 4 : 2);
}

/* The scores of `count` rows of one block, from token `start` of the tile on. */
static inline __attribute__((always_inline)) void KV(scores_floating)(
    const kv_side *side, const kv_queries *queries, int num_rows, const char *keys, int count, int start,
    const kv_ahead *ahead, float *scores, const int dtype)
{
#ifdef vhalves /* rows of a quad are of one kind */
    for (int row = 0, rows; row < num_rows; row += rows) {
        const float *q = queries->values + row * side->padded_dim, *scale = queries->scale + row;
        int t = 0;
        rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
        for (int r = 1; dtype == KV_BFLOAT16 && r < rows; r++)
            if ((scale[r] == 0.0f) != (scale[0] == 0.0f)) rows = r;
#define KV_QUAD_SCORES(R, T)                                                                                            \
    if (dtype == KV_BFLOAT16 && scale[0] != 0.0f)                                                                       \
        KV(score_halves)(keys + t * side->row_stride, side->row_stride, side->padded_dim, q, scale, R, T, fetch,        \
                         scores + row * KV_TILE + t);                                                                   \
    else                                                                                                                \
        KV(score_quad)(keys + t * side->row_stride, side->row_stride, side->padded_dim, q, R, T, fetch,                 \
                       scores + row * KV_TILE + t, dtype);
#else
    for (int row = 0; row < num_rows; row += KV_QUAD) {
        const int rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
        const float *q = queries->values + row * side->padded_dim;
        int t = 0;
#define KV_QUAD_SCORES(R, T)                                                                         \
    KV(score_quad)(keys + t * side->row_stride, side->row_stride, side->padded_dim, q, R, T, fetch, \
                    scores + row * KV_TILE + t, dtype);
#endif
        for (; t + FLOAT_TOKENS <= count; t += FLOAT_TOKENS) {
            const char *fetch = kv_prefetch_from(ahead, (start + t) * KV(row_bytes)(side, dtype));
            KV_EACH_ROWS(rows, KV_QUAD_SCORES, FLOAT_TOKENS)
        }
        for (; t < count; t++) {
            const char *fetch = kv_prefetch_from(ahead, (start + t) * KV(row_bytes)(side, dtype));
            KV_EACH_ROWS(rows, KV_QUAD_SCORES, 1)
        }
    }
}

/* Adds `count` rows of one block, from token `start` of the tile on. */
static inline __attribute__((always_inline)) void KV(accumulate_floating)(
    const kv_side *side, const float *weights, int num_rows, const char *values, int count, int start,
    const kv_ahead *ahead, const float *rescale, float *acc, const int dtype)
{
    const int itemsize = dtype == KV_FLOAT32 ? 4 : 2;
    for (int row = 0; row < num_rows; row += KV_QUAD) {
        const int rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
        int i = 0;
#define KV_QUAD_VALUES(R, V)                                                                       \
    KV(value_quad)(values + i * itemsize, side->row_stride, count, weights + row * KV_TILE, R, V, \
                    fetch, rescale + row, acc + row * side->padded_dim + i, side->padded_dim, dtype);
        for (; i + FLOAT_VECTORS * W <= side->padded_dim; i += FLOAT_VECTORS * W) {
            const char *fetch = kv_prefetch_from(ahead, start * KV(row_bytes)(side, dtype) + (ptrdiff_t)count * i * itemsize);
            KV_EACH_ROWS(rows, KV_QUAD_VALUES, FLOAT_VECTORS)
        }
        for (; i < side->padded_dim; i += W) {
            const char *fetch = kv_prefetch_from(ahead, start * KV(row_bytes)(side, dtype) + (ptrdiff_t)count * i * itemsize);
            KV_EACH_ROWS(rows, KV_QUAD_VALUES, 1)
        }
    }
}

/* Adds the sums of a tile's values to those of the tiles before, times `rescale`. Thousands of equal tokens are rounded alike, so that
   errors add up: what an addition leaves out is in `rest`, and goes into the next one (Kahan 1965, with the error of Knuth's 2Sum). */
static void KV(add_sums)(const float *sums, const float *rescale, int num_rows, ptrdiff_t n, float *acc, float *rest)
{
    for (int row = 0; row < num_rows; row++)
        for (ptrdiff_t i = row * n; i < (row + 1) * n; i += W) {
            const vf factor = vf_set1(rescale[row]), before = vf_mul(vf_load(acc + i), factor);
            const vf more = vf_fma(vf_load(rest + i), factor, vf_load(sums + i));
            const vf now = vf_add(before, more), added = vf_sub(now, before);
            vf_store(rest + i, vf_add(vf_sub(before, vf_sub(now, added)), vf_sub(more, added)));
            vf_store(acc + i, now);
        }
}

/* Block by block. The calls keep the loops above apart, as they are slower inside another loop. */
#define KV_FLOATING_KERNELS(name, dtype)                                                                   \
    static __attribute__((noinline)) void KV(score_rows_##name)(                                           \
        const kv_side *side, const kv_queries *queries, int num_rows, const char *keys, int count,         \
        int start, const kv_ahead *ahead, float *scores)                                                   \
    {                                                                                                      \
        KV(scores_floating)(side, queries, num_rows, keys, count, start, ahead, scores, dtype);            \
    }                                                                                                      \
    static void KV(scores_##name)(const kv_side *side, const kv_queries *queries, int num_rows,            \
                                  const kv_tile *tile, const kv_ahead *ahead, float *scores)               \
    {                                                                                                      \
        for (int start = 0, count; start < tile->count; start += count) {                                  \
            const char *keys = KV(rows_in_block)(side, tile, start, &count);                               \
            KV(score_rows_##name)(side, queries, num_rows, keys, count, start, ahead, scores + start);     \
        }                                                                                                  \
    }                                                                                                      \
    static __attribute__((noinline)) void KV(accumulate_rows_##name)(                                      \
        const kv_side *side, const float *weights, int num_rows, const char *values, int count,            \
        int start, const kv_ahead *ahead, const float *rescale, float *acc)                                \
    {                                                                                                      \
        KV(accumulate_floating)(side, weights, num_rows, values, count, start, ahead, rescale, acc, dtype);  \
    }                                                                                                      \
    static void KV(accumulate_##name)(const kv_side *side, kv_softmax *state, int num_rows,                \
                                      const kv_tile *tile, const kv_ahead *ahead, float *acc)              \
    {                                                                                                      \
        static const float none[KV_ROWS];                                                                  \
        const int apart = dtype == KV_FLOAT32 && state->rest; /* the sums of a tile begin at 0 */          \
        float *const sums = apart ? state->rest + KV_ROWS * KV_MAX_HEAD_DIM : acc;                         \
        for (int start = 0, count; start < tile->count; start += count) {                                  \
            const char *values = KV(rows_in_block)(side, tile, start, &count);                             \
            KV(accumulate_rows_##name)(side, state->weights + start, num_rows, values, count, start, ahead, \
                                       start ? kv_ones : apart ? none : state->rescale, sums);             \
        }                                                                                                  \
        if (apart) KV(add_sums)(sums, state->rescale, num_rows, side->padded_dim, acc, state->rest);       \
    }
KV_FLOATING_KERNELS(float32, KV_FLOAT32)
KV_FLOATING_KERNELS(float16, KV_FLOAT16)
KV_FLOATING_KERNELS(bfloat16, KV_BFLOAT16)

#undef KV_FLOATING_KERNELS
#undef KV_QUAD_SCORES
#undef KV_QUAD_VALUES
#undef KV_EACH_ROWS
