/* Scores of queries and keys that are both bfloat16: pairs of elements, which vdpbf16ps multiplies and adds up in float32. Nothing is
   rounded before, so no score is computed again, and keys need no mean. Values are words; see operands.inc.h. */

/* Adds the products of pairs. clang 16 crashes where _mm512_dpbf16_ps meets a broadcast. */
static inline __attribute__((always_inline)) vf KV(add_pairs)(vf sum, vi a, vi b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* Products of 8 keys with the rows of one panel or two. The sums stay in registers. */
static inline __attribute__((always_inline)) void KV(multiply_pairs)(const int8_t *const *queries, const int panels, const int8_t *keys,
                                                                     int lines, vf sums[2][8])
{
    vf sum[2][8];
    const int8_t *a = queries[0], *b = queries[panels - 1];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sum[0][i] = sum[1][i] = vf_set1(0.0f);
    for (; lines > 0; lines--, a += 64, b += 64, keys += 64) {
        const vi one = _mm512_load_si512(a), other = _mm512_load_si512(b);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const vi key = vi_set1(kv_load32(keys + 4 * i));
            sum[0][i] = KV(add_pairs)(sum[0][i], one, key);
            if (panels == 2) sum[1][i] = KV(add_pairs)(sum[1][i], other, key);
        }
    }
    KV_NOTHING_SOONER;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sums[0][i] = sum[0][i], sums[1][i] = sum[1][i];
}

/* As score_words. */
static inline __attribute__((always_inline)) void KV(score_pairs)(const int8_t *const *queries, const int panels, float factor,
                                                                  const KV(word_keys) *keys, int begin, int end,
                                                                  KV(word_scores) *const *scores, int adds)
{
    for (int t = begin; t < end; t += 8) {
        vf sums[2][8];
        KV(multiply_pairs)(queries, panels, keys->words + t / KV_LANES * keys->dim * 32 + t % KV_LANES * 4, keys->dim / 2, sums);
#pragma GCC unroll 2
        for (int panel = 0; panel < panels; panel++) {
            vf most = vf_set1(-INFINITY);
            float *at = scores[panel]->weights + t * KV_ROWS;
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const vf before = adds ? vf_load(at + i * KV_ROWS) : vf_set1(0.0f);
                const vf score = vf_fma(sums[panel][i], vf_set1(factor), before);
                most = vf_max(most, score);
                vf_store(at + i * KV_ROWS, score);
            }
            vf_store(scores[panel]->most + t / 8 * KV_ROWS, most);
        }
    }
}

/* As score_tile. */
static void KV(score_pair_tile)(const KV(word_tile) *tile, const kv_panel *panels, int count, int begin, int end,
                                KV(word_scores) *const *scores)
{
    const int8_t *const queries[2] = {panels[0].halves, panels[count - 1].halves};
    const int8_t *const rope[2] = {panels[0].rope_halves, panels[count - 1].rope_halves};
    if (count == 2) {
        KV(score_pairs)(queries, 2, panels->factor, tile->keys, begin, end, scores, 0);
        if (tile->rope) KV(score_pairs)(rope, 2, panels->factor, tile->rope, begin, end, scores, 1);
    } else {
        KV(score_pairs)(queries, 1, panels->factor, tile->keys, begin, end, scores, 0);
        if (tile->rope) KV(score_pairs)(rope, 1, panels->factor, tile->rope, begin, end, scores, 1);
    }
}

static void KV(put_query_pairs)(const float *rows, int n, int8_t *pairs)
{
    KV_ALIGNED uint16_t exact[KV_ROWS * KV_MAX_HEAD_DIM];
    const char *row[KV_ROWS];
    KV(from_bfloat16)(rows, KV_ROWS * n, exact);
    for (int r = 0; r < KV_ROWS; r++) row[r] = (const char *)(exact + r * n);
    KV(put_pair_lane)(row, n, pairs);
}

/* Prepares a panel of query rows that were bfloat16, (KV_ROWS, padded_dim). */
static void KV(prepare_pairs)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows, float factor,
                              int exact, kv_panel *panel)
{
    (void)exact;
    panel->factor = factor;
    KV(put_query_pairs)(rows, side->padded_dim, panel->halves);
    if (rope) KV(put_query_pairs)(rope_rows, rope->padded_dim, panel->rope_halves);
}

KV_ATTEND(attend_pairs, KV(PAIRS), KV(score_pair_tile))
