/* Multiplies values of INT3 as they are read, where a lane tile is one vector or two; see packed.h. */
#if W >= 8
/* Levels + 128 of INT3 by what the shuffles of a tier read as indices. */
typedef struct { vcodes low, high, apart; } KV(threes);

static inline KV(threes) KV(load_threes)(const uint8_t *table)
{
    const int64_t levels = table ? kv_load64(table) : (int64_t)0xF0D0B09070503010;
#ifdef KV_VBMI
    /* The shuffle reads 6 bits of an index. So tables of 64 take the bits around a code as well, and no mask is needed. */
    const vi low = _mm512_set1_epi64(levels);
    const vi eighths = _mm512_set_epi64(0x0707070707070707, 0x0606060606060606, 0x0505050505050505, 0x0404040404040404,
                                        0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const vi split = _mm512_set4_epi32(0x07060504, 0x07060504, 0x03020100, 0x03020100); /* bits 0, 1 and 3 */
    return (KV(threes)){low, _mm512_permutexvar_epi8(eighths, low), _mm512_permutexvar_epi8(split, low)};
#elif W == 16
    return (KV(threes)){_mm512_set1_epi64(levels), _mm512_set1_epi64(levels), _mm512_set1_epi64(levels)};
#else
    return (KV(threes)){_mm256_set1_epi64x(levels), _mm256_set1_epi64x(levels), _mm256_set1_epi64x(levels)};
#endif
}

/* Levels of line `line` of a unit, from its 64 bytes and its nibbles. */
static inline __attribute__((always_inline)) vcodes KV(line_of_three)(KV(words) plane, vcodes nibbles, const int line,
                                                                      const KV(threes) *levels)
{
#ifdef KV_VBMI
    const vi last = _mm512_ternarylogic_epi32((vi)(plane >> 6), nibbles, _mm512_set1_epi8(3), 0xE4);
    return line == 0   ? _mm512_permutexvar_epi8((vi)plane, levels->low)
           : line == 1 ? _mm512_permutexvar_epi8((vi)plane, levels->high)
           : line == 2 ? _mm512_permutexvar_epi8(nibbles, levels->low)
                       : _mm512_permutexvar_epi8(last, levels->apart);
#else
    const KV(words) high = (KV(words))nibbles;
    const KV(words) codes = line == 0   ? plane & 0x07070707
                            : line == 1 ? plane >> 3 & 0x07070707
                            : line == 2 ? high & 0x07070707
                                        : (plane >> 6 & 0x03030303) | (high >> 1 & 0x04040404);
#if W == 16
    return _mm512_shuffle_epi8(levels->low, (vi)codes);
#else
    return _mm256_shuffle_epi8(levels->low, (vi)codes);
#endif
#endif
}

/* As dot_panel for units of INT3 in whole lane tiles. The sums are bounded as in activations.inc.h: levels are those of INT8. */
static inline __attribute__((always_inline)) void KV(dot_threes)(
    const char *base, const ptrdiff_t *block, ptrdiff_t tile_bytes, int units, const int gather, int block_units,
    const KV(threes) *levels, const int8_t *x, const int rows, const int vectors, const char *ahead,
    vi out[KV_PANEL][4])
{
    const ptrdiff_t read = vectors * W / KV_LANES * 96; /* bytes of a unit of all lane tiles */
    vacc a[KV_PANEL][4], b[KV_PANEL][4];
    KV_FOR4(r, rows, KV_FOR4(v, vectors, a[r][v] = b[r][v] = (vacc)vi_set1(0);););
    const int level = kv_prefetch_level;
    do {
        const char *unit = base + *block++;
        const int here = gather && block_units < units ? block_units : units;
        for (size_t u = 0; u < (size_t)here; u++, unit += 96, ahead += read) {
            KV(words) plane[4];
            kv_prefetch_lines(ahead, (int)(read + 63) / 64, level);
            KV_FOR4(v, vectors,
                    plane[v] = (KV(words))vcodes_load(unit + v * W / KV_LANES * tile_bytes + v * W % KV_LANES * 4););
#define KV_NIBBLES KV(load_nibbles)(unit + v * W / KV_LANES * tile_bytes + 64, v * W % KV_LANES)
#define KV_MULTIPLY(line, codes)                                                                        \
    do {                                                                                                \
        const int8_t *y = x + (line) * (8 * KV_PANEL);                                          \
        vwide wide[4];                                                                                  \
        KV_FOR4(v, vectors, const vcodes now = (vcodes)(codes); wide[v] = vcodes_widen(now););          \
        KV_FOR4(r, rows, KV_FOR4(v, vectors, vacc_dot(a[r][v], b[r][v], wide[v], y + 8 * r););); \
    } while (0)
            KV_MULTIPLY(0, KV(line_of_three)(plane[v], (vcodes)plane[v], 0, levels));
            KV_MULTIPLY(1, KV(line_of_three)(plane[v], (vcodes)plane[v], 1, levels));
            KV_MULTIPLY(2, KV(line_of_three)(plane[v], KV_NIBBLES, 2, levels));
            KV_MULTIPLY(3, KV(line_of_three)(plane[v], KV_NIBBLES, 3, levels));
            x += 4 * 8 * KV_PANEL;
#undef KV_MULTIPLY
#undef KV_NIBBLES
        }
        units -= here;
    } while (gather && units > 0);
    KV_FOR4(r, rows, KV_FOR4(v, vectors, out[r][v] = vacc_total(a[r][v], b[r][v]);););
}
#endif
