/* What turns scores of 16 query rows and a tile's tokens into weights begins with: masks and maxima. */

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

/* Masks the scores, and finds the maxima of these tokens, `here`, and of the fast precision those of the base-2 logarithms of their
   weights times their values' scales, `reach`. Returns the panel's maxima so far or, of rows that have seen nothing, 0. Prefetches
   the panel's sums: those of all panels do not fit the first level of a processor's caches. */
static inline __attribute__((always_inline)) vf KV(find_maxima)(const kv_operands *operands, kv_panel *panel, int64_t position,
                                                                int begin, int end, float *scores, KV(correction) *correction,
                                                                vf *here, vf *reach)
{
    KV_ALIGNED float most[2][KV_ROWS * W];
    const vf none = vf_set1(-INFINITY), log2e = vf_set1(1.44269504f);
    for (int r = 0; r < KV_ROWS; r++) {
        float *row = scores + r * TILE_TOKENS;
        for (int d = 0; d < operands->value_dim; d += 16) __builtin_prefetch(panel->acc + r * operands->value_dim + d, 1, 3);
        KV(bend_row)(panel, r, position, begin, end, row);
        vf a = none, b = none, far[2] = {none, none};
        for (int t = begin; t < end; t += 4 * W) {
            vf score[4];
            KV_FOR4(i, 4, score[i] = vf_load(row + t + i * W););
            a = vf_max(a, vf_max(score[0], score[1]));
            b = vf_max(b, vf_max(score[2], score[3]));
            if (!KV_FAST) continue;
            KV_FOR4(i, 4, far[i % 2] = vf_max(far[i % 2], vf_fma(score[i], log2e, vf_load(operands->value_logs + t + i * W))););
        }
        vf_store(most[0] + r * W, vf_max(a, b));
        if (KV_FAST) vf_store(most[1] + r * W, vf_max(far[0], far[1]));
    }
    *here = KV(reduce_rows)(most[0], 1);
    *reach = KV_FAST ? KV(reduce_rows)(most[1], 1) : none;
    const vf before = vf_load(panel->m), now = vf_max(before, *here);
    const __mmask16 same = _mm512_cmp_ps_mask(before, now, _CMP_EQ_OQ);
    const vf from = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(now, none, _CMP_NEQ_OQ), now);
    vf_store(panel->m, now);
    /* Exactly 1 where the maximum stays, so that a tile changes nothing for a row that sees none of it. */
    vf_store(correction->rescale, _mm512_mask_mov_ps(KV(exp)(vf_sub(before, from)), same, vf_set1(1.0f)));
    correction->changed = (uint16_t)~same;
    return from;
}
