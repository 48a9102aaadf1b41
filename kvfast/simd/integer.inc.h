/* Attention on INT8 and INT4 codes by integer dot products.

   The activations (q for the scores, softmax weight x V scale for the values) are 16-bit integers in
   -32639..32639 with one float scale per row: their rounding, 1.5e-5 of the row's largest, vanishes
   against that of the stored codes. VNNI multiplies them as 256 x high +
   low bytes, the others as one int16; both give the same integer.

   The sums are exact. With codes c = stored - bias in -127..127 and depth n <= 512,
       |sum c x| <= 127 * 32639 * 512 = 2 122 318 336 < 2^31,
   and what is added on the way (stored codes, parts) is correct modulo 2^32, so the bias may be
   taken off after the sum. */
#define KV_MAX_ACTIVATION 32639.0f

/* (INT_VECTORS or 1) x W lanes against `rows` rows of activations over `lines` 64-byte lines: from base +
   block[0] on, or with `gather` block_lines of each block. (One loop inside the other takes 8 % longer than
   one alone where nothing is gathered.) */
static inline __attribute__((always_inline)) void KV(dot_panel)(
    const char *base, const ptrdiff_t *block, ptrdiff_t tile_bytes, int lines, const int gather, int block_lines,
    const int bits, const int8_t *x, const int rows, const int vectors, const char *ahead, vi out[KV_PANEL][4])
{
    vacc a[KV_PANEL][4], b[KV_PANEL][4]; /* [rows][vectors]; 4 because KV_FOR4 names them all */
    KV_FOR4(r, rows, KV_FOR4(v, vectors, a[r][v] = b[r][v] = (vacc)vi_set1(0);););
    do {
        const char *codes = base + *block++;
        const int here = gather && block_lines < lines ? block_lines : lines;
        for (int line = 0; line < here; line++) {
            KV_FOR4(v, vectors,
                const char *at = codes + v * tile_bytes;
                kv_prefetch(ahead + v * 64);
                vcodes stored = vcodes_load(at);
                if (bits == 8) {
                    vwide wide = vcodes_widen(stored);
                    KV_FOR4(r, rows, vacc_dot(a[r][v], b[r][v], wide, x + 8 * r););
                } else {
                    vwide low = vcodes_widen(vcodes_low(stored)), high = vcodes_widen(vcodes_high(stored));
                    KV_FOR4(r, rows, vacc_dot(a[r][v], b[r][v], low, x + 8 * r););
                    KV_FOR4(r, rows, vacc_dot(a[r][v], b[r][v], high, x + 8 * (KV_PANEL + r)););
                }
            );
            codes += 64;
            ahead += vectors * 64;
            x += 8 * KV_PANEL * (bits == 8 ? 1 : 2);
        }
        lines -= here;
    } while (gather && lines > 0);
    KV_FOR4(r, rows, KV_FOR4(v, vectors, out[r][v] = vacc_total(a[r][v], b[r][v]);););
}

/* Every (rows, vectors) is a panel of its own, so that its accumulators stay in registers. */
#define KV_EACH_PANEL(rows, vectors, panel)                              \
    switch (rows) {                                                      \
    case 1: if (vectors > 1) { panel(1, INT_VECTORS) } else { panel(1, 1) } break; \
    case 2: if (vectors > 1) { panel(2, INT_VECTORS) } else { panel(2, 1) } break; \
    case 3: if (vectors > 1) { panel(3, INT_VECTORS) } else { panel(3, 1) } break; \
    default: if (vectors > 1) { panel(4, INT_VECTORS) } else { panel(4, 1) }       \
    }

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
    const kv_side *side, const float *rows, int num_rows, float scale, kv_queries *queries, const int bias)
{
    const ptrdiff_t n = side->padded_dim;
    for (int row = 0; row < num_rows; row += KV_PANEL) {
        const int panel_rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL;
        float inverse[KV_PANEL];
        for (int r = 0; r < panel_rows; r++) {
            float largest = kv_bits_float((uint32_t)KV(max_magnitude_bits)(rows + (row + r) * n, n));
            inverse[r] = largest > 0x1p-100f ? KV_MAX_ACTIVATION / largest : 0.0f;
            queries->scale[row + r] = largest / KV_MAX_ACTIVATION * scale;
        }
        KV(put_activations)(rows + row * n, n, panel_rows, n, inverse, queries->parts + row * n * 2, queries->sum + row);
        for (int r = 0; r < panel_rows; r++) queries->sum[row + r] *= bias;
    }
}

static inline __attribute__((always_inline)) void KV(scores_integer)(
    const kv_side *side, const kv_queries *queries, int num_rows, const kv_tile *tile, const kv_ahead *ahead,
    float *scores, const int bits)
{
    const int lines = side->padded_dim / (bits == 8 ? 4 : 8);
    const ptrdiff_t tile_bytes = (ptrdiff_t)lines * 64;
    const int lanes = (tile->count + KV_LANES - 1) / KV_LANES * KV_LANES;
    for (int row = 0; row < num_rows; row += KV_PANEL) {
        const int8_t *x = queries->parts + row * (side->padded_dim * 2);
        const int rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL;
        const ptrdiff_t *block = tile->at;
        int slot = tile->first;
        for (int lane = 0; lane < lanes;) {
            const ptrdiff_t at = slot / KV_LANES * tile_bytes + slot % KV_LANES * 4;
            const float *token_scales = (const float *)(tile->base + *block + side->scales) + slot;
            const char *fetch = kv_prefetch_from(ahead, lane / KV_LANES * tile_bytes);
            const int left = lanes - lane < side->block_size - slot ? lanes - lane : side->block_size - slot;
            const int vectors = INT_VECTORS * W <= left ? INT_VECTORS : 1;
#define KV_PANEL_SCORES(R, V)                                                                          \
    vi out[KV_PANEL][4];                                                                     \
    KV(dot_panel)(tile->base + at, block, tile_bytes, lines, 0, 0, bits, x, R, V, fetch, out);         \
    for (int r = 0; r < R; r++)                                                                        \
        for (int v = 0; v < V; v++) {                                                                  \
            vf dot = vi_to_float(vi_sub(out[r][v], vi_set1(queries->sum[row + r])));                   \
            vf scale = vf_mul(vf_set1(queries->scale[row + r]), vf_load(token_scales + v * W)); \
            vf_store(scores + (row + r) * KV_TILE + lane + v * W, vf_mul(dot, scale));                 \
        }
            KV_EACH_PANEL(rows, vectors, KV_PANEL_SCORES)
            lane += vectors * W;
            slot += vectors * W;
            if (slot == side->block_size) slot = 0, block++;
        }
    }
    kv_prefetch_end(ahead);
}

static inline __attribute__((always_inline)) void KV(accumulate_integer)(
    const kv_side *side, const float *weights, int num_rows, const kv_tile *tile, const kv_ahead *ahead,
    const float *rescale, float *acc, const int bits, const int bias, const int gather)
{
    const int tokens = (tile->count + KV_LANES - 1) / KV_LANES * KV_LANES;
    const int depth = bits == 8 ? 4 : 8;
    const int lines = tokens / depth, block_lines = (side->block_size - tile->first) / depth;
    const ptrdiff_t tile_bytes = (ptrdiff_t)(side->block_size / depth) * 64;
    const ptrdiff_t first = tile->first / depth * 64;
    const float *token_scales[KV_TILE / KV_LANES];
    int8_t parts[KV_ROWS * KV_TILE * 2];
    float scales[KV_ROWS];
    int32_t sums[KV_ROWS];
    for (int t = 0, block = 0, slot = tile->first; t < tokens; t += KV_LANES) {
        token_scales[t / KV_LANES] = (const float *)(tile->base + tile->at[block] + side->scales) + slot;
        slot += KV_LANES;
        if (slot == side->block_size) slot = 0, block++;
    }
    for (int row = 0; row < num_rows; row += KV_PANEL) { /* fold the V scales into the weights */
        const int rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL;
        float folded[KV_PANEL * KV_TILE], inverse[KV_PANEL];
        for (int r = 0; r < rows; r++) {
            vf largest = vf_set1(0.0f);
            for (int t = 0; t < tokens; t += W) {
                vf weight = vf_mul(vf_load(weights + (row + r) * KV_TILE + t), vf_load(token_scales[t / KV_LANES] + t % KV_LANES));
                vf_store(folded + r * KV_TILE + t, weight);
                largest = vf_max(largest, weight);
            }
            float peak = vf_hmax(largest);
            inverse[r] = peak > 0x1p-100f ? KV_MAX_ACTIVATION / peak : 0.0f;
            scales[row + r] = peak / KV_MAX_ACTIVATION;
        }
        KV(put_activations)(folded, KV_TILE, rows, tokens, inverse, parts + row * (KV_TILE * 2), sums + row);
        for (int r = 0; r < rows; r++) sums[row + r] *= bias;
    }
    for (int row = 0; row < num_rows; row += KV_PANEL) {
        const int8_t *x = parts + row * (KV_TILE * 2);
        const int rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL;
        for (int lane = 0; lane < side->padded_dim;) {
            const ptrdiff_t at = first + lane / KV_LANES * tile_bytes + lane % KV_LANES * 4;
            const char *fetch = kv_prefetch_from(ahead, lane / KV_LANES * (ptrdiff_t)lines * 64);
            const int vectors = lane + INT_VECTORS * W <= side->padded_dim ? INT_VECTORS : 1;
#define KV_PANEL_VALUES(R, V)                                                                         \
    vi out[KV_PANEL][4];                                                                    \
    KV(dot_panel)(tile->base + at, tile->at, tile_bytes, lines, gather, block_lines, bits, x, R, V, fetch, out); \
    for (int r = 0; r < R; r++)                                                                       \
        for (int v = 0; v < V; v++) {                                                                 \
            float *target = acc + (row + r) * side->padded_dim + lane + v * W;                        \
            vf dot = vi_to_float(vi_sub(out[r][v], vi_set1(sums[row + r])));                          \
            vf_store(target, vf_fma(dot, vf_set1(scales[row + r]),                                    \
                                    vf_mul(vf_load(target), vf_set1(rescale[row + r]))));             \
        }
            KV_EACH_PANEL(rows, vectors, KV_PANEL_VALUES)
            lane += vectors * W;
        }
    }
    kv_prefetch_end(ahead);
}

#define KV_INTEGER_KERNELS(dtype, bits, bias)                                                         \
    static void KV(prepare_##dtype)(const kv_side *side, const float *rows, int num_rows, float scale, \
                                    kv_queries *queries)                                              \
    {                                                                                                 \
        KV(prepare_integer)(side, rows, num_rows, scale, queries, bias);                              \
    }                                                                                                 \
    static void KV(scores_##dtype)(const kv_side *side, const kv_queries *queries, int num_rows,      \
                                   const kv_tile *tile, const kv_ahead *ahead, float *scores)         \
    {                                                                                                 \
        KV(scores_integer)(side, queries, num_rows, tile, ahead, scores, bits);                       \
    }                                                                                                 \
    static void KV(accumulate_##dtype)(const kv_side *side, const float *weights, int num_rows,       \
                                       const kv_tile *tile, const kv_ahead *ahead,                    \
                                       const float *rescale, float *acc)                              \
    {                                                                                                 \
        if (tile->first + tile->count <= side->block_size)                                            \
            KV(accumulate_integer)(side, weights, num_rows, tile, ahead, rescale, acc, bits, bias, 0); \
        else                                                                                          \
            KV(accumulate_integer)(side, weights, num_rows, tile, ahead, rescale, acc, bits, bias, 1); \
    }
KV_INTEGER_KERNELS(int8, 8, 128)
KV_INTEGER_KERNELS(int4, 4, 8)

#undef KV_INTEGER_KERNELS
#undef KV_PANEL_SCORES
#undef KV_PANEL_VALUES
#undef KV_EACH_PANEL
#undef KV_MAX_ACTIVATION
