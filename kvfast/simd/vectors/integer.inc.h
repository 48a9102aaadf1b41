/* Scores and sums of values of INT8, INT4, GAUSS4, INT3 and INT2 codes. activations.inc.h describes the arithmetic. Tiers of narrow
   vectors expand those of few bits before, but for keys with channel scales; see expand.inc.h. */

static inline __attribute__((always_inline)) vf KV(load_scales)(const char *scales, int token, const int dtype)
{
    return dtype == KV_GAUSS4 || KV_FEW_BITS(dtype) ? vf_load_bfloat16((const uint16_t *)scales + token)
                                                    : vf_load((const float *)scales + token);
}

/* Multiplies (INT_VECTORS or 1) x W lanes by `rows` rows of activations over `lines` 64-byte lines: from base +
   block[0] on, or with `gather` block_lines of each block. (Without gather a single loop is used: nested
   loops are slower, see bench/bench_attend.py.) */
static inline __attribute__((always_inline)) void KV(dot_lines)(
    const char *base, const ptrdiff_t *block, ptrdiff_t tile_bytes, int lines, const int gather, int block_lines,
    const int dtype, const int8_t *x, const int rows, const int vectors, const char *ahead, const int level,
    vi out[KV_QUAD][4])
{
    const int at_once = dtype == KV_INT8 ? KV_INT8_LINES(rows) : 1, fetched = (vectors * W + KV_LANES - 1) / KV_LANES * at_once;
    vacc a[KV_QUAD][4], b[KV_QUAD][4]; /* [rows][vectors]; 4 because KV_FOR4 names them all */
    KV_FOR4(r, rows, KV_FOR4(v, vectors, a[r][v] = b[r][v] = (vacc)vi_set1(0);););
    do {
        const char *codes = base + *block++;
        const int here = gather && block_lines < lines ? block_lines : lines;
        for (int line = 0; line < here; line += at_once) {
            kv_prefetch_lines(ahead, fetched, level);
#define KV_STORED(line) vcodes_load(codes + v * W / KV_LANES * tile_bytes + v * W % KV_LANES * 4 + 64 * (line))
            if (dtype == KV_INT8) {
                KV_MULTIPLY_INT8(KV_STORED, x);
            } else {
                vcodes stored[4];
                KV_FOR4(v, vectors, stored[v] = KV_STORED(0););
                const int8_t *y = x + KV_QUAD_BYTES;
                if (dtype == KV_INT4) KV_MULTIPLY_LINES(vcodes_low(stored[v]), x, vcodes_low(vcodes_shift(stored[v])), y);
                else KV_MULTIPLY_LEVELS(vcodes_levels(stored[v]), x, vcodes_levels(vcodes_shift(stored[v])), y);
            }
#undef KV_STORED
            codes += 64 * at_once;
            ahead += fetched * 64;
            x += KV_QUAD_BYTES / 4 * KV_DEPTHS(dtype) * at_once;
        }
        lines -= here;
    } while (gather && lines > 0);
    KV_FOR4(r, rows, KV_FOR4(v, vectors, out[r][v] = KV_TOTAL(a[r][v], b[r][v]);););
}

/* The loops are there for each level, because a branch in them competes with the products for ports (bench/bench_attend.py, int4). */
static inline __attribute__((always_inline)) void KV(dot_quad)(
    const char *base, const ptrdiff_t *block, ptrdiff_t tile_bytes, int lines, const int gather, int block_lines,
    const int dtype, const int8_t *x, const int rows, const int vectors, const char *ahead, vi out[KV_QUAD][4])
{
#define KV_LOOP(level) \
    KV(dot_lines)(base, block, tile_bytes, lines, gather, block_lines, dtype, x, rows, vectors, ahead, level, out);
    KV_EACH_LEVEL(KV_LOOP)
#undef KV_LOOP
}

/* Bytes of 16 tokens of keys. */
static inline ptrdiff_t KV(key_tile_bytes)(const kv_side *side, const int dtype)
{
    return (ptrdiff_t)side->padded_dim * (KV_LANES / 8) * kv_dtypes[dtype].bits;
}

/* Every (rows, vectors) is a quad of its own, so that its accumulators stay in registers. */
#define KV_EACH_QUAD(rows, vectors, quad)                                \
    switch (rows) {                                                      \
    case 1: if (vectors > 1) { quad(1, INT_VECTORS) } else { quad(1, 1) } break; \
    case 2: if (vectors > 1) { quad(2, INT_VECTORS) } else { quad(2, 1) } break; \
    case 3: if (vectors > 1) { quad(3, INT_VECTORS) } else { quad(3, 1) } break; \
    default: if (vectors > 1) { quad(4, INT_VECTORS) } else { quad(4, 1) }         \
    }

/* Reads codes of few bits in place of dot_quad, in tiers that can. */
#if W >= 8
#define KV_LOAD_LEVELS \
    const KV(level_tables) levels = KV(load_levels)(KV_FEW_BITS(dtype) ? kv_packed_table(side) : NULL, dtype == KV_INT2 ? 2 : 3);
#define KV_DOT_UNITS(base, blocks, tile_bytes, units, gather, block_units, x, R, V)                                       \
    if (KV_FEW_BITS(dtype))                                                                                               \
        KV(dot_units)(base, blocks, tile_bytes, units, gather, block_units, dtype == KV_INT2 ? 2 : 3, &levels, x, R, V, fetch, out); \
    else
#else
#define KV_LOAD_LEVELS
#define KV_DOT_UNITS(...)
#endif

/* Adds the rounding errors of a quad's activations to its scores, where they matter; in the fast precision makes these scores NaN. See
   activations.inc.h. The tokens are `lane` to `stop` of a tile, from a slot of the first of `block` on. `rows` are rows before they
   are rounded, with their `inverse` and `unit`. `before` has their largest scores before the tile, or -infinity; `whole` marks rows
   that see all of it. `error` times a unit is the largest standard error of such a row. */
static inline __attribute__((always_inline)) void KV(refine)(
    const kv_side *side, const float *rows, const float *inverse, const float *unit, const float *before, unsigned whole, float error,
    int num_rows, const kv_tile *tile, const ptrdiff_t *block, int slot, int lane, int stop, float *scores, kv_room *room,
    const int dtype, const int channels)
{
    const ptrdiff_t n = side->padded_dim;
    const int lines = side->padded_dim / KV_DEPTHS(dtype), units = side->padded_dim / KV_UNIT;
    const ptrdiff_t tile_bytes = KV(key_tile_bytes)(side, dtype);
    const float ones[KV_QUAD] = {1.0f, 1.0f, 1.0f, 1.0f};
    const int bias = channels ? KV_KEY_ZERO(dtype) : KV_BIAS(dtype);
    typedef struct {
        KV_ALIGNED float left[KV_QUAD * KV_MAX_HEAD_DIM];
        KV_ALIGNED int8_t parts[KV_QUAD * KV_MAX_HEAD_DIM * 2];
    } rest;
    float *const left = KV_IN(room->again, rest)->left;
    int8_t *const parts = KV_IN(room->again, rest)->parts;
    float most[KV_QUAD], least[KV_QUAD]; /* scores */
    int32_t sums[KV_QUAD];
    kv_key_order order;
    int ready = 0;
    for (int r = 0; r < num_rows; r++) {
        vf here = vf_set1(before[r]);
        for (int t = 0; t < stop && whole >> r & 1; t += W) here = vf_max(here, vf_load(scores + r * KV_TILE + t));
        most[r] = vf_hmax(here);
        least[r] = KV(least_score)(error * __builtin_fabsf(unit[r]), most[r]);
    }
    while (lane < stop) { /* with channel scales all in one block, as the rows are folded with its scales */
        const char *token_scales = tile->base + *block + side->scales;
        const char *codes = tile->base + slot / KV_LANES * tile_bytes, *ahead = (const char *)parts;
        const int room = stop - lane < side->block_size - slot ? stop - lane : side->block_size - slot;
        const int vectors = INT_VECTORS * W <= room ? INT_VECTORS : 1;
        vf above = vf_set1(-1.0f);
        for (int r = 0; r < num_rows; r++)
            for (int v = 0; v < vectors; v++)
                above = vf_max(above, vf_sub(vf_load(scores + r * KV_TILE + lane + v * W), vf_set1(least[r])));
        vf excess[KV_QUAD][4]; /* of an error over the least: above 0 where it matters */
        if (vf_hmax(above) >= 0.0f) {
            above = vf_set1(-1.0f);
            for (int v = 0; v < vectors; v++) {
                const vf token = channels ? vf_set1(1.0f) : KV(load_scales)(token_scales, slot + v * W, dtype);
                for (int r = 0; r < num_rows; r++) {
                    const float of_row = __builtin_fabsf(unit[r]) * (channels ? error : KV(error_of_unit)(side, dtype));
                    const vf size = vf_mul(token, vf_set1(of_row));
                    excess[r][v] = vf_sub(size, KV(least_errors)(vf_load(scores + r * KV_TILE + lane + v * W), vf_set1(most[r])));
                    above = vf_max(above, excess[r][v]);
                }
            }
        }
        const int matters = vf_hmax(above) >= 0.0f;
        if (KV_FAST && matters) {
            for (int v = 0; v < vectors; v++)
                for (int r = 0; r < num_rows; r++) {
                    float *score = scores + r * KV_TILE + lane + v * W;
                    vf_store(score, vf_add(vf_load(score), vf_zero_below(vf_set1(NAN), excess[r][v], 0.0f)));
                }
        } else if (matters) {
            if (!ready) {
                memset(left + num_rows * n, 0, (size_t)((KV_QUAD - num_rows) * n) * sizeof(float));
                KV(leave_rounding)(rows, n, num_rows, n, inverse, left);
                KV(put_activations)(left, n, KV_QUAD, n, ones, parts, sums, 0, NULL);
                if (channels) KV(read_key_order)((const uint16_t *)(tile->base + *block + side->channels), side->padded_dim, &order);
                ready = 1;
            }
            vi out[KV_QUAD][4];
#define KV_DOT(V)                                                                                                         \
    if (channels)                                                                                                         \
        KV(dot_keys)(codes + *block, slot % KV_LANES, tile_bytes, units, &order, dtype, parts, KV_QUAD, V, ahead, out);   \
    else                                                                                                                  \
        KV(dot_quad)(codes + slot % KV_LANES * 4, block, tile_bytes, lines, 0, 0, dtype, parts, KV_QUAD, V, ahead, out);
            if (vectors > 1) { KV_DOT(INT_VECTORS) } else { KV_DOT(1) }
#undef KV_DOT
            for (int v = 0; v < vectors; v++) {
                const vf token = channels ? vf_set1(1.0f) : KV(load_scales)(token_scales, slot + v * W, dtype);
                for (int r = 0; r < num_rows; r++) {
                    float *score = scores + r * KV_TILE + lane + v * W;
                    const vf scale = vf_mul(token, vf_set1(unit[r]));
                    const vf rest = vf_mul(vi_to_float(vi_sub(out[r][v], vi_set1(bias * sums[r]))), scale);
                    vf_store(score, vf_fma(vf_zero_below(rest, excess[r][v], 0.0f), vf_set1(0.5f / KV_MAX_ACTIVATION), vf_load(score)));
                }
            }
        }
        lane += vectors * W;
        slot += vectors * W;
        if (slot == side->block_size) slot = 0, block++;
    }
}

typedef void KV(refiner)(const kv_side *side, const float *rows, const float *inverse, const float *unit, const float *before,
                         unsigned whole, float error, int num_rows, const kv_tile *tile, const ptrdiff_t *block, int slot, int lane,
                         int stop, float *scores, kv_room *room);

/* Largest scale of a tile's tokens, or more: it also covers the rest of the last 16 tokens. */
static inline float KV(largest_scale)(const kv_side *side, const kv_tile *tile, const int dtype)
{
    vf largest = vf_set1(0.0f);
    const ptrdiff_t *block = tile->at;
    for (int t = 0, slot = tile->first; t < tile->count; t += W) {
        largest = vf_max(largest, KV(load_scales)(tile->base + *block + side->scales, slot, dtype));
        slot += W;
        if (slot == side->block_size) slot = 0, block++;
    }
    return vf_hmax(largest);
}

static inline __attribute__((always_inline)) void KV(scores_integer)(
    const kv_side *side, const kv_queries *queries, int num_rows, const kv_tile *tile, const kv_ahead *ahead,
    float *scores, const int dtype, const int statistics, KV(refiner) *refine)
{
    const int lines = side->padded_dim / KV_DEPTHS(dtype), units = side->padded_dim / KV_UNIT;
    const int channels = statistics == KV_CHANNELS;
    const ptrdiff_t tile_bytes = KV(key_tile_bytes)(side, dtype);
    const int lanes = kv_whole_lanes(tile->count);
    float error = KV(error_of_unit)(side, dtype);
    KV_LOAD_LEVELS
    kv_key_order orders[KV_TILE / KV_LANES]; /* of the tile's blocks */
    KV(folded) *const folded = KV_IN(queries->room->pass, KV(folded));
    for (int row = 0; row < num_rows; row += KV_QUAD) {
        const int8_t *x = channels ? folded->parts : queries->parts + row * side->padded_dim * KV_PARTS;
        const float *scales = channels ? folded->scale : queries->scale + row;
        const int32_t *sums = channels ? folded->sum : queries->sum + row;
        const int rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
        const ptrdiff_t *block = tile->at;
        const ptrdiff_t *first_block = block;
        int slot = tile->first;
        int first = 0, first_slot = slot; /* where the tokens begin whose rounding errors may matter */
        for (int lane = 0; lane < lanes;) {
            const ptrdiff_t at = slot / KV_LANES * tile_bytes;
            const char *token_scales = tile->base + *block + side->scales;
            kv_key_order *order = orders + (block - tile->at);
            if (channels && row == 0 && (lane == 0 || slot == 0))
                KV(read_key_order)((const uint16_t *)(tile->base + *block + side->channels), side->padded_dim, order);
            if (statistics && (lane == 0 || slot == 0))
                KV(fold)(side, tile->base + *block, channels ? order : NULL, queries, row, rows, folded);
            if (lane == 0 || (channels && slot == 0)) first_block = block, first = lane, first_slot = slot;
            const char *fetch = kv_prefetch_from(ahead, lane / KV_LANES * tile_bytes);
            const int left = lanes - lane < side->block_size - slot ? lanes - lane : side->block_size - slot;
            const int vectors = INT_VECTORS * W <= left ? INT_VECTORS : 1;
#define KV_QUAD_SCORES(R, V)                                                                           \
    vi out[KV_QUAD][4];                                                                                \
    if (channels)                                                                                      \
        KV(dot_keys)(tile->base + *block + at, slot % KV_LANES, tile_bytes, units, order, dtype, x, R, V, fetch, out); \
    else KV_DOT_UNITS(tile->base + at, block, tile_bytes, units, 0, 0, x, R, V)                        \
        KV(dot_quad)(tile->base + at + slot % KV_LANES * 4, block, tile_bytes, lines, 0, 0, dtype, x, R, V, fetch, out); \
    for (int r = 0; r < R; r++)                                                                        \
        for (int v = 0; v < V; v++) {                                                                  \
            vf dot = vi_to_float(vi_sub(out[r][v], vi_set1(sums[r]))), scale = vf_set1(scales[r]);     \
            if (!channels) scale = vf_mul(scale, KV(load_scales)(token_scales, slot + v * W, dtype));  \
            vf_store(scores + (row + r) * KV_TILE + lane + v * W,                                      \
                     statistics ? vf_fma(dot, scale, vf_set1(folded->shift[r])) : vf_mul(dot, scale));  \
        }
            KV_EACH_QUAD(rows, vectors, KV_QUAD_SCORES)
            lane += vectors * W;
            slot += vectors * W;
            if (lane == lanes || (channels && slot == side->block_size)) {
                int counts = 0;
                if (!channels && row == 0) error *= KV(largest_scale)(side, tile, dtype); /* which have been read by now */
                if (channels && KV_OWN_BITS(dtype)) error = folded->error;
                for (int r = 0; r < rows; r++) counts |= __builtin_fabsf(scales[r]) * error * 1.001f >= KV_LEAST_ERROR;
                if (counts)
                    refine(side, channels ? folded->rows : queries->rows + row * side->padded_dim,
                           channels ? folded->inverse : queries->inverse + row, scales, queries->most + row, queries->whole >> row,
                           error, rows, tile, first_block, first_slot, first, lane, scores + row * KV_TILE, queries->room);
            }
            if (slot == side->block_size) slot = 0, block++;
        }
    }
    kv_prefetch_end(ahead);
}

/* How a tile of values lies in memory. */
typedef struct {
    const char *base;
    const ptrdiff_t *blocks;
    const char *scales[KV_TILE / KV_LANES]; /* of 16 tokens each */
    int tokens, lines, block_lines;
    ptrdiff_t tile_bytes, first;
} KV(values);

static inline __attribute__((always_inline)) KV(values) KV(find_values)(const kv_side *side, const kv_tile *tile, const int dtype)
{
    const int tokens = kv_whole_lanes(tile->count), depth = KV_DEPTHS(dtype);
    const ptrdiff_t token_bytes = KV_LANES * kv_dtypes[dtype].bits; /* of 8 tokens */
    KV(values) values = {tile->base, tile->at, {0}, tokens, tokens / depth, (side->block_size - tile->first) / depth,
                         side->block_size / 8 * token_bytes, tile->first / 8 * token_bytes};
    for (int t = 0, block = 0, slot = tile->first; t < tokens; t += KV_LANES) {
        values.scales[t / KV_LANES] = tile->base + tile->at[block] + side->scales + slot * kv_dtypes[dtype].scale_bytes;
        slot += KV_LANES;
        if (slot == side->block_size) slot = 0, block++;
    }
    return values;
}

/* Folds the scales of the values into up to KV_QUAD rows of weights. */
static inline __attribute__((always_inline)) void KV(fold_weights)(
    const KV(values) *values, const float *weights, int rows, float *folded, float *inverse, float *unit, const int dtype)
{
    for (int r = 0; r < rows; r++) {
        vf largest = vf_set1(0.0f);
        for (int t = 0; t < values->tokens; t += W) {
            vf weight = vf_mul(vf_load(weights + r * KV_TILE + t),
                               KV(load_scales)(values->scales[t / KV_LANES], t % KV_LANES, dtype));
            vf_store(folded + r * KV_TILE + t, weight);
            largest = vf_max(largest, weight);
        }
        float peak = vf_hmax(largest);
        inverse[r] = KV_INVERSE_OF(KV_MAX_WEIGHT, peak);
        unit[r] = peak / KV_MAX_WEIGHT;
    }
}

/* Adds what the rounding of a quad's weights left out to its sums, in the rows that `refined` marks; see activations.inc.h. */
static inline __attribute__((always_inline)) void KV(refine_values)(
    const kv_side *side, const kv_tile *tile, const float *weights, int rows, unsigned refined, float *acc, kv_room *room,
    const int dtype)
{
    typedef struct {
        KV_ALIGNED float folded[KV_QUAD * KV_TILE], left[KV_QUAD * KV_TILE];
        KV_ALIGNED int8_t parts[KV_QUAD * KV_TILE * 2];
    } rest;
    const KV(values) values = KV(find_values)(side, tile, dtype);
    const float ones[KV_QUAD] = {1.0f, 1.0f, 1.0f, 1.0f};
    float *const folded = KV_IN(room->again, rest)->folded, *const left = KV_IN(room->again, rest)->left;
    int8_t *const parts = KV_IN(room->again, rest)->parts;
    float inverse[KV_QUAD], unit[KV_QUAD];
    int32_t sums[KV_QUAD];
    KV(fold_weights)(&values, weights, rows, folded, inverse, unit, dtype);
    memset(left, 0, KV_QUAD * KV_TILE * sizeof(float));
    KV(leave_carried)(folded, KV_TILE, rows, values.tokens, inverse, left);
    KV(put_activations)(left, KV_TILE, KV_QUAD, values.tokens, ones, parts, sums, 0, NULL);
    for (int lane = 0; lane < side->padded_dim; lane += W) {
        const char *codes = values.base + values.first + lane / KV_LANES * values.tile_bytes + lane % KV_LANES * 4;
        vi out[KV_QUAD][4];
        KV(dot_quad)(codes, values.blocks, values.tile_bytes, values.lines, 1, values.block_lines, dtype, parts, KV_QUAD, 1,
                      (const char *)parts, out);
        for (int r = 0; r < rows; r++) {
            if (!(refined >> r & 1)) continue;
            float *target = acc + r * side->padded_dim + lane;
            const vf dot = vi_to_float(vi_sub(out[r][0], vi_set1(KV_BIAS(dtype) * sums[r])));
            vf_store(target, vf_fma(dot, vf_set1(unit[r] * (1.0f / KV_MAX_ACTIVATION)), vf_load(target)));
        }
    }
}

typedef void KV(value_refiner)(const kv_side *side, const kv_tile *tile, const float *weights, int rows, unsigned refined,
                               float *acc, kv_room *room);

static inline __attribute__((always_inline)) void KV(accumulate_integer)(
    const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile, const kv_ahead *ahead, float *acc, const int dtype,
    const int gather, KV(value_refiner) *refine)
{
    const KV(values) values = KV(find_values)(side, tile, dtype);
    int8_t parts[KV_ROWS * KV_TILE * 2];
    float scales[KV_ROWS];
    int32_t sums[KV_ROWS];
    for (int row = 0; row < num_rows; row += KV_QUAD) {
        const int rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
        float folded[KV_QUAD * KV_TILE], inverse[KV_QUAD];
        KV(fold_weights)(&values, state->weights + row * KV_TILE, rows, folded, inverse, scales + row, dtype);
        KV(put_activations)(folded, KV_TILE, rows, values.tokens, inverse, parts + row * KV_TILE * KV_PARTS, sums + row, 1, NULL);
        for (int r = row; r < row + rows; r++) {
            sums[r] *= KV_BIAS(dtype);
            if (!KV_FAST) state->noise[r] += KV(noise_of)(scales[r], KV_CODE_SIZE(dtype), state->seen[r]);
        }
    }
    KV_LOAD_LEVELS
    for (int row = 0; row < num_rows; row += KV_QUAD) {
        const int8_t *x = parts + row * KV_TILE * KV_PARTS;
        const int rows = num_rows - row < KV_QUAD ? num_rows - row : KV_QUAD;
        for (int lane = 0; lane < side->padded_dim;) {
            const char *codes = values.base + values.first + lane / KV_LANES * values.tile_bytes + lane % KV_LANES * 4;
            const char *fetch =
                kv_prefetch_from(ahead, lane / KV_LANES * ((ptrdiff_t)values.tokens * KV_LANES * kv_dtypes[dtype].bits / 8));
            const int vectors = lane + INT_VECTORS * W <= side->padded_dim ? INT_VECTORS : 1;
#define KV_QUAD_VALUES(R, V)                                                                          \
    vi out[KV_QUAD][4];                                                                               \
    KV_DOT_UNITS(codes, values.blocks, values.tile_bytes, values.lines / 4, gather, values.block_lines / 4, x, R, V) \
    KV(dot_quad)(codes, values.blocks, values.tile_bytes, values.lines, gather, values.block_lines, dtype, x, R, V, fetch, out); \
    for (int r = 0; r < R; r++)                                                                       \
        for (int v = 0; v < V; v++) {                                                                 \
            float *target = acc + (row + r) * side->padded_dim + lane + v * W;                        \
            vf dot = vi_to_float(vi_sub(out[r][v], vi_set1(sums[row + r])));                          \
            vf_store(target, vf_fma(dot, vf_set1(scales[row + r]),                                    \
                                    vf_mul(vf_load(target), vf_set1(state->rescale[row + r]))));      \
        }
            KV_EACH_QUAD(rows, vectors, KV_QUAD_VALUES)
            lane += vectors * W;
        }
        if (!KV_FAST && state->refined >> row)
            refine(side, tile, state->weights + row * KV_TILE, rows, state->refined >> row, acc + row * side->padded_dim, state->room);
    }
    kv_prefetch_end(ahead);
}

#define KV_REFINER(name, dtype, channels)                                                                                      \
    static __attribute__((noinline)) void KV(refine_##name)(                                                                   \
        const kv_side *side, const float *rows, const float *inverse, const float *unit, const float *before,                  \
        unsigned whole, float error, int num_rows,                                                                             \
        const kv_tile *tile, const ptrdiff_t *block, int slot, int lane, int stop, float *scores, kv_room *room)               \
    {                                                                                                                          \
        KV(refine)(side, rows, inverse, unit, before, whole, error, num_rows, tile, block, slot, lane, stop, scores, room,     \
                   dtype, channels);                                                                                           \
    }
KV_REFINER(keys4, KV_INT4, 1)
KV_REFINER(keys3, KV_INT3, 1)

#define KV_INTEGER_KERNELS(name, dtype)                                                               \
    static void KV(prepare_##name)(const kv_side *side, const float *rows, int num_rows, float factor, \
                                   kv_queries *queries)                                               \
    {                                                                                                 \
        KV(prepare_integer)(side, rows, num_rows, factor, queries, KV_BIAS(dtype));                   \
    }                                                                                                 \
    KV_REFINER(name, dtype, 0)                                                                        \
    static __attribute__((noinline)) void KV(refine_values_##name)(                                   \
        const kv_side *side, const kv_tile *tile, const float *weights, int rows, unsigned refined, float *acc, \
        kv_room *room)                                                                                \
    {                                                                                                 \
        KV(refine_values)(side, tile, weights, rows, refined, acc, room, dtype);                      \
    }                                                                                                 \
    static void KV(scores_##name)(const kv_side *side, const kv_queries *queries, int num_rows,       \
                                  const kv_tile *tile, const kv_ahead *ahead, float *scores)          \
    {                                                                                                 \
        if (dtype == KV_INT4 && side->channels)                                                       \
            KV(scores_integer)(side, queries, num_rows, tile, ahead, scores, dtype, KV_CHANNELS, KV(refine_keys4)); \
        else if (side->means)                                                                         \
            KV(scores_integer)(side, queries, num_rows, tile, ahead, scores, dtype, KV_MEANS, KV(refine_##name)); \
        else                                                                                          \
            KV(scores_integer)(side, queries, num_rows, tile, ahead, scores, dtype, 0, KV(refine_##name)); \
    }                                                                                                 \
    static void KV(accumulate_##name)(const kv_side *side, kv_softmax *state, int num_rows,           \
                                      const kv_tile *tile, const kv_ahead *ahead, float *acc)         \
    {                                                                                                 \
        if (tile->first + tile->count <= side->block_size)                                            \
            KV(accumulate_integer)(side, state, num_rows, tile, ahead, acc, dtype, 0, KV(refine_values_##name)); \
        else                                                                                          \
            KV(accumulate_integer)(side, state, num_rows, tile, ahead, acc, dtype, 1, KV(refine_values_##name)); \
    }
KV_INTEGER_KERNELS(int8, KV_INT8)
KV_INTEGER_KERNELS(int4, KV_INT4)
KV_INTEGER_KERNELS(gauss4, KV_GAUSS4)

#undef KV_INTEGER_KERNELS
#undef KV_REFINER
#undef KV_QUAD_SCORES
#undef KV_DOT_UNITS
#undef KV_LOAD_LEVELS
#undef KV_QUAD_VALUES
#undef KV_EACH_QUAD
