/* Rows of ggml's blocks of 32 elements as floats; included once per instruction set, see ggml_rows.h. */

/* 32 codes times a scale, plus an offset. */
static inline void KV(scale_codes)(const int8_t *codes, float scale, float offset, float *out)
{
    for (int i = 0; i < 32; i += W)
        vf_store(out + i, vf_fma(vi_to_float(vi_load_int8(codes + i)), vf_set1(scale), vf_set1(offset)));
}

/* The nibbles of 16 bytes: the low ones, then the high ones. */
static inline void KV(split_nibbles)(const uint8_t *nibbles, int bias, int8_t *codes)
{
    for (int i = 0; i < 16; i++) {
        codes[i] = (int8_t)((nibbles[i] & 15) - bias);
        codes[16 + i] = (int8_t)((nibbles[i] >> 4) - bias);
    }
}

static inline void KV(add_fifth_bits)(const uint8_t *bits, int8_t *codes)
{
    uint32_t word;
    memcpy(&word, bits, 4);
    for (int i = 0; i < 32; i++) codes[i] = (int8_t)(codes[i] + (int8_t)((word >> i & 1) << 4));
}

static void KV(decode_q8_0)(const void *row, ptrdiff_t n, float *out)
{
    const block_q8_0 *block = row;
    for (ptrdiff_t i = 0; i < n; i += 32, block++, out += 32) KV(scale_codes)(block->qs, kv_from_float16(block->d), 0.0f, out);
}

static void KV(decode_q4_0)(const void *row, ptrdiff_t n, float *out)
{
    const block_q4_0 *block = row;
    KV_ALIGNED int8_t codes[32];
    for (ptrdiff_t i = 0; i < n; i += 32, block++, out += 32) {
        KV(split_nibbles)(block->qs, 8, codes);
        KV(scale_codes)(codes, kv_from_float16(block->d), 0.0f, out);
    }
}

static void KV(decode_q4_1)(const void *row, ptrdiff_t n, float *out)
{
    const block_q4_1 *block = row;
    KV_ALIGNED int8_t codes[32];
    for (ptrdiff_t i = 0; i < n; i += 32, block++, out += 32) {
        KV(split_nibbles)(block->qs, 0, codes);
        KV(scale_codes)(codes, kv_from_float16(block->d), kv_from_float16(block->m), out);
    }
}

static void KV(decode_q5_0)(const void *row, ptrdiff_t n, float *out)
{
    const block_q5_0 *block = row;
    KV_ALIGNED int8_t codes[32];
    for (ptrdiff_t i = 0; i < n; i += 32, block++, out += 32) {
        KV(split_nibbles)(block->qs, 16, codes);
        KV(add_fifth_bits)(block->qh, codes);
        KV(scale_codes)(codes, kv_from_float16(block->d), 0.0f, out);
    }
}

static void KV(decode_q5_1)(const void *row, ptrdiff_t n, float *out)
{
    const block_q5_1 *block = row;
    KV_ALIGNED int8_t codes[32];
    for (ptrdiff_t i = 0; i < n; i += 32, block++, out += 32) {
        KV(split_nibbles)(block->qs, 0, codes);
        KV(add_fifth_bits)(block->qh, codes);
        KV(scale_codes)(codes, kv_from_float16(block->d), kv_from_float16(block->m), out);
    }
}

static void KV(decode_iq4_nl)(const void *row, ptrdiff_t n, float *out)
{
    const block_iq4_nl *block = row;
    KV_ALIGNED int8_t codes[32];
    for (ptrdiff_t i = 0; i < n; i += 32, block++, out += 32) {
        KV(split_nibbles)(block->qs, 0, codes);
        for (int j = 0; j < 32; j++) codes[j] = kvalues_iq4nl[codes[j]];
        KV(scale_codes)(codes, kv_from_float16(block->d), 0.0f, out);
    }
}

static const kv_row_kernels KV(row_kernels) = {
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
};
