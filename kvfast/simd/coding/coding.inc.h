/* Encodes one row: with the scale of its largest magnitude, or with the scale of the least squared error. */

/* Index of the magnitude of GAUSS4 that is nearest to 16 t >= 0. Each cell of 16 holds one midpoint between two
   magnitudes, the last cell none. So as many midpoints as cells lie below a cell, and one comparison finds the index. */
static inline vi KV(nearest_level)(vf t)
{
    const vi cell = vf_truncate(vf_min(t, vf_set1(7.0f)));
    return vi_count_above(cell, t, vf_lookup8(kv_gauss_midpoints, cell));
}

/* The sums of x level and of level^2 over the magnitudes x of a row, for each of `count` <= 4 scales. They run side by side,
   as one scale alone would wait for its sums. */
static inline __attribute__((always_inline)) void KV(fit4)(const float *row, ptrdiff_t n, const float *scales,
                                                           const int count, const int gauss, float *products,
                                                           float *squares)
{
    vf inverse[4], product[4], square[4];
    KV(lanes) all_products[4], all_squares[4];
    KV_FOR4(k, 4, inverse[k] = vf_set1(0.0f););
    KV_FOR4(k, count, inverse[k] = vf_set1((gauss ? 1.0f / 16.0f : 1.0f) / scales[k]););
    for (int lane = 0; lane < KV(PIECES); lane++) { /* one after the other, as registers hold no more sums */
        KV_FOR4(k, 4, product[k] = square[k] = vf_set1(0.0f););
        for (ptrdiff_t i = lane * W; i < n; i += KV_LANES) {
            const vf x = vf_load(row + i);
            KV_FOR4(k, count,
                    const vf t = vf_mul(x, inverse[k]);
                    const vf level = gauss ? vf_lookup8(kv_gauss_magnitudes, KV(nearest_level)(t))
                                           : vi_to_float(vf_round(vf_min(t, vf_set1(7.0f))));
                    product[k] = vf_fma(x, level, product[k]);
                    square[k] = vf_fma(level, level, square[k]););
        }
        KV_FOR4(k, count, all_products[k].piece[lane] = product[k]; all_squares[k].piece[lane] = square[k];);
    }
    KV_FOR4(k, count, products[k] = KV(sum_of)(all_products[k]); squares[k] = KV(sum_of)(all_squares[k]););
}

/* The same for up to 8 scales. */
static inline __attribute__((always_inline)) void KV(fit)(const float *row, ptrdiff_t n, const float *scales,
                                                          const int count, const int gauss, float *products,
                                                          float *squares)
{
    KV(fit4)(row, n, scales, count < 4 ? count : 4, gauss, products, squares);
    if (count > 4) KV(fit4)(row, n, scales + 4, count - 4, gauss, products + 4, squares + 4);
}

/* Tries several scales s and takes the one whose codes leave the least squared error, which is
   sum x^2 - s (2 sum x level - s sum level^2). INT4 with even levels tries to clip the largest values. GAUSS4
   starts as if the row were Gaussian, refits s to the codes of that, encodes again, and compares this with the
   scale that clips nothing, for rows with an outlier; its scales are bfloat16. */
static inline __attribute__((always_inline)) float KV(search)(const kv_side *side, const float *row, uint8_t *codes,
                                                              const int gauss, const int tries)
{
    static const float clips[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f};
    static const float spreads[] = {0.0f, 1.0f, 0.8f, 0.9f, 1.1f, 1.2f};
    const int n = side->padded_dim, padding = n - side->head_dim;
    KV_ALIGNED float unit[KV_MAX_HEAD_DIM], magnitudes[KV_MAX_HEAD_DIM];
    const int32_t bits = KV(max_magnitude_bits)(row, side->head_dim);
    if (bits == 0) {
        memset(codes, 8, (size_t)n);
        return 0.0f;
    }
    float energy = KV(sum_squares)(row, side->head_dim);
    int exponent = 0;
    if (!(energy > 0x1p-80f && energy < 0x1p80f)) { /* a power of two brings the row near 1 */
        exponent = (bits >> 23) - 127;
        exponent = exponent < -100 ? -100 : exponent > 126 ? 126 : exponent;
    }
    const float down = kv_bits_float((uint32_t)(127 - exponent) << 23), up = kv_bits_float((uint32_t)(127 + exponent) << 23);
    KV(scale_row)(row, side->head_dim, down, NULL, unit);
    memset(unit + side->head_dim, 0, (size_t)padding * sizeof(float));
    for (int i = 0; i < n; i += W) vf_store(magnitudes + i, vf_abs(vf_load(unit + i)));
    if (exponent) energy = KV(sum_squares)(unit, n);
    const float largest = kv_bits_float((uint32_t)bits) * down, smallest = 0x1p-126f * down;
    const float spread = KV_GAUSS_UNIT * __builtin_sqrtf(energy / (float)side->head_dim);

    float scales[8], products[8], squares[8], scale = 0.0f, gain = -INFINITY;
    for (int i = 0; i < tries; i++)
        scales[i] = !gauss ? largest / 7.0f * clips[i] : i == 0 ? largest / 127.0f : spread * spreads[i];
    for (int first = 0; first <= gauss; first++) { /* GAUSS4: all scales, then again all but the one that clips nothing */
        for (int i = first; i < tries; i++) {
            if (gauss) scales[i] = kv_from_bfloat16(kv_to_bfloat16(scales[i]));
            scales[i] = scales[i] > smallest ? scales[i] : smallest; /* so that it times `up` is a normal float */
        }
        KV(fit)(magnitudes, n, scales + first, tries - first, gauss, products + first, squares + first);
        if (!gauss) break;
        for (int i = first; i < tries; i++) {
            squares[i] -= (float)padding * (kv_gauss_magnitudes[0] * kv_gauss_magnitudes[0]);
            if (first == 0 && i > 0) scales[i] = products[i] / squares[i];
        }
    }
    for (int i = 0; i < tries; i++) {
        const float s = scales[i], gained = s * (2.0f * products[i] - s * squares[i]);
        scale = gained > gain ? s : scale;
        gain = gained > gain ? gained : gain;
    }
    const vf inverse = vf_set1((gauss ? 1.0f / 16.0f : 1.0f) / scale);
    for (int i = 0; i < n; i += W) {
        const vf x = vf_load(unit + i), t = vf_mul(vf_load(magnitudes + i), inverse);
        /* From -7.5 to 7.5, or from -7 to 7. */
        const vf code = gauss ? vf_add(vi_to_float(KV(nearest_level)(t)), vf_set1(0.5f)) : vf_min(t, vf_set1(7.0f));
        vi_store_int8((int8_t *)codes + i, vf_round(vf_add(vf_sign_of(code, x), vf_set1(gauss ? 7.5f : 8.0f))));
    }
    return scale * up;
}

/* Padded, biased codes of a row; returns its scale. */
static inline float KV(code_row)(const kv_side *side, const float *row, uint8_t *codes)
{
    const int n = side->head_dim;
    if (side->dtype == KV_GAUSS4)
        return side->clip_search ? KV(search)(side, row, codes, 1, 6) : KV(search)(side, row, codes, 1, 2);
    if (side->dtype == KV_INT4 && side->clip_search) return KV(search)(side, row, codes, 0, 7);
    const int bias = side->dtype == KV_INT8 ? 128 : 8;
    memset(codes + n, bias, (size_t)(side->padded_dim - n));
    return bias == 8 ? KV(code_uniform)(row, n, 7, 8, (int8_t *)codes) : KV(code_uniform)(row, n, 127, 128, (int8_t *)codes);
}
