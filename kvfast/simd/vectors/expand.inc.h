/* Scores and sums of values of packed codes; see packed.h. A tile is expanded to a block of INT8 in the processor's cache,
   which INT8's kernels read; but for keys with channel scales, see keys.inc.h, and codes of 2 and 3 bits where few_bits.inc.h reads
   them. */

/* Replaces codes by levels + 128. Passed by pointer, as compilers differ in how they pass vectors that a tier has no registers
   for. */
static inline __attribute__((always_inline)) void KV(put_levels)(const KV(half_line) *given, const int bits,
                                                                 const uint8_t *table, uint8_t *out)
{
    KV(half_line) codes = *given;
    if (!table) {
        codes = codes << (8 - bits) | (uint32_t)(0x01010101 << (7 - bits));
        memcpy(out, &codes, 32);
        return;
    }
#if W >= 8 /* AVX2: the bits above the low four choose between shuffles of 16 levels; tables of 4 and 8 are padded to 16 */
    const __m256i index = (__m256i)codes;
    const __m256i low = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), index);
    __m256i levels = low;
    if (bits == 5) {
        const __m256i high =
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table + 1)), index);
        levels = _mm256_blendv_epi8(low, high, _mm256_slli_epi16(index, 3));
    }
    _mm256_storeu_si256((__m256i *)out, levels);
#elif KV_ARM64 && W == 4
    const uint8x16x2_t levels = vld1q_u8_x2(table);
    uint8x16_t index[2];
    memcpy(index, &codes, 32);
    for (int i = 0; i < 2; i++)
        vst1q_u8(out + 16 * i, bits == 5 ? vqtbl2q_u8(levels, index[i]) : vqtbl1q_u8(levels.val[0], index[i]));
#else
    uint8_t index[32];
    memcpy(index, &codes, 32);
    for (int i = 0; i < 32; i++) out[i] = table[index[i]];
#endif
}

/* Expands consecutive units to lines of INT8. */
static inline __attribute__((always_inline)) void KV(expand_units)(const uint8_t *unit, int count, const int bits,
                                                                   const uint8_t *table, const char *ahead, uint8_t *out)
{
    for (; count > 0; count--, unit += 32 * bits, ahead += 32 * bits) {
        kv_prefetch_lines(ahead, (32 * bits + 63) / 64, kv_prefetch_level);
        const uint8_t *twos = unit + (bits & 4 ? 128 : 0), *ones = twos + (bits & 2 ? 64 : 0);
        for (int line = 0; line < 4; line++)
            for (int half = 0; half < 2; half++, out += 32) {
                KV(half_line) codes, plane;
                memset(&codes, 0, 32);
                int shift = 0;
                if (bits & 4) {
                    memcpy(&codes, unit + line / 2 * 64 + half * 32, 32);
                    codes = codes >> line % 2 * 4 & 0x0F0F0F0F;
                    shift = 4;
                }
                if (bits & 2) {
                    memcpy(&plane, twos + half * 32, 32);
                    codes |= (plane >> line * 2 & 0x03030303) << shift;
                    shift += 2;
                }
                if (bits & 1) {
                    memcpy(&plane, ones, 32);
                    codes |= (plane >> (line + half * 4) & 0x01010101) << shift;
                }
                KV(put_levels)(&codes, bits, table, out);
            }
    }
}

/* Expands consecutive units of 3 bits to lines of INT8: levels + 128. */
static inline __attribute__((always_inline)) void KV(expand_threes)(const uint8_t *unit, int count, const uint8_t *table,
                                                                    const char *ahead, uint8_t *out)
{
#if W >= 8
    const KV(level_tables) levels = KV(load_levels)(table, 3);
    for (int u = 0; u < count; u++, unit += 96, ahead += 96, out += 256) {
        kv_prefetch_lines(ahead, 2, kv_prefetch_level);
        for (int lane = 0; lane < KV_LANES; lane += W) {
            const KV(dwords) plane = (KV(dwords))vcodes_load(unit + 4 * lane);
            const vcodes nibbles = KV(load_nibbles)(unit + 64, lane);
            KV_FOR4(line, 4,
                    const vcodes codes = KV(line_of)(plane, nibbles, 3, line, &levels);
                    memcpy(out + line * 64 + 4 * lane, &codes, 4 * W););
        }
    }
#else
    for (int u = 0; u < count; u++, unit += 96, ahead += 96, out += 256) {
        kv_prefetch_lines(ahead, u % 2 ? 2 : 1, kv_prefetch_level);
        for (int half = 0; half < 2; half++) {
            KV(half_line) plane, nibbles, codes[4];
            memcpy(&plane, unit + half * 32, 32);
            memcpy(&nibbles, unit + 64, 32);
            nibbles >>= half * 4;
            codes[0] = plane & 0x07070707;
            codes[1] = plane >> 3 & 0x07070707;
            codes[2] = nibbles & 0x07070707;
            codes[3] = (plane >> 6 & 0x03030303) | (nibbles >> 1 & 0x04040404);
            for (int line = 0; line < 4; line++) KV(put_levels)(codes + line, 3, table, out + line * 64 + half * 32);
        }
    }
#endif
}

static void KV(expand)(const kv_side *side, const char *units, int count, const char *ahead, uint8_t *out)
{
    /* shuffles read 16 levels, also of 4 and 8 */
    uint8_t levels[32] = {0};
    const uint8_t *table = kv_packed_table(side), *unit = (const uint8_t *)units;
    if (table) memcpy(levels, table, (size_t)1 << kv_dtypes[side->dtype].bits);
    switch (side->dtype) {
    case KV_INT2:
        if (table) KV(expand_units)(unit, count, 2, levels, ahead, out);
        else KV(expand_units)(unit, count, 2, NULL, ahead, out);
        break;
    case KV_INT3:
        if (table) KV(expand_threes)(unit, count, levels, ahead, out);
        else KV(expand_threes)(unit, count, NULL, ahead, out);
        break;
    case KV_INT5:
        if (table) KV(expand_units)(unit, count, 5, levels, ahead, out);
        else KV(expand_units)(unit, count, 5, NULL, ahead, out);
        break;
    case KV_INT6: KV(expand_units)(unit, count, 6, NULL, ahead, out); break;
    default: KV(expand_units)(unit, count, 7, NULL, ahead, out);
    }
}

/* A tile that was expanded to a block of INT8, with its tokens' scales. There is nothing else. */
typedef struct {
    KV_ALIGNED uint8_t block[KV_TILE * KV_MAX_HEAD_DIM + KV_TILE * sizeof(float)];
    kv_side side;
    kv_tile tile;
    kv_ahead ahead; /* of the block itself: there is nothing to prefetch */
} KV(expanded);

/* Fills in the side and tile that the kernels read it by. */
static void KV(describe_expanded)(const kv_side *side, const kv_tile *tile, int tokens, KV(expanded) *expanded)
{
    expanded->side = *side;
    expanded->side.dtype = KV_INT8;
    expanded->side.family = KV_TILED_CODES;
    expanded->side.block_size = tokens;
    expanded->side.scales = (ptrdiff_t)tokens * side->padded_dim;
    expanded->side.scale_bytes = sizeof(float);
    memset(&expanded->tile, 0, sizeof expanded->tile);
    expanded->tile.base = (const char *)expanded->block;
    expanded->tile.count = tile->count;
    expanded->ahead = kv_nothing_ahead(&expanded->tile);
}

static void KV(expand_tile)(const kv_side *side, const kv_tile *tile, const kv_ahead *ahead, int values,
                            KV(expanded) *expanded)
{
    const int tokens = kv_whole_lanes(tile->count), lanes = side->padded_dim / KV_LANES;
    const ptrdiff_t unit_bytes = 32 * kv_dtypes[side->dtype].bits;
    float *scales = (float *)(expanded->block + tokens * side->padded_dim);
    ptrdiff_t read = 0; /* bytes of the tile read so far; as many bytes ahead are prefetched */
    for (int t = 0, slot = tile->first, block = 0; t < tokens; block++, slot = 0) {
        const char *at = tile->base + tile->at[block];
        const int left = tokens - t, room = side->block_size - slot, here = left < room ? left : room;
        const int units = here / KV_UNIT; /* of the V side, a lane tile; the K side has `lanes` units for every 16 tokens */
        if (values)
            for (int lane = 0; lane < lanes; lane++, read += units * unit_bytes)
                KV(expand)(side, at + (lane * (side->block_size / KV_UNIT) + slot / KV_UNIT) * unit_bytes, units,
                           kv_prefetch_from(ahead, read), expanded->block + (lane * (tokens / KV_UNIT) + t / KV_UNIT) * 256);
        else {
            KV(expand)(side, at + slot / KV_LANES * lanes * unit_bytes, units * lanes, kv_prefetch_from(ahead, read),
                       expanded->block + t * side->padded_dim);
            read += units * lanes * unit_bytes;
        }
        KV(to_bfloat16)(at + side->scales + slot * 2, here, scales + t);
        t += here;
    }
    kv_prefetch_end(ahead);
    KV(describe_expanded)(side, tile, tokens, expanded);
}

/* The same as refine_values_int8. */
static __attribute__((noinline)) void KV(refine_packed_values)(const kv_side *side, const kv_tile *tile, const float *weights,
                                                               int rows, unsigned refined, float *acc, kv_room *room)
{
    const kv_ahead ahead = kv_nothing_ahead(tile);
    KV(expanded) *const values = KV_IN(room->tiles[0], KV(expanded));
    KV(expand_tile)(side, tile, &ahead, 1, values);
    KV(refine_values_int8)(&values->side, &values->tile, weights, rows, refined, acc, room);
}

/* The same as refine_int8. A tile that has no channel scales is refined as a whole. */
static __attribute__((noinline)) void KV(refine_packed_keys)(
    const kv_side *side, const float *rows, const float *inverse, const float *unit, const float *before, unsigned whole, float error,
    int num_rows, const kv_tile *tile, const ptrdiff_t *block, int slot, int lane, int stop, float *scores, kv_room *room)
{
    const kv_ahead ahead = kv_nothing_ahead(tile);
    KV(expanded) *const keys = KV_IN(room->tiles[0], KV(expanded));
    (void)block, (void)slot;
    KV(expand_tile)(side, tile, &ahead, 0, keys);
    KV(refine_int8)(&keys->side, rows, inverse, unit, before, whole, error, num_rows, &keys->tile, keys->tile.at, lane, lane, stop,
                    scores, room);
}

/* Whether codes are read without being expanded. */
static inline int KV(reads_few_bits)(int dtype) { return W >= 8 && KV_FEW_BITS(dtype); }

static void KV(scores_packed)(const kv_side *side, const kv_queries *queries, int num_rows, const kv_tile *tile,
                              const kv_ahead *ahead, float *scores)
{
    if (side->channels)
        KV(scores_integer)(side, queries, num_rows, tile, ahead, scores, KV_INT3, KV_CHANNELS, KV(refine_keys3));
    else if (!KV(reads_few_bits)(side->dtype)) {
        KV(expanded) *const keys = KV_IN(queries->room->tiles[0], KV(expanded));
        KV(expand_tile)(side, tile, ahead, 0, keys);
        KV(scores_int8)(&keys->side, queries, num_rows, &keys->tile, &keys->ahead, scores);
    } else if (side->dtype == KV_INT2)
        KV(scores_integer)(side, queries, num_rows, tile, ahead, scores, KV_INT2, 0, KV(refine_packed_keys));
    else KV(scores_integer)(side, queries, num_rows, tile, ahead, scores, KV_INT3, 0, KV(refine_packed_keys));
}

static void KV(accumulate_packed)(const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile,
                                  const kv_ahead *ahead, float *acc)
{
    if (!KV(reads_few_bits)(side->dtype)) {
        KV(expanded) *const values = KV_IN(state->room->tiles[0], KV(expanded));
        KV(expand_tile)(side, tile, ahead, 1, values);
        KV(accumulate_int8)(&values->side, state, num_rows, &values->tile, &values->ahead, acc);
        return;
    }
    const int gather = tile->first + tile->count > side->block_size;
#define KV_ACCUMULATE_FEW(dtype, gather) \
    KV(accumulate_integer)(side, state, num_rows, tile, ahead, acc, dtype, gather, KV(refine_packed_values))
    if (side->dtype == KV_INT2)
        if (gather) KV_ACCUMULATE_FEW(KV_INT2, 1);
        else KV_ACCUMULATE_FEW(KV_INT2, 0);
    else if (gather) KV_ACCUMULATE_FEW(KV_INT3, 1);
    else KV_ACCUMULATE_FEW(KV_INT3, 0);
#undef KV_ACCUMULATE_FEW
}
