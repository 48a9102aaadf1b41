/* Vector layer, SSE2, which every x86-64 has: 4 floats a register. vec_scalar.h explains the names. */
#define W 4
#define INT_VECTORS 2
#define INT8_ZERO 128
#define INT_PRODUCTS 4
#define FLOAT_VECTORS 2
#define FLOAT_TOKENS 2

#define vf __m128
#define vi __m128i
#define vf_load(p) _mm_loadu_ps(p)
#define vf_store(p, x) _mm_storeu_ps(p, x)
#define vf_set1(x) _mm_set1_ps(x)
#define vf_add(a, b) _mm_add_ps(a, b)
#define vf_sub(a, b) _mm_sub_ps(a, b)
#define vf_mul(a, b) _mm_mul_ps(a, b)
#define vf_div(a, b) _mm_div_ps(a, b)
#define vf_max(a, b) _mm_max_ps(a, b)
#define vf_min(a, b) _mm_min_ps(a, b)
#define vf_fma(a, b, c) _mm_add_ps(_mm_mul_ps(a, b), c)
#define vf_abs(x) _mm_andnot_ps(_mm_set1_ps(-0.0f), x)
#define vf_sign_of(x, s) _mm_or_ps(x, _mm_and_ps(_mm_set1_ps(-0.0f), s))
#define vf_zero_below(y, x, limit) _mm_and_ps(_mm_cmpnlt_ps(x, vf_set1(limit)), y)
#define vf_round(x) _mm_cvtps_epi32(x)
#define vf_truncate(x) _mm_cvttps_epi32(x)
#define vf_bits(x) _mm_castps_si128(x)
#define vf_mix_low(a, b) _mm_unpacklo_ps(a, b)
#define vf_mix_high(a, b) _mm_unpackhi_ps(a, b)
#define vi_load(p) _mm_loadu_si128((const __m128i *)(p))
#define vi_set1(x) _mm_set1_epi32(x)
#define vi_add(a, b) _mm_add_epi32(a, b)
#define vi_sub(a, b) _mm_sub_epi32(a, b)
#define vi_and(a, b) _mm_and_si128(a, b)
#define vi_count_above(n, a, b) _mm_sub_epi32(n, _mm_castps_si128(_mm_cmpgt_ps(a, b)))
#define vi_to_float(x) _mm_cvtepi32_ps(x)
#define vi_exponent(n) _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(n, _mm_set1_epi32(127)), 23))

/* A float16 shifted into the exponent and mantissa of a float32, with its sign, is 2^-112 of its value, subnormals
   included (infinities are never stored). */
static inline vf KV(vf_load_float16)(const void *p)
{
    vi half = _mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
    vi moved = _mm_and_si128(_mm_srai_epi32(half, 3), vi_set1((int)0x8FFFE000));
    return _mm_mul_ps(_mm_castsi128_ps(moved), vf_set1(0x1p112f));
}
#define vf_load_float16 KV(vf_load_float16)
#define vf_load_bfloat16(p) \
    _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)(p))))

static inline void KV(vf_store_float16)(void *p, vf x)
{
    float lanes[W];
    vf_store(lanes, x);
    for (int i = 0; i < W; i++) ((uint16_t *)p)[i] = kv_to_float16(lanes[i]);
}
#define vf_store_float16 KV(vf_store_float16)

static inline void KV(vi_store_int8)(int8_t *p, vi x)
{
    vi words = _mm_packs_epi32(x, x);
    int32_t bytes = _mm_cvtsi128_si32(_mm_packs_epi16(words, words));
    memcpy(p, &bytes, 4);
}
#define vi_store_int8 KV(vi_store_int8)
static inline void KV(vi_store_uint8)(uint8_t *p, vi x)
{
    vi words = _mm_packs_epi32(x, x);
    int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    memcpy(p, &bytes, 4);
}
#define vi_store_uint8 KV(vi_store_uint8)
static inline vi KV(vi_load_int8)(const int8_t *p)
{
    vi bytes = _mm_cvtsi32_si128(kv_load32(p));
    bytes = _mm_unpacklo_epi8(bytes, bytes);
    return _mm_srai_epi32(_mm_unpacklo_epi16(bytes, bytes), 24);
}
#define vi_load_int8 KV(vi_load_int8)

static inline vf KV(vf_lookup8)(const float *table, vi index)
{
    return _mm_set_ps(table[_mm_extract_epi16(index, 6)], table[_mm_extract_epi16(index, 4)],
                      table[_mm_extract_epi16(index, 2)], table[_mm_extract_epi16(index, 0)]);
}
#define vf_lookup8 KV(vf_lookup8)
static inline vi KV(vi_max)(vi a, vi b)
{
    vi greater = _mm_cmpgt_epi32(a, b);
    return _mm_or_si128(_mm_and_si128(greater, a), _mm_andnot_si128(greater, b));
}
#define vi_max KV(vi_max)
static inline float KV(vf_hmax)(vf x)
{
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
static inline float KV(vf_hsum)(vf x)
{
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
static inline int32_t KV(vi_hsum)(vi x)
{
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xB1)));
}
static inline int32_t KV(vi_hmax)(vi x)
{
    x = vi_max(x, _mm_shuffle_epi32(x, 0x4E));
    return _mm_cvtsi128_si32(vi_max(x, _mm_shuffle_epi32(x, 0xB1)));
}
#define vf_hmax KV(vf_hmax)
#define vf_hsum KV(vf_hsum)
#define vi_hsum KV(vi_hsum)
#define vi_hmax KV(vi_hmax)

static inline vf KV(vf_hadamard)(vf x)
{
    x = vf_fma(x, vf_load(kv_hadamard[0]), _mm_shuffle_ps(x, x, 0xB1));
    return vf_fma(x, vf_load(kv_hadamard[1]), _mm_shuffle_ps(x, x, 0x4E));
}

static inline void KV(vf_sum4)(vf a, vf b, vf c, vf d, float *sums)
{
    vf ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    vf cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    _mm_storeu_ps(sums, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x44), _mm_shuffle_ps(ab, cd, 0xEE)));
}

/* Integer dot products, as in vec_avx2.h. */
#define vcodes __m128i
#define vcodes_load(p) _mm_loadu_si128((const __m128i *)(p))
#define vcodes_bytes(c) (c)
#define vcodes_low(c) _mm_and_si128(c, _mm_set1_epi8(15))
#define vcodes_shift(c) _mm_srli_epi16(c, 4)

/* SSE2 has no byte shuffle: sums the steps between the levels below each code, then applies the sign. */
static inline vcodes KV(vcodes_levels)(vcodes c)
{
    c = vcodes_low(c);
    const vcodes negative = _mm_cmplt_epi8(c, _mm_set1_epi8(8));
    const vcodes index = _mm_and_si128(_mm_xor_si128(c, negative), _mm_set1_epi8(7));
    vcodes level = _mm_set1_epi8((char)(kv_gauss_levels[8] - 128));
    for (int i = 0; i < 7; i++)
        level = _mm_add_epi8(level, _mm_and_si128(_mm_cmpgt_epi8(index, _mm_set1_epi8((char)i)),
                                                  _mm_set1_epi8((char)(kv_gauss_levels[9 + i] - kv_gauss_levels[8 + i]))));
    return _mm_xor_si128(_mm_sub_epi8(_mm_xor_si128(level, negative), negative), _mm_set1_epi8(-128));
}
#define vcodes_levels KV(vcodes_levels)
typedef struct { __m128i even, odd; } KV(vwide);
#define vwide KV(vwide)
#define vcodes_widen(c) ((vwide){_mm_and_si128(c, _mm_set1_epi16(255)), _mm_srli_epi16(c, 8)})
typedef int32_t KV(vacc) __attribute__((vector_size(16)));
#define vacc KV(vacc)
#define vacc_dot(a, b, codes, x)                                                           \
    do {                                                                                   \
        const __m128i words = _mm_loadl_epi64((const __m128i *)(x));                       \
        a += (vacc)_mm_madd_epi16((codes).even, _mm_shuffle_epi32(words, 0x00));           \
        a += (vacc)_mm_madd_epi16((codes).odd, _mm_shuffle_epi32(words, 0x55));            \
        __asm__("" : "+x"(a));                                                             \
    } while (0)
#define vacc_total(a, b) ((vi)(a))

static inline vi KV(order_words)(vi words)
{
    return _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, 0xD8), 0xD8);
}

static inline void KV(put_parts)(int8_t *x, ptrdiff_t index, vi r0, vi r1, vi r2, vi r3)
{
    _mm_storeu_si128((__m128i *)(x + index * 8), KV(order_words)(_mm_packs_epi32(r0, r1)));
    _mm_storeu_si128((__m128i *)(x + index * 8 + 16), KV(order_words)(_mm_packs_epi32(r2, r3)));
}
#define put_parts KV(put_parts)

static inline uint32_t KV(top_bits)(const uint16_t *p)
{
    return (uint32_t)_mm_movemask_epi8(
        _mm_packs_epi16(_mm_loadu_si128((const __m128i *)p), _mm_loadu_si128((const __m128i *)(p + 8))));
}
