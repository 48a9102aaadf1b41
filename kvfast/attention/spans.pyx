# cython: language_level=3, boundscheck=False, cdivision=True
"""Which positions of a span a task reads from codes, and which from float rows: the first tokens, the newest, and those of patched
blocks."""
from kvfast.attention.tiles cimport attend_range, kv_call, kv_range, kv_task, step_of
from kvfast.codec.blocks cimport block_of, kv_context, kv_store, patched_from


cdef Py_ssize_t floats_from(const kv_store *store, const kv_context *context, Py_ssize_t position) noexcept nogil:
    """First position that a query reads from float rows, apart from the start of the sequence. Where tokens have both
    codes and float rows, the query's own position decides."""
    cdef Py_ssize_t codes
    if not store.seals:
        return context.length
    codes = (position - store.open_tokens) >> store.block_shift << store.block_shift if position > store.open_tokens else 0
    return max(context.floats_begin, min(codes, context.codes_end))


cdef Py_ssize_t _next_patch(const kv_store *store, const kv_context *context, Py_ssize_t position, Py_ssize_t end,
                            Py_ssize_t *stop) noexcept nogil:
    """The first position from `position` on that keeps its float rows, as part of a patched block; `stop` is where these
    end. `end` if there is none."""
    cdef Py_ssize_t index = position >> store.block_shift, begin
    stop[0] = end
    if store.kept_codes == NULL or store.num_patched[0] == 0:
        return end
    while index << store.block_shift < end:
        if index < context.sink_blocks or index >= context.sink_blocks + context.skipped:
            begin = (index << store.block_shift) + patched_from(store, block_of(context, index))
            if begin < min((index + 1) << store.block_shift, end):
                stop[0] = min((index + 1) << store.block_shift, end)
                return max(begin, position)
        index += 1
    return end


cdef void attend_span(kv_task *task, Py_ssize_t begin, Py_ssize_t end, const Py_ssize_t *starts,
                       const Py_ssize_t *stops, const kv_range *following) noexcept nogil:
    """Read the positions begin, where a tile or a block begins, to end, from codes and from float rows."""
    cdef const kv_call *call = task.call
    cdef const kv_store *store = call.store
    cdef kv_range ranges[3]   # codes up to the next patch, the newest tokens, the first tokens (prefetched long before)
    cdef kv_range patch
    cdef Py_ssize_t codes_end, position
    cdef Py_ssize_t some_floats = end, all_codes = 0, first = store.float_tokens
    cdef bint sees_first = False
    cdef Py_ssize_t *from_floats = task.from_floats
    cdef Py_ssize_t *lower = task.lower
    cdef Py_ssize_t *upper = task.upper
    cdef const kv_range *after
    cdef int i, r, step = step_of(task)
    ranges[0] = kv_range(store, call.tile, begin, end)
    if store.floats == NULL:
        attend_range(task, &ranges[0], starts, stops, following)
        return
    for r in range(task.rows):
        from_floats[r] = floats_from(store, &task.item.context, call.queries[task.tokens[r]].position)
        if max(starts[r], first, from_floats[r]) < stops[r]:
            some_floats = min(some_floats, from_floats[r])
        sees_first = sees_first or starts[r] < min(stops[r], first)
        all_codes = max(all_codes, from_floats[r])
    # Where no row reads float rows there may be none: a cache may have been cut within a block that had released them, or
    # a ring's window may have left the start. Tiles of float rows begin at multiples of their size, wherever a window
    # begins: what lies before `begin` is masked.
    ranges[0].end = min(all_codes, end)
    ranges[2] = kv_range(store.floats, call.float_tile, begin, min(first, end) if sees_first else begin)
    ranges[1] = kv_range(store.floats, call.float_tile, end, end)
    if some_floats < end:
        ranges[1].begin = max(begin, some_floats) // call.float_tile * call.float_tile
    codes_end, position = ranges[0].end, begin
    patch = kv_range(store.floats, call.float_tile, 0, 0)
    while True:
        ranges[0].end = _next_patch(store, &task.item.context, position, codes_end, &patch.end)
        if ranges[0].end >= codes_end:
            break
        patch.begin = ranges[0].end // call.float_tile * call.float_tile
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
