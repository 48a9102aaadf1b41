/* Multiplies keys with channel scales as they are read; see keys.h. */

#if W == 1
typedef uint32_t KV(dwords);
#else
typedef uint32_t KV(dwords) __attribute__((vector_size(4 * W)));
#endif

#if W < 8
/* Dwords of nibbles from one of 16 lanes on: the low ones are those of the first 8, the high ones of the others. */
static inline vcodes KV(load_nibbles)(const char *p, int lane)
{
    const vcodes nibbles = vcodes_load(p + lane % 8 * 4);
    return lane < 8 ? nibbles : vcodes_shift(nibbles);
}
#endif

/* As kv_read_key_order, without branches: each block of keys needs it. */
static inline void KV(read_key_order)(const uint16_t *channels, int padded_dim, kv_key_order *order)
{
#if W == 16
    const vi flag = _mm512_set1_epi16(KV_KEY_FLAG), lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int lines = padded_dim / 4;
    uint32_t sets[3][(KV_MAX_HEAD_DIM / 4 + 31) / 32]; /* wide, even and narrow ones of 32 lines each */
    for (int i = 0; i < lines; i += 32) {
        const __mmask32 there = 0xFFFFFFFF >> (lines - i < 32 ? 32 - (lines - i) : 0);
        const uint32_t wide = _mm512_test_epi16_mask(_mm512_maskz_loadu_epi16(there, channels + i), flag);
        const uint32_t narrow = _mm512_test_epi16_mask(_mm512_maskz_loadu_epi16(there, channels + lines + i), flag) & ~wide;
        sets[0][i / 32] = wide, sets[1][i / 32] = there & ~(wide | narrow), sets[2][i / 32] = narrow;
    }
    uint8_t *next = order->lines;
    for (int width = 0; width < 3; width++)
        for (int i = 0; i < lines; i += 16) {
            const uint32_t set = sets[width][i / 32] >> i % 32 & 0xFFFF;
            const vi found = _mm512_maskz_compress_epi32((__mmask16)set, vi_add(lanes, vi_set1(i)));
            _mm_storeu_si128((__m128i *)next, _mm512_cvtepi32_epi8(found));
            next += __builtin_popcount(set);
        }
    kv_cut_key_order(channels, padded_dim, order);
#else
    kv_read_key_order(channels, padded_dim, order);
#endif
}

/* Each byte shifted right by `shift`, or left if that is negative, and of it the bits of `mask`. */
#define KV_BITS(dword, shift, mask) (((shift) < 0 ? (dword) << -(shift) : (dword) >> (shift)) & (uint32_t)(0x01010101 * (mask)))

/* Dwords shifted left by `bits`, which is not constant. */
#if W == 16
#define KV_SHIFTED(dword, bits) ((KV(dwords))_mm512_sllv_epi32((vi)(dword), vi_set1((int)(bits))))
#else
#define KV_SHIFTED(dword, bits) ((dword) << (bits))
#endif

#if W == 16
#define KV_SHIFTED_DOWN(dword, bits) ((KV(dwords))_mm512_srlv_epi32((vi)(dword), vi_set1((int)(bits))))
#else
#define KV_SHIFTED_DOWN(dword, bits) ((dword) >> (bits))
#endif

/* Calls use(line, codes, line, codes) for each two of the four lines of unit u: `low` is a dword of its first 64 bytes, `high` of
   INT4 one of the second, of INT3 one of the nibbles. With `own_bits` codes have as many bits as their line. */
#define KV_EACH_KEY_LINES(dtype, own_bits, order, u, low, high, use)                                                            \
    do {                                                                                                                        \
        if (own_bits) {                                                                                                         \
            const kv_key_bytes *shared = kv_key_shares + order->more[u];                                                        \
            use(order->even[2 * u], (low) >> 4 & 0x0F0F0F0F, order->even[2 * u + 1], (low) & 0x0F0F0F0F);                       \
            use(order->wide[u], KV_SHIFTED_DOWN((high) & shared->wide, 8 - shared->shift), order->narrow[u],                    \
                (high) & ~shared->wide);                                                                                        \
        } else if (dtype == KV_INT4) {                                                                                          \
            const kv_key_bytes *shared = kv_key_shares + order->more[u];                                                        \
            use(order->even[2 * u], (low) & 0xF0F0F0F0, order->even[2 * u + 1], (low) << 4 & 0xF0F0F0F0);                       \
            use(order->wide[u], (high) & shared->wide, order->narrow[u], KV_SHIFTED(high, shared->shift) & shared->narrow);     \
        } else {                                                                                                                \
            use(order->even[2 * u], KV_BITS(low, -1, 14), order->even[2 * u + 1], KV_BITS(low, 2, 14));                         \
            use(order->narrow[u], KV_BITS(low, 4, 12), order->wide[u], KV_BITS(high, 0, 15));                                   \
        }                                                                                                                       \
    } while (0)

/* As dot_lines for (INT_VECTORS or 1) x W tokens from one of a lane tile on, `first`, that begins at `unit`. The sums are bounded by
   128 * 32639 * 512 = 2 139 029 504 < 2^31, as codes of INT4 less their bias are at least -128. */
static inline __attribute__((always_inline)) void KV(dot_key_units)(
    const char *unit, int first, ptrdiff_t tile_bytes, int units, const kv_key_order *order, const int dtype, const int8_t *x,
    const int rows, const int vectors, const char *ahead, const int level, vi out[KV_QUAD][4])
{
    const int unit_bytes = 32 * kv_dtypes[dtype].bits, tiles = (vectors * W + KV_LANES - 1) / KV_LANES;
    vacc a[KV_QUAD][4], b[KV_QUAD][4];
    KV_FOR4(r, rows, KV_FOR4(v, vectors, a[r][v] = b[r][v] = (vacc)vi_set1(0);););
    for (size_t u = 0; u < (size_t)units; u++, unit += unit_bytes, ahead += tiles * unit_bytes) {
        KV(dwords) low[4], high[4];
        kv_prefetch_lines(ahead, (tiles * unit_bytes + 63) / 64, level);
        KV_FOR4(v, vectors,
            const int lane = v * W % KV_LANES + (vectors * W < KV_LANES ? first : 0);
            const char *at = unit + v * W / KV_LANES * tile_bytes;
            low[v] = (KV(dwords))vcodes_load(at + 4 * lane);
            high[v] = dtype == KV_INT4 ? (KV(dwords))vcodes_load(at + 64 + 4 * lane) : (KV(dwords))KV(load_nibbles)(at + 64, lane););
#define KV_BYTES(codes) (dtype == KV_INT4 && !KV_OWN_BITS(dtype) ? vcodes_bytes((vcodes)(codes)) : (vcodes)(codes))
#ifdef vpair /* the activations are in this order, see channel_at */
#define KV_MULTIPLY(line, codes, other, more)                     \
    do {                                                          \
        KV_MULTIPLY_LINES(KV_BYTES(codes), x, KV_BYTES(more), x); \
        x += 2 * KV_QUAD_BYTES;                                   \
    } while (0)
#else
#define KV_MULTIPLY(line, codes, other, more)                                              \
    KV_MULTIPLY_LINES(KV_BYTES(codes), x + (size_t)(line) * KV_QUAD_BYTES, KV_BYTES(more), \
                      x + (size_t)(other) * KV_QUAD_BYTES)
#endif
        KV_EACH_KEY_LINES(dtype, KV_OWN_BITS(dtype), order, u, low[v], high[v], KV_MULTIPLY);
#undef KV_MULTIPLY
#undef KV_BYTES
    }
    KV_FOR4(r, rows, KV_FOR4(v, vectors, out[r][v] = KV_TOTAL(a[r][v], b[r][v]);););
}

/* The loop is there for each level, as in dot_quad. */
static inline __attribute__((always_inline)) void KV(dot_keys)(
    const char *unit, int first, ptrdiff_t tile_bytes, int units, const kv_key_order *order, const int dtype, const int8_t *x,
    const int rows, const int vectors, const char *ahead, vi out[KV_QUAD][4])
{
#define KV_LOOP(level) KV(dot_key_units)(unit, first, tile_bytes, units, order, dtype, x, rows, vectors, ahead, level, out);
    KV_EACH_LEVEL(KV_LOOP)
#undef KV_LOOP
}
