/* Seals blocks of keys: computes the statistics of the channels, then the codes, which need them.

   Centred blocks: x = code x token scale + mean, with the mean of the channel over the block.
   Blocks with channel scales (KIVI, arXiv 2402.02750): x = code x scale + offset. Lines whose rounding matters more have more bits, as
   Kitty gives a few channels more (arXiv 2511.18643); see keys.h. */

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

/* Writes the scales as fractions of the smallest unit that the largest scale fits, rounded up. */
static void KV(put_channels)(const kv_side *side, uint16_t *channels, const float *scales)
{
    const float most = (float)KV_FACTOR;
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

/* The bits of each line, see keys.h. A line's rounding is weighted by the range of its channels, times the size of the queries there.
   That size is not known, but in models with rotary positions queries are large where keys are, in both channels of a pair (Jin et
   al., Massive Values in Self-Attention Modules, arXiv 2502.01563): a line has the size of its own keys and of those half a head away.
   But keys that are far larger than they vary, as the biases of Qwen2.5 make them, say nothing of queries: their size is then that of a
   Gaussian of their range. And no line of INT4 has 6 bits for its size: one with eight times the range of the adjacent narrow
   line has, which leaves the sum of both roundings least. In a basis of a calibration queries vary where keys do, so ranges
   alone decide. `sizes` are the mean magnitudes of channels. */
static void KV(share_key_bits)(const kv_side *side, const float *ranges, const float *sizes, uint8_t *bits)
{
    const int lines = side->padded_dim / 4, half = side->head_dim / 8, mean = kv_dtypes[side->dtype].bits;
    double range[KV_MAX_HEAD_DIM / 4], size[KV_MAX_HEAD_DIM / 4]; /* no product of floats overflows */
    uint64_t weight[KV_MAX_HEAD_DIM / 4]; /* the bits of a double that is at least 0, which have its order; NaN has a place, too */
    uint8_t wide[KV_MAX_HEAD_DIM / 16], narrow[KV_MAX_HEAD_DIM / 16];
    int num_wide = 0, num_narrow = 0;
    for (int i = 0; i < lines; i++) {
        range[i] = (double)ranges[4 * i] + ranges[4 * i + 1] + ranges[4 * i + 2] + ranges[4 * i + 3];
        size[i] = (double)sizes[4 * i] + sizes[4 * i + 1] + sizes[4 * i + 2] + sizes[4 * i + 3];
        if (size[i] > 8.0 * range[i]) size[i] = range[i] / 6.0;
    }
    for (int i = 0; i < lines; i++) {
        double pair = 0.0;
        if (i < 2 * half) pair = size[i < half ? i + half : i - half];
        const double counts = range[i] * range[i] * (side->in_basis ? 1.0 : size[i] * size[i] + pair * pair);
        memcpy(weight + i, &counts, sizeof counts);
    }
    for (int i = 0; i < lines; i++) {
        int before = 0; /* lines that count more */
        for (int j = 0; j < lines; j++) before += (weight[j] > weight[i]) | ((weight[j] == weight[i]) & (j < i));
        bits[i] = (uint8_t)(mean + (before < lines / 4) - (before >= lines - lines / 4));
        if (bits[i] > mean) wide[num_wide++] = (uint8_t)i; /* a quarter of the lines, as no two have the same number before */
        if (bits[i] < mean) narrow[num_narrow++] = (uint8_t)i;
    }
    for (int i = 0; mean == 4 && i < lines / 4; i++) {
        const int more = range[wide[i]] >= 8.0 * range[narrow[i]];
        bits[wide[i]] = (uint8_t)(5 + more);
        bits[narrow[i]] = (uint8_t)(3 - more);
    }
}

/* Bits, scale and offset of each channel, from its smallest to its largest value. The line of least squared error would clip the
   largest keys, which are the ones attended to: it loses more at 3 bits, and no less at 4, though the squared error falls. */
static void KV(fit_channels)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride)
{
    uint16_t *offsets = (uint16_t *)(block + side->means), *channels = (uint16_t *)(block + side->channels);
    const int lines = side->padded_dim / 4, mean = kv_dtypes[side->dtype].bits;
    KV_ALIGNED float low[KV_MAX_HEAD_DIM], high[KV_MAX_HEAD_DIM], scales[KV_MAX_HEAD_DIM] = {0}, sizes[KV_MAX_HEAD_DIM];
    uint8_t bits[KV_MAX_HEAD_DIM / 4];
    const vf small = vf_set1(1.0f / (float)side->block_size); /* a power of two */
    for (ptrdiff_t c = 0; c < side->padded_dim; c += W) {
        vf least = KV(load_channels)(rows, c, side->head_dim), most = least, size = vf_mul(vf_abs(least), small);
        for (int t = 1; t < side->block_size; t++) {
            const vf x = KV(load_channels)(rows + t * stride, c, side->head_dim);
            least = vf_min(least, x);
            most = vf_max(most, x);
            size = vf_fma(vf_abs(x), small, size);
        }
        vf_store(sizes + c, size);
        vf_store(low + c, least);
        vf_store(high + c, most);
        vf_store(scales + c, vf_sub(most, least));
        vf_store_float16(offsets + c, least);
    }
    KV(share_key_bits)(side, scales, sizes, bits);
    for (ptrdiff_t c = 0; c < side->padded_dim; c++) {
        const float steps = (float)((1 << bits[c / 4]) - 1), offset = kv_from_float16(offsets[c]);
        float scale = scales[c] * (1.0f / steps);
        /* Rounding may move the range a little. */
        scale = scale > offset - low[c] ? scale : offset - low[c];
        scale = scale > (high[c] - offset) * (1.0f / (steps + 1.0f)) ? scale : (high[c] - offset) * (1.0f / (steps + 1.0f));
        scale = scale > 0x1p-100f ? scale : 0x1p-100f;
        scales[c] = scale * (1.0f / (float)(1 << (KV_KEY_BITS(mean) - bits[c / 4]))); /* of a code of all bits */
    }
    KV(put_channels)(side, channels, scales);
    for (int line = 0; line < lines; line++) {
        if (bits[line] > mean) channels[line] |= KV_KEY_FLAG;
        if (bits[line] < mean) channels[lines + line] |= KV_KEY_FLAG;
        if (bits[line] > mean + 1) channels[2 * lines + line] |= KV_KEY_FLAG;
    }
}

/* Writes the codes of 16 tokens, rows of `stride` bytes. `lines` has room for as many. */
static void KV(put_keys)(const kv_key_order *order, int mean, int padded_dim, const uint8_t *codes, ptrdiff_t stride, uint8_t *unit,
                         uint8_t *lines)
{
    for (int d = 0; d < padded_dim; d += 16)
        for (int t = 0; t < KV_LANES; t += 4) kv_transpose_4x4_dwords(codes + t * stride + d, stride, lines + d * 16 + t * 4, 64);
    for (int u = 0; u < padded_dim / KV_UNIT; u++, unit += 32 * mean) {
        const uint8_t *even0 = lines + order->even[2 * u] * 64, *even1 = lines + order->even[2 * u + 1] * 64;
        const uint8_t *wide = lines + order->wide[u] * 64, *narrow = lines + order->narrow[u] * 64;
        const int narrow_bits = 3 - order->more[u];
        if (mean == 3) KV(put_threes)(even0, even1, wide, narrow, unit);
        else
            for (int i = 0; i < 64; i++) {
                unit[i] = (uint8_t)(even0[i] << 4 | even1[i]);
                unit[64 + i] = (uint8_t)(wide[i] << narrow_bits | narrow[i]);
            }
    }
}

/* Encodes the tokens from `token` on with the channels' scales and offsets. With `guarded`, stops and returns 0 at a token
   that is more than 1.25 steps beyond the range of codes. */
static int KV(code_channels)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride, int token, int guarded,
                             kv_room *room)
{
    enum { STRIDE = KV_MAX_HEAD_DIM + KV_LANES };
    typedef struct {
        uint8_t codes[KV_LANES * STRIDE];
        KV_ALIGNED uint8_t lines[KV_LANES * KV_MAX_HEAD_DIM];
    } lanes;
    const uint16_t *channels = (const uint16_t *)(block + side->channels);
    KV_ALIGNED float offset[KV_MAX_HEAD_DIM], scale[KV_MAX_HEAD_DIM], inverse[KV_MAX_HEAD_DIM], most[KV_MAX_HEAD_DIM];
    uint8_t *const codes = KV_IN(room->pass, lanes)->codes, *const lines = KV_IN(room->pass, lanes)->lines;
    uint8_t bits[KV_MAX_HEAD_DIM / 4];
    const ptrdiff_t n = side->head_dim, dims = side->padded_dim;
    const float unit = KV(unit_of)(channels);
    const int mean = kv_dtypes[side->dtype].bits, begin = kv_whole_lanes(token);
    kv_key_order order;
    kv_read_key_order(channels, side->padded_dim, &order);
    kv_key_bits(&order, side->padded_dim, mean, bits);
    KV(to_float16)(block + side->means, dims, offset);
    for (ptrdiff_t c = 0; c < dims; c++) {
        most[c] = (float)((1 << bits[c / 4]) - 1);
        scale[c] = (float)(channels[c] & KV_FACTOR) * unit * (float)(1 << (KV_KEY_BITS(mean) - bits[c / 4]));
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
        if (token < begin) kv_put_key((uint8_t *)block, &order, mean, side->padded_dim, token, row);
        else if (token % KV_LANES == KV_LANES - 1)
            KV(put_keys)(&order, mean, side->padded_dim, codes, STRIDE,
                         kv_packed_unit((uint8_t *)block, mean, side->padded_dim, token, 0), lines);
    }
    return 1;
}

static int KV(seal_k)(const kv_side *side, char *block, const float *rows, ptrdiff_t stride, int kept, kv_room *room)
{
    if (side->channels) {
        if (kept) return KV(code_channels)(side, block, rows, stride, kept, 1, room);
        KV(fit_channels)(side, block, rows, stride);
        return KV(code_channels)(side, block, rows, stride, 0, 0, room);
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
