/* How items are cut into tasks: runs of splits of the context x blocks of query rows x KV heads. */

/* Where a split begins. */
static inline ptrdiff_t kv_split_begin(const kv_item *item, ptrdiff_t split) { return split * item->split_tokens; }

/* The split that has a position. */
static inline ptrdiff_t kv_split_at(const kv_item *item, ptrdiff_t position) { return position / item->split_tokens; }

/* Cuts what an item reads, up to `end`, into splits; their size is set. */
static inline void kv_cut_context(kv_item *item, ptrdiff_t end)
{
    item->end = end;
    item->first_split = kv_split_at(item, item->begin);
    item->splits = kv_split_at(item, end - 1) - item->first_split + 1;
}

static inline ptrdiff_t kv_runs(const kv_item *item) { return (item->splits + item->run - 1) / item->run; }

/* Numbers the tasks of an item, whose run is set, after those of the items before it. */
static inline void kv_add_tasks(kv_call *call, kv_item *item)
{
    item->first_task = call->num_tasks;
    if (!item->continues) call->num_tasks += kv_runs(item) * item->row_blocks * (call->num_q_heads / call->group);
}

static inline const kv_item *kv_item_of(const kv_call *call, ptrdiff_t task)
{
    ptrdiff_t low = 0, high = call->num_items - 1;
    while (low < high) {
        const ptrdiff_t middle = (low + high + 1) / 2;
        if (call->items[middle].first_task <= task) low = middle;
        else high = middle - 1;
    }
    return call->items + low;
}

/* The query of an item's row: rows are query tokens x the query heads of a KV head. */
static inline ptrdiff_t kv_query_of(const kv_call *call, const kv_item *item, ptrdiff_t row)
{
    const ptrdiff_t query = row / call->group;
    return item->members ? item->members[query] : item->first_query + query;
}

/* Finds the rows and the splits of a task. What it works in is there already; it takes panels where it has more than KV_ROWS rows. */
static inline void kv_open_task(kv_task *task, const kv_call *call, ptrdiff_t index)
{
    const kv_item *item = kv_item_of(call, index);
    const ptrdiff_t near = call->heads_together, runs = kv_runs(item);
    index -= item->first_task;
    task->call = call;
    task->kernels = call->kernels;
    task->item = item;
    task->loaded = 0;
    task->head = (int)(near ? index % near : index / item->row_blocks / runs);
    const ptrdiff_t block = near ? index / near / runs : index % item->row_blocks;
    task->first_split = (near ? index / near : index / item->row_blocks) % runs * item->run;
    task->end_split = task->first_split + item->run < item->splits ? task->first_split + item->run : item->splits;
    /* The last rows see most tokens. So they come first, and the threads end together. */
    task->first_row = (item->row_blocks - 1 - block) * item->block_rows;
    const ptrdiff_t left = item->num_queries * call->group - task->first_row;
    task->rows = (int)(left < item->block_rows ? left : item->block_rows);
    if (item->block_rows <= KV_ROWS) task->wide = NULL;
}

/* Sets the positions of task->split. */
static inline void kv_find_split(kv_task *task)
{
    const kv_item *item = task->item;
    const ptrdiff_t split = item->first_split + task->split, begin = kv_split_begin(item, split), end = kv_split_begin(item, split + 1);
    task->begin = begin > item->begin ? begin : item->begin;
    task->end = end < item->end ? end : item->end;
}
