/* Vector layer, AVX2 with FMA and F16C and perhaps AVX-VNNI: 8 floats a register. vec_scalar.h explains the names. */
#define W 8
#define INT_VECTORS 2   /* 4 rows x 2 = 8 accumulators, and 4 registers of widened codes */
#if KV_FAST && !defined(KV_AVX_VNNI)
#define KV_SHORT_CODES
#define INT8_ZERO 0
#else
#define INT8_ZERO 128
#endif
#define INT_PRODUCTS 4
#define FLOAT_VECTORS 2
#define FLOAT_TOKENS 2

#define vf __m256
#define vi __m256i
#define vf_load(p) _mm256_loadu_ps(p)
#define vf_store(p, x) _mm256_storeu_ps(p, x)
#define vf_set1(x) _mm256_set1_ps(x)
#define vf_add(a, b) _mm256_add_ps(a, b)
#define vf_sub(a, b) _mm256_sub_ps(a, b)
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_div(a, b) _mm256_div_ps(a, b)
#define vf_max(a, b) _mm256_max_ps(a, b)
#define vf_min(a, b) _mm256_min_ps(a, b)
#define vf_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vf_abs(x) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)
#define vf_sign_of(x, s) _mm256_or_ps(x, _mm256_and_ps(_mm256_set1_ps(-0.0f), s))
#define vf_zero_below(y, x, limit) _mm256_and_ps(_mm256_cmp_ps(x, vf_set1(limit), _CMP_NLT_UQ), y)
#define vf_round(x) _mm256_cvtps_epi32(x)
#define vf_truncate(x) _mm256_cvttps_epi32(x)
#define vf_bits(x) _mm256_castps_si256(x)
#define vf_lookup8(table, index) _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index)
#define vf_mix_low(a, b) _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20)
#define vf_mix_high(a, b) _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31)
#define vi_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vi_set1(x) _mm256_set1_epi32(x)
#define vi_add(a, b) _mm256_add_epi32(a, b)
#define vi_sub(a, b) _mm256_sub_epi32(a, b)
#define vi_and(a, b) _mm256_and_si256(a, b)
#define vi_max(a, b) _mm256_max_epi32(a, b)
#define vi_count_above(n, a, b) _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GT_OQ)))
#define vi_to_float(x) _mm256_cvtepi32_ps(x)
#define vi_exponent(n) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23))

#define vf_load_float16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define vf_load_bfloat16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define vf_store_float16(p, x) \
    _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define vi_load_int8(p) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p)))

static inline void KV(vi_store_int8)(int8_t *p, vi x)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
#define vi_store_int8 KV(vi_store_int8)
static inline void KV(vi_store_uint8)(uint8_t *p, vi x)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
#define vi_store_uint8 KV(vi_store_uint8)

static inline float KV(vf_hmax)(vf x)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
static inline float KV(vf_hsum)(vf x)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
static inline int32_t KV(vi_hsum)(vi x)
{
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}
static inline int32_t KV(vi_hmax)(vi x)
{
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}
#define vf_hmax KV(vf_hmax)
#define vf_hsum KV(vf_hsum)
#define vi_hsum KV(vi_hsum)
#define vi_hmax KV(vi_hmax)

static inline vf KV(vf_hadamard)(vf x)
{
    x = vf_fma(x, vf_load(kv_hadamard[0]), _mm256_permute_ps(x, 0xB1));
    x = vf_fma(x, vf_load(kv_hadamard[1]), _mm256_permute_ps(x, 0x4E));
    return vf_fma(x, vf_load(kv_hadamard[2]), _mm256_permute2f128_ps(x, x, 1));
}

static inline void KV(vf_sum4)(vf a, vf b, vf c, vf d, float *sums)
{
    vf abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

/* Integer dot products. maddubs would saturate on 8-bit codes, so codes are widened once for all rows
   and multiplied by the whole 16-bit activation. AVX-VNNI could multiply 8-bit codes, but by each part of an
   activation: as many instructions, with twice the accumulators.

   Activations of one byte (KV_FAST) are multiplied by AVX-VNNI as they are. Elsewhere (KV_SHORT_CODES) maddubs multiplies codes without
   a sign by them if these are short: of lines that are multiplied together, 4 * 15 * 127 = 7620, or with 6 and 3 bits
   2 * (63 + 7) * 127 = 17780 < 2^15. And it multiplies weights, which have no sign, by codes of 8 bits less their bias:
   2 * 127 * 127 = 32258. */
#define vcodes __m256i
#define vcodes_load(p) _mm256_loadu_si256((const __m256i *)(p))
#ifdef KV_SHORT_CODES
#define KV_SIGNED(bytes) _mm256_xor_si256(bytes, _mm256_set1_epi8(-128))
#define vcodes_bytes(c) KV_SIGNED(c)
#else
#define vcodes_bytes(c) (c)
#endif
#define vcodes_low(c) _mm256_and_si256(c, _mm256_set1_epi8(15))
#define vcodes_shift(c) _mm256_srli_epi16(c, 4)
#define vcodes_levels(c) \
    _mm256_shuffle_epi8(KV_LEVELS, vcodes_low(c))
#define KV_ALL_LEVELS _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)kv_gauss_levels))
#ifdef KV_SHORT_CODES
#define KV_LEVELS KV_SIGNED(KV_ALL_LEVELS)
#else
#define KV_LEVELS KV_ALL_LEVELS
#endif
/* Half a line of INT3, from a lane on, from nibbles of 32 bytes: the low ones are the first half, the high ones the other. */
static inline vcodes KV(load_nibbles)(const void *p, int lane)
{
    return lane ? vcodes_shift(vcodes_load(p)) : vcodes_load(p);
}
/* Has 32-bit lanes; see vec_avx512.h. */
typedef int32_t KV(vacc) __attribute__((vector_size(32)));
#define vacc KV(vacc)
#if KV_FAST
#define vwide __m256i
#define vcodes_widen(c) (c)
#ifdef KV_AVX_VNNI
#define vacc_dot(a, b, codes, x) ((a) = (vacc)_mm256_dpbusd_avx_epi32((vi)(a), codes, _mm256_set1_epi32(kv_load32(x))))
#else
#define KV_PRODUCTS(codes, x) _mm256_maddubs_epi16(codes, _mm256_set1_epi32(kv_load32(x)))
#define vacc_dot(a, b, codes, x) \
    ((a) += (vacc)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi32(kv_load32(x)), codes), _mm256_set1_epi16(1)))
#define vlines_dot(a, first, x, second, y) \
    ((a) += (vacc)_mm256_madd_epi16(_mm256_add_epi16(KV_PRODUCTS(first, x), KV_PRODUCTS(second, y)), _mm256_set1_epi16(1)))
#endif
#else
typedef struct { __m256i even, odd; } KV(vwide); /* depths 0, 2 and 1, 3 of each four */
#define vwide KV(vwide)
#define vcodes_widen(c) ((vwide){_mm256_and_si256(c, _mm256_set1_epi16(255)), _mm256_srli_epi16(c, 8)})
#ifdef KV_AVX_VNNI
#define KV_MULTIPLY_ADD(a, codes, words) (a) = (vacc)_mm256_dpwssd_avx_epi32((vi)(a), codes, words)
#else
#define KV_MULTIPLY_ADD(a, codes, words) (a) += (vacc)_mm256_madd_epi16(codes, words)
#endif
#define vacc_dot(a, b, codes, x)                                                   \
    do {                                                                           \
        KV_MULTIPLY_ADD(a, (codes).even, _mm256_set1_epi32(kv_load32(x)));         \
        KV_MULTIPLY_ADD(a, (codes).odd, _mm256_set1_epi32(kv_load32((x) + 4)));    \
        __asm__("" : "+x"(a)); /* keeps this order: gcc would first multiply a whole line, and spill */ \
    } while (0)
#endif
#ifdef KV_AVX_VNNI
#define KV_ONE_SUM 1
#define vacc_total(a, b) vi_add((vi)(a), (vi)(b))
#else
#define vacc_total(a, b) ((vi)(a))
#endif

#if KV_FAST
static inline void KV(put_parts)(int8_t *x, ptrdiff_t index, vi r0, vi r1, vi r2, vi r3)
{
    _mm256_storeu_si256((__m256i *)(x + index * 4), _mm256_packs_epi16(_mm256_packs_epi32(r0, r1), _mm256_packs_epi32(r2, r3)));
}
#else
/* 4 depths of 2 rows in each half: 0, 2, 1, 3, as codes are widened. */
static inline vi KV(order_words)(vi words)
{
    return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xD8), 0xD8);
}

static inline void KV(put_parts)(int8_t *x, ptrdiff_t index, vi r0, vi r1, vi r2, vi r3)
{
    vi r01 = KV(order_words)(_mm256_packs_epi32(r0, r1)), r23 = KV(order_words)(_mm256_packs_epi32(r2, r3));
    _mm256_storeu_si256((__m256i *)(x + index * 8), _mm256_permute2x128_si256(r01, r23, 0x20));
    _mm256_storeu_si256((__m256i *)(x + index * 8 + 32), _mm256_permute2x128_si256(r01, r23, 0x31));
}
#endif
#define put_parts KV(put_parts)

static inline uint32_t KV(top_bits)(const uint16_t *p)
{
    return (uint32_t)_mm_movemask_epi8(
        _mm_packs_epi16(_mm_loadu_si128((const __m128i *)p), _mm_loadu_si128((const __m128i *)(p + 8))));
}
