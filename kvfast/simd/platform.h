/* What the compiler and the processor's family allow, and the tiers that follow from it. */
#ifndef KVFAST_PLATFORM_H
#define KVFAST_PLATFORM_H

#include "kernels.h"

#if defined(__x86_64__) || defined(__i386__)
#define KV_X86 1
#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define KV_HAVE_AMX 1
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
#else
#define KV_ARM64 0
#endif
/* clang declares its intrinsics in target regions only from version 16 on. */
#if KV_ARM64 && (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))
#define KV_HAVE_DOTPROD 1
#else
#define KV_HAVE_DOTPROD 0
#endif

#if KV_HAVE_DOTPROD && ((!defined(__clang__) && __GNUC__ >= 10) || __clang_major__ >= 16 || defined(__ARM_FEATURE_MATMUL_INT8))
#define KV_HAVE_I8MM 1
#else
#define KV_HAVE_I8MM 0
#endif
#if KV_HAVE_I8MM && ((!defined(__clang__) && __GNUC__ >= 10) || __clang_major__ >= 16 || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define KV_HAVE_BF16 1
#else
#define KV_HAVE_BF16 0
#endif

/* TIER(name) for each table of kernels, best first; tiers/ has them. The matrix unit's stands next to avx512_vbmi. */
#if KV_HAVE_AMX
#define KV_MATRIX_TIERS(TIER) TIER(amx)
#else
#define KV_MATRIX_TIERS(TIER)
#endif
#if KV_HAVE_AVX_VNNI
#define KV_AVX_VNNI_TIERS(TIER) TIER(avx_vnni)
#else
#define KV_AVX_VNNI_TIERS(TIER)
#endif
#if KV_SSE2
#define KV_SSE2_TIERS(TIER) TIER(sse2)
#else
#define KV_SSE2_TIERS(TIER)
#endif
#if KV_HAVE_BF16
#define KV_BF16_TIERS(TIER) TIER(neon_bf16)
#else
#define KV_BF16_TIERS(TIER)
#endif
#if KV_HAVE_I8MM
#define KV_I8MM_TIERS(TIER) TIER(neon_i8mm)
#else
#define KV_I8MM_TIERS(TIER)
#endif
#if KV_HAVE_DOTPROD
#define KV_DOTPROD_TIERS(TIER) TIER(neon_dotprod)
#else
#define KV_DOTPROD_TIERS(TIER)
#endif
#if KV_X86
#define KV_VECTOR_TIERS(TIER) \
    TIER(avx512_vbmi) TIER(avx512_vnni) TIER(avx512) KV_AVX_VNNI_TIERS(TIER) TIER(avx2) KV_SSE2_TIERS(TIER) TIER(scalar)
#elif KV_ARM64
#define KV_VECTOR_TIERS(TIER) KV_BF16_TIERS(TIER) KV_I8MM_TIERS(TIER) KV_DOTPROD_TIERS(TIER) TIER(neon) TIER(scalar)
#else
#define KV_VECTOR_TIERS(TIER) TIER(scalar)
#endif
#define KV_TIERS(TIER) KV_MATRIX_TIERS(TIER) KV_VECTOR_TIERS(TIER)

/* TIER(name, exact) for each table of the fast precision, with that of the exact one; tiers/fast_*.c have them. */
#if KV_X86 && defined(KV_MORE_KERNELS) /* panels of float rows, for which VBMI has nothing of its own; see tier.inc.h */
#if KV_HAVE_AMX
#define KV_FAST_MATRIX_TIERS(TIER) TIER(amx_fast, amx)
#else
#define KV_FAST_MATRIX_TIERS(TIER)
#endif
#define KV_FAST_TIERS(TIER) KV_FAST_MATRIX_TIERS(TIER) TIER(avx512_vnni_fast, avx512_vbmi) TIER(avx512_vnni_fast, avx512_vnni)
#elif KV_X86
#if KV_HAVE_AMX
#define KV_FAST_MATRIX_TIERS(TIER) TIER(amx_fast, amx) TIER(avx512_vbmi_fast, amx) /* its panels, and vectors */
#else
#define KV_FAST_MATRIX_TIERS(TIER)
#endif
#if KV_HAVE_AVX_VNNI
#define KV_FAST_AVX_VNNI_TIERS(TIER) TIER(avx_vnni_fast, avx_vnni)
#else
#define KV_FAST_AVX_VNNI_TIERS(TIER)
#endif
#define KV_FAST_TIERS(TIER)                                                                                        \
    KV_FAST_MATRIX_TIERS(TIER) TIER(avx512_vbmi_fast, avx512_vbmi) TIER(avx512_vnni_fast, avx512_vnni)             \
    TIER(avx512_fast, avx512) KV_FAST_AVX_VNNI_TIERS(TIER) TIER(avx2_fast, avx2)
#elif KV_ARM64 && KV_HAVE_DOTPROD && !defined(KV_MORE_KERNELS)
#define KV_FAST_TIERS(TIER) TIER(neon_dotprod_fast, neon_dotprod)
#else
#define KV_FAST_TIERS(TIER)
#endif

#define KV_DECLARE(tier, ...) extern kv_kernels kv_kernels_##tier;
KV_TIERS(KV_DECLARE)
KV_FAST_TIERS(KV_DECLARE)
#undef KV_DECLARE

#endif
