/* Vector layer, Advanced SIMD, which every 64-bit ARM has, perhaps with the dot products of ARMv8.2 (KV_DOTPROD) or the products of
   matrices of ARMv8.6, of bytes (KV_I8MM) and of bfloat16 (KV_BF16): 4 floats a register. vec_scalar.h explains the names. */
#define W 4
#define INT_VECTORS 2   /* 4 rows x 2 accumulators x 2 = 16 */
#if defined(KV_I8MM)
#define INT8_ZERO 128
#define INT_PRODUCTS 8  /* 4 depths x the two parts of an activation */
#elif defined(KV_DOTPROD)
#define INT8_ZERO 0
#define INT_PRODUCTS 8
#else
#define INT8_ZERO 128
#define INT_PRODUCTS 4
#endif
#define FLOAT_VECTORS 4
#define FLOAT_TOKENS 4

#define vf float32x4_t
#define vi int32x4_t
#define vf_load(p) vld1q_f32(p)
#define vf_store(p, x) vst1q_f32(p, x)
#define vf_set1(x) vdupq_n_f32(x)
#define vf_add(a, b) vaddq_f32(a, b)
#define vf_sub(a, b) vsubq_f32(a, b)
#define vf_mul(a, b) vmulq_f32(a, b)
#define vf_div(a, b) vdivq_f32(a, b)
#define vf_max(a, b) vmaxq_f32(a, b)
#define vf_min(a, b) vminnmq_f32(a, b)
#define vf_fma(a, b, c) vfmaq_f32(c, a, b)
#define vf_abs(x) vabsq_f32(x)
#define vf_sign_of(x, s) vbslq_f32(vdupq_n_u32(0x80000000u), s, x)
#define vf_zero_below(y, x, limit) vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, vf_set1(limit))))
#define vf_hmax(x) vmaxnmvq_f32(x)
#define vf_round(x) vcvtnq_s32_f32(x)
#define vf_mix_low(a, b) vzip1q_f32(a, b)
#define vf_mix_high(a, b) vzip2q_f32(a, b)
#define vi_load(p) vld1q_s32((const int32_t *)(p))
#define vf_truncate(x) vcvtq_s32_f32(x)
#define vf_bits(x) vreinterpretq_s32_f32(x)
#define vi_set1(x) vdupq_n_s32(x)
#define vi_add(a, b) ((vi)((uint32x4_t)(a) + (uint32x4_t)(b)))
#define vi_sub(a, b) ((vi)((uint32x4_t)(a) - (uint32x4_t)(b)))
#define vi_and(a, b) vandq_s32(a, b)
#define vi_max(a, b) vmaxq_s32(a, b)
#define vi_count_above(n, a, b) vi_sub(n, vcgtq_f32(a, b))
#define vi_hmax(x) vmaxvq_s32(x)
#define vi_hsum(x) vaddvq_s32(x)
#define vi_to_float(x) vcvtq_f32_s32(x)
#define vi_exponent(n) vreinterpretq_f32_s32(vshlq_n_s32(vi_add(n, vi_set1(127)), 23))

#define vf_load_float16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(p))))
#define vf_load_bfloat16(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)(p)), 16))
#define vf_store_float16(p, x) vst1_u16((uint16_t *)(p), vreinterpret_u16_f16(vcvt_f16_f32(x)))

/* The bytes 4 i + 0, 1, 2, 3 of the table are those of its element i. */
#define vf_lookup8(table, index)                                                                             \
    vreinterpretq_f32_u8(vqtbl2q_u8(vld1q_u8_x2((const uint8_t *)(table)),                                   \
                                    vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100u),               \
                                                                     vreinterpretq_u32_s32(index), 0x04040404u))))

static inline void KV(vi_store_int8)(int8_t *p, vi x)
{
    const int16x4_t words = vqmovn_s32(x);
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
    memcpy(p, &bytes, 4);
}
#define vi_store_int8 KV(vi_store_int8)
static inline void KV(vi_store_uint8)(uint8_t *p, vi x)
{
    const int16x4_t words = vqmovn_s32(x);
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vqmovun_s16(vcombine_s16(words, words))), 0);
    memcpy(p, &bytes, 4);
}
#define vi_store_uint8 KV(vi_store_uint8)
#define vi_load_int8(p) vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(kv_load32(p))))))

static inline vf KV(vf_hadamard)(vf x)
{
    x = vf_fma(x, vf_load(kv_hadamard[0]), vrev64q_f32(x));
    return vf_fma(x, vf_load(kv_hadamard[1]), vextq_f32(x, x, 2));
}

static inline float KV(vf_hsum)(vf x)
{
    return vaddv_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x)));
}
#define vf_hsum KV(vf_hsum)

static inline void KV(vf_sum4)(vf a, vf b, vf c, vf d, float *sums)
{
    vf_store(sums, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

#define vcodes uint8x16_t
#define vcodes_load(p) vld1q_u8((const uint8_t *)(p))
#define vcodes_low(c) vandq_u8(c, vdupq_n_u8(15))
#define vcodes_shift(c) vshrq_n_u8(c, 4)
#define vacc int32x4_t

#if defined(KV_I8MM)
/* Multiplies codes by signed bytes: an activation is cut into 256 x high + low. One instruction multiplies 8 depths of two lanes, the
   rows of a matrix, by both parts of one activation, the columns of another. So a single query row gains as much as several. */
#define vcodes_bytes(c) (c)
#define vcodes_levels(c) vqtbl1q_u8(vld1q_u8(kv_gauss_levels), vcodes_low(c))
typedef struct { uint8x16_t first, last; } KV(vpair); /* lanes 0 and 1, 2 and 3 */
#define vpair KV(vpair)
static inline vpair KV(vpair_of)(vcodes c, vcodes d)
{
    const uint32x4_t first = vreinterpretq_u32_u8(c), second = vreinterpretq_u32_u8(d);
    return (vpair){vreinterpretq_u8_u32(vzip1q_u32(first, second)), vreinterpretq_u8_u32(vzip2q_u32(first, second))};
}
#define vpair_of(c, d) KV(vpair_of)(c, d)
#define vpair_dot(a, b, codes, x)                         \
    do {                                                  \
        const int8x16_t parts = vld1q_s8(x);              \
        a = vusmmlaq_s32(a, (codes).first, parts);        \
        b = vusmmlaq_s32(b, (codes).last, parts);         \
    } while (0)
#define vpair_total(a, b) vi_add(vshlq_n_s32(vuzp1q_s32(a, b), 8), vuzp2q_s32(a, b))
#elif defined(KV_DOTPROD)
/* Multiplies signed codes by signed bytes, parts of activations as above. (Unsigned by signed needs the extension I8MM.) */
#define KV_SIGNED(bytes) veorq_u8(bytes, vdupq_n_u8(128))
#define vcodes_bytes(c) KV_SIGNED(c)
#define vcodes_levels(c) vqtbl1q_u8(KV_SIGNED(vld1q_u8(kv_gauss_levels)), vcodes_low(c))
#define vwide int8x16_t
#define vcodes_widen(c) vreinterpretq_s8_u8(c)
#if KV_FAST
#define KV_ONE_SUM 1
#define vquad int8x16_t
#define vquad_load(x) vld1q_s8(x)
#define vquad_dot(a, codes, quad, row) ((a) = vdotq_laneq_s32(a, codes, quad, row))
#define vacc_dot(a, b, codes, x) vquad_dot(a, codes, vld1q_s8(x), 0)
#define vacc_total(a, b) vi_add(a, b)
#else
#define vacc_dot(high, low, codes, x)                         \
    do {                                                      \
        const int8x8_t parts = vld1_s8(x);                    \
        high = vdotq_lane_s32(high, codes, parts, 0);         \
        low = vdotq_lane_s32(low, codes, parts, 1);           \
    } while (0)
#define vacc_total(high, low) vi_add(vshlq_n_s32(high, 8), low)
#endif
#else
/* Works depth by depth, each with 4 lanes: multiplying by one activation needs no sum across lanes. */
#define vcodes_bytes(c) (c)
#define vcodes_levels(c) vqtbl1q_u8(vld1q_u8(kv_gauss_levels), vcodes_low(c))
typedef struct { int16x8_t first, last; } KV(vwide); /* depths 0 and 1, 2 and 3 */
#define vwide KV(vwide)
static inline vwide KV(vcodes_widen)(vcodes c)
{
    static const uint8_t first[16] = {0, 255, 4, 255, 8, 255, 12, 255, 1, 255, 5, 255, 9, 255, 13, 255}; /* beyond 15: 0 */
    static const uint8_t last[16] = {2, 255, 6, 255, 10, 255, 14, 255, 3, 255, 7, 255, 11, 255, 15, 255};
    return (vwide){vreinterpretq_s16_u8(vqtbl1q_u8(c, vld1q_u8(first))), vreinterpretq_s16_u8(vqtbl1q_u8(c, vld1q_u8(last)))};
}
#define vcodes_widen(c) KV(vcodes_widen)(c)
#define vacc_dot(a, b, codes, x)                                                     \
    do {                                                                             \
        const int16x4_t words = vreinterpret_s16_s8(vld1_s8(x));                     \
        a = vmlal_lane_s16(a, vget_low_s16((codes).first), words, 0);                \
        b = vmlal_lane_s16(b, vget_low_s16((codes).last), words, 2);                 \
        a = vmlal_high_lane_s16(a, (codes).first, words, 1);                         \
        b = vmlal_high_lane_s16(b, (codes).last, words, 3);                          \
    } while (0)
#define vacc_total(a, b) vi_add(a, b)
#endif

#if KV_FAST
static inline void KV(put_parts)(int8_t *x, ptrdiff_t index, vi r0, vi r1, vi r2, vi r3)
{
    const int16x8_t r01 = vcombine_s16(vmovn_s32(r0), vmovn_s32(r1)), r23 = vcombine_s16(vmovn_s32(r2), vmovn_s32(r3));
    vst1q_s8(x + index * 4, vcombine_s8(vmovn_s16(r01), vmovn_s16(r23)));
}
#else
/* 4 depths of two rows. */
static inline void KV(store_parts)(int8_t *x, int16x8_t words)
{
#if defined(KV_DOTPROD) || defined(KV_I8MM)
    /* The high bytes of each 4 words, rounded, then their low bytes. */
    const int32x2_t high = vreinterpret_s32_s8(vshrn_n_s16(vaddq_s16(words, vdupq_n_s16(128)), 8));
    const int32x2_t low = vreinterpret_s32_s8(vmovn_s16(words));
    vst1q_s8(x, vreinterpretq_s8_s32(vcombine_s32(vzip1_s32(high, low), vzip2_s32(high, low))));
#else
    vst1q_s8(x, vreinterpretq_s8_s16(words));
#endif
}

static inline void KV(put_parts)(int8_t *x, ptrdiff_t index, vi r0, vi r1, vi r2, vi r3)
{
    KV(store_parts)(x + index * 8, vcombine_s16(vmovn_s32(r0), vmovn_s32(r1)));
    KV(store_parts)(x + index * 8 + 16, vcombine_s16(vmovn_s32(r2), vmovn_s32(r3)));
#ifdef KV_I8MM
    /* 8 depths of a row are the high bytes of all, then the low ones. */
    if (index % 8 == 0) return;
    x += index / 8 * 64;
    const int32x4_t first01 = vi_load(x), first23 = vi_load(x + 16), last01 = vi_load(x + 32), last23 = vi_load(x + 48);
    vst1q_s32((int32_t *)x, vzip1q_s32(first01, last01));
    vst1q_s32((int32_t *)(x + 16), vzip2q_s32(first01, last01));
    vst1q_s32((int32_t *)(x + 32), vzip1q_s32(first23, last23));
    vst1q_s32((int32_t *)(x + 48), vzip2q_s32(first23, last23));
#endif
}
#endif
#define put_parts KV(put_parts)

#ifdef KV_BF16
/* Products of matrices: of 4 depths of two rows of bfloat16 by those of two others, in a[0] to a[3] those of the first row by both. */
#define vhalves bfloat16x8_t
#define vhalves_load(p) vreinterpretq_bf16_u16(vld1q_u16(p))
#define KV_PAIRED(zip, a, b) vreinterpretq_bf16_u64(zip(vreinterpretq_u64_bf16(a), vreinterpretq_u64_bf16(b)))
#define vhalves_low(a, b) KV_PAIRED(vzip1q_u64, a, b)
#define vhalves_high(a, b) KV_PAIRED(vzip2q_u64, a, b)
#define vhalves_dot(acc, a, b) vbfmmlaq_f32(acc, a, b)
#define vhalves_first(a, b) vcombine_f32(vget_low_f32(a), vget_low_f32(b))
#define vhalves_second(a, b) vcombine_f32(vget_high_f32(a), vget_high_f32(b))
#endif

static inline uint32_t KV(top_bits)(const uint16_t *p)
{
    const uint8x16_t high = vuzp2q_u8(vreinterpretq_u8_u16(vld1q_u16(p)), vreinterpretq_u8_u16(vld1q_u16(p + 8)));
    const int8x16_t places = vreinterpretq_s8_u64(vdupq_n_u64(0x0706050403020100u));
    const uint8x16_t ones = vshlq_u8(vshrq_n_u8(high, 7), places);
    return vaddv_u8(vget_low_u8(ones)) | (uint32_t)vaddv_u8(vget_high_u8(ones)) << 8;
}
