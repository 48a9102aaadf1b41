/* Scores of query rows as words, of one panel or two, and of the keys of a tile; see operands.inc.h. Scores that the rounding can have
   moved too far are computed again: refine_rows, refine_codes. */

/* Prepares 16 rows of n floats as words that multiply float rows, and keeps them as they are. */
static void KV(prepare_word_lane)(const float *rows, int n, float factor, float *queries, int8_t *words, float *unit, float *square)
{
    memcpy(queries, rows, KV_ROWS * (size_t)n * sizeof(float));
    KV(put_word_lane)(rows, n, n, KV_WORD_NORM, words, unit, square);
    vf_store(unit, vf_mul(vf_load(unit), vf_set1(factor)));
    vf_store(square, vf_mul(vf_load(square), vf_set1(factor * factor)));
}

/* Writes two depths of 16 rows, integers, as a line of words. */
static inline void KV(put_word_pair)(vi a, vi b, int8_t *out)
{
    _mm512_store_si512(out, _mm512_mask_blend_epi16(0xAAAAAAAA, a, _mm512_slli_epi32(b, 16)));
}

/* A channel of 16 rows as it is multiplied, before it is rounded: of (n, 16) `columns`, times its scale if keys have them. */
static inline __attribute__((always_inline)) vf KV(load_column)(const float *columns, const float *channels, vf inverse, ptrdiff_t c)
{
    const vf x = vf_load(columns + c * KV_ROWS);
    return vf_mul(channels ? vf_mul(x, vf_set1(channels[c])) : x, inverse);
}

/* Rounds 16 rows of n floats to words. */
static inline __attribute__((always_inline)) void KV(round_columns)(const float *columns, const float *channels, vf inverse,
                                                                    ptrdiff_t n, int8_t *words)
{
#pragma GCC unroll 8
    for (ptrdiff_t c = 0; c < n; c += 2)
        KV(put_word_pair)(vf_round(KV(load_column)(columns, channels, inverse, c)),
                          vf_round(KV(load_column)(columns, channels, inverse, c + 1)), words + c * 32);
}

/* What the rounding of 16 rows leaves out, as leave_rounding and put_activations give it. */
static void KV(leave_words)(const float *columns, const float *channels, vf inverse, int n, int8_t *left)
{
    const vf most = vf_set1(2.0f * KV_MAX_ACTIVATION);
    for (int c = 0; c < n; c += 2, left += 64) {
        const vf a = KV(load_column)(columns, channels, inverse, c), b = KV(load_column)(columns, channels, inverse, c + 1);
        KV(put_word_pair)(vf_round(vf_mul(vf_sub(a, vi_to_float(vf_round(a))), most)),
                          vf_round(vf_mul(vf_sub(b, vi_to_float(vf_round(b))), most)), left);
    }
}

/* Prepares 16 rows of n floats as the integers of find_units and put_activations, which multiply codes; and as columns, (n, 16). */
static void KV(prepare_code_lane)(const float *rows, int n, float factor, int8_t *words, int8_t *left, float *unit, float *inverse,
                                  float *columns)
{
    KV_ALIGNED float square[KV_ROWS * KV_LANES];
    KV(find_units)(rows, n, KV_ROWS, factor, inverse, unit);
    const vf factors = vf_load(inverse);
    for (int c = 0; c < n; c += KV_LANES) {
        for (int r = 0; r < KV_ROWS; r++) vf_store(square + r * KV_LANES, vf_load(rows + r * n + c));
        KV(transpose_lines)((const int8_t *)square, (int8_t *)(columns + c * KV_ROWS));
    }
    KV(round_columns)(columns, NULL, factors, n, words);
    KV(leave_words)(columns, NULL, factors, n, left);
}

/* Prepares a panel of query rows, (KV_ROWS, padded_dim) floats. */
static void KV(prepare_words16)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows, float factor,
                                int mixed, kv_panel *panel)
{
    panel->factor = factor;
    if (side->family != KV_FLOAT_ROWS)
        KV(prepare_code_lane)(rows, side->padded_dim, factor, panel->parts, panel->left, panel->unit, panel->inverse,
                              panel->columns);
    if (mixed || side->family == KV_FLOAT_ROWS)
        KV(prepare_word_lane)(rows, side->padded_dim, factor, panel->queries, panel->words, panel->word_unit, panel->square);
    if (!rope) return;
    if (rope->family != KV_FLOAT_ROWS)
        KV(prepare_code_lane)(rope_rows, rope->padded_dim, factor, panel->rope_parts, panel->rope_left, panel->rope_unit,
                              panel->rope_inverse, panel->rope_columns);
    if (mixed || rope->family == KV_FLOAT_ROWS)
        KV(prepare_word_lane)(rope_rows, rope->padded_dim, factor, panel->rope_queries, panel->rope_words, panel->rope_word_unit,
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

/* Scores of one panel or two and the tokens begin to end. Float rows are summed up in sets, codes in one. */
static inline __attribute__((always_inline)) void KV(score_words)(const KV(word_queries) *queries, const int panels,
                                                                  const KV(word_keys) *keys, int begin, int end,
                                                                  KV(word_scores) *const *scores, const int of_codes)
{
    const int n = keys->dim, set = of_codes ? n : KV_WORD_SET;
    KV_ALIGNED float parts[2 * 8 * KV_ROWS];
    for (int t = begin; t < end; t += 8) {
        const int8_t *words = keys->words + t / KV_LANES * n * 32 + t % KV_LANES * 4;
        vi sums[2][8];
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
                if (!of_codes && d) sum = vf_add(sum, vf_load(parts + (panel * 8 + i) * KV_ROWS));
                const vf score = vf_fma(sum, vf_mul(queries[panel].unit, vf_set1(keys->units[t + i])), queries[panel].shift);
                most = vf_max(most, score);
                vf_store(at + i * KV_ROWS, score);
            }
            vf_store(scores[panel]->most + t / 8 * KV_ROWS, most);
        }
    }
}

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

/* Whether one of 16 tokens has a score of at least `least` for some row, */
static inline int KV(has_large_score)(const KV(word_scores) *scores, int token, vf least)
{
    const float *most = scores->most + token / 8 * KV_ROWS;
    return _mm512_cmp_ps_mask(vf_max(vf_load(most), vf_load(most + KV_ROWS)), least, _CMP_NLT_UQ) != 0;
}

/* and which of them. */
static inline __mmask16 KV(find_large_scores)(const KV(word_scores) *scores, int token, vf least)
{
    KV_ALIGNED float above[KV_LANES * KV_ROWS];
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

/* Computes the scores of float rows that the rounding to words can have moved by more than least_errors in float32. `most` are the
   largest scores so far. */
static void KV(refine_rows)(const KV(word_keys) *keys, const float *rows, vf unit, vf square, vf most, float factor, int begin, int end,
                            KV(word_scores) *scores, kv_room *room)
{
    const vf limit = vf_set1(KV_LEAST_ERROR * KV_LEAST_ERROR / (0.29f * 0.29f));
    vf error = KV(squared_error)(unit, square, keys->most_unit, keys->most_square);
    if (!_mm512_cmp_ps_mask(error, limit, _CMP_NLE_UQ)) return;
    const vf least = KV(least_scores)(error, most);
    /* Nothing branches on a token before it is known which scores are computed again. */
    uint64_t found[KV_MATRIX_TILE / 64] = {0};
    for (int first = begin; first < end; first += KV_LANES) {
        error = KV(most_squared_errors)(unit, square, keys, first);
        const __mmask16 loud = _mm512_cmp_ps_mask(error, vf_mul(limit, vf_set1(0.999f)), _CMP_NLE_UQ);
        if (loud && KV(has_large_score)(scores, first, least))
            found[first / 64] |= (uint64_t)(loud & KV(find_large_scores)(scores, first, least)) << first % 64;
    }
    const vi order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    KV(exact_scores) *const exact = KV_IN(room->again, KV(exact_scores));
    exact->keys = keys, exact->rows = rows, exact->factor = factor, exact->scores = scores->weights;
    exact->count = 0;
    unsigned lanes = 0;
    for (int part = 0; part < KV_MATRIX_TILE / 64; part++)
        for (uint64_t left = found[part]; left; left &= left - 1) {
            const int t = part * 64 + __builtin_ctzll(left);
            error = KV(squared_error)(unit, square, keys->units[t], keys->squares[t]);
            const vf allowed = vf_mul(KV(least_errors)(vf_load(scores->weights + t * KV_ROWS), most), vf_set1(1.0f / 0.29f));
            const __mmask16 again = _mm512_cmp_ps_mask(error, limit, _CMP_NLE_UQ)
                                    & _mm512_cmp_ps_mask(error, vf_mul(allowed, allowed), _CMP_NLE_UQ);
            const int count = __builtin_popcount(again);
            if (count > MOST_PLACES) KV(score_token)(exact, (unsigned)t, again);
            else {
                const vi places = vi_add(order, vi_set1(t * KV_ROWS));
                _mm512_storeu_si512(exact->places + exact->count, _mm512_maskz_compress_epi32(again, places));
                exact->count += count;
            }
            lanes |= (again != 0u) << t / KV_LANES;
        }
    KV(score_places)(exact);
    for (; lanes; lanes &= lanes - 1) KV(find_most_scores)(scores, __builtin_ctz(lanes) * KV_LANES);
}

/* A panel's rows as they multiply codes: with the scales of a block's channels, or NULL, and the shift of all scores. */
typedef struct {
    KV_ALIGNED int8_t words[KV_ROWS * KV_MAX_HEAD_DIM * 2];
    KV(word_queries) queries;
    const float *columns, *channels; /* (n, 16); (n,) or NULL */
    const int8_t *left;              /* the rounding errors of the columns, times no channels */
    vf inverse;
} KV(word_folded);

/* The same numbers as fold_statistics and put_activations, for 16 rows at once: a vector holds a channel of all rows. */
static void KV(fold_words)(const kv_panel *panel, const KV(word_keys) *keys, int block, KV(word_folded) *folded)
{
    const ptrdiff_t n = keys->dim;
    const float *means = keys->means + (ptrdiff_t)block * KV_MAX_HEAD_DIM;
    const float *channels = keys->channels ? keys->channels + (ptrdiff_t)block * KV_MAX_HEAD_DIM : NULL;
    vf sums[KV_LANES], peaks[2] = {vf_set1(0.0f), vf_set1(0.0f)};
#pragma GCC unroll 16
    for (int i = 0; i < KV_LANES; i++) sums[i] = vf_set1(0.0f);
    for (ptrdiff_t c = 0; c < n; c += KV_LANES)
#pragma GCC unroll 16
        for (int i = 0; i < KV_LANES; i++) {
            const vf x = vf_load(panel->columns + (c + i) * KV_ROWS);
            sums[i] = vf_fma(x, vf_set1(means[c + i]), sums[i]);
            if (channels) peaks[i % 2] = _mm512_range_ps(peaks[i % 2], vf_mul(x, vf_set1(channels[c + i])), 11); /* magnitudes */
        }
    folded->queries.shift = vf_mul(KV(join_lanes)(sums, KV_LANES), vf_set1(panel->factor));
    if (!channels) return;
    const vf peak = vf_max(peaks[0], peaks[1]);
    folded->channels = channels;
    folded->inverse = KV(inverse_of)(vf_set1(KV_MAX_ACTIVATION), peak);
    folded->queries.words = folded->words;
    folded->queries.unit = vf_mul(peak, vf_set1(panel->factor * (1.0f / KV_MAX_ACTIVATION)));
    KV(round_columns)(panel->columns, channels, folded->inverse, n, folded->words);
}

/* The same as refine of vectors, for the tokens begin to end, of one block if they have statistics. `most` are the largest scores
   before the tile; `whole` marks the rows that see all of it. */
static void KV(refine_codes)(const KV(word_keys) *keys, const KV(word_folded) *folded, vf most, __mmask16 whole, int begin, int end,
                             KV(word_scores) *scores, kv_room *room)
{
    typedef struct { KV_ALIGNED int8_t words[KV_ROWS * KV_MAX_HEAD_DIM * 2]; } rest;
    const int8_t *left = folded->channels ? NULL : folded->left;
    const int n = keys->dim;
    const vf unit = folded->queries.unit, errors = vf_mul(vf_abs(unit), vf_set1(keys->error));
    const float largest = vf_hmax(errors) * 1.001f;
    if (!(largest * keys->most_unit >= KV_LEAST_ERROR)) return;
    for (int t = 0; t < end && whole; t += 8) most = _mm512_mask_max_ps(most, whole, most, vf_load(scores->most + t / 8 * KV_ROWS));
    const vf over = vf_mul(errors, vf_set1(keys->most_unit * (1.001f / 0.29f))), least = KV(least_scores)(vf_mul(over, over), most);
    for (int first = begin; first < end; first += KV_LANES) {
        if (!KV(has_large_score)(scores, first, least)) continue;
        const vf error = vf_mul(vf_load(keys->units + first), vf_set1(largest));
        unsigned found = _mm512_cmp_ps_mask(error, vf_set1(KV_LEAST_ERROR), _CMP_GE_OQ);
        if (found) found &= KV(find_large_scores)(scores, first, least);
        int lanes[KV_LANES + 4], count = 0; /* the tokens that matter to some row, and these rows */
        __mmask16 rows[KV_LANES + 4];
        for (; found; found &= found - 1) { /* without a branch, which would be a wrong guess too often */
            const int lane = lanes[count] = __builtin_ctz(found);
            const vf size = vf_mul(vf_set1(keys->units[first + lane]), errors);
            const vf score = vf_load(scores->weights + (first + lane) * KV_ROWS);
            rows[count] = _mm512_cmp_ps_mask(vf_sub(size, KV(least_errors)(score, most)), vf_set1(0.0f), _CMP_GE_OQ);
            count += rows[count] != 0;
        }
        if (!count) continue;
        if (!left) {
            left = KV_IN(room->again, rest)->words;
            KV(leave_words)(folded->columns, folded->channels, folded->inverse, n, KV_IN(room->again, rest)->words);
        }
        KV_FOR4(i, 4, lanes[count + i] = 0; rows[count + i] = 0;);
        for (int at = 0; at < count; at += 4) {
            const int8_t *keys_of[4], *words = left;
            vacc sum[4];
            KV_FOR4(i, 4, keys_of[i] = keys->words + first * n * 2 + lanes[at + i] * 4; sum[i] = (vacc)vi_set1(0););
            for (int d = 0; d < n * 32; d += 64, words += 64)
                KV_FOR4(i, 4, sum[i] = (vacc)_mm512_dpwssd_epi32((__m512i)sum[i], _mm512_load_si512(words),
                                                                 vi_set1(kv_load32(keys_of[i] + d))););
            KV_FOR4(i, 4,
                float *const score = scores->weights + (first + lanes[at + i]) * KV_ROWS;
                const vf scale = vf_mul(vf_set1(keys->units[first + lanes[at + i]]), unit);
                const vf rest = vf_mul(vi_to_float((vi)sum[i]), scale);
                vf_store(score, _mm512_mask3_fmadd_ps(rest, vf_set1(0.5f / KV_MAX_ACTIVATION), vf_load(score), rows[at + i])););
        }
        KV(find_most_scores)(scores, first);
    }
}

/* The keys of a tile, and of latent rows their rotary part, or NULL. */
typedef struct {
    const KV(word_keys) *keys, *rope;
    int whole; /* tokens of a whole tile of codes */
    int latent;
    kv_room *room;
} KV(word_tile);

/* Whether scores of a panel's rows are sums of products alone, and not a part of them. */
static inline int KV(has_scores)(const KV(word_tile) *tile, const kv_panel *panel)
{
    return !tile->latent && !kv_bends(&panel->options);
}

/* The largest scores before a tile of a panel's rows, as least_errors needs them. */
static inline vf KV(most_so_far)(const KV(word_tile) *tile, const kv_panel *panel)
{
    return KV(has_scores)(tile, panel) ? vf_load(panel->m) : vf_set1(-INFINITY);
}

/* Scores of keys that are codes. Those with statistics are read block by block. */
static void KV(score_codes)(const KV(word_tile) *tile, const KV(word_keys) *keys, const kv_panel *panels, int count, int begin, int end,
                            KV(word_scores) *const *scores, KV(word_folded) *folded)
{
    const int is_rope = keys == tile->rope;
    for (int t = begin, stop; t < end; t = stop) {
        const int block = keys->block_of[t / KV_LANES];
        KV(word_queries) queries[2];
        for (stop = t + KV_LANES; stop < end && (!keys->has_means || keys->block_of[stop / KV_LANES] == block);) stop += KV_LANES;
        for (int i = 0; i < count; i++) {
            const kv_panel *panel = panels + i;
            folded[i].columns = is_rope ? panel->rope_columns : panel->columns;
            folded[i].left = is_rope ? panel->rope_left : panel->left;
            folded[i].channels = NULL;
            folded[i].inverse = vf_load(is_rope ? panel->rope_inverse : panel->inverse);
            folded[i].queries = (KV(word_queries)){is_rope ? panel->rope_parts : panel->parts,
                                                   vf_load(is_rope ? panel->rope_unit : panel->unit), vf_set1(0.0f)};
            if (keys->has_means) KV(fold_words)(panel, keys, block, folded + i);
            queries[i] = folded[i].queries;
        }
        if (count == 2) KV(score_words)(queries, 2, keys, t, stop, scores, 1);
        else KV(score_words)(queries, 1, keys, t, stop, scores, 1);
        if (!keys->channels && stop < end) continue; /* all tokens are refined alike */
        for (int i = 0; i < count; i++) {
            const vi seen = vi_sub(vi_load(panels[i].stop), vi_load(panels[i].start));
            const __mmask16 whole = KV(has_scores)(tile, panels + i) ? _mm512_cmpeq_epi32_mask(seen, vi_set1(tile->whole)) : 0;
            KV(refine_codes)(keys, folded + i, KV(most_so_far)(tile, panels + i), whole, keys->channels ? t : begin, stop, scores[i],
                             tile->room);
        }
    }
}

/* Scores of keys that are float rows. */
static void KV(score_rows)(const KV(word_tile) *tile, const KV(word_keys) *keys, const kv_panel *panels, int count, int begin,
                                 int end, KV(word_scores) *const *scores)
{
    const int is_rope = keys == tile->rope;
    KV(word_queries) queries[2];
    for (int i = 0; i < count; i++) {
        const float *rows = is_rope ? panels[i].rope_queries : panels[i].queries;
        queries[i] = (KV(word_queries)){is_rope ? panels[i].rope_words : panels[i].words,
                                        vf_load(is_rope ? panels[i].rope_word_unit : panels[i].word_unit), vf_set1(0.0f)};
        if (keys->has_means)
            queries[i].shift = vf_mul(KV(multiply_rows_exactly)((const char *)keys->means, KV_FLOAT32, rows, keys->dim),
                                      vf_set1(panels[i].factor));
    }
    if (count == 2) KV(score_words)(queries, 2, keys, begin, end, scores, 0);
    else KV(score_words)(queries, 1, keys, begin, end, scores, 0);
    for (int i = 0; i < count; i++)
        KV(refine_rows)(keys, is_rope ? panels[i].rope_queries : panels[i].queries, queries[i].unit,
                        vf_load(is_rope ? panels[i].rope_square : panels[i].square), KV(most_so_far)(tile, panels + i),
                        panels[i].factor, begin, end, scores[i], tile->room);
}
