/* Kernels on rows of floats: conversion, quantisation, and the elementary functions of the softmax. */

/* The sum of `count` vectors, a power of two: the second half is added to the first. */
static inline __attribute__((always_inline)) vf KV(join_lanes)(vf *lanes, const int count)
{
#pragma GCC unroll 4
    for (int half = count / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) lanes[i] = vf_add(lanes[i], lanes[i + half]);
    return lanes[0];
}

/* Sums of KV_LANES lanes whatever the width of a register, so that tiers give the same bits; vf_hsum adds halves, too. */
enum { KV(PIECES) = KV_LANES / W };
typedef struct {
    vf piece[KV(PIECES)];
} KV(lanes);
#define vlanes KV(lanes)

static inline vlanes KV(no_lanes)(void)
{
    vlanes lanes;
    for (int i = 0; i < KV(PIECES); i++) lanes.piece[i] = vf_set1(0.0f);
    return lanes;
}

static inline float KV(sum_of)(vlanes lanes) { return vf_hsum(KV(join_lanes)(lanes.piece, KV(PIECES))); }

static void KV(to_float32)(const void *source, ptrdiff_t n, float *row)
{
    memcpy(row, source, (size_t)n * sizeof(float));
}

static void KV(from_float32)(const float *row, ptrdiff_t n, void *target)
{
    memcpy(target, row, (size_t)n * sizeof(float));
}

static void KV(to_float16)(const void *source, ptrdiff_t n, float *row)
{
    const uint16_t *halves = source;
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) vf_store(row + i, vf_load_float16(halves + i));
    for (; i < n; i++) row[i] = kv_from_float16(halves[i]);
}

static void KV(from_float16)(const float *row, ptrdiff_t n, void *target)
{
    uint16_t *halves = target;
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) vf_store_float16(halves + i, vf_load(row + i));
    for (; i < n; i++) halves[i] = kv_to_float16(row[i]);
}

static void KV(to_bfloat16)(const void *source, ptrdiff_t n, float *row)
{
    const uint16_t *halves = source;
    for (ptrdiff_t i = 0; i < n; i++) row[i] = kv_from_bfloat16(halves[i]);
}

static void KV(from_bfloat16)(const float *row, ptrdiff_t n, void *target)
{
    uint16_t *halves = target;
    for (ptrdiff_t i = 0; i < n; i++) halves[i] = kv_to_bfloat16(row[i]);
}

/* Magnitudes have the same order as their bit patterns, with infinity and NaN on top. So one integer
   maximum finds the largest magnitude and everything that is not finite. */
static int32_t KV(max_magnitude_bits)(const float *row, ptrdiff_t n)
{
    const vi mask = vi_set1(0x7FFFFFFF);
    vi largest = vi_set1(0);
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) largest = vi_max(largest, vi_and(mask, vf_bits(vf_load(row + i))));
    int32_t bits = vi_hmax(largest);
    for (; i < n; i++) {
        int32_t one = (int32_t)(kv_float_bits(row[i]) & 0x7FFFFFFF);
        bits = one > bits ? one : bits;
    }
    return bits;
}

static ptrdiff_t KV(find_unstorable)(const float *row, ptrdiff_t n, float limit)
{
    if (KV(max_magnitude_bits)(row, n) <= (int32_t)kv_float_bits(limit)) return -1;
    for (ptrdiff_t i = 0; i < n; i++)
        if (!(__builtin_fabsf(row[i]) <= limit)) return i;
    return -1;
}

/* scale = max|x| / levels, codes = round(x / scale) + bias, as uint8 unless the bias is 0. The scale is at least the
   smallest normal float, so that its inverse is finite; rows of zeros get scale 0. */
static inline __attribute__((always_inline)) float KV(code_uniform)(const float *row, ptrdiff_t n, const int levels,
                                                                    const int bias, int8_t *codes)
{
    int32_t bits = KV(max_magnitude_bits)(row, n);
    if (bits >= 0x7F800000) return -1.0f;
    float scale = kv_bits_float((uint32_t)bits) / (float)levels;
    if (bits && scale < 0x1p-126f) scale = 0x1p-126f;
    float inverse = bits ? 1.0f / scale : 0.0f;
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) {
        const vi code = vf_round(vf_mul(vf_load(row + i), vf_set1(inverse)));
        if (bias) vi_store_uint8((uint8_t *)codes + i, vi_add(code, vi_set1(bias)));
        else vi_store_int8(codes + i, code);
    }
    for (; i < n; i++) codes[i] = (int8_t)((int)(((row[i] * inverse) + 12582912.0f) - 12582912.0f) + bias);
    return scale;
}

static float KV(quantize)(const float *row, ptrdiff_t n, int levels, int8_t *codes)
{
    /* Prefetch rows 4 KB ahead, as hardware prefetchers stop at pages (bench/bench_encode.py). */
    for (ptrdiff_t i = 0; i < n; i += 16) kv_prefetch(row + 1024 + i);
    return levels == 127 ? KV(code_uniform)(row, n, 127, 0, codes) : KV(code_uniform)(row, n, 7, 0, codes);
}

static void KV(dequantize)(const int8_t *codes, ptrdiff_t n, float scale, float *row)
{
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) vf_store(row + i, vf_mul(vi_to_float(vi_load_int8(codes + i)), vf_set1(scale)));
    for (; i < n; i++) row[i] = (float)codes[i] * scale;
}

static void KV(scale_add)(float *target, float target_scale, const float *source, float source_scale, ptrdiff_t n)
{
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W)
        vf_store(target + i, vf_fma(vf_load(source + i), vf_set1(source_scale),
                                    vf_mul(vf_load(target + i), vf_set1(target_scale))));
    for (; i < n; i++) target[i] = target[i] * target_scale + source[i] * source_scale;
}

static void KV(scale_add_double)(double *target, double target_scale, const float *source, double source_scale, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) target[i] = target[i] * target_scale + (double)source[i] * source_scale;
}

/* out[i] = row[i] * factor * norm[i], or row[i] * factor if norm is NULL. */
static void KV(scale_row)(const float *row, ptrdiff_t n, float factor, const float *norm, float *out)
{
    ptrdiff_t i = 0;
    for (; i + W <= n; i += W) {
        vf x = vf_mul(vf_load(row + i), vf_set1(factor));
        vf_store(out + i, norm ? vf_mul(x, vf_load(norm + i)) : x);
    }
    for (; i < n; i++) out[i] = row[i] * factor * (norm ? norm[i] : 1.0f);
}

static float KV(sum_squares)(const float *row, ptrdiff_t n)
{
    vlanes squares = KV(no_lanes)();
    ptrdiff_t i = 0;
    for (; i + KV_LANES <= n; i += KV_LANES)
        for (int lane = 0; lane < KV(PIECES); lane++) {
            const vf x = vf_load(row + i + lane * W);
            squares.piece[lane] = vf_fma(x, x, squares.piece[lane]);
        }
    float sum = KV(sum_of)(squares);
    for (; i < n; i++) sum += row[i] * row[i];
    return sum;
}

static inline void KV(transform_row)(const float *row, ptrdiff_t n, const kv_transform *t, float *out)
{
    const ptrdiff_t pairs = t->cos ? t->pairs : 0;
    if (t->norm) {
        const float mean = KV(sum_squares)(row, n) / (float)n;
        /* A mean square beyond float32 must not make the row 0. As NaN it is refused when the row is stored. */
        KV(scale_row)(row, n, mean < INFINITY ? 1.0f / __builtin_sqrtf(mean + t->eps) : NAN, t->norm, out);
        row = out;
    } else if (row != out) {
        memcpy(out + 2 * pairs, row + 2 * pairs, (size_t)(n - 2 * pairs) * sizeof(float));
    }
    ptrdiff_t i = 0;
    if (t->interleaved) {
        for (; i < pairs; i++) {
            const float a = row[2 * i], b = row[2 * i + 1];
            out[2 * i] = a * t->cos[i] - b * t->sin[i];
            out[2 * i + 1] = b * t->cos[i] + a * t->sin[i];
        }
        return;
    }
    for (; i + W <= pairs; i += W) {
        const vf a = vf_load(row + i), b = vf_load(row + pairs + i), c = vf_load(t->cos + i), s = vf_load(t->sin + i);
        vf_store(out + i, vf_sub(vf_mul(a, c), vf_mul(b, s)));
        vf_store(out + pairs + i, vf_fma(b, c, vf_mul(a, s)));
    }
    for (; i < pairs; i++) {
        const float a = row[i], b = row[pairs + i];
        out[i] = a * t->cos[i] - b * t->sin[i];
        out[pairs + i] = b * t->cos[i] + a * t->sin[i];
    }
}

static void KV(transform)(const float *rows, ptrdiff_t stride, ptrdiff_t num_rows, ptrdiff_t n,
                          const kv_transform *t, float *out, ptrdiff_t out_stride)
{
    for (; num_rows > 0; num_rows--, rows += stride, out += out_stride) {
        for (ptrdiff_t i = 0; i < n; i += 16) { /* lines */
            kv_prefetch(rows + 4 * stride + i);
            kv_prefetch_write(out + 4 * out_stride + i);
        }
        KV(transform_row)(rows, n, t, out);
    }
}

/* exp(x) for x <= 88; exactly 0 below -87, and NaN for NaN, so that no score is lost. 2^n x 2^r with |r| <= 1/2; the
   polynomial of degree 5 interpolates 2^r in the Chebyshev nodes (relative error 1e-7). */
static inline vf KV(exp)(vf x)
{
    vf t = vf_mul(vf_max(vf_set1(-87.0f), x), vf_set1(1.44269504f));
    vi n = vf_round(t);
    vf r = vf_sub(t, vi_to_float(n));
    vf y = vf_set1(0.00133908633f);
    y = vf_fma(y, r, vf_set1(0.00967603177f));
    y = vf_fma(y, r, vf_set1(0.0555035695f));
    y = vf_fma(y, r, vf_set1(0.240221068f));
    y = vf_fma(y, r, vf_set1(0.693147182f));
    y = vf_fma(y, r, vf_set1(1.00000012f));
    return vf_zero_below(vf_mul(y, vi_exponent(n)), x, -87.0f);
}

/* Below 5/8 uses the polynomial of Cephes (tanhf, S. Moshier), as 1 - exp(-2x) would keep few digits of a small x. Relative
   error 3e-7. */
static inline vf KV(tanh)(vf x)
{
    const vf size = vf_abs(x), small = vf_min(vf_set1(0.625f), size), square = vf_mul(small, small);
    const vf e = KV(exp)(vf_mul(size, vf_set1(-2.0f)));
    const vf large = vf_div(vf_sub(vf_set1(1.0f), e), vf_add(vf_set1(1.0f), e));
    vf y = vf_set1(-5.70498872745e-3f);
    y = vf_fma(y, square, vf_set1(2.06390887954e-2f));
    y = vf_fma(y, square, vf_set1(-5.37397155531e-2f));
    y = vf_fma(y, square, vf_set1(1.33314422036e-1f));
    y = vf_fma(y, square, vf_set1(-3.33332819422e-1f));
    y = vf_fma(vf_mul(y, square), small, small);
    y = vf_sub(y, vf_zero_below(y, size, 0.625f));
    return vf_sign_of(vf_add(y, vf_zero_below(large, size, 0.625f)), x);
}

/* Applies softcap, ALiBi and biases to a row's scores begin to end. The row sees only those from `from` to `to`. */
static inline void KV(bend_scores)(float *scores, int begin, int end, int from, int to, int row, int64_t position,
                                   const kv_score_options *options)
{
    if (options->softcap > 0) {
        const vf cap = vf_set1(options->softcap); /* divide, as its inverse may have few digits */
        for (int t = begin; t < end; t += W)
            vf_store(scores + t, vf_mul(cap, KV(tanh)(vf_div(vf_load(scores + t), cap))));
    }
    if (options->slopes) { /* the distance as an integer: float32 does not hold all positions beyond 2^24 */
        const float distance = (float)(position - options->query_at[row]);
        for (int t = from; t < to; t++) scores[t] += options->slopes[row] * (distance + (float)t);
    }
    if (options->bias)
        for (int t = from; t < to; t++) scores[t] += options->bias[row * KV_TILE + t];
}

/* One softmax step over a tile: row r sees the tokens from[r] <= t < to[r]. The base is the running
   maximum, not the tile's, so that a row that sees nothing gets no NaN. `count` is padded with zero
   weights to the next multiple of KV_LANES. The rows take each step together, as a row waits for its maximum and its sum. */
static void KV(softmax)(kv_softmax *state, int num_rows, int count, const int *from, const int *to,
                        int64_t position, const kv_score_options *options)
{
    const int padded = kv_whole_lanes(count);
    float m[KV_ROWS], step[KV_ROWS] = {0};
    float sums[KV_ROWS];
    for (int r = 0; r < num_rows; r++) {
        float *weights = state->weights + r * KV_TILE;
        KV(bend_scores)(weights, 0, padded, from[r], to[r], r, position, options);
        for (int t = 0; t < from[r] && t < padded; t++) weights[t] = -INFINITY;
        for (int t = to[r] > 0 ? to[r] : 0; t < padded; t++) weights[t] = -INFINITY;

        vf largest = vf_load(weights);
        for (int t = W; t < padded; t += W) largest = vf_max(largest, vf_load(weights + t));
        m[r] = vf_hmax(largest);
        m[r] = m[r] > state->m[r] ? m[r] : state->m[r];
        state->seen[r] = to[r] > from[r] ? to[r] - from[r] : 0;
        if (m[r] != -INFINITY) step[r] = state->m[r] - m[r];
    }
    for (int r = 0; r < num_rows; r += W) vf_store(step + r, KV(exp)(vf_load(step + r)));
    for (int r = 0; r < num_rows; r++) {
        float *weights = state->weights + r * KV_TILE;
        const vf base = vf_set1(m[r]);
        vlanes lanes = KV(no_lanes)();
        if (m[r] == -INFINITY) {
            memset(weights, 0, (size_t)padded * sizeof(float));
            continue;
        }
        for (int t = 0; t < padded; t += KV_LANES)
            for (int lane = 0; lane < KV(PIECES); lane++) {
                const vf weight = KV(exp)(vf_sub(vf_load(weights + t + lane * W), base));
                vf_store(weights + t + lane * W, weight);
                lanes.piece[lane] = vf_add(lanes.piece[lane], weight);
            }
        sums[r] = KV(sum_of)(lanes);
    }
    for (int r = 0; r < num_rows; r++) {
        state->rescale[r] = 1.0f;
        if (m[r] == -INFINITY) {
            if (to[r] > from[r]) state->l[r] = (double)NAN; /* all scores that it sees are beyond float32 */
            continue;
        }
        if (m[r] != state->m[r]) {
            state->rescale[r] = step[r];
            state->noise[r] *= (double)step[r] * step[r];
        }
        state->l[r] = state->l[r] * (double)state->rescale[r] + (double)sums[r];
        state->m[r] = m[r];
    }
}
