/* Vector layer, plain C: one float a "register". The other tiers are tested against it, and CPUs without
   another tier use it.

   Every vec_*.h defines the same names over its own registers:

     W                      floats per register
     *_VECTORS, *_TOKENS    shape of the sums of a quad that fill, but do not spill, the register file
     INT8_ZERO              what 0 is among the bytes of vcodes_bytes and vcodes_levels
     INT_PRODUCTS           multiplications of vacc_dot in a lane
     vf_*, vi_*             float32 and int32 arithmetic; vf_sign_of(x, s) is |x| with s's sign,
                            vf_zero_below(y, x, limit) is 0 where x < limit and y elsewhere, also for NaN;
                            of vf_max(a, b) NaN in b stays,
                            vi_exponent(n) is 2^n, vf_lookup8(table, index) the elements of an array of 8
                            floats, vi_count_above(n, a, b) is n + 1 where a > b and n elsewhere,
                            vf_mix_low and vf_mix_high are the first and last W of a[0], b[0], a[1], b[1], ...
     vf_hadamard            the lanes of a register times Sylvester's matrix: sums and differences of lanes
                            1, 2, 4 and 8 apart, by products with 1 and -1, which are exact
     vf_sum4                the four sums across the lanes of four registers
     vcodes, vcodes_*       W x 4 bytes of codes; those of INT8, the low nibbles of INT4, and the levels of
                            GAUSS4 that they stand for, as bytes, INT8 and levels + INT8_ZERO; vcodes_shift
                            makes the high nibbles the low ones, under anything
     vwide, vcodes_widen    codes in the form that vacc_dot multiplies, shared by all rows
     vacc_dot, vacc_total   W dot products with 16-bit activations in two int32 accumulators, and
                            their total modulo 2^32
     vpair, vpair_*         what some tiers have instead of vwide and vacc_*: codes of 8 depths, from two registers
     vhalves, vhalves_*     in some tiers bfloat16 as it is multiplied; see score_halves
     put_parts              stores W activations (-32639..32639) of KV_QUAD rows as vacc_dot reads
                            them: for each 4 depths, 8 bytes of every row
     top_bits               those of 16 uint16, the first as bit 0 */
#define W 1
#define INT_VECTORS 1
#define INT8_ZERO 128
#define INT_PRODUCTS 4
#define FLOAT_VECTORS 2
#define FLOAT_TOKENS 2

#define vf float
#define vi int32_t
#define vf_load(p) (*(const float *)(p))
#define vf_store(p, x) (*(float *)(p) = (x))
#define vf_set1(x) (x)
#define vf_add(a, b) ((a) + (b))
#define vf_sub(a, b) ((a) - (b))
#define vf_mul(a, b) ((a) * (b))
#define vf_div(a, b) ((a) / (b))
#define vf_max(a, b) ((a) > (b) ? (a) : (b))
#define vf_min(a, b) ((a) < (b) ? (a) : (b))
#define vf_fma(a, b, c) ((a) * (b) + (c))
#define vf_abs(x) __builtin_fabsf(x)
#define vf_sign_of(x, s) __builtin_copysignf(x, s)
#define vf_zero_below(y, x, limit) ((x) < (limit) ? 0.0f : (y))
#define vf_hmax(x) (x)
#define vf_hsum(x) (x)
/* Adding 1.5 x 2^23 rounds to the nearest even integer, as vector units do, and leaves it in the low bits; |x| < 2^22. NaN
   gives any integer, as with vector units. */
#define vf_round(x) ((int32_t)(kv_float_bits((x) + 12582912.0f) - 0x4B400000u))
#define vf_truncate(x) ((int32_t)(x))
#define vf_bits(x) ((int32_t)kv_float_bits(x))
#define vf_lookup8(table, index) ((table)[index])
#define vf_mix_low(a, b) (a)
#define vf_mix_high(a, b) (b)
#define vi_load(p) (*(const int32_t *)(p))
#define vi_set1(x) (x)
#define vi_add(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define vi_sub(a, b) ((int32_t)((uint32_t)(a) - (uint32_t)(b)))
#define vi_and(a, b) ((a) & (b))
#define vi_max(a, b) ((a) > (b) ? (a) : (b))
#define vi_count_above(n, a, b) ((n) + ((a) > (b)))
#define vi_hmax(x) (x)
#define vi_hsum(x) (x)
#define vi_to_float(x) ((float)(x))
#define vi_exponent(n) kv_bits_float((uint32_t)((n) + 127) << 23)

#define vf_load_float16(p) kv_from_float16(*(const uint16_t *)(p))
#define vf_load_bfloat16(p) kv_bits_float((uint32_t)*(const uint16_t *)(p) << 16)
#define vf_store_float16(p, x) (*(uint16_t *)(p) = kv_to_float16(x))
#define vi_store_int8(p, x) (*(int8_t *)(p) = (int8_t)(x))
#define vi_store_uint8(p, x) (*(uint8_t *)(p) = (uint8_t)(x))
#define vi_load_int8(p) ((int32_t)*(const int8_t *)(p))

static inline vf KV(vf_hadamard)(vf x) { return x; }
static inline void KV(vf_sum4)(vf a, vf b, vf c, vf d, float *sums)
{
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

#define vcodes uint32_t
#define vcodes_load(p) ((uint32_t)kv_load32(p))
#define vcodes_bytes(c) (c)
#define vcodes_low(c) ((c) & 0x0F0F0F0Fu)
#define vcodes_shift(c) ((c) >> 4)
static inline vcodes KV(vcodes_levels)(vcodes c)
{
    vcodes levels = 0;
    for (int i = 0; i < 32; i += 8) levels |= (vcodes)kv_gauss_levels[c >> i & 15] << i;
    return levels;
}
#define vcodes_levels KV(vcodes_levels)
#define vwide uint32_t
#define vcodes_widen(c) (c)
static inline uint32_t KV(vacc_dot)(uint32_t codes, const int8_t *x)
{
    int16_t activations[4];
    uint32_t sum = 0;
    memcpy(activations, x, 8);
    for (int j = 0; j < 4; j++) sum += (codes >> 8 * j & 255) * (uint32_t)activations[j];
    return sum;
}
#define vacc vi
#define vacc_dot(a, b, codes, x) ((a) = vi_add(a, KV(vacc_dot)(codes, x)))
#define vacc_total(a, b) vi_add(a, b)

static inline void KV(put_parts)(int8_t *x, ptrdiff_t index, vi r0, vi r1, vi r2, vi r3)
{
    const int16_t parts[KV_QUAD] = {(int16_t)r0, (int16_t)r1, (int16_t)r2, (int16_t)r3};
    for (int r = 0; r < KV_QUAD; r++) memcpy(x + index / 4 * 32 + r * 8 + index % 4 * 2, parts + r, 2);
}
#define put_parts KV(put_parts)

static inline uint32_t KV(top_bits)(const uint16_t *p)
{
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= (uint32_t)(p[i] >> 15) << i;
    return bits;
}
