/* Attention on INT8, INT4 and GAUSS4 codes by integer dot products.

   The activations (q for the scores, softmax weight x V scale for the values) are 16-bit integers in
   -32639..32639 with one float scale per row: their rounding is at most 1.5e-5 of the row's largest.
   VNNI multiplies them as 256 x high + low bytes, the other tiers as one int16; both give the same integer.

   The sums are exact. With codes, or levels of GAUSS4, c = stored - bias in -127..127 and depth n <= 512,
       |sum c x| <= 127 * 32639 * 512 = 2 122 318 336 < 2^31,
   and the intermediate sums (of stored codes, of parts) are correct modulo 2^32, so the bias may be
   subtracted after the sum.

   The scales and means of the channels of a key block are folded into the queries, once for each block and
   row: sum q (c s + m) = sum (q s) (c - bias) + sum q (m + bias s).

   Scores: the rounding of a row's n activations, 0.29 of a unit each (the standard deviation of a uniform distribution),
   adds up over a token's codes to

       error = 0.29 sqrt(n) |c| unit,    unit = largest |q| / 32639 x softmax scale x scale of the token,

   with |c| the root mean square of its codes. The error can exceed KV_LEAST_ERROR if scores are large, or if one channel is
   louder than the others and so makes the unit large. Then the rounding errors are multiplied as well, as activations of
   their own (refine), and the error is 2^-16 of that; but not for scores so far below the largest that the error cannot matter
   (least_errors). Only the row and the token, or block, and the tiles before decide this, and the tile itself where the row sees all of
   it. So a query has the same bits with others and alone.

   Weights: many small weights next to a large one would all be rounded to 0. So the rounding error of a weight is
   added to the next weight of its lane, of 16, and the sum of weights is right to half a unit for each lane. The rounding of m
   weights adds up over their tokens' codes to

       error = 0.29 sqrt(m) |c|,    in units of the largest weight / 32638,

   for each element of the output. It matters where the output is small: where the largest weight belongs to a row of values with
   few loud elements, or where values cancel. So the squares of unit x |c| are summed up over the tiles, as `noise`. A row whose
   root mean square is small next to the noise is computed again, and the rounding errors are multiplied as well (refine_values).
   Only the row itself decides this. Panels are not refined: such a row of a panel is read again like few rows.

   The fast precision (KV_FAST) has activations of one byte, in -127..127. Then |sum c x| <= 128 * 127 * 512 < 2^23, and the errors
   are those above with 127 in place of 32639. Nothing is multiplied again: where an error may matter the score is NaN, and the row is
   read again in the exact precision. The rounding of a weight is still carried, so that the sum of many small weights is right. Where
   codes must be short (KV_SHORT_CODES), keys of INT4 with channel scales are read as codes of as many bits as their line has, b, and
   their scales are 2^(8 - b) times those of codes of 8 bits. */
#define KV_MAX_WORD 32639.0f
#define KV_MAX_ACTIVATION (KV_FAST ? 127.0f : KV_MAX_WORD)
#define KV_MAX_WEIGHT (KV_MAX_ACTIVATION - 1.0f) /* plus the carried rounding at most KV_MAX_ACTIVATION */
#define KV_PARTS (KV_FAST ? 1 : 2) /* bytes of an activation */
#define KV_QUAD_BYTES (4 * KV_QUAD * KV_PARTS) /* of 4 activations of each row */
#define KV_INVERSE_OF(most, largest) ((largest) > 0x1p-100f ? (most) / (largest) : 0.0f)
#define KV_INVERSE(largest) KV_INVERSE_OF(KV_MAX_ACTIVATION, largest)

#define KV_BIAS(dtype) ((dtype) == KV_INT4 ? 8 : INT8_ZERO)
#define KV_KEY_ZERO(dtype) ((dtype) == KV_INT4 ? INT8_ZERO : KV_KEY_BIAS(dtype)) /* the same of keys with channel scales */
#define KV_FEW_BITS(dtype) ((dtype) == KV_INT2 || (dtype) == KV_INT3) /* these are read without being expanded, see few_bits.inc.h */
#define KV_DEPTHS(dtype) ((dtype) == KV_INT8 || KV_FEW_BITS(dtype) ? 4 : 8) /* of a line, of few bits one that is expanded */
#define KV_MEANS 1    /* statistics of a key block: means alone, or */
#define KV_CHANNELS 2 /* with channel scales */

/* Largest error of a score by the rounding of activations, as above, that is not corrected in the largest score. An output of few
   tokens is off by about three times as much. In the fast precision four times this error makes a weight twice as large. A search finds
   less than half of the bound then (tests/attention/test_fast.py), and rotated rows of real models seldom have it. */
#define KV_LEAST_ERROR (KV_FAST ? 0.2f : 2e-4f)
/* Largest part of an output that is the error by the rounding of weights, as above, and that is not corrected. */
#define KV_LEAST_PART 3e-4f
/* Root mean square of evenly distributed codes without their bias; it is more than that of a Gaussian row's codes. */
#define KV_CODE_SIZE(dtype) ((dtype) == KV_INT4 ? 4.6f : 73.0f)
#define KV_KEY_SIZE(dtype) ((float)KV_KEY_BIAS(dtype) * (4.6f / 8)) /* of keys with channel scales */

/* The largest scores so far of rows whose scores are not sums of products alone, or only a part of them. */
static const KV_ALIGNED float KV(no_scores)[KV_ROWS] = {
    -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY,
    -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY,
};

/* Largest errors, as above, that are not corrected in scores of a row whose largest score so far is `most`, or -infinity.
   A score y below it has at most the weight w = exp(-y) of the largest, and may be off by KV_LEAST_ERROR / (128 w) if that is more:
   of 128^2 such scores, the squares of all w x error are at most KV_LEAST_ERROR^2. (1 + y / 32)^32 is at most exp(y). */
static inline vf KV(least_errors)(vf scores, vf most)
{
    const vf below = vf_max(vf_sub(most, scores), vf_set1(0.0f));
    vf power = vf_fma(below, vf_set1(1.0f / 32), vf_set1(1.0f));
    for (int i = 0; i < 5; i++) power = vf_mul(power, power);
    return vf_max(vf_mul(power, vf_set1(KV_LEAST_ERROR / 128)), vf_set1(KV_LEAST_ERROR));
}

/* A score below which an error of `error` may be left: what inverts least_errors, and a little less. */
static inline float KV(least_score)(float error, float most)
{
    float power = error * (128 / KV_LEAST_ERROR);
    for (int i = 0; i < 5; i++) power = __builtin_sqrtf(power);
    return most - 32.0f * (power - 1.0f) - (0.01f + 1e-5f * __builtin_fabsf(most));
}

/* Factor from a row's unit to the standard error of its scores, on keys of `dtype`. */
static inline float KV(error_of_unit)(const kv_side *side, int dtype)
{
    return 0.29f * __builtin_sqrtf((float)side->padded_dim) * (side->channels ? KV_KEY_SIZE(dtype) : KV_CODE_SIZE(dtype));
}

/* The square of a tile's unit of weights times the size of its codes, for each token that the row sees: how many more are read depends
   on other rows. At least KV_MATRIX_TILE tokens are counted, because codes can have up to 1.7 times the size. In double: float32
   would lose those of small values. */
static inline double KV(noise_of)(float unit, float code_size, int seen)
{
    const double noise = (double)unit * code_size;
    return noise * noise * (seen > KV_MATRIX_TILE ? seen : KV_MATRIX_TILE);
}

/* Sum of the squares of n floats times `factor`; 16 floats are `stride` floats from the next 16. */
static inline float KV(square_of)(const float *row, ptrdiff_t n, ptrdiff_t stride, float factor)
{
    KV(lanes) squares = KV(no_lanes)();
    for (ptrdiff_t i = 0; i < n; i += KV_LANES, row += stride)
        for (int lane = 0; lane < KV(PIECES); lane++) {
            const vf x = vf_mul(vf_load(row + lane * W), vf_set1(factor));
            squares.piece[lane] = vf_fma(x, x, squares.piece[lane]);
        }
    return KV(sum_of)(squares);
}

/* Rows whose rounding of weights is large next to their n sums of values, a bit for each. */
static unsigned KV(rows_to_refine)(const float *acc, ptrdiff_t row_stride, ptrdiff_t stride, ptrdiff_t n, const double *noise,
                                   int num_rows)
{
    const double part = (double)n * (0.29 / KV_LEAST_PART) * (0.29 / KV_LEAST_PART);
    unsigned rows = 0;
    for (int r = 0; r < num_rows; r++, acc += row_stride) {
        double least = noise[r] * part;
        if (!(least > 0.0)) continue;
        float sum = KV(square_of)(acc, n, stride, 1.0f);
        if (!(sum > 1e-30f && sum < 1e38f)) { /* too small or large for float32 */
            sum = KV(square_of)(acc, n, stride, (float)(1.0 / __builtin_sqrt(least)));
            least = 1.0;
        }
        if (sum < least) rows |= 1u << r;
    }
    return rows;
}

/* What is carried to the first weight of each of 16 lanes, in units: 0, or in the fast precision numbers between -1/2 and 1/2 with a
   mean of 0, the fractions of i x 0.618... Whole numbers times the golden ratio lie evenly between integers, and so does every second
   of them, or third. So weights below a unit keep their sum, also those of values that alternate (Weyl, Ueber die Gleichverteilung
   von Zahlen mod. Eins, 1916). */
#define KV_EVEN(i) (KV_FAST ? (float)((i) * 0.6180339887 - (int)((i) * 0.6180339887) - 0.4952) : 0.0f)
#define KV_EVEN4(i) KV_EVEN(i), KV_EVEN((i) + 1), KV_EVEN((i) + 2), KV_EVEN((i) + 3)
static const KV_ALIGNED float KV(first_left)[KV_LANES] = {KV_EVEN4(0), KV_EVEN4(4), KV_EVEN4(8), KV_EVEN4(12)};

/* Cuts up to KV_QUAD rows of n floats, times their inverse scales, into the activations that dot_quad reads. sums[r] is the sum
   of row r. With `zeros`, each activation counts as many times as its zero says. With `carry`, each rounding error is added to the
   next float of the same lane, 16 floats on; lanes of the fast precision begin with different ones. */
static inline __attribute__((always_inline)) void KV(put_activations)(
    const float *rows, ptrdiff_t stride, int num_rows, ptrdiff_t n, const float *inverse, int8_t *x, int32_t *sums,
    const int carry, const float *zeros)
{
    vi sum[KV_QUAD], value[KV_QUAD];
    vf product[KV_QUAD];
    vf left[KV_LANES / W][KV_QUAD];
    for (int lane = 0; lane < KV_LANES / W; lane++)
        KV_FOR4(r, KV_QUAD, left[lane][r] = carry ? vf_load(KV(first_left) + lane * W) : vf_set1(0.0f););
    KV_FOR4(r, KV_QUAD, sum[r] = value[r] = vi_set1(0); product[r] = vf_set1(0.0f););
    for (ptrdiff_t i = 0; i < n; i += KV_LANES)
        for (int lane = 0; lane < KV_LANES / W; lane++) {
            KV_FOR4(r, num_rows,
                const vf row = vf_load(rows + r * stride + i + lane * W), factor = vf_set1(inverse[r]);
                const vf exact = carry ? vf_fma(row, factor, left[lane][r]) : vf_mul(row, factor);
                value[r] = vf_round(exact);
                if (carry) left[lane][r] = vf_sub(exact, vi_to_float(value[r]));
                if (zeros) product[r] = vf_fma(vi_to_float(value[r]), vf_load(zeros + i + lane * W), product[r]);
                else sum[r] = vi_add(sum[r], value[r]););
            put_parts(x, i + lane * W, value[0], value[1], value[2], value[3]);
        }
    float total[KV_QUAD]; /* exact: at most 512 * 32639 < 2^24, or 512 * 127 * 32 < 2^21 */
    if (!zeros) KV_FOR4(r, KV_QUAD, product[r] = vi_to_float(sum[r]););
    KV(vf_sum4)(product[0], product[1], product[2], product[3], total);
    KV_FOR4(r, num_rows, sums[r] = (int32_t)total[r];);
}

/* What the rounding of rows left out, times 65278: at most KV_MAX_ACTIVATION. */
static inline void KV(leave_rounding)(const float *rows, ptrdiff_t stride, int num_rows, ptrdiff_t n, const float *inverse,
                                      float *left)
{
    for (int r = 0; r < num_rows; r++, rows += stride, left += n)
        for (ptrdiff_t i = 0; i < n; i += W) {
            const vf exact = vf_mul(vf_load(rows + i), vf_set1(inverse[r]));
            vf_store(left + i, vf_mul(vf_sub(exact, vi_to_float(vf_round(exact))), vf_set1(2.0f * KV_MAX_ACTIVATION)));
        }
}

/* What the rounding of rows of n weights left out, times KV_MAX_ACTIVATION: at most that. The rounding is carried on as in
   put_activations. */
static inline void KV(leave_carried)(const float *rows, ptrdiff_t stride, int num_rows, int n, const float *inverse, float *left)
{
    for (int r = 0; r < num_rows; r++, rows += stride, left += stride)
        for (int lane = 0; lane < KV_LANES; lane += W) {
            vf carried = vf_set1(0.0f);
            for (int i = lane; i < n; i += KV_LANES) {
                const vf row = vf_load(rows + i), factor = vf_set1(inverse[r]);
                const vf exact = vf_mul(row, factor), sum = vf_fma(row, factor, carried);
                const vf rounded = vi_to_float(vf_round(sum));
                carried = vf_sub(sum, rounded);
                vf_store(left + i, vf_mul(vf_sub(exact, rounded), vf_set1(KV_MAX_ACTIVATION)));
            }
        }
}

/* The factors that make rows of n floats activations, and the units of these, times the softmax scale. */
static inline void KV(find_units)(const float *rows, ptrdiff_t n, int num_rows, float factor, float *inverse, float *scale)
{
    for (int r = 0; r < num_rows; r++) {
        const float largest = kv_bits_float((uint32_t)KV(max_magnitude_bits)(rows + r * n, n));
        inverse[r] = KV_INVERSE(largest);
        scale[r] = largest / KV_MAX_ACTIVATION * factor;
    }
}

static inline __attribute__((always_inline)) void KV(prepare_integer)(
    const kv_side *side, const float *rows, int num_rows, float factor, kv_queries *queries, const int bias)
{
    const ptrdiff_t n = side->padded_dim;
    queries->rows = rows;
    queries->factor = factor;
    queries->most = KV(no_scores);
    queries->whole = 0;
    if (side->channels) return; /* fold does it, block by block */
    for (int row = 0; row < num_rows; row += KV_QUAD) {
        const int quad_rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
        KV(find_units)(rows + row * n, n, quad_rows, factor, queries->inverse + row, queries->scale + row);
        KV(put_activations)(rows + row * n, n, quad_rows, n, queries->inverse + row, queries->parts + row * n * KV_PARTS,
                            queries->sum + row, 0, NULL);
        for (int r = 0; r < quad_rows; r++) queries->sum[row + r] *= bias;
    }
}

/* A quad of queries folded with a block's statistics: the shift of every token's score, and with channel scales the rows
   times these scales, as activations. */
typedef struct {
    float shift[KV_QUAD];
    float scale[KV_QUAD];
    float inverse[KV_QUAD];
    int32_t sum[KV_QUAD]; /* as in kv_queries */
    KV_ALIGNED float rows[KV_QUAD * KV_MAX_HEAD_DIM];
    KV_ALIGNED int8_t parts[KV_QUAD * KV_MAX_HEAD_DIM * 2];
    KV_ALIGNED float zeros[KV_MAX_HEAD_DIM]; /* of KV_OWN_BITS: the middle of each channel's codes, */
    float error;                             /* and what error_of_unit is for these */
} KV(folded);

/* Whether keys with channel scales are read as codes of as many bits as their line has. */
#ifdef KV_SHORT_CODES
#define KV_OWN_BITS(dtype) ((dtype) == KV_INT4)
#else
#define KV_OWN_BITS(dtype) 0
#endif

/* The middle of the codes of each channel, of as many bits as its line has. Returns what error_of_unit is for these codes. */
static inline float KV(put_zeros)(const kv_key_order *order, int padded_dim, float *zeros)
{
    float squares = 0.0f;
    for (int u = 0; u < padded_dim / KV_UNIT; u++) {
        const int lines[4] = {order->wide[u], order->even[2 * u], order->even[2 * u + 1], order->narrow[u]};
        const float middles[4] = {(float)(16 << order->more[u]), 8.0f, 8.0f, (float)(4 >> order->more[u])};
        squares += 4.0f * (middles[0] * middles[0] + 2 * 8.0f * 8.0f + middles[3] * middles[3]);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) zeros[4 * lines[i] + j] = middles[i];
    }
    return 0.29f * (4.6f / 8) * __builtin_sqrtf(squares);
}

/* Scales of W channels of a key block; `unit` is 2^-16 times the block's unit. */
static inline vf KV(load_channel_scales)(const uint16_t *scales, vf unit)
{
    return vf_mul(vi_to_float(vi_and(vf_bits(vf_load_bfloat16(scales)), vi_set1(KV_FACTOR << 16))), unit);
}

/* The shifts of a quad's scores; and with channel scales the rows times these, with the factors that make them activations. */
static inline __attribute__((always_inline)) void KV(fold_statistics)(
    const kv_side *side, const char *block, const kv_key_order *order, const kv_queries *queries, int row, const int num_rows,
    float *products, float *shifts, float *inverse, float *scale_of, const float *zeros)
{
    const uint16_t *means = (const uint16_t *)(block + side->means), *scales = (const uint16_t *)(block + side->channels);
    const ptrdiff_t n = side->padded_dim;
    const float *rows = queries->rows + row * n;
    (void)order; /* few tiers need it */
    const vf unit = vf_set1(side->channels ? KV(unit_of)(scales) * 0x1p-16f : 0.0f), bias = vf_set1((float)KV_KEY_BIAS(side->dtype));
    KV(lanes) all_shifts[KV_QUAD];
    vf shift[KV_QUAD], largest[KV_QUAD];
    KV_FOR4(r, KV_QUAD, largest[r] = vf_set1(0.0f););
    for (int lane = 0; lane < KV(PIECES); lane++) { /* one after the other, as registers hold no more sums */
        KV_FOR4(r, KV_QUAD, shift[r] = vf_set1(0.0f););
        for (ptrdiff_t i = lane * W; i < n; i += KV_LANES) {
            const ptrdiff_t at = side->channels ? KV_CHANNEL_AT(order, side->dtype, i) : i;
            vf mean = vf_load_float16(means + at);
            if (!side->channels) {
                KV_FOR4(r, num_rows, shift[r] = vf_fma(vf_load(rows + r * n + at), mean, shift[r]););
                continue;
            }
            vf scale = KV(load_channel_scales)(scales + at, unit);
            mean = vf_fma(scale, bias, mean);
            if (KV_OWN_BITS(side->dtype)) scale = vf_mul(scale, vf_div(bias, vf_load(zeros + at)));
            KV_FOR4(r, num_rows,
                const vf x = vf_load(rows + r * n + at), product = vf_mul(x, scale);
                shift[r] = vf_fma(x, mean, shift[r]);
                largest[r] = vf_max(largest[r], vf_abs(product));
                vf_store(products + r * n + i, product););
        }
        KV_FOR4(r, num_rows, all_shifts[r].piece[lane] = shift[r];);
    }
    KV_FOR4(r, num_rows,
        const float peak = vf_hmax(largest[r]);
        shifts[r] = KV(sum_of)(all_shifts[r]) * queries->factor;
        inverse[r] = KV_INVERSE(peak);
        scale_of[r] = peak * (queries->factor * (1.0f / KV_MAX_ACTIVATION)););
}

static inline __attribute__((always_inline)) void KV(fold_rows)(
    const kv_side *side, const char *block, const kv_key_order *order, const kv_queries *queries, int row, const int num_rows,
    KV(folded) *folded)
{
    const ptrdiff_t n = side->padded_dim;
    const int own_bits = KV_OWN_BITS(side->dtype) && side->channels;
    if (own_bits) folded->error = KV(put_zeros)(order, side->padded_dim, folded->zeros);
    KV(fold_statistics)(side, block, order, queries, row, num_rows, folded->rows, folded->shift, folded->inverse, folded->scale,
                        folded->zeros);
    if (!side->channels) return;
    KV(put_activations)(folded->rows, n, num_rows, n, folded->inverse, folded->parts, folded->sum, 0, own_bits ? folded->zeros : NULL);
    for (int r = 0; !own_bits && r < num_rows; r++) folded->sum[r] *= KV_KEY_ZERO(side->dtype);
}

/* `order` is that of the block's lines, if it has channel scales. */
static __attribute__((noinline)) void KV(fold)(const kv_side *side, const char *block, const kv_key_order *order,
                                               const kv_queries *queries, int row, int num_rows, KV(folded) *folded)
{
    switch (num_rows) {
    case 1: KV(fold_rows)(side, block, order, queries, row, 1, folded); break;
    case 2: KV(fold_rows)(side, block, order, queries, row, 2, folded); break;
    case 3: KV(fold_rows)(side, block, order, queries, row, 3, folded); break;
    default: KV(fold_rows)(side, block, order, queries, row, 4, folded);
    }
}
