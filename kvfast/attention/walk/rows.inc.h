/* The state of a task's query rows: their running softmax, in blocks of KV_ROWS or in panels. */

static inline int kv_num_blocks(const kv_task *task) { return (task->rows + KV_ROWS - 1) / KV_ROWS; }

static inline int kv_rows_of(const kv_task *task, int block)
{
    const int left = task->rows - block * KV_ROWS;
    return left < KV_ROWS ? left : KV_ROWS;
}

static inline void kv_begin_panel(const kv_task *task, int block)
{
    kv_panel *panel = task->wide->panels + block;
    panel->rows = kv_rows_of(task, block);
    panel->options = task->options;
    if (task->options.query_at) panel->options.query_at += block * KV_ROWS;
    if (task->options.slopes) panel->options.slopes += block * KV_ROWS;
    memset(panel->acc, 0, (size_t)(KV_ROWS * task->call->values->padded_dim) * sizeof(float));
    for (int r = 0; r < KV_ROWS; r++) panel->m[r] = -INFINITY, panel->l[r] = 0.0, panel->noise[r] = 0.0;
}

static inline void kv_begin_block(const kv_task *task, int block, unsigned refined)
{
    kv_softmax *state = &task->narrow[block].softmax;
    const int rows = kv_rows_of(task, block);
    const size_t sums = (size_t)(rows * task->call->values->padded_dim) * sizeof(float);
    memset(task->narrow[block].acc, 0, sums);
    state->refined = refined;
    state->rest = task->rest;
    if (task->rest) {
        memset(task->rest, 0, sums);
        memset(task->rest + KV_ROWS * KV_MAX_HEAD_DIM, 0, sums);
    }
    for (int r = 0; r < rows; r++) state->m[r] = -INFINITY, state->l[r] = 0.0, state->rescale[r] = 1.0f, state->noise[r] = 0.0;
}

/* Resets all rows: they have seen no token yet. Where vectors take them, `refined` marks those whose weights need more bits. */
static inline void kv_begin_rows(const kv_task *task, unsigned refined)
{
    for (int b = 0; b < kv_num_blocks(task); b++)
        if (task->wide) kv_begin_panel(task, b);
        else kv_begin_block(task, b, refined);
}

/* The rows of a block whose rounding of weights matters, compared with their sums, and those whose scores the fast precision did not
   give, so that their sum of weights is NaN: a bit for each. */
static inline unsigned kv_rows_to_refine(const kv_task *task, int block)
{
    const kv_call *call = task->call;
    const ptrdiff_t n = call->values->padded_dim;
    const kv_panel *panel = task->wide ? task->wide->panels + block : NULL;
    const kv_scratch *narrow = task->narrow + block;
    const int rows = kv_rows_of(task, block);
    unsigned marked = panel ? task->kernels->rows_to_refine(panel->acc, KV_LANES, KV_ROWS * KV_LANES, n, panel->noise, rows)
                            : task->kernels->rows_to_refine(narrow->acc, n, KV_LANES, n, narrow->softmax.noise, rows);
    for (int r = 0; r < rows && task->kernels != task->kernels->exact; r++)
        if (isnan(panel ? panel->l[r] : narrow->softmax.l[r])) marked |= 1u << r;
    return marked;
}

/* Copies the sums of a panel's row to those of a row, or from them. */
static inline void kv_copy_sums(const kv_task *task, kv_panel *panel, int r, float *sums, int back)
{
    for (ptrdiff_t i = 0; i < task->call->values->padded_dim; i += KV_LANES) {
        float *lanes = panel->acc + i * KV_ROWS + r * KV_LANES;
        memcpy(back ? lanes : sums + i, back ? sums + i : lanes, KV_LANES * sizeof *sums);
    }
}

/* Lets vectors go on with the rows of a panel, in the block for a few rows; or with `back` the panel with them. */
static inline void kv_pass_rows(const kv_task *task, kv_panel *panel, int back)
{
    kv_softmax *state = &task->narrow->softmax;
    state->refined = 0, state->rest = NULL;
    for (int r = 0; r < panel->rows; r++) {
        if (back) panel->m[r] = state->m[r], panel->l[r] = state->l[r], panel->noise[r] = state->noise[r];
        else state->m[r] = panel->m[r], state->l[r] = panel->l[r], state->noise[r] = panel->noise[r], state->rescale[r] = 1.0f;
        kv_copy_sums(task, panel, r, task->narrow->acc + r * (ptrdiff_t)task->call->values->padded_dim, back);
    }
}

/* The sums of a row, its maximum and the sum of its weights. */
static inline float *kv_sums_of(const kv_task *task, int row, float *m, float *l)
{
    const ptrdiff_t n = task->call->values->padded_dim, r = row % KV_ROWS;
    if (task->wide) {
        kv_panel *panel = task->wide->panels + row / KV_ROWS;
        kv_copy_sums(task, panel, (int)r, task->wide->rows, 0);
        *m = panel->m[r], *l = (float)panel->l[r];
        return task->wide->rows;
    }
    kv_scratch *block = task->narrow + row / KV_ROWS;
    *m = block->softmax.m[r], *l = (float)block->softmax.l[r];
    if (task->rest) task->kernels->scale_add(block->acc + r * n, 1.0f, task->rest + r * n, 1.0f, n);
    return block->acc + r * n;
}
