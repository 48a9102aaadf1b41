/* Weights as activations of two parts, or in bfloat16. */

/* Turns scores into weights, exp(score - maximum), and updates the panel's maxima and sums of weights, as softmax of vectors does.
   With `bf16`, x is (2, KV_MATRIX_TILE / 32, KV_ROWS, 32) bfloat16. Otherwise the weights times the values' scales stay in `scores`,
   and are rounded to integers, (2, TOKEN_TILES, KV_ROWS, 64) bytes. `begin` and `end`, multiples of 64, leave out only tokens that no
   row sees. They do not change a row's numbers: weights of masked tokens are 0, and sums are taken lane by lane. */
static inline __attribute__((always_inline)) void KV(weigh_tokens)(
    const kv_operands *operands, kv_panel *panel, int64_t position, int begin, int end, float *scores, int8_t *x,
    KV(correction) *correction, const int bf16)
{
    KV_ALIGNED float most[KV_ROWS * W], sums[KV_ROWS * W], base[KV_ROWS];
    vf here, reach;
    vf_store(base, KV(find_maxima)(operands, panel, position, begin, end, scores, correction, &here, &reach));
    for (int r = 0; r < KV_ROWS; r++) {
        float *row = scores + r * TILE_TOKENS;
        int8_t *at = x + begin * (KV_ROWS * 2) + r * 64;
        vf total = vf_set1(0.0f), top = total, weight[2];
        for (int t = begin; t < end; t += 2 * W, at += TILE_BYTES) {
            for (int i = 0; i < 2; i++) weight[i] = vf_sub(vf_load(row + t + i * W), vf_set1(base[r]));
            KV(exp_of_scores)(weight, 2);
            for (int i = 0; i < 2; i++) {
                total = vf_add(total, weight[i]);
                if (bf16) continue;
                const vf scaled = vf_mul(weight[i], vf_load(operands->value_scales + t + i * W));
                top = vf_max(top, scaled);
                vf_store(row + t + i * W, scaled);
            }
            if (bf16) KV(put_bf16)(weight[0], weight[1], at, at + BF16_TOKEN_TILES * TILE_BYTES);
        }
        vf_store(sums + r * W, total);
        vf_store(most + r * W, top);
    }
    KV(add_weights)(panel, correction->rescale, KV(reduce_rows)(sums, 0));
    if (bf16) return;
    const vf top = KV(reduce_rows)(most, 1);
    vf_store(correction->unit, vf_div(top, vf_set1(KV_MAX_WEIGHT)));
    for (int r = 0; r < KV_ROWS; r++)
        panel->noise[r] = panel->noise[r] * ((double)correction->rescale[r] * correction->rescale[r])
                        + KV(noise_of)(correction->unit[r], operands->code_size, panel->stop[r] - panel->start[r]);
    vf_store(base, KV(inverse_of)(vf_set1(KV_MAX_WEIGHT), top));
    /* What the rounding of a weight leaves out goes to the sixteenth after it; see activations.inc.h. Four rows at once wait less. */
    for (int r = 0; r < KV_ROWS; r += 4) {
        vf left[4] = {vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f)};
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
