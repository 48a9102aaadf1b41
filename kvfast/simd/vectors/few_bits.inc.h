/* Multiplies codes of 2 and 3 bits as they are read, where a lane tile is one vector or two; see packed.h. */
#if W >= 8
/* Levels + 128 by what the shuffles of a tier read as indices. */
typedef struct { vcodes first, second, third; } KV(level_tables);

static inline __attribute__((always_inline)) KV(level_tables) KV(load_levels)(const uint8_t *table, const int bits)
{
    const int64_t levels = bits == 3 ? (table ? kv_load64(table) : (int64_t)0xF0D0B09070503010)
                                     : (int64_t)((table ? (uint32_t)kv_load32(table) : 0xE0A06020) * 0x100000001ull);
#ifdef KV_VBMI
    /* The shuffle reads 6 bits of an index. So tables of 64 take the bits around a code as well, and no mask is needed. */
    const vi all = _mm512_set1_epi64(levels);
    const vi fours = _mm512_set4_epi32(0x03030303, 0x02020202, 0x01010101, 0); /* places 0 to 3, four times each, and so on */
    const vi eights = _mm512_set_epi64(0x0707070707070707, 0x0606060606060606, 0x0505050505050505, 0x0404040404040404,
                                       0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const vi split = _mm512_set4_epi32(0x07060504, 0x07060504, 0x03020100, 0x03020100); /* bits 0, 1 and 3 */
    if (bits == 2)
        return (KV(level_tables)){all, _mm512_permutexvar_epi8(fours, all),
                                  _mm512_permutexvar_epi8(_mm512_and_si512(_mm512_srli_epi16(eights, 1), _mm512_set1_epi8(3)), all)};
    return (KV(level_tables)){all, _mm512_permutexvar_epi8(eights, all), _mm512_permutexvar_epi8(split, all)};
#elif W == 16
    return (KV(level_tables)){_mm512_set1_epi64(levels), _mm512_set1_epi64(levels), _mm512_set1_epi64(levels)};
#else
    return (KV(level_tables)){_mm256_set1_epi64x(levels), _mm256_set1_epi64x(levels), _mm256_set1_epi64x(levels)};
#endif
}

/* Levels of line `line` of a unit, from its 64 bytes and, of 3 bits, its nibbles. */
static inline __attribute__((always_inline)) vcodes KV(line_of)(KV(dwords) plane, vcodes nibbles, const int bits, const int line,
                                                                const KV(level_tables) *levels)
{
#ifdef KV_VBMI
    if (bits == 2)
        return _mm512_permutexvar_epi8(line < 3 ? (vi)plane : _mm512_srli_epi16((vi)plane, 2),
                                       line == 0 ? levels->first : line == 1 ? levels->second : levels->third);
    const vi last = _mm512_ternarylogic_epi32((vi)(plane >> 6), nibbles, _mm512_set1_epi8(3), 0xE4);
    return line == 0   ? _mm512_permutexvar_epi8((vi)plane, levels->first)
           : line == 1 ? _mm512_permutexvar_epi8((vi)plane, levels->second)
           : line == 2 ? _mm512_permutexvar_epi8(nibbles, levels->first)
                       : _mm512_permutexvar_epi8(last, levels->third);
#else
    const KV(dwords) high = (KV(dwords))nibbles;
    const KV(dwords) codes = bits == 2   ? plane >> 2 * line & 0x03030303
                            : line == 0 ? plane & 0x07070707
                            : line == 1 ? plane >> 3 & 0x07070707
                            : line == 2 ? high & 0x07070707
                                        : (plane >> 6 & 0x03030303) | (high >> 1 & 0x04040404);
#if W == 16
    return _mm512_shuffle_epi8(levels->first, (vi)codes);
#else
    return _mm256_shuffle_epi8(levels->first, (vi)codes);
#endif
#endif
}

/* As dot_lines for units of whole lane tiles. The sums are bounded as in activations.inc.h: levels are those of INT8. */
static inline __attribute__((always_inline)) void KV(dot_unit_lines)(
    const char *base, const ptrdiff_t *block, ptrdiff_t tile_bytes, int units, const int gather, int block_units, const int bits,
    const KV(level_tables) *levels, const int8_t *x, const int rows, const int vectors, const char *ahead,
    const int level, vi out[KV_QUAD][4])
{
    const ptrdiff_t unit_bytes = 32 * bits, read = vectors * W / KV_LANES * unit_bytes; /* of all lane tiles */
    vacc a[KV_QUAD][4], b[KV_QUAD][4];
    KV_FOR4(r, rows, KV_FOR4(v, vectors, a[r][v] = b[r][v] = (vacc)vi_set1(0);););
    do {
        const char *unit = base + *block++;
        const int here = gather && block_units < units ? block_units : units;
        for (size_t u = 0; u < (size_t)here; u++, unit += unit_bytes, ahead += read) {
            KV(dwords) plane[4];
            kv_prefetch_lines(ahead, (int)(read + 63) / 64, level);
            KV_FOR4(v, vectors,
                    plane[v] = (KV(dwords))vcodes_load(unit + v * W / KV_LANES * tile_bytes + v * W % KV_LANES * 4););
#define KV_NIBBLES (bits == 3 ? KV(load_nibbles)(unit + v * W / KV_LANES * tile_bytes + 64, v * W % KV_LANES) : (vcodes)plane[v])
#define KV_MULTIPLY(line, nibbles)                                                                          \
    do {                                                                                                    \
        const int8_t *y = x + (line) * KV_QUAD_BYTES;                                                       \
        vwide wide[4];                                                                                      \
        KV_FOR4(v, vectors,                                                                                 \
            const vcodes now = KV(line_of)(plane[v], nibbles, bits, line, levels);                          \
            wide[v] = vcodes_widen(now););                                                                  \
        KV_FOR4(r, rows, KV_FOR4(v, vectors, vacc_dot(a[r][v], b[r][v], wide[v], y + 4 * KV_PARTS * r););); \
    } while (0)
            KV_MULTIPLY(0, (vcodes)plane[v]);
            KV_MULTIPLY(1, (vcodes)plane[v]);
            KV_MULTIPLY(2, KV_NIBBLES);
            KV_MULTIPLY(3, KV_NIBBLES);
            x += 4 * KV_QUAD_BYTES;
#undef KV_MULTIPLY
#undef KV_NIBBLES
        }
        units -= here;
    } while (gather && units > 0);
    KV_FOR4(r, rows, KV_FOR4(v, vectors, out[r][v] = vacc_total(a[r][v], b[r][v]);););
}

/* The loop is there for each level, as in dot_quad. */
static inline __attribute__((always_inline)) void KV(dot_units)(
    const char *base, const ptrdiff_t *block, ptrdiff_t tile_bytes, int units, const int gather, int block_units, const int bits,
    const KV(level_tables) *levels, const int8_t *x, const int rows, const int vectors, const char *ahead, vi out[KV_QUAD][4])
{
#define KV_LOOP(level) \
    KV(dot_unit_lines)(base, block, tile_bytes, units, gather, block_units, bits, levels, x, rows, vectors, ahead, level, out);
    KV_EACH_LEVEL(KV_LOOP)
#undef KV_LOOP
}
#endif
