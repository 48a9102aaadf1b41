/* Compiles the kernels once per instruction set, and finds out which tiers this machine can run.

   Each tier is a target region instead of a file with its own flags: all functions are static, so no
   code of a newer instruction set can leak into code that every CPU runs. */
#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#define KV_X86 1
#include <cpuid.h>
#include <immintrin.h>
#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define KV_HAVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#else
#define KV_X86 0
#endif
#if KV_X86 && defined(__SSE2__)
#define KV_SSE2 1
#else
#define KV_SSE2 0
#endif
#ifndef KV_HAVE_AMX
#define KV_HAVE_AMX 0
#endif
#if KV_X86 && ((!defined(__clang__) && __GNUC__ >= 11) || __clang_major__ >= 13)
#define KV_HAVE_AVX_VNNI 1
#else
#define KV_HAVE_AVX_VNNI 0
#endif

#if defined(__aarch64__) && defined(__ARM_NEON)
#define KV_ARM64 1
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#else
#define KV_ARM64 0
#endif
/* clang declares its intrinsics in target regions only from version 16 on. */
#if KV_ARM64 && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))
#define KV_HAVE_DOTPROD 1
#else
#define KV_HAVE_DOTPROD 0
#endif

#if defined(__clang__)
#define KV_PRAGMA(text) _Pragma(#text)
#define KV_TARGET_BEGIN(isa) KV_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define KV_TARGET_END _Pragma("clang attribute pop")
#else
#define KV_PRAGMA(text) _Pragma(#text)
#define KV_TARGET_BEGIN(isa) _Pragma("GCC push_options") KV_PRAGMA(GCC target(isa))
#define KV_TARGET_END _Pragma("GCC pop_options")
#endif

/* On x86 to the second level (prefetcht1). Ratio of times to prefetcht0, which fills the first level too, from memory with two
   threads, one token behind 16,384 others, 32/8/128: on a Xeon with AMX int8 0.96, int4 1.00, float32 0.95 (November 2026); on
   an EPYC Zen 4, behind 4,096, int8 0.65, int4 0.83, float32 0.57. prefetchnta takes 1.9 to 2.7 times as long on the Xeon. */
#if KV_X86
#define kv_prefetch(address) __builtin_prefetch(address, 0, 2)
#else
#define kv_prefetch(address) __builtin_prefetch(address, 0, 3)
#endif
#define kv_prefetch_write(address) __builtin_prefetch(address, 1, 3)

static inline void kv_prefetch_scales(const kv_prefetch *stream, ptrdiff_t at)
{
    for (ptrdiff_t i = 0; i < stream->scale_bytes; i += 64) kv_prefetch(stream->base + at + stream->scales + i);
}

/* The scales behind the last piece of what a kernel has prefetched. */
static inline void kv_prefetch_end(const kv_ahead *ahead)
{
    kv_prefetch_scales(&ahead->next, ahead->next.at[(ahead->next.bytes - 1) / ahead->next.piece]);
}

/* Lanes of the whole lane tiles that `count` of them take. */
static inline int kv_whole_lanes(int count)
{
    return (count + KV_LANES - 1) / KV_LANES * KV_LANES;
}

/* The address from which a panel that starts `offset` bytes into its tile prefetches. It continues line after
   line in the order of memory, whatever the order of its loads. */
static inline const char *kv_prefetch_from(const kv_ahead *ahead, ptrdiff_t offset)
{
    const kv_prefetch *stream = &ahead->next;
    offset += ahead->lead;
    if (offset >= stream->bytes) {
        offset -= stream->bytes;
        stream = &ahead->after;
        if (offset >= stream->bytes) offset = 0; /* all of it was prefetched */
    }
    const ptrdiff_t *at = stream->at;
    for (; offset >= stream->piece; offset -= stream->piece) at++;
    if (offset == 0 && at > stream->at) kv_prefetch_scales(stream, at[-1]);
    return stream->base + *at + stream->offset + offset;
}

static const float kv_ones[KV_ROWS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

typedef uint32_t kv_word __attribute__((may_alias)); /* a word of a line, whatever else it is */
static inline int32_t kv_load32(const void *p) { int32_t x; memcpy(&x, p, 4); return x; }
static inline int64_t kv_load64(const void *p) { int64_t x; memcpy(&x, p, 8); return x; }
static inline uint32_t kv_float_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float kv_bits_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

#include "packed.h"
#include "trellis.h"

/* for (i = 0; i < n; i++) body, n <= 4 constant, unrolled in the source: compilers keep arrays that are
   indexed by constants in registers, but not reliably those of loops they unroll themselves. */
#define KV_FOR4(i, n, ...)                                  \
    do {                                                    \
        { enum { i = 0 }; if ((int)i < (int)(n)) { __VA_ARGS__ } }    \
        { enum { i = 1 }; if ((int)i < (int)(n)) { __VA_ARGS__ } }    \
        { enum { i = 2 }; if ((int)i < (int)(n)) { __VA_ARGS__ } }    \
        { enum { i = 3 }; if ((int)i < (int)(n)) { __VA_ARGS__ } }    \
    } while (0)

/* Half precision in plain C, round to nearest even; also the tails of the vector tiers. */
static inline float kv_from_float16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) return kv_bits_float(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    return kv_bits_float(sign | kv_float_bits(kv_bits_float(magnitude << 13) * 0x1p112f));
}
static inline uint16_t kv_to_float16(float x)
{
    uint32_t bits = kv_float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return (uint16_t)(sign | 0x7E00);   /* NaN */
    if (magnitude >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  /* rounds beyond 65504 */
    if (magnitude < 0x38800000) {                                   /* subnormal: the FPU rounds at 2^-24 */
        float rounded = kv_bits_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (kv_float_bits(rounded) - 0x3F000000));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}

static inline uint16_t kv_to_bfloat16(float x) /* nearest even */
{
    uint32_t bits = kv_float_bits(x);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static inline float kv_from_bfloat16(uint16_t half) { return kv_bits_float((uint32_t)half << 16); }

/* GAUSS4: the 16 levels of the quantiser with the least squared error for a Gaussian, symmetric about 0, in
   units of 2.733 standard deviations / 127; stored like INT8, + 128. Then the upper half as floats, and the
   midpoint above each of them, in units of 16. */
#define KV_GAUSS_UNIT (2.733f / 127.0f)
static const uint8_t kv_gauss_levels[16] = {1, 32, 53, 70, 84, 97, 110, 122, 134, 146, 159, 172, 186, 203, 224, 255};
static const float kv_gauss_magnitudes[8] = {6, 18, 31, 44, 58, 75, 96, 127};
static const float kv_gauss_midpoints[8] = {
    12 / 16.0f, 24.5f / 16, 37.5f / 16, 51 / 16.0f, 66.5f / 16, 85.5f / 16, 111.5f / 16, INFINITY};

/* Rows 1, 2, 4 and 8 of Sylvester's 16 x 16 matrix. */
static const float kv_hadamard[4][16] = {
    {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
    {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
    {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
    {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
};

#include "transpose.h"

static void kv_store_nontemporal(const float *row, ptrdiff_t n, float *target)
{
#if KV_SSE2
    if (n == 0) _mm_sfence(); /* such stores are not ordered otherwise */
    if ((uintptr_t)target % 16 == 0) {
        for (; n >= 4; n -= 4, row += 4, target += 4) _mm_stream_ps(target, _mm_loadu_ps(row));
    }
#endif
    if (n) memcpy(target, row, (size_t)n * sizeof(float));
}

static inline void kv_put_nibble(uint8_t *byte, int code, int high)
{
    *byte = (uint8_t)(high ? (*byte & 0x0F) | code << 4 : (*byte & 0xF0) | code);
}
static inline int kv_get_nibble(const uint8_t *byte, int high) { return high ? *byte >> 4 : *byte & 0x0F; }

#if KV_X86
KV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")
#define KV(name) name##_avx512_vbmi
#define KV_ISA "avx512_vbmi"
#define KV_VNNI
#define KV_VBMI
#if KV_HAVE_AMX
#define KV_MATRIX "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16"
#endif
#include "isa/vec_avx512.h"
#include "tier.inc.h"
#undef KV_VBMI
#undef KV_MATRIX
KV_TARGET_END

KV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define KV(name) name##_avx512_vnni
#define KV_ISA "avx512_vnni"
#include "isa/vec_avx512.h"
#include "tier.inc.h"
#undef KV_VNNI
KV_TARGET_END

KV_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define KV(name) name##_avx512
#define KV_ISA "avx512"
#include "isa/vec_avx512.h"
#include "tier.inc.h"
KV_TARGET_END

#if KV_HAVE_AVX_VNNI
KV_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#define KV(name) name##_avx_vnni
#define KV_ISA "avx_vnni"
#define KV_AVX_VNNI
#include "isa/vec_avx2.h"
#include "tier.inc.h"
#undef KV_AVX_VNNI
KV_TARGET_END
#endif

KV_TARGET_BEGIN("avx2,fma,f16c")
#define KV(name) name##_avx2
#define KV_ISA "avx2"
#include "isa/vec_avx2.h"
#include "tier.inc.h"
KV_TARGET_END

#if KV_SSE2
#define KV(name) name##_sse2
#define KV_ISA "sse2"
#include "isa/vec_sse2.h"
#include "tier.inc.h"
#endif
#endif

#if KV_HAVE_DOTPROD
#if defined(__clang__)
KV_TARGET_BEGIN("dotprod")
#else
KV_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#endif
#define KV(name) name##_neon_dotprod
#define KV_ISA "neon_dotprod"
#define KV_DOTPROD
#include "isa/vec_neon.h"
#include "tier.inc.h"
#undef KV_DOTPROD
KV_TARGET_END
#endif

#if KV_ARM64
#define KV(name) name##_neon
#define KV_ISA "neon"
#include "isa/vec_neon.h"
#include "tier.inc.h"
#endif

#define KV(name) name##_scalar
#define KV_ISA "scalar"
#include "isa/vec_scalar.h"
#include "tier.inc.h"

const kv_kernels *const kv_all_kernels[] = {
#if KV_HAVE_AMX
    &kernels_amx,
#endif
#if KV_X86
    &kernels_avx512_vbmi,
    &kernels_avx512_vnni,
    &kernels_avx512,
#if KV_HAVE_AVX_VNNI
    &kernels_avx_vnni,
#endif
    &kernels_avx2,
#if KV_SSE2
    &kernels_sse2,
#endif
#endif
#if KV_HAVE_DOTPROD
    &kernels_neon_dotprod,
#endif
#if KV_ARM64
    &kernels_neon,
#endif
    &kernels_scalar,
    NULL,
};

#if KV_X86
/* clang's __builtin_cpu_supports does not know these features. A CPU that has one and AVX2 may use it. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
static int has_avx_vnni(void)
{
    enum { AVX_VNNI = 1 << 4 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI) != 0;
}
#endif

#if KV_ARM64
static int has_dotprod(void)
{
#if defined(__linux__)
    enum { DOT_PRODUCTS = 1 << 20 }; /* HWCAP_ASIMDDP */
    return (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0;
#elif defined(__APPLE__)
    int present = 0;
    size_t size = sizeof present;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &present, &size, NULL, 0) == 0 && present;
#elif defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}
#endif

#if KV_HAVE_AMX
/* The matrix unit's registers are large: Linux gives them only to processes that ask for them (arch_prctl,
   ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA); asking once is enough. */
static int has_amx(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_TILE) && (d & AMX_INT8) && (d & AMX_BF16) &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

int kv_supported(const kv_kernels *kernels)
{
#if KV_HAVE_AMX
    if (kernels == &kernels_amx) return kv_supported(&kernels_avx512_vbmi) && has_amx();
#endif
#if KV_X86
    /* __builtin_cpu_supports also asks the operating system (XCR0) for the wider registers. */
    __builtin_cpu_init();
    if (kernels == &kernels_avx512_vbmi)
        return kv_supported(&kernels_avx512_vnni) && __builtin_cpu_supports("avx512vbmi");
    if (kernels == &kernels_avx512_vnni)
        return kv_supported(&kernels_avx512) && __builtin_cpu_supports("avx512vnni");
    if (kernels == &kernels_avx512)
        return kv_supported(&kernels_avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if KV_HAVE_AVX_VNNI
    if (kernels == &kernels_avx_vnni) return kv_supported(&kernels_avx2) && has_avx_vnni();
#endif
    if (kernels == &kernels_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
#if KV_HAVE_DOTPROD
    if (kernels == &kernels_neon_dotprod) return has_dotprod();
#endif
    (void)kernels;
    return 1;
}

const kv_cpu_feature *kv_cpu_features(void)
{
    static kv_cpu_feature features[] = {
#if KV_X86
        {"sse2", 0}, {"avx", 0}, {"fma", 0}, {"avx2", 0}, {"avx512f", 0}, {"avx512bw", 0},
        {"avx512dq", 0}, {"avx512vl", 0}, {"avx512vnni", 0}, {"avx512vbmi", 0}, {"avx512bf16", 0},
        {"avxvnni", 0},
#endif
#if KV_HAVE_AMX
        {"amx_int8", 0}, {"amx_bf16", 0},
#endif
#if KV_ARM64
        {"neon", 1}, {"dotprod", 0},
#endif
        {NULL, 0}};
#if KV_X86
    kv_cpu_feature *f = features;
    __builtin_cpu_init();
#define KV_FEATURE(name) (f++)->present = __builtin_cpu_supports(name) != 0;
    KV_FEATURE("sse2") KV_FEATURE("avx") KV_FEATURE("fma") KV_FEATURE("avx2")
    KV_FEATURE("avx512f") KV_FEATURE("avx512bw") KV_FEATURE("avx512dq") KV_FEATURE("avx512vl")
    KV_FEATURE("avx512vnni") KV_FEATURE("avx512vbmi") KV_FEATURE("avx512bf16")
    (f++)->present = __builtin_cpu_supports("avx2") && has_avx_vnni();
#endif
#if KV_HAVE_AMX
    f[0].present = f[1].present = kv_supported(&kernels_amx); /* needs the system's permission as well */
#endif
#if KV_ARM64
    features[1].present = has_dotprod();
#endif
    return features;
}
