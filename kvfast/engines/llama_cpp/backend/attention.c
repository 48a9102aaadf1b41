/* Which operations are taken, and a call: its plan, its memory and its threads. */
#include "call.h"
#include "simd/float_mode.h"

#include <stdlib.h>
#include <string.h>

enum {
    FEW_ROWS = 4 * KV_ROWS,     /* more may read all of a context as one task */
    MATRIX_ROWS = 2 * KV_ROWS,  /* fewest query rows for which a matrix unit pays, or words */
    SPLIT_BYTES = 128 << 10,    /* of keys and values of a split: all heads of it fit into a processor's own cache */
    LEAST_TILES = 2,            /* of a split: to add up the results of more splits takes longer than it helps */
    MAX_SPLITS = 64,
    ENOUGH_TASKS = 16,          /* for every number of threads */
    TILE_BYTES = 64 << 10,      /* of keys, of stored rows with those to come: stays in the second cache */
    DECODED_BYTES = 16 << 10,   /* the same of decoded rows, in the first one */
    SERIAL_BYTES = 64 << 10,    /* a second thread does not pay for less */
    PRODUCT_ROWS = 3 * KV_ROWS, /* fewest query rows for which strips pay without one; bench/bench_ggml_attention.py sets these */
};

static float option(const struct ggml_tensor *op, int i)
{
    float value;
    memcpy(&value, (const float *)op->op_params + i, sizeof value);
    return value;
}

bool kv_takes_type(enum ggml_type type) { return (unsigned)type < GGML_TYPE_COUNT && kv_active_tier().rows->decode[type]; }

static bool takes_side(const struct ggml_tensor *side)
{
    return kv_takes_type(side->type) && side->ne[0] <= KV_MAX_HEAD_DIM && side->ne[0] % ggml_blck_size(side->type) == 0 &&
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

/* The tokens of a tile, at most `most` unless these are few. */
static int most_tokens(int64_t most)
{
    int tokens = KV_TILE;
    while (tokens > KV_LANES && tokens > most) tokens /= 2;
    return tokens;
}

static void open_side(side *s, const struct ggml_tensor *tensor, const call *c, bool is_key)
{
    const kv_row_kernels *kernels = c->tier.rows;
    const bool few = !c->matrix && (!c->products || c->invariant);
    const int dim = (int)tensor->ne[0];
    int dtype = tensor->type == GGML_TYPE_F16 ? KV_FLOAT16 : tensor->type == GGML_TYPE_BF16 ? KV_BFLOAT16
                                                                                            : KV_FLOAT32;
    if (!c->matrix && is_key) s->prepare = kernels->prepare[tensor->type];
    if (!c->matrix && is_key) s->transpose = kernels->transpose_codes[tensor->type];
    if (few && !is_key) s->add = kernels->add[tensor->type], s->add_rounded = kernels->add_rounded[tensor->type];
    if (s->add_rounded) s->gather = kernels->gather[tensor->type], s->add_gathered = kernels->add_gathered[tensor->type];
    else s->add_rounded = s->add;
    const bool as_floats = dim % KV_LANES == 0 && (dtype != KV_FLOAT32 || tensor->type == GGML_TYPE_F32);
    bool stored = s->transpose || s->add || as_floats;
    s->tensor = tensor;
    s->row_bytes = (ptrdiff_t)ggml_row_size(tensor->type, dim);
    s->tile = most_tokens(stored ? TILE_BYTES / (2 * s->row_bytes) : DECODED_BYTES / (parts(dim, KV_LANES) * KV_LANES * 4));
    s->strips = s->transpose || (c->products && !s->add && (!is_key || !c->invariant || kernels->multiply_in_order));
    if (s->strips && !s->transpose) stored = false;
    if (!stored) dtype = KV_FLOAT32;
    const int whole = s->strips ? KV_COLUMNS : KV_LANES, padded = (dim + whole - 1) / whole * whole;
    s->decode = stored ? NULL : kernels->decode[tensor->type];
    s->rows = (kv_side){.dtype = dtype, .family = KV_FLOAT_ROWS, .block_size = KV_TILE, .head_dim = dim, .padded_dim = padded};
    s->packed = s->rows;
    s->rows.row_stride = stored ? (ptrdiff_t)tensor->nb[1] : (ptrdiff_t)padded * 4;
    s->packed.row_stride = stored ? s->row_bytes : (ptrdiff_t)padded * 4;
}

/* Tokens of a split that few rows take, of a context of some length. */
static int64_t split_tokens(const call *c, int64_t tokens)
{
    const int64_t token_bytes = (c->k.row_bytes + c->v.row_bytes) * c->k.tensor->ne[2];
    return larger(parts(larger(SPLIT_BYTES / token_bytes, parts(tokens, MAX_SPLITS)), KV_TILE), LEAST_TILES) * KV_TILE;
}

/* Cuts the call into tasks, by its shapes alone. Where there are few tasks of many rows, they share a context; in an invariant call, its
   splits, whose sizes do not change, and rows as well. */
static void plan(call *c)
{
    const int64_t tasks = c->k.tensor->ne[2] * c->q->ne[3];
    kv_item *item = &c->item;
    int64_t blocks = parts(c->rows, MAX_BLOCKS * KV_ROWS);
    if (c->invariant) blocks = larger(blocks, smaller(c->rows / FEW_ROWS, parts(ENOUGH_TASKS, tasks)));
    item->num_queries = c->q->ne[1];
    item->block_rows = (int)(parts(parts(c->rows, blocks), KV_ROWS) * KV_ROWS);
    item->row_blocks = parts(c->rows, item->block_rows);
    c->tile = c->matrix || (c->products && !c->invariant) ? KV_TILE : (int)smaller(c->k.tile, c->v.tile);
    item->split_tokens = split_tokens(c, c->tokens);
    const int64_t runs = parts(ENOUGH_TASKS, tasks * item->row_blocks);
    if (c->rows > FEW_ROWS && !c->invariant)
        item->split_tokens = larger(item->split_tokens, parts(parts(c->tokens, runs), KV_TILE) * KV_TILE);
    kv_cut_context(item, c->tokens);
    item->run = c->rows > FEW_ROWS && c->invariant ? (int)parts(item->splits, runs) : 1;
    c->grows = c->invariant && item->split_tokens > split_tokens(c, 1);
}

/* The item of queries of a stream, from `begin` on, that have splits of one size: in an invariant call, that of the context that they
   see. */
static kv_item item_from(const call *c, int64_t stream, int64_t begin)
{
    kv_item item = c->item;
    int64_t end = c->q->ne[1], seen = 0;
    if (c->grows) {
        item.split_tokens = split_tokens(c, kv_end_of(c, stream, begin));
        for (end = begin; end < c->q->ne[1]; end++) {
            const int64_t tokens = kv_end_of(c, stream, end);
            if (split_tokens(c, tokens) != item.split_tokens) break;
            seen = larger(seen, tokens);
        }
        kv_cut_context(&item, seen);
        if (c->item.run == c->item.splits) item.run = (int)item.splits;
    }
    item.first_query = stream * c->q->ne[1] + begin;
    item.num_queries = end - begin;
    item.row_blocks = parts(item.num_queries * c->walk.group, item.block_rows);
    return item;
}

static void add_items(call *c)
{
    kv_call *walk = &c->walk;
    for (int64_t query = 0; query < walk->num_queries;) {
        kv_item *item = walk->items + walk->num_items++;
        *item = item_from(c, query / c->q->ne[1], query % c->q->ne[1]);
        kv_add_tasks(walk, item);
        for (const int64_t end = query + item->num_queries; query < end; query++)
            walk->queries[query] = (kv_query){.token = query, .parts = (int)item->splits};
    }
    kv_count_slots(walk, walk->num_queries);
    if (c->item.splits > 1) kv_count_tasks(walk, walk->num_queries);
}

static bool reserve(call *c, int num_threads, kv_workspace *workspace)
{
    const size_t used = c->matrix ? sizeof(kv_wide_scratch) : parts(c->item.block_rows, KV_ROWS) * sizeof(kv_scratch);
    const size_t queries = c->q->ne[3] * c->item.num_queries, items = c->grows ? queries : (size_t)c->q->ne[3];
    const size_t splits = c->item.splits == 1 ? 0 : c->item.run == c->item.splits ? 1 : c->grows ? MAX_SPLITS : c->item.splits;
    const size_t partials = queries * c->walk.num_q_heads * splits * kv_partial_size(&c->v.rows) * sizeof(double);
    const size_t packed = c->mask && c->q->ne[1] == 1 ? (size_t)((c->k.row_bytes + c->v.row_bytes) * c->tile) : 0;
    c->packed_at = parts(offsetof(scratch, narrow) + used, 64) * 64;
    c->scratch_bytes = parts(c->packed_at + packed, 4096) * 4096 + 64; /* no two threads at the same place of a page */
    const size_t counts = splits ? queries * c->k.tensor->ne[2] * sizeof(int) : 0;
    const size_t size = c->scratch_bytes * num_threads + partials + counts + items * sizeof(kv_item) + queries * sizeof(kv_query);
    if (size > workspace->size) {
        kv_release(workspace);
        workspace->memory = aligned_alloc(64, parts(size, 64) * 64);
        if (!workspace->memory) return false;
        workspace->size = size;
    }
    c->scratch = workspace->memory;
    c->walk.queries = (kv_query *)(c->scratch + c->scratch_bytes * num_threads);
    c->walk.items = (kv_item *)(c->walk.queries + queries);
    c->walk.partials = (double *)(c->walk.items + items);
    c->walk.unfinished = (int *)((char *)c->walk.partials + partials);
    c->walk.num_queries = queries;
    add_items(c);
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
    call c = {.q = op->src[0], .mask = op->src[3], .out = op, .tier = kv_active_tier()};
    c.scale = option(op, 0), c.max_bias = option(op, 1), c.softcap = option(op, 2);
    c.tokens = op->src[1]->ne[1];
    const int heads = (int)op->src[1]->ne[2];
    const enum ggml_type k = op->src[1]->type, v = op->src[2]->type;
    const bool is_fast = kv_active_precision() == KV_PRECISION_FAST && ggml_is_quantized(k) && ggml_is_quantized(v);
    const kv_kernels *kernels = is_fast ? c.tier.fast : c.tier.attention;
    c.walk = (kv_call){.kernels = kernels, .source = &kv_ggml_rows, .given = &c, .values = &c.v.rows, .heads_together = heads};
    c.walk.sinks = op->src[4] ? op->src[4]->data : NULL;
    c.walk.num_q_heads = c.q->ne[2], c.walk.group = (int)c.q->ne[2] / heads;
    c.rows = c.q->ne[1] * c.walk.group;
    /* Panels have other bits than few rows. Words gain too little over codes, and are not within the contract for f32; a matrix unit has
       17 bits for it. */
    const bool as_codes = c.tier.rows->transpose_codes[k] && c.tier.rows->gather[v], is_f32 = k == GGML_TYPE_F32 || v == GGML_TYPE_F32;
    const bool without = !is_fast && !kernels->has_matrix && (as_codes || is_f32);
    c.strict = kv_active_precision() == KV_PRECISION_INVARIANT;
    const bool panels = kernels->panels[KV_PANELS_OF_ROWS].attend && !c.strict && !without;
    c.invariant = c.strict || (!panels && (c.tier.rows->transpose_codes[k] || c.tier.rows->multiply_in_order));
    c.matrix = panels && c.rows >= MATRIX_ROWS;
    c.products = !c.matrix && c.rows >= PRODUCT_ROWS;
    open_side(&c.k, op->src[1], &c, true);
    open_side(&c.v, op->src[2], &c, false);
    plan(&c);
    const int64_t work = c.tokens * c.rows * (c.k.rows.head_dim + c.v.rows.head_dim) * heads;
    if (num_threads < 1 || work < SERIAL_BYTES) num_threads = 1;
    if (!reserve(&c, num_threads, workspace)) return false;
    /* All heads of a split share its lines, and a thread that goes on with the next split finds it fetched. */
    const int chunk = kv_runs(&c.item) >= ENOUGH_TASKS / 2 ? (int)parts(c.walk.num_tasks, num_threads) : 1;
    (void)chunk;
#pragma omp parallel num_threads(num_threads)
    {
        scratch *own = (scratch *)(c.scratch + c.scratch_bytes * omp_get_thread_num());
        kv_matrix_state state;
        const uint64_t mode = kv_begin_floats();
        if (c.matrix) kv_save_matrix(&c.tier, &state);
#pragma omp for schedule(dynamic, chunk)
        for (int64_t i = 0; i < c.walk.num_tasks; i++) {
            kv_task task = {.options.softcap = c.softcap, .narrow = own->narrow, .wide = c.matrix ? &own->wide : NULL, .own = own};
            kv_open_task(&task, &c.walk, i);
            kv_attend_task(&task);
        }
        if (c.matrix) kv_restore_matrix(&c.tier, &state);
        kv_end_floats(mode);
    }
    return true;
}
