# cython: language_level=3, boundscheck=False, cdivision=True
"""Fused attention: streaming softmax straight on the stored bytes (FlashAttention, arXiv 2205.14135, and
its split form for decoding, Flash-Decoding).

The query rows of one KV head (its query heads x the query tokens, up to KV_ROWS at a time) share every
pass over a tile; up to KV_TASK_ROWS where kernels take panels. A task is (item, KV head, split of the
context, row block); partial results merge in order, so that results are the same bits for every number of threads.
"""
from libc.math cimport INFINITY, expf, logf
from libc.string cimport memcpy, memset

from kvfast.attention.rows cimport begin_rows, load, rows_to_refine
from kvfast.attention.spans cimport attend_span
from kvfast.attention.tiles cimport (copy_rows, kv_call, kv_item, kv_query, kv_range, kv_seen, kv_task, kv_traffic, num_panels, step_of,
                                     touch, touch_first_floats, touch_sinks)
from kvfast.codec.blocks cimport values_of
from kvfast.codec.dtypes cimport dtype_limit
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport KV_FLOAT32, kv_panel, kv_side, kv_softmax, kv_wide_scratch
from kvfast.core.limits cimport KV_LANES, KV_MAX_HEAD_DIM, KV_ROWS
from kvfast.core.scratch cimport give_scratch, take_scratch
from kvfast.core.threads cimport DYNAMIC, STATIC, kv_team, run_each
from kvfast.core.wipe cimport kv_wipe, kv_wipe_pages, kv_wipe_stack

cdef enum:
    # One thread merges fewer partial results than this before a second team of threads could start.
    SERIAL_MERGE = 512


cdef const kv_item *_item_of(const kv_call *call, Py_ssize_t task) noexcept nogil:
    cdef Py_ssize_t low = 0, high = call.num_items - 1, middle
    while low < high:
        middle = (low + high + 1) // 2
        if call.items[middle].first_task <= task:
            low = middle
        else:
            high = middle - 1
    return call.items + low


cdef inline Py_ssize_t _query_of(const kv_call *call, const kv_item *item, Py_ssize_t row) noexcept nogil:
    """The query of an item's row: rows are query tokens x the query heads of a KV head."""
    cdef Py_ssize_t query = row // call.group
    return item.members[query] if item.members != NULL else item.first_query + query


cdef inline void _open_item(kv_task *task, const kv_item *item, Py_ssize_t row0, Py_ssize_t split) noexcept nogil:
    """Set the queries of a task's rows, from `row0` of the item on, and what they see of a split."""
    cdef const kv_call *call = task.call
    cdef const kv_query *query
    cdef kv_seen *seen = &task.seen
    cdef Py_ssize_t token, split_begin = item.begin + split * item.split_tokens
    cdef int r, step = step_of(task)
    task.item = item
    seen.begin, seen.end, seen.sinks_end = item.end, 0, 0
    for r in range(task.rows):
        token = _query_of(call, item, row0 + r)
        query = call.queries + token
        task.tokens[r] = token
        task.q_heads[r] = task.head * call.group + (row0 + r) % call.group
        task.query_at[r] = query.position
        if call.request.slopes != NULL:
            task.slopes[r] = call.request.slopes[task.q_heads[r]]
        seen.starts[r], seen.stops[r], seen.sink_stops[r] = query.start, query.stop, query.sink_stop
        seen.begin = min(seen.begin, query.start)
        seen.end = max(seen.end, query.stop)
        seen.sinks_end = max(seen.sinks_end, query.sink_stop)
    seen.begin = max(seen.begin // step * step, split_begin)
    seen.end = min(min(seen.end, item.end), split_begin + item.split_tokens)
    if split > 0 or item.part > 0:
        seen.sinks_end = 0

    # Prefetch the first keys: no earlier tile did.
    if seen.sinks_end > 0:
        touch_sinks(task, seen.sinks_end)
    if not call.store.seals or seen.begin < item.context.floats_begin:
        touch(task, seen.begin, call.tile)
    if call.store.float_tokens and (seen.sinks_end > 0 or seen.begin < call.store.float_tokens):
        touch_first_floats(task)


cdef inline void _read_item(kv_task *task) noexcept nogil:
    """Read what `_open_item` found."""
    cdef const kv_call *call = task.call
    cdef const kv_seen *seen = &task.seen
    cdef kv_range rest
    if seen.sinks_end > 0:
        memset(task.zeros, 0, task.rows * sizeof(Py_ssize_t))
        load(task, &call.request.q if call.request.sink_q.data == NULL else &call.request.sink_q)
        rest = kv_range(call.store, call.tile, seen.begin, seen.end)
        attend_span(task, 0, seen.sinks_end, task.zeros, seen.sink_stops, &rest)
    if seen.sinks_end == 0 or call.request.sink_q.data != NULL:
        load(task, &call.request.q)
    if seen.begin < seen.end:
        attend_span(task, seen.begin, seen.end, seen.starts, seen.stops, NULL)


cdef void _read_items(kv_task *task, const kv_item *item, const kv_item *last, Py_ssize_t row0, Py_ssize_t split) noexcept nogil:
    """Read the items of a task, for its rows from `row0` on."""
    while True:
        _open_item(task, item, row0, split)
        _read_item(task)
        if item == last:
            break
        item += 1


cdef void _refine(kv_task *task, const kv_item *item, const kv_item *last, Py_ssize_t row0, Py_ssize_t split) noexcept nogil:
    """Read the items again for rows whose rounding of weights matters. The few other rows of a task stay as they are. Panels are
    read like few rows."""
    cdef kv_wide_scratch *wide = task.wide
    cdef kv_panel *panel
    cdef Py_ssize_t padded = values_of(task.call.store).padded_dim
    cdef int rows = task.rows, panels = num_panels(task), i
    cdef unsigned marked
    if wide == NULL:
        marked = rows_to_refine(task, NULL)
        if marked:
            begin_rows(task, marked)
            _read_items(task, item, last, row0, split)
        return
    task.wide = NULL
    for i in range(panels):
        panel = wide.panels + i
        marked = rows_to_refine(task, panel)
        if marked:
            task.rows = panel.rows
            begin_rows(task, marked)
            _read_items(task, item, last, row0 + i * KV_ROWS, split)
            copy_rows(&task.scratch.softmax, task.scratch.acc, padded, marked, panel)
    task.wide, task.rows = wide, rows


cdef int _attend_task(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """One (item, KV head, split, row block), and the items that continue it."""
    cdef const kv_call *call = <const kv_call *>shared
    cdef kv_task *task = <kv_task *>call.scratch[thread]
    cdef kv_softmax *state = &task.scratch.softmax
    cdef kv_panel *panel
    cdef const kv_item *item = _item_of(call, index)
    cdef const kv_item *last = item
    cdef const kv_query *query
    cdef Py_ssize_t padded = values_of(call.store).padded_dim
    cdef Py_ssize_t row0, split, q_head
    cdef int r
    cdef Py_ssize_t i
    cdef float m, l
    cdef float *acc
    cdef float *partial
    index -= item.first_task
    # The last rows see most tokens. So they come first, and the threads end together.
    row0 = (item.row_blocks - 1 - index % item.row_blocks) * item.block_rows
    split = index // item.row_blocks % item.splits
    while last + 1 < call.items + call.num_items and last[1].continues:
        last += 1
    task.call = call
    task.head = <int>(index // item.row_blocks // item.splits)
    task.rows = <int>min(<Py_ssize_t>item.block_rows, item.num_queries * call.group - row0)
    task.wide = call.wide + thread if item.block_rows > KV_ROWS and call.wide != NULL else NULL
    task.rope = call.rope + thread if call.rope != NULL else NULL
    task.decoded = call.decoded + thread * call.decoded_size if call.decoded != NULL else NULL
    task.scratch.queries.room = task.scratch.softmax.room = &task.room
    if task.wide != NULL:
        task.wide.operands.room = &task.room
    if task.rope != NULL:
        task.rope.queries.room = &task.room
    task.options.softcap = call.request.softcap
    task.options.slopes = task.slopes if call.request.slopes != NULL else NULL
    task.options.query_at = task.query_at
    task.options.bias = NULL
    if call.traffic == NULL:
        begin_rows(task, 0)
    _read_items(task, item, last, row0, split)
    if call.traffic != NULL:
        return 0
    _refine(task, item, last, row0, split)

    for r in range(task.rows):
        query = call.queries + _query_of(call, last, row0 + r)
        q_head = task.head * call.group + (row0 + r) % call.group
        if task.wide == NULL:
            acc, m, l = task.scratch.acc + r * padded, state.m[r], state.l[r]
            if state.rest != NULL:
                call.kernels.scale_add(acc, 1.0, task.rest + r * padded, 1.0, padded)
        else:
            panel = task.wide.panels + r // KV_ROWS
            acc, m, l = task.wide.rows, panel.m[r % KV_ROWS], panel.l[r % KV_ROWS]
            for i in range(padded // KV_LANES):
                memcpy(acc + i * KV_LANES, panel.acc + (i * KV_ROWS + r % KV_ROWS) * KV_LANES, KV_LANES * sizeof(float))
        if query.parts == 1:
            _write_output(call, query.token, q_head, acc, m, l)
        else:
            partial = _partials_of(call, query, q_head) + (item.part + split) * (padded + 2)
            partial[0] = m
            partial[1] = l
            call.kernels.from_float[KV_FLOAT32](acc, padded, partial + 2)
    if call.store.secure:
        kv_wipe_pages(<char *>task, sizeof(kv_task))
        kv_wipe_stack()
    return 0


cdef inline float *_partials_of(const kv_call *call, const kv_query *query, Py_ssize_t q_head) noexcept nogil:
    """(parts, padded_dim of values + 2): running maximum, sum of weights, sum of weighted values."""
    return call.partials + (query.partial * call.request.q.heads + q_head * query.parts) * (values_of(call.store).padded_dim + 2)


cdef void _write_output(const kv_call *call, Py_ssize_t token, Py_ssize_t q_head, float *acc, float m, float l) noexcept nogil:
    """Write the output row, and its log-sum-exp."""
    cdef float scale, top = m
    cdef const kv_side *v = values_of(call.store)
    cdef char *target = call.request.out.data + token * call.request.out.token_stride + q_head * call.request.out.head_stride
    if call.request.sinks != NULL:
        top = max(m, call.request.sinks[q_head])
        l = l * expf(m - top) + expf(call.request.sinks[q_head] - top)
    scale = expf(m - top) / l if l > 0 else 0.0
    call.kernels.scale_add(acc, scale, acc, 0.0, call.request.out.dim)
    if v.rotated:
        call.kernels.rotate(acc, v.head_dim, 1, v.head_dim, acc, v.head_dim)
    # Every query sees at least its own token, so l is 0 or NaN only if scores were beyond float32; see exp in simd/vectors/rows.inc.h.
    if not l > 0 or call.kernels.find_unstorable(acc, call.request.out.dim, dtype_limit(call.request.out.dtype)) >= 0:
        call.bad[0] = 1
    call.kernels.from_float[call.request.out.dtype](acc, call.request.out.dim, target)
    if call.request.lse != NULL:
        call.request.lse[token * call.request.q.heads + q_head] = top + logf(l)


cdef int _merge(void *shared, Py_ssize_t token, int thread, kv_watch *watch) noexcept nogil:
    """Merge the partial results of one query token, in order."""
    cdef const kv_call *call = <const kv_call *>shared
    cdef const kv_query *query = call.queries + token
    cdef Py_ssize_t padded = values_of(call.store).padded_dim, q_head
    cdef float *partial
    cdef float *part
    cdef float acc[KV_MAX_HEAD_DIM]
    cdef float m, l, weight
    cdef int i
    if query.parts == 1:
        return 0
    for q_head in range(call.request.q.heads):
        partial = _partials_of(call, query, q_head)
        m, l = -INFINITY, 0.0
        for i in range(query.parts):
            m = max(m, partial[i * (padded + 2)])
        memset(acc, 0, padded * sizeof(float))
        for i in range(query.parts):
            part = partial + i * (padded + 2)
            if part[1] != 0:  # also for NaN
                weight = expf(part[0] - m)
                l += part[1] * weight
                call.kernels.scale_add(acc, 1.0, part + 2, weight, padded)
        _write_output(call, token, q_head, acc, m, l)
    if call.store.secure:
        kv_wipe(acc, sizeof(acc))
    return 0


cdef bint run_tasks(kv_call *call, kv_team *team) noexcept nogil:
    cdef Py_ssize_t i, parts = 0
    cdef kv_team merging
    if not take_scratch(call.scratch, team.threads):
        return False
    call.watch = team.watch
    for i in range(call.request.q.tokens):
        if call.queries[i].parts > 1:
            parts += call.queries[i].parts * call.request.q.heads
    run_each(team, _attend_task, call, call.num_tasks, DYNAMIC)
    give_scratch(call.scratch, team.threads)
    if parts:
        merging = team[0]
        if parts < SERIAL_MERGE or call.request.q.tokens == 1:
            merging.threads = 1
        run_each(&merging, _merge, call, call.request.q.tokens, STATIC)
    return True


cdef bint measure_tasks(kv_call *call, kv_traffic *traffic) noexcept nogil:
    """Count what `run_tasks` would read, task by task. Reads no queries and writes no output."""
    cdef Py_ssize_t i
    cdef void *scratch
    if not take_scratch(&scratch, 1):
        return False
    memset(traffic, 0, sizeof(kv_traffic))
    call.traffic, call.scratch = traffic, &scratch
    for i in range(call.num_tasks):
        _attend_task(call, i, 0, NULL)
    call.traffic, call.scratch = NULL, NULL
    give_scratch(&scratch, 1)
    return True
