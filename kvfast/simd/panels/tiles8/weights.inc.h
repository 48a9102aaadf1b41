/* Turns the scores of 16 query rows into weights: activations of two parts, of the fast precision of one, or in bfloat16. */

/* Applies softcap and ALiBi, and masks the tokens that a row may not see. */
static inline void KV(bend_row)(const kv_panel *panel, int r, int64_t position, int begin, int end, float *scores)
{
    const int from = panel->start[r], to = panel->stop[r];
    const int bent = kv_bends(&panel->options);
    const vi lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (bent) KV(bend_scores)(scores, begin, end, from, to, r, position, &panel->options);
    if (from > begin || to < end)
        for (int t = begin; t < end; t += W) {
            const vi at = vi_add(vi_set1(t), lanes);
            const __mmask16 before = _mm512_cmplt_epi32_mask(at, vi_set1(from));
            const __mmask16 behind = _mm512_cmpge_epi32_mask(at, vi_set1(to));
            vf_store(scores + t, _mm512_mask_mov_ps(vf_load(scores + t), before | behind, vf_set1(-INFINITY)));
        }
}

/* How a tile corrects the sums of the tiles before it. */
typedef struct {
    unsigned changed;                  /* bit r: the maximum of row r rose */
    KV_ALIGNED float rescale[KV_ROWS]; /* exp(maximum before - maximum now), exactly 1 where it stays */
    KV_ALIGNED float unit[KV_ROWS];    /* of integer weights, relative to the maximum now */
} KV(correction);

/* Masks the scores, and finds the panel's maxima. Returns those or, of rows that have seen nothing, 0. Prefetches the panel's sums:
   those of all panels do not fit the first level of a processor's caches. */
static inline __attribute__((always_inline)) vf KV(find_maxima)(const kv_operands *operands, kv_panel *panel, int64_t position,
                                                                int begin, int end, float *scores, KV(correction) *correction)
{
    KV_ALIGNED float most[KV_ROWS * W];
    const vf none = vf_set1(-INFINITY);
    for (int r = 0; r < KV_ROWS; r++) {
        float *row = scores + r * TILE_TOKENS;
        for (int d = 0; d < operands->value_dim; d += 16) __builtin_prefetch(panel->acc + r * operands->value_dim + d, 1, 3);
        KV(bend_row)(panel, r, position, begin, end, row);
        vf a = none, b = none;
        for (int t = begin; t < end; t += 4 * W) {
            vf score[4];
            KV_FOR4(i, 4, score[i] = vf_load(row + t + i * W););
            a = vf_max(a, vf_max(score[0], score[1]));
            b = vf_max(b, vf_max(score[2], score[3]));
        }
        vf_store(most + r * W, vf_max(a, b));
    }
    const vf before = vf_load(panel->m), now = vf_max(before, KV(reduce_rows)(most, 1));
    const __mmask16 same = _mm512_cmp_ps_mask(before, now, _CMP_EQ_OQ);
    const vf from = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(now, none, _CMP_NEQ_OQ), now);
    vf_store(panel->m, now);
    /* Exactly 1 where the maximum stays, so that a tile changes nothing for a row that sees none of it. */
    vf_store(correction->rescale, _mm512_mask_mov_ps(KV(exp)(vf_sub(before, from)), same, vf_set1(1.0f)));
    correction->changed = (uint16_t)~same;
    return from;
}

/* Turns scores into weights, exp(score - maximum), and updates the panel's maxima and sums of weights, as softmax of vectors does.
   With `bf16`, x is (2, KV_MATRIX_TILE / 32, KV_ROWS, 32) bfloat16. Otherwise the weights times the values' scales stay in `scores`,
   and are rounded to integers, (parts, TOKEN_TILES, KV_ROWS, 64) bytes. `begin` and `end`, multiples of 64, leave out only tokens
   that no row sees. They do not change a row's numbers: weights of masked tokens are 0, and sums are taken lane by lane. */
static inline __attribute__((always_inline)) void KV(weigh_tokens)(
    const kv_operands *operands, kv_panel *panel, int64_t position, int begin, int end, float *scores, int8_t *x,
    KV(correction) *correction, const int bf16)
{
    KV_ALIGNED float most[KV_ROWS * W], sums[KV_ROWS * W], base[KV_ROWS];
    vf_store(base, KV(find_maxima)(operands, panel, position, begin, end, scores, correction));
    for (int r = 0; r < KV_ROWS; r++) {
        float *row = scores + r * TILE_TOKENS;
        int8_t *at = x + begin * (KV_ROWS * 2) + r * 64;
        vf total = vf_set1(0.0f), top = total, weight[4];
        /* A matrix unit that rests for half a microsecond takes as long to begin again; each product slows vectors for 500 cycles. */
        if (!bf16 && r % 8 == 4) KV_KEEP_AWAKE;
        for (int t = begin; t < end; t += 4 * W, at += 2 * TILE_BYTES) {
            KV_FOR4(i, 4, weight[i] = vf_sub(vf_load(row + t + i * W), vf_set1(base[r])););
            KV(exp_of_scores)(weight, 4);
            KV_FOR4(i, 4, total = vf_add(total, weight[i]););
            if (bf16) {
                KV(put_bf16)(weight[0], weight[1], at, at + BF16_TOKEN_TILES * TILE_BYTES);
                KV(put_bf16)(weight[2], weight[3], at + TILE_BYTES, at + (BF16_TOKEN_TILES + 1) * TILE_BYTES);
                continue;
            }
            KV_FOR4(i, 4,
                const vf scaled = vf_mul(weight[i], vf_load(operands->value_scales + t + i * W));
                top = vf_max(top, scaled);
                vf_store(row + t + i * W, scaled););
        }
        vf_store(sums + r * W, total);
        vf_store(most + r * W, top);
    }
    KV(add_weights)(panel, correction->rescale, KV(reduce_rows)(sums, 0));
    if (bf16) return;
    const vf top = KV(reduce_rows)(most, 1);
    vf_store(correction->unit, vf_div(top, vf_set1(KV_MAX_WEIGHT)));
    for (int r = 0; r < KV_ROWS && !KV_FAST; r++)
        panel->noise[r] = panel->noise[r] * ((double)correction->rescale[r] * correction->rescale[r])
                        + KV(noise_of)(correction->unit[r], operands->code_size, panel->stop[r] - panel->start[r]);
    vf_store(base, KV(inverse_of)(vf_set1(KV_MAX_WEIGHT), top));
    /* What the rounding of a weight leaves out goes to the sixteenth after it; see activations.inc.h. Four rows at once wait less. */
    for (int r = 0; r < KV_ROWS; r += 4) {
        const vf first = vf_load(KV(first_left));
        vf left[4] = {first, first, first, first};
        for (int t = begin; t < end; t += TILE_DEPTH) {
            vi weights[4][4];
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) {
                    const vf weight = vf_load(scores + (r + j) * TILE_TOKENS + t + i * W);
                    const vf exact = vf_fma(weight, vf_set1(base[r + j]), left[j]);
                    weights[j][i] = vf_round(exact);
                    left[j] = vf_sub(exact, vi_to_float(weights[j][i]));
                }
            for (int j = 0; j < 4; j++) {
                int8_t *at = x + t / TILE_DEPTH * TILE_BYTES + (r + j) * TILE_DEPTH;
                KV(cut_activations)(weights[j][0], weights[j][1], weights[j][2], weights[j][3], at, at + TOKEN_TILES * TILE_BYTES);
            }
        }
    }
}
