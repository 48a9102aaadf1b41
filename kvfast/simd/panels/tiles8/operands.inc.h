/* Lays out keys and values of a tile as operands: lane tiles of 16 lanes by 64 depths, in int8, values in one or
   two parts; see products.inc.h. */

enum {
    TILE_DEPTH = 64,
    TILE_BYTES = KV_ROWS * TILE_DEPTH,
    TILE_TOKENS = KV_TILE, /* the most; of float rows KV_MATRIX_TILE */
    TOKEN_TILES = TILE_TOKENS / TILE_DEPTH,
};

/* Goes before loads of tiles and of their configuration: gcc 12 does not know that these read what `p` points to. */
#define KV_SETTLE(p) __asm__ volatile("" : : "r"(p) : "memory")

/* Splits 64 integers into high and low bytes. */
static inline void KV(put_bytes)(vi a, vi b, vi c, vi d, int8_t *high, int8_t *low)
{
    const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const vi half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
    const vi ab = _mm512_packs_epi32(a, b), cd = _mm512_packs_epi32(c, d);
    const vi highs = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(ab, half), 8),
                                        _mm512_srai_epi16(_mm512_add_epi16(cd, half), 8));
    const vi lows = _mm512_packus_epi16(vi_and(ab, byte), vi_and(cd, byte));
    _mm512_store_si512(high, _mm512_permutexvar_epi32(order, highs));
    _mm512_store_si512(low, _mm512_permutexvar_epi32(order, lows));
}

/* 64 activations: of the fast precision one byte each, else two parts. */
static inline void KV(cut_activations)(vi a, vi b, vi c, vi d, int8_t *high, int8_t *low)
{
#if KV_FAST
    const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    (void)low;
    _mm512_store_si512(high, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d))));
#else
    KV(put_bytes)(a, b, c, d, high, low);
#endif
}

/* The parts of an element of float rows, and what they hold. In a library that reads the caches of others, the fast precision is for
   rows that were codes of at most 8 bits: one part. */
#if KV_FAST && defined(KV_MORE_KERNELS)
enum { ROW_PARTS = 1 };
#define KV_MOST_OF_ROW 127.0f
#define KV_CUT_ROW KV(cut_activations)
#else
enum { ROW_PARTS = 2 };
#define KV_MOST_OF_ROW KV_MAX_WORD
#define KV_CUT_ROW KV(put_bytes)
#endif

/* Cuts a float row into bytes, `tiles` x 64 of each part; returns its scale. */
static float KV(cut_row)(const kv_side *side, const char *row, int tiles, int8_t *high, int8_t *low, ptrdiff_t stride)
{
    const int n = side->padded_dim;
    vf x[KV_MAX_HEAD_DIM / W], largest = vf_set1(0.0f);
    for (int i = 0; i < tiles * 4; i++) {
        x[i] = i * W < n ? KV(load_as)(row, i * W, side->dtype) : vf_set1(0.0f);
        largest = vf_max(largest, vf_abs(x[i]));
    }
    const float peak = vf_hmax(largest);
    const vf inverse = vf_set1(KV_INVERSE_OF(KV_MOST_OF_ROW, peak));
    for (int i = 0; i < tiles; i++, high += stride, low += stride)
        KV_CUT_ROW(vf_round(vf_mul(x[4 * i], inverse)), vf_round(vf_mul(x[4 * i + 1], inverse)),
                   vf_round(vf_mul(x[4 * i + 2], inverse)), vf_round(vf_mul(x[4 * i + 3], inverse)), high, low);
    return peak / KV_MOST_OF_ROW;
}

/* Writes a line of codes as signed bytes: one line, or two for INT4 and GAUSS4. */
static inline int8_t *KV(put_codes)(const char *line, const int dtype, int8_t *out)
{
    const vcodes stored = vcodes_load(line);
    _mm512_store_si512(out, KV(signed_codes)(stored, dtype));
    if (dtype == KV_INT8) return out + 64;
    _mm512_store_si512(out + 64, KV(signed_codes)(vcodes_shift(stored), dtype));
    return out + 128;
}

static inline void KV(put_lines)(const char *codes, int lines, int dtype, int8_t *out)
{
    const char *end = codes + (ptrdiff_t)lines * 64;
    if (dtype == KV_INT8) for (; codes < end; codes += 64) out = KV(put_codes)(codes, KV_INT8, out);
    else if (dtype == KV_INT4) for (; codes < end; codes += 64) out = KV(put_codes)(codes, KV_INT4, out);
    else for (; codes < end; codes += 64) out = KV(put_codes)(codes, KV_GAUSS4, out);
}

/* Loads keys of 16 tokens that are stored as codes: (padded_dim / 64, 16 lines, 64). */
static inline void KV(load_key_lane)(const kv_side *side, const char *block, int slot, int8_t *out, float *scales)
{
    const int lines = side->padded_dim / KV_DEPTHS(side->dtype);
    const char *codes = block + slot / KV_LANES * (ptrdiff_t)lines * 64;
    if (side->channels) { /* INT4: prompts on INT3 are multiplied by vectors */
        const uint16_t *channels = (const uint16_t *)(block + side->channels);
        kv_key_order order;
        KV(read_key_order)(channels, side->padded_dim, &order);
        KV(widen_keys)(codes, side->padded_dim / KV_UNIT, &order, KV_INT4, KV_KEY_BIAS(KV_INT4), codes, out);
        vf_store(scales, vf_set1(1.0f));
    } else {
        KV(put_lines)(codes, lines, side->dtype, out);
        vf_store(scales, KV(load_scales)(block + side->scales, slot, side->dtype));
    }
}

/* Loads values of 64 tokens that are stored as floats, as token rows of bytes: 4 are interleaved in each line. */
static inline void KV(load_value_rows)(const kv_side *side, const char *row, int line, int8_t *out, float *scales)
{
    const int tiles = (side->padded_dim + TILE_DEPTH - 1) / TILE_DEPTH;
    KV_ALIGNED int8_t rows[2][4][KV_MAX_HEAD_DIM];
    for (int t = 0; t < 4; t++, row += side->row_stride)
        scales[t] = (KV_FAST ? 1.0f : 256.0f) * KV(cut_row)(side, row, tiles, rows[0][t], rows[1][t], TILE_DEPTH);
    for (int part = 0; part < ROW_PARTS; part++)
        for (int lane = 0; lane < side->padded_dim; lane += 64) {
            const int8_t *at = rows[part][0] + lane;
            const vi r0 = _mm512_load_si512(at), r1 = _mm512_load_si512(at + KV_MAX_HEAD_DIM);
            const vi r2 = _mm512_load_si512(at + 2 * KV_MAX_HEAD_DIM), r3 = _mm512_load_si512(at + 3 * KV_MAX_HEAD_DIM);
            const vi low_01 = _mm512_unpacklo_epi8(r0, r1), high_01 = _mm512_unpackhi_epi8(r0, r1);
            const vi low_23 = _mm512_unpacklo_epi8(r2, r3), high_23 = _mm512_unpackhi_epi8(r2, r3);
            /* 128-bit lane l of x[i]: dims 16 l + 4 i to 16 l + 4 i + 3 of the four tokens */
            const vi x0 = _mm512_unpacklo_epi16(low_01, low_23), x1 = _mm512_unpackhi_epi16(low_01, low_23);
            const vi x2 = _mm512_unpacklo_epi16(high_01, high_23), x3 = _mm512_unpackhi_epi16(high_01, high_23);
            const vi a = _mm512_shuffle_i32x4(x0, x1, 0x44), b = _mm512_shuffle_i32x4(x0, x1, 0xEE);
            const vi c = _mm512_shuffle_i32x4(x2, x3, 0x44), d = _mm512_shuffle_i32x4(x2, x3, 0xEE);
            const vi transposed[4] = {_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xDD),
                                      _mm512_shuffle_i32x4(b, d, 0x88), _mm512_shuffle_i32x4(b, d, 0xDD)};
            for (int i = 0; i < 4 && lane + 16 * i < side->padded_dim; i++)
                _mm512_store_si512(out + ((lane / 16 + i) * ROW_PARTS + part) * (TOKEN_TILES * TILE_BYTES) + 64 * line,
                                   transposed[i]);
        }
}

/* Loads the lane tiles of a tile's keys, one after the other; missing tokens get scale 0. */
static void KV(load_key_lanes)(const kv_side *side, const kv_tile *tile, int8_t *out, float *scales)
{
    const int tiles = (side->padded_dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const ptrdiff_t *block = tile->at;
    for (int t = 0, slot = tile->first; t < tile->count; t += KV_LANES, out += tiles * TILE_BYTES) {
        KV(load_key_lane)(side, tile->base + *block, slot, out, scales + t);
        slot += KV_LANES;
        if (slot == side->block_size) slot = 0, block++;
    }
    for (int t = kv_whole_lanes(tile->count); t < TILE_TOKENS; t += KV_LANES) vf_store(scales + t, vf_set1(0.0f));
}

/* Loads keys, codes of one part or float rows, (16 tokens, parts, padded_dim / 64, 16 lines, 64); returns the number of parts. */
static int KV(load_key_bytes)(const kv_side *side, const kv_tile *tile, kv_room *room, int8_t *out, float *scales)
{
    typedef struct { KV_ALIGNED int8_t lines[2][KV_MAX_HEAD_DIM / TILE_DEPTH][TILE_BYTES]; } pass;
    int8_t(*const lines)[KV_MAX_HEAD_DIM / TILE_DEPTH][TILE_BYTES] = KV_IN(room->pass, pass)->lines;
    const int tiles = (side->padded_dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const char *rows[KV_MATRIX_TILE];
    if (side->family != KV_FLOAT_ROWS) {
        KV(load_key_lanes)(side, tile, out, scales);
        return 1;
    }
    const int count = KV(find_rows)(side, tile, KV_LANES, rows);
    for (int token = 0; token < count; token += KV_LANES) {
        for (int t = 0; t < KV_LANES; t++)
            scales[token + t] = KV(cut_row)(side, rows[token + t], tiles, lines[0][0] + 64 * t, lines[1][0] + 64 * t, TILE_BYTES);
        for (int part = 0; part < ROW_PARTS; part++)
            for (int i = 0; i < tiles; i++, out += TILE_BYTES) KV(transpose_lines)(lines[part][i], out);
    }
    return ROW_PARTS;
}

/* Loads the statistics of the tile's blocks. */
static void KV(load_statistics)(const kv_side *side, const kv_tile *tile, kv_operands *operands)
{
    const ptrdiff_t *block = tile->at;
    int i = -1;
    for (int t = 0, slot = tile->first; t < TILE_TOKENS; t += KV_LANES) {
        if (t < tile->count && (t == 0 || slot == 0)) {
            const char *at = tile->base + *block;
            i++;
            KV(load_block_statistics)(side, at, operands->means + i * KV_MAX_HEAD_DIM, operands->channels + i * KV_MAX_HEAD_DIM);
        }
        operands->block_of[t / KV_LANES] = i;
        slot += KV_LANES;
        if (slot == side->block_size) slot = 0, block++;
    }
    operands->num_blocks = i + 1;
}

/* Makes the values of latent rows from the keys just loaded, which are codes of one part. */
static void KV(transpose_keys)(const kv_tile *tile, kv_operands *operands)
{
    const int tiles = (operands->dim + TILE_DEPTH - 1) / TILE_DEPTH;
    const int tokens = kv_whole_lanes(tile->count);
    operands->value_parts = 1;
    for (int d = 0; d < operands->dim; d += KV_LANES)
        for (int t = 0; t < tokens; t += KV_LANES)
            KV(transpose_square)(operands->keys + t / KV_LANES * tiles * TILE_BYTES + d * KV_LANES,
                                 operands->values + d / KV_LANES * (TOKEN_TILES * TILE_BYTES) + t * KV_LANES);
    for (int t = 0; t < TILE_TOKENS; t++) operands->value_scales[t] = t < tile->count ? operands->key_scales[t] : 0.0f;
}

/* Loads values: (padded_dim / 16, parts, TOKEN_TILES, 16 lines, 64). Tokens beyond the count get scale 0. */
static void KV(load_values)(const kv_side *side, const kv_tile *tile, kv_operands *operands)
{
    const int depth = KV_DEPTHS(side->dtype);
    const ptrdiff_t lane_bytes = (ptrdiff_t)(side->block_size / depth) * 64;
    const ptrdiff_t *block = tile->at;
    operands->value_parts = side->family == KV_FLOAT_ROWS ? ROW_PARTS : 1;
    const ptrdiff_t stride = operands->value_parts * (TOKEN_TILES * TILE_BYTES);
    for (int t = 0, slot = tile->first; t < tile->count; block++) {
        const char *at = tile->base + *block;
        const int left = tile->count - t, room = side->block_size - slot;
        const int here = kv_whole_lanes(left < room ? left : room);
        if (side->family == KV_FLOAT_ROWS) {
            for (int i = 0; i < here; i += 4)
                KV(load_value_rows)(side, at + (slot + i) * side->row_stride, (t + i) / 4, operands->values,
                                    operands->value_scales + t + i);
        } else {
            const char *codes = at + slot / depth * 64;
            for (int lane = 0; lane < side->padded_dim / 16; lane++, codes += lane_bytes)
                KV(put_lines)(codes, here / depth, side->dtype, operands->values + lane * stride + t * 16);
            for (int i = 0; i < here; i += KV_LANES)
                vf_store(operands->value_scales + t + i, KV(load_scales)(at + side->scales, slot + i, side->dtype));
        }
        t += here;
        slot = 0;
    }
    for (int t = tile->count; t < TILE_TOKENS; t++) operands->value_scales[t] = 0.0f;
}

