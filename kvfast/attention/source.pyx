# cython: language_level=3, boundscheck=False, cdivision=True
"""The source of kvfast's own blocks: the positions that the rows of a task see, cut into ranges of codes and of float rows. Float rows
are the first tokens, the newest, and tokens of patched blocks."""
from cpython.pyport cimport PY_SSIZE_T_MAX

from kvfast.attention.tasks cimport (given_of, keys_of, kv_call, kv_given, kv_item, kv_own, kv_query, kv_query_of, kv_split_begin,
                                     kv_stretch, kv_task, own_of, panels_read_floats)
from kvfast.attention.tiles cimport attend_range, begin_at_first, kv_range, load, step_of, touch, touch_first_floats, touch_sinks
from kvfast.codec.blocks cimport block_of, coded_at, kv_context, kv_layout, patched_from
from kvfast.core.limits cimport KV_PIECE, KV_TASK_ROWS


cdef Py_ssize_t floats_from(const kv_layout *layout, const kv_context *context, Py_ssize_t position) noexcept nogil:
    """First position that a query reads from float rows, apart from the start of the sequence. Where tokens have both
    codes and float rows, the query's own position decides."""
    if layout.open_tokens == 0:
        return context.length
    if layout.floats_of_steps:
        position = min(position, context.counted + layout.open_tokens)
    position = min(position, context.length + layout.open_tokens)  # a segment may end before the query
    return max(context.floats_begin, coded_at(position, layout.open_tokens, layout.border))


cdef Py_ssize_t _next_patch(const kv_layout *layout, const kv_context *context, Py_ssize_t position, Py_ssize_t end,
                            Py_ssize_t *stop) noexcept nogil:
    """The first position from `position` on that keeps its float rows, as part of a patched block; `stop` is where these
    end. `end` if there is none."""
    cdef Py_ssize_t index = position >> layout.block_shift, begin
    stop[0] = end
    if layout.kept_codes == NULL or layout.num_patched == 0:
        return end
    while index << layout.block_shift < end:
        if index < context.sink_blocks or index >= context.sink_blocks + context.skipped:
            begin = (index << layout.block_shift) + patched_from(layout, block_of(context, index))
            if begin < min((index + 1) << layout.block_shift, end):
                stop[0] = min((index + 1) << layout.block_shift, end)
                return max(begin, position)
        index += 1
    return end


cdef Py_ssize_t _ZEROS[KV_TASK_ROWS]


cdef void open_rows(kv_task *task) noexcept nogil:
    """Find the query, the head and the position of each row of a task."""
    cdef const kv_given *given = given_of(task)
    cdef kv_own *own = own_of(task)
    cdef int r
    for r in range(task.rows):
        own.tokens[r] = kv_query_of(task.call, task.item, task.first_row + r)
        own.q_heads[r] = task.head * task.call.group + (task.first_row + r) % task.call.group
        own.query_at[r] = task.call.queries[own.tokens[r]].position
        if given.request.options.alibi_slopes != NULL:
            own.slopes[r] = given.request.options.alibi_slopes[own.q_heads[r]]


cdef void read(kv_task *task) noexcept nogil:
    """Read what the task's rows see of a split of an item; see `kv_source`."""
    cdef const kv_call *call = task.call
    cdef const kv_given *given = given_of(task)
    cdef const kv_item *item = task.item
    cdef const kv_query *query
    cdef kv_own *own = own_of(task)
    cdef kv_range rest, following
    cdef Py_ssize_t begin = item.end, end = 0, sinks_end = 0  # what all rows together see of the split
    cdef Py_ssize_t tree = -1, split_end = kv_split_begin(item, item.first_split + task.split + 1)
    cdef int r, step = step_of(task)
    if not task.loaded:
        open_rows(task)
    for r in range(task.rows):
        query = call.queries + own.tokens[r]
        own.starts[r], own.stops[r], own.sink_stops[r] = query.start, query.stop, 0
        begin = min(begin, query.start)
        end = max(end, query.stop)
        # A row reads its sink tokens in the split where its window begins: the first one that it would read alone.
        if query.sink_stop and query.start < split_end and (query.start >= task.begin or task.split == 0):
            own.sink_stops[r], sinks_end = query.sink_stop, max(sinks_end, query.sink_stop)
        if query.num_stretches:
            tree = query.tree
    begin = max(begin // step * step, task.begin)
    end = min(end, task.end)

    # Prefetch the first keys: no earlier tile did.
    if sinks_end > 0:
        touch_sinks(task, sinks_end)
    if not task.loaded and (given.layout.open_tokens == 0 or begin < keys_of(task).context.floats_begin):
        touch(task, begin, given.tile)
    if given.layout.float_tokens and (sinks_end > 0 or begin < given.layout.float_tokens):
        touch_first_floats(task)

    if sinks_end > 0:
        load(task, &given.request.q if given.request.sink_q.data == NULL else &given.request.sink_q)
        rest = kv_range(given.layout, given.tile, begin, end)
        _attend_span(task, 0, sinks_end, _ZEROS, own.sink_stops, &rest)
    if (not task.loaded and sinks_end == 0) or (sinks_end > 0 and given.request.sink_q.data != NULL):
        load(task, &given.request.q)
    if item.first_split + task.split > 0:
        begin_at_first(task)
    if begin < end:
        following = kv_range(given.layout, given.tile, end, item.end)
        _attend_span(task, begin, end, own.starts, own.stops, &following if task.split + 1 < task.end_split else NULL)
    if item.members == NULL and task.begin <= tree < task.end:
        _read_stretches(task)
        open_rows(task)  # for the next split


cdef void _read_stretches(kv_task *task) noexcept nogil:
    """Read what the task's rows see of a tree besides: in each pass, one stretch of each row."""
    cdef kv_own *own = own_of(task)
    cdef const kv_query *query
    cdef const kv_stretch *one
    cdef Py_ssize_t begin, end = 1, step = step_of(task)
    cdef int r, i = 0
    while end:
        begin, end = PY_SSIZE_T_MAX, 0
        for r in range(task.rows):
            query = task.call.queries + own.tokens[r]
            own.starts[r] = own.stops[r] = 0
            if i >= query.num_stretches:
                continue
            one = query.stretches + i
            own.query_at[r] = query.position + one.shift
            own.starts[r], own.stops[r] = query.tree + one.first, query.tree + one.first + one.count
            begin, end = min(begin, own.starts[r]), max(end, own.stops[r])
        if end:
            _attend_span(task, begin // step * step, end, own.starts, own.stops, NULL)
        i += 1


cdef void _attend_span(kv_task *task, Py_ssize_t begin, Py_ssize_t end, const Py_ssize_t *starts,
                       const Py_ssize_t *stops, const kv_range *following) noexcept nogil:
    """Read the positions begin, where a tile or a block begins, to end, from codes and from float rows."""
    cdef const kv_given *given = given_of(task)
    cdef const kv_layout *layout = given.layout
    cdef const kv_context *context = &keys_of(task).context
    cdef kv_own *own = own_of(task)
    cdef kv_range ranges[3]   # codes up to the next patch, the newest tokens, the first tokens (prefetched long before)
    cdef kv_range patch
    cdef Py_ssize_t codes_end, position
    cdef Py_ssize_t some_floats = end, all_codes = 0, first = layout.float_tokens
    cdef bint sees_first = False
    cdef Py_ssize_t *from_floats = own.from_floats
    cdef Py_ssize_t *lower = own.lower
    cdef Py_ssize_t *upper = own.upper
    cdef const kv_range *after
    cdef int i, r, step = step_of(task)
    ranges[0] = kv_range(layout, given.tile, begin, end)
    if layout.floats == NULL:
        attend_range(task, &ranges[0], starts, stops, following)
        return
    for r in range(task.rows):
        from_floats[r] = floats_from(layout, context, task.call.queries[own.tokens[r]].position)
        if max(starts[r], first, from_floats[r]) < stops[r]:
            some_floats = min(some_floats, from_floats[r])
        sees_first = sees_first or starts[r] < min(stops[r], first)
        all_codes = max(all_codes, from_floats[r])
    # Where no row reads float rows there may be none: a cache may have been cut within a block that had released them, or
    # a ring's window may have left the start. Float rows begin at a piece, and panels of them at a tile; the rest is masked.
    ranges[0].end = min(all_codes, end)
    ranges[2] = kv_range(layout.floats, given.float_tile, begin, min(first, end) if sees_first else begin)
    ranges[1] = kv_range(layout.floats, given.float_tile, end, end)
    if some_floats < end:
        ranges[1].begin = max(begin, some_floats)
        ranges[1].begin -= ranges[1].begin % (given.float_tile if panels_read_floats(task) else KV_PIECE)
    codes_end, position = ranges[0].end, begin
    patch = kv_range(layout.floats, given.float_tile, 0, 0)
    while True:
        ranges[0].end = _next_patch(layout, context, position, codes_end, &patch.end)
        if ranges[0].end >= codes_end:
            break
        patch.begin = ranges[0].end // given.float_tile * given.float_tile
        for r in range(task.rows):
            lower[r], upper[r] = max(starts[r], first, position), min(stops[r], from_floats[r], ranges[0].end)
        if position < ranges[0].end:
            attend_range(task, &ranges[0], lower, upper, &patch)
        for r in range(task.rows):
            lower[r], upper[r] = max(starts[r], first, ranges[0].end), min(stops[r], from_floats[r], patch.end)
        position = patch.end
        ranges[0].begin = position // step * step
        attend_range(task, &patch, lower, upper, NULL)
    for i in range(3):
        if ranges[i].begin >= ranges[i].end:
            continue
        after = following
        if i == 0 and ranges[1].begin < ranges[1].end:
            after = &ranges[1]
        for r in range(task.rows):
            if i == 0:
                lower[r], upper[r] = max(starts[r], first, position), min(stops[r], from_floats[r])
            elif i == 1:
                lower[r], upper[r] = max(starts[r], first, from_floats[r]), stops[r]
            else:
                lower[r], upper[r] = starts[r], min(stops[r], first)
        attend_range(task, &ranges[i], lower, upper, after)
