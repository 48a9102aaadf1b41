/* Tasks of a call, and their partial results. */
#include "call.h"

#include <math.h>
#include <string.h>

static const char *stored_rows(const side *s, const task *t, int64_t token)
{
    const struct ggml_tensor *x = s->tensor;
    return (const char *)x->data + token * x->nb[1] + t->head * x->nb[2] + t->stream / (t->call->q->ne[3] / x->ne[3]) * x->nb[3];
}

/* What kernels fetch while they read `count` tokens from `token` on: as much of the same tokens of the next split, in the order of
   memory, where heads that lie side by side share their lines. To fetch the rows of the next tile is slower
   (bench/bench_ggml_attention.py). */
static kv_lines lines_ahead(const side *s, const task *t, int64_t token, int count)
{
    const struct ggml_tensor *x = s->tensor;
    const call *c = t->call;
    const int64_t stride = (int64_t)x->nb[1], size = c->split_tokens, next = (t->split + 1) * size;
    const bool beside = (int64_t)x->nb[2] * x->ne[2] <= stride;
    const char *rows = (const char *)x->data + t->stream / (c->q->ne[3] / x->ne[3]) * x->nb[3] + next * stride;
    int64_t from = token - t->split * size, to = from + count;
    if (beside) from = (t->head * size + from) * stride / x->ne[2], to = (t->head * size + to) * stride / x->ne[2];
    else rows += t->head * x->nb[2], from *= stride, to *= stride;
    to = smaller(to, (smaller(size, c->tokens - next) - 1) * stride + s->row_bytes);
    return from < to ? (kv_lines){rows + from, to - from} : (kv_lines){(const char *)t->own->out, 0};
}

/* A tile as the kernels read it: stored rows as they are, or decoded ones. */
static kv_tile open_tile(const side *s, const task *t, int64_t token, int count, float *decoded)
{
    const char *rows = stored_rows(s, t, token);
    const kv_tile tile = {.base = s->decode ? (const char *)decoded : rows, .count = count};
    const ptrdiff_t n = s->rows.head_dim, padded = s->rows.padded_dim, stride = (ptrdiff_t)s->tensor->nb[1];
    for (int i = 0; s->decode && i < count; i++, rows += stride, decoded += padded) {
        s->decode(rows, n, decoded);
        if (n < padded) memset(decoded + n, 0, (size_t)(padded - n) * sizeof *decoded);
    }
    return tile;
}

static void load_queries(const task *t, int first, float *rows)
{
    const call *c = t->call;
    const ptrdiff_t n = c->k.rows.head_dim, padded = c->k.rows.padded_dim;
    memset(rows, 0, (size_t)(KV_ROWS * padded) * sizeof *rows);
    for (int r = first; r < t->rows && r < first + KV_ROWS; r++, rows += padded) {
        const int64_t row = t->first_row + r;
        const char *at = (const char *)c->q->data + row / c->group * c->q->nb[1] +
                         (t->head * c->group + row % c->group) * c->q->nb[2] + t->stream * c->q->nb[3];
        memcpy(rows, at, (size_t)n * sizeof *rows);
    }
}

static int rows_of_block(const task *t, int block) { return (int)smaller(KV_ROWS, t->rows - block * KV_ROWS); }

static void begin(const task *t)
{
    const call *c = t->call;
    const kv_kernels *kernels = c->tier.attention;
    const size_t sums = (size_t)(KV_ROWS * c->v.rows.padded_dim) * sizeof(float);
    for (int b = 0; b * KV_ROWS < t->rows; b++) {
        if (t->matrix) {
            kv_panel *panel = t->own->wide.panels + b;
            load_queries(t, b * KV_ROWS, t->own->wide.rows);
            kernels->prepare_panel[KV_HALVES](&c->k.rows, t->own->wide.rows, NULL, NULL, c->scale, 0, panel);
            panel->rows = rows_of_block(t, b);
            panel->options = (kv_score_options){.softcap = c->softcap};
            memset(panel->acc, 0, sums);
            for (int r = 0; r < KV_ROWS; r++) panel->m[r] = -INFINITY, panel->l[r] = 0.0f, panel->noise[r] = 0.0;
        } else {
            kv_scratch *narrow = t->own->narrow + b;
            load_queries(t, b * KV_ROWS, narrow->rows);
            if (c->k.prepare) c->k.prepare(narrow->rows, rows_of_block(t, b), c->k.rows.head_dim, c->scale, t->own->queries + b);
            else kernels->prepare[c->k.rows.dtype](&c->k.rows, narrow->rows, rows_of_block(t, b), c->scale, &narrow->queries);
            narrow->softmax.refined = 0;
            narrow->softmax.rest = NULL;
            memset(narrow->acc, 0, sums);
            for (int r = 0; r < KV_ROWS; r++)
                narrow->softmax.m[r] = -INFINITY, narrow->softmax.l[r] = 0.0, narrow->softmax.noise[r] = 0.0;
        }
    }
}

static void attend_with_matrix(const task *t, const kv_tile *keys, const kv_tile *values)
{
    const call *c = t->call;
    kv_wide_scratch *wide = &t->own->wide;
    const int blocks = (int)parts(t->rows, KV_ROWS);
    wide->operands.room = &t->own->room;
    for (int b = 0; b < blocks; b++) {
        kv_panel *panel = wide->panels + b;
        memcpy(panel->start, t->own->from + b * KV_ROWS, sizeof panel->start);
        memcpy(panel->stop, t->own->to + b * KV_ROWS, sizeof panel->stop);
        panel->options.bias = t->own->biased[b] ? t->own->bias + b * KV_ROWS * KV_TILE : NULL;
    }
    c->tier.attention->attend_panels[KV_HALVES](&c->k.rows, &c->v.rows, keys, values, keys, values, 0, &wide->operands,
                                                wide->panels, blocks);
}

/* Fetches, of the tile after one of `count` tokens, what is where `rows` are in that one. */
static void fetch_tile_after(const side *s, const task *t, const char *rows, int64_t token, int count, int some)
{
    const ptrdiff_t stride = (ptrdiff_t)s->tensor->nb[1];
    const int64_t left = smaller(some, t->call->tokens - token - count);
    rows += count * stride;
    for (int64_t i = 0; i < left; i++, rows += stride) {
        for (ptrdiff_t at = 0; at < s->row_bytes; at += 64) __builtin_prefetch(rows + at, 0, 2);
        __builtin_prefetch(rows + s->row_bytes - 1, 0, 2);
    }
}

/* The keys of a tile as panels of KV_COLUMNS tokens, of codes or floats. */
static void open_key_panels(const task *t, int64_t token, int count)
{
    const call *c = t->call;
    const side *s = &c->k;
    const ptrdiff_t n = s->rows.head_dim, padded = s->rows.padded_dim, stride = (ptrdiff_t)s->tensor->nb[1];
    const char *stored = stored_rows(s, t, token);
    kv_lines ahead = c->products ? (kv_lines){stored, 0} : lines_ahead(s, t, token, count);
    ahead.bytes /= parts(count, KV_LANES);
    float *rows = t->own->rows;
    for (int i = 0; i < count; i += KV_LANES) {
        const int some = (int)smaller(count - i, KV_LANES);
        const ptrdiff_t panel = i / KV_COLUMNS * padded * KV_COLUMNS, column = i % KV_COLUMNS;
        if (c->products) fetch_tile_after(s, t, stored, token + i, count, some);
        if (s->transpose) {
            char *codes = (char *)t->own->keys + panel + column * 4;
            s->transpose(stored, stride, (int)n, some, ahead, codes, t->own->scales + panel / 32 + column);
            stored += some * stride, ahead.at += ahead.bytes;
            continue;
        }
        memset(rows, 0, (size_t)(KV_LANES * padded) * sizeof *rows);
        for (int j = 0; j < some; j++, stored += stride) s->decode(stored, n, rows + j * padded);
        c->tier.rows->transpose_rows(rows, padded, (int)padded, t->own->keys + panel + column);
    }
}

/* The scores of a block's rows and the tokens of a panel, from token i of the tile on. */
static void score_panel(const task *t, int block, int i)
{
    const call *c = t->call;
    const scratch *own = t->own;
    kv_scratch *to = t->own->narrow + block;
    const int rows = rows_of_block(t, block), depth = c->k.rows.padded_dim;
    float *scores = to->softmax.weights + i;
    if (c->k.transpose) c->tier.rows->multiply_codes(own->queries + block, rows, depth, (const char *)own->keys + i * depth,
                                                own->scales + i * depth / 32, scores);
    else c->tier.rows->multiply(to->queries.values, depth, rows, own->keys + i * depth, depth, NULL, scores, KV_TILE);
}

static kv_score_options options_of(const task *t, int block)
{
    const float *bias = t->own->biased[block] ? t->own->bias + block * KV_ROWS * KV_TILE : NULL;
    return (kv_score_options){.softcap = t->call->softcap, .bias = bias};
}

/* Lines as kernels of float rows fetch them: in one piece, and nothing after it. */
static kv_ahead as_ahead(kv_lines lines)
{
    static const ptrdiff_t start[1] = {0};
    const kv_prefetch all = {.base = lines.at, .at = start, .piece = lines.bytes + 1, .bytes = lines.bytes};
    const kv_prefetch none = {.base = lines.at, .at = start, .piece = 1};
    return (kv_ahead){.next = all, .after = none};
}

static void attend_with_vectors(const task *t, int64_t token, const kv_tile *keys, const kv_tile *values)
{
    const call *c = t->call;
    const kv_kernels *kernels = c->tier.attention;
    if (c->k.transpose) open_key_panels(t, token, keys->count);
    for (int b = 0; b * KV_ROWS < t->rows; b++) {
        if (!t->own->seen[b]) continue;
        kv_scratch *own = t->own->narrow + b;
        const int rows = rows_of_block(t, b);
        const kv_score_options options = options_of(t, b);
        const int fetched = b == 0 ? keys->count : 0; /* tokens for which this block fetches: the first does for all */
        const kv_lines next_keys = lines_ahead(&c->k, t, token, fetched), next_values = lines_ahead(&c->v, t, token, fetched);
        const kv_ahead keys_ahead = as_ahead(next_keys), values_ahead = as_ahead(next_values);
        for (int i = 0; c->k.transpose && i < keys->count; i += KV_COLUMNS) score_panel(t, b, i);
        if (!c->k.transpose)
            kernels->scores[c->k.rows.dtype](&c->k.rows, &own->queries, rows, keys, &keys_ahead, own->softmax.weights);
        kernels->softmax(&own->softmax, rows, keys->count, t->own->from + b * KV_ROWS, t->own->to + b * KV_ROWS, 0, &options);
        if (t->add) t->add(&own->softmax, rows, values->base, c->v.rows.row_stride, c->v.rows.head_dim, values->count,
                            next_values, own->acc);
        else kernels->accumulate[c->v.rows.dtype](&c->v.rows, &own->softmax, rows, values, &values_ahead, own->acc);
    }
}

/* The values of a tile as panels of KV_COLUMNS elements. */
static void open_value_panels(const task *t, int64_t token, int count)
{
    const side *s = &t->call->v;
    const ptrdiff_t n = s->rows.head_dim, stride = (ptrdiff_t)s->tensor->nb[1];
    const ptrdiff_t piece_bytes = (ptrdiff_t)ggml_row_size(s->tensor->type, KV_COLUMNS);
    const char *stored = stored_rows(s, t, token);
    for (int i = 0; i < count; i++, stored += stride) {
        fetch_tile_after(s, t, stored, token + i, count, 1);
        float *to = t->own->values + i * KV_COLUMNS;
        const char *piece = stored;
        for (ptrdiff_t at = 0; at < n; at += KV_COLUMNS, piece += piece_bytes, to += KV_TILE * KV_COLUMNS) {
            const ptrdiff_t some = smaller(n - at, KV_COLUMNS);
            s->decode(piece, some, to);
            memset(to + some, 0, (size_t)(KV_COLUMNS - some) * sizeof *to);
        }
    }
}

/* A panel stays in the first cache while the rows of all blocks pass by. */
static void attend_with_products(const task *t, int count)
{
    const call *c = t->call;
    const scratch *own = t->own;
    const int padded = c->v.rows.padded_dim, blocks = (int)parts(t->rows, KV_ROWS);
    for (int i = 0; i < count; i += KV_COLUMNS)
        for (int b = 0; b < blocks; b++)
            if (i < own->seen[b]) score_panel(t, b, i);
    for (int b = 0; b < blocks; b++) {
        if (!own->seen[b]) continue;
        const kv_score_options options = options_of(t, b);
        c->tier.attention->softmax(&t->own->narrow[b].softmax, rows_of_block(t, b), own->seen[b], own->from + b * KV_ROWS,
                                   own->to + b * KV_ROWS, 0, &options);
    }
    for (int i = 0; i < padded; i += KV_COLUMNS)
        for (int b = 0; b < blocks; b++) {
            if (!own->seen[b]) continue;
            kv_scratch *block = t->own->narrow + b;
            c->tier.rows->multiply(block->softmax.weights, KV_TILE, rows_of_block(t, b), own->values + i * KV_TILE, own->seen[b],
                                   block->softmax.rescale, block->acc + i, padded);
        }
}

/* Writes an output row, out = acc / l, after the sink of its head. */
static void write_row(const call *c, int64_t stream, int64_t query, int64_t head, float *acc, float m, float l)
{
    float scale = 1.0f;
    if (c->sinks) {
        const float sink = ((const float *)c->sinks->data)[head], top = fmaxf(m, sink);
        scale = m == top ? 1.0f : expf(m - top);
        l = l * scale + expf(sink - top);
    }
    char *at = (char *)c->out->data + head * c->out->nb[1] + query * c->out->nb[2] + stream * c->out->nb[3];
    scale = l == 0.0f ? 0.0f : scale / l;
    c->tier.attention->scale_add(acc, scale, acc, 0.0f, c->v.rows.head_dim);
    memcpy(at, acc, (size_t)c->v.rows.head_dim * sizeof(float));
}

/* The partials of one query row: (splits, partial_floats), in each the maximum, the sum of weights, and the sums of values. */
static float *partials_of(const call *c, int64_t stream, int64_t query, int64_t head)
{
    return c->partials + ((stream * c->q->ne[1] + query) * c->q->ne[2] + head) * c->splits * c->partial_floats;
}

static void end(const task *t)
{
    const call *c = t->call;
    const ptrdiff_t n = c->v.rows.padded_dim;
    for (int r = 0; r < t->rows; r++) {
        const int64_t query = (t->first_row + r) / c->group, head = t->head * c->group + (t->first_row + r) % c->group;
        float *acc, m, l;
        if (t->matrix) {
            const kv_panel *panel = t->own->wide.panels + r / KV_ROWS;
            acc = t->own->out, m = panel->m[r % KV_ROWS], l = panel->l[r % KV_ROWS];
            for (int i = 0; i < n / KV_LANES; i++)
                memcpy(acc + i * KV_LANES, panel->acc + (i * KV_ROWS + r % KV_ROWS) * KV_LANES, KV_LANES * sizeof *acc);
        } else {
            kv_scratch *own = t->own->narrow + r / KV_ROWS;
            acc = own->acc + r % KV_ROWS * n, m = own->softmax.m[r % KV_ROWS], l = (float)own->softmax.l[r % KV_ROWS];
        }
        if (c->splits == 1) {
            write_row(c, t->stream, query, head, acc, m, l);
            continue;
        }
        float *partial = partials_of(c, t->stream, query, head) + t->split * c->partial_floats;
        partial[0] = m;
        partial[1] = l;
        memcpy(partial + 2, acc, (size_t)n * sizeof *acc);
    }
}

static void walk(const task *t)
{
    const call *c = t->call;
    const int64_t stop = smaller(c->tokens, (t->split + 1) * c->split_tokens);
    begin(t);
    for (int64_t token = t->split * c->split_tokens; token < stop; token += c->tile) {
        const int count = (int)smaller(c->tile, stop - token);
        if (!kv_find_seen(t, token, count)) continue;
        if (c->products) {
            open_key_panels(t, token, count);
            open_value_panels(t, token, count);
            attend_with_products(t, count);
            continue;
        }
        const kv_tile keys = open_tile(&c->k, t, token, count, t->own->keys);
        const kv_tile values = open_tile(&c->v, t, token, count, t->own->values);
        if (t->matrix) attend_with_matrix(t, &keys, &values);
        else attend_with_vectors(t, token, &keys, &values);
    }
}

/* Blocks of rows in which the rounding of weights counts (simd/vectors/activations.inc.h), a bit for each. */
static unsigned blocks_to_refine(const task *t)
{
    const kv_kernels *kernels = t->call->tier.attention;
    const ptrdiff_t n = t->call->v.rows.padded_dim;
    unsigned blocks = 0;
    for (int b = 0; b * KV_ROWS < t->rows; b++) {
        const kv_panel *panel = t->own->wide.panels + b;
        const kv_scratch *narrow = t->own->narrow + b;
        const int rows = rows_of_block(t, b);
        const unsigned marked =
            t->matrix ? kernels->rows_to_refine(panel->acc, KV_LANES, KV_ROWS * KV_LANES, n, panel->noise, rows)
                      : kernels->rows_to_refine(narrow->acc, n, KV_LANES, n, narrow->softmax.noise, rows);
        if (marked) blocks |= 1u << b;
    }
    return blocks;
}

void kv_run_task(const call *c, int64_t index, scratch *own)
{
    const int64_t heads = c->k.tensor->ne[2];
    task t = {.call = c, .own = own, .matrix = c->matrix, .add = c->v.add_rounded ? c->v.add_rounded : c->v.add};
    t.head = index % heads, index /= heads;
    t.split = index % c->splits, index /= c->splits;
    t.first_row = index % c->blocks * c->block_rows;
    t.stream = index / c->blocks;
    t.rows = (int)smaller(c->block_rows, c->rows - t.first_row);
    walk(&t);
    const unsigned blocks = t.matrix || c->v.add_rounded ? blocks_to_refine(&t) : 0;
    end(&t);
    for (int b = 0; blocks >> b; b++) { /* again, with weights that are not rounded */
        if (!(blocks >> b & 1)) continue;
        task again = t;
        again.first_row += b * KV_ROWS, again.rows = rows_of_block(&t, b), again.matrix = false, again.add = c->v.add;
        walk(&again);
        end(&again);
    }
}

void kv_merge_row(const call *c, int64_t row, scratch *own)
{
    const int64_t head = row % c->q->ne[2], query = row / c->q->ne[2] % c->q->ne[1], stream = row / c->q->ne[2] / c->q->ne[1];
    const float *partial = partials_of(c, stream, query, head);
    const ptrdiff_t n = c->v.rows.padded_dim;
    float m = -INFINITY, l = 0.0f;
    for (int64_t i = 0; i < c->splits; i++) m = fmaxf(m, partial[i * c->partial_floats]);
    memset(own->out, 0, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < c->splits; i++, partial += c->partial_floats) {
        if (partial[1] == 0.0f) continue; /* goes on for NaN */
        const float weight = expf(partial[0] - m);
        l += partial[1] * weight;
        c->tier.attention->scale_add(own->out, 1.0f, partial + 2, weight, n);
    }
    write_row(c, stream, query, head, own->out, m, l);
}
