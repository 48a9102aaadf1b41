/* What panels of all families share: rows and lines of a tile, codes as bytes, the exponential, and what is prefetched while a tile is
   read. The families are words16, tiles8 and tiles_bf16, each in a folder of that name. */

/* Compilers load nothing of what comes next before it, or sums would not stay in registers. */
#define KV_NOTHING_SOONER __asm__ volatile("" ::: "memory")

/* Transposes 16 lines of 16 dwords: dword l of line r becomes dword r of line l. */
static void KV(transpose_lines)(const int8_t *lines, int8_t *out)
{
    vi a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_load_si512(lines + 64 * i);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* a[4 g + i] holds dwords i, 4 + i, 8 + i, 12 + i of lines 4 g to 4 g + 3 */
        const vi even_0 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        const vi odd_0 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xDD);
        const vi even_1 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        const vi odd_1 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xDD);
        _mm512_store_si512(out + 64 * i, _mm512_shuffle_i32x4(even_0, even_1, 0x88));
        _mm512_store_si512(out + 64 * (8 + i), _mm512_shuffle_i32x4(even_0, even_1, 0xDD));
        _mm512_store_si512(out + 64 * (4 + i), _mm512_shuffle_i32x4(odd_0, odd_1, 0x88));
        _mm512_store_si512(out + 64 * (12 + i), _mm512_shuffle_i32x4(odd_0, odd_1, 0xDD));
    }
}

/* The sum, or the maximum, of each of 16 rows of 16 floats, in the order of vf_hsum. */
static inline __attribute__((always_inline)) vf KV(reduce_rows)(const float *rows, const int maximum)
{
#define JOIN(x, y) (maximum ? vf_max(x, y) : vf_add(x, y))
    vf a[16];
    /* Row r ends up in lane r: bits 3 and 2 of r choose the 128-bit lane, bits 1 and 0 the place in it. */
    for (int i = 0; i < 16; i++) a[i % 4 * 4 + i / 4] = vf_load(rows + 16 * i);
    for (int i = 0; i < 16; i += 2)
        a[i / 2] = JOIN(_mm512_shuffle_f32x4(a[i], a[i + 1], 0x44), _mm512_shuffle_f32x4(a[i], a[i + 1], 0xEE));
    for (int i = 0; i < 8; i += 2)
        a[i / 2] = JOIN(_mm512_shuffle_f32x4(a[i], a[i + 1], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 1], 0xDD));
    for (int i = 0; i < 4; i += 2)
        a[i / 2] = JOIN(_mm512_shuffle_ps(a[i], a[i + 1], 0x44), _mm512_shuffle_ps(a[i], a[i + 1], 0xEE));
    return JOIN(_mm512_shuffle_ps(a[0], a[1], 0x88), _mm512_shuffle_ps(a[0], a[1], 0xDD));
#undef JOIN
}

static const KV_ALIGNED char KV(no_row)[4 * KV_MAX_HEAD_DIM];

/* Finds the rows of a tile's tokens, and rows of zeros up to whole lane tiles; returns how many. */
static int KV(find_rows)(const kv_side *side, const kv_tile *tile, int multiple, const char **rows)
{
    const int count = (tile->count + multiple - 1) / multiple * multiple;
    const ptrdiff_t *block = tile->at;
    for (int t = 0, slot = tile->first; t < count; t++, slot++) {
        if (slot == side->block_size) slot = 0, block++;
        rows[t] = t < tile->count ? tile->base + *block + slot * side->row_stride : KV(no_row);
    }
    return count;
}

/* A line of codes as signed bytes; of nibbles the low ones. */
static inline __attribute__((always_inline)) vi KV(signed_codes)(vcodes stored, const int dtype)
{
    if (dtype == KV_INT4) return _mm512_sub_epi8(vcodes_low(stored), _mm512_set1_epi8(8));
    return _mm512_xor_si512(dtype == KV_INT8 ? stored : vcodes_levels(stored), _mm512_set1_epi8((char)128));
}

/* Widens keys with channel scales of 16 tokens to a line of bytes for each four depths, less a bias; see keys.h. */
static inline __attribute__((always_inline)) void KV(widen_keys)(const char *unit, int units, const kv_key_order *order,
                                                                 const int dtype, int bias, const char *ahead, int8_t *out)
{
    const int unit_bytes = 32 * kv_dtypes[dtype].bits;
    const vi less = _mm512_set1_epi8((char)bias);
    for (size_t u = 0; u < (size_t)units; u++, unit += unit_bytes, ahead += unit_bytes) {
        const KV(dwords) low = (KV(dwords))vcodes_load(unit);
        const KV(dwords) high = dtype == KV_INT4 ? (KV(dwords))vcodes_load(unit + 64) : (KV(dwords))KV(load_nibbles)(unit + 64, 0);
        kv_prefetch_lines(ahead, 2, kv_prefetch_level);
#define KV_PUT(line, codes, other, more)                                                          \
    do {                                                                                           \
        _mm512_store_si512(out + (size_t)(line) * 64, _mm512_sub_epi8((vi)(codes), less));         \
        _mm512_store_si512(out + (size_t)(other) * 64, _mm512_sub_epi8((vi)(more), less));         \
    } while (0)
        KV_EACH_KEY_LINES(dtype, 0, order, u, low, high, KV_PUT);
#undef KV_PUT
    }
}

/* Loads the scales and means of a block's channels. A score is sum q (c s + m) = sum (q s) (c - bias) + sum q (m + bias s). */
static void KV(load_block_statistics)(const kv_side *side, const char *block, float *means, float *channels)
{
    const uint16_t *scales = (const uint16_t *)(block + side->channels);
    const vf unit = vf_set1(side->channels ? KV(unit_of)(scales) * 0x1p-16f : 0.0f);
    for (int c = 0; c < side->padded_dim; c += W) {
        vf mean = vf_load_float16((const uint16_t *)(block + side->means) + c);
        if (side->channels) {
            const vf scale = KV(load_channel_scales)(scales + c, unit);
            mean = vf_fma(scale, vf_set1((float)KV_KEY_BIAS(side->dtype)), mean);
            vf_store(channels + c, scale);
        }
        vf_store(means + c, mean);
    }
}

/* The factors that make rows integers whose largest is `most`. */
static inline vf KV(inverse_of)(vf most, vf largest)
{
    return _mm512_maskz_div_ps(_mm512_cmp_ps_mask(largest, vf_set1(0x1p-100f), _CMP_GT_OQ), most, largest);
}

/* Adds the weights of a tile to those of a panel's rows. NaN where all scores that a row sees are beyond float32. */
static inline void KV(add_weights)(kv_panel *panel, const float *rescale, vf sums)
{
    KV_ALIGNED float sum[KV_ROWS];
    const __mmask16 blind = _mm512_cmp_ps_mask(vf_load(panel->m), vf_set1(-INFINITY), _CMP_EQ_OQ);
    vf_store(sum, _mm512_mask_mov_ps(sums, blind & _mm512_cmplt_epi32_mask(vi_load(panel->start), vi_load(panel->stop)), vf_set1(NAN)));
    for (int r = 0; r < KV_ROWS; r++) panel->l[r] = panel->l[r] * (double)rescale[r] + (double)sum[r];
}

/* Replaces `count` vectors, at most 8, by the bits of KV(exp). Each step is taken for all vectors before the next, as a processor does
   not look far enough ahead to overlap them. */
static inline __attribute__((always_inline)) void KV(exp_of_scores)(vf *x, const int count)
{
    const float factors[] = {0.00967603177f, 0.0555035695f, 0.240221068f, 0.693147182f, 1.00000012f};
    vf n[8], r[8], y[8];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) r[i] = vf_mul(x[i], vf_set1(1.44269504f));
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) n[i] = _mm512_roundscale_ps(r[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) r[i] = vf_sub(r[i], n[i]), y[i] = vf_set1(0.00133908633f);
#pragma GCC unroll 5
    for (int factor = 0; factor < 5; factor++)
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) y[i] = vf_fma(y[i], r[i], vf_set1(factors[factor]));
#pragma GCC unroll 8
    for (int i = 0; i < count; i++)
        x[i] = _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x[i], vf_set1(-87.0f), _CMP_NLT_UQ), y[i], n[i]);
}

/* Prefetches one part in `parts` of each block of a tile. */
static inline void KV(prefetch_blocks)(const kv_side *side, const kv_tile *tile, int part, int parts)
{
    const ptrdiff_t begin = side->bytes * part / parts / 64 * 64, end = side->bytes * (part + 1) / parts;
    for (int token = -tile->first, i = 0; token < tile->count; token += side->block_size, i++)
        for (ptrdiff_t at = begin; at < end; at += 64) __builtin_prefetch(tile->base + tile->at[i] + at, 0, 2);
}

/* The tiles that are read after these tokens. */
typedef struct {
    const kv_side *k, *v;
    const kv_tile *keys, *values;
    int part, parts;
} KV(following);

/* Prefetches one part of them. A processor can wait for few lines at once, and the lines that it needs now would queue
   after the others. */
static inline void KV(prefetch_part)(KV(following) *next)
{
    KV(prefetch_blocks)(next->k, next->keys, next->part, next->parts);
    KV(prefetch_blocks)(next->v, next->values, next->part, next->parts);
    next->part++;
}

enum { PREFETCHES = 3 }; /* parts that a panel prefetches */

/* Finds the tokens of a tile that a row of the panel sees, from and to a multiple of `whole`; returns 0 if there are none. */
static inline int KV(find_seen)(const kv_panel *panel, int whole, int *begin, int *end)
{
    int first = KV_TILE, stop = 0;
    for (int r = 0; r < panel->rows; r++)
        if (panel->start[r] < panel->stop[r]) {
            first = panel->start[r] < first ? panel->start[r] : first;
            stop = panel->stop[r] > stop ? panel->stop[r] : stop;
        }
    *begin = first / whole * whole;
    *end = (stop + whole - 1) / whole * whole;
    return first < stop;
}
