/* Scores of query rows as words, of one panel or two, and of the keys of a tile; see operands.inc.h. Scores that the rounding can have
   moved too far are computed again; see exact.inc.h. */

/* Prepares 16 rows of n floats as words, whose units have the softmax scale, and keeps them as they are. */
static void KV(prepare_word_lane)(const float *rows, int n, float norm, float factor, float *queries, int8_t *words, float *unit,
                                  float *square)
{
    KV(put_word_lane)(rows, n, n, norm, words, unit, square);
    vf_store(unit, vf_mul(vf_load(unit), vf_set1(factor)));
    vf_store(square, vf_mul(vf_load(square), vf_set1(factor * factor)));
    memcpy(queries, rows, KV_ROWS * (size_t)n * sizeof(float));
}

/* Prepares a panel of query rows, (KV_ROWS, padded_dim) floats. Where all keys are exact, no norm is limited. */
static void KV(prepare_words16)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows, float factor,
                              int exact, kv_panel *panel)
{
    const float norm = exact ? INFINITY : KV_WORD_NORM;
    panel->factor = factor;
    KV(prepare_word_lane)(rows, side->padded_dim, norm, factor, panel->queries, panel->words, panel->unit, panel->square);
    if (rope)
        KV(prepare_word_lane)(rope_rows, rope->padded_dim, norm, factor, panel->rope_queries, panel->rope_words, panel->rope_unit,
                              panel->rope_square);
}

/* Products of 8 keys with the rows of one panel or two, over `lines` pairs of elements from element d on. The sums stay in registers.
   Two panels load a key once (python -m kvfast bench --work prefill). */
static inline __attribute__((always_inline)) void KV(multiply_keys)(const KV(word_queries) *queries, const int panels, int d,
                                                                    const int8_t *keys, int lines, vi sums[2][8])
{
    vacc sum[2][8];
    const int8_t *a = queries[0].words + d * 32, *b = queries[panels - 1].words + d * 32;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sum[0][i] = sum[1][i] = (vacc)vi_set1(0);
    for (; lines > 0; lines--, a += 64, b += 64, keys += 64) {
        const vi one = _mm512_load_si512(a), other = _mm512_load_si512(b);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const vi key = vi_set1(kv_load32(keys + 4 * i));
            sum[0][i] = (vacc)_mm512_dpwssd_epi32((__m512i)sum[0][i], one, key);
            if (panels == 2) sum[1][i] = (vacc)_mm512_dpwssd_epi32((__m512i)sum[1][i], other, key);
        }
    }
    KV_NOTHING_SOONER;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sums[0][i] = (vi)sum[0][i], sums[1][i] = (vi)sum[1][i];
}

/* Scores of one panel or two and the tokens begin to end. Keys that were rounded are summed up in sets, exact keys in one. With `adds`,
   added to those that are there. */
static inline __attribute__((always_inline)) void KV(score_words)(const KV(word_queries) *queries, const int panels,
                                                                  const KV(word_keys) *keys, int begin, int end,
                                                                  KV(word_scores) *const *scores, int adds, const int exact)
{
    const int n = keys->dim, set = exact ? n : KV_WORD_SET;
    KV_ALIGNED float parts[2 * 8 * KV_ROWS];
    vf shift[2] = {vf_set1(0.0f), vf_set1(0.0f)};
    int block = -1;
    for (int t = begin; t < end; t += 8) {
        const int8_t *words = keys->words + t / KV_LANES * n * 32 + t % KV_LANES * 4;
        vi sums[2][8];
        if (keys->has_means && block != keys->block_of[t / KV_LANES]) {
            block = keys->block_of[t / KV_LANES];
#pragma GCC unroll 2
            for (int panel = 0; panel < panels; panel++) {
                shift[panel] = KV(multiply_mean)(keys->means + block * KV_MAX_HEAD_DIM, queries + panel, n);
                vf_store(scores[panel]->shifts + block * KV_ROWS, shift[panel]);
            }
        }
        int d = 0;
        for (; d + set < n; d += set) {
            KV(multiply_keys)(queries, panels, d, words + d * 32, set / 2, sums);
#pragma GCC unroll 2
            for (int panel = 0; panel < panels; panel++)
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    float *part = parts + (panel * 8 + i) * KV_ROWS;
                    const vf sum = vi_to_float(sums[panel][i]);
                    vf_store(part, d ? vf_add(vf_load(part), sum) : sum);
                }
        }
        KV(multiply_keys)(queries, panels, d, words + d * 32, (n - d) / 2, sums);
#pragma GCC unroll 2
        for (int panel = 0; panel < panels; panel++) {
            vf most = vf_set1(-INFINITY);
            float *at = scores[panel]->weights + t * KV_ROWS;
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                vf sum = vi_to_float(sums[panel][i]);
                if (!exact && d) sum = vf_add(sum, vf_load(parts + (panel * 8 + i) * KV_ROWS));
                const vf before = adds ? vf_add(shift[panel], vf_load(at + i * KV_ROWS)) : shift[panel];
                const vf score = vf_fma(sum, vf_mul(queries[panel].unit, vf_set1(keys->units[t + i])), before);
                most = vf_max(most, score);
                vf_store(at + i * KV_ROWS, score);
            }
            vf_store(scores[panel]->most + t / 8 * KV_ROWS, most);
        }
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

/* The keys of a tile, and of latent rows their rotary part, or NULL. */
typedef struct {
    const KV(word_keys) *keys, *rope;
    kv_room *room;
} KV(word_tile);

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

/* Those of 16 tokens that have a score of at least `least` for some row. */
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

enum { MOST_PLACES = 5 }; /* of a token; where more rows need its score, all 16 take less time */

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
    const vi rows = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    KV(exact_scores) *const exact = KV_IN(tile->room->again, KV(exact_scores));
    exact->keys = keys, exact->rope = rope, exact->queries = queries, exact->rope_queries = rope_queries, exact->scores = scores;
    exact->count = 0;
    unsigned lanes = 0;
    for (int part = 0; part < KV_MATRIX_TILE / 64; part++)
        for (uint64_t left = found[part]; left; left &= left - 1) {
            const int t = part * 64 + __builtin_ctzll(left);
            error = KV(squared_error)(unit, square, keys->units[t], keys->squares[t]);
            if (rope) error = vf_add(error, KV(squared_error)(rope_unit, rope_square, rope->units[t], rope->squares[t]));
            const vf allowed = vf_mul(KV(least_errors)(vf_load(scores->weights + t * KV_ROWS), most), vf_set1(1.0f / 0.29f));
            const __mmask16 again = _mm512_cmp_ps_mask(error, limit, _CMP_NLE_UQ)
                                    & _mm512_cmp_ps_mask(error, vf_mul(allowed, allowed), _CMP_NLE_UQ);
            const int count = __builtin_popcount(again);
            if (count > MOST_PLACES) KV(score_token)(exact, (unsigned)t, again);
            else {
                const vi places = vi_add(rows, vi_set1(t * KV_ROWS));
                _mm512_storeu_si512(exact->places + exact->count, _mm512_maskz_compress_epi32(again, places));
                exact->count += count;
            }
            lanes |= (again != 0u) << t / KV_LANES;
        }
    KV(score_places)(exact);
    for (; lanes; lanes &= lanes - 1) KV(find_most_scores)(scores, __builtin_ctz(lanes) * KV_LANES);
}

/* Scores of one panel or two, which may see fewer tokens than begin to end. */
static void KV(score_tile)(const KV(word_tile) *tile, const kv_panel *panels, int count, int begin, int end,
                           KV(word_scores) *const *scores)
{
    KV(word_queries) queries[2], rope[2];
    for (int i = 0; i < 2; i++) {
        const kv_panel *panel = panels + (i < count ? i : 0);
        queries[i] = (KV(word_queries)){panel->queries, panel->words, vf_load(panel->unit), panel->factor};
        rope[i] = (KV(word_queries)){panel->rope_queries, panel->rope_words, vf_load(panel->rope_unit), panel->factor};
    }
    KV(score_keys)(queries, count, tile->keys, begin, end, scores, 0);
    if (tile->rope) KV(score_keys)(rope, count, tile->rope, begin, end, scores, 1);
    for (int i = 0; i < count; i++) KV(refine_scores)(tile, panels + i, queries + i, rope + i, begin, end, scores[i]);
}
