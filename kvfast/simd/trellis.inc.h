/* Encodes rows as codes of a trellis, and decodes them; see trellis.h. */

/* The state from which each surviving path comes. There is one word for the states that took a 0 and one for those that took
   a 1. It has a bit for each pair of states before them, which is set if the path comes from the upper one. */
typedef uint64_t KV(survivors)[2];

/* Viterbi's search: the cheapest path through the n places of a chain, and its bits. `row` is in half units. No place costs
   more than its limit, which is 0 in the padding.

   All costs are integers, so that every tier finds the same path: at most 2^14 for a place, hence below 2^23 for
   KV_MAX_HEAD_DIM of them, and below 2^24 with those of states that no path reaches, which float32 holds exactly. */
static int KV(cheapest_path)(const float *row, const float *limits, int n, KV(survivors) *survivors)
{
    enum { HALF = KV_TRELLIS_STATES / 2 };
    KV_ALIGNED float costs[2][KV_TRELLIS_STATES], errors[16]; /* errors (2 bits, 8 contexts) of the nearest levels */
    costs[0][0] = 0.0f;
    for (int s = 1; s < KV_TRELLIS_STATES; s++) costs[0][s] = 0x1p23f;
    for (int t = 0; t < n; t++) {
        const float *before = costs[t & 1];
        float *after = costs[~t & 1];
        const vf x = vf_set1(row[t]);
        for (int i = 0; i < 16; i += W) {
            vf least = vf_set1(limits[t]);
            for (int p = 0; p < 8; p++) {
                const vf off = vf_sub(x, vf_load(kv_trellis_doubled[p] + i));
                least = vf_min(least, vf_mul(off, off));
            }
            vf_store(errors + i, least);
        }
        uint64_t upper[2] = {0, 0};
        for (int s = 0; s < HALF; s += W) {
            const vf low = vf_load(before + s), high = vf_load(before + HALF + s);
            const vi low_context = vi_load_int8(kv_trellis_contexts + s), high_context = vi_load_int8(kv_trellis_contexts + HALF + s);
            vf best[2];
            for (int b = 0; b < 2; b++) {
                const vf from_low = vf_add(low, vf_lookup8(errors + 8 * b, low_context));
                const vf from_high = vf_add(high, vf_lookup8(errors + 8 * b, high_context));
                upper[b] |= (uint64_t)vf_mask_above(from_low, from_high) << s;
                best[b] = vf_min(from_low, from_high);
            }
            vf_store(after + 2 * s, vf_mix_low(best[0], best[1]));
            vf_store(after + 2 * s + W, vf_mix_high(best[0], best[1]));
        }
        survivors[t][0] = upper[0], survivors[t][1] = upper[1];
    }
    int last = 0;
    for (int s = 1; s < KV_TRELLIS_STATES; s++)
        if (costs[n & 1][s] < costs[n & 1][last]) last = s;
    return last;
}

/* Sums along a path of element x level, in 2^-21, and of level^2: exact, at most 2^39 and 2^23. */
typedef struct {
    int64_t product;
    int32_t square;
} KV(path_sums);

/* The codes of the path that ends in a state; `elements` in 2^-21, and `limits` as above. */
static KV(path_sums) KV(walk_back)(const float *row, const int32_t *elements, const float *limits, int n,
                                   const KV(survivors) *survivors, int state, uint8_t *codes)
{
    KV(path_sums) sums = {0, 0};
    for (int t = n - 1; t >= 0; t--) {
        const int bit = state & 1, pair = state >> 1;
        state = pair | (int)(survivors[t][bit] >> pair & 1) * (KV_TRELLIS_STATES / 2);
        const int context = kv_trellis_contexts[state];
        const float *bounds = kv_trellis_bounds[context][bit];
        int place = 0;
        for (int p = 0; p < 7; p++) place += row[t] > bounds[p];
        codes[t] = (uint8_t)(place << 1 | bit);
        const int level = limits[t] > 0.0f ? kv_trellis_table[context << 4 | codes[t]] - 128 : 0;
        sums.product += (int64_t)elements[t] * level;
        sums.square += level * level;
    }
    return sums;
}

/* Padded codes of a row, in the order of its depths; returns its scale, a bfloat16. Tries the best scale for a Gaussian of
   the row's size, with clip_search the scales beside it, and if the row has an outlier the scale that clips nothing. Takes the
   one whose path leaves the least squared error, computed as in KV(search). All comparisons are exact, so every tier finds the
   same codes. */
static float KV(code_trellis_row)(const kv_side *side, const float *row, uint8_t *codes, int values)
{
    static const float spreads[] = {1.0f, 0.945f, 1.06f};
    const int n = side->padded_dim, step = kv_trellis_step(values);
    KV_ALIGNED float unit[KV_MAX_HEAD_DIM], target[KV_MAX_HEAD_DIM], limits[KV_MAX_HEAD_DIM];
    int32_t elements[KV_MAX_HEAD_DIM], most = 0;
    KV(survivors) survivors[KV_MAX_HEAD_DIM];
    uint8_t paths[2][KV_MAX_HEAD_DIM], *best = paths[0], *path = paths[1];
    memset(codes, 0, (size_t)n);
    const int32_t largest_bits = KV(max_magnitude_bits)(row, side->head_dim);
    if (largest_bits == 0) return 0.0f;
    int exponent = (largest_bits >> 23) - 127; /* a power of two brings the row near 1 */
    exponent = exponent < -100 ? -100 : exponent > 126 ? 126 : exponent;
    const float down = kv_bits_float((uint32_t)(127 - exponent) << 23), up = kv_bits_float((uint32_t)(127 + exponent) << 23);
    KV(scale_row)(row, side->head_dim, down, NULL, unit);
    memset(unit + side->head_dim, 0, (size_t)(n - side->head_dim) * sizeof(float));
    int64_t energy = 0; /* at most 512 squares of 23 bits */
    for (int first = 0, t = 0; first < step; first++)
        for (int d = first; d < n; d += step, t++) {
            elements[t] = (int32_t)(unit[d] * 0x1p21f);
            energy += (int64_t)elements[t] * elements[t];
            const int32_t magnitude = elements[t] < 0 ? -elements[t] : elements[t];
            most = magnitude > most ? magnitude : most;
            limits[t] = d < side->head_dim ? 0x1p14f : 0.0f;
        }
    const float largest = (float)most * 0x1p-21f, smallest = 0x1p-126f * down;
    const float spread = KV_TRELLIS_UNIT * 0x1p-21f * __builtin_sqrtf((float)energy / (float)side->head_dim);

    float scale = 0.0f;
    double gain = -INFINITY;
    const int outlier = largest > 1.06f * 127.0f * spread, tries = side->clip_search ? 3 : 1;
    for (int i = -outlier; i < tries; i++) {
        float s = i < 0 ? largest / 127.0f : spread * spreads[i];
        s = s > smallest ? s : smallest; /* so that s times `up` is a normal float */
        const vf inverse = vf_set1(0x1p-20f / s), highest = vf_set1(256.0f); /* in half units, of the largest level and one */
        for (int t = 0; t < n; t += W) {
            const vf x = vf_mul(vi_to_float(vi_load(elements + t)), inverse);
            vf_store(target + t, vi_to_float(vf_round(vf_sign_of(vf_min(vf_abs(x), highest), x))));
        }
        const KV(path_sums) sums =
            KV(walk_back)(target, elements, limits, n, survivors, KV(cheapest_path)(target, limits, n, survivors), path);
        const double product = (double)sums.product * 0x1p-21, square = sums.square;
        s = kv_from_bfloat16(kv_to_bfloat16((float)(product / square)));
        s = s > smallest ? s : smallest;
        const double gained = s * (2.0 * product - s * square);
        if (gained > gain) {
            gain = gained;
            scale = s;
            uint8_t *const worse = best;
            best = path, path = worse;
        }
    }
    for (int first = 0, t = 0; first < step; first++)
        for (int d = first; d < n; d += step, t++) codes[d] = best[t];
    return scale * up;
}

/* Levels of a row of padded codes, in the order of its depths. */
static void KV(decode_trellis_row)(const kv_side *side, const uint8_t *codes, int values, int8_t *levels)
{
    const int step = kv_trellis_step(values);
    for (int first = 0, state = 0; first < step; first++)
        for (int d = first; d < side->padded_dim; d += step) {
            levels[d] = (int8_t)(kv_trellis_table[kv_trellis_contexts[state] << 4 | codes[d]] ^ 0x80);
            state = (state << 1 | (codes[d] & 1)) % KV_TRELLIS_STATES;
        }
}
