/* Attention of many query rows with the matrix unit (AMX). Panels of 16 query rows read the keys and values of KV_MATRIX_TILE
   tokens, which are laid out once as operands for all panels. The softmax is corrected once for every KV_MATRIX_TILE tokens.

   Codes, and values of float rows next to codes, are multiplied as integers, products_int8.inc.h. Keys of these float rows are
   multiplied in bfloat16, products_bfloat16.inc.h, and so are keys and values of caches of float16 or bfloat16 (`halves`). */

/* Tile registers of 16 rows. */
static void KV(configure_tiles)(void)
{
    struct __attribute__((packed)) {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = TILE_DEPTH, config.rows[tile] = KV_ROWS;
    KV_SETTLE(&config);
    _tile_loadconfig(&config);
}

static inline __attribute__((always_inline)) void KV(attend_panel)(
    const kv_operands *operands, kv_panel *panel, int64_t position, KV(following) *next, const int halves)
{
    KV(panel_room) *const room = KV_IN(operands->room->pass, KV(panel_room));
    KV(correction) correction;
    float *const scores = room->scores;
    int8_t *const x = room->x;
    int begin, end;
    KV(prefetch_part)(next);
    if (!KV(find_seen)(panel, TILE_DEPTH, &begin, &end)) return;
    KV_SETTLE(panel->halves);
    if (halves || operands->key_halves) KV(score_halves)(operands, panel, begin, end, scores, 0);
    else KV(score_tokens)(operands, panel, begin, end, scores);
    if (!halves && operands->rope_dim) {
        if (!operands->rope_halves) KV(add_rope_scores)(operands, panel, begin, end, scores);
        else if (!operands->key_halves) KV(score_halves)(operands, panel, begin, end, scores, 1);
    }
    KV(prefetch_part)(next);
    KV(weigh_tokens)(operands, panel, position, begin, end, scores, x, &correction, halves);
    KV_SETTLE(x);
    KV(prefetch_part)(next);
    if (halves) KV(add_value_halves)(operands, panel, begin, end, x, &correction);
    else
        KV(add_products)(operands, panel, begin, end, x, correction.unit, correction.changed ? correction.rescale : NULL, room->sums);
}

static inline __attribute__((always_inline)) void KV(attend_all)(
    const kv_side *k, const kv_side *v, const kv_tile *next_keys, const kv_tile *next_values, int64_t position,
    kv_operands *operands, kv_panel *panels, int num_panels, const int halves)
{
    KV(configure_tiles)();
    KV(following) next = {k, v, next_keys, next_values, 0, num_panels * PREFETCHES};
    for (int i = 0; i < num_panels; i++) {
        next.part = i * PREFETCHES;
        KV(attend_panel)(operands, panels + i, position, &next, halves);
    }
    _tile_release();
}

/* Loads the keys of a tile, and the rotary part of latent rows. */
static void KV(load_all_keys)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,
                              kv_operands *operands)
{
    const int has_rope = v->as_keys && v->padded_dim;
    operands->dim = k->padded_dim;
    operands->value_dim = v->as_keys ? k->padded_dim : v->padded_dim;
    operands->rope_dim = has_rope ? v->padded_dim : 0;
    operands->num_blocks = operands->key_halves = operands->rope_halves = 0;
    operands->has_channels = k->channels != 0;
    operands->error = KV(error_of_unit)(k, k->dtype);
    operands->rope_error = KV(error_of_unit)(v, v->dtype);
    if (k->family == KV_FLOAT_ROWS) operands->key_halves = KV(load_key_halves)(k, keys, operands->room, operands->keys);
    else KV(load_key_lanes)(k, keys, operands->keys, operands->key_scales);
    if (k->means) KV(load_statistics)(k, keys, operands);
    if (has_rope && v->family == KV_FLOAT_ROWS) operands->rope_halves = KV(load_key_halves)(v, values, operands->room, operands->rope);
    else if (has_rope) KV(load_key_lanes)(v, values, operands->rope, operands->rope_scales);
}

static void KV(attend_integers)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,
                                const kv_tile *next_keys, const kv_tile *next_values, int64_t position,
                                kv_operands *operands, kv_panel *panels, int num_panels)
{
    const kv_side *from = v->as_keys ? k : v;
    KV(load_all_keys)(k, v, keys, values, operands);
    operands->code_size = KV_CODE_SIZE(from->dtype);
    if (v->as_keys && k->family != KV_FLOAT_ROWS) KV(transpose_keys)(keys, operands);
    else KV(load_values)(from, v->as_keys ? keys : values, operands);
    KV(attend_all)(k, v, next_keys, next_values, position, operands, panels, num_panels, 0);
}

static void KV(attend_halves)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values,
                              const kv_tile *next_keys, const kv_tile *next_values, int64_t position,
                              kv_operands *operands, kv_panel *panels, int num_panels)
{
    KV(load_all_keys)(k, v, keys, values, operands);
    KV(load_value_halves)(v->as_keys ? k : v, v->as_keys ? keys : values, operands);
    KV(attend_all)(k, v, next_keys, next_values, position, operands, panels, num_panels, 1);
}

/* Multiplies 16 x 16 over 64 depths `steps` times, from registers; see measure.inc.h. */
static double KV(multiply_tiles)(ptrdiff_t steps, float *sink)
{
    KV_ALIGNED int8_t x[TILE_BYTES];
    KV_ALIGNED int32_t sums[KV_ROWS * KV_LANES];
    for (int i = 0; i < TILE_BYTES; i++) x[i] = (int8_t)((float)(i % 100) + *sink);
    KV(configure_tiles)();
    KV_SETTLE(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, x, TILE_DEPTH);
    _tile_loadd(3, x, 64);
    for (ptrdiff_t i = 0; i < steps; i += 2) {
        _tile_dpbssd(0, 2, 3);
        _tile_dpbssd(1, 2, 3);
    }
    _tile_stored(0, sums, 64);
    *sink = (float)sums[0];
    _tile_release();
    return 2.0 * (double)((steps + 1) / 2 * 2) * (KV_ROWS * KV_LANES * TILE_DEPTH);
}
