/* The tasks of one call, and their partial results.

   A task is a stream, a KV head, up to KV_PANELS x KV_ROWS query rows (the query heads of the KV head x query tokens, token by
   token) and a split of the context. It walks its split tile by tile: all its rows share every pass over keys and values. Splits
   depend on shapes alone and are merged in order, so that the bits are the same for every number of threads. */
#include "attention.h"
#include "ggml_rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_BLOCKS = KV_PANELS,     /* blocks of KV_ROWS query rows of a task */
    MATRIX_ROWS = 2 * KV_ROWS,  /* fewest query rows for which the matrix unit pays */
    SPLIT_BYTES = 128 << 10,    /* of keys and values of a split: all heads of it fit into a processor's own cache */
    MAX_SPLITS = 64,
    ENOUGH_TASKS = 16,          /* for every number of threads */
    TILE_BYTES = 16 << 10,      /* of decoded keys: stays in the first cache */
    SERIAL_BYTES = 64 << 10,    /* a second thread does not pay for less */
};

/* One side of the cache: keys or values. */
typedef struct {
    const struct ggml_tensor *tensor;
    kv_side rows;         /* as the kernels read them */
    ptrdiff_t row_bytes;  /* of one head of a token */
    kv_decode_row decode; /* into float rows; NULL: the kernels read the stored rows */
    /* Kernels of ggml's blocks, or NULL. */
    kv_prepare_rows prepare;
    kv_score_rows score;
    kv_add_rows add;
} side;

typedef struct {
    const struct ggml_tensor *q, *mask, *sinks, *out;
    side k, v;
    kv_tier tier;
    float scale, softcap, max_bias;
    int64_t tokens, group, rows; /* of the context; query heads per KV head; query rows per KV head */
    int64_t blocks, splits, split_tokens, num_tasks;
    int block_rows, tile, matrix; /* rows and tokens of a pass; 1: the matrix unit */
    int64_t partial_floats;
    float *partials;
    char *scratch;                /* of all threads */
    size_t scratch_bytes;
} call;

/* What one thread works in. */
typedef struct {
    int from[MAX_BLOCKS * KV_ROWS], to[MAX_BLOCKS * KV_ROWS];
    char seen[MAX_BLOCKS], biased[MAX_BLOCKS]; /* blocks with a row that sees the tile, and with one that has a bias */
    KV_ALIGNED float keys[KV_TILE * KV_MAX_HEAD_DIM];
    KV_ALIGNED float values[KV_TILE * KV_MAX_HEAD_DIM];
    KV_ALIGNED float bias[MAX_BLOCKS * KV_ROWS * KV_TILE];
    KV_ALIGNED float out[KV_MAX_HEAD_DIM];
    kv_row_queries queries[MAX_BLOCKS];
    union {
        kv_scratch narrow[MAX_BLOCKS];
        kv_wide_scratch wide;
    };
} scratch;

typedef struct {
    const call *call;
    scratch *own;
    int64_t stream, head, first_row, split;
    int rows;
} task;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

static float option(const struct ggml_tensor *op, int i)
{
    float value;
    memcpy(&value, (const float *)op->op_params + i, sizeof value);
    return value;
}

static bool takes_side(const struct ggml_tensor *side)
{
    const bool known = (unsigned)side->type < GGML_TYPE_COUNT && kv_active_tier().rows->decode[side->type];
    return known && side->ne[0] <= KV_MAX_HEAD_DIM && side->ne[0] % ggml_blck_size(side->type) == 0 &&
           side->nb[0] == ggml_type_size(side->type) && side->ne[1] > 0;
}

bool kv_takes(const struct ggml_tensor *op)
{
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    if (op->op != GGML_OP_FLASH_ATTN_EXT || !q || !k || !v || op->type != GGML_TYPE_F32 || q->type != GGML_TYPE_F32) return false;
    if (!takes_side(k) || !takes_side(v) || q->ne[0] != k->ne[0] || k->ne[1] != v->ne[1] || q->nb[0] != sizeof(float)) return false;
    if (k->ne[2] != v->ne[2] || k->ne[3] != v->ne[3] || q->ne[2] % k->ne[2] || q->ne[3] % k->ne[3]) return false;
    if (mask && (mask->type != GGML_TYPE_F16 || mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1] || mask->nb[0] != 2)) return false;
    if (sinks && (sinks->type != GGML_TYPE_F32 || sinks->ne[0] != q->ne[2] || sinks->nb[0] != sizeof(float))) return false;
    return op->nb[0] == sizeof(float) && q->ne[1] > 0;
}

/* ggml's slope of a query head for ALiBi. */
static float slope_of(const call *c, int64_t head)
{
    if (c->max_bias <= 0) return 1.0f;
    const uint32_t power = 1u << (uint32_t)floor(log2((double)c->q->ne[2]));
    if (head < power) return powf(powf(2.0f, -c->max_bias / (float)power), (float)(head + 1));
    return powf(powf(2.0f, -c->max_bias / 2.0f / (float)power), (float)(2 * (head - power) + 1));
}

/* The tokens of a mask that are not minus infinity, from *from to *to; returns whether they need more than that: some within, or a
   bias. */
static bool range_of(const uint16_t *mask, int count, int *from, int *to)
{
    enum { HIDDEN = 0xFC00, MAGNITUDE = 0x7FFF };
    int first = 0, last = count;
    unsigned others = 0;
    while (first < last && mask[first] == HIDDEN) first++;
    while (last > first && mask[last - 1] == HIDDEN) last--;
    for (int t = first; t < last; t++) others |= mask[t];
    *from = first;
    *to = last;
    return (others & MAGNITUDE) != 0;
}

/* Finds what the rows see of a tile; returns whether any sees any of it. */
static bool find_seen(const task *t, int64_t token, int count)
{
    const call *c = t->call;
    const struct ggml_tensor *mask = c->mask;
    scratch *own = t->own;
    const char *last = NULL;
    bool any = false, bent = false;
    memset(own->seen, 0, sizeof own->seen);
    memset(own->biased, 0, sizeof own->biased);
    for (int r = 0; r < t->rows; r++) {
        if (!mask) {
            own->from[r] = 0;
            own->to[r] = count;
            own->seen[r / KV_ROWS] = 1;
            any = true;
            continue;
        }
        const int64_t query = (t->first_row + r) / c->group, head = t->head * c->group + (t->first_row + r) % c->group;
        const char *at = (const char *)mask->data + query * mask->nb[1] + head % mask->ne[2] * mask->nb[2] +
                         t->stream % mask->ne[3] * mask->nb[3] + token * 2;
        if (at == last) {
            own->from[r] = own->from[r - 1];
            own->to[r] = own->to[r - 1];
        } else {
            bent = range_of((const uint16_t *)at, count, own->from + r, own->to + r);
        }
        last = at;
        if (own->from[r] == own->to[r]) continue;
        own->seen[r / KV_ROWS] = 1;
        any = true;
        if (!bent) continue;
        float *bias = own->bias + r / KV_ROWS * KV_ROWS * KV_TILE;
        if (!own->biased[r / KV_ROWS]) memset(bias, 0, KV_ROWS * KV_TILE * sizeof *bias);
        own->biased[r / KV_ROWS] = 1;
        bias += r % KV_ROWS * KV_TILE;
        c->tier.attention->to_float[KV_FLOAT16](at, count, bias);
        const float slope = slope_of(c, head);
        for (int i = 0; slope != 1.0f && i < count; i++) bias[i] *= slope;
    }
    return any;
}

static const char *stored_rows(const side *s, const task *t, int64_t token)
{
    const struct ggml_tensor *x = s->tensor;
    return (const char *)x->data + token * x->nb[1] + t->head * x->nb[2] + t->stream / (t->call->q->ne[3] / x->ne[3]) * x->nb[3];
}

/* Fetches rows that are read soon. Hardware does not: heads alternate, so that rows of one are apart. */
static void fetch_rows(const side *s, const char *rows, int count)
{
    const ptrdiff_t stride = (ptrdiff_t)s->tensor->nb[1];
    for (int i = 0; i < count; i++, rows += stride) {
        for (ptrdiff_t at = 0; at < s->row_bytes; at += 64) __builtin_prefetch(rows + at);
        __builtin_prefetch(rows + s->row_bytes - 1);
    }
}

/* What kernels of blocks fetch while they read `count` tokens from `token` on: as much of the same tokens of the next split, in the
   order of memory, where heads that lie side by side share their lines. On a Xeon, q8_0 takes 0.78 to 0.82 of the time that it
   takes with the rows of the next tile. */
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
    const bool more = token + 2 * count <= t->call->tokens;
    for (int i = 0; s->decode && i < count; i++, rows += stride, decoded += padded) {
        if (more) fetch_rows(s, rows + count * stride, 1);
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
        if (c->matrix) {
            kv_panel *panel = t->own->wide.panels + b;
            load_queries(t, b * KV_ROWS, t->own->wide.rows);
            kernels->prepare_panel[KV_HALVES](&c->k.rows, t->own->wide.rows, NULL, NULL, c->scale, panel);
            panel->rows = rows_of_block(t, b);
            panel->options = (kv_score_options){.softcap = c->softcap};
            panel->refined = 0;
            memset(panel->acc, 0, sums);
            for (int r = 0; r < KV_ROWS; r++) panel->m[r] = -INFINITY, panel->l[r] = 0.0f, panel->noise[r] = 0.0;
        } else {
            kv_scratch *narrow = t->own->narrow + b;
            load_queries(t, b * KV_ROWS, narrow->rows);
            if (c->k.score) c->k.prepare(narrow->rows, rows_of_block(t, b), c->k.rows.head_dim, c->scale, t->own->queries + b);
            else kernels->prepare[c->k.rows.dtype](&c->k.rows, narrow->rows, rows_of_block(t, b), c->scale, &narrow->queries);
            narrow->softmax.refined = 0;
            memset(narrow->acc, 0, sums);
            for (int r = 0; r < KV_ROWS; r++)
                narrow->softmax.m[r] = -INFINITY, narrow->softmax.l[r] = 0.0f, narrow->softmax.noise[r] = 0.0;
        }
    }
}

static void attend_with_matrix(const task *t, const kv_tile *keys, const kv_tile *values)
{
    const call *c = t->call;
    kv_wide_scratch *wide = &t->own->wide;
    const int blocks = (int)parts(t->rows, KV_ROWS);
    for (int b = 0; b < blocks; b++) {
        kv_panel *panel = wide->panels + b;
        memcpy(panel->start, t->own->from + b * KV_ROWS, sizeof panel->start);
        memcpy(panel->stop, t->own->to + b * KV_ROWS, sizeof panel->stop);
        panel->options.bias = t->own->biased[b] ? t->own->bias + b * KV_ROWS * KV_TILE : NULL;
    }
    c->tier.attention->attend_panels[KV_HALVES](&c->k.rows, &c->v.rows, keys, values, keys, values, 0.0f, &wide->operands,
                                                wide->panels, blocks);
}

/* The scores of a block's rows. The first block's fetch what is read next: every few tokens as many of the tile's values and of the
   next keys (if there are more), as a processor waits for only so many lines at once; kernels of blocks fetch their own side. */
static void score_tile(const task *t, int block, int64_t token, const kv_tile *keys, const kv_tile *values, bool more,
                       const kv_ahead *ahead)
{
    const call *c = t->call;
    kv_scratch *own = t->own->narrow + block;
    const ptrdiff_t stride = c->k.rows.row_stride;
    const int rows = rows_of_block(t, block);
    for (int i = 0, count; i < keys->count; i += count) {
        count = keys->count - i < KV_LANES ? keys->count - i : KV_LANES;
        const kv_tile part = {.base = keys->base + i * stride, .count = count};
        if (block == 0 && !c->v.decode && !c->v.add) fetch_rows(&c->v, values->base + i * c->v.rows.row_stride, count);
        if (block == 0 && !c->k.decode && !c->k.score && more) fetch_rows(&c->k, part.base + keys->count * stride, count);
        float *scores = own->softmax.weights + i;
        if (c->k.score) c->k.score(t->own->queries + block, rows, part.base, stride, c->k.rows.head_dim, count,
                                   lines_ahead(&c->k, t, token + i, block == 0 ? count : 0), scores);
        else c->tier.attention->scores[c->k.rows.dtype](&c->k.rows, &own->queries, rows, &part, ahead, scores);
    }
}

static void attend_with_vectors(const task *t, int64_t token, const kv_tile *keys, const kv_tile *values)
{
    const call *c = t->call;
    const kv_kernels *kernels = c->tier.attention;
    static const ptrdiff_t nowhere[1] = {0};
    const kv_prefetch none = {.base = (const char *)t->own->out, .at = nowhere, .piece = 1};
    const kv_ahead ahead = {.next = none, .after = none};
    const bool more = token + 2 * keys->count <= c->tokens;
    for (int b = 0; b * KV_ROWS < t->rows; b++) {
        if (!t->own->seen[b]) continue;
        kv_scratch *own = t->own->narrow + b;
        const int rows = rows_of_block(t, b);
        const kv_score_options options = {.softcap = c->softcap, .bias = t->own->biased[b] ? t->own->bias + b * KV_ROWS * KV_TILE : NULL};
        score_tile(t, b, token, keys, values, more, &ahead);
        kernels->softmax(&own->softmax, rows, keys->count, t->own->from + b * KV_ROWS, t->own->to + b * KV_ROWS, 0.0f, &options);
        if (c->v.add) c->v.add(&own->softmax, rows, values->base, c->v.rows.row_stride, c->v.rows.head_dim, values->count,
                               lines_ahead(&c->v, t, token, b == 0 ? values->count : 0), own->acc);
        else kernels->accumulate[c->v.rows.dtype](&c->v.rows, &own->softmax, rows, values, &ahead, own->acc);
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

/* Of one query row: (splits, partial_floats), in each the maximum, the sum of weights, and the sums of values. */
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
        if (c->matrix) {
            const kv_panel *panel = t->own->wide.panels + r / KV_ROWS;
            acc = t->own->out, m = panel->m[r % KV_ROWS], l = panel->l[r % KV_ROWS];
            for (int i = 0; i < n / KV_LANES; i++)
                memcpy(acc + i * KV_LANES, panel->acc + (i * KV_ROWS + r % KV_ROWS) * KV_LANES, KV_LANES * sizeof *acc);
        } else {
            kv_scratch *own = t->own->narrow + r / KV_ROWS;
            acc = own->acc + r % KV_ROWS * n, m = own->softmax.m[r % KV_ROWS], l = own->softmax.l[r % KV_ROWS];
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

static void run_task(const call *c, int64_t index, scratch *own)
{
    const int64_t heads = c->k.tensor->ne[2];
    task t = {.call = c, .own = own};
    t.head = index % heads, index /= heads;
    t.split = index % c->splits, index /= c->splits;
    t.first_row = index % c->blocks * c->block_rows;
    t.stream = index / c->blocks;
    t.rows = (int)smaller(c->block_rows, c->rows - t.first_row);
    const int64_t stop = smaller(c->tokens, (t.split + 1) * c->split_tokens);
    begin(&t);
    for (int64_t token = t.split * c->split_tokens; token < stop; token += c->tile) {
        const int count = (int)smaller(c->tile, stop - token);
        if (!find_seen(&t, token, count)) continue;
        const kv_tile keys = open_tile(&c->k, &t, token, count, own->keys);
        const kv_tile values = open_tile(&c->v, &t, token, count, own->values);
        if (c->matrix) attend_with_matrix(&t, &keys, &values);
        else attend_with_vectors(&t, token, &keys, &values);
    }
    end(&t);
}

/* Merges the splits of one query row, in order. */
static void merge_row(const call *c, int64_t row, scratch *own)
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

static void open_side(side *s, const struct ggml_tensor *tensor, const kv_tier *tier, bool matrix, bool is_key)
{
    const kv_row_kernels *kernels = tier->rows;
    const int dim = (int)tensor->ne[0], padded = (dim + KV_LANES - 1) / KV_LANES * KV_LANES;
    int dtype = tensor->type == GGML_TYPE_F16 ? KV_FLOAT16 : tensor->type == GGML_TYPE_BF16 ? KV_BFLOAT16 : KV_FLOAT32;
    if (!matrix && is_key) s->prepare = kernels->prepare[tensor->type], s->score = kernels->score[tensor->type];
    if (!matrix && !is_key) s->add = kernels->add[tensor->type];
    const bool stored = s->score || s->add || (dim == padded && (dtype != KV_FLOAT32 || tensor->type == GGML_TYPE_F32));
    if (!stored) dtype = KV_FLOAT32;
    s->tensor = tensor;
    s->row_bytes = (ptrdiff_t)ggml_row_size(tensor->type, dim);
    s->decode = stored ? NULL : kernels->decode[tensor->type];
    s->rows = (kv_side){.dtype = dtype, .family = KV_FLOAT_ROWS, .block_size = KV_TILE, .head_dim = dim, .padded_dim = padded};
    s->rows.row_stride = stored ? (ptrdiff_t)tensor->nb[1] : (ptrdiff_t)padded * 4;
}

/* Bytes that a tile takes in the first cache: of the rows to come beside those that are read, or of decoded ones. */
static int64_t tile_bytes(const side *s, int tokens)
{
    return tokens * (s->decode ? (int64_t)s->rows.padded_dim * 4 : 2 * s->row_bytes);
}

/* Cuts the call into tasks, by its shapes alone. */
static void plan(call *c)
{
    const int64_t heads = c->k.tensor->ne[2], streams = c->q->ne[3];
    c->blocks = parts(c->rows, MAX_BLOCKS * KV_ROWS);
    c->block_rows = (int)(parts(parts(c->rows, c->blocks), KV_ROWS) * KV_ROWS);
    c->blocks = parts(c->rows, c->block_rows);
    c->tile = KV_TILE;
    while (!c->matrix && c->tile > KV_LANES && larger(tile_bytes(&c->k, c->tile), tile_bytes(&c->v, c->tile)) > TILE_BYTES)
        c->tile /= 2;
    const int64_t tasks = streams * c->blocks * heads;
    const int64_t token_bytes = (c->k.row_bytes + c->v.row_bytes) * heads;
    int64_t tokens = larger(SPLIT_BYTES / token_bytes, parts(c->tokens, MAX_SPLITS));
    if (c->rows > 4 * KV_ROWS) tokens = larger(tokens, parts(c->tokens, parts(ENOUGH_TASKS, tasks)));
    c->split_tokens = larger(parts(tokens, KV_TILE), 1) * KV_TILE;
    c->splits = parts(c->tokens, c->split_tokens);
    c->num_tasks = tasks * c->splits;
    c->partial_floats = c->v.rows.padded_dim + 2;
}

static bool reserve(call *c, int num_threads, kv_workspace *workspace)
{
    const size_t used = c->matrix ? sizeof(kv_wide_scratch) : parts(c->block_rows, KV_ROWS) * sizeof(kv_scratch);
    const size_t partials = c->splits > 1 ? ggml_nelements(c->q) / c->q->ne[0] * c->splits * c->partial_floats * sizeof(float) : 0;
    c->scratch_bytes = parts(offsetof(scratch, narrow) + used, 4096) * 4096 + 64; /* no two threads at the same place of a page */
    const size_t size = c->scratch_bytes * num_threads + parts(partials, 64) * 64;
    if (size > workspace->size) {
        kv_release(workspace);
        workspace->memory = aligned_alloc(64, size);
        if (!workspace->memory) return false;
        workspace->size = size;
    }
    c->scratch = workspace->memory;
    c->partials = (float *)(workspace->memory + c->scratch_bytes * num_threads);
    return true;
}

void kv_release(kv_workspace *workspace)
{
    free(workspace->memory);
    *workspace = (kv_workspace){NULL, 0};
}

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

bool kv_flash_attention(const struct ggml_tensor *op, int num_threads, kv_workspace *workspace)
{
    call c = {.q = op->src[0], .mask = op->src[3], .sinks = op->src[4], .out = op, .tier = kv_active_tier()};
    c.scale = option(op, 0), c.max_bias = option(op, 1), c.softcap = option(op, 2);
    c.tokens = op->src[1]->ne[1];
    c.group = c.q->ne[2] / op->src[1]->ne[2];
    c.rows = c.q->ne[1] * c.group;
    c.matrix = c.rows >= MATRIX_ROWS && c.tier.attention->attend_panels[KV_HALVES] != NULL;
    open_side(&c.k, op->src[1], &c.tier, c.matrix, true);
    open_side(&c.v, op->src[2], &c.tier, c.matrix, false);
    plan(&c);
    const int64_t work = c.tokens * c.rows * (c.k.rows.head_dim + c.v.rows.head_dim) * c.k.tensor->ne[2];
    if (num_threads < 1 || work < SERIAL_BYTES) num_threads = 1;
    if (!reserve(&c, num_threads, workspace)) return false;
    const int64_t merges = c.splits > 1 ? c.q->ne[1] * c.q->ne[2] * c.q->ne[3] : 0;
    /* All heads of a split share its lines, and a thread that goes on with the next split finds it fetched. */
    const int chunk = c.splits >= ENOUGH_TASKS / 2 ? (int)parts(c.num_tasks, num_threads) : 1;
    (void)chunk;
#pragma omp parallel num_threads(num_threads)
    {
        scratch *own = (scratch *)(c.scratch + c.scratch_bytes * omp_get_thread_num());
        kv_matrix_state state;
        if (c.matrix) kv_save_matrix(&c.tier, &state);
#pragma omp for schedule(dynamic, chunk)
        for (int64_t i = 0; i < c.num_tasks; i++) run_task(&c, i, own);
        if (c.matrix) kv_restore_matrix(&c.tier, &state);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < merges; i++) merge_row(&c, i, own);
    }
    return true;
}
