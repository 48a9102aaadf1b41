/* What the kernels of all tiers use, in plain C; and the region of the source that is compiled for an instruction set. */
#ifndef KVFAST_COMMON_H
#define KVFAST_COMMON_H

#include "platform.h"

#include <math.h>
#include <string.h>
#if KV_X86
#include <immintrin.h>
#elif KV_ARM64
#include <arm_neon.h>
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

/* The level that prefetches fill where no other is set. On x86 the second (prefetcht1), which on most processors is at
   least as fast as the first (prefetcht0). prefetchnta and no prefetch at all are much slower. kvfast/core/prefetching.py chooses. */
#ifndef KV_PREFETCH_LEVEL
#define KV_PREFETCH_LEVEL (KV_X86 ? 2 : 1)
#endif
#define kv_prefetch(address) __builtin_prefetch(address, 0, KV_PREFETCH_LEVEL == 2 ? 2 : 3)
#define kv_prefetch_write(address) __builtin_prefetch(address, 1, 3)

/* Prefetches lines of 64 bytes to a level, kv_prefetch_level. The hint is part of the instruction, so a level that is not constant
   costs a branch. KV_EACH_LEVEL makes it one, for a second copy of a loop. */
static inline __attribute__((always_inline)) void kv_prefetch_lines(const char *at, const int lines, const int level)
{
    if (level == 2)
        for (int i = 0; i < lines; i++) __builtin_prefetch(at + i * 64, 0, 2);
    else
        for (int i = 0; i < lines; i++) __builtin_prefetch(at + i * 64, 0, 3);
}
#define KV_EACH_LEVEL(loop) \
    if (kv_prefetch_level == 2) loop(2) else loop(1)

static inline void kv_prefetch_scales(const kv_prefetch *stream, ptrdiff_t at)
{
    for (ptrdiff_t i = 0; i < stream->scale_bytes; i += 64)
        kv_prefetch_lines(stream->base + at + stream->scales + i, 1, kv_prefetch_level);
}

/* The scales after the last piece of what a kernel has prefetched. */
static inline void kv_prefetch_end(const kv_ahead *ahead)
{
    kv_prefetch_scales(&ahead->next, ahead->next.at[(ahead->next.bytes - 1) / ahead->next.piece]);
}

/* What a tile prefetches if nothing follows it: its own first line, again and again. The tile must outlive it. */
static inline kv_ahead kv_nothing_ahead(const kv_tile *tile)
{
    const kv_prefetch line = {tile->base, tile->at, 0, 64, 64, 0, 0};
    const kv_ahead ahead = {line, line, 0};
    return ahead;
}

/* Lanes of the whole lane tiles that `count` of them take. */
static inline int kv_whole_lanes(int count)
{
    return (count + KV_LANES - 1) / KV_LANES * KV_LANES;
}

/* The address from which a quad that starts `offset` bytes into its tile prefetches. It continues line after
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

typedef uint32_t kv_dword __attribute__((may_alias)); /* a dword of a line, whatever else it is */
static inline int32_t kv_load32(const void *p) { int32_t x; memcpy(&x, p, 4); return x; }
static inline int64_t kv_load64(const void *p) { int64_t x; memcpy(&x, p, 8); return x; }
static inline uint32_t kv_float_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float kv_bits_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

#include "coding/packed.h"
#include "coding/keys.h"

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

static inline void kv_store_nontemporal(const float *row, ptrdiff_t n, float *target)
{
#if KV_SSE2
    if (n == 0) _mm_sfence(); /* such stores are not ordered otherwise */
    if ((uintptr_t)target % 16 == 0) {
        for (; n >= 4; n -= 4, row += 4, target += 4) _mm_stream_ps(target, _mm_loadu_ps(row));
    }
#endif
    if (n) memcpy(target, row, (size_t)n * sizeof(float));
}

#endif
