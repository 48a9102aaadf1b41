/* Rows of ggml's blocks of 32 elements as floats; included once per instruction set, see ggml_rows.h. */
#define GGML_COMMON_DECL_C
#define GGML_COMMON_IMPL_C
#include "ggml-common.h"

/* 32 codes times a scale, plus an offset. */
static inline void KV(scale_codes)(const int8_t *codes, float scale, float offset, float *out)
{
    for (int i = 0; i < 32; i += W)
        vf_store(out + i, vf_fma(vi_to_float(vi_load_int8(codes + i)), vf_set1(scale), vf_set1(offset)));
}

/* The nibbles of 16 bytes: the low ones, then the high ones. As words, because compilers make vectors of these loops. */
static inline void KV(split_nibbles)(const uint8_t *nibbles, int8_t *codes)
{
    uint64_t words[2], low[2], high[2];
    memcpy(words, nibbles, 16);
    for (int i = 0; i < 2; i++) {
        low[i] = words[i] & 0x0F0F0F0F0F0F0F0F;
        high[i] = words[i] >> 4 & 0x0F0F0F0F0F0F0F0F;
    }
    memcpy(codes, low, 16);
    memcpy(codes + 16, high, 16);
}

/* Bit i of a byte as the fifth bit of code i: the multiplication puts it into byte i. */
static inline void KV(add_fifth_bits)(const uint8_t *bits, int8_t *codes)
{
    for (int i = 0; i < 4; i++) {
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, 8);
        const uint64_t spread = (bits[i] & 0x7F) * 0x0002040810204081 & 0x0001010101010101;
        eight |= (spread | (uint64_t)(bits[i] >> 7) << 56) << 4;
        memcpy(codes + 8 * i, &eight, 8);
    }
}

static void KV(decode_q8_0)(const void *row, ptrdiff_t n, float *out)
{
    const block_q8_0 *block = row;
    for (ptrdiff_t i = 0; i < n; i += 32, block++, out += 32) KV(scale_codes)(block->qs, kv_from_float16(block->d), 0.0f, out);
}

/* The same of blocks that are packed: `load` writes their codes, and `offset` is added to each element. */
#define KV_DECODE(type, load, offset)                                                   \
    static void KV(decode_##type)(const void *row, ptrdiff_t n, float *out)             \
    {                                                                                   \
        const block_##type *block = row;                                                \
        KV_ALIGNED int8_t codes[32];                                                    \
        for (ptrdiff_t i = 0; i < n; i += 32, block++, out += 32) {                     \
            const float scale = kv_from_float16(block->d);                              \
            load                                                                        \
            KV(scale_codes)(codes, scale, offset, out);                                 \
        }                                                                               \
    }
#define KV_FOUR_BITS KV(split_nibbles)(block->qs, codes);
#define KV_FIVE_BITS KV_FOUR_BITS KV(add_fifth_bits)(block->qh, codes);
KV_DECODE(q4_0, KV_FOUR_BITS, -8.0f * scale)
KV_DECODE(q4_1, KV_FOUR_BITS, kv_from_float16(block->m))
KV_DECODE(q5_0, KV_FIVE_BITS, -16.0f * scale)
KV_DECODE(q5_1, KV_FIVE_BITS, kv_from_float16(block->m))
KV_DECODE(iq4_nl, KV_FOUR_BITS for (int j = 0; j < 32; j++) codes[j] = kvalues_iq4nl[codes[j]];, 0.0f)
#undef KV_FIVE_BITS
#undef KV_FOUR_BITS
#undef KV_DECODE

#include "engines/llama_cpp/backend/ggml_products.inc.h"
#ifdef KV_VNNI
#include "engines/llama_cpp/backend/ggml_scores.inc.h"
#endif
#if W >= 8 /* registers that hold a block in a few */
#include "engines/llama_cpp/backend/ggml_values.inc.h"
#endif
#ifdef KV_VBMI
#include "engines/llama_cpp/backend/ggml_value_codes.inc.h"
#endif

const kv_row_kernels KV(kv_row_kernels) = {
    .isa = KV_ISA,
    .decode = {
        [GGML_TYPE_F32] = KV(to_float32),
        [GGML_TYPE_F16] = KV(to_float16),
        [GGML_TYPE_BF16] = KV(to_bfloat16),
        [GGML_TYPE_Q8_0] = KV(decode_q8_0),
        [GGML_TYPE_Q4_0] = KV(decode_q4_0),
        [GGML_TYPE_Q4_1] = KV(decode_q4_1),
        [GGML_TYPE_Q5_0] = KV(decode_q5_0),
        [GGML_TYPE_Q5_1] = KV(decode_q5_1),
        [GGML_TYPE_IQ4_NL] = KV(decode_iq4_nl),
    },
#ifdef KV_VNNI
    .prepare = {[GGML_TYPE_Q8_0] = KV(prepare_q8_0), [GGML_TYPE_Q4_0] = KV(prepare_q4_0)},
    .transpose_codes = {[GGML_TYPE_Q8_0] = KV(transpose_q8_0), [GGML_TYPE_Q4_0] = KV(transpose_q4_0)},
    .multiply_codes = KV(multiply_codes_by_queries),
#endif
#if W >= 8
    .add = {[GGML_TYPE_Q8_0] = KV(add_q8_0), [GGML_TYPE_Q4_0] = KV(add_q4_0)},
#endif
#ifdef KV_VBMI
    .add_rounded = {[GGML_TYPE_Q8_0] = KV(add_codes_q8_0), [GGML_TYPE_Q4_0] = KV(add_codes_q4_0)},
    .gather = {[GGML_TYPE_Q8_0] = KV(gather_q8_0), [GGML_TYPE_Q4_0] = KV(gather_q4_0)},
    .add_gathered = {[GGML_TYPE_Q8_0] = KV(add_gathered_q8_0), [GGML_TYPE_Q4_0] = KV(add_gathered_q4_0)},
#endif
    .multiply = KV(multiply_float_strip),
#ifdef KV_ORDER
    .multiply_in_order = KV(multiply_in_order),
#endif
    .transpose_rows = KV(transpose_rows),
};
