/* Keys and values that are stored as codes, as words; see operands.inc.h.

   A word is a code, or its level, less the bias. Queries and weights are the integers of vectors (activations.inc.h): the same
   parts of the same unit, which the words hold whole. So sums are the same integers, and scores, weights and sums of values have the
   bits that vectors give them. Integers do not round, and all else is computed in the same order:
       |sum q k| <= 512 * 32639 * 128 = 2 139 029 504 < 2^31,
       |sum w v| <= 256 * 32639 * 127 = 1 061 160 000 < 2^31.
   Keys with channel scales are multiplied by queries that have these scales, anew for each block. Packed codes are expanded to INT8
   before, and values of latent rows are their keys, transposed. */

/* Writes a line of four signed bytes a lane as two lines of two words. */
static inline __attribute__((always_inline)) void KV(put_word_lines)(vi bytes, int8_t *out)
{
    const vi first = _mm512_set4_epi32(0x0D800C80, 0x09800880, 0x05800480, 0x01800080);
    const vi second = _mm512_set4_epi32(0x0F800E80, 0x0B800A80, 0x07800680, 0x03800280);
    _mm512_store_si512(out, _mm512_srai_epi16(_mm512_shuffle_epi8(bytes, first), 8));
    _mm512_store_si512(out + 64, _mm512_srai_epi16(_mm512_shuffle_epi8(bytes, second), 8));
}

/* Writes lines of codes as lines of words. */
static inline __attribute__((always_inline)) void KV(widen_dtype)(const char *codes, int lines, const int dtype, int8_t *out)
{
    for (const char *end = codes + (ptrdiff_t)lines * 64; codes < end; codes += 64, out += 128) {
        const vcodes stored = vcodes_load(codes);
        KV(put_word_lines)(KV(signed_codes)(stored, dtype), out);
        if (dtype == KV_INT8) continue;
        out += 128;
        KV(put_word_lines)(KV(signed_codes)(vcodes_shift(stored), dtype), out);
    }
}

static inline void KV(widen_codes)(const char *codes, int lines, int dtype, int8_t *out)
{
    if (dtype == KV_INT8) KV(widen_dtype)(codes, lines, KV_INT8, out);
    else if (dtype == KV_INT4) KV(widen_dtype)(codes, lines, KV_INT4, out);
    else KV(widen_dtype)(codes, lines, KV_GAUSS4, out);
}

/* Scales of 16 tokens from a slot on, 0 from the `count`th on. Finite, as a weight of 0 is multiplied with them: a token that nobody
   sees may be anything. */
static inline vf KV(load_token_scales)(const kv_side *side, const char *block, int slot, int count)
{
    const vf scales = KV(load_scales)(block + side->scales, slot, side->dtype);
    const vf finite = vf_min(vf_max(scales, vf_set1(-KV_MAX_FLOAT32)), vf_set1(KV_MAX_FLOAT32));
    return _mm512_maskz_mov_ps((__mmask16)(count < KV_LANES ? (1u << count) - 1 : 0xFFFF), finite);
}

/* A tile of packed codes as INT8. */
static __attribute__((noinline)) void KV(expand_words)(const kv_side *side, const kv_tile *tile, int values, KV(expanded) *expanded)
{
    const kv_ahead ahead = kv_nothing_ahead(tile); /* the panels prefetch what comes next */
    KV(expand_tile)(side, tile, &ahead, values, expanded);
}

static void KV(load_tiled_keys)(const kv_side *side, const kv_tile *tile, kv_operands *operands, KV(word_keys) *keys)
{
    KV_ALIGNED int8_t bytes[KV_MAX_HEAD_DIM * KV_LANES];
    const int n = side->padded_dim, count = kv_whole_lanes(tile->count);
    const ptrdiff_t tile_bytes = KV(key_tile_bytes)(side, side->dtype);
    kv_key_order order;
    int8_t *out = keys->words;
    keys->has_means = side->means != 0;
    keys->channels = side->channels ? operands->channels : NULL;
    keys->error = KV(error_of_unit)(side, side->dtype);
    for (int t = 0, slot = tile->first, block = 0; t < count; t += KV_LANES, out += n * 32) {
        const char *at = tile->base + tile->at[block], *codes = at + slot / KV_LANES * tile_bytes;
        const ptrdiff_t of_block = (ptrdiff_t)block * KV_MAX_HEAD_DIM;
        if (side->means && (t == 0 || slot == 0))
            KV(load_block_statistics)(side, at, keys->means + of_block, operands->channels + of_block);
        keys->block_of[t / KV_LANES] = block;
        if (!side->channels) {
            KV(widen_codes)(codes, n / KV_DEPTHS(side->dtype), side->dtype, out);
            vf_store(keys->units + t, KV(load_token_scales)(side, at, slot, tile->count - t));
        } else {
            const uint16_t *channels = (const uint16_t *)(at + side->channels);
            if (t == 0 || slot == 0) KV(read_key_order)(channels, n, &order);
            if (side->dtype == KV_INT4) KV(widen_keys)(codes, n / KV_UNIT, &order, KV_INT4, KV_KEY_BIAS(KV_INT4), codes, bytes);
            else KV(widen_keys)(codes, n / KV_UNIT, &order, KV_INT3, KV_KEY_BIAS(KV_INT3), codes, bytes);
            for (int line = 0; line < n / 4; line++) KV(put_word_lines)(_mm512_load_si512(bytes + line * 64), out + line * 128);
            vf_store(keys->units + t, vf_set1(1.0f));
        }
        slot += KV_LANES;
        if (slot == side->block_size) slot = 0, block++;
    }
    keys->most_unit = KV(find_most)(keys->units, count);
}

static __attribute__((noinline)) void KV(load_packed_keys)(const kv_side *side, const kv_tile *tile, kv_operands *operands,
                                                           KV(word_keys) *keys)
{
    KV(expanded) *const expanded = KV_IN(operands->room->tiles[0], KV(expanded));
    KV(expand_words)(side, tile, 0, expanded);
    KV(load_tiled_keys)(&expanded->side, &expanded->tile, operands, keys);
}

static void KV(load_key_codes)(const kv_side *side, const kv_tile *tile, kv_operands *operands, KV(word_keys) *keys)
{
    if (side->family == KV_PACKED_CODES && !side->channels) KV(load_packed_keys)(side, tile, operands, keys);
    else KV(load_tiled_keys)(side, tile, operands, keys);
}

static void KV(load_tiled_values)(const kv_side *side, const kv_tile *tile, kv_operands *operands)
{
    const int depth = KV_DEPTHS(side->dtype), lanes = side->padded_dim / KV_LANES;
    const ptrdiff_t lane_bytes = (ptrdiff_t)(side->block_size / depth) * 64;
    for (int t = 0, slot = tile->first, block = 0, here; t < tile->count; t += here, slot = 0, block++) {
        const char *at = tile->base + tile->at[block], *codes = at + slot / depth * 64;
        const int left = tile->count - t, room = side->block_size - slot;
        here = kv_whole_lanes(left < room ? left : room);
        for (int lane = 0; lane < lanes; lane++, codes += lane_bytes)
            KV(widen_codes)(codes, here / depth, side->dtype, operands->values + lane * VALUE_STRIDE + t * 32);
        for (int i = 0; i < here; i += KV_LANES)
            vf_store(operands->value_scales + t + i, KV(load_token_scales)(side, at, slot + i, tile->count - t - i));
    }
    operands->code_size = KV_CODE_SIZE(side->dtype);
    operands->most_weights = INFINITY;
    operands->group = KV_TILE;
}

/* Values that need another tile first. */
static __attribute__((noinline)) void KV(load_changed_values)(const kv_side *side, const kv_tile *tile, int latent,
                                                              kv_operands *operands)
{
    KV(expanded) *const values = KV_IN(operands->room->tiles[1], KV(expanded));
    if (!latent) KV(expand_words)(side, tile, 1, values);
    else if (side->family != KV_PACKED_CODES) KV(transpose_tile)(side, tile, values);
    else {
        const kv_ahead ahead = kv_nothing_ahead(tile);
        KV(transpose_packed)(side, tile, &ahead, operands->room, values);
    }
    KV(load_tiled_values)(&values->side, &values->tile, operands);
}

/* Loads values of codes; `latent`: they are keys, too. */
static void KV(load_value_codes)(const kv_side *side, const kv_tile *tile, int latent, kv_operands *operands)
{
    if (latent || side->family == KV_PACKED_CODES) KV(load_changed_values)(side, tile, latent, operands);
    else KV(load_tiled_values)(side, tile, operands);
}
