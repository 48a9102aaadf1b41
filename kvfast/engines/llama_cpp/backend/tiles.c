/* How a task reads the rows of ggml: its queries, and tile by tile keys and values. */
#include "call.h"

#include <string.h>

static const char *stored_rows(const side *s, const kv_task *t, int64_t token)
{
    const struct ggml_tensor *x = s->tensor;
    const call *c = t->call->given;
    return (const char *)x->data + token * x->nb[1] + t->head * x->nb[2] + stream_of(t) / (c->q->ne[3] / x->ne[3]) * x->nb[3];
}

/* What kernels fetch while they read `count` tokens from `token` on: as much of the same tokens of the next split, in the order of
   memory, where heads that lie side by side share their lines. To fetch the rows of the next tile is slower
   (bench/bench_ggml_attention.py). */
static kv_lines lines_ahead(const side *s, const kv_task *t, int64_t token, int count)
{
    const struct ggml_tensor *x = s->tensor;
    const call *c = t->call->given;
    const int64_t stride = (int64_t)x->nb[1], size = t->item->split_tokens, next = (t->split + 1) * size;
    const bool beside = (int64_t)x->nb[2] * x->ne[2] <= stride;
    const char *rows = (const char *)x->data + stream_of(t) / (c->q->ne[3] / x->ne[3]) * x->nb[3] + next * stride;
    int64_t from = token - t->split * size, to = from + count;
    if (beside) from = (t->head * size + from) * stride / x->ne[2], to = (t->head * size + to) * stride / x->ne[2];
    else rows += t->head * x->nb[2], from *= stride, to *= stride;
    to = smaller(to, (smaller(size, c->tokens - next) - 1) * stride + s->row_bytes);
    return from < to ? (kv_lines){rows + from, to - from} : (kv_lines){(const char *)t->own, 0};
}

/* The rows of a tile where they lie. */
static tile_rows rows_at(const side *s, const kv_task *t, int64_t token, int count)
{
    const call *c = t->call->given;
    return (tile_rows){.side = &s->rows, .at = stored_rows(s, t, token), .stride = (ptrdiff_t)s->tensor->nb[1], .left = c->tokens - token - count, .ahead = lines_ahead(s, t, token, count)};
}

/* The rows of the tokens that own->tokens names, one after the other. */
static tile_rows packed_rows(const side *s, const kv_task *t, int count, char *packed)
{
    enum { AHEAD = 8 }; /* rows: they lie anywhere */
    const scratch *own = t->own;
    const char *rows = stored_rows(s, t, 0);
    const ptrdiff_t stride = (ptrdiff_t)s->tensor->nb[1], bytes = s->row_bytes;
    for (int i = 0; i < count; i++) {
        const char *next = rows + own->tokens[i + AHEAD < count ? i + AHEAD : i] * stride;
        for (ptrdiff_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at);
        memcpy(packed + i * bytes, rows + own->tokens[i] * stride, (size_t)bytes);
    }
    return (tile_rows){.side = &s->packed, .at = packed, .stride = bytes, .ahead = {packed, 0}};
}

/* A tile as the kernels read it: stored rows as they are, or decoded ones. */
static kv_tile open_tile(const side *s, const tile_rows *rows, int count, float *decoded)
{
    const char *at = rows->at;
    const kv_tile tile = {.base = s->decode && !s->strips ? (const char *)decoded : at, .count = count};
    const ptrdiff_t n = s->rows.head_dim, padded = s->rows.padded_dim;
    for (int i = 0; s->decode && !s->strips && i < count; i++, at += rows->stride, decoded += padded) {
        s->decode(at, n, decoded);
        if (n < padded) memset(decoded + n, 0, (size_t)(padded - n) * sizeof *decoded);
    }
    return tile;
}

/* Loads the query rows, and makes them ready for the keys. */
static void prepare_rows(const kv_task *t)
{
    const call *c = t->call->given;
    const kv_kernels *kernels = t->kernels;
    const ptrdiff_t n = c->k.rows.head_dim, padded = c->k.rows.padded_dim;
    scratch *own = t->own;
    for (int b = 0; b < kv_num_blocks(t); b++) {
        const int count = kv_rows_of(t, b);
        float *rows = t->wide ? t->wide->rows : t->narrow[b].rows;
        memset(rows, 0, (size_t)(KV_ROWS * padded) * sizeof *rows);
        for (int r = 0; r < count; r++) {
            const int64_t row = t->first_row + b * KV_ROWS + r, head = t->head * t->call->group + row % t->call->group;
            const char *q = (const char *)c->q->data + query_of(t, row) * c->q->nb[1];
            memcpy(rows + r * padded, q + head * c->q->nb[2] + stream_of(t) * c->q->nb[3], (size_t)n * sizeof *rows);
        }
        if (t->wide) kernels->panels[KV_PANELS_OF_ROWS].prepare(&c->k.rows, rows, NULL, NULL, c->scale, 0, t->wide->panels + b);
        else if (c->k.prepare) c->k.prepare(rows, count, (int)n, c->scale, own->queries + b);
        else kernels->prepare[c->k.rows.dtype](&c->k.rows, rows, count, c->scale, &t->narrow[b].queries);
    }
}

static kv_score_options options_of(const kv_task *t, int block)
{
    const scratch *own = t->own;
    kv_score_options options = t->options;
    if (own->biased[block]) options.bias = own->bias + block * KV_ROWS * KV_TILE;
    return options;
}

static void attend_with_matrix(const kv_task *t, const tile_rows *k, const tile_rows *v, const kv_tile *keys, const kv_tile *values)
{
    scratch *own = t->own;
    const int blocks = kv_num_blocks(t);
    t->wide->operands.room = &own->room;
    for (int r = t->rows; r < blocks * KV_ROWS; r++) own->from[r] = own->to[r] = 0; /* biases go to all rows of a panel */
    for (int b = 0; b < blocks; b++) {
        kv_panel *panel = t->wide->panels + b;
        memcpy(panel->start, own->from + b * KV_ROWS, sizeof panel->start);
        memcpy(panel->stop, own->to + b * KV_ROWS, sizeof panel->stop);
        panel->options = options_of(t, b);
    }
    t->kernels->panels[KV_PANELS_OF_ROWS].attend(k->side, v->side, keys, values, keys, values, 0, &t->wide->operands, t->wide->panels,
                                                 blocks);
}

/* Fetches, of the tile after one of `count` tokens, what is where token i of it is, and the tokens after that. */
static void fetch_tile_after(const side *s, const tile_rows *rows, int count, int i, int some)
{
    const char *at = rows->at + (count + i) * rows->stride;
    const int64_t left = smaller(some, rows->left - i);
    for (int64_t j = 0; j < left; j++, at += rows->stride) {
        for (ptrdiff_t byte = 0; byte < s->row_bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
        __builtin_prefetch(at + s->row_bytes - 1, 0, 2);
    }
}

/* The keys of a tile as strips of KV_COLUMNS tokens, of codes or floats. */
static void open_key_strips(const kv_task *t, const tile_rows *keys, int count)
{
    const call *c = t->call->given;
    const side *s = &c->k;
    const ptrdiff_t n = s->rows.head_dim, padded = s->rows.padded_dim;
    const char *stored = keys->at;
    const kv_decode_row decode = c->tier.rows->decode[s->tensor->type];
    kv_lines ahead = c->products ? (kv_lines){stored, 0} : keys->ahead;
    ahead.bytes /= parts(count, KV_LANES);
    scratch *own = t->own;
    float *rows = own->rows;
    for (int i = 0; i < count; i += KV_LANES) {
        const int some = (int)smaller(count - i, KV_LANES);
        const ptrdiff_t strip = i / KV_COLUMNS * padded * KV_COLUMNS, column = i % KV_COLUMNS;
        if (c->products) fetch_tile_after(s, keys, count, i, some);
        if (s->transpose) {
            char *codes = (char *)own->keys + strip + column * 4;
            s->transpose(stored, keys->stride, (int)n, some, ahead, codes, own->scales + strip / 32 + column);
            stored += some * keys->stride, ahead.at += ahead.bytes;
            continue;
        }
        memset(rows, 0, (size_t)(KV_LANES * padded) * sizeof *rows);
        for (int j = 0; j < some; j++, stored += keys->stride) decode(stored, n, rows + j * padded);
        c->tier.rows->transpose_rows(rows, padded, (int)padded, own->keys + strip + column);
    }
}

/* The scores of a block's rows and the tokens of a strip, from token i of the tile on. */
static void score_strip(const kv_task *t, int block, int i)
{
    const call *c = t->call->given;
    const scratch *own = t->own;
    kv_scratch *to = t->narrow + block;
    const int rows = kv_rows_of(t, block), depth = c->k.rows.padded_dim;
    float *scores = to->softmax.weights + i;
    if (c->k.transpose) c->tier.rows->multiply_codes(own->queries + block, rows, depth, (const char *)own->keys + i * depth,
                                                     own->scales + i * depth / 32, scores);
    else if (c->invariant) c->tier.rows->multiply_in_order(to->queries.values, rows, depth, own->keys + i * depth, scores);
    else c->tier.rows->multiply(to->queries.values, depth, rows, own->keys + i * depth, depth, NULL, scores, KV_TILE);
}

/* Lines as kernels of float rows fetch them: in one piece, and nothing after it. */
static kv_ahead as_ahead(kv_lines lines)
{
    static const ptrdiff_t start[1] = {0};
    const kv_prefetch all = {.base = lines.at, .at = start, .piece = lines.bytes + 1, .bytes = lines.bytes};
    const kv_prefetch none = {.base = lines.at, .at = start, .piece = 1};
    return (kv_ahead){.next = all, .after = none};
}

/* The values of a tile as strips of KV_COLUMNS elements. */
static void open_value_strips(const kv_task *t, const tile_rows *values, int count)
{
    const call *c = t->call->given;
    const side *s = &c->v;
    scratch *own = t->own;
    const ptrdiff_t n = s->rows.head_dim;
    const ptrdiff_t piece_bytes = (ptrdiff_t)ggml_row_size(s->tensor->type, KV_COLUMNS);
    const kv_decode_row decode = c->tier.rows->decode[s->tensor->type];
    const char *stored = values->at;
    for (int i = 0; i < count; i++, stored += values->stride) {
        fetch_tile_after(s, values, count, i, 1);
        float *to = own->values + i * KV_COLUMNS;
        const char *piece = stored;
        for (ptrdiff_t at = 0; at < n; at += KV_COLUMNS, piece += piece_bytes, to += KV_TILE * KV_COLUMNS) {
            const ptrdiff_t some = smaller(n - at, KV_COLUMNS);
            decode(piece, some, to);
            memset(to + some, 0, (size_t)(KV_COLUMNS - some) * sizeof *to);
        }
    }
}

/* The scores of all rows. A strip of keys stays in the first cache while the rows of all blocks pass by. */
static void score_tile(const kv_task *t, const tile_rows *k, const kv_tile *keys)
{
    const call *c = t->call->given;
    const scratch *own = t->own;
    const int blocks = kv_num_blocks(t);
    for (int i = 0; c->k.strips && i < keys->count; i += KV_COLUMNS)
        for (int b = 0; b < blocks; b++)
            if (i < own->seen[b]) score_strip(t, b, i);
    for (int b = 0; !c->k.strips && b < blocks; b++) {
        const kv_ahead ahead = as_ahead(b ? (kv_lines){keys->base, 0} : k->ahead); /* the first fetches for all */
        kv_scratch *block = t->narrow + b;
        if (own->seen[b])
            t->kernels->scores[c->k.rows.dtype](k->side, &block->queries, kv_rows_of(t, b), keys, &ahead, block->softmax.weights);
    }
}

/* Adds the values of a tile to the sums of a block, from its strips, from gathered codes, or as they are stored. */
static void add_values(const kv_task *t, int b, const tile_rows *v, kv_tile tile)
{
    const call *c = t->call->given;
    scratch *own = t->own;
    kv_scratch *block = t->narrow + b;
    const int rows = kv_rows_of(t, b), dim = c->v.rows.head_dim;
    const kv_add_rows add = block->softmax.refined ? c->v.add : c->v.add_rounded;
    const kv_lines ahead = b ? (kv_lines){tile.base, 0} : v->ahead;
    const int count = tile.count;
    tile.count = own->seen[b];
    if (c->v.gather && kv_num_blocks(t) > 1 && !block->softmax.refined) {
        c->v.add_gathered(&block->softmax, rows, (char *)own->values, count, own->value_scales, dim, tile.count, block->acc);
    } else if (add) {
        add(&block->softmax, rows, tile.base, v->stride, dim, tile.count, ahead, block->acc);
    } else {
        const kv_ahead lines = as_ahead(ahead);
        t->kernels->accumulate[c->v.rows.dtype](v->side, &block->softmax, rows, &tile, &lines, block->acc);
    }
}

/* Adds a tile to the state of the rows. */
static void attend_tile(const kv_task *t, const tile_rows *k, const tile_rows *v, int count)
{
    const call *c = t->call->given;
    scratch *own = t->own;
    const int blocks = kv_num_blocks(t), padded = c->v.rows.padded_dim;
    const kv_tile keys = open_tile(&c->k, k, count, own->keys), values = open_tile(&c->v, v, count, own->values);
    if (t->wide) {
        attend_with_matrix(t, k, v, &keys, &values);
        return;
    }
    if (c->k.strips) open_key_strips(t, k, count);
    if (c->v.strips) open_value_strips(t, v, count);
    else if (c->v.gather && blocks > 1)
        c->v.gather(values.base, v->stride, c->v.rows.head_dim, count, v->ahead, (char *)own->values, own->value_scales);
    score_tile(t, k, &keys);
    for (int b = 0; b < blocks; b++) {
        if (!own->seen[b]) continue;
        const kv_score_options options = options_of(t, b);
        t->kernels->softmax(&t->narrow[b].softmax, kv_rows_of(t, b), own->seen[b], own->from + b * KV_ROWS, own->to + b * KV_ROWS, 0,
                            &options);
        if (!c->v.strips) add_values(t, b, v, values);
    }
    for (int i = 0; c->v.strips && i < padded; i += KV_COLUMNS)
        for (int b = 0; b < blocks; b++) {
            kv_scratch *block = t->narrow + b;
            if (own->seen[b])
                c->tier.rows->multiply(block->softmax.weights, KV_TILE, kv_rows_of(t, b), own->values + i * KV_TILE, own->seen[b],
                                       block->softmax.rescale, block->acc + i, padded);
        }
}

/* Reads a split: what its mask shows, packed if that is little, as where an indexer has chosen tokens. */
static void read(kv_task *t)
{
    const call *c = t->call->given;
    const int64_t begin = t->begin, stop = t->end;
    scratch *own = t->own;
    char *packed = (char *)own + c->packed_at;
    if (!t->loaded) prepare_rows(t);
    const uint16_t *mask = kv_sparse_mask(t, begin, stop);
    for (int64_t token = begin; token < stop;) {
        if (mask) {
            const int count = kv_next_seen(mask, &token, stop, c->tile, own->tokens);
            if (!count) return;
            const tile_rows k = packed_rows(&c->k, t, count, packed), v = packed_rows(&c->v, t, count, packed + c->tile * c->k.row_bytes);
            kv_see_all(t, count);
            attend_tile(t, &k, &v, count);
            continue;
        }
        const int count = (int)smaller(c->tile, stop - token);
        if (kv_find_seen(t, token, count)) {
            const tile_rows k = rows_at(&c->k, t, token, count), v = rows_at(&c->v, t, token, count);
            attend_tile(t, &k, &v, count);
        }
        token += count;
    }
}

static void write(const kv_call *walk, const kv_query *query, ptrdiff_t q_head, float *row, float top, float l)
{
    const call *c = walk->given;
    const int64_t queries = c->q->ne[1];
    (void)top, (void)l;
    memcpy((char *)c->out->data + q_head * c->out->nb[1] + query->token % queries * c->out->nb[2] + query->token / queries * c->out->nb[3],
           row, (size_t)c->v.rows.head_dim * sizeof *row);
}

const kv_source kv_ggml_rows = {.read = read, .write = write};
