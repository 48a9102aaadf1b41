/* Turns the scores of 16 query rows and KV_MATRIX_TILE tokens into weights, as activations of the matrix unit. */

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
    KV_ALIGNED float inverse[KV_ROWS]; /* factor that made the weights integers */
} KV(correction);

/* Turns scores into weights, exp(score - maximum), and updates the panel's maxima and sums of weights.
   With `halves` the maxima are those of all tiles so far, and x is (2, KV_MATRIX_TILE / 32, KV_ROWS, 32) bfloat16. Otherwise they
   are those of these tokens. The weights times the values' scales stay in `scores`, and are rounded to integers, (2,
   KV_MATRIX_TILE / 64, KV_ROWS, 64) bytes. `begin` and `end`, multiples of 64, leave out only tokens that no row sees. They do
   not change a row's numbers: weights of masked tokens are 0, and sums are taken lane by lane. */
static inline __attribute__((always_inline)) void KV(weigh_tokens)(
    const kv_operands *operands, kv_panel *panel, int64_t position, int begin, int end, float *scores, int8_t *x,
    KV(correction) *correction, const int halves)
{
    KV_ALIGNED float most[KV_ROWS * W], sums[KV_ROWS * W], base[KV_ROWS];
    const vf log2e = vf_set1(1.44269504f);
    const vf none = vf_set1(-INFINITY), one = vf_set1(1.0f);
    for (int r = 0; r < KV_ROWS; r++) {
        float *row = scores + r * KV_MATRIX_TILE;
        KV(bend_row)(panel, r, position, begin, end, row);
        vf a = none, b = none;
        for (int t = begin; t < end; t += 4 * W) {
            a = vf_max(a, vf_max(vf_load(row + t), vf_load(row + t + W)));
            b = vf_max(b, vf_max(vf_load(row + t + 2 * W), vf_load(row + t + 3 * W)));
        }
        vf_store(most + r * W, vf_max(a, b));
    }
    const vf here = KV(reduce_rows)(most, 1);
    const __mmask16 blind = _mm512_cmp_ps_mask(here, none, _CMP_EQ_OQ);
    const vf before = vf_load(panel->m), now = vf_max(before, here);
    const __mmask16 same = _mm512_cmp_ps_mask(before, now, _CMP_EQ_OQ);
    const vf from = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(now, none, _CMP_NEQ_OQ), now);
    /* Exactly 1 where the maximum stays, so that a tile changes nothing for a row that sees none of it. */
    const vf keep = _mm512_mask_mov_ps(KV(exp)(vf_sub(before, from)), same, one);
    vf_store(panel->m, now);
    vf_store(correction->rescale, keep);
    correction->changed = (uint16_t)~same;
    vf_store(base, halves ? from : _mm512_maskz_mov_ps(~blind, here));
    for (int r = 0; r < KV_ROWS; r++) {
        float *row = scores + r * KV_MATRIX_TILE;
        int8_t *at = x + begin * (KV_ROWS * 2) + r * 64;
        vf total = vf_set1(0.0f), top = total, weight[2];
        for (int t = begin; t < end; t += 2 * W, at += TILE_BYTES) {
            for (int i = 0; i < 2; i++) weight[i] = vf_mul(vf_sub(vf_load(row + t + i * W), vf_set1(base[r])), log2e);
            KV(exp2_of_scores)(weight, 2);
            for (int i = 0; i < 2; i++) {
                total = vf_add(total, weight[i]);
                if (halves) continue;
                const vf scaled = vf_mul(weight[i], vf_load(operands->value_scales + t + i * W));
                top = vf_max(top, scaled);
                vf_store(row + t + i * W, scaled);
            }
            if (halves) KV(put_halves)(weight[0], weight[1], at, at + KV_MATRIX_TILE / 32 * TILE_BYTES);
        }
        vf_store(sums + r * W, total);
        vf_store(most + r * W, top);
    }
    const vf sum = KV(reduce_rows)(sums, 0), l = vf_load(panel->l);
    if (halves) {
        vf_store(panel->l, vf_fma(l, keep, sum));
        return;
    }
    const vf add = KV(exp)(vf_sub(here, from)), top = KV(reduce_rows)(most, 1);
    vf_store(panel->l, vf_fma(l, keep, vf_mul(sum, add)));
    vf_store(correction->unit, vf_mul(vf_mul(top, vf_set1(1.0f / KV_MAX_WEIGHT)), add));
    for (int r = 0; !KV_FAST && r < KV_ROWS; r++)
        panel->noise[r] = panel->noise[r] * correction->rescale[r] * correction->rescale[r]
                        + KV(noise_of)(correction->unit[r], operands->code_size, panel->stop[r] - panel->start[r]);
    vf_store(correction->inverse, vf_zero_below(vf_div(vf_set1(KV_MAX_WEIGHT), top), top, 0x1p-100f));
    /* What the rounding of a weight leaves out goes to the next weight; see activations.inc.h. Four rows at once wait less. */
    for (int r = 0; r < KV_ROWS; r += 4) {
        vf left[4] = {vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f)};
        for (int t = begin; t < end; t += TILE_DEPTH) {
            vi weights[4][4];
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) {
                    const vf weight = vf_load(scores + (r + j) * KV_MATRIX_TILE + t + i * W);
                    const vf exact = vf_add(vf_mul(weight, vf_set1(correction->inverse[r + j])), left[j]);
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
