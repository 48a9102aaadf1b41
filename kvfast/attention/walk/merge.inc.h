/* Output rows, and the partial results of splits that are folded into them. */

/* A partial result: the maximum, the sum of weights, the sums of weighted values. */
typedef struct {
    float m, l, sums[];
} kv_partial;

/* Several of them, folded. In double, as the splits of a long context are thousands, and sums of tokens that are alike would all be
   rounded the same way. */
typedef struct {
    double m, l, sums[];
} kv_folded;

/* Numbers of either. */
static inline ptrdiff_t kv_partial_size(const kv_side *values) { return values->padded_dim + 2; }

/* The slots of a query and query head, each for a partial result. The first two are for the fold of all. Each part that is not
   folded as it is computed follows. */
static inline ptrdiff_t kv_slots_of(const kv_query *query) { return 2 + query->parts - query->folded; }

/* Whether a task takes all parts of a query, and folds them in memory of its own: they have no slots. */
static inline int kv_is_own(const kv_call *call, const kv_query *query) { return call->own_folds && query->parts == query->folded; }

/* The fold of one query and query head. The rows of a task follow each other. */
static inline kv_folded *kv_folded_of(const kv_call *call, const kv_query *query, ptrdiff_t q_head)
{
    const ptrdiff_t before = (q_head / call->group * call->num_slots + query->partial) * call->group;
    const ptrdiff_t slots = before + q_head % call->group * kv_slots_of(query);
    return (kv_folded *)((float *)call->partials + slots * kv_partial_size(call->values));
}

/* Where a part that is not folded is. */
static inline kv_partial *kv_part_of(const kv_call *call, const kv_query *query, kv_folded *folded, ptrdiff_t part)
{
    return (kv_partial *)((float *)folded + (2 + part - query->folded) * kv_partial_size(call->values));
}

/* Adds a partial result to the sum of those before it. */
static inline void kv_fold(const kv_call *call, kv_folded *into, const float *sums, float m, float l)
{
    const double top = into->m > m ? into->m : m;
    if (l == 0.0f) return; /* goes on for NaN */
    if (into->l == 0.0) {
        into->m = m, into->l = l;
        for (ptrdiff_t i = 0; i < call->values->padded_dim; i++) into->sums[i] = sums[i];
        return;
    }
    const double before = into->m == top ? 1.0 : exp(into->m - top), weight = m == top ? 1.0 : exp(m - top);
    into->m = top;
    into->l = into->l * before + l * weight;
    call->kernels->scale_add_double(into->sums, before, sums, weight, call->values->padded_dim);
}

/* Writes an output row, sums / l, after the sink of its head. A row that sees nothing is 0. */
static inline void kv_write_row(const kv_call *call, const kv_query *query, ptrdiff_t q_head, float *sums, float m, float l)
{
    float scale = 1.0f, top = m;
    if (call->sinks) {
        top = fmaxf(m, call->sinks[q_head]);
        scale = m == top ? 1.0f : expf(m - top);
        l = l * scale + expf(call->sinks[q_head] - top);
    }
    scale = l == 0.0f ? 0.0f : scale / l;
    call->kernels->scale_add(sums, scale, sums, 0.0f, call->values->head_dim);
    call->source->write(call, query, q_head, sums, top, l);
}

static inline void kv_write_folded(const kv_call *call, const kv_query *query, ptrdiff_t q_head, const kv_folded *folded)
{
    float sums[KV_MAX_HEAD_DIM];
    for (int i = 0; i < call->values->head_dim; i++) sums[i] = folded->l == 0.0 ? 0.0f : (float)folded->sums[i];
    kv_write_row(call, query, q_head, sums, (float)folded->m, (float)folded->l);
}

/* Ends a row of the task's item: of the split that was read. */
static inline void kv_end_row(const kv_task *task, ptrdiff_t row, float *sums, float m, float l)
{
    const kv_call *call = task->call;
    const ptrdiff_t q_head = task->head * call->group + row % call->group, part = task->item->part + task->split;
    const kv_query *query = call->queries + kv_query_of(call, task->item, row);
    kv_folded *folded;
    if (query->parts == 1) {
        kv_write_row(call, query, q_head, sums, m, l);
        return;
    }
    folded = kv_is_own(call, query) ? (kv_folded *)(task->folds + row % task->item->block_rows * kv_partial_size(call->values))
                                    : kv_folded_of(call, query, q_head);
    if (part >= query->folded) {
        kv_partial *own = kv_part_of(call, query, folded, part);
        own->m = m, own->l = l;
        memcpy(own->sums, sums, (size_t)call->values->padded_dim * sizeof *sums);
        return;
    }
    if (part == 0) folded->m = -INFINITY, folded->l = 0.0;
    kv_fold(call, folded, sums, m, l);
    if (part == query->parts - 1) kv_write_folded(call, query, q_head, folded);
}

/* Folds the partial results of a query and query head, in order, and writes its row. */
static inline void kv_merge(const kv_call *call, const kv_query *query, ptrdiff_t q_head)
{
    kv_folded *folded = kv_folded_of(call, query, q_head);
    for (int part = query->folded; part < query->parts; part++) {
        const kv_partial *own = kv_part_of(call, query, folded, part);
        kv_fold(call, folded, own->sums, own->m, own->l);
    }
    kv_write_folded(call, query, q_head, folded);
}

/* Ends a task. The last one of a query and KV head to end merges their partial results. */
static inline void kv_end_task(const kv_task *task)
{
    const kv_call *call = task->call;
    const ptrdiff_t heads = call->num_q_heads / call->group, last = task->first_row + task->rows - 1;
    for (ptrdiff_t row = task->first_row; row <= last; row = (row / call->group + 1) * call->group) {
        const kv_query *query = call->queries + kv_query_of(call, task->item, row);
        if (query->parts == query->folded) continue; /* its row is written */
        if (__atomic_sub_fetch(call->unfinished + query->token * heads + task->head, 1, __ATOMIC_ACQ_REL)) continue;
        for (int i = 0; i < call->group; i++) kv_merge(call, query, task->head * call->group + i);
    }
}

/* Counts the slots of all queries, whose parts are set, and returns how many there are for a query head. Queries from num_tokens on
   are other views of their tokens. */
static inline ptrdiff_t kv_count_slots(kv_call *call, ptrdiff_t num_tokens)
{
    const kv_item *const end = call->items + call->num_items;
    ptrdiff_t slots = 0;
    for (ptrdiff_t i = 0; i < num_tokens; i++) call->queries[i].folded = 1;
    for (const kv_item *item = call->items, *next; item < end; item = next) {
        ptrdiff_t folded = item->run < item->splits ? item->run : item->splits;
        for (next = item + 1; next < end && next->continues; next++) folded += next->splits;
        for (ptrdiff_t row = 0; item->part == 0 && row < item->num_queries * call->group; row += call->group)
            call->queries[call->queries[kv_query_of(call, item, row)].token].folded = (int)folded;
    }
    for (ptrdiff_t i = 0; i < num_tokens; i++) {
        call->queries[i].partial = slots;
        if (call->queries[i].parts > 1 && !kv_is_own(call, call->queries + i)) slots += kv_slots_of(call->queries + i);
    }
    for (ptrdiff_t i = num_tokens; i < call->num_queries; i++) {
        const kv_query *query = call->queries + call->queries[i].token;
        call->queries[i].partial = query->partial, call->queries[i].parts = query->parts, call->queries[i].folded = query->folded;
    }
    return call->num_slots = slots;
}

/* Makes all partial results empty: a query may see no key of a split of a segment that others see. */
static inline void kv_clear_partials(const kv_call *call, ptrdiff_t num_tokens)
{
    for (const kv_query *query = call->queries; query < call->queries + num_tokens; query++)
        for (ptrdiff_t q_head = 0; query->parts > query->folded && q_head < call->num_q_heads; q_head++) {
            kv_folded *folded = kv_folded_of(call, query, q_head);
            folded->m = -INFINITY, folded->l = 0.0;
            for (int part = query->folded; part < query->parts; part++) kv_part_of(call, query, folded, part)->l = 0.0f;
        }
}

/* Counts the tasks of each query and KV head. */
static inline void kv_count_tasks(const kv_call *call, ptrdiff_t num_tokens)
{
    const ptrdiff_t heads = call->num_q_heads / call->group;
    memset(call->unfinished, 0, (size_t)(num_tokens * heads) * sizeof *call->unfinished);
    for (ptrdiff_t i = 0; i < call->num_items; i++) {
        const kv_item *item = call->items + i;
        for (ptrdiff_t query = 0; query < item->num_queries && !item->continues; query++) {
            const ptrdiff_t row = query * call->group, blocks = (row + call->group - 1) / item->block_rows - row / item->block_rows + 1;
            int *counts = call->unfinished + call->queries[kv_query_of(call, item, row)].token * heads;
            for (ptrdiff_t head = 0; head < heads; head++) counts[head] += (int)(blocks * kv_runs(item));
        }
    }
}
