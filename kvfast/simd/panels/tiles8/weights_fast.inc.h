/* Weights as activations of the fast precision: one byte, in one pass over the scores. */

/* 2^x for x >= -126; 0 below, and NaN for NaN. The polynomial of degree 2 in r = x - floor(x) has the least largest relative error of
   2^r on 0 to 1, 1.7e-3: less than half of the weights' rounding. Each step is taken for 4 vectors before the next. */
static inline __attribute__((always_inline)) void KV(fast_exp2)(vf x[4])
{
    const float factors[] = {0.33719009f, 0.65763854f, 1.00172364f};
    vf r[4], y[4];
    KV_FOR4(i, 4, r[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEG_INF); y[i] = vf_set1(factors[0]););
    for (int factor = 1; factor < 3; factor++) KV_FOR4(i, 4, y[i] = vf_fma(y[i], r[i], vf_set1(factors[factor])););
    KV_FOR4(i, 4, x[i] = _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x[i], vf_set1(-126.0f), _CMP_NLT_UQ), y[i], x[i]););
}

/* The base-2 logarithms of a tile's scales of values, to 1.2e-4; of 0 a large negative number. A polynomial of degree 4 interpolates
   that of a mantissa in the Chebyshev nodes of 1 to 2. */
static void KV(find_value_logs)(kv_operands *operands)
{
    const float factors[] = {-0.0784406762f, 0.626032182f, -2.07833517f, 4.02921139f, -2.49835315f};
    for (int t = 0; t < KV_MATRIX_TILE; t += W) {
        const vf scale = vf_max(vf_load(operands->value_scales + t), vf_set1(0x1p-120f));
        const vf m = _mm512_getmant_ps(scale, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
        vf y = vf_set1(factors[0]);
        for (int i = 1; i < 5; i++) y = vf_fma(y, m, vf_set1(factors[i]));
        vf_store(operands->value_logs + t, vf_add(_mm512_getexp_ps(scale), y));
    }
}

/* Turns scores into weights, exp(score - maximum of these tokens), times the values' scales as bytes, (KV_MATRIX_TILE / 64, KV_ROWS,
   64), and updates the panel's maxima and sums of weights. The unit is known before the first weight, so that none waits for the
   others. `begin` and `end`, multiples of 64, leave out only tokens that no row sees, and change no row's numbers. */
static inline __attribute__((always_inline)) void KV(weigh_tokens)(
    const kv_operands *operands, kv_panel *panel, int64_t position, int begin, int end, float *scores, int8_t *x,
    KV(correction) *correction, const int bf16)
{
    KV_ALIGNED float sums[KV_ROWS * W], base[KV_ROWS];
    const vf log2e = vf_set1(1.44269504f);
    vf here, reach;
    (void)bf16;
    const vf from = KV(find_maxima)(operands, panel, position, begin, end, scores, correction, &here, &reach);
    const __mmask16 blind = _mm512_cmp_ps_mask(here, vf_set1(-INFINITY), _CMP_EQ_OQ);
    const vf top = vf_mul(_mm512_maskz_mov_ps(~blind, here), log2e);
    /* The power of 2 that makes the largest weight times its scale KV_MAX_WEIGHT: log2(126) = 6.977. */
    const vf power = vf_sub(vf_set1(6.977f), vf_max(vf_sub(reach, top), vf_set1(-100.0f)));
    vf_store(base, vf_sub(power, top));
    for (int r = 0; r < KV_ROWS; r++) {
        const float *row = scores + r * TILE_TOKENS;
        vf total = vf_set1(0.0f);
        for (int t = begin; t < end; t += TILE_DEPTH) {
            vf weight[4];
            vi code[4];
            KV_FOR4(i, 4, weight[i] = vf_fma(vf_load(row + t + i * W), log2e, vf_set1(base[r])););
            KV(fast_exp2)(weight);
            total = vf_add(total, vf_add(vf_add(weight[0], weight[1]), vf_add(weight[2], weight[3])));
            KV_FOR4(i, 4,
                const vf scale = vf_load(operands->value_scales + t + i * W);
                code[i] = _mm512_cvttps_epi32(vf_fma(weight[i], scale, vf_load(KV(fractions) + t + i * W))););
            int8_t *at = x + t / TILE_DEPTH * TILE_BYTES + r * TILE_DEPTH;
            KV(cut_activations)(code[0], code[1], code[2], code[3], at, at);
        }
        vf_store(sums + r * W, total);
    }
    const vf unit = vf_mul(KV(exp)(vf_mul(power, vf_set1(-0.693147181f))), KV(exp)(vf_sub(here, from)));
    KV(add_weights)(panel, correction->rescale, vf_mul(KV(reduce_rows)(sums, 0), unit));
    vf_store(correction->unit, unit);
}
