/* How items are cut into tasks: splits of the context x blocks of query rows x KV heads. */

/* Cuts what an item reads, up to `end`, into splits. */
static inline void kv_cut_context(kv_item *item, ptrdiff_t end, ptrdiff_t split_tokens)
{
    item->end = end;
    item->split_tokens = split_tokens;
    item->splits = (end - item->begin + split_tokens - 1) / split_tokens;
}

/* Adds an item that is cut to the call, behind the others. */
static inline void kv_add_item(kv_call *call)
{
    kv_item *item = call->items + call->num_items++;
    item->first_task = call->num_tasks;
    call->num_tasks += item->splits * item->row_blocks * (call->num_q_heads / call->group);
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

/* Finds the rows and the split of a task. What it works in is there already; it takes panels where it has more than KV_ROWS rows. */
static inline void kv_open_task(kv_task *task, const kv_call *call, ptrdiff_t index)
{
    const kv_item *item = kv_item_of(call, index);
    const ptrdiff_t near = call->heads_together, splits = item->splits;
    index -= item->first_task;
    task->call = call;
    task->item = item;
    task->head = (int)(near ? index % near : index / item->row_blocks / splits);
    task->split = (near ? index / near : index / item->row_blocks) % splits;
    const ptrdiff_t block = near ? index / near / splits : index % item->row_blocks;
    /* The last rows see most tokens. So they come first, and the threads end together. */
    task->first_row = (item->row_blocks - 1 - block) * item->block_rows;
    const ptrdiff_t left = item->num_queries * call->group - task->first_row;
    task->rows = (int)(left < item->block_rows ? left : item->block_rows);
    if (item->block_rows <= KV_ROWS) task->wide = NULL;
}
