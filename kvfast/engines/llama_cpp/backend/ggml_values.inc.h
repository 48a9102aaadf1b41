/* Adds weights times rows of ggml's blocks, converted in registers. A token's weight takes the scale of each of its blocks. */

/* W elements of a block from `i` on, without its scale. */
static inline __attribute__((always_inline)) vf KV(load_elements)(const char *block, int i, const int type)
{
    if (type == GGML_TYPE_Q8_0) return vi_to_float(vi_load_int8(((const block_q8_0 *)block)->qs + i));
    const uint8_t *nibbles = ((const block_q4_0 *)block)->qs + i % 16;
    int8_t codes[W];
    for (int j = 0; j < W; j += 8) {
        uint64_t word;
        memcpy(&word, nibbles + j, 8);
        word = (i < 16 ? word : word >> 4) & 0x0F0F0F0F0F0F0F0F;
        memcpy(codes + j, &word, 8);
    }
    return vi_to_float(vi_sub(vi_load_int8(codes), vi_set1(8)));
}

/* rows x (vectors x W) elements of one block, from `first` on, over count tokens. */
static inline __attribute__((always_inline)) void KV(add_block)(
    const char *values, ptrdiff_t stride, int count, int first, const float *weights, const float *rescale, const int rows,
    const int vectors, kv_lines ahead, float *acc, ptrdiff_t n, const int type)
{
    vf sum[KV_QUAD][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = vf_mul(vf_load(acc + r * n + v * W), vf_set1(rescale[r]));
    for (int t = 0; t < count; t++, values += stride) {
        kv_prefetch(ahead.at), ahead.at += ahead.bytes;
        vf value[2];
        for (int v = 0; v < vectors; v++) value[v] = KV(load_elements)(values, first + v * W, type);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = vf_fma(vf_set1(weights[r * KV_TILE + t]), value[v], sum[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) vf_store(acc + r * n + v * W, sum[r][v]);
}

/* The scales of a block of `count` tokens, and 0 up to the next multiple of KV_LANES. */
static inline __attribute__((always_inline)) void KV(load_block_scales)(const char *values, ptrdiff_t stride, int count, float *scales)
{
    KV_ALIGNED uint16_t halves[KV_TILE];
#pragma GCC unroll 8
    for (int t = 0; t < count; t++, values += stride) memcpy(halves + t, values, 2);
    for (int t = count; t < kv_whole_lanes(count); t++) halves[t] = 0;
    KV(to_float16)(halves, kv_whole_lanes(count), scales);
}

static inline __attribute__((always_inline)) void KV(add_rows)(
    kv_softmax *state, int num_rows, const char *values, ptrdiff_t stride, int n, int count, kv_lines ahead, float *acc, const int type)
{
    enum { VECTORS = 2, STEP = VECTORS * W };
    const ptrdiff_t block_bytes = type == GGML_TYPE_Q8_0 ? sizeof(block_q8_0) : sizeof(block_q4_0);
    const ptrdiff_t step = ahead.bytes / (count * (n / STEP)) + 1; /* fetched with each piece of a row */
    KV_ALIGNED float scales[KV_TILE], weights[KV_QUAD * KV_TILE];
    for (int b = 0; b < n / 32; b++, values += block_bytes) {
        KV(load_block_scales)(values, stride, count, scales);
        for (int row = 0; row < num_rows; row += KV_QUAD) {
            const int rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < count; t += W)
                    vf_store(weights + r * KV_TILE + t, vf_mul(vf_load(state->weights + (row + r) * KV_TILE + t), vf_load(scales + t)));
            for (int i = 0; i < 32; i += STEP) {
                float *at = acc + (ptrdiff_t)row * n + b * 32 + i;
                const kv_lines lines = {ahead.at + (b * 32 + i) / STEP * count * step, row == 0 ? step : 0};
#define KV_ADD_BLOCK(R) KV(add_block)(values, stride, count, i, weights, state->rescale + row, R, VECTORS, lines, at, n, type)
                switch (rows) {
                case 1: KV_ADD_BLOCK(1); break;
                case 2: KV_ADD_BLOCK(2); break;
                case 3: KV_ADD_BLOCK(3); break;
                default: KV_ADD_BLOCK(4);
                }
#undef KV_ADD_BLOCK
            }
        }
    }
}

#define KV_ADD(name, add, type)                                                                                       \
    static void KV(name)(kv_softmax *state, int num_rows, const char *values, ptrdiff_t stride, int n, int count,     \
                         kv_lines ahead, float *acc)                                                                  \
    {                                                                                                                 \
        KV(add)(state, num_rows, values, stride, n, count, ahead, acc, type);                                         \
    }
KV_ADD(add_q8_0, add_rows, GGML_TYPE_Q8_0)
KV_ADD(add_q4_0, add_rows, GGML_TYPE_Q4_0)
