/* The instructions of AVX-512 and AVX-VNNI that kvfast uses, in plain C and AVX2, so that the kernels for them can be tested where
   there are none: ci/software_tiers.sh includes this file before kvfast's tiers. Intel's Intrinsics Guide says what each of them
   does. A load or store that wants an aligned address ends the process for another one, as the processor does. */
#if defined(__x86_64__) && !defined(SOFTWARE_AVX512_H)
#define SOFTWARE_AVX512_H
#define KV_SOFTWARE_AVX512 1
#include "../../kvfast/simd/common.h"
#include <stdlib.h>

/* No tier may enable AVX-512, or the compiler would use it. */
#undef KV_TARGET_BEGIN
#define KV_TARGET_BEGIN(isa) _Pragma("GCC push_options") _Pragma("GCC target(\"popcnt,avx2,fma,f16c\")")
/* dispatch.c asks it for each feature. */
#define __builtin_cpu_supports(feature) 1

KV_TARGET_BEGIN()
#pragma GCC diagnostic ignored "-Wpsabi" /* 64 bytes are passed through memory */
/* Not inlined: compilers would take minutes. */
#define SOFTWARE static __attribute__((noinline, unused))

typedef union {
    __m512 f;
    __m512i i;
    __m512 whole_f[1];
    __m512i whole[1];
    __m256 half_f[2];
    __m256i half[2];
    __m128i quarter[4];
    float x[16];
    int32_t d[16];
    uint32_t u[16];
    int64_t q[8];
    uint64_t uq[8];
    int16_t w[32];
    uint16_t uw[32];
    int8_t b[64];
    uint8_t ub[64];
} software_vector;
#define BITS(a) ((software_vector){.i = (a)})
#define FLOATS(a) ((software_vector){.f = (a)})

/* An instruction on each half. */
#define HALVES_1(type, view, half, name, instruction)                                                         \
    SOFTWARE type software_##name(type a)                                                                     \
    {                                                                                                         \
        const software_vector x = {.view = a};                                                                \
        return ((software_vector){.half = {instruction(x.half[0]), instruction(x.half[1])}}).view;            \
    }
#define HALVES_2(type, view, half, name, instruction)                                                         \
    SOFTWARE type software_##name(type a, type b)                                                             \
    {                                                                                                         \
        const software_vector x = {.view = a}, y = {.view = b};                                               \
        return ((software_vector){.half = {instruction(x.half[0], y.half[0]), instruction(x.half[1], y.half[1])}}).view; \
    }
#define FLOATS_2(name) HALVES_2(__m512, f, half_f, name, _mm256_##name)
#define INTEGERS_2(name) HALVES_2(__m512i, i, half, name, _mm256_##name)
FLOATS_2(add_ps) FLOATS_2(sub_ps) FLOATS_2(mul_ps) FLOATS_2(div_ps) FLOATS_2(max_ps) FLOATS_2(min_ps) FLOATS_2(unpacklo_ps)
FLOATS_2(unpackhi_ps)
INTEGERS_2(add_epi32) INTEGERS_2(sub_epi32) INTEGERS_2(mullo_epi32) INTEGERS_2(max_epi32) INTEGERS_2(add_epi16)
INTEGERS_2(madd_epi16) INTEGERS_2(maddubs_epi16) INTEGERS_2(packs_epi32) INTEGERS_2(packs_epi16) INTEGERS_2(packus_epi16) INTEGERS_2(sub_epi8)
INTEGERS_2(shuffle_epi8) INTEGERS_2(unpacklo_epi8) INTEGERS_2(unpackhi_epi8) INTEGERS_2(unpacklo_epi16) INTEGERS_2(unpackhi_epi16)
INTEGERS_2(unpacklo_epi32) INTEGERS_2(unpackhi_epi32) INTEGERS_2(unpacklo_epi64) INTEGERS_2(unpackhi_epi64) INTEGERS_2(sllv_epi32)
INTEGERS_2(srlv_epi32) INTEGERS_2(srlv_epi64) INTEGERS_2(mulhrs_epi16)
HALVES_2(__m512i, i, half, and_si512, _mm256_and_si256)
HALVES_2(__m512i, i, half, or_si512, _mm256_or_si256)
HALVES_2(__m512i, i, half, xor_si512, _mm256_xor_si256)
HALVES_1(__m512, f, half_f, sqrt_ps, _mm256_sqrt_ps)

/* Shifts. */
#define SHIFT(name, shift)                                                                                              \
    SOFTWARE __m512i software_##name(__m512i a, int n)                                                                  \
    {                                                                                                                   \
        const __m128i count = _mm_cvtsi32_si128(n);                                                                     \
        return ((software_vector){.half = {shift(BITS(a).half[0], count), shift(BITS(a).half[1], count)}}).i;           \
    }
SHIFT(slli_epi32, _mm256_sll_epi32) SHIFT(srli_epi32, _mm256_srl_epi32) SHIFT(srai_epi32, _mm256_sra_epi32)
SHIFT(slli_epi16, _mm256_sll_epi16) SHIFT(srli_epi16, _mm256_srl_epi16) SHIFT(srai_epi16, _mm256_sra_epi16)

SOFTWARE __m512 software_fmadd_ps(__m512 a, __m512 b, __m512 c)
{
    const software_vector x = FLOATS(a), y = FLOATS(b), z = FLOATS(c);
    return ((software_vector){.half_f = {_mm256_fmadd_ps(x.half_f[0], y.half_f[0], z.half_f[0]),
                                         _mm256_fmadd_ps(x.half_f[1], y.half_f[1], z.half_f[1])}}).f;
}

/* The same 16 or 32 bytes, or element, everywhere. */
SOFTWARE __m512i software_broadcast_i64x4(__m256i a) { return ((software_vector){.half = {a, a}}).i; }
SOFTWARE __m512i software_broadcast_i32x4(__m128i a) { return software_broadcast_i64x4(_mm256_broadcastsi128_si256(a)); }
SOFTWARE __m512i software_set1_epi8(int8_t a) { return software_broadcast_i64x4(_mm256_set1_epi8(a)); }
SOFTWARE __m512i software_set1_epi16(int16_t a) { return software_broadcast_i64x4(_mm256_set1_epi16(a)); }
SOFTWARE __m512i software_set1_epi32(int32_t a) { return software_broadcast_i64x4(_mm256_set1_epi32(a)); }
SOFTWARE __m512i software_set1_epi64(int64_t a) { return software_broadcast_i64x4(_mm256_set1_epi64x(a)); }
SOFTWARE __m512 software_set1_ps(float a) { return ((software_vector){.half_f = {_mm256_set1_ps(a), _mm256_set1_ps(a)}}).f; }

SOFTWARE __m512 software_abs_ps(__m512 a)
{
    return (__m512)software_and_si512((__m512i)a, software_set1_epi32(0x7FFFFFFF));
}

SOFTWARE __m512i software_dpwssd_epi32(__m512i sums, __m512i a, __m512i b)
{
    const software_vector s = BITS(sums), x = BITS(a), y = BITS(b);
    return ((software_vector){.half = {_mm256_add_epi32(s.half[0], _mm256_madd_epi16(x.half[0], y.half[0])),
                                       _mm256_add_epi32(s.half[1], _mm256_madd_epi16(x.half[1], y.half[1]))}}).i;
}

/* Lanes of a where the mask has a bit, else of `other`. */
SOFTWARE __m512 software_mask_mov_ps(__m512 other, __mmask16 mask, __m512 a)
{
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    software_vector r;
    for (int i = 0; i < 2; i++) {
        const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask >> 8 * i), bits), bits);
        r.half_f[i] = _mm256_blendv_ps(FLOATS(other).half_f[i], FLOATS(a).half_f[i], _mm256_castsi256_ps(set));
    }
    return r.f;
}
SOFTWARE __m512 software_maskz_mov_ps(__mmask16 mask, __m512 a) { return software_mask_mov_ps(software_set1_ps(0), mask, a); }

/* An expression for each lane i of `r`, a result of `lanes` lanes. */
#define WITHOUT_BRACKETS(...) __VA_ARGS__
#define LANES(name, result, view, lanes, arguments, operands, ...)       \
    SOFTWARE result software_##name arguments                            \
    {                                                                    \
        const software_vector WITHOUT_BRACKETS operands;                 \
        software_vector r;                                               \
        for (int i = 0; i < lanes; i++) { __VA_ARGS__; }                 \
        return r.view;                                                   \
    }
LANES(ternarylogic_epi32, __m512i, i, 16, (__m512i a, __m512i b, __m512i c, int table),
      (x = BITS(a), y = BITS(b), z = BITS(c)),
      r.u[i] = 0;
      for (int k = 0; k < 8; k++) r.u[i] |= table >> k & 1 ? (k & 4 ? x.u[i] : ~x.u[i]) & (k & 2 ? y.u[i] : ~y.u[i]) &
                                                             (k & 1 ? z.u[i] : ~z.u[i]) : 0)
LANES(shuffle_ps, __m512, f, 16, (__m512 a, __m512 b, int order), (x = FLOATS(a), y = FLOATS(b)),
      r.x[i] = (i % 4 < 2 ? x : y).x[i / 4 * 4 + (order >> i % 4 * 2 & 3)])
LANES(shuffle_i32x4, __m512i, i, 4, (__m512i a, __m512i b, int order), (x = BITS(a), y = BITS(b)),
      r.quarter[i] = (i < 2 ? x : y).quarter[order >> 2 * i & 3])
LANES(shuffle_f32x4, __m512, f, 4, (__m512 a, __m512 b, int order), (x = FLOATS(a), y = FLOATS(b)),
      r.quarter[i] = (i < 2 ? x : y).quarter[order >> 2 * i & 3])
LANES(shufflelo_epi16, __m512i, i, 32, (__m512i a, int order), (x = BITS(a)),
      r.w[i] = i % 8 < 4 ? x.w[i / 8 * 8 + (order >> i % 4 * 2 & 3)] : x.w[i])
LANES(shufflehi_epi16, __m512i, i, 32, (__m512i a, int order), (x = BITS(a)),
      r.w[i] = i % 8 < 4 ? x.w[i] : x.w[i / 8 * 8 + 4 + (order >> i % 4 * 2 & 3)])
LANES(permutexvar_epi8, __m512i, i, 64, (__m512i index, __m512i a), (n = BITS(index), x = BITS(a)), r.b[i] = x.b[n.ub[i] % 64])
LANES(permutexvar_epi32, __m512i, i, 16, (__m512i index, __m512i a), (n = BITS(index), x = BITS(a)), r.d[i] = x.d[n.u[i] % 16])
LANES(permute_ps, __m512, f, 16, (__m512 a, int order), (x = FLOATS(a)), r.x[i] = x.x[i / 4 * 4 + (order >> i % 4 * 2 & 3)])
LANES(permutexvar_ps, __m512, f, 16, (__m512i index, __m512 a), (n = BITS(index), x = FLOATS(a)), r.x[i] = x.x[n.u[i] % 16])
LANES(permutex2var_ps, __m512, f, 16, (__m512 a, __m512i index, __m512 b), (x = FLOATS(a), n = BITS(index), y = FLOATS(b)),
      r.x[i] = (n.u[i] & 16 ? y : x).x[n.u[i] % 16])
LANES(permutex2var_epi16, __m512i, i, 32, (__m512i a, __m512i index, __m512i b), (x = BITS(a), n = BITS(index), y = BITS(b)),
      r.w[i] = (n.uw[i] & 32 ? y : x).w[n.uw[i] % 32])
LANES(permutex2var_epi64, __m512i, i, 8, (__m512i a, __m512i index, __m512i b), (x = BITS(a), n = BITS(index), y = BITS(b)),
      r.q[i] = (n.uq[i] & 8 ? y : x).q[n.uq[i] % 8])
LANES(getexp_ps, __m512, f, 16, (__m512 a), (x = FLOATS(a)), r.x[i] = x.x[i] == 0 ? -INFINITY : logbf(fabsf(x.x[i])))
LANES(mask_blend_epi16, __m512i, i, 32, (__mmask32 mask, __m512i a, __m512i b), (x = BITS(a), y = BITS(b)),
      r.w[i] = (mask >> i & 1 ? y : x).w[i])
LANES(mask_add_epi32, __m512i, i, 16, (__m512i other, __mmask16 mask, __m512i a, __m512i b),
      (o = BITS(other), x = BITS(a), y = BITS(b)), r.u[i] = mask >> i & 1 ? x.u[i] + y.u[i] : o.u[i])
LANES(mask_add_ps, __m512, f, 16, (__m512 other, __mmask16 mask, __m512 a, __m512 b),
      (o = FLOATS(other), x = FLOATS(a), y = FLOATS(b)), r.x[i] = mask >> i & 1 ? x.x[i] + y.x[i] : o.x[i])
LANES(mask_max_ps, __m512, f, 16, (__m512 other, __mmask16 mask, __m512 a, __m512 b),
      (o = FLOATS(other), x = FLOATS(a), y = FLOATS(b)), r.x[i] = !(mask >> i & 1) ? o.x[i] : x.x[i] > y.x[i] ? x.x[i] : y.x[i])
LANES(mask3_fmadd_ps, __m512, f, 16, (__m512 a, __m512 b, __m512 other, __mmask16 mask),
      (x = FLOATS(a), y = FLOATS(b), o = FLOATS(other)), r.x[i] = mask >> i & 1 ? fmaf(x.x[i], y.x[i], o.x[i]) : o.x[i])
LANES(maskz_div_ps, __m512, f, 16, (__mmask16 mask, __m512 a, __m512 b), (x = FLOATS(a), y = FLOATS(b)),
      r.x[i] = mask >> i & 1 ? x.x[i] / y.x[i] : 0)
/* kvfast asks for the larger magnitude, and for the nearest integer. */
LANES(range_ps, __m512, f, 16, (__m512 a, __m512 b, int choice), (x = FLOATS(a), y = FLOATS(b)),
      if (choice != 11) abort(); r.x[i] = fmaxf(fabsf(x.x[i]), fabsf(y.x[i])))
LANES(roundscale_ps, __m512, f, 16, (__m512 a, int rounding), (x = FLOATS(a)),
      if (rounding != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) abort(); r.x[i] = rintf(x.x[i]))
LANES(maskz_scalef_ps, __m512, f, 16, (__mmask16 mask, __m512 a, __m512 exponents), (x = FLOATS(a), n = FLOATS(exponents)),
      r.x[i] = !(mask >> i & 1) ? 0 : n.x[i] != n.x[i] ? n.x[i] : ldexpf(x.x[i], (int)fmaxf(fminf(floorf(n.x[i]), 999), -999)))

/* Products of unsigned and signed bytes: of bytes 0 and 2 of each lane, and of bytes 1 and 3. Sums of two are at most
   2 * 255 * 128 < 2^31. */
SOFTWARE __m256i software_dpbusd_avx_epi32(__m256i sums, __m256i a, __m256i b)
{
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
SOFTWARE __m512i software_dpbusd_epi32(__m512i sums, __m512i a, __m512i b)
{
    software_vector s = BITS(sums), x = BITS(a), y = BITS(b);
    for (int i = 0; i < 2; i++) s.half[i] = software_dpbusd_avx_epi32(s.half[i], x.half[i], y.half[i]);
    return s.i;
}

SOFTWARE __m512 software_getmant_ps(__m512 a, int interval, int sign) /* in [1, 2), with the sign of the source */
{
    software_vector x = FLOATS(a);
    if (interval != _MM_MANT_NORM_1_2 || sign != _MM_MANT_SIGN_src) abort();
    for (int i = 0; i < 16; i++)
        if (x.x[i] == 0 || isinf(x.x[i])) x.x[i] = copysignf(1, x.x[i]);
        else if (!isnan(x.x[i])) x.x[i] = copysignf(ldexpf(fabsf(x.x[i]), -ilogbf(x.x[i])), x.x[i]);
    return x.f;
}

/* The part below a multiple of 1, by the rounding that is named: kvfast asks for that to negative infinity alone. */
SOFTWARE __m512 software_reduce_ps(__m512 a, int rounding)
{
    software_vector x = FLOATS(a);
    if (rounding != _MM_FROUND_TO_NEG_INF) abort();
    for (int i = 0; i < 2; i++) x.half_f[i] = _mm256_sub_ps(x.half_f[i], _mm256_floor_ps(x.half_f[i]));
    for (int i = 0; i < 16; i++) x.x[i] = isinf(FLOATS(a).x[i]) ? 0 : x.x[i];
    return x.f;
}

/* Sums and maxima of all lanes fold the vector in halves, as the functions of gcc do. */
#define FOLD(name, result, part, pick, expression)                                   \
    SOFTWARE result software_##name(pick(__m512, __m512i) a)                         \
    {                                                                                \
        software_vector r = {pick(.f, .i) = a};                                      \
        for (int n = 8; n; n /= 2)                                                   \
            for (int i = 0; i < n; i++) {                                            \
                const result low = r.part[i], high = r.part[i + n];                  \
                r.part[i] = expression;                                              \
            }                                                                        \
        return r.part[0];                                                            \
    }
#define FIRST_OF(a, b) a
#define SECOND_OF(a, b) b
FOLD(reduce_add_ps, float, x, FIRST_OF, high + low)
FOLD(reduce_max_ps, float, x, FIRST_OF, high > low ? high : low)
FOLD(reduce_add_epi32, int32_t, d, SECOND_OF, (int32_t)((uint32_t)high + (uint32_t)low))
FOLD(reduce_max_epi32, int32_t, d, SECOND_OF, high > low ? high : low)

/* A mask of the lanes for which a comparison of x.d[i] and y.d[i], or of other parts, holds. */
#define MASK(name, mask, part, lanes, comparison)                  \
    SOFTWARE mask software_##name(__m512i a, __m512i b)            \
    {                                                              \
        const software_vector x = BITS(a), y = BITS(b);            \
        mask set = 0;                                              \
        for (int i = 0; i < lanes; i++)                            \
            set |= (mask)((mask)(x.part[i] comparison y.part[i] ? 1 : 0) << i); \
        return set;                                                \
    }
MASK(cmpeq_epi32_mask, __mmask16, d, 16, ==)
MASK(cmplt_epi32_mask, __mmask16, d, 16, <)
MASK(cmple_epi32_mask, __mmask16, d, 16, <=)
MASK(cmpge_epi32_mask, __mmask16, d, 16, >=)
MASK(cmpgt_epi32_mask, __mmask16, d, 16, >)
MASK(test_epi16_mask, __mmask32, uw, 32, &)
#define software_cmp_ps_mask(a, b, comparison)                                                                                \
    ((__mmask16)(_mm256_movemask_ps(_mm256_cmp_ps(FLOATS(a).half_f[0], FLOATS(b).half_f[0], comparison)) |                   \
                 _mm256_movemask_ps(_mm256_cmp_ps(FLOATS(a).half_f[1], FLOATS(b).half_f[1], comparison)) << 8))
SOFTWARE __mmask16 software_movepi16_mask(__m256i a)
{
    return (__mmask16)_mm_movemask_epi8(_mm_packs_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}

/* Memory. */
SOFTWARE __m512i software_loadu_si512(const void *p) { software_vector r; memcpy(&r, p, 64); return r.i; }
SOFTWARE __m512 software_loadu_ps(const void *p) { software_vector r; memcpy(&r, p, 64); return r.f; }
SOFTWARE void software_storeu_si512(void *p, __m512i a) { memcpy(p, &a, 64); }
SOFTWARE void software_storeu_ps(void *p, __m512 a) { memcpy(p, &a, 64); }
SOFTWARE void software_aligned(const void *p) { if ((uintptr_t)p % 64) abort(); }
SOFTWARE __m512i software_load_si512(const void *p) { software_aligned(p); return software_loadu_si512(p); }
SOFTWARE void software_store_si512(void *p, __m512i a) { software_aligned(p); memcpy(p, &a, 64); }
/* Lanes that a mask leaves out are not read. */
#define MASKED_LOAD(name, result, view, part, type, lanes)                                        \
    SOFTWARE result software_##name(uint32_t mask, const void *p)                                 \
    {                                                                                             \
        software_vector r;                                                                        \
        memset(&r, 0, sizeof r);                                                                  \
        for (int i = 0; i < lanes; i++)                                                           \
            if (mask >> i & 1) memcpy(&r.part[i], (const type *)p + i, sizeof(type));             \
        return r.view;                                                                            \
    }
MASKED_LOAD(maskz_loadu_ps, __m512, f, x, float, 16)
MASKED_LOAD(maskz_loadu_epi16, __m512i, i, uw, uint16_t, 32)
#define MASKED_GATHER(name, type, view, part)                                                     \
    SOFTWARE type software_##name(type other, __mmask16 mask, __m512i index, const void *p, int scale) \
    {                                                                                             \
        software_vector r = {.view = other};                                                      \
        const software_vector n = BITS(index);                                                    \
        for (int i = 0; i < 16; i++)                                                              \
            if (mask >> i & 1) memcpy(&r.part[i], (const char *)p + (ptrdiff_t)n.d[i] * scale, 4); \
        return r.view;                                                                            \
    }
MASKED_GATHER(mask_i32gather_ps, __m512, f, x)
MASKED_GATHER(mask_i32gather_epi32, __m512i, i, d)
SOFTWARE __m512i software_maskz_compress_epi32(__mmask16 mask, __m512i a)
{
    const software_vector x = BITS(a);
    software_vector r;
    int n = 0;
    memset(&r, 0, sizeof r);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) r.d[n++] = x.d[i];
    return r.i;
}

SOFTWARE void software_mask_storeu_ps(void *p, __mmask16 mask, __m512 a)
{
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) memcpy((char *)p + 4 * i, &FLOATS(a).x[i], 4);
}

/* Constants, copies and conversions. */
#define software_setr_epi32(...) (((software_vector){.d = {__VA_ARGS__}}).i)
#define software_set4_epi32(e3, e2, e1, e0) \
    software_broadcast_i32x4(_mm_setr_epi32((int)(e0), (int)(e1), (int)(e2), (int)(e3)))
#define software_set_epi64(h, g, f, e, d, c, b, a) (((software_vector){.q = {a, b, c, d, e, f, g, h}}).i)
LANES(set_epi16, __m512i, i, 32,
      (int a31, int a30, int a29, int a28, int a27, int a26, int a25, int a24, int a23, int a22, int a21, int a20, int a19, int a18,
       int a17, int a16, int a15, int a14, int a13, int a12, int a11, int a10, int a9, int a8, int a7, int a6, int a5, int a4, int a3,
       int a2, int a1, int a0),
      (x = {.w = {(int16_t)a0, (int16_t)a1, (int16_t)a2, (int16_t)a3, (int16_t)a4, (int16_t)a5, (int16_t)a6, (int16_t)a7, (int16_t)a8,
                 (int16_t)a9, (int16_t)a10, (int16_t)a11, (int16_t)a12, (int16_t)a13, (int16_t)a14, (int16_t)a15, (int16_t)a16,
                 (int16_t)a17, (int16_t)a18, (int16_t)a19, (int16_t)a20, (int16_t)a21, (int16_t)a22, (int16_t)a23, (int16_t)a24,
                 (int16_t)a25, (int16_t)a26, (int16_t)a27, (int16_t)a28, (int16_t)a29, (int16_t)a30, (int16_t)a31}}),
      r.w[i] = x.w[i])
#define software_castps_si512(a) ((__m512i)(a))
#define software_castsi512_ps(a) ((__m512)(a))
#define software_castps512_ps256(a) (FLOATS(a).half_f[0])
#define software_castps512_ps128(a) _mm256_castps256_ps128(FLOATS(a).half_f[0])
#define software_maskz_compress_ps(mask, a) ((__m512)software_maskz_compress_epi32(mask, (__m512i)(a)))
#define software_castps256_ps512(a) (((software_vector){.half_f = {a, a}}).f)
#define software_extractf32x8_ps(a, half) (FLOATS(a).half_f[half])
LANES(cvtepi32_epi8, __m128i, quarter[0], 16, (__m512i a), (x = BITS(a)), r.b[i] = (int8_t)x.d[i])
/* Each half of the result by an instruction on a part of the operand. */
#define CONVERT(name, result, view, half, argument, from, part)                                                        \
    SOFTWARE result software_##name(argument a)                                                                        \
    {                                                                                                                  \
        const software_vector x = {.from = {a}};                                                                       \
        return ((software_vector){.half = {_mm256_##name(x.part[0]), _mm256_##name(x.part[1])}}).view;                 \
    }
CONVERT(cvtps_epi32, __m512i, i, half, __m512, whole_f, half_f)
CONVERT(cvttps_epi32, __m512i, i, half, __m512, whole_f, half_f)
CONVERT(cvtepi32_ps, __m512, f, half_f, __m512i, whole, half)
CONVERT(cvtph_ps, __m512, f, half_f, __m256i, half, quarter)
CONVERT(cvtepu16_epi32, __m512i, i, half, __m256i, half, quarter)
SOFTWARE __m512i software_cvtepi8_epi32(__m128i a)
{
    return ((software_vector){.half = {_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))}}).i;
}
SOFTWARE __m256i software_cvtps_ph(__m512 a, int rounding)
{
    if (rounding != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) abort();
    software_vector r;
    for (int i = 0; i < 2; i++) r.quarter[i] = _mm256_cvtps_ph(FLOATS(a).half_f[i], _MM_FROUND_TO_NEAREST_INT);
    return r.half[0];
}
SOFTWARE __m256i software_dpwssd_avx_epi32(__m256i sums, __m256i a, __m256i b)
{
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
KV_TARGET_END
#endif
