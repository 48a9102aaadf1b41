/* Turns the scores of 16 query rows into weights, as words. A vector holds the 16 rows of one token, so that no maximum or sum goes
   across lanes. */

/* Scores and weights of a panel's rows, and how they become words. */
typedef struct {
    KV(word_scores) scores;
    KV_ALIGNED int32_t words[KV_TILE / 2 * KV_ROWS];
    int changed;                                         /* bit r: the maximum of row r rose */
    KV_ALIGNED float rescale[KV_ROWS];                   /* exp(maximum before - maximum now), exactly 1 where it stays */
    KV_ALIGNED float inverse[WORD_GROUPS][KV_ROWS];      /* factor that made a group's weights words */
    KV_ALIGNED float unit[WORD_GROUPS][KV_ROWS];         /* of these words, relative to the maximum now */
} KV(word_weights);

/* Applies softcap, ALiBi and biases to the scores, and masks the tokens that a row may not see. */
static void KV(bend_words)(const kv_panel *panel, int64_t position, int begin, int end, KV(word_scores) *scores)
{
    const kv_score_options *options = &panel->options;
    const vi lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vi start = vi_load(panel->start), stop = vi_load(panel->stop);
    const __mmask16 rows = (__mmask16)((1u << panel->rows) - 1);
    const vf slopes = options->slopes ? _mm512_maskz_loadu_ps(rows, options->slopes) : vf_set1(0.0f);
    KV_ALIGNED float distances[KV_ROWS] = {0}; /* as integers: float32 does not hold all positions beyond 2^24 */
    for (int r = 0; options->slopes && r < panel->rows; r++) distances[r] = (float)(position - options->query_at[r]);
    const vf distance = vf_load(distances);
    const vi bias_rows = _mm512_mullo_epi32(lanes, vi_set1(KV_TILE));
    for (int t = begin; t < end; t++) {
        const __mmask16 seen = _mm512_cmple_epi32_mask(start, vi_set1(t)) & _mm512_cmpgt_epi32_mask(stop, vi_set1(t));
        float *at = scores->weights + t * KV_ROWS, *eight = scores->most + t / 8 * KV_ROWS;
        vf x = vf_load(at);
        if (options->softcap > 0) x = vf_mul(vf_set1(options->softcap), KV(tanh)(vf_div(x, vf_set1(options->softcap))));
        if (options->slopes) x = vf_add(x, vf_mul(slopes, vf_add(distance, vf_set1((float)t))));
        if (options->bias) x = vf_add(x, _mm512_mask_i32gather_ps(vf_set1(0.0f), seen & rows, bias_rows, options->bias + t, 4));
        x = _mm512_mask_mov_ps(vf_set1(-INFINITY), seen, x);
        vf_store(at, x);
        vf_store(eight, t % 8 ? vf_max(vf_load(eight), x) : x);
    }
}

/* The tokens of a group between `begin` and `end`. */
static inline void KV(find_group)(int g, int group, int begin, int end, int *first, int *last)
{
    *first = begin > g * group ? begin : g * group;
    *last = end < (g + 1) * group ? end : (g + 1) * group;
}

/* Rounds the weights to words. The rounding error of a weight goes to a later one: of codes to the sixteenth after it, as in
   put_activations, and of float rows (`rounded`) to the eighth, as the weights of a group are few. Rows of these add to their noise the
   squares of the weights times their units, and half as much again, as all of a row's error can be in one loud element. */
static inline __attribute__((always_inline)) void KV(round_weights)(KV(word_weights) *w, int group, int begin, int end,
                                                                    double *noise, const int rounded)
{
    const int carry = rounded ? 8 : KV_LANES;
    for (int g = begin / group, first, last; g * group < end; g++) {
        KV(find_group)(g, group, begin, end, &first, &last);
        const vf inverse = vf_load(w->inverse[g]);
        vf left[KV_LANES], square[2] = {vf_set1(0.0f), vf_set1(0.0f)};
        KV_ALIGNED float squares[KV_ROWS];
#pragma GCC unroll 16
        for (int i = 0; i < carry; i++) left[i] = vf_set1(0.0f);
        for (int t = first; t < last; t += KV_LANES) {
            int8_t *at = (int8_t *)(w->words + t * (KV_ROWS / 2));
#pragma GCC unroll 8
            for (int i = 0; i < KV_LANES; i += 2) {
                vi word[2];
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++) {
                    vf *const over = left + (i + j) % carry;
                    const vf exact = vf_fma(vf_load(w->scores.weights + (t + i + j) * KV_ROWS), inverse, *over);
                    word[j] = vf_round(exact);
                    const vf whole = vi_to_float(word[j]); /* 0 of a token that the row does not see */
                    *over = vf_sub(exact, whole);
                    if (rounded) square[j] = vf_fma(whole, whole, square[j]);
                }
                KV(put_word_pair)(word[0], word[1], at + i * 32);
            }
        }
        if (!rounded) continue;
        vf_store(squares, vf_add(square[0], square[1]));
        for (int r = 0; r < KV_ROWS; r++) noise[r] += 1.5 * squares[r] * w->unit[g][r] * w->unit[g][r];
    }
}

/* Adds to the noise of rows, and corrects it for the maxima now. Where values are float rows, `all` marks the query rows that see the
   whole tile and take the size of its values. Others take a bound that is rarely less: other rows decide how many tokens are read. */
static void KV(add_noise)(kv_panel *panel, const kv_operands *operands, const KV(word_weights) *w, __mmask16 all, int groups)
{
    const int of_codes = groups == 1;
    for (int r = 0; r < KV_ROWS; r++) {
        const int seen = panel->stop[r] - panel->start[r];
        const float size = of_codes || all >> r & 1 ? operands->code_size : operands->usual_size;
        if (w->changed >> r & 1) panel->noise[r] *= (double)w->rescale[r] * w->rescale[r];
        for (int g = 0; g < groups; g++)
            panel->noise[r] += KV(noise_of)(w->unit[g][r], size, of_codes && seen > 0 ? seen : 0) * (1.0 / groups);
    }
}

/* Turns scores into weights, exp(score - maximum), and updates the panel's maxima and sums of weights, as softmax of vectors does, and
   finds the units of the weights times the values' scales. `begin` and `end` leave out only tokens that no row sees. They do not change
   a row's numbers: the weights of masked tokens are 0, and sums are taken in the order of positions. */
static void KV(weigh_words)(kv_panel *panel, const kv_operands *operands, __mmask16 all, int64_t position, int begin, int end,
                            KV(word_weights) *w)
{
    const vf none = vf_set1(-INFINITY), zero = vf_set1(0.0f);
    int whole = !kv_bends(&panel->options);
    for (int r = 0; r < KV_ROWS; r++) whole &= panel->start[r] <= begin && panel->stop[r] >= end;
    if (!whole) KV(bend_words)(panel, position, begin, end, &w->scores);
    vf here = none;
    for (int t = begin; t < end; t += 8) here = vf_max(here, vf_load(w->scores.most + t / 8 * KV_ROWS));
    const vf before = vf_load(panel->m), now = vf_max(before, here);
    const __mmask16 blind = _mm512_cmp_ps_mask(now, none, _CMP_EQ_OQ), same = _mm512_cmp_ps_mask(before, now, _CMP_EQ_OQ);
    const vf base = _mm512_maskz_mov_ps(~blind, now);
    /* Exactly 1 where the maximum stays, so that a tile changes nothing for a row that sees none of it. */
    vf_store(w->rescale, _mm512_mask_mov_ps(KV(exp)(vf_sub(before, base)), same, vf_set1(1.0f)));
    w->changed = (uint16_t)~same;
    vf_store(panel->m, now);
    vf lanes[KV_LANES];
    for (int i = 0; i < KV_LANES; i++) lanes[i] = zero;
    const int group = operands->group, groups = group < KV_TILE ? KV_MATRIX_TILE / group : 1;
    for (int g = 0, first, last; g < groups; g++) {
        vf sum = zero, top = zero;
        KV(find_group)(g, group, begin, end, &first, &last);
        for (int half = 0; half < KV_LANES; half += 8) { /* so that the sums of lanes stay in registers */
            vf lane[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) lane[i] = lanes[half + i];
            for (int t = first + half; t < last; t += KV_LANES) {
                float *at = w->scores.weights + t * KV_ROWS;
#pragma GCC unroll 2
                for (int j = 0; j < 8; j += 4) {
                    vf weight[4];
                    KV_FOR4(i, 4, weight[i] = vf_sub(vf_load(at + (i + j) * KV_ROWS), base););
                    KV(exp_of_scores)(weight, 4);
                    KV_FOR4(i, 4,
                        const vf scaled = vf_mul(weight[i], vf_set1(operands->value_scales[t + i + j]));
                        lane[i + j] = vf_add(lane[i + j], weight[i]);
                        sum = vf_add(sum, scaled);
                        top = vf_max(top, scaled);
                        vf_store(at + (i + j) * KV_ROWS, scaled););
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) lanes[half + i] = lane[i];
        }
        /* The unit for the largest word and, where values were rounded, for the largest sum. */
        const vf unit = vf_div(top, vf_set1(KV_MAX_WEIGHT)), of_sum = vf_mul(sum, vf_set1(1.0f / operands->most_weights));
        vf_store(w->unit[g], vf_max(unit, of_sum));
        vf_store(w->inverse[g], groups == 1 ? KV(inverse_of)(vf_set1(KV_MAX_WEIGHT), top)
                                            : KV(inverse_of)(vf_set1(1.0f), vf_max(unit, of_sum)));
    }
    KV(add_weights)(panel, w->rescale, KV(join_lanes)(lanes, KV_LANES));
    KV(add_noise)(panel, operands, w, all, groups);
}
