/* Queries and keys that are both bfloat16, as pairs of elements, which vdpbf16ps multiplies and adds up in float32. Nothing is
   rounded before, so no score is computed again, and keys need no mean. Values are words; see operands.inc.h. */

/* As score_tile. */
static void KV(score_pair_tile)(const KV(word_tile) *tile, const kv_panel *panels, int count, int begin, int end,
                                KV(word_scores) *const *scores)
{
    KV(word_queries) queries[2], rope[2];
    for (int i = 0; i < 2; i++) {
        const kv_panel *panel = panels + (i < count ? i : 0);
        queries[i] = (KV(word_queries)){NULL, panel->halves, vf_set1(panel->factor), panel->factor};
        rope[i] = (KV(word_queries)){NULL, panel->rope_halves, vf_set1(panel->factor), panel->factor};
    }
    if (count == 2) KV(score_words)(queries, 2, tile->keys, begin, end, scores, 0, PAIR_KEYS);
    else KV(score_words)(queries, 1, tile->keys, begin, end, scores, 0, PAIR_KEYS);
    if (tile->rope && count == 2) KV(score_words)(rope, 2, tile->rope, begin, end, scores, 1, PAIR_KEYS);
    else if (tile->rope) KV(score_words)(rope, 1, tile->rope, begin, end, scores, 1, PAIR_KEYS);
}

/* Writes query rows as pairs; `exact` is for them in bfloat16, one after the other. */
static void KV(put_query_pairs)(const float *rows, int n, uint16_t *exact, int8_t *pairs)
{
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
    KV(put_query_pairs)(rows, side->padded_dim, (uint16_t *)panel->queries, panel->halves);
    if (rope) KV(put_query_pairs)(rope_rows, rope->padded_dim, (uint16_t *)panel->rope_queries, panel->rope_halves);
}

KV_ATTEND(attend_pairs, KV(PAIRS), KV(score_pair_tile))
