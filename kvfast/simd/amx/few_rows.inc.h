/* Attention of few query rows on INT8, INT4, GAUSS4 and INT3 codes with the matrix unit. It gives the bits of integer.inc.h: the same
   activations, and the same exact sums of their products. One instruction multiplies the high and low parts of up to 8 rows by
   16 lanes over 64 depths; all but INT8 are widened to bytes first, in the processor's cache. Packed keys are those of INT3 with
   channel scales.

   The sums are those of activations.inc.h: stored codes, at most 255, times parts, at least -128, over at most 512 depths,
       255 * 128 * 512 = 16 711 680 < 2^31.

   A lane tile's codes are widened while the one before is multiplied and the sums of the one before that are read, as loads of
   tiles wait for stores. */

enum {
    PASS_ROWS = KV_ROWS / 2,   /* query rows of an operand: row r has its high parts in row 2 r, its low ones in 2 r + 1 */
    MAX_PASSES = KV_ROWS / PASS_ROWS,
    MATRIX_DIM = KV_MAX_HEAD_DIM / 2, /* widest rows */
};

#define KV_TEXT(...) #__VA_ARGS__
#define KV_UNROLL(n) _Pragma(KV_TEXT(GCC unroll n))

/* Whether the matrix unit is ready. Without it these kernels are those of integer.inc.h: a few hundred tokens are too few to
   pay for it. */
static __thread int KV(matrix_is_open);

/* Makes the matrix unit ready for tasks of so many query rows. */
static void KV(open_matrix)(int rows)
{
    KV(matrix_is_open) = 1;
    KV(configure_tiles)(2 * (rows < PASS_ROWS ? rows : PASS_ROWS));
}

static void KV(close_matrix)(void)
{
    _tile_release();
    KV(matrix_is_open) = 0;
}

/* Cuts up to KV_PANEL rows of n floats, from row `row` of a task on, into operands (passes, n/64, KV_ROWS, 64); else as
   put_activations. */
static inline __attribute__((always_inline)) void KV(put_operands)(
    const float *rows, ptrdiff_t stride, int row, int num_rows, int n, const float *inverse, int8_t *x, int32_t *sums,
    const int carry)
{
    vi sum[KV_PANEL], value[KV_PANEL][4];
    vf left[KV_PANEL];
    float total[KV_PANEL]; /* exact, as in put_activations */
    x += row / PASS_ROWS * (n / TILE_DEPTH) * TILE_BYTES + row % PASS_ROWS * 2 * TILE_DEPTH;
    KV_FOR4(r, KV_PANEL,
        left[r] = vf_set1(0.0f);
        sum[r] = value[r][0] = value[r][1] = value[r][2] = value[r][3] = vi_set1(0););
    for (int i = 0; i < n; i += TILE_DEPTH, x += TILE_BYTES) {
        KV_FOR4(j, 4, KV_FOR4(r, KV_PANEL,
            if (r < num_rows) {
                vf exact = vf_mul(vf_load(rows + r * stride + i + j * W), vf_set1(inverse[r]));
                if (carry) exact = vf_add(exact, left[r]);
                value[r][j] = vf_round(exact);
                if (carry) left[r] = vf_sub(exact, vi_to_float(value[r][j]));
                sum[r] = vi_add(sum[r], value[r][j]);
            }););
        KV_FOR4(r, KV_PANEL,
            if (r < num_rows)
                KV(put_bytes)(value[r][0], value[r][1], value[r][2], value[r][3], x + 2 * r * TILE_DEPTH,
                              x + (2 * r + 1) * TILE_DEPTH););
    }
    KV(vf_sum4)(vi_to_float(sum[0]), vi_to_float(sum[1]), vi_to_float(sum[2]), vi_to_float(sum[3]), total);
    KV_FOR4(r, KV_PANEL, if (r < num_rows) sums[r] = (int32_t)total[r];);
}

/* Keys of whole operands. */
static inline int KV(fits_matrix)(const kv_side *side)
{
    return side->padded_dim % TILE_DEPTH == 0 && side->padded_dim <= MATRIX_DIM;
}

/* Widens consecutive lines of nibbles to twice as many lines of bytes. An unrolled loop is faster
   in the processor's cache, and slower from memory (python -m kvfast bench --work decode,cached --formats int4). */
static inline __attribute__((always_inline)) void KV(widen_nibbles)(const char *codes, int lines, const char *ahead, int8_t *out,
                                                                  const int dtype)
{
    KV_UNROLL(1)
    for (int line = 0; line < lines; line++, codes += 64, ahead += 64, out += 128) {
        const vcodes stored = vcodes_load(codes), shifted = vcodes_shift(stored);
        kv_prefetch(ahead);
        _mm512_store_si512(out, dtype == KV_INT4 ? vcodes_low(stored) : vcodes_levels(stored));
        _mm512_store_si512(out + 64, dtype == KV_INT4 ? vcodes_low(shifted) : vcodes_levels(shifted));
    }
}

/* Whether the operands stay in registers 2 and 3; else each product loads them. */
static inline int KV(hold_operands)(const int8_t *x, int tiles, int passes)
{
    if (tiles > 2 || passes > 1) return 0;
    _tile_loadd(2, x, TILE_DEPTH);
    if (tiles > 1) _tile_loadd(3, x + TILE_BYTES, TILE_DEPTH);
    return 1;
}

/* Multiplies a lane tile of `tiles` x 64 depths by the operands of all passes: sums (passes, KV_ROWS, 16). */
static inline __attribute__((always_inline)) void KV(multiply_codes)(const int8_t *x, int held, const void *codes, int tiles,
                                                                     int passes, int32_t *sums)
{
    const int8_t *y = x + tiles * TILE_BYTES, *c = codes;
    _tile_zero(0);
    if (held) {
        _tile_loadd(4, c, 64);
        _tile_dpbsud(0, 2, 4);
        if (tiles > 1) {
            _tile_loadd(5, c + TILE_BYTES, 64);
            _tile_dpbsud(0, 3, 5);
        }
        _tile_stored(0, sums, 64);
        return;
    }
    if (passes > 1) _tile_zero(1);
    for (int i = 0; i < tiles; i++, x += TILE_BYTES, y += TILE_BYTES, c += TILE_BYTES) {
        _tile_loadd(2, x, TILE_DEPTH);
        _tile_loadd(4, c, 64);
        _tile_dpbsud(0, 2, 4);
        if (passes > 1) {
            _tile_loadd(3, y, TILE_DEPTH);
            _tile_dpbsud(1, 3, 4);
        }
    }
    _tile_stored(0, sums, 64);
    if (passes > 1) _tile_stored(1, sums + KV_ROWS * KV_LANES, 64);
}

/* Fetches lines to the first level, as loads of tiles wait for each line. */
static inline void KV(fetch_lines)(const char *codes, int lines, const char *ahead)
{
    for (int line = 0; line < lines * 64; line += 64) {
        __builtin_prefetch(codes + line, 0, 3);
        kv_prefetch(ahead + line);
    }
}

/* The products of row r, without the bias of the codes. */
static inline vf KV(product_of)(const int32_t *sums, int r, int32_t bias)
{
    const int32_t *high = sums + 2 * r * KV_LANES;
    return vi_to_float(vi_sub(vacc_total(vi_load(high), vi_load(high + KV_LANES)), vi_set1(bias)));
}

/* Task rows folded with a block's statistics, as KV(folded). */
typedef struct {
    float shift[KV_ROWS], scale[KV_ROWS], inverse[KV_ROWS];
    int32_t sum[KV_ROWS];
    KV_ALIGNED float rows[KV_ROWS * MATRIX_DIM];
    KV_ALIGNED int8_t x[KV_ROWS * MATRIX_DIM * 2];
} KV(folded_rows);

static inline __attribute__((always_inline)) void KV(fold_operands)(
    const kv_side *side, const char *block, const kv_queries *queries, int row, const int num_rows, KV(folded_rows) *folded)
{
    const int n = side->padded_dim;
    float *rows = folded->rows + row * n;
    KV(fold_statistics)(side, block, queries, row, num_rows, rows, folded->shift + row, folded->inverse + row,
                        folded->scale + row);
    if (!side->channels) return;
    KV(put_operands)(rows, n, row, num_rows, n, folded->inverse + row, folded->x, folded->sum + row, 0);
    for (int r = row; r < row + num_rows; r++) folded->sum[r] *= KV_KEY_BIAS(side->dtype);
}

static __attribute__((noinline)) void KV(fold_all)(const kv_side *side, const char *block, const kv_queries *queries,
                                                   int num_rows, KV(folded_rows) *folded)
{
    for (int row = 0; row < num_rows; row += KV_PANEL)
        switch (num_rows - row) {
        case 1: KV(fold_operands)(side, block, queries, row, 1, folded); break;
        case 2: KV(fold_operands)(side, block, queries, row, 2, folded); break;
        case 3: KV(fold_operands)(side, block, queries, row, 3, folded); break;
        default: KV(fold_operands)(side, block, queries, row, 4, folded);
        }
}

static inline __attribute__((always_inline)) void KV(scores_matrix)(
    const kv_side *side, const kv_queries *queries, int num_rows, const kv_tile *tile, const kv_ahead *ahead,
    float *scores, const int n, const int dtype, const int statistics, KV(refiner) *refine)
{
    const int tiles = n / TILE_DEPTH, lines = n / KV_DEPTHS(dtype);
    const int channels = statistics == KV_CHANNELS, passes = (num_rows + PASS_ROWS - 1) / PASS_ROWS;
    const ptrdiff_t tile_bytes = KV(key_tile_bytes)(side, dtype), wide_bytes = n * KV_LANES;
    const int lanes = kv_whole_lanes(tile->count);
    const float error = KV(error_of_unit)(side, dtype) * (channels ? 1.0f : KV(largest_scale)(side, tile, dtype));
    typedef struct { KV(folded_rows) folded[2]; } pass;
    /* Of the block whose products are read, and of the next. */
    KV(folded_rows) *const folded = KV_IN(queries->room->pass, pass)->folded;
    KV_ALIGNED int8_t wide[2 * KV_LANES * MATRIX_DIM]; /* two lane tiles, not a page apart: loads would wait for stores */
    KV_ALIGNED int32_t products[2][MAX_PASSES * KV_ROWS * KV_LANES];
    const int mask = side->block_size - 1, shift = __builtin_ctz((unsigned)side->block_size), count = lanes / KV_LANES;
    const char *codes[2];
    kv_key_order order; /* of the block whose codes are widened */
    int held = channels ? 0 : KV(hold_operands)(queries->parts, tiles, passes);
    for (int i = 0; i < count + 2; i++) {
        if (i < count) {
            const int slot = tile->first + i * KV_LANES;
            const char *fetch = kv_prefetch_from(ahead, i * tile_bytes), *block = tile->base + tile->at[slot >> shift];
            codes[i % 2] = block + (slot & mask) / KV_LANES * tile_bytes;
            if (channels && (i == 0 || (slot & mask) == 0))
                KV(read_key_order)((const uint16_t *)(block + side->channels), n, &order);
            if (dtype == KV_INT8) KV(fetch_lines)(codes[i % 2], lines, fetch);
            else if (channels)
                KV(widen_keys)(codes[i % 2], n / KV_UNIT, &order, dtype, 0, fetch, wide + i % 2 * wide_bytes);
            else KV(widen_nibbles)(codes[i % 2], lines, fetch, wide + i % 2 * wide_bytes, dtype);
            KV_SETTLE(wide);
        }
        if (i > 1) {
            const int lane = (i - 2) * KV_LANES, slot = tile->first + lane, end = (slot + KV_LANES) & mask;
            const KV(folded_rows) *now = folded + (slot >> shift) % 2;
            const float *scales = channels ? now->scale : queries->scale;
            const int32_t *sums = channels ? now->sum : queries->sum;
            const char *token_scales = tile->base + tile->at[slot >> shift] + side->scales;
            KV_UNROLL(4)
            for (int r = 0; r < num_rows; r++) {
                const vf dot = KV(product_of)(products[i % 2], r, sums[r]);
                vf scale = vf_set1(scales[r]);
                if (!channels) scale = vf_mul(scale, KV(load_scales)(token_scales, slot & mask, dtype));
                vf_store(scores + r * KV_TILE + lane, statistics ? vf_fma(dot, scale, vf_set1(now->shift[r])) : vf_mul(dot, scale));
            }
            if (i == count + 1 || (channels && end == 0))
                for (int row = 0; row < num_rows; row += KV_PANEL) {
                    const int rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL, stop = lane + KV_LANES;
                    const int first = channels && (slot >> shift) > 0 ? (slot & ~mask) - tile->first : 0;
                    int counts = 0; /* whether what the rounding left out counts */
                    for (int r = row; r < row + rows; r++)
                        counts |= __builtin_fabsf(scales[r]) * error * 1.001f >= KV_LEAST_ERROR;
                    if (counts)
                        refine(side, (channels ? now->rows : queries->rows) + row * n,
                               (channels ? now->inverse : queries->inverse) + row, scales + row, queries->most + row, error,
                               rows, tile,
                               tile->at + (channels ? slot >> shift : 0), (tile->first + first) & mask, first, stop,
                               scores + row * KV_TILE, queries->room);
                }
        }
        if (i > 0 && i <= count) {
            const int slot = tile->first + (i - 1) * KV_LANES;
            KV(folded_rows) *next = folded + (slot >> shift) % 2;
            const int8_t *x = channels ? next->x : queries->parts;
            const int begins = statistics && (i == 1 || (slot & mask) == 0), after = (slot >> shift) + 1;
            if (begins) {
                if (i == 1) KV(fold_all)(side, tile->base + tile->at[slot >> shift], queries, num_rows, next);
                KV_SETTLE(x);
                if (channels) held = KV(hold_operands)(x, tiles, passes);
            }
            const char *bytes = dtype == KV_INT8 ? codes[(i - 1) % 2] : (const char *)wide + (i - 1) % 2 * wide_bytes;
            KV(multiply_codes)(x, held, bytes, tiles, passes, products[(i - 1) % 2]);
            if (begins && after << shift < tile->first + lanes) /* long before it is needed */
                KV(fold_all)(side, tile->base + tile->at[after], queries, num_rows, folded + after % 2);
        }
    }
    kv_prefetch_end(ahead);
}

/* A tile of which each 64 tokens are in one block, as whole operands. */
static inline int KV(is_whole)(const kv_side *side, const kv_tile *tile)
{
    const int tokens = kv_whole_lanes(tile->count);
    return tokens % TILE_DEPTH == 0 && side->block_size % TILE_DEPTH == 0 && tile->first % TILE_DEPTH == 0 &&
           (side->dtype != KV_INT8 || tokens == TILE_DEPTH);
}

/* Widens, or fetches, lane tile i of a tile of values. */
static inline __attribute__((always_inline)) void KV(widen_values)(const KV(values) *values, int i, const kv_ahead *ahead,
                                                                   const uint8_t *table, int8_t *wide, const int dtype)
{
    const char *fetch = kv_prefetch_from(ahead, i * (ptrdiff_t)values->tokens * KV_LANES * kv_dtypes[dtype].bits / 8);
    const ptrdiff_t at = values->first + i * values->tile_bytes, *block = values->blocks;
    if (dtype == KV_INT8) KV(fetch_lines)(values->base + *block + at, values->lines, fetch);
    else if (dtype == KV_INT3)
        for (int line = 0, here; line < values->lines; line += here) { /* a unit is 4 lines */
            here = values->block_lines < values->lines - line ? values->block_lines : values->lines - line;
            KV(expand_threes)((const uint8_t *)values->base + *block++ + at, here / 4, table, fetch + line * 24,
                              (uint8_t *)wide + line * 64);
        }
    else
        for (int line = 0, here; line < values->lines; line += here) {
            here = values->block_lines < values->lines - line ? values->block_lines : values->lines - line;
            KV(widen_nibbles)(values->base + *block++ + at, here, fetch + line * 64, wide + line * 128, dtype);
        }
    KV_SETTLE(wide);
}

static inline __attribute__((always_inline)) void KV(accumulate_matrix)(
    const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile, const kv_ahead *ahead, float *acc,
    const int tokens, const int dtype, KV(value_refiner) *refine)
{
    KV(values) values = KV(find_values)(side, tile, dtype);
    values.tokens = tokens, values.lines = tokens / KV_DEPTHS(dtype); /* they may be constants */
    const int tiles = values.tokens / TILE_DEPTH, passes = (num_rows + PASS_ROWS - 1) / PASS_ROWS;
    const int n = side->padded_dim / KV_LANES;
    float scales[KV_ROWS];
    int32_t sums[KV_ROWS];
    typedef struct { KV_ALIGNED int8_t x[KV_ROWS * KV_TILE * 2]; } pass;
    int8_t *const x = KV_IN(state->room->pass, pass)->x;
    KV_ALIGNED int8_t wide[2][KV_LANES * KV_TILE];
    KV_ALIGNED int32_t products[2][MAX_PASSES * KV_ROWS * KV_LANES];
    const uint8_t *table = kv_packed_table(side);
    KV(widen_values)(&values, 0, ahead, table, wide[0], dtype);
    for (int row = 0; row < num_rows; row += KV_PANEL) {
        const int rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL;
        float folded[KV_PANEL * KV_TILE], inverse[KV_PANEL];
        KV(fold_weights)(&values, state->weights + row * KV_TILE, rows, folded, inverse, scales + row, dtype);
        KV(put_operands)(folded, KV_TILE, row, rows, values.tokens, inverse, x, sums + row, 1);
        for (int r = row; r < row + rows; r++) {
            sums[r] *= KV_BIAS(dtype);
            state->noise[r] += KV(noise_of)(scales[r], KV_CODE_SIZE(dtype), state->seen[r]);
        }
    }
    KV_SETTLE(x);
    const int held = KV(hold_operands)(x, tiles, passes);
    for (int i = 1; i < n + 2; i++) {
        if (i < n) KV(widen_values)(&values, i, ahead, table, wide[i % 2], dtype);
        if (i > 1)
            KV_UNROLL(4)
            for (int r = 0; r < num_rows; r++) {
                float *target = acc + r * side->padded_dim + (i - 2) * KV_LANES;
                vf_store(target, vf_fma(KV(product_of)(products[i % 2], r, sums[r]), vf_set1(scales[r]),
                                        vf_mul(vf_load(target), vf_set1(state->rescale[r]))));
            }
        if (i > 0 && i <= n)
            KV(multiply_codes)(x, held, dtype == KV_INT8 ? values.base + *values.blocks + values.first + (i - 1) * values.tile_bytes
                                                         : (const char *)wide[(i - 1) % 2], tiles, passes, products[(i - 1) % 2]);
    }
    for (int row = 0; row < num_rows; row += KV_PANEL)
        if (state->refined >> row)
            refine(side, tile, state->weights + row * KV_TILE, num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL,
                   state->refined >> row, acc + row * side->padded_dim, state->room);
    kv_prefetch_end(ahead);
}

static void KV(prepare_operands)(const kv_side *side, const float *rows, int num_rows, float factor, kv_queries *queries,
                                 const int bias)
{
    const int n = side->padded_dim;
    queries->rows = rows;
    queries->most = KV(no_scores);
    queries->factor = factor;
    if (side->channels) return;
    for (int row = 0; row < num_rows; row += KV_PANEL) {
        const int panel_rows = num_rows - row < KV_PANEL ? num_rows - row : KV_PANEL;
        KV(find_units)(rows + row * n, n, panel_rows, factor, queries->inverse + row, queries->scale + row);
        KV(put_operands)(rows + row * n, n, row, panel_rows, n, queries->inverse + row, queries->parts, queries->sum + row, 0);
        for (int r = 0; r < panel_rows; r++) queries->sum[row + r] *= bias;
    }
}

/* Nibbles of KV_PANEL rows of 128 are the most common, and faster if these numbers are constants. */
#define KV_EACH_DIM(dtype, ...)                                                                       \
    if (dtype != KV_INT8 && num_rows == KV_PANEL && side->padded_dim == 2 * TILE_DEPTH)               \
        KV(scores_matrix)(side, queries, KV_PANEL, tile, ahead, scores, 2 * TILE_DEPTH, dtype, __VA_ARGS__); \
    else KV(scores_matrix)(side, queries, num_rows, tile, ahead, scores, side->padded_dim, dtype, __VA_ARGS__);

#define KV_MATRIX_KERNELS(name, dtype)                                                                \
    static void KV(prepare_matrix_##name)(const kv_side *side, const float *rows, int num_rows, float factor, \
                                          kv_queries *queries)                                        \
    {                                                                                                 \
        if (!KV(matrix_is_open) || !KV(fits_matrix)(side))                                            \
            KV(prepare_##name)(side, rows, num_rows, factor, queries);                                \
        else KV(prepare_operands)(side, rows, num_rows, factor, queries, KV_BIAS(dtype));             \
    }                                                                                                 \
    static void KV(scores_matrix_##name)(const kv_side *side, const kv_queries *queries, int num_rows, \
                                         const kv_tile *tile, const kv_ahead *ahead, float *scores)   \
    {                                                                                                 \
        if (!KV(matrix_is_open) || !KV(fits_matrix)(side))                                            \
            KV(scores_##name)(side, queries, num_rows, tile, ahead, scores);                          \
        else if (dtype == KV_INT4 && side->channels)                                                  \
            KV_EACH_DIM(dtype, KV_CHANNELS, KV(refine_keys4))                                      \
        else if (side->means)                                                                         \
            KV_EACH_DIM(dtype, KV_MEANS, KV(refine_##name))                                           \
        else                                                                                          \
            KV_EACH_DIM(dtype, 0, KV(refine_##name))                                                  \
    }                                                                                                 \
    static void KV(accumulate_matrix_##name)(const kv_side *side, kv_softmax *state, int num_rows,    \
                                             const kv_tile *tile, const kv_ahead *ahead, float *acc)  \
    {                                                                                                 \
        const int tokens = kv_whole_lanes(tile->count);                                               \
        if (!KV(matrix_is_open) || !KV(is_whole)(side, tile))                                         \
            KV(accumulate_##name)(side, state, num_rows, tile, ahead, acc);                           \
        else if (dtype != KV_INT8 && num_rows == KV_PANEL && tokens == 2 * TILE_DEPTH)                \
            KV(accumulate_matrix)(side, state, KV_PANEL, tile, ahead, acc, 2 * TILE_DEPTH, dtype,     \
                                  KV(refine_values_##name));                                          \
        else if (dtype != KV_INT8 && num_rows == KV_PANEL && tokens == TILE_DEPTH)                    \
            KV(accumulate_matrix)(side, state, KV_PANEL, tile, ahead, acc, TILE_DEPTH, dtype, KV(refine_values_##name)); \
        else                                                                                          \
            KV(accumulate_matrix)(side, state, num_rows, tile, ahead, acc, tokens, dtype, KV(refine_values_##name)); \
    }

KV_MATRIX_KERNELS(int8, KV_INT8)
KV_MATRIX_KERNELS(int4, KV_INT4)
KV_MATRIX_KERNELS(gauss4, KV_GAUSS4)
#undef KV_MATRIX_KERNELS
#undef KV_EACH_DIM
#undef KV_UNROLL
#undef KV_TEXT

static void KV(scores_matrix_packed)(const kv_side *side, const kv_queries *queries, int num_rows, const kv_tile *tile,
                                     const kv_ahead *ahead, float *scores)
{
    if (!KV(matrix_is_open) || !side->channels || !KV(fits_matrix)(side))
        KV(scores_packed)(side, queries, num_rows, tile, ahead, scores);
    else KV(scores_matrix)(side, queries, num_rows, tile, ahead, scores, side->padded_dim, KV_INT3, KV_CHANNELS,
                           KV(refine_keys3));
}

static void KV(accumulate_matrix_packed)(const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile,
                                         const kv_ahead *ahead, float *acc)
{
    if (!KV(matrix_is_open) || side->dtype != KV_INT3 || !KV(is_whole)(side, tile))
        KV(accumulate_packed)(side, state, num_rows, tile, ahead, acc);
    else
        KV(accumulate_matrix)(side, state, num_rows, tile, ahead, acc, kv_whole_lanes(tile->count), KV_INT3, KV(refine_packed_values));
}
#undef KV_SETTLE
