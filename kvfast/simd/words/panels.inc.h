/* Attention of many query rows with words; see operands.inc.h. Panels of 16 query rows read the keys and values of
   KV_MATRIX_TILE tokens, which become words once for all of them. The softmax is corrected once for these tokens. */

/* Prefetches one part in `parts` of each block of a tile. */
static inline void KV(prefetch_blocks)(const kv_side *side, const kv_tile *tile, int part, int parts)
{
    const ptrdiff_t begin = side->bytes * part / parts / 64 * 64, end = side->bytes * (part + 1) / parts;
    for (int token = -tile->first, i = 0; token < tile->count; token += side->block_size, i++)
        for (ptrdiff_t at = begin; at < end; at += 64) __builtin_prefetch(tile->base + tile->at[i] + at, 0, 2);
}

/* The tiles that are read after these tokens. */
typedef struct {
    const kv_side *k, *v;
    const kv_tile *keys, *values;
    int part, parts;
} KV(following);

/* Prefetches one part of them. A processor can wait for only so many lines at once, and the lines that it needs now would queue
   behind the others. */
static inline void KV(prefetch_part)(KV(following) *next)
{
    KV(prefetch_blocks)(next->k, next->keys, next->part, next->parts);
    KV(prefetch_blocks)(next->v, next->values, next->part, next->parts);
    next->part++;
}

enum { PREFETCHES = 3 }; /* parts that a panel prefetches */

/* Finds the tokens of a tile that a row of the panel sees, from and to a multiple of `whole`; returns 0 if there are none. */
static inline int KV(find_seen)(const kv_panel *panel, int whole, int *begin, int *end)
{
    int first = KV_MATRIX_TILE, stop = 0;
    for (int r = 0; r < panel->rows; r++)
        if (panel->start[r] < panel->stop[r]) {
            first = panel->start[r] < first ? panel->start[r] : first;
            stop = panel->stop[r] > stop ? panel->stop[r] : stop;
        }
    *begin = first / whole * whole;
    *end = (stop + whole - 1) / whole * whole;
    return first < stop;
}

/* Prepares 16 rows of n floats: as they are, (n, 16 rows), and as words, whose units have the softmax scale. */
static void KV(prepare_word_lane)(const float *rows, int n, float norm, float factor, float *lanes, int8_t *words, float *unit,
                                  float *square)
{
    KV_ALIGNED float lines[KV_ROWS * KV_LANES];
    KV(put_word_lane)(rows, n, n, norm, words, unit, square);
    vf_store(unit, vf_mul(vf_load(unit), vf_set1(factor)));
    vf_store(square, vf_mul(vf_load(square), vf_set1(factor * factor)));
    for (int i = 0; i < n; i += KV_LANES) {
        for (int r = 0; r < KV_ROWS; r++) vf_store(lines + r * KV_LANES, vf_load(rows + r * n + i));
        KV(transpose_lines)((const int8_t *)lines, (int8_t *)(lanes + i * KV_ROWS));
    }
}

/* Prepares a panel of query rows, (KV_ROWS, padded_dim) floats. Where all keys are exact, no norm is limited. */
static void KV(prepare_words)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows, float factor,
                              int exact, kv_panel *panel)
{
    const float norm = exact ? INFINITY : KV_WORD_NORM;
    panel->factor = factor;
    KV(prepare_word_lane)(rows, side->padded_dim, norm, factor, panel->queries, panel->halves, panel->unit, panel->square);
    if (rope)
        KV(prepare_word_lane)(rope_rows, rope->padded_dim, norm, factor, panel->rope_queries, panel->rope_halves, panel->rope_unit,
                              panel->rope_square);
}

/* 16 query rows: as they are, (dim, 16), and as words with their units. */
typedef struct {
    const float *rows;
    const int8_t *words;
    vf unit;
    float factor;
} KV(word_queries);

/* The product of floats that are `stride` floats apart with each of n elements of the queries, times the softmax scale. */
static inline __attribute__((always_inline)) vf KV(multiply_row)(const float *row, const int stride, const KV(word_queries) *queries,
                                                                 int n)
{
    vf sum[4] = {vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f)};
    for (int i = 0; i < n; i += 4, row += 4 * stride)
        KV_FOR4(j, 4, sum[j] = vf_fma(vf_load(queries->rows + (i + j) * KV_ROWS), vf_set1(row[j * stride]), sum[j]););
    return vf_mul(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])), vf_set1(queries->factor));
}

/* The product of a key with each of 16 query rows. */
static __attribute__((noinline)) vf KV(multiply_key)(const KV(word_keys) *keys, int token, const KV(word_queries) *queries,
                                                     const KV(word_scores) *scores)
{
    KV_ALIGNED float row[KV_MAX_HEAD_DIM];
    const int n = keys->dim, lane = token / KV_LANES, block = keys->block_of[lane];
    if (keys->family == KV_FLOAT_ROWS) {
#define KV_LOAD(dtype) for (int i = 0; i < n; i += W) vf_store(row + i, KV(load_element)(keys->rows[token], i, dtype))
        KV_BY_DTYPE(keys->dtype, KV_LOAD);
#undef KV_LOAD
        return KV(multiply_row)(row, 1, queries, n);
    }
    vf product;
    float unit;
    if (keys->has_channels) {
        unit = keys->block_units[block];
        product = KV(multiply_row)(keys->deviations + lane * n * KV_LANES + token % KV_LANES, KV_LANES, queries, n);
    } else {
        unit = keys->units[token];
        KV(load_word_row)(keys, token, row);
        product = KV(multiply_row)(row, 1, queries, n);
    }
    const vf shift = keys->has_means ? vf_load(scores->shifts + block * KV_ROWS) : vf_set1(0.0f);
    return vf_fma(product, vf_set1(unit), shift);
}

/* Products of `lanes` keys with the rows of one panel or two, from element d on: over the even and the odd lines in a sum of their own
   if `sets` is 2. Panels x sets x lanes are at most 16 sums, which stay in registers. Two panels load a key once: 0.96 of the time of a
   prompt on an EPYC Zen 5, where two loads go with two products. */
static inline __attribute__((always_inline)) void KV(multiply_keys)(const KV(word_queries) *queries, const int panels, int d,
                                                                    const int8_t *keys, int lines, const int lanes, const int sets,
                                                                    vi sums[2][2][8])
{
    vacc sum[2][2][8];
    const int8_t *a = queries[0].words + d * 32, *b = queries[panels - 1].words + d * 32;
#pragma GCC unroll 8
    for (int i = 0; i < lanes; i++) sum[0][0][i] = sum[0][1][i] = sum[1][0][i] = sum[1][1][i] = (vacc)vi_set1(0);
    for (; lines > 0; lines -= sets)
#pragma GCC unroll 2
        for (int set = 0; set < sets; set++, a += 64, b += 64, keys += 64) {
            const vi one = _mm512_load_si512(a), other = _mm512_load_si512(b);
#pragma GCC unroll 8
            for (int i = 0; i < lanes; i++) {
                const vi key = vi_set1(kv_load32(keys + 4 * i));
                sum[set][0][i] = (vacc)_mm512_dpwssd_epi32((__m512i)sum[set][0][i], one, key);
                if (panels == 2) sum[set][1][i] = (vacc)_mm512_dpwssd_epi32((__m512i)sum[set][1][i], other, key);
            }
        }
#pragma GCC unroll 8
    for (int i = 0; i < lanes; i++)
#pragma GCC unroll 2
        for (int set = 0; set < sets; set++)
#pragma GCC unroll 2
            for (int panel = 0; panel < panels; panel++) sums[set][panel][i] = (vi)sum[set][panel][i];
}

/* Scores of one panel or two and the tokens begin to end. With `adds`, added to those that are there. `exact` keys are summed up in one
   set. */
static inline __attribute__((always_inline)) void KV(score_words)(const KV(word_queries) *queries, const int panels,
                                                                  const KV(word_keys) *keys, int begin, int end,
                                                                  KV(word_scores) *const *scores, int adds, const int exact)
{
    const int n = keys->dim, lanes = panels == 2 && !exact ? 4 : 8;
    vf shift[2] = {vf_set1(0.0f), vf_set1(0.0f)};
    int block = -1;
    for (int t = begin; t < end; t += 8) {
        vf most[2] = {vf_set1(-INFINITY), vf_set1(-INFINITY)};
        if (keys->has_means && block != keys->block_of[t / KV_LANES]) {
            block = keys->block_of[t / KV_LANES];
#pragma GCC unroll 2
            for (int panel = 0; panel < panels; panel++) {
                shift[panel] = KV(multiply_row)(keys->means + block * KV_MAX_HEAD_DIM, 1, queries + panel, n);
                vf_store(scores[panel]->shifts + block * KV_ROWS, shift[panel]);
            }
        }
        for (int token = t; token < t + 8; token += lanes) {
            const int8_t *words = keys->words + token / KV_LANES * n * 32 + token % KV_LANES * 4;
            vf total[2][8];
            vi sums[2][2][8];
            if (exact) {
                KV(multiply_keys)(queries, panels, 0, words, n / 2, lanes, 1, sums);
#pragma GCC unroll 8
                for (int i = 0; i < lanes; i++)
#pragma GCC unroll 2
                    for (int panel = 0; panel < panels; panel++) total[panel][i] = vi_to_float(sums[0][panel][i]);
            } else {
#pragma GCC unroll 8
                for (int i = 0; i < lanes; i++) total[0][i] = total[1][i] = vf_set1(0.0f);
                for (int d = 0; d < n; d += 64) {
                    KV(multiply_keys)(queries, panels, d, words + d * 32, (n - d < 64 ? n - d : 64) / 2, lanes, 2, sums);
#pragma GCC unroll 8
                    for (int i = 0; i < lanes; i++)
#pragma GCC unroll 2
                        for (int panel = 0; panel < panels; panel++) {
                            const vf sum = vf_add(vi_to_float(sums[0][panel][i]), vi_to_float(sums[1][panel][i]));
                            total[panel][i] = vf_add(total[panel][i], sum);
                        }
                }
            }
#pragma GCC unroll 2
            for (int panel = 0; panel < panels; panel++) {
#pragma GCC unroll 8
                for (int i = 0; i < lanes; i++) {
                    float *at = scores[panel]->weights + (token + i) * KV_ROWS;
                    const vf before = adds ? vf_add(shift[panel], vf_load(at)) : shift[panel];
                    const vf score = vf_fma(total[panel][i], vf_mul(queries[panel].unit, vf_set1(keys->units[token + i])), before);
                    most[panel] = vf_max(most[panel], score);
                    vf_store(at, score);
                }
            }
        }
#pragma GCC unroll 2
        for (int panel = 0; panel < panels; panel++) vf_store(scores[panel]->most + t / 8 * KV_ROWS, most[panel]);
    }
}

static void KV(score_keys)(const KV(word_queries) *queries, int panels, const KV(word_keys) *keys, int begin, int end,
                           KV(word_scores) *const *scores, int adds)
{
    if (keys->exact && panels == 2) KV(score_words)(queries, 2, keys, begin, end, scores, adds, 1);
    else if (keys->exact) KV(score_words)(queries, 1, keys, begin, end, scores, adds, 1);
    else if (panels == 2) KV(score_words)(queries, 2, keys, begin, end, scores, adds, 0);
    else KV(score_words)(queries, 1, keys, begin, end, scores, adds, 0);
}

/* As add_words for two groups of tokens from `group` on, two lanes of values and 4 rows from `row` on. The panel's sums are loaded and
   stored for both at once: 0.93 of the time of a prompt on an EPYC Zen 5. All four groups at once, for 2 rows, take 1.2 of it. */
static inline void KV(add_two_groups)(const int8_t *values, const KV(word_weights) *w, int group, int row, const float *rescale,
                                      float *acc)
{
    vacc sums[2][2][4]; /* [groups][lanes][rows] */
    KV_FOR4(r, 4, sums[0][0][r] = sums[0][1][r] = sums[1][0][r] = sums[1][1][r] = (vacc)vi_set1(0););
    const int32_t *words = w->words + group * (KV_WORD_GROUP / 2 * KV_ROWS) + row;
    values += group * KV_WORD_GROUP * 32;
    for (int line = 0; line < KV_WORD_GROUP / 2; line++, values += 64, words += KV_ROWS) {
#pragma GCC unroll 2
        for (int g = 0; g < 2; g++) {
            const int8_t *at = values + g * KV_WORD_GROUP * 32;
            const vi low = _mm512_load_si512(at), high = _mm512_load_si512(at + VALUE_STRIDE);
            KV_FOR4(r, 4,
                const vi weight = vi_set1(words[g * (KV_WORD_GROUP / 2 * KV_ROWS) + r]);
                sums[g][0][r] = (vacc)_mm512_dpwssd_epi32((__m512i)sums[g][0][r], low, weight);
                sums[g][1][r] = (vacc)_mm512_dpwssd_epi32((__m512i)sums[g][1][r], high, weight););
        }
    }
#pragma GCC unroll 2
    for (int lane = 0; lane < 2; lane++)
        KV_FOR4(r, 4,
            float *at = acc + (lane * KV_ROWS + row + r) * KV_LANES;
            vf sum = vf_load(at);
            if (rescale) sum = vf_mul(sum, vf_set1(rescale[row + r]));
            sum = vf_fma(vi_to_float((vi)sums[0][lane][r]), vf_set1(w->unit[group][row + r]), sum);
            vf_store(at, vf_fma(vi_to_float((vi)sums[1][lane][r]), vf_set1(w->unit[group + 1][row + r]), sum)););
}

/* The same for all tokens from `begin` on under one unit, four lanes of values and 4 rows. */
static inline void KV(add_exact)(const int8_t *values, const KV(word_weights) *w, int begin, int end, int row, const float *rescale,
                                 float *acc)
{
    vacc sums[4][4]; /* [lanes][rows] */
    KV_FOR4(lane, 4, KV_FOR4(r, 4, sums[lane][r] = (vacc)vi_set1(0);););
    const int32_t *words = w->words + begin * (KV_ROWS / 2) + row;
    values += begin * 32;
    for (int t = begin; t < end; t += 2, values += 64, words += KV_ROWS) {
        vi weight[4];
        KV_FOR4(r, 4, weight[r] = vi_set1(words[r]););
        KV_FOR4(lane, 4,
            const vi line = _mm512_load_si512(values + lane * VALUE_STRIDE);
            KV_FOR4(r, 4, sums[lane][r] = (vacc)_mm512_dpwssd_epi32((__m512i)sums[lane][r], line, weight[r]);););
    }
    KV_FOR4(lane, 4, KV_FOR4(r, 4,
        float *at = acc + (lane * KV_ROWS + row + r) * KV_LANES;
        vf sum = vf_load(at);
        if (rescale) sum = vf_mul(sum, vf_set1(rescale[row + r]));
        vf_store(at, vf_fma(vi_to_float((vi)sums[lane][r]), vf_set1(w->unit[0][row + r]), sum));););
}

/* Adds weights times values to the panel's sums, and the sums before times `rescale`, or as they are if it is NULL. */
static void KV(add_words)(const kv_operands *operands, kv_panel *panel, int begin, int end, const KV(word_weights) *w,
                          const float *rescale)
{
    const int dim = operands->value_dim, group = operands->group, pair = 2 * KV_WORD_GROUP;
    if (operands->exact && dim % (4 * KV_LANES) == 0) {
        for (int d = 0; d < dim; d += 4 * KV_LANES)
            for (int row = 0; row < KV_ROWS; row += 4)
                KV(add_exact)(operands->values + d / KV_LANES * VALUE_STRIDE, w, begin, end, row, rescale, panel->acc + d * KV_ROWS);
        return;
    }
    for (int t = begin, stop; t < end; t = stop, rescale = NULL) {
        if (!operands->exact && t % pair == 0 && t + pair <= end && dim % (2 * KV_LANES) == 0) {
            stop = t + pair;
            for (int d = 0; d < dim; d += 2 * KV_LANES)
                for (int row = 0; row < KV_ROWS; row += 4)
                    KV(add_two_groups)(operands->values + d / KV_LANES * VALUE_STRIDE, w, t / KV_WORD_GROUP, row, rescale,
                                       panel->acc + d * KV_ROWS);
            continue;
        }
        stop = (t / group + 1) * group < end ? (t / group + 1) * group : end;
        const float *unit = w->unit[t / group];
        for (int d = 0; d < dim; d += KV_LANES) {
            float *acc = panel->acc + d * KV_ROWS;
            vi sums[2][16];
            KV(multiply_words)(operands->values + d / KV_LANES * VALUE_STRIDE + t * 32, w->words + t * (KV_ROWS / 2), (stop - t) / 2,
                               KV_ROWS, 1, sums);
            if (rescale)
#pragma GCC unroll 16
                for (int r = 0; r < KV_ROWS; r++)
                    vf_store(acc + r * KV_LANES, vf_mul(vf_load(acc + r * KV_LANES), vf_set1(rescale[r])));
#pragma GCC unroll 16
            for (int r = 0; r < KV_ROWS; r++)
                vf_store(acc + r * KV_LANES, vf_fma(vi_to_float(sums[0][r]), vf_set1(unit[r]), vf_load(acc + r * KV_LANES)));
        }
    }
}

/* The keys of a tile, and of latent rows their rotary part, or NULL. */
typedef struct { const KV(word_keys) *keys, *rope; } KV(word_tile);

/* The squares of the standard errors of scores, over 0.29, that come from rounding a key and 16 queries. */
static inline vf KV(squared_error)(vf query_unit, vf query_square, float key_unit, float key_square)
{
    return vf_fma(vf_mul(query_unit, query_unit), vf_set1(key_square), vf_mul(query_square, vf_set1(key_unit * key_unit)));
}

/* The squared errors of 16 tokens' scores, as above, of the query whose unit and norm are largest. */
static inline vf KV(most_squared_errors)(vf query_unit, vf query_square, const KV(word_keys) *keys, int token)
{
    const vf unit = vf_load(keys->units + token), scale = vf_set1(vf_hmax(vf_mul(query_unit, query_unit)));
    return vf_fma(scale, vf_load(keys->squares + token), vf_mul(vf_set1(vf_hmax(query_square)), vf_mul(unit, unit)));
}

/* least_score of 16 rows, given the squares of their errors over 0.29. Without roots, which take long one after the other: the
   logarithm of a mantissa m is at most 2 m - m^2 / 3 - 1.6569, and 2^u - 1 at most the cubic below for u from 0 to 1 (a score is at
   most 0.03 too low). Beyond, every score counts. */
static inline vf KV(least_scores)(vf squares, vf most)
{
    const vf of_one = vf_set1(17.5019f / 32); /* log2(0.29 * 128 / KV_LEAST_ERROR) / 32 */
    const vf m = _mm512_getmant_ps(squares, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
    const vf log2 = vf_add(_mm512_getexp_ps(squares), vf_fma(vf_fma(m, vf_set1(-1.0f / 3), vf_set1(2.0f)), m, vf_set1(-1.6569f)));
    const vf u = vf_max(vf_set1(0.0f), vf_fma(log2, vf_set1(0.5f / 32), of_one));
    const vf root = vf_fma(vf_fma(u, vf_set1(0.07921f), vf_set1(0.22434f)), u, vf_set1(0.69646f));
    const vf margin = vf_fma(vf_abs(most), vf_set1(1e-5f), vf_set1(0.01f));
    const vf least = vf_sub(vf_sub(most, vf_mul(vf_mul(u, vf_set1(32.0f)), root)), margin);
    return _mm512_mask_mov_ps(least, _mm512_cmp_ps_mask(u, vf_set1(1.0f), _CMP_GT_OQ), vf_set1(-INFINITY));
}

/* Of 16 tokens, those with a score of at least `least` for some row. */
static inline __mmask16 KV(find_large_scores)(const KV(word_scores) *scores, int token, vf least)
{
    KV_ALIGNED float above[KV_LANES * KV_ROWS];
    const float *most = scores->most + token / 8 * KV_ROWS;
    if (!_mm512_cmp_ps_mask(vf_max(vf_load(most), vf_load(most + KV_ROWS)), least, _CMP_NLT_UQ)) return 0;
    for (int i = 0; i < KV_LANES; i++)
        vf_store(above + i * KV_ROWS, vf_sub(vf_load(scores->weights + (token + i) * KV_ROWS), least));
    return _mm512_cmp_ps_mask(KV(reduce_rows)(above, 1), vf_set1(0.0f), _CMP_NLT_UQ);
}

/* Finds the largest scores of 16 tokens. */
static inline void KV(find_most_scores)(KV(word_scores) *scores, int token)
{
    for (int eight = token; eight < token + KV_LANES; eight += 8) {
        vf most = vf_load(scores->weights + eight * KV_ROWS);
        for (int i = 1; i < 8; i++) most = vf_max(most, vf_load(scores->weights + (eight + i) * KV_ROWS));
        vf_store(scores->most + eight / 8 * KV_ROWS, most);
    }
}

/* Computes the scores that the rounding to words can have moved by more than least_errors in float32. */
static void KV(refine_scores)(const KV(word_tile) *tile, const kv_panel *panel, const KV(word_queries) *queries,
                              const KV(word_queries) *rope_queries, int begin, int end, KV(word_scores) *scores)
{
    const KV(word_keys) *keys = tile->keys, *rope = tile->rope;
    const vf limit = vf_set1(KV_LEAST_ERROR * KV_LEAST_ERROR / (0.29f * 0.29f)), unit = queries->unit;
    const vf square = keys->exact ? vf_set1(0.0f) : vf_load(panel->square), rope_unit = rope_queries->unit;
    const vf rope_square = rope && rope->exact ? vf_set1(0.0f) : vf_load(panel->rope_square);
    vf error = KV(squared_error)(unit, square, keys->most_unit, keys->most_square);
    if (rope) error = vf_add(error, KV(squared_error)(rope_unit, rope_square, rope->most_unit, rope->most_square));
    if (!_mm512_cmp_ps_mask(error, limit, _CMP_NLE_UQ)) return;
    const vf most = kv_bends(&panel->options) ? vf_set1(-INFINITY) : vf_load(panel->m);
    const vf least = KV(least_scores)(error, most);
    /* Nothing branches on a token before it is known which scores are computed again. */
    uint64_t found[KV_MATRIX_TILE / 64] = {0};
    for (int first = begin; first < end; first += KV_LANES) {
        error = KV(most_squared_errors)(unit, square, keys, first);
        if (rope) error = vf_add(error, KV(most_squared_errors)(rope_unit, rope_square, rope, first));
        const __mmask16 loud = _mm512_cmp_ps_mask(error, vf_mul(limit, vf_set1(0.999f)), _CMP_NLE_UQ);
        if (loud) found[first / 64] |= (uint64_t)(loud & KV(find_large_scores)(scores, first, least)) << first % 64;
    }
    int tokens[KV_MATRIX_TILE + 1], count = 0;
    __mmask16 rows[KV_MATRIX_TILE + 1];
    for (int part = 0; part < KV_MATRIX_TILE / 64; part++)
        for (uint64_t left = found[part]; left; left &= left - 1) {
            const int t = part * 64 + __builtin_ctzll(left);
            error = KV(squared_error)(unit, square, keys->units[t], keys->squares[t]);
            if (rope) error = vf_add(error, KV(squared_error)(rope_unit, rope_square, rope->units[t], rope->squares[t]));
            const vf allowed = vf_mul(KV(least_errors)(vf_load(scores->weights + t * KV_ROWS), most), vf_set1(1.0f / 0.29f));
            tokens[count] = t;
            rows[count] = _mm512_cmp_ps_mask(error, limit, _CMP_NLE_UQ)
                          & _mm512_cmp_ps_mask(error, vf_mul(allowed, allowed), _CMP_NLE_UQ);
            count += rows[count] != 0;
        }
    for (int i = 0; i < count; i++) {
        float *at = scores->weights + tokens[i] * KV_ROWS;
        vf score = KV(multiply_key)(keys, tokens[i], queries, scores);
        if (rope) score = vf_add(score, KV(multiply_key)(rope, tokens[i], rope_queries, scores));
        vf_store(at, _mm512_mask_mov_ps(vf_load(at), rows[i], score));
        if (i + 1 == count || tokens[i + 1] / KV_LANES != tokens[i] / KV_LANES)
            KV(find_most_scores)(scores, tokens[i] / KV_LANES * KV_LANES);
    }
}

/* Scores of one panel or two, which may see fewer tokens than begin to end. */
static void KV(score_tile)(const KV(word_tile) *tile, const kv_panel *panels, int count, int begin, int end,
                           KV(word_scores) *const *scores)
{
    KV(word_queries) queries[2], rope[2];
    for (int i = 0; i < count; i++) {
        const kv_panel *panel = panels + i;
        queries[i] = (KV(word_queries)){panel->queries, panel->halves, vf_load(panel->unit), panel->factor};
        rope[i] = (KV(word_queries)){panel->rope_queries, panel->rope_halves, vf_load(panel->rope_unit), panel->factor};
    }
    KV(score_keys)(queries, count, tile->keys, begin, end, scores, 0);
    if (tile->rope) KV(score_keys)(rope, count, tile->rope, begin, end, scores, 1);
    for (int i = 0; i < count; i++) KV(refine_scores)(tile, panels + i, queries + i, rope + i, begin, end, scores[i]);
}

/* The rows of a panel that see all tokens of the tile, and those that see some. */
static void KV(sort_rows)(const kv_panel *panel, __mmask16 *all, __mmask16 *some)
{
    const vi start = vi_load(panel->start), stop = vi_load(panel->stop);
    *all = _mm512_cmple_epi32_mask(start, vi_set1(0)) & _mm512_cmpge_epi32_mask(stop, vi_set1(KV_MATRIX_TILE));
    *some = _mm512_cmplt_epi32_mask(start, stop) & ~*all;
}

/* What a panel sees of a tile, and its weights. */
typedef struct {
    int begin, end;       /* tokens that some row sees, in whole lane tiles, or 0 and 0 */
    __mmask16 all, some;  /* the rows that see all of them, and others */
    KV(word_weights) w;
} KV(word_pass);

/* Scores of one panel or two. `tiles` are the keys for rows that see some of the tile, and for those that see all. */
static void KV(score_panels)(const KV(word_tile) tiles[2], const kv_panel *panels, int count, KV(word_pass) *passes)
{
    int mixed = 0, alike = 1;
    for (int i = 0; i < count; i++) {
        KV(word_pass) *pass = passes + i;
        if (!KV(find_seen)(panels + i, KV_LANES, &pass->begin, &pass->end)) pass->begin = pass->end = 0;
        KV(sort_rows)(panels + i, &pass->all, &pass->some);
        mixed |= pass->all && pass->some && (tiles[0].keys != tiles[1].keys || tiles[0].rope != tiles[1].rope);
        alike &= pass->begin < pass->end && !pass->all == !passes[0].all;
    }
    if (count == 2 && alike && !mixed) {
        KV(word_scores) *const scores[2] = {&passes[0].w.scores, &passes[1].w.scores};
        const int begin = passes[0].begin < passes[1].begin ? passes[0].begin : passes[1].begin;
        const int end = passes[0].end > passes[1].end ? passes[0].end : passes[1].end;
        KV(score_tile)(tiles + (passes[0].all != 0), panels, 2, begin, end, scores);
        return;
    }
    for (int i = 0; i < count; i++) {
        const KV(word_pass) *pass = passes + i;
        KV(word_scores) *scores = &passes[i].w.scores;
        if (pass->begin == pass->end) continue;
        KV(score_tile)(tiles + (pass->all != 0), panels + i, 1, pass->begin, pass->end, &scores);
        if (pass->all && pass->some && mixed) {
            KV(word_scores) others, *at = &others;
            KV(score_tile)(tiles, panels + i, 1, pass->begin, pass->end, &at);
            for (int t = pass->begin * KV_ROWS; t < pass->end * KV_ROWS; t += KV_ROWS)
                vf_store(scores->weights + t,
                         _mm512_mask_mov_ps(vf_load(scores->weights + t), pass->some, vf_load(others.weights + t)));
        }
    }
}

/* Loads one side of keys for both tiles: as they are and less their mean, if they are float rows. */
static inline __attribute__((always_inline)) void KV(load_sides)(
    const kv_side *side, const kv_tile *tile, const int *wanted, float *means, int8_t *words, ptrdiff_t words_bytes,
    kv_operands *operands, KV(word_keys) keys[2], const KV(word_keys) *loaded[2], const int codes)
{
    for (int i = 0; i < 2; i++) {
        KV(word_keys) *now = keys + i;
        loaded[i] = now;
        if (!wanted[i]) continue;
        now->family = side->family, now->dim = side->padded_dim, now->dtype = side->dtype;
        now->words = words + i * words_bytes, now->means = means + i * KV_MAX_HEAD_DIM;
        if (codes && side->family != KV_FLOAT_ROWS) {
            KV(load_key_codes)(side, tile, operands, now);
            loaded[0] = loaded[1] = now;
            return;
        }
        KV(load_key_words)(side, tile, i, operands, now);
    }
}

static inline __attribute__((always_inline)) void KV(attend_word_tile)(
    const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values, const kv_tile *next_keys,
    const kv_tile *next_values, float position, kv_operands *operands, kv_panel *panels, int num_panels, const int codes)
{
    const int has_rope = v->as_keys && v->padded_dim;
    const kv_side *from = v->as_keys ? k : v;
    KV(word_keys) k_words[2], rope_words[2];
    const KV(word_keys) *k_loaded[2], *rope_loaded[2] = {NULL, NULL};
    int wanted[2] = {0, 0};
    for (int i = 0; i < num_panels; i++) {
        __mmask16 all, some;
        KV(sort_rows)(panels + i, &all, &some);
        wanted[0] |= some, wanted[1] |= all;
    }
    /* Codes have the means of up to 8 blocks, but latent rows have none. */
    KV(load_sides)(k, keys, wanted, operands->means, operands->keys, KV_MATRIX_TILE * KV_MAX_HEAD_DIM * 2, operands, k_words, k_loaded,
                   codes);
    if (has_rope)
        KV(load_sides)(v, values, wanted, operands->means + 2 * KV_MAX_HEAD_DIM, operands->rope, KV_MATRIX_TILE * KV_MAX_ROPE_DIM * 2,
                       operands, rope_words, rope_loaded, codes);
    const KV(word_tile) tiles[2] = {{k_loaded[0], rope_loaded[0]}, {k_loaded[1], rope_loaded[1]}};
    operands->value_dim = from->padded_dim;
    if (codes && from->family != KV_FLOAT_ROWS) KV(load_value_codes)(from, v->as_keys ? keys : values, v->as_keys, operands);
    else KV(load_value_words)(from, v->as_keys ? keys : values, operands);
    KV(following) next = {k, v, next_keys, next_values, 0, num_panels * PREFETCHES};
    KV(word_pass) passes[2];
    for (int i = 0, count; i < num_panels; i += count) {
        count = num_panels - i < 2 ? 1 : 2;
        for (int j = 0; j < count; j++) KV(prefetch_part)(&next);
        KV(score_panels)(tiles, panels + i, count, passes);
        for (int j = 0; j < count; j++) {
            KV(word_pass) *pass = passes + j;
            KV(prefetch_part)(&next);
            if (pass->begin < pass->end) {
                KV(weigh_words)(panels + i + j, operands, pass->all, position, pass->begin, pass->end, &pass->w);
                KV(round_weights)(&pass->w, operands->group, pass->begin, pass->end);
            }
            KV(prefetch_part)(&next);
            if (pass->begin < pass->end)
                KV(add_words)(operands, panels + i + j, pass->begin, pass->end, &pass->w, pass->w.changed ? pass->w.rescale : NULL);
        }
    }
}

#define KV_ATTEND(name, codes)                                                                                           \
    static void KV(name)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,                 \
                         const kv_tile *next_keys, const kv_tile *next_values, float position, kv_operands *operands,    \
                         kv_panel *panels, int num_panels)                                                               \
    {                                                                                                                    \
        KV(attend_word_tile)(k, v, keys, values, next_keys, next_values, position, operands, panels, num_panels, codes); \
    }
KV_ATTEND(attend_words, 0)
KV_ATTEND(attend_word_codes, 1)
#undef KV_ATTEND
