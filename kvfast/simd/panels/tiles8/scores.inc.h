/* Scores of a panel. Its rows are multiplied as bytes. The exact precision also multiplies what their rounding left out, where it
   matters; the fast one gives no score there. */

/* Adds to the scores the rounding errors of the rows, times `inverse`, where they matter; in the fast precision makes these scores NaN.
   See activations.inc.h. `scale` is the largest scale of the tokens. */
static __attribute__((noinline)) void KV(refine_lanes)(const KV(key_products) *rounded, const float *rows, const float *inverse,
                                                       float scale, int first, int last, float *scores)
{
    typedef struct { KV_ALIGNED int8_t x[KV_ROWS * KV_MAX_HEAD_DIM * 2]; } rest;
    int8_t *const x = KV_IN(rounded->room->again, rest)->x;
    float left[KV_MAX_HEAD_DIM], most[KV_ROWS], least[KV_ROWS];
    KV(key_products) p = *rounded;
    int begin = last, end = first; /* lane tiles with scores that may count; pairs of them, as score_lanes wants */
    for (int r = 0; r < KV_ROWS; r++) {
        vf here = vf_set1(p.most[r]);
        for (int t = 0; t < last * KV_LANES && p.whole >> r & 1; t += W) here = vf_max(here, vf_load(scores + r * TILE_TOKENS + t));
        most[r] = vf_hmax(here);
        least[r] = KV(least_score)(p.error * scale * __builtin_fabsf(p.unit[r]), most[r]);
    }
    for (int lane = first; lane < last; lane++) {
        vf above = vf_set1(-1.0f);
        for (int r = 0; r < KV_ROWS; r++)
            above = vf_max(above, vf_sub(vf_load(scores + r * TILE_TOKENS + lane * KV_LANES), vf_set1(least[r])));
        if (vf_hmax(above) < 0.0f) continue;
        begin = begin < last ? begin : lane - (lane - first) % 2;
        end = lane + 2 - (lane - first) % 2;
    }
    end = end < last ? end : last;
    p.x = x, p.most = most;
    for (int lane = begin; KV_FAST && lane < end; lane++)
        for (int r = 0; r < KV_ROWS; r++) {
            float *row = scores + r * TILE_TOKENS + lane * KV_LANES;
            const vf excess = KV(excess_of)(&p, vf_load(p.scales + lane * KV_LANES), row, r);
            vf_store(row, vf_add(vf_load(row), vf_zero_below(vf_set1(NAN), excess, 0.0f)));
        }
    if (KV_FAST || begin >= end) return;
    for (int r = 0; r < KV_ROWS; r++) {
        KV(leave_rounding)(rows + r * p.dim, 0, 1, p.dim, inverse + r, left);
        KV(cut_query)(left, p.dim, vf_set1(1.0f), r, x);
    }
    KV(score_lanes)(&p, begin, end, scores, 0, REFINES);
}

/* Refines the scores of the lane tiles first to last, of rows that are cut as p describes, if their rounding can matter. */
static inline __attribute__((always_inline)) void KV(refine_panel)(const KV(key_products) *p, const float *rows, const float *inverse,
                                                                   int first, int last, float *scores)
{
    vf scales = vf_set1(0.0f);
    for (int lane = first; lane < last; lane++) scales = vf_max(scales, vf_load(p->scales + lane * KV_LANES));
    const float scale = vf_hmax(scales);
    if (vf_hmax(vf_abs(vf_load(p->unit))) * scale * p->error * 1.001f >= KV_LEAST_ERROR)
        KV(refine_lanes)(p, rows, inverse, scale, first, last, scores);
}

/* A panel's rows folded with a key block's statistics. */
typedef struct {
    KV_ALIGNED float shift[KV_ROWS], unit[KV_ROWS], inverse[KV_ROWS];
    KV_ALIGNED float rows[KV_ROWS * KV_MAX_HEAD_DIM];
    KV_ALIGNED int8_t parts[KV_ROWS * KV_MAX_HEAD_DIM * 2];
} KV(folded_panel);

/* What the task's room holds while a panel reads a tile: scores, then weights, and those of the rotary part of latent rows; weights in
   the order of the matrix unit. */
typedef struct {
    KV_ALIGNED float scores[KV_ROWS * TILE_TOKENS];
    KV_ALIGNED float rope_scores[KV_ROWS * TILE_TOKENS];
    KV_ALIGNED int8_t x[KV_ROWS * KV_MATRIX_TILE * 4]; /* two bytes for each of 2 KV_MATRIX_TILE codes; in bfloat16 two parts */
    KV(folded_panel) folded;
    KV(lane_sums) sums[4];
} KV(panel_room);

/* A function of its own: inside of its caller it would lack registers. */
static __attribute__((noinline)) void KV(fold_panel)(const kv_operands *operands, const kv_panel *panel, int block,
                                                     KV(folded_panel) *folded)
{
    KV_ALIGNED float sums[KV_ROWS * W], most[KV_ROWS * W];
    const float *means = operands->means + block * KV_MAX_HEAD_DIM, *scales = operands->channels + block * KV_MAX_HEAD_DIM;
    const ptrdiff_t n = operands->dim;
    for (ptrdiff_t r = 0; r < KV_ROWS; r += 4) {
        vf sum[4], largest[4];
        KV_FOR4(i, 4, sum[i] = largest[i] = vf_set1(0.0f););
        for (ptrdiff_t c = 0; c < n; c += W) {
            const vf mean = vf_load(means + c), scale = vf_load(scales + c);
            vf x[4];
            KV_FOR4(i, 4, x[i] = vf_load(panel->queries + (r + i) * n + c); sum[i] = vf_fma(x[i], mean, sum[i]););
            if (!operands->folds) continue;
            KV_FOR4(i, 4,
                const vf scaled = vf_mul(x[i], scale);
                largest[i] = vf_max(largest[i], vf_abs(scaled));
                vf_store(folded->rows + (r + i) * n + c, scaled););
        }
        KV_FOR4(i, 4, vf_store(sums + (r + i) * W, sum[i]); vf_store(most + (r + i) * W, largest[i]););
    }
    vf_store(folded->shift, vf_mul(KV(reduce_rows)(sums, 0), vf_set1(panel->factor)));
    if (!operands->folds) return;
    const vf top = KV(reduce_rows)(most, 1);
    vf_store(folded->unit, vf_mul(top, vf_set1(panel->factor * (1.0f / KV_MAX_ACTIVATION))));
    vf_store(folded->inverse, KV(inverse_of)(vf_set1(KV_MAX_ACTIVATION), top));
    for (int r = 0; r < KV_ROWS; r++)
        KV(cut_query)(folded->rows + r * n, (int)n, vf_set1(folded->inverse[r]), r, folded->parts);
}

/* Scores of the tokens begin to end, whose keys are codes. */
static void KV(score_tokens)(const kv_operands *operands, const kv_panel *panel, int begin, int end, float *scores)
{
    const int first = begin / KV_LANES, last = end / KV_LANES;
    const int has_scores = !operands->latent && !kv_bends(&panel->options);
    const vi seen = vi_sub(vi_load(panel->stop), vi_load(panel->start));
    KV(key_products) p = {operands->keys, panel->parts, operands->dim, operands->key_parts, operands->key_starts, operands->key_scales,
                          panel->unit, NULL, has_scores ? panel->m : KV(no_scores),
                          has_scores ? _mm512_cmpeq_epi32_mask(seen, vi_set1(operands->tile)) : 0, operands->error, operands->room};
    KV(folded_panel) *const folded = &KV_IN(operands->room->pass, KV(panel_room))->folded;
    if (operands->num_blocks == 0) KV(score_lanes)(&p, first, last, scores, 0, SETS);
    for (int lane = first, stop; operands->num_blocks && lane < last; lane = stop) {
        for (stop = lane + 1; stop < last && operands->block_of[stop] == operands->block_of[lane];) stop++;
        KV(fold_panel)(operands, panel, operands->block_of[lane], folded);
        p.shift = folded->shift;
        if (operands->folds) p.x = folded->parts, p.unit = folded->unit;
        KV(score_lanes)(&p, lane, stop, scores, 1, SETS);
        if (operands->folds) KV(refine_panel)(&p, folded->rows, folded->inverse, lane, stop, scores);
    }
    if (!operands->folds) KV(refine_panel)(&p, panel->queries, panel->inverse, first, last, scores);
}

/* Adds the products of the rotary part of latent rows, codes, to the scores. */
static void KV(add_rope_scores)(const kv_operands *operands, const kv_panel *panel, int begin, int end, float *scores)
{
    const int first = begin / KV_LANES, last = end / KV_LANES;
    const KV(key_products) p = {operands->rope, panel->rope_parts, operands->rope_dim, operands->rope_parts, operands->rope_starts,
                                operands->rope_scales, panel->rope_unit, NULL, KV(no_scores), 0, operands->rope_error, operands->room};
    float *const rope = KV_IN(operands->room->pass, KV(panel_room))->rope_scores;
    KV(score_lanes)(&p, first, last, rope, 0, SETS);
    KV(refine_panel)(&p, panel->rope_queries, panel->rope_inverse, first, last, rope);
    for (int r = 0; r < KV_ROWS; r++)
        for (int t = r * TILE_TOKENS + begin; t < r * TILE_TOKENS + end; t += W)
            vf_store(scores + t, vf_add(vf_load(scores + t), vf_load(rope + t)));
}
