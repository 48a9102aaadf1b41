/* Transposes codes from rows to lines (see kernels.h). The same for all tiers, with instructions that every CPU of a kind has. */

/* Transposes 4 rows of 4 dwords, `stride` bytes apart: row i becomes dword i of 4 runs of 4, `to_stride` bytes apart. */
static inline void kv_transpose_4x4_dwords(const uint8_t *rows, ptrdiff_t stride, uint8_t *to, ptrdiff_t to_stride)
{
#if KV_SSE2
    const __m128i a = _mm_loadu_si128((const __m128i *)rows), b = _mm_loadu_si128((const __m128i *)(rows + stride));
    const __m128i c = _mm_loadu_si128((const __m128i *)(rows + 2 * stride));
    const __m128i d = _mm_loadu_si128((const __m128i *)(rows + 3 * stride));
    const __m128i ab = _mm_unpacklo_epi32(a, b), ab2 = _mm_unpackhi_epi32(a, b);
    const __m128i cd = _mm_unpacklo_epi32(c, d), cd2 = _mm_unpackhi_epi32(c, d);
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(to + to_stride), _mm_unpackhi_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(to + 2 * to_stride), _mm_unpacklo_epi64(ab2, cd2));
    _mm_storeu_si128((__m128i *)(to + 3 * to_stride), _mm_unpackhi_epi64(ab2, cd2));
#elif KV_ARM64
    const uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(rows)), b = vreinterpretq_u32_u8(vld1q_u8(rows + stride));
    const uint32x4_t c = vreinterpretq_u32_u8(vld1q_u8(rows + 2 * stride));
    const uint32x4_t d = vreinterpretq_u32_u8(vld1q_u8(rows + 3 * stride));
    const uint32x4_t ac = vzip1q_u32(a, c), ac2 = vzip2q_u32(a, c), bd = vzip1q_u32(b, d), bd2 = vzip2q_u32(b, d);
    vst1q_u8(to, vreinterpretq_u8_u32(vzip1q_u32(ac, bd)));
    vst1q_u8(to + to_stride, vreinterpretq_u8_u32(vzip2q_u32(ac, bd)));
    vst1q_u8(to + 2 * to_stride, vreinterpretq_u8_u32(vzip1q_u32(ac2, bd2)));
    vst1q_u8(to + 3 * to_stride, vreinterpretq_u8_u32(vzip2q_u32(ac2, bd2)));
#else
    for (int i = 0; i < 16; i++) memcpy(to + i % 4 * to_stride + i / 4 * 4, rows + i / 4 * stride + i % 4 * 4, 4);
#endif
}

/* Transposes 4 rows of 16 bytes to one line of 16 dwords with a byte of each row. */
static inline void kv_transpose_bytes(const uint8_t *rows, ptrdiff_t stride, uint8_t *line)
{
#if KV_SSE2
    const __m128i a = _mm_loadu_si128((const __m128i *)rows), b = _mm_loadu_si128((const __m128i *)(rows + stride));
    const __m128i c = _mm_loadu_si128((const __m128i *)(rows + 2 * stride));
    const __m128i d = _mm_loadu_si128((const __m128i *)(rows + 3 * stride));
    const __m128i ab = _mm_unpacklo_epi8(a, b), ab2 = _mm_unpackhi_epi8(a, b);
    const __m128i cd = _mm_unpacklo_epi8(c, d), cd2 = _mm_unpackhi_epi8(c, d);
    _mm_storeu_si128((__m128i *)line, _mm_unpacklo_epi16(ab, cd));
    _mm_storeu_si128((__m128i *)(line + 16), _mm_unpackhi_epi16(ab, cd));
    _mm_storeu_si128((__m128i *)(line + 32), _mm_unpacklo_epi16(ab2, cd2));
    _mm_storeu_si128((__m128i *)(line + 48), _mm_unpackhi_epi16(ab2, cd2));
#elif KV_ARM64
    const uint8x16x4_t all = {{vld1q_u8(rows), vld1q_u8(rows + stride), vld1q_u8(rows + 2 * stride), vld1q_u8(rows + 3 * stride)}};
    vst4q_u8(line, all);
#else
    for (int i = 0; i < 64; i++) line[i] = rows[i % 4 * stride + i / 4];
#endif
}

/* Transposes 4 x 4 bytes. */
static inline void kv_transpose_4x4_bytes(const uint8_t *from, uint8_t *to)
{
#if KV_SSE2
    const __m128i x = _mm_loadu_si128((const __m128i *)from);
    const __m128i pairs = _mm_unpacklo_epi8(x, _mm_srli_si128(x, 8)); /* dwords 0 and 2, then 1 and 3 */
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi8(pairs, _mm_srli_si128(pairs, 8)));
#elif KV_ARM64
    static const uint8_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    vst1q_u8(to, vqtbl1q_u8(vld1q_u8(from), vld1q_u8(order)));
#else
    for (int i = 0; i < 16; i++) to[i] = from[i % 4 * 4 + i / 4];
#endif
}

/* Writes 16 codes into the dwords of a line, to the bits `bits` from bit `shift` on. */
static inline void kv_put_column(uint8_t *line, const uint8_t *codes, uint32_t bits, int shift)
{
#if KV_SSE2
    const __m128i zero = _mm_setzero_si128(), all = _mm_loadu_si128((const __m128i *)codes);
    const __m128i low = _mm_unpacklo_epi8(all, zero), high = _mm_unpackhi_epi8(all, zero);
    const __m128i words[4] = {_mm_unpacklo_epi16(low, zero), _mm_unpackhi_epi16(low, zero),
                              _mm_unpacklo_epi16(high, zero), _mm_unpackhi_epi16(high, zero)};
    const __m128i theirs = _mm_set1_epi32((int)(bits << shift)), count = _mm_cvtsi32_si128(shift);
    for (int i = 0; i < 4; i++) {
        __m128i *place = (__m128i *)line + i;
        _mm_storeu_si128(place, _mm_or_si128(_mm_andnot_si128(theirs, _mm_loadu_si128(place)),
                                             _mm_sll_epi32(words[i], count)));
    }
#elif KV_ARM64
    const uint8x16_t all = vld1q_u8(codes);
    const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_high_u8(all);
    const uint32x4_t words[4] = {vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low),
                                 vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)};
    const uint32x4_t theirs = vdupq_n_u32(bits << shift);
    for (int i = 0; i < 4; i++) {
        const uint32x4_t place = vreinterpretq_u32_u8(vld1q_u8(line + 16 * i));
        vst1q_u8(line + 16 * i, vreinterpretq_u8_u32(vbslq_u32(theirs, vshlq_u32(words[i], vdupq_n_s32(shift)), place)));
    }
#else
    kv_dword *dwords = (kv_dword *)line;
    for (int i = 0; i < KV_LANES; i++) dwords[i] = (dwords[i] & ~(bits << shift)) | (uint32_t)codes[i] << shift;
#endif
}
