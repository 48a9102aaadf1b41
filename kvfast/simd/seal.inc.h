/* Seals blocks of keys: computes the statistics of the channels, then the codes, which need them.

   Centred blocks: x = code x token scale + mean, with the mean of the channel over the block.
   Blocks with channel scales (KIVI, arXiv 2402.02750): x = code x scale + offset, codes 0..15 for INT4. INT3 gives the quarter
   of the lines with the widest range 4 bits, and that with the least 2, as Kitty gives a few channels more bits
   (arXiv 2511.18643); see packed.h. */

/* Loads W channels from c on; beyond the last channel 0. */
static inline vf KV(load_channels)(const float *row, ptrdiff_t c, ptrdiff_t n)
{
    if (c + W <= n) return vf_load(row + c);
    float lanes[W] = {0};
    for (ptrdiff_t i = c; i < n; i++) lanes[i - c] = row[i];
    return vf_load(lanes);
}

static void KV(centre)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride)
{
    uint16_t *means = (uint16_t *)(block + side->means);
    for (ptrdiff_t c = 0; c < side->padded_dim; c += W) {
        vf sum = vf_set1(0.0f);
        for (int t = 0; t < side->block_size; t++) sum = vf_add(sum, KV(load_channels)(rows + t * stride, c, side->head_dim));
        vf_store_float16(means + c, vf_div(sum, vf_set1((float)side->block_size)));
    }
}

/* x / scale, clamped to the codes up to `most`, rounded, as a float. */
static inline vf KV(channel_code)(vf x, vf inverse, vf most)
{
    return vi_to_float(vf_round(vf_max(vf_min(vf_mul(x, inverse), most), vf_set1(0.0f))));
}

/* Writes the scales as fractions, of 15 bits or the `most` given, of the smallest unit that the largest scale fits, rounded up. */
static void KV(put_channels)(const kv_side *side, uint16_t *channels, const float *scales, float most)
{
    float largest = 0.0f;
    for (int d = 0; d < side->head_dim; d++) largest = scales[d] > largest ? scales[d] : largest;
    const uint32_t bits = (kv_float_bits(largest * (1.0f / most)) + 0xFFFF) >> 16; /* up */
    const float unit = kv_bits_float(bits << 16);
    for (int d = 0; d < side->padded_dim; d++) {
        const float steps = d < side->head_dim ? __builtin_ceilf(scales[d] / unit) : 0.0f;
        channels[d] = (uint16_t)(steps < most ? steps : most);
    }
    for (int i = 0; i < 16; i++) channels[i] |= (uint16_t)((bits >> i & 1) << 15);
}

/* Scale and offset of each channel. Starts with the range from the smallest to the largest value, then fits twice the line of
   least squared error through the codes. No value may be more than one step beyond the codes; if the scale for that is wider
   than the range's, which a few values far from all others cause, the range is taken. Rounding may move the range a little, too. */
static void KV(fit_channels)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride)
{
    uint16_t *offsets = (uint16_t *)(block + side->means);
    const int tokens = side->block_size;
    const ptrdiff_t n = side->head_dim;
    const vf count = vf_set1((float)tokens), tiny = vf_set1(0x1p-100f);
    KV_ALIGNED float scales[KV_MAX_HEAD_DIM];
    for (ptrdiff_t c = 0; c < side->padded_dim; c += W) {
        vf low = KV(load_channels)(rows, c, n), high = low;
        for (int t = 1; t < tokens; t++) {
            const vf x = KV(load_channels)(rows + t * stride, c, n);
            low = vf_min(low, x);
            high = vf_max(high, x);
        }
        const vf even = vf_mul(vf_sub(high, low), vf_set1(1.0f / 15.0f));
        vf scale = even, offset = low;
        for (int refits = 2; refits > 0; refits--) {
            const vf inverse = vf_div(vf_set1(1.0f), vf_max(scale, tiny));
            vf codes = vf_set1(0.0f), squares = codes, values = codes, products = codes;
            for (int t = 0; t < tokens; t++) {
                const vf x = vf_sub(KV(load_channels)(rows + t * stride, c, n), offset);
                const vf code = KV(channel_code)(x, inverse, vf_set1(15.0f));
                codes = vf_add(codes, code);
                values = vf_add(values, x);
                squares = vf_fma(code, code, squares);
                products = vf_fma(code, x, products);
            }
            /* Sums of integers, so exact; 0 if all codes are the same. */
            const vf spread = vf_sub(vf_mul(count, squares), vf_mul(codes, codes));
            scale = vf_div(vf_sub(vf_mul(count, products), vf_mul(codes, values)), vf_max(spread, vf_set1(1.0f)));
            offset = vf_add(offset, vf_div(vf_sub(values, vf_mul(scale, codes)), count));
        }
        const vf wide = vf_max(vf_max(scale, vf_sub(offset, low)), vf_mul(vf_sub(high, offset), vf_set1(1.0f / 16.0f)));
        const vf too_wide = vf_zero_below(vf_set1(1.0f), vf_sub(wide, even), 0x1p-126f); /* 1 or 0 */
        offset = vf_fma(too_wide, vf_sub(low, offset), offset);
        scale = vf_fma(too_wide, vf_sub(even, scale), scale);
        vf_store_float16(offsets + c, offset);
        offset = vf_load_float16(offsets + c);
        scale = vf_max(vf_max(scale, tiny), vf_sub(offset, low));
        vf_store(scales + c, vf_max(scale, vf_mul(vf_sub(high, offset), vf_set1(1.0f / 16.0f))));
    }
    KV(put_channels)(side, (uint16_t *)(block + side->channels), scales, 32767.0f);
}

/* The bits of each line of INT3 keys: 4 for the quarter of the lines whose channels have the widest ranges in sum, 2 for the
   quarter with the least, and 3. */
static void KV(share_key_bits)(const float *ranges, int lines, uint8_t *bits)
{
    float sums[KV_MAX_HEAD_DIM / 4];
    for (int i = 0; i < lines; i++, ranges += 4) sums[i] = ranges[0] + ranges[1] + ranges[2] + ranges[3];
    for (int i = 0; i < lines; i++) {
        int wider = 0; /* lines before this one in the order of their ranges */
        for (int j = 0; j < lines; j++) wider += (sums[j] > sums[i]) | ((sums[j] == sums[i]) & (j < i));
        bits[i] = (uint8_t)(wider < lines / 4 ? 4 : wider < lines - lines / 4 ? 3
                                                                              : 2);
    }
}

/* The same as fit_channels for INT3: the range from the smallest to the largest value. The line of least squared error would clip
   the largest keys, which are the ones attended to: it loses more at 3 bits, though the squared error falls. */
static void KV(fit_packed_channels)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride)
{
    uint16_t *offsets = (uint16_t *)(block + side->means), *channels = (uint16_t *)(block + side->channels);
    const int lines = side->padded_dim / 4;
    KV_ALIGNED float low[KV_MAX_HEAD_DIM], high[KV_MAX_HEAD_DIM], scales[KV_MAX_HEAD_DIM] = {0};
    uint8_t bits[KV_MAX_HEAD_DIM / 4];
    for (ptrdiff_t c = 0; c < side->padded_dim; c += W) {
        vf least = KV(load_channels)(rows, c, side->head_dim), most = least;
        for (int t = 1; t < side->block_size; t++) {
            const vf x = KV(load_channels)(rows + t * stride, c, side->head_dim);
            least = vf_min(least, x);
            most = vf_max(most, x);
        }
        vf_store(low + c, least);
        vf_store(high + c, most);
        vf_store(scales + c, vf_sub(most, least));
        vf_store_float16(offsets + c, least);
    }
    KV(share_key_bits)(scales, lines, bits);
    for (ptrdiff_t c = 0; c < side->padded_dim; c++) {
        const float steps = (float)((1 << bits[c / 4]) - 1), offset = kv_from_float16(offsets[c]);
        float scale = scales[c] * (1.0f / steps);
        /* Rounding may move the range a little. */
        scale = scale > offset - low[c] ? scale : offset - low[c];
        scale = scale > (high[c] - offset) * (1.0f / (steps + 1.0f)) ? scale : (high[c] - offset) * (1.0f / (steps + 1.0f));
        scales[c] = (scale > 0x1p-100f ? scale : 0x1p-100f) * (1.0f / (float)(16 >> bits[c / 4])); /* of 4 bits */
    }
    KV(put_channels)(side, channels, scales, (float)KV_FACTOR);
    for (int line = 0; line < lines; line++) {
        uint16_t *flag = channels + line / 4 * KV_UNIT + line % 4;
        if (bits[line] == 4) flag[0] |= KV_KEY_FLAG;
        if (bits[line] == 2) flag[4] |= KV_KEY_FLAG;
    }
}

/* Writes the codes of 16 tokens of INT3 keys, rows of `stride` bytes. */
static void KV(put_keys)(const kv_key_order *order, int padded_dim, const uint8_t *codes, ptrdiff_t stride, uint8_t *unit)
{
    KV_ALIGNED uint8_t lines[KV_LANES * KV_MAX_HEAD_DIM];
    for (int d = 0; d < padded_dim; d += 16)
        for (int t = 0; t < KV_LANES; t += 4) kv_transpose_words(codes + t * stride + d, stride, lines + d * 16 + t * 4, 64);
    for (int u = 0; u < padded_dim / KV_UNIT; u++, unit += 96)
        KV(put_threes)(lines + order->even[2 * u] * 64, lines + order->even[2 * u + 1] * 64, lines + order->wide[u] * 64,
                       lines + order->narrow[u] * 64, unit);
}

/* Encodes the tokens from `token` on with the channels' scales and offsets. With `guarded`, stops and returns 0 at a token
   that is more than 1.25 steps beyond the range of codes. */
static int KV(code_channels)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride, int token, int guarded)
{
    enum { STRIDE = KV_MAX_HEAD_DIM + KV_LANES };
    const uint16_t *channels = (const uint16_t *)(block + side->channels);
    KV_ALIGNED float offset[KV_MAX_HEAD_DIM], scale[KV_MAX_HEAD_DIM], inverse[KV_MAX_HEAD_DIM], most[KV_MAX_HEAD_DIM];
    uint8_t codes[KV_LANES * STRIDE], bits[KV_MAX_HEAD_DIM / 4];
    const ptrdiff_t n = side->head_dim, dims = side->padded_dim;
    const float unit = KV(unit_of)(channels);
    const int packed = side->family == KV_PACKED_CODES, begin = kv_whole_lanes(token);
    kv_key_order order;
    if (packed) {
        kv_read_key_order(channels, side->padded_dim, &order);
        kv_key_bits(&order, side->padded_dim, bits);
    }
    KV(to_float16)(block + side->means, dims, offset);
    for (ptrdiff_t c = 0; c < dims; c++) {
        most[c] = packed ? (float)((1 << bits[c / 4]) - 1) : 15.0f;
        scale[c] = (float)(channels[c] & (packed ? KV_FACTOR : 0x7FFF)) * unit;
        if (packed) scale[c] *= (float)(16 >> bits[c / 4]); /* from codes of 4 bits */
        inverse[c] = scale[c] > 0.0f ? 1.0f / scale[c] : 0.0f;
    }
    for (; token < side->block_size; token++) {
        vf beyond = vf_set1(0.0f); /* how far beyond the codes, in units of values */
        uint8_t *row = codes + token % KV_LANES * STRIDE;
        for (ptrdiff_t c = 0; c < dims; c += W) {
            const vf x = vf_sub(KV(load_channels)(rows + token * stride, c, n), vf_load(offset + c));
            const vf step = vf_load(scale + c), last = vf_load(most + c);
            beyond = vf_max(beyond, vf_max(vf_sub(x, vf_mul(step, vf_add(last, vf_set1(1.25f)))),
                                           vf_sub(vf_mul(step, vf_set1(-1.25f)), x)));
            vi_store_int8((int8_t *)row + c, vf_round(KV(channel_code)(x, vf_load(inverse + c), last)));
        }
        if (guarded && vf_hmax(beyond) > 0.0f) return 0;
        if (!packed) KV(put_k)(side, block, token, row);
        else if (token < begin) kv_put_key((uint8_t *)block, &order, side->padded_dim, token, row);
        else if (token % KV_LANES == KV_LANES - 1)
            KV(put_keys)(&order, side->padded_dim, codes, STRIDE,
                         kv_packed_unit((uint8_t *)block, 3, side->padded_dim, token, 0));
    }
    return 1;
}

static int KV(seal_k)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride, int kept)
{
    if (side->channels) {
        if (kept) return KV(code_channels)(side, block, rows, stride, kept, 1);
        if (side->family == KV_PACKED_CODES) KV(fit_packed_channels)(side, block, rows, stride);
        else KV(fit_channels)(side, block, rows, stride);
        return KV(code_channels)(side, block, rows, stride, 0, 0);
    }
    if (!side->means) { /* each token by itself */
        KV(encode_k)(side, block, kept, rows + kept * stride, stride, side->block_size - kept);
        return 1;
    }
    KV_ALIGNED float mean[KV_MAX_HEAD_DIM], centred[KV_MAX_HEAD_DIM];
    if (!kept) KV(centre)(side, block, rows, stride);
    KV(to_float16)(block + side->means, side->padded_dim, mean);
    for (int t = kept; t < side->block_size; t++) {
        for (int d = 0; d < side->head_dim; d++) centred[d] = rows[t * stride + d] - mean[d];
        KV(encode_k)(side, block, t, centred, 0, 1);
    }
    return 1;
}
