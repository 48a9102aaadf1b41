/* Attention on INT8, INT4 and GAUSS4 codes by integer dot products.

   The activations (q for the scores, softmax weight x V scale for the values) are 16-bit integers in
   -32639..32639 with one float scale per row: their rounding, 1.5e-5 of the row's largest, vanishes
   against that of the stored codes. VNNI multiplies them as 256 x high + low bytes, the others as one
   int16; both give the same integer.

   The sums are exact. With codes, or levels of GAUSS4, c = stored - bias in -127..127 and depth n <= 512,
       |sum c x| <= 127 * 32639 * 512 = 2 122 318 336 < 2^31,
   and what is added on the way (stored codes, parts) is correct modulo 2^32, so the bias may be
   taken off after the sum.

   What belongs to a channel of a key block, instead of a token, goes to the queries, once for each block
   and row: sum q (c s + m) = sum (q s) (c + 8) + sum q (m - 8 s). The products q s are cut into
   activations; what they are multiplied by is at most 15, well within the bound. */
#define KV_MAX_ACTIVATION 32639.0f
#define KV_INVERSE(largest) ((largest) > 0x1p-100f ? KV_MAX_ACTIVATION / (largest) : 0.0f)

#define KV_BIAS(dtype) ((dtype) == KV_INT4 ? 8 : 128)
#define KV_DEPTHS(dtype) ((dtype) == KV_INT8 ? 4 : 8) /* of a line */
#define KV_MEANS 1    /* statistics of a key block: means alone, or */
#define KV_CHANNELS 2 /* with channel scales */

/* Cuts up to KV_PANEL rows of n floats, times their inverse scales, into the activations that dot_panel
   reads; sums[r] is that of row r. */
static inline __attribute__((always_inline)) void KV(put_activations)(
    const float *rows, ptrdiff_t stride, int num_rows, ptrdiff_t n, const float *inverse, int8_t *x, int32_t *sums)
{
    vi sum[KV_PANEL], value[KV_PANEL];
    KV_FOR4(r, KV_PANEL, sum[r] = value[r] = vi_set1(0););
    for (ptrdiff_t i = 0; i < n; i += W) {
        KV_FOR4(r, num_rows,
            value[r] = vf_round(vf_mul(vf_load(rows + r * stride + i), vf_set1(inverse[r])));
            sum[r] = vi_add(sum[r], value[r]););
        KV(put_parts)(x, i, value[0], value[1], value[2], value[3]);
    }
    KV_FOR4(r, num_rows, sums[r] = vi_hsum(sum[r]););
}

static inline __attribute__((always_inline)) void KV(prepare_integer)(
    const kv_side *side, const float *rows, int num_rows, float factor, kv_queries *queries, const int bias)
{
    const ptrdiff_t n = side->padded_dim;
    queries->rows = rows;
    queries->factor = factor;
    if (side->channels) return; /* fold does the rest, block by block */
    for (int row = 0; row < num_rows; row += KV_PANEL) {
        const int panel_rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL;
        float inverse[KV_PANEL];
        for (int r = 0; r < panel_rows; r++) {
            float largest = kv_bits_float((uint32_t)KV(max_magnitude_bits)(rows + (row + r) * n, n));
            inverse[r] = KV_INVERSE(largest);
            queries->scale[row + r] = largest / KV_MAX_ACTIVATION * factor;
        }
        KV(put_activations)(rows + row * n, n, panel_rows, n, inverse, queries->parts + row * n * 2, queries->sum + row);
        for (int r = 0; r < panel_rows; r++) queries->sum[row + r] *= bias;
    }
}

/* What a block's statistics make of a panel of queries: with channel scales its activations and their
   scales, and what every token's score is shifted by. */
typedef struct {
    KV_ALIGNED int8_t parts[KV_PANEL * KV_MAX_HEAD_DIM * 2];
    float scale[KV_PANEL];
    float shift[KV_PANEL];
} KV(folded);

static inline __attribute__((always_inline)) void KV(fold_rows)(
    const kv_side *side, const char *block, const float *rows, float factor, const int num_rows, const int channels,
    KV(folded) *folded)
{
    KV_ALIGNED float products[KV_PANEL * KV_MAX_HEAD_DIM];
    const uint16_t *means = (const uint16_t *)(block + side->means), *scales = (const uint16_t *)(block + side->channels);
    const ptrdiff_t n = side->padded_dim;
    vf shift[KV_PANEL], most[KV_PANEL];
    KV_FOR4(r, KV_PANEL, shift[r] = most[r] = vf_set1(0.0f););
    for (ptrdiff_t i = 0; i < n; i += W) {
        vf mean = vf_load_float16(means + i), scale = mean;
        if (channels) { /* the stored code is c + 8 */
            scale = vf_load_bfloat16(scales + i);
            mean = vf_fma(scale, vf_set1(-8.0f), mean);
        }
        KV_FOR4(r, num_rows,
            const vf q = vf_load(rows + r * n + i);
            shift[r] = vf_fma(q, mean, shift[r]);
            if (channels) {
                const vf product = vf_mul(q, scale);
                vf_store(products + r * n + i, product);
                most[r] = vf_max_abs(most[r], product);
            });
    }
    KV(vf_sum4)(shift[0], shift[1], shift[2], shift[3], folded->shift);
    for (int r = 0; r < num_rows; r++) folded->shift[r] *= factor;
    if (!channels) return;
    float inverse[KV_PANEL];
    int32_t sums[KV_PANEL]; /* not needed: the bias is in the shift */
    KV_FOR4(r, num_rows,
        const float largest = vf_hmax(most[r]);
        inverse[r] = KV_INVERSE(largest);
        folded->scale[r] = largest / KV_MAX_ACTIVATION * factor;);
    KV(put_activations)(products, n, num_rows, n, inverse, folded->parts, sums);
}

static __attribute__((noinline)) void KV(fold)(const kv_side *side, const char *block, const float *rows, float factor,
                                               int num_rows, KV(folded) *folded)
{
#define KV_FOLD(R)                                                                        \
    if (side->channels) KV(fold_rows)(side, block, rows, factor, R, 1, folded);           \
    else KV(fold_rows)(side, block, rows, factor, R, 0, folded);
    switch (num_rows) {
    case 1: KV_FOLD(1) break;
    case 2: KV_FOLD(2) break;
    case 3: KV_FOLD(3) break;
    default: KV_FOLD(4)
    }
#undef KV_FOLD
}
