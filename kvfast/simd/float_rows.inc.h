/* Attention of up to four rows of queries on float32 rows of 8 vectors, in the order of memory, for processors whose own prefetchers
   are worth it; tuning.py knows them. The panels of floating.inc.h read four rows of keys in turn, and a half of all rows of values
   before the other. Here a pass over four tokens, 2 KB, reads whole rows, keys by twos, for two rows of queries: 16 registers hold
   these, or their outputs. The next pass finds the tokens in the first level. Bits are those of panels, as each sum has the same order.

   They are faster than panels from memory, and slower from the second level or with more rows of queries. Longer runs of tokens
   compute faster, and yet read slower. A pass fetches its lines one by one between products for the same reason.
   python -m kvfast tune sets where they are used, bench/bench_attend.py the length of a run. */

enum { KV_RUN = 4, KV_RUN_VECTORS = 8 }; /* tokens of a pass, and vectors of a row */

static inline int KV(fits_runs)(const kv_side *side, int num_rows)
{
    return side->padded_dim == KV_RUN_VECTORS * W && num_rows <= 4;
}

/* As KV_FOR4, for all vectors of a row. */
#define KV_EACH_VECTOR(i, ...)              \
    do {                                    \
        KV_FOR4(i, 4, __VA_ARGS__);         \
        { enum { i = 4 }; { __VA_ARGS__ } } \
        { enum { i = 5 }; { __VA_ARGS__ } } \
        { enum { i = 6 }; { __VA_ARGS__ } } \
        { enum { i = 7 }; { __VA_ARGS__ } } \
    } while (0)

/* Prefetches the lines that are due at vector i of `tokens` tokens, of `lines` for each. */
#define KV_FETCH_AT(i, tokens)                        \
    if (i % (KV_RUN_VECTORS / lines) == 0) {          \
        kv_prefetch_lines(ahead, tokens, 2);          \
        ahead += tokens * 64;                         \
    }

/* Scores of one or two rows of queries and `count` rows of keys. */
static inline __attribute__((always_inline)) void KV(score_run)(
    const char *keys, ptrdiff_t stride, int count, const float *q, const int rows, const char *ahead, const int lines, float *scores)
{
    vf query[KV_PANEL][KV_RUN_VECTORS]; /* of `rows`, but KV_FOR4 names four */
    KV_EACH_VECTOR(i, KV_FOR4(r, rows, query[r][i] = vf_load(q + (r * KV_RUN_VECTORS + i) * W);););
    for (int t = 0; t < count; t += 2) {
        const int two = t + 1 < count;
        const char *next = two ? keys + stride : keys;
        vf first[KV_PANEL], second[KV_PANEL];
        float sums[4];
        KV_FOR4(r, 2, first[r] = second[r] = vf_set1(0.0f););
        KV_EACH_VECTOR(i,
            KV_FETCH_AT(i, 2)
            const vf a = vf_load((const float *)keys + i * W), b = vf_load((const float *)next + i * W);
            KV_FOR4(r, rows,
                first[r] = vf_fma(query[r][i], a, first[r]);
                second[r] = vf_fma(query[r][i], b, second[r]);););
        KV(vf_sum4)(first[0], second[0], first[1], second[1], sums);
        for (int r = 0; r < rows; r++) memcpy(scores + r * KV_TILE + t, sums + 2 * r, two ? 8 : 4);
        keys += 2 * stride;
    }
}

/* Adds `count` rows of values to one or two rows of outputs. */
static inline __attribute__((always_inline)) void KV(value_run)(
    const char *values, ptrdiff_t stride, int count, const float *weights, const int rows, const char *ahead, const int lines,
    const float *rescale, float *acc)
{
    vf sum[KV_PANEL][KV_RUN_VECTORS];
    KV_EACH_VECTOR(v, KV_FOR4(r, rows, sum[r][v] = vf_mul(vf_load(acc + (r * KV_RUN_VECTORS + v) * W), vf_set1(rescale[r]));););
    for (int t = 0; t < count; t++) {
        vf weight[KV_PANEL], value[KV_RUN_VECTORS];
        KV_FOR4(r, rows, weight[r] = vf_set1(weights[r * KV_TILE + t]););
        KV_EACH_VECTOR(v,
            KV_FETCH_AT(v, 1)
            value[v] = vf_load((const float *)values + v * W););
        KV_FOR4(r, rows, KV_EACH_VECTOR(v, sum[r][v] = vf_fma(weight[r], value[v], sum[r][v]);););
        values += stride;
    }
    KV_EACH_VECTOR(v, KV_FOR4(r, rows, vf_store(acc + (r * KV_RUN_VECTORS + v) * W, sum[r][v]);););
}

/* Calls pass(rows, lines) for each pass over each run: `run` is its first token's row, token `t` of `count`, of `here` in the run, and
   `row` the first row of the queries. Two passes fetch a half each of what the run fetches. */
#define KV_EACH_PASS(rows_at, pass)                                                                              \
    for (int t = 0; t < count; t += KV_RUN) {                                                                    \
        const int here = count - t < KV_RUN ? count - t : KV_RUN;                                                \
        const char *run = rows_at + t * side->row_stride;                                                        \
        const char *fetch = kv_prefetch_from(ahead, (ptrdiff_t)(start + t) * KV_RUN_VECTORS * 64);               \
        for (int row = 0; row < num_rows; row += 2, fetch += here * KV_RUN_VECTORS / 2 * 64) {                   \
            if (num_rows == 1) { pass(1, KV_RUN_VECTORS) }                                                       \
            else if (num_rows == 2) { pass(2, KV_RUN_VECTORS) }                                                  \
            else if (row + 1 < num_rows) { pass(2, KV_RUN_VECTORS / 2) }                                         \
            else { pass(1, KV_RUN_VECTORS / 2) }                                                                 \
        }                                                                                                        \
    }

/* As score_rows_float32 and accumulate_rows_float32. */
static __attribute__((noinline)) void KV(score_runs)(
    const kv_side *side, const kv_queries *queries, int num_rows, const char *keys, int count, int start, const kv_ahead *ahead,
    float *scores)
{
#define KV_SCORE_PASS(R, LINES)                                                                                  \
    KV(score_run)(run, side->row_stride, here, queries->values + row * side->padded_dim, R, fetch, LINES, scores + row * KV_TILE + t);
    KV_EACH_PASS(keys, KV_SCORE_PASS)
#undef KV_SCORE_PASS
}

static __attribute__((noinline)) void KV(accumulate_runs)(
    const kv_side *side, const float *weights, int num_rows, const char *values, int count, int start, const kv_ahead *ahead,
    const float *rescale, float *acc)
{
#define KV_VALUE_PASS(R, LINES)                                                                                  \
    KV(value_run)(run, side->row_stride, here, weights + row * KV_TILE + t, R, fetch, LINES, (t ? kv_ones : rescale) + row, \
                  acc + row * side->padded_dim);
    KV_EACH_PASS(values, KV_VALUE_PASS)
#undef KV_VALUE_PASS
}

#undef KV_EACH_PASS
#undef KV_EACH_VECTOR
#undef KV_FETCH_AT
