/* Output rows, and the partial results of splits that are merged into them. */

/* Floats of a partial result: the maximum, the sum of weights, the sums of weighted values. */
static inline ptrdiff_t kv_partial_floats(const kv_side *values) { return values->padded_dim + 2; }

/* Those of one query and query head: (parts, kv_partial_floats). */
static inline float *kv_partials_of(const kv_call *call, const kv_query *query, ptrdiff_t q_head)
{
    return call->partials + (query->partial * call->num_q_heads + q_head * query->parts) * kv_partial_floats(call->values);
}

static inline void kv_write_partial(const kv_call *call, const kv_query *query, ptrdiff_t q_head, ptrdiff_t part, const float *sums,
                                    float m, float l)
{
    float *partial = kv_partials_of(call, query, q_head) + part * kv_partial_floats(call->values);
    partial[0] = m;
    partial[1] = l;
    memcpy(partial + 2, sums, (size_t)call->values->padded_dim * sizeof *sums);
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

/* Merges the partial results of a query and query head, in order. `sums` has room for a row. */
static inline void kv_merge(const kv_call *call, const kv_query *query, ptrdiff_t q_head, float *sums)
{
    const ptrdiff_t floats = kv_partial_floats(call->values), n = call->values->padded_dim;
    const float *part = kv_partials_of(call, query, q_head);
    float m = -INFINITY, l = 0.0f;
    for (int i = 0; i < query->parts; i++) m = fmaxf(m, part[i * floats]);
    memset(sums, 0, (size_t)n * sizeof *sums);
    for (int i = 0; i < query->parts; i++, part += floats) {
        if (part[1] == 0.0f) continue; /* goes on for NaN */
        const float weight = expf(part[0] - m);
        l += part[1] * weight;
        call->kernels->scale_add(sums, 1.0f, part + 2, weight, n);
    }
    kv_write_row(call, query, q_head, sums, m, l);
}
