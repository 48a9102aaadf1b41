/* Keys and values that are stored as codes, as words; see operands.inc.h.

   Without channel scales a word is a code, or its level, less the bias, and its unit is the token's scale: nothing is rounded. So all
   KV_MAX_HEAD_DIM elements are summed up in one set, and the values of a whole tile under one unit of the weights:
       |sum q k| <= 512 * 32767 * 127 = 2 130 641 408 < 2^31,
       |sum w v| <= 128 * 32639 * 127 = 530 580 000 < 2^31.
   The norm of queries is limited only where other keys are next to them: without the limit their rounding is half as large, and
   prompts of a model are faster (bench/studies/bench_model.py).
   Keys with channel scales are rounded to words as float rows are. Packed codes are expanded to INT8 before, and values of latent rows
   are their keys, transposed. */

/* Writes a line of four signed bytes a lane as two lines of two words, and adds the squares of each lane. */
static inline __attribute__((always_inline)) void KV(put_word_lines)(vi bytes, int8_t *out, vacc *squares)
{
    const vi first = _mm512_set4_epi32(0x0D800C80, 0x09800880, 0x05800480, 0x01800080);
    const vi second = _mm512_set4_epi32(0x0F800E80, 0x0B800A80, 0x07800680, 0x03800280);
    const vi a = _mm512_srai_epi16(_mm512_shuffle_epi8(bytes, first), 8), b = _mm512_srai_epi16(_mm512_shuffle_epi8(bytes, second), 8);
    *squares = (vacc)_mm512_dpwssd_epi32(_mm512_dpwssd_epi32((__m512i)*squares, a, a), b, b);
    _mm512_store_si512(out, a);
    _mm512_store_si512(out + 64, b);
}

/* Writes lines of codes as lines of words, and adds their squares: at most 2 * 127^2 for each line of words, of which there are
   2048 at most. */
static inline __attribute__((always_inline)) void KV(widen_dtype)(const char *codes, int lines, const int dtype, int8_t *out,
                                                                  vacc *squares)
{
    for (const char *end = codes + (ptrdiff_t)lines * 64; codes < end; codes += 64, out += 128) {
        const vcodes stored = vcodes_load(codes);
        KV(put_word_lines)(KV(signed_codes)(stored, dtype), out, squares);
        if (dtype == KV_INT8) continue;
        out += 128;
        KV(put_word_lines)(KV(signed_codes)(vcodes_shift(stored), dtype), out, squares);
    }
}

static inline void KV(widen_codes)(const char *codes, int lines, int dtype, int8_t *out, vacc *squares)
{
    if (dtype == KV_INT8) KV(widen_dtype)(codes, lines, KV_INT8, out, squares);
    else if (dtype == KV_INT4) KV(widen_dtype)(codes, lines, KV_INT4, out, squares);
    else KV(widen_dtype)(codes, lines, KV_GAUSS4, out, squares);
}

/* Scales of 16 tokens from a slot on, 0 from the `count`th on. Finite, as a weight of 0 is multiplied with them: a token that nobody
   sees may be anything. */
static inline vf KV(load_token_scales)(const kv_side *side, const char *block, int slot, int count)
{
    const vf scales = KV(load_scales)(block + side->scales, slot, side->dtype);
    const vf finite = vf_min(vf_max(scales, vf_set1(-KV_MAX_FLOAT32)), vf_set1(KV_MAX_FLOAT32));
    return _mm512_maskz_mov_ps((__mmask16)(count < KV_LANES ? (1u << count) - 1 : 0xFFFF), finite);
}

/* The statistics of a block of keys. */
typedef struct {
    kv_key_order order;
    float *scales; /* of the channels, in parts of `unit`: at most 1 */
    float unit;
} KV(key_statistics);

/* Loads them, and the means, which the keys are less. With channel scales these are at the middle of the codes. */
static void KV(load_key_statistics)(const kv_side *side, const char *block, float *means, KV(key_statistics) *statistics)
{
    const uint16_t *channels = (const uint16_t *)(block + side->channels);
    const int n = side->padded_dim;
    KV(to_float16)(block + side->means, n, means);
    if (!side->channels) return;
    const float unit = KV(unit_of)(channels);
    const vf middle = vf_set1(unit * (float)KV_KEY_BIAS(side->dtype));
    statistics->unit = unit * 0x1p14f; /* a scale has 14 bits */
    for (int i = 0; i < n; i += W) {
        const vf scale = KV(load_channel_scales)(channels + i, vf_set1(0x1p-16f));
        vf_store(means + i, vf_fma(scale, middle, vf_load(means + i)));
        vf_store(statistics->scales + i, vf_mul(scale, vf_set1(0x1p-14f)));
    }
    KV(read_key_order)(channels, n, &statistics->order);
}

enum { CODE_ROWS = KV_MATRIX_TILE * 64 }; /* bytes of 64 codes of each token */

/* Rounds 16 keys with channel scales to words. Their codes, less the bias, go to `codes`, (dim / 64, tokens, 64), what is missing of
   the last 64 undefined. `deviations` is for (n, 16) floats. */
static inline __attribute__((always_inline)) void KV(put_channel_lane)(
    const char *stored, int n, const KV(key_statistics) *statistics, const int dtype, float *deviations, int8_t *codes, int8_t *out,
    float *units, float *squares)
{
    KV_ALIGNED int8_t bytes[KV_MAX_HEAD_DIM * KV_LANES];
    KV(widen_keys)(stored, n / KV_UNIT, &statistics->order, dtype, KV_KEY_BIAS(dtype), stored, bytes);
    for (int i = 0; i < n; i += 64) KV(transpose_lines)(bytes + i * KV_LANES, codes + i / 64 * CODE_ROWS);
    vf most = vf_set1(0x1p-60f), peak = vf_set1(0.0f), sum = peak; /* other than 0 they are at least 2^-14 */
    for (int first = 0; first < n; first += KV_WORD_SET) {
        const int stop = first + KV_WORD_SET < n ? first + KV_WORD_SET : n;
        vf square[2] = {vf_set1(0.0f), vf_set1(0.0f)};
        for (int i = first; i < stop; i += 4) {
            const vi line = _mm512_load_si512(bytes + i * KV_LANES);
            KV_FOR4(j, 4,
                const vi code = _mm512_srai_epi32(_mm512_slli_epi32(line, 24 - 8 * j), 24);
                const vf x = vf_mul(vi_to_float(code), vf_set1(statistics->scales[i + j]));
                vf_store(deviations + (i + j) * KV_LANES, x);
                peak = vf_max(peak, vf_abs(x));
                square[j / 2] = vf_fma(x, x, square[j / 2]););
        }
        const vf squares_of_set = vf_add(square[0], square[1]);
        most = vf_max(most, squares_of_set);
        sum = vf_add(sum, squares_of_set);
    }
    /* A word is at most KV_WORD_NORM / sqrt(2). */
    const vf inverse = vf_div(vf_set1(KV_WORD_NORM), _mm512_sqrt_ps(vf_max(most, vf_mul(vf_set1(2.0f), vf_mul(peak, peak)))));
    const vf unit = vf_set1(statistics->unit);
    vf_store(units, vf_div(unit, inverse));
    vf_store(squares, vf_mul(sum, vf_mul(unit, unit)));
    for (int i = 0; i < n; i += 2, out += 64) {
        const vi a = vf_round(vf_mul(vf_load(deviations + i * KV_LANES), inverse));
        const vi b = vf_round(vf_mul(vf_load(deviations + (i + 1) * KV_LANES), inverse));
        _mm512_store_si512(out, _mm512_mask_blend_epi16(0xAAAAAAAA, a, _mm512_slli_epi32(b, 16)));
    }
}

/* A tile of packed codes as INT8. */
static __attribute__((noinline)) void KV(expand_words)(const kv_side *side, const kv_tile *tile, int values, KV(expanded) *expanded)
{
    const kv_ahead ahead = kv_nothing_ahead(tile); /* the panels prefetch what comes next */
    KV(expand_tile)(side, tile, &ahead, values, expanded);
}

static void KV(load_tiled_keys)(const kv_side *side, const kv_tile *tile, kv_operands *operands, KV(word_keys) *keys)
{
    const int n = side->padded_dim, count = kv_whole_lanes(tile->count);
    const ptrdiff_t tile_bytes = KV(key_tile_bytes)(side, side->dtype);
    KV(key_statistics) statistics;
    int8_t *out = keys->words;
    statistics.unit = 0.0f;
    keys->has_means = side->means != 0, keys->has_channels = side->channels != 0, keys->exact = !side->channels;
    keys->codes = operands->codes, keys->channels = operands->channels;
    for (int t = 0, slot = tile->first, block = 0; t < count; t += KV_LANES, out += n * 32) {
        const char *at = tile->base + tile->at[block], *codes = at + slot / KV_LANES * tile_bytes;
        float *units = keys->units + t, *squares = keys->squares + t;
        if (side->means && (t == 0 || slot == 0)) {
            statistics.scales = operands->channels + block * KV_MAX_HEAD_DIM;
            KV(load_key_statistics)(side, at, keys->means + block * KV_MAX_HEAD_DIM, &statistics);
        }
        keys->block_of[t / KV_LANES] = block;
        keys->block_units[block] = statistics.unit;
        if (!side->channels) {
            vacc sum = (vacc)vi_set1(0);
            const vf scales = KV(load_token_scales)(side, at, slot, tile->count - t);
            KV(widen_codes)(codes, n / KV_DEPTHS(side->dtype), side->dtype, out, &sum);
            vf_store(units, scales);
            vf_store(squares, vf_mul(vi_to_float((vi)sum), vf_mul(scales, scales)));
        } else {
            int8_t *rows = operands->codes + t * 64;
            if (side->dtype == KV_INT4) KV(put_channel_lane)(codes, n, &statistics, KV_INT4, operands->rows, rows, out, units, squares);
            else KV(put_channel_lane)(codes, n, &statistics, KV_INT3, operands->rows, rows, out, units, squares);
        }
        slot += KV_LANES;
        if (slot == side->block_size) slot = 0, block++;
    }
    KV(find_most)(keys, count);
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

/* The words of a key, as floats. */
static void KV(load_word_row)(const KV(word_keys) *keys, int token, float *row)
{
    const int n = keys->dim;
    const int8_t *words = keys->words + token / KV_LANES * n * 32 + token % KV_LANES * 4;
    const vi lines = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    const vi first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), second = vi_add(first, vi_set1(8));
    for (int i = 0; i < n; i += 32, words += 1024) {
        const __mmask16 pairs = (__mmask16)(n - i < 32 ? (1u << (n - i) / 2) - 1 : 0xFFFF);
        const vi line = _mm512_mask_i32gather_epi32(vi_set1(0), pairs, lines, words, 4);
        const vf a = vi_to_float(_mm512_srai_epi32(_mm512_slli_epi32(line, 16), 16)), b = vi_to_float(_mm512_srai_epi32(line, 16));
        vf_store(row + i, _mm512_permutex2var_ps(a, first, b));
        if (n - i >= 32) vf_store(row + i + 16, _mm512_permutex2var_ps(a, second, b));
    }
}

static void KV(load_tiled_values)(const kv_side *side, const kv_tile *tile, kv_operands *operands)
{
    const int depth = KV_DEPTHS(side->dtype), lanes = side->padded_dim / KV_LANES;
    const ptrdiff_t lane_bytes = (ptrdiff_t)(side->block_size / depth) * 64;
    vacc squares = (vacc)vi_set1(0);
    for (int t = 0, slot = tile->first, block = 0, here; t < tile->count; t += here, slot = 0, block++) {
        const char *at = tile->base + tile->at[block], *codes = at + slot / depth * 64;
        const int left = tile->count - t, room = side->block_size - slot;
        here = kv_whole_lanes(left < room ? left : room);
        for (int lane = 0; lane < lanes; lane++, codes += lane_bytes)
            KV(widen_codes)(codes, here / depth, side->dtype, operands->values + lane * VALUE_STRIDE + t * 32, &squares);
        for (int i = 0; i < here; i += KV_LANES)
            vf_store(operands->value_scales + t + i, KV(load_token_scales)(side, at, slot + i, tile->count - t - i));
    }
    operands->code_size = KV(size_of_values)((float)vi_hsum((vi)squares), kv_whole_lanes(tile->count) * side->padded_dim);
    operands->usual_size = KV_CODE_SIZE(side->dtype);
    operands->most_weights = KV_MATRIX_TILE * KV_MAX_WEIGHT;
    operands->exact = 1, operands->group = KV_MATRIX_TILE;
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
