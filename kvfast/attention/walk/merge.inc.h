/* Output rows, and the partial results of splits that are folded into them. */

/* Numbers of a partial result: the maximum, the sum of weights, the sums of weighted values. In double, as the splits of a long context
   are thousands, and sums of tokens that are alike would all be rounded the same way. */
static inline ptrdiff_t kv_partial_size(const kv_side *values) { return values->padded_dim + 2; }

/* Those of one query and query head: (slots, kv_partial_size). */
static inline double *kv_partials_of(const kv_call *call, const kv_query *query, ptrdiff_t q_head)
{
    return call->partials + (query->partial * call->num_q_heads + q_head * query->slots) * kv_partial_size(call->values);
}

static inline void kv_write_partial(const kv_call *call, double *partial, const float *sums, float m, float l)
{
    partial[0] = m;
    partial[1] = l;
    for (ptrdiff_t i = 0; i < call->values->padded_dim; i++) partial[2 + i] = sums[i];
}

/* Adds a partial result to the sum of those before it. */
static inline void kv_fold(const kv_call *call, double *into, const double *partial)
{
    const double m = partial[0], l = partial[1], top = fmax(into[0], m);
    if (l == 0.0) return; /* goes on for NaN */
    if (into[1] == 0.0) {
        memcpy(into, partial, (size_t)kv_partial_size(call->values) * sizeof *into);
        return;
    }
    const double before = into[0] == top ? 1.0 : exp(into[0] - top), weight = m == top ? 1.0 : exp(m - top);
    into[0] = top;
    into[1] = into[1] * before + l * weight;
    call->kernels->scale_add_double(into + 2, before, partial + 2, weight, call->values->padded_dim);
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

static inline void kv_write_folded(const kv_call *call, const kv_query *query, ptrdiff_t q_head, const double *partial)
{
    float sums[KV_MAX_HEAD_DIM];
    for (int i = 0; i < call->values->head_dim; i++) sums[i] = (float)partial[2 + i];
    kv_write_row(call, query, q_head, sums, (float)partial[0], (float)partial[1]);
}

/* Whether one task computes all splits of a query. The query then needs one slot. */
static inline int kv_is_whole(const kv_task *task, const kv_query *query)
{
    return task->item->part == 0 && task->item->run >= query->parts && task->item->splits == query->parts;
}

/* Ends a row of the task's item: of the split that was read. */
static inline void kv_end_row(const kv_task *task, ptrdiff_t row, float *sums, float m, float l)
{
    const kv_call *call = task->call;
    const ptrdiff_t q_head = task->head * call->group + row % call->group, size = kv_partial_size(call->values);
    const kv_query *query = call->queries + kv_query_of(call, task->item, row);
    double *first, partial[KV_MAX_HEAD_DIM + 2];
    if (query->parts == 1) {
        kv_write_row(call, query, q_head, sums, m, l);
        return;
    }
    first = kv_partials_of(call, query, q_head);
    if (task->item->part > 0 || task->first_split > 0 || task->split == 0) {
        kv_write_partial(call, first + (task->item->part + task->split) * size, sums, m, l);
        return;
    }
    kv_write_partial(call, partial, sums, m, l);
    kv_fold(call, first, partial);
    if (!kv_is_whole(task, query)) first[task->split * size + 1] = 0.0;
    else if (task->split == task->end_split - 1) kv_write_folded(call, query, q_head, first);
}

/* Folds the partial results of a query and query head, in order, and writes its row. */
static inline void kv_merge(const kv_call *call, const kv_query *query, ptrdiff_t q_head)
{
    double *first = kv_partials_of(call, query, q_head);
    for (int i = 1; i < query->parts; i++) kv_fold(call, first, first + i * kv_partial_size(call->values));
    kv_write_folded(call, query, q_head, first);
}

/* Ends a task. The last one of a query and KV head to end merges their partial results. */
static inline void kv_end_task(const kv_task *task)
{
    const kv_call *call = task->call;
    const ptrdiff_t heads = call->num_q_heads / call->group, last = task->first_row + task->rows - 1;
    for (ptrdiff_t row = task->first_row; row <= last; row = (row / call->group + 1) * call->group) {
        const kv_query *query = call->queries + kv_query_of(call, task->item, row);
        if (query->parts == 1 || kv_is_whole(task, query)) continue;
        if (__atomic_sub_fetch(call->unfinished + query->token * heads + task->head, 1, __ATOMIC_ACQ_REL)) continue;
        for (int i = 0; i < call->group; i++) kv_merge(call, query, task->head * call->group + i);
    }
}

/* Sets the slots of all queries, whose parts are set, and returns how many there are for a query head. Queries from num_tokens on are
   other views of their tokens. */
static inline ptrdiff_t kv_count_slots(kv_call *call, ptrdiff_t num_tokens)
{
    ptrdiff_t slots = 0;
    for (ptrdiff_t i = 0; i < num_tokens; i++) call->queries[i].slots = call->queries[i].parts;
    for (ptrdiff_t i = 0; i < call->num_items; i++) {
        const kv_item *item = call->items + i;
        if (item->part || item->run < item->splits) continue;
        for (ptrdiff_t row = 0; row < item->num_queries * call->group; row += call->group) {
            kv_query *query = call->queries + call->queries[kv_query_of(call, item, row)].token;
            if (query->parts == item->splits) query->slots = 1;
        }
    }
    for (ptrdiff_t i = 0; i < num_tokens; i++) {
        call->queries[i].partial = slots;
        slots += call->queries[i].parts > 1 ? call->queries[i].slots : 0;
    }
    for (ptrdiff_t i = num_tokens; i < call->num_queries; i++) {
        const kv_query *query = call->queries + call->queries[i].token;
        call->queries[i].partial = query->partial, call->queries[i].parts = query->parts, call->queries[i].slots = query->slots;
    }
    return slots;
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
