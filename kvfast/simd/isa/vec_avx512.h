/* Vector layer, AVX-512, perhaps with VNNI, perhaps with VBMI: 16 floats a register. vec_scalar.h explains the names. */
#define W 16
#define INT_VECTORS 2   /* code vectors per integer quad: 4 rows x 2 parts x 2 = 16 accumulators, 8 without VNNI */
#if KV_FAST && !defined(KV_VNNI)
#define KV_SHORT_CODES /* see vec_avx2.h */
#define INT8_ZERO 0
#else
#define INT8_ZERO 128
#endif
#ifdef KV_VNNI
#define INT_PRODUCTS 8  /* 4 depths x the two parts of an activation */
#else
#define INT_PRODUCTS 4
#endif
#define FLOAT_VECTORS 4 /* value vectors per float quad: 4 rows x 4 = 16 accumulators */
#define FLOAT_TOKENS 4  /* key rows per float quad */

#define vf __m512
#define vi __m512i
#define vf_load(p) _mm512_loadu_ps(p)
#define vf_store(p, x) _mm512_storeu_ps(p, x)
#define vf_set1(x) _mm512_set1_ps(x)
#define vf_add(a, b) _mm512_add_ps(a, b)
#define vf_sub(a, b) _mm512_sub_ps(a, b)
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_div(a, b) _mm512_div_ps(a, b)
#define vf_max(a, b) _mm512_max_ps(a, b)
#define vf_min(a, b) _mm512_min_ps(a, b)
#define vf_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vf_abs(x) _mm512_abs_ps(x)
#define vf_sign_of(x, s) \
    _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x), _mm512_castps_si512(s), \
                                                  _mm512_set1_epi32((int)0x80000000), 0xD8))
#define vf_zero_below(y, x, limit) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, vf_set1(limit), _CMP_NLT_UQ), y)
#define vf_hmax(x) _mm512_reduce_max_ps(x)
#define vf_hsum(x) _mm512_reduce_add_ps(x)
#define vf_round(x) _mm512_cvtps_epi32(x)
#define vf_truncate(x) _mm512_cvttps_epi32(x)
#define vf_bits(x) _mm512_castps_si512(x)
#define vf_lookup8(table, index) _mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(table)))
#define vf_mix_low(a, b) \
    _mm512_permutex2var_ps(a, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), b)
#define vf_mix_high(a, b) \
    _mm512_permutex2var_ps(a, _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31), b)
#define vi_load(p) _mm512_loadu_si512(p)
#define vi_set1(x) _mm512_set1_epi32(x)
#define vi_add(a, b) _mm512_add_epi32(a, b)
#define vi_sub(a, b) _mm512_sub_epi32(a, b)
#define vi_and(a, b) _mm512_and_si512(a, b)
#define vi_max(a, b) _mm512_max_epi32(a, b)
#define vi_count_above(n, a, b) _mm512_mask_add_epi32(n, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), n, _mm512_set1_epi32(1))
#define vi_hmax(x) _mm512_reduce_max_epi32(x)
#define vi_hsum(x) _mm512_reduce_add_epi32(x)
#define vi_to_float(x) _mm512_cvtepi32_ps(x)
#define vi_exponent(n) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23))

#define vf_load_float16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define vf_load_bfloat16(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define vf_store_float16(p, x) \
    _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define vi_store_int8(p, x) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8(x))
#define vi_store_uint8(p, x) vi_store_int8(p, x)
#define vi_load_int8(p) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))

static inline vf KV(vf_hadamard)(vf x)
{
    x = vf_fma(x, vf_load(kv_hadamard[0]), _mm512_permute_ps(x, 0xB1));
    x = vf_fma(x, vf_load(kv_hadamard[1]), _mm512_permute_ps(x, 0x4E));
    x = vf_fma(x, vf_load(kv_hadamard[2]), _mm512_shuffle_f32x4(x, x, 0xB1));
    return vf_fma(x, vf_load(kv_hadamard[3]), _mm512_shuffle_f32x4(x, x, 0x4E));
}

static inline void KV(vf_sum4)(vf a, vf b, vf c, vf d, float *sums)
{
    vf ab = vf_add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vf cd = vf_add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    vf abcd = vf_add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

/* Integer dot products. With VNNI the 16-bit activation is cut into 256 x high + low, both int8; without it codes are
   widened, as in vec_avx2.h. */
#define vcodes __m512i
#define vcodes_load(p) _mm512_loadu_si512(p)
#ifdef KV_SHORT_CODES
#define KV_SIGNED(bytes) _mm512_xor_si512(bytes, _mm512_set1_epi8(-128))
#define vcodes_bytes(c) KV_SIGNED(c)
#else
#define vcodes_bytes(c) (c)
#endif
#define vcodes_low(c) _mm512_and_si512(c, _mm512_set1_epi8(15))
#define vcodes_shift(c) _mm512_srli_epi16(c, 4)
/* A line of INT3 from nibbles of 32 bytes: the low ones, then the high ones, under anything. */
static inline vcodes KV(load_nibbles)(const void *p, int lane)
{
    (void)lane;
    return _mm512_srlv_epi64(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p)),
                             _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0));
}
#define KV_ALL_LEVELS _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)kv_gauss_levels))
#ifdef KV_SHORT_CODES
#define KV_LEVELS KV_SIGNED(KV_ALL_LEVELS)
#else
#define KV_LEVELS KV_ALL_LEVELS
#endif
#ifdef KV_VBMI
#define vcodes_levels(c) _mm512_permutexvar_epi8(c, KV_LEVELS) /* of 64 bytes: 4 times the table, for any upper bits */
#else
#define vcodes_levels(c) _mm512_shuffle_epi8(KV_LEVELS, vcodes_low(c))
#endif
/* Has 32-bit lanes and is not __m512i: gcc 12 copies every accumulator twice per step of the loop if its
   type is not the one that the instruction works on. */
typedef int32_t KV(vacc) __attribute__((vector_size(64)));
#define vacc KV(vacc)
#ifdef KV_VNNI
#define vwide __m512i
#define vcodes_widen(c) (c)
#if KV_FAST
#define KV_ONE_SUM 1
#define vacc_dot(a, b, codes, x) ((a) = (vacc)_mm512_dpbusd_epi32((__m512i)(a), codes, _mm512_set1_epi32(kv_load32(x))))
#define vacc_total(a, b) _mm512_add_epi32((__m512i)(a), (__m512i)(b))
#else
#define vacc_dot(high, low, codes, x)                                                                   \
    do {                                                                                                \
        high = (vacc)_mm512_dpbusd_epi32((__m512i)(high), codes, _mm512_set1_epi32(kv_load32(x)));      \
        low = (vacc)_mm512_dpbusd_epi32((__m512i)(low), codes, _mm512_set1_epi32(kv_load32((x) + 4)));  \
    } while (0)
#define vacc_total(high, low) _mm512_add_epi32(_mm512_slli_epi32((__m512i)(high), 8), (__m512i)(low))
#endif
#elif KV_FAST
#define vacc_total(a, b) ((__m512i)(a))
#define vwide __m512i
#define vcodes_widen(c) (c)
#define KV_PRODUCTS(codes, x) _mm512_maddubs_epi16(codes, _mm512_set1_epi32(kv_load32(x)))
#define vacc_dot(a, b, codes, x) \
    ((a) += (vacc)_mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_set1_epi32(kv_load32(x)), codes), _mm512_set1_epi16(1)))
#define vlines_dot(a, first, x, second, y) \
    ((a) += (vacc)_mm512_madd_epi16(_mm512_add_epi16(KV_PRODUCTS(first, x), KV_PRODUCTS(second, y)), _mm512_set1_epi16(1)))
#else
typedef struct { __m512i even, odd; } KV(vwide); /* depths 0, 2 and 1, 3 of each four */
#define vwide KV(vwide)
#define vcodes_widen(c) ((vwide){_mm512_and_si512(c, _mm512_set1_epi16(255)), _mm512_srli_epi16(c, 8)})
#define vacc_dot(a, b, codes, x)                                                               \
    do {                                                                                       \
        a += (vacc)_mm512_madd_epi16((codes).even, _mm512_set1_epi32(kv_load32(x)));           \
        a += (vacc)_mm512_madd_epi16((codes).odd, _mm512_set1_epi32(kv_load32((x) + 4)));      \
    } while (0)
#define vacc_total(a, b) ((__m512i)(a))
#endif

#if KV_FAST
static inline void KV(put_parts)(int8_t *x, ptrdiff_t index, vi r0, vi r1, vi r2, vi r3)
{
    _mm512_storeu_si512(x + index * 4, _mm512_packs_epi16(_mm512_packs_epi32(r0, r1), _mm512_packs_epi32(r2, r3)));
}
#else
/* 4 depths of KV_QUAD rows in 32 bytes, int16. */
static inline void KV(arrange_words)(vi r0, vi r1, vi r2, vi r3, vi words[2])
{
    const vi r01 = _mm512_packs_epi32(r0, r1), r23 = _mm512_packs_epi32(r2, r3);
    words[0] = _mm512_permutex2var_epi64(r01, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), r23);
    words[1] = _mm512_permutex2var_epi64(r01, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), r23);
}

#ifdef KV_VNNI
/* The high bytes of each 4 words, then their low bytes: word + 128, at most 32767, holds the high byte in its byte 1
   and, with the top bit flipped, the low byte in byte 0. */
static inline vi KV(part_words)(vi words)
{
    const vi gather = _mm512_set4_epi32(0x0E0C0A08, 0x0F0D0B09, 0x06040200, 0x07050301);
    words = _mm512_shuffle_epi8(_mm512_add_epi16(words, _mm512_set1_epi16(128)), gather);
    return _mm512_xor_si512(words, _mm512_set1_epi64(0x8080808000000000));
}
#else
/* Reorders each 4 words to 0, 2, 1, 3, the order of widened codes. */
static inline vi KV(part_words)(vi words)
{
    return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(words, 0xD8), 0xD8);
}
#endif

static inline void KV(put_parts)(int8_t *x, ptrdiff_t index, vi r0, vi r1, vi r2, vi r3)
{
    vi words[2];
    KV(arrange_words)(r0, r1, r2, r3, words);
    _mm512_storeu_si512(x + index * 8, KV(part_words)(words[0]));
    _mm512_storeu_si512(x + index * 8 + 64, KV(part_words)(words[1]));
}
#endif
#define put_parts KV(put_parts)

static inline uint32_t KV(top_bits)(const uint16_t *p)
{
    return _mm256_movepi16_mask(_mm256_loadu_si256((const __m256i *)p));
}
