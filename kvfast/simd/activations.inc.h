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
   and row: sum q (c s + m) = sum (q s) c + sum q m. The channel scales s are 15-bit fractions of a unit,
   so that q s is one rounding 16-bit product of the activations of q, in range as these are; what it is
   multiplied by is at most 15. */
#define KV_MAX_ACTIVATION 32639.0f
#define KV_INVERSE(largest) ((largest) > 0x1p-100f ? KV_MAX_ACTIVATION / (largest) : 0.0f)

#define KV_BIAS(dtype) ((dtype) == KV_INT4 ? 8 : INT8_ZERO)
#define KV_DEPTHS(dtype) ((dtype) == KV_INT8 ? 4 : 8) /* of a line */
#define KV_MEANS 1    /* statistics of a key block: means alone, or */
#define KV_CHANNELS 2 /* with channel scales */

/* Cuts up to KV_PANEL rows of n floats, times their inverse scales, into the activations that dot_panel
   reads, or with `words` scale_words; sums[r] is that of row r. */
static inline __attribute__((always_inline)) void KV(put_activations)(
    const float *rows, ptrdiff_t stride, int num_rows, ptrdiff_t n, const float *inverse, int8_t *x, int32_t *sums,
    const int words)
{
    vi sum[KV_PANEL], value[KV_PANEL];
    KV_FOR4(r, KV_PANEL, sum[r] = value[r] = vi_set1(0););
    for (ptrdiff_t i = 0; i < n; i += W) {
        KV_FOR4(r, num_rows,
            value[r] = vf_round(vf_mul(vf_load(rows + r * stride + i), vf_set1(inverse[r])));
            sum[r] = vi_add(sum[r], value[r]););
        if (words) KV(put_words)(x, i, value[0], value[1], value[2], value[3]);
        else put_parts(x, i, value[0], value[1], value[2], value[3]);
    }
    KV_FOR4(r, num_rows, sums[r] = vi_hsum(sum[r]););
}

static inline __attribute__((always_inline)) void KV(prepare_integer)(
    const kv_side *side, const float *rows, int num_rows, float factor, kv_queries *queries, const int bias)
{
    const ptrdiff_t n = side->padded_dim;
    queries->rows = rows;
    queries->factor = factor;
    for (int row = 0; row < num_rows; row += KV_PANEL) {
        const int panel_rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL;
        float inverse[KV_PANEL];
        for (int r = 0; r < panel_rows; r++) {
            float largest = kv_bits_float((uint32_t)KV(max_magnitude_bits)(rows + (row + r) * n, n));
            inverse[r] = KV_INVERSE(largest);
            queries->scale[row + r] = largest / KV_MAX_ACTIVATION * factor;
        }
        int8_t *parts = queries->parts + row * n * 2;
        if (side->channels) /* fold does the rest, block by block */
            KV(put_activations)(rows + row * n, n, panel_rows, n, inverse, parts, queries->sum + row, 1);
        else
            KV(put_activations)(rows + row * n, n, panel_rows, n, inverse, parts, queries->sum + row, 0);
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
    const kv_side *side, const char *block, const kv_queries *queries, int row, const int num_rows,
    KV(folded) *folded)
{
    const uint16_t *means = (const uint16_t *)(block + side->means), *scales = (const uint16_t *)(block + side->channels);
    const ptrdiff_t n = side->padded_dim;
    const float *rows = queries->rows + row * n;
    if (side->channels) {
        const float unit = KV(unit_of)(scales);
        KV(scale_words)(folded->parts, queries->parts + row * n * 2, scales, n);
        for (int r = 0; r < num_rows; r++) folded->scale[r] = queries->scale[row + r] * unit * 0x1p15f;
    }
    vf shift[KV_PANEL];
    KV_FOR4(r, KV_PANEL, shift[r] = vf_set1(0.0f););
    for (ptrdiff_t i = 0; i < n; i += W) {
        const vf mean = vf_load_float16(means + i);
        KV_FOR4(r, num_rows, shift[r] = vf_fma(vf_load(rows + r * n + i), mean, shift[r]););
    }
    KV(vf_sum4)(shift[0], shift[1], shift[2], shift[3], folded->shift);
    for (int r = 0; r < num_rows; r++) folded->shift[r] *= queries->factor;
}

static __attribute__((noinline)) void KV(fold)(const kv_side *side, const char *block, const kv_queries *queries,
                                               int row, int num_rows, KV(folded) *folded)
{
    switch (num_rows) {
    case 1: KV(fold_rows)(side, block, queries, row, 1, folded); break;
    case 2: KV(fold_rows)(side, block, queries, row, 2, folded); break;
    case 3: KV(fold_rows)(side, block, queries, row, 3, folded); break;
    default: KV(fold_rows)(side, block, queries, row, 4, folded);
    }
}
