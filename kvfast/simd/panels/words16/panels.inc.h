/* Attention of many query rows with words; see operands.inc.h. Panels of 16 query rows read the keys and values of a tile, which become
   words once for all of them. The softmax is corrected once for these tokens. */

/* As add_words for the tokens from `begin` on, which have one unit for each row, `lanes` lanes of values, at most 4, and 4 rows. */
static inline __attribute__((always_inline)) void KV(add_square)(const int8_t *values, const KV(word_weights) *w, int begin, int end,
                                                                 const float *unit, int row, const float *rescale, float *acc,
                                                                 const int lanes)
{
    vacc sums[4][4]; /* [lanes][rows] */
    KV_FOR4(lane, 4, KV_FOR4(r, 4, sums[lane][r] = (vacc)vi_set1(0);););
    const int32_t *words = w->words + begin * (KV_ROWS / 2) + row;
    values += begin * 32;
    for (int t = begin; t < end; t += 2, values += 64, words += KV_ROWS) {
        vi weight[4];
        KV_FOR4(r, 4, weight[r] = vi_set1(words[r]););
        KV_FOR4(lane, lanes,
            const vi line = _mm512_load_si512(values + lane * VALUE_STRIDE);
            KV_FOR4(r, 4, sums[lane][r] = (vacc)_mm512_dpwssd_epi32((__m512i)sums[lane][r], line, weight[r]);););
    }
    KV_FOR4(lane, lanes, KV_FOR4(r, 4,
        float *at = acc + (lane * KV_ROWS + row + r) * KV_LANES;
        vf sum = vf_load(at);
        if (rescale) sum = vf_mul(sum, vf_set1(rescale[row + r]));
        vf_store(at, vf_fma(vi_to_float((vi)sums[lane][r]), vf_set1(unit[row + r]), sum));););
}

/* Adds weights times values to the panel's sums, and the sums before times `rescale`, or as they are if it is NULL. */
static void KV(add_words)(const kv_operands *operands, kv_panel *panel, int begin, int end, const KV(word_weights) *w,
                          const float *rescale)
{
    const int dim = operands->value_dim, group = operands->group;
    for (int t = begin, stop; t < end; t = stop, rescale = NULL) {
        stop = (t / group + 1) * group < end ? (t / group + 1) * group : end;
        for (int d = 0, lanes; d < dim; d += lanes * KV_LANES) {
            const int8_t *values = operands->values + d / KV_LANES * VALUE_STRIDE;
            float *acc = panel->acc + d * KV_ROWS;
            lanes = d + 4 * KV_LANES <= dim ? 4 : 1;
            for (int row = 0; row < KV_ROWS; row += 4)
                if (lanes == 4) KV(add_square)(values, w, t, stop, w->unit[t / group], row, rescale, acc, 4);
                else KV(add_square)(values, w, t, stop, w->unit[t / group], row, rescale, acc, 1);
        }
    }
}

/* The rows of a panel that see all tokens of the tile, and those that see some. */
static void KV(sort_rows)(const kv_panel *panel, __mmask16 *all, __mmask16 *some)
{
    const vi start = vi_load(panel->start), stop = vi_load(panel->stop);
    *all = _mm512_cmple_epi32_mask(start, vi_set1(0)) & _mm512_cmpge_epi32_mask(stop, vi_set1(KV_MATRIX_TILE));
    *some = _mm512_cmplt_epi32_mask(start, stop) & ~*all;
}

/* What a panel sees of a tile, and its weights. */
typedef struct {
    int begin, end;       /* tokens that some row sees, in whole lane tiles, or 0 and 0 */
    __mmask16 all, some;  /* the rows that see all of them, and others */
    KV(word_weights) w;
} KV(word_pass);

/* What the task's room holds while a tile is read: its keys for rows that see some of it, and for those that see all, two panels'
   passes, and the scores of a panel whose rows read both kinds of keys. */
typedef struct {
    KV(word_keys) keys[2], rope[2];
    KV(word_pass) passes[2];
    KV(word_scores) others, parts[2];
    KV(word_folded) folded[2];
} KV(word_room);

/* Scores of one panel or two, which may see fewer tokens than begin to end. */
static void KV(score_tile)(const KV(word_tile) *tile, const kv_panel *panels, int count, int begin, int end,
                           KV(word_scores) *const *scores)
{
    KV(word_room) *const room = KV_IN(tile->room->pass, KV(word_room));
    KV(word_scores) *const parts[2] = {&room->parts[0], &room->parts[1]};
    for (int i = 0; i < 2; i++) {
        const KV(word_keys) *keys = i ? tile->rope : tile->keys;
        if (!keys) continue;
        if (keys->family == KV_FLOAT_ROWS) KV(score_rows)(tile, keys, panels, count, begin, end, i ? parts : scores);
        else KV(score_codes)(tile, keys, panels, count, begin, end, i ? parts : scores, room->folded);
    }
    for (int i = 0; i < count && tile->rope; i++) {
        float *at = scores[i]->weights, *part = parts[i]->weights;
        for (int t = begin * KV_ROWS; t < end * KV_ROWS; t += W) vf_store(at + t, vf_add(vf_load(at + t), vf_load(part + t)));
        for (int t = begin; t < end; t += KV_LANES) KV(find_most_scores)(scores[i], t);
    }
}

/* Scores of one panel or two. `tiles` are the keys for rows that see some of the tile, and for those that see all. */
static void KV(score_panels)(const KV(word_tile) tiles[2], const kv_panel *panels, int count,
                             KV(word_pass) *passes)
{
    int mixed = 0, alike = 1;
    for (int i = 0; i < count; i++) {
        KV(word_pass) *pass = passes + i;
        if (!KV(find_seen)(panels + i, KV_LANES, &pass->begin, &pass->end)) pass->begin = pass->end = 0;
        KV(sort_rows)(panels + i, &pass->all, &pass->some);
        mixed |= pass->all && pass->some && (tiles[0].keys != tiles[1].keys || tiles[0].rope != tiles[1].rope);
        alike &= pass->begin < pass->end && !pass->all == !passes[0].all;
    }
    if (count == 2 && alike && !mixed) {
        KV(word_scores) *const scores[2] = {&passes[0].w.scores, &passes[1].w.scores};
        const int begin = passes[0].begin < passes[1].begin ? passes[0].begin : passes[1].begin;
        const int end = passes[0].end > passes[1].end ? passes[0].end : passes[1].end;
        KV(score_tile)(tiles + (passes[0].all != 0), panels, 2, begin, end, scores);
        return;
    }
    for (int i = 0; i < count; i++) {
        const KV(word_pass) *pass = passes + i;
        KV(word_scores) *scores = &passes[i].w.scores;
        if (pass->begin == pass->end) continue;
        KV(score_tile)(tiles + (pass->all != 0), panels + i, 1, pass->begin, pass->end, &scores);
        if (pass->all && pass->some && mixed) {
            KV(word_scores) *const others = &KV_IN(tiles->room->pass, KV(word_room))->others;
            KV(score_tile)(tiles, panels + i, 1, pass->begin, pass->end, &others);
            for (int t = pass->begin * KV_ROWS; t < pass->end * KV_ROWS; t += KV_ROWS)
                vf_store(scores->weights + t,
                         _mm512_mask_mov_ps(vf_load(scores->weights + t), pass->some, vf_load(others->weights + t)));
        }
    }
}

/* Loads one side of keys for both tiles: as they are and less their mean, if they are float rows. */
static inline __attribute__((always_inline)) void KV(load_sides)(
    const kv_side *side, const kv_tile *tile, const int *wanted, float *means, int8_t *words, ptrdiff_t words_bytes,
    kv_operands *operands, KV(word_keys) keys[2], const KV(word_keys) *loaded[2], const int of_codes)
{
    for (int i = 0; i < 2; i++) {
        KV(word_keys) *now = keys + i;
        loaded[i] = now;
        if (!wanted[i]) continue;
        now->family = side->family, now->dim = side->padded_dim, now->dtype = side->dtype;
        if (!of_codes || side->family == KV_FLOAT_ROWS) {
            now->words = words + i * words_bytes, now->means = means + i * KV_MAX_HEAD_DIM;
            KV(load_key_words)(side, tile, i, operands, now);
            continue;
        }
        now->words = words, now->means = means;
        KV(load_key_codes)(side, tile, operands, now);
        loaded[0] = loaded[1] = now;
        return;
    }
}

static inline __attribute__((always_inline)) void KV(attend_words16)(
    const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values, const kv_tile *next_keys,
    const kv_tile *next_values, int64_t position, kv_operands *operands, kv_panel *panels, int num_panels, const int of_codes)
{
    const int has_rope = v->as_keys && v->padded_dim;
    const kv_side *from = v->as_keys ? k : v;
    KV(word_room) *const room = KV_IN(operands->room->pass, KV(word_room));
    const KV(word_keys) *k_loaded[2], *rope_loaded[2] = {NULL, NULL};
    int wanted[2] = {0, 0};
    for (int i = 0; i < num_panels; i++) {
        __mmask16 all, some;
        KV(sort_rows)(panels + i, &all, &some);
        wanted[0] |= some, wanted[1] |= all;
    }
    /* Blocks of codes may have means; latent rows do not. */
    KV(load_sides)(k, keys, wanted, operands->means, operands->keys, KV_MATRIX_TILE * KV_MAX_HEAD_DIM * 2, operands, room->keys,
                   k_loaded, of_codes);
    if (has_rope)
        KV(load_sides)(v, values, wanted, operands->means + 2 * KV_MAX_HEAD_DIM, operands->rope, KV_MATRIX_TILE * KV_MAX_ROPE_DIM * 2,
                       operands, room->rope, rope_loaded, of_codes);
    const KV(word_tile) tiles[2] = {{k_loaded[0], rope_loaded[0], operands->tile, v->as_keys, operands->room},
                                    {k_loaded[1], rope_loaded[1], operands->tile, v->as_keys, operands->room}};
    operands->value_dim = from->padded_dim;
    const kv_tile *from_tile = v->as_keys ? keys : values;
    if (of_codes && from->family != KV_FLOAT_ROWS) KV(load_value_codes)(from, from_tile, v->as_keys, operands);
    else KV(load_value_words)(from, from_tile, operands);
    KV(following) next = {k, v, next_keys, next_values, 0, num_panels * PREFETCHES};
    for (int i = 0, count; i < num_panels; i += count) {
        count = num_panels - i < 2 ? 1 : 2;
        for (int j = 0; j < count; j++) KV(prefetch_part)(&next);
        KV(score_panels)(tiles, panels + i, count, room->passes);
        for (int j = 0; j < count; j++) {
            KV(word_pass) *pass = room->passes + j;
            KV(prefetch_part)(&next);
            if (pass->begin < pass->end) {
                KV(weigh_words)(panels + i + j, operands, pass->all, position, pass->begin, pass->end, &pass->w);
                if (operands->group == KV_TILE) KV(round_weights)(&pass->w, KV_TILE, pass->begin, pass->end, NULL, 0);
                else KV(round_weights)(&pass->w, KV_WORD_GROUP, pass->begin, pass->end, panels[i + j].noise, 1);
            }
            KV(prefetch_part)(&next);
            if (pass->begin < pass->end)
                KV(add_words)(operands, panels + i + j, pass->begin, pass->end, &pass->w, pass->w.changed ? pass->w.rescale : NULL);
        }
    }
}

#define KV_ATTEND(name, of_codes)                                                                                             \
    static void KV(name)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,                      \
                         const kv_tile *next_keys, const kv_tile *next_values, int64_t position, kv_operands *operands,       \
                         kv_panel *panels, int num_panels)                                                                    \
    {                                                                                                                         \
        KV(attend_words16)(k, v, keys, values, next_keys, next_values, position, operands, panels, num_panels, of_codes);     \
    }
KV_ATTEND(attend_words16_rows, 0)
KV_ATTEND(attend_words16_codes, 1)
