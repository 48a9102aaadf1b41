/* Attention of many query rows in tiles. Panels of 16 query rows read the keys and values of a tile, laid out once as operands
   for all panels. The softmax is corrected once for these tokens.

   Codes, and values of float rows next to codes, are multiplied as integers, products.inc.h. A matrix unit multiplies keys of
   these float rows in bfloat16, tiles_bf16/products.inc.h, and so keys and values of caches of float16 or bfloat16 (`bf16`). */

static inline __attribute__((always_inline)) void KV(attend_panel)(
    const kv_operands *operands, kv_panel *panel, int64_t position, KV(following) *next, const int bf16)
{
    KV(panel_room) *const room = KV_IN(operands->room->pass, KV(panel_room));
    KV(correction) correction;
    float *const scores = room->scores;
    int8_t *const x = room->x;
    int begin, end;
    KV(prefetch_part)(next);
    if (!KV(find_seen)(panel, TILE_DEPTH, &begin, &end)) return;
    KV_SETTLE(panel->words);
#if KV_TILE_UNIT
    if (bf16 || operands->key_bf16_parts) KV(score_bf16)(operands, panel, begin, end, scores, 0);
    else KV(score_tokens)(operands, panel, begin, end, scores);
    if (!bf16 && operands->rope_bf16_parts && !operands->key_bf16_parts) KV(score_bf16)(operands, panel, begin, end, scores, 1);
#else
    KV(score_tokens)(operands, panel, begin, end, scores);
#endif
    if (!bf16 && operands->rope_dim && !operands->rope_bf16_parts) KV(add_rope_scores)(operands, panel, begin, end, scores);
    KV(prefetch_part)(next);
    KV(weigh_tokens)(operands, panel, position, begin, end, scores, x, &correction, bf16);
    KV_SETTLE(x);
    KV(prefetch_part)(next);
#if KV_TILE_UNIT
    if (bf16) KV(add_values_bf16)(operands, panel, begin, end, x, &correction);
    else
#endif
        KV(add_products)(operands, panel, begin, end, x, correction.unit, correction.changed ? correction.rescale : NULL, room->sums);
}

static inline __attribute__((always_inline)) void KV(attend_all)(
    const kv_side *k, const kv_side *v, const kv_tile *next_keys, const kv_tile *next_values, int64_t position,
    kv_operands *operands, kv_panel *panels, int num_panels, const int bf16)
{
    KV(begin_tiles)();
    KV(following) next = {k, v, next_keys, next_values, 0, num_panels * PREFETCHES};
    for (int i = 0; i < num_panels; i++) {
        next.part = i * PREFETCHES;
        KV(attend_panel)(operands, panels + i, position, &next, bf16);
    }
    KV(end_tiles)();
}

/* Loads keys, or the rotary part of latent rows, as bytes of *parts parts or in bfloat16 of *bf16_parts. */
static void KV(load_keys)(const kv_side *side, const kv_tile *tile, kv_room *room, int *parts, int *bf16_parts, int8_t *out,
                          float *scales, int32_t *starts)
{
    (void)starts;
    *bf16_parts = 0;
#if KV_TILE_UNIT
    if (side->family == KV_FLOAT_ROWS && ROW_PARTS == 2) {
        *bf16_parts = KV(load_keys_bf16)(side, tile, room, out);
        return;
    }
#endif
    *parts = KV(load_key_bytes)(side, tile, room, out, scales);
#if !KV_TILE_UNIT
    KV(find_starts)(out, *parts, kv_whole_lanes(tile->count), side->padded_dim, starts);
#endif
}

/* Loads the keys of a tile, and the rotary part of latent rows. */
static void KV(load_all_keys)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,
                              kv_operands *operands)
{
    const int has_rope = v->as_keys && v->padded_dim;
    operands->latent = v->as_keys;
    operands->dim = k->padded_dim;
    operands->value_dim = v->as_keys ? k->padded_dim : v->padded_dim;
    operands->rope_dim = has_rope ? v->padded_dim : 0;
    operands->num_blocks = operands->rope_bf16_parts = 0;
    operands->folds = k->channels != 0;
    operands->error = KV(error_of_unit)(k, k->dtype);
    operands->rope_error = KV(error_of_unit)(v, v->dtype);
    KV(load_keys)(k, keys, operands->room, &operands->key_parts, &operands->key_bf16_parts, operands->keys, operands->key_scales,
                  operands->key_starts);
    if (has_rope)
        KV(load_keys)(v, values, operands->room, &operands->rope_parts, &operands->rope_bf16_parts, operands->rope,
                      operands->rope_scales, operands->rope_starts);
    if (k->means) KV(load_statistics)(k, keys, operands);
}

static void KV(attend_tiles8)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,
                                const kv_tile *next_keys, const kv_tile *next_values, int64_t position,
                                kv_operands *operands, kv_panel *panels, int num_panels)
{
    const kv_side *from = v->as_keys ? k : v;
    KV(load_all_keys)(k, v, keys, values, operands);
    /* Vectors read latent rows as INT8, whose codes are 16 times those of INT4. */
    operands->code_size = v->as_keys && from->dtype == KV_INT4 ? KV_CODE_SIZE(KV_INT8) / 16 : KV_CODE_SIZE(from->dtype);
    if (v->as_keys && k->family != KV_FLOAT_ROWS) KV(transpose_keys)(keys, operands);
    else KV(load_values)(from, v->as_keys ? keys : values, operands);
    KV(attend_all)(k, v, next_keys, next_values, position, operands, panels, num_panels, 0);
}

#if KV_TILE_UNIT
static void KV(attend_tiles_bf16)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,
                              const kv_tile *next_keys, const kv_tile *next_values, int64_t position,
                              kv_operands *operands, kv_panel *panels, int num_panels)
{
    KV(load_all_keys)(k, v, keys, values, operands);
    KV(load_values_bf16)(v->as_keys ? k : v, v->as_keys ? keys : values, operands);
    KV(attend_all)(k, v, next_keys, next_values, position, operands, panels, num_panels, 1);
}
#endif
