# cython: language_level=3, boundscheck=False, cdivision=True
"""How one task of attention loads its query rows, and reads a span of positions: tile by tile, from codes or float rows, for a few rows
or for panels of them.

The task finds the blocks of its sequence, and prefetches the next tile while it reads one.
"""
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, uint16_t
from libc.string cimport memset

from kvfast.attention.cuts cimport token_bytes
from kvfast.attention.tasks cimport (given_of, keys_of, kv_given, kv_num_blocks, kv_own, kv_pass_rows, kv_query, kv_touch, kv_traffic,
                                     own_of, panels_read_floats)
from kvfast.codec.blocks cimport (KV_TO_QUERIES, block_of, change_key_basis, k_block_at, k_offset_of, kv_context, kv_layout, piece_of,
                                  v_block_at, v_offset_of, values_of)
from kvfast.core.arrays cimport kv_rows
from kvfast.core.interrupt cimport is_stopped
from kvfast.core.kernels cimport (KV_FLOAT_ROWS, kv_ahead, kv_bends, kv_kernels, kv_panel, kv_prefetch,
                                  kv_scratch, kv_side, kv_softmax, kv_tile)
from kvfast.core.limits cimport KV_LANES, KV_MATRIX_TILE, KV_MAX_FLOAT32, KV_PIECE, KV_ROWS, KV_TILE, KV_WORD_GROUP

cdef void load(kv_task *task, const kv_rows *q) noexcept nogil:
    """Load the queries of the task's rows, in the basis of the keys."""
    cdef const kv_given *given = given_of(task)
    cdef const kv_layout *layout = given.layout
    cdef kv_own *own = own_of(task)
    cdef const kv_side *rope = &layout.v if own.rope != NULL else NULL
    cdef int i
    if given.traffic != NULL:
        return
    own.prepared = NULL
    if task.wide == NULL:
        _load_rows(task, q, &layout.k, 0, task.rows, task.narrow.rows)
        if rope != NULL:
            _load_rows(task, &given.request.rope_q, rope, 0, task.rows, own.rope.rows)
        _score_first(task, task.narrow.rows, 0, task.rows)
        return
    for i in range(kv_num_blocks(task)):
        _load_rows(task, q, &layout.k, i * KV_ROWS, KV_ROWS, task.wide.rows)
        if rope != NULL:
            _load_rows(task, &given.request.rope_q, rope, i * KV_ROWS, KV_ROWS, task.wide.rope_rows)
        task.kernels.panels[given.panel_kind].prepare(&layout.k, task.wide.rows, rope, task.wide.rope_rows, given.request.options.scale,
                                                      layout.floats != NULL, task.wide.panels + i)
        _score_first(task, task.wide.rows, i * KV_ROWS, KV_ROWS)


cdef void _score_first(const kv_task *task, const float *rows, int first, int count) noexcept nogil:
    """Find the scores of the first token, often a sink, for those of `count` rows that see it: a window may have dropped its memory."""
    cdef const kv_given *given = given_of(task)
    cdef const kv_layout *layout = given.layout.floats if given.layout.float_tokens else given.layout
    cdef kv_own *own = own_of(task)
    cdef kv_scratch *scratch = task.narrow
    cdef kv_tile keys, values
    cdef kv_ahead ahead
    cdef const kv_query *query
    cdef float most[KV_ROWS]
    cdef int r, seen = 0
    for r in range(count):
        own.firsts[first + r], most[r] = -INFINITY, KV_MAX_FLOAT32
        query = task.call.queries + own.tokens[min(first + r, task.rows - 1)]
        seen |= (query.start <= 0 or (query.sink_stop > 0 and given.request.sink_q.data == NULL)) << r
    if (not seen or task.item.first_split + task.item.splits == 1 or layout.latent or layout.decode != NULL or given.chosen != NULL
            or kv_bends(&task.options)):
        return
    _locate(task, layout, 0, KV_LANES, &keys, &values)
    keys.count = KV_LANES
    _aim(&ahead.next, &layout.k, &keys, KV_LANES, KV_LANES)
    ahead.after, ahead.lead = ahead.next, 0
    task.kernels.prepare[layout.k.dtype](&layout.k, rows, count, given.request.options.scale, &scratch.queries)
    scratch.queries.most = most  # so far above that no rounding matters
    task.kernels.scores[layout.k.dtype](&layout.k, &scratch.queries, count, &keys, &ahead, scratch.softmax.weights)
    scratch.queries.most = scratch.softmax.m
    for r in range(count):
        if seen >> r & 1:
            own.firsts[first + r] = scratch.softmax.weights[r * KV_TILE]
    if task.wide == NULL:
        own.prepared = &layout.k


cdef void begin_at_first(kv_task *task) noexcept nogil:
    """Let the largest scores of rows begin with that of the first token, which they see in an earlier split. A token far below an
    attention sink then needs no more bits. The result is the same but for rounding: a partial result may have any maximum."""
    cdef kv_own *own = own_of(task)
    cdef int r
    for r in range(task.rows):
        if task.wide == NULL and not own.sink_stops[r]:  # else it has read it in this split
            task.narrow.softmax.m[r] = own.firsts[r]
        elif not own.sink_stops[r]:
            task.wide.panels[r // KV_ROWS].m[r % KV_ROWS] = own.firsts[r]


cdef void _load_rows(const kv_task *task, const kv_rows *q, const kv_side *k, int first, int count, float *rows) noexcept nogil:
    """Load `count` rows as floats; rows beyond those of the task are 0."""
    cdef const kv_kernels *kernels = task.kernels
    cdef const kv_layout *layout = given_of(task).layout
    cdef const kv_own *own = own_of(task)
    cdef int r, given = min(count, task.rows - first)
    cdef Py_ssize_t token
    cdef float *row = rows
    for r in range(first, first + given):
        token = task.call.queries[own.tokens[r]].token
        kernels.to_float[q.dtype](q.data + token * q.token_stride + own.q_heads[r] * q.head_stride, k.head_dim, row)
        if keys_of(task).rotation.cos != NULL:
            kernels.transform(row, k.head_dim, 1, k.head_dim, &keys_of(task).rotation, row, k.head_dim)
        memset(row + k.head_dim, 0, (k.padded_dim - k.head_dim) * sizeof(float))
        row += k.padded_dim
    if k == &layout.k:
        change_key_basis(kernels, layout, task.head, KV_TO_QUERIES, rows, k.padded_dim, given, rows, k.padded_dim)
    elif k.rotated:
        kernels.rotate(rows, k.padded_dim, given, k.head_dim, rows, k.padded_dim)
    memset(row, 0, (count - given) * k.padded_dim * sizeof(float))


cdef int step_of(const kv_task *task) noexcept nogil:
    """A task may begin to read codes at multiples of this: panels where their tiles begin, as these sum tokens in groups that lie at
    the same positions for all rows; a few rows at a block, too."""
    return KV_MATRIX_TILE if task.wide != NULL else min(given_of(task).tile, given_of(task).layout.k.block_size)


cdef inline void _locate(const kv_task *task, const kv_layout *layout, Py_ssize_t position, int tile, kv_tile *k,
                         kv_tile *v) noexcept nogil:
    """Find the blocks of the tile at `position`, or its pieces in the layout of float rows.

    A position without a block is mapped to any block that exists: its tokens are masked or only prefetched, so the
    address just has to be readable.
    """
    cdef const kv_context *context = &keys_of(task).context
    cdef const kv_layout *blocks = given_of(task).layout
    cdef int shift = layout.block_shift, coarser = blocks.block_shift - shift, i
    cdef bint floats = layout != blocks  # a piece has as many tokens as the smallest block
    cdef Py_ssize_t index = position >> shift, last = (context.length - 1) >> shift, at
    cdef int32_t block, piece
    k.base = v.base = layout.base
    if own_of(task).gathered != NULL and layout.base == own_of(task).gathered:  # chosen tokens, whose blocks follow each other
        k.first = v.first = 0
        for i in range(tile // KV_LANES):
            k.at[i], v.at[i] = k_offset_of(layout, i, 0), v_offset_of(layout, i, 0)
        return
    k.first = v.first = <int>(position & (layout.k.block_size - 1))
    for i in range(max(tile >> shift, 1)):
        at = min(index + i, last) >> coarser
        if at >= context.sink_blocks:
            at = max(at, context.sink_blocks + context.skipped)
        block = block_of(context, at)
        if floats:
            piece = piece_of(blocks, block, min(index + i, last) * KV_PIECE & (blocks.k.block_size - 1))
            block = max(piece, 0)
        k.at[i] = k_offset_of(layout, block, task.head)
        v.at[i] = v_offset_of(layout, block, task.head)


cdef inline void _aim(kv_prefetch *prefetch, const kv_side *side, kv_tile *tile, int tokens,
                      Py_ssize_t count) noexcept nogil:
    """Prefetch a tile: `count` float rows, or the codes of all its `tokens`."""
    cdef Py_ssize_t token = token_bytes(side), block_tokens = min(tokens, side.block_size)
    prefetch.base, prefetch.at = tile.base, tile.at
    prefetch.offset, prefetch.piece = token * tile.first, token * block_tokens
    prefetch.bytes = token * (count if side.family == KV_FLOAT_ROWS and count < tokens else tokens)
    prefetch.scales = side.scales + side.scale_bytes * tile.first
    prefetch.scale_bytes = side.bytes - side.scales if side.means else side.scale_bytes * block_tokens


cdef void attend_range(kv_task *task, const kv_range *range_, const Py_ssize_t *starts, const Py_ssize_t *stops,
                        const kv_range *following) noexcept nogil:
    """Read a range. Row r sees its positions from starts[r] to stops[r]. The last tile prefetches the start of
    `following`, if there is one."""
    if given_of(task).traffic != NULL:
        _count(task, range_)
    elif task.wide == NULL:
        _attend_tiles(task, range_, starts, stops, following)
    elif range_.layout == given_of(task).layout.floats and not panels_read_floats(task):
        _attend_beside_panels(task, range_, starts, stops)
    else:
        _attend_panels(task, range_, starts, stops)


cdef void _attend_panels(kv_task *task, const kv_range *range_, const Py_ssize_t *starts,
                         const Py_ssize_t *stops) noexcept nogil:
    """Read a range in panels. Tiles end at multiples of their size, so that a row's result does not depend on the other rows of its
    task. Tiles of codes are those of `_attend_tiles`."""
    cdef const kv_layout *layout = range_.layout
    cdef kv_panel *panels = task.wide.panels
    cdef kv_panel *panel
    cdef kv_tile keys[2]
    cdef kv_tile values[2]
    cdef Py_ssize_t t = range_.begin, next_t, all_from = 0, all_to = range_.end
    cdef int now = 0, panels_used = kv_num_blocks(task), r, count, all_seen = 0   # tokens of a tile that all rows see
    cdef bint seen = False
    cdef int tile = min(range_.tile, task.kernels.panels[given_of(task).panel_kind].tile)
    if layout.k.family == KV_FLOAT_ROWS or values_of(layout).family == KV_FLOAT_ROWS:
        tile = KV_MATRIX_TILE
    task.wide.operands.tile = tile
    if not task.kernels.has_matrix:  # words are summed in groups that lie at the same positions for all rows
        t = t // KV_WORD_GROUP * KV_WORD_GROUP
    for r in range(task.rows):
        all_from, all_to = max(all_from, starts[r]), min(all_to, stops[r])
    for r in range(task.rows, panels_used * KV_ROWS):
        panels[panels_used - 1].start[r % KV_ROWS] = panels[panels_used - 1].stop[r % KV_ROWS] = 0
    while t < range_.end:
        if is_stopped(given_of(task).watch):
            return
        next_t = min((t // tile + 1) * tile, range_.end)
        if t <= range_.begin:
            _locate(task, layout, t, tile, &keys[now], &values[now])
        keys[now].count = values[now].count = count = <int>(next_t - t)
        if next_t < range_.end:
            _locate(task, layout, next_t, tile, &keys[1 - now], &values[1 - now])
            keys[1 - now].count = values[1 - now].count = <int>min(<Py_ssize_t>tile, range_.end - next_t)
        else:
            keys[1 - now], values[1 - now] = keys[now], values[now]
            keys[1 - now].first = keys[1 - now].count = values[1 - now].first = values[1 - now].count = 0
        if all_from > t or t + count > all_to or count != all_seen:
            seen, all_seen = False, 0
            for r in range(task.rows):
                panel = panels + r // KV_ROWS
                panel.start[r % KV_ROWS] = <int>max(<Py_ssize_t>0, min(starts[r] - t, <Py_ssize_t>count))
                panel.stop[r % KV_ROWS] = <int>max(<Py_ssize_t>0, min(stops[r] - t, <Py_ssize_t>count))
                seen = seen or panel.start[r % KV_ROWS] < panel.stop[r % KV_ROWS]
            if all_from <= t and t + count <= all_to:
                all_seen = count
        if seen:
            task.kernels.panels[given_of(task).panel_kind].attend(
                &layout.k, &layout.v, &keys[now], &values[now], &keys[1 - now], &values[1 - now], t,
                &task.wide.operands, panels, panels_used)
        now = 1 - now
        t = next_t


cdef void _attend_beside_panels(kv_task *task, const kv_range *range_, const Py_ssize_t *starts,
                                const Py_ssize_t *stops) noexcept nogil:
    """Read float rows next to codes for the rows of panels, with vectors. Panels would round them otherwise, and a query's result would
    depend on the number of queries."""
    cdef kv_task part = task[0]
    cdef kv_range seen = range_[0]
    cdef kv_panel *panel = task.wide.panels
    cdef const kv_side *k = &range_.layout.k
    cdef int _, r
    part.wide = NULL
    for _ in range(kv_num_blocks(task)):
        seen.begin, seen.end = range_.end, range_.begin
        for r in range(panel.rows):
            if starts[r] < stops[r]:
                seen.begin, seen.end = min(seen.begin, starts[r]), max(seen.end, stops[r])
        seen.begin, seen.end = max(seen.begin // KV_PIECE * KV_PIECE, range_.begin), min(seen.end, range_.end)
        if seen.begin < seen.end:
            part.rows, part.options, own_of(task).prepared = panel.rows, panel.options, k
            task.kernels.prepare[k.dtype](k, panel.queries, panel.rows, given_of(task).request.options.scale, &task.narrow.queries)
            kv_pass_rows(task, panel, False)
            _attend_tiles(&part, &seen, starts, stops, NULL)
            kv_pass_rows(task, panel, True)
        panel, starts, stops = panel + 1, starts + KV_ROWS, stops + KV_ROWS


cdef void _attend_tiles(kv_task *task, const kv_range *range_, const Py_ssize_t *starts, const Py_ssize_t *stops,
                        const kv_range *following) noexcept nogil:
    """Read a range with vectors. Tiles end at multiples of their size, so that a row's result does not depend on the other rows of
    its task. The first one may begin later: at a block, after tokens that no row sees."""
    cdef const kv_kernels *kernels = task.kernels
    cdef const kv_layout *layout = range_.layout
    cdef const kv_layout *next_layout = layout
    cdef const kv_side *k = &layout.k
    cdef const kv_side *v = &layout.v
    cdef kv_own *own = own_of(task)
    cdef kv_scratch *scratch = task.narrow
    cdef kv_softmax *state = &scratch.softmax
    cdef kv_ahead ahead
    cdef kv_tile keys[2]
    cdef kv_tile values[2]
    cdef int now = 0, r, count, tile = range_.tile, next_tile = tile
    cdef int first[16]
    cdef int last[16]
    cdef Py_ssize_t t = range_.begin, end = range_.end, next_t, next_count
    cdef Py_ssize_t k_bytes = token_bytes(k) * tile, v_bytes = token_bytes(v) * tile, lead = max(k_bytes, v_bytes)
    # A pass can only prefetch the other side where whole panels of one fit a piece of the other, and latent rows are one side alone.
    cdef bint own_side = layout.latent or (v_bytes > 0 and lead % min(k_bytes, v_bytes) != 0)
    cdef kv_tile *next_keys
    cdef kv_tile *next_values
    cdef bint grows = not layout.latent and not kv_bends(&task.options)
    if own.prepared != k:
        kernels.prepare[k.dtype](k, scratch.rows, task.rows, given_of(task).request.options.scale, &scratch.queries)
        if own.rope != NULL:
            kernels.prepare[v.dtype](v, own.rope.rows, task.rows, given_of(task).request.options.scale, &own.rope.queries)
        own.prepared = k
    if grows:
        scratch.queries.most = state.m
    _locate(task, layout, t, tile, &keys[0], &values[0])
    while t < end:
        if is_stopped(given_of(task).watch):
            break
        next_t = (t // tile + 1) * tile
        count = <int>(min(next_t, end) - t)
        keys[now].count = values[now].count = count
        next_keys, next_values = &keys[1 - now], &values[1 - now]
        next_count = max(end - next_t, <Py_ssize_t>1)
        if next_t < end and keys[now].first + (next_t - t) < k.block_size:  # the next tile is in the same block
            next_keys.base = next_values.base = layout.base
            next_keys.at[0], next_values.at[0] = keys[now].at[0], values[now].at[0]
            next_keys.first = next_values.first = keys[now].first + <int>(next_t - t)
        elif next_t < end or following == NULL:
            _locate(task, layout, next_t if next_t < end else t, tile, next_keys, next_values)
        else:
            next_layout = following.layout
            next_tile, next_count = following.tile, following.end - following.begin
            _locate(task, next_layout, following.begin, next_tile, next_keys, next_values)
        scratch.queries.whole = 0
        for r in range(task.rows):
            first[r] = <int>max(<Py_ssize_t>0, min(starts[r] - t, <Py_ssize_t>count))
            last[r] = <int>max(<Py_ssize_t>0, min(stops[r] - t, <Py_ssize_t>count))
            if last[r] - first[r] == tile and grows:
                scratch.queries.whole |= 1 << r
        if layout.decode != NULL:
            _decode(task, k, layout.k_codes, t, count, &keys[now], &ahead)
        elif own_side:
            _aim(&ahead.next, &next_layout.k, next_keys, next_tile, next_count)
            ahead.after, ahead.lead = ahead.next, 0
        else:
            _aim(&ahead.next, v, &values[now], <int>(next_t - t), count)
            _aim(&ahead.after, &next_layout.k, next_keys, next_tile, next_count)
            ahead.lead = lead - k_bytes
        kernels.scores[k.dtype](k, &scratch.queries, task.rows, &keys[now], &ahead, state.weights)
        if own.rope != NULL:
            kernels.scores[v.dtype](v, &own.rope.queries, task.rows, &values[now], &ahead, own.rope.scores)
            for r in range(task.rows):
                kernels.scale_add(state.weights + r * KV_TILE, 1.0, own.rope.scores + r * KV_TILE, 1.0,
                                  (count + KV_LANES - 1) // KV_LANES * KV_LANES)
        kernels.softmax(state, task.rows, count, first, last, t, &task.options)
        if layout.latent:  # the rows are in the processor's cache, and now they are values
            kernels.accumulate_latent[k.dtype](k, state, task.rows, &keys[now], &ahead, scratch.acc)
        else:
            if layout.decode != NULL:
                _decode(task, v, layout.v_codes, t, count, &values[now], &ahead)
            elif own_side:
                _aim(&ahead.next, &next_layout.v, next_values, next_tile, next_count)
                ahead.after = ahead.next
            else:
                ahead.next = ahead.after
                _aim(&ahead.after, &next_layout.v, next_values, next_tile, next_count)
                ahead.lead = lead - v_bytes
            kernels.accumulate[v.dtype](v, state, task.rows, &values[now], &ahead, scratch.acc)
        now = 1 - now
        t = next_t


cdef void add_scores(kv_task *task, Py_ssize_t begin, Py_ssize_t end, const float *weights, float *sums) noexcept nogil:
    """Add to the sum of each position the weighted scores of the task's rows, those above 0; see `indexer`. A NaN stays one."""
    cdef const kv_kernels *kernels = task.kernels
    cdef const kv_layout *layout = given_of(task).layout
    cdef kv_scratch *scratch = task.narrow
    cdef kv_ahead ahead
    cdef kv_tile keys[2]
    cdef kv_tile values   # there are none
    cdef Py_ssize_t t = begin // given_of(task).tile * given_of(task).tile, next_t
    cdef int now = 0, r, i, tile = given_of(task).tile
    cdef const float *scores
    cdef float score
    cdef float most[KV_ROWS]
    kernels.prepare[layout.k.dtype](&layout.k, scratch.rows, task.rows, given_of(task).request.options.scale, &scratch.queries)
    for r in range(task.rows):  # as if all scores were far below one before: no exp makes their rounding larger
        most[r] = KV_MAX_FLOAT32
    scratch.queries.most = most
    _locate(task, layout, t, tile, &keys[0], &values)
    while t < end and not is_stopped(given_of(task).watch):
        next_t = min(t + tile, end)
        keys[now].count = <int>(next_t - t)
        _locate(task, layout, next_t, tile, &keys[1 - now], &values)
        _aim(&ahead.next, &layout.k, &keys[1 - now], tile, tile)
        ahead.after, ahead.lead = ahead.next, 0
        kernels.scores[layout.k.dtype](&layout.k, &scratch.queries, task.rows, &keys[now], &ahead, scratch.softmax.weights)
        for r in range(task.rows):
            scores = scratch.softmax.weights + r * KV_TILE
            for i in range(keys[now].count):
                score = scores[i]
                sums[i] += weights[r] * (0 if score <= 0 else score)
        sums += keys[now].count
        now = 1 - now
        t = next_t


cdef inline void _decode(const kv_task *task, const kv_side *side, const void *codes, Py_ssize_t t, int count, kv_tile *tile,
                         kv_ahead *ahead) noexcept nogil:
    """Decode a tile that has no rows yet into the processor's cache, to float16. What its rows are padded with is 0, as are the rows of
    a whole tile after the last token."""
    cdef const kv_given *given = given_of(task)
    cdef uint16_t *rows = own_of(task).decoded
    if side.padded_dim > side.head_dim or count < given.tile:
        memset(rows, 0, given.tile * side.row_stride)
    given.layout.decode(task.kernels, codes, side, task.head, t, count, rows, &ahead.next)
    tile.base, tile.at[0], tile.first = <const char *>rows, 0, 0
    ahead.after, ahead.lead = ahead.next, 0


cdef void _count(const kv_task *task, const kv_range *range_) noexcept nogil:
    """Count the bytes that reading a range takes: whole lane tiles of codes, and the statistics of their blocks."""
    cdef kv_traffic *traffic = given_of(task).traffic
    cdef const kv_side *side
    cdef Py_ssize_t tokens, blocks
    cdef int i
    for i in range(2):
        side = &range_.layout.v if i else &range_.layout.k
        tokens = range_.end - range_.begin
        if side.family == KV_FLOAT_ROWS:
            traffic.floats += tokens * side.row_stride
        else:
            tokens = (tokens + KV_LANES - 1) // KV_LANES * KV_LANES
            traffic.codes += tokens * token_bytes(side)
            traffic.scales += tokens * side.scale_bytes
            if side.means:
                blocks = (range_.end - 1) // side.block_size - range_.begin // side.block_size + 1
                traffic.scales += blocks * (side.bytes - side.means)
        traffic.operations += 2.0 * task.rows * tokens * side.padded_dim * (2 if range_.layout.latent and i == 0 else 1)


cdef void touch(const kv_task *task, Py_ssize_t position, Py_ssize_t tokens) noexcept nogil:
    """Prefetch the keys of `tokens` tokens from a position on, as far as its block goes."""
    cdef const kv_layout *layout = given_of(task).layout
    cdef kv_tile k, v
    cdef Py_ssize_t size = token_bytes(&layout.k)
    _locate(task, layout, position, given_of(task).tile, &k, &v)
    kv_touch(layout.base + k.at[0] + k.first * size, min(tokens, layout.k.block_size - k.first) * size)


cdef void touch_first_floats(const kv_task *task) noexcept nogil:
    """Prefetch the float rows at the start of the sequence, if it still has them."""
    cdef const kv_layout *layout = given_of(task).layout
    cdef const kv_context *context = &keys_of(task).context
    cdef int32_t piece
    if context.skipped and not context.sink_blocks:
        return
    piece = piece_of(layout, block_of(context, 0), 0)
    if piece < 0:
        return
    kv_touch(k_block_at(layout.floats, piece, task.head), layout.float_tokens * layout.floats.k.row_stride)
    kv_touch(v_block_at(layout.floats, piece, task.head), layout.float_tokens * layout.floats.v.row_stride)


cdef void touch_sinks(const kv_task *task, Py_ssize_t tokens) noexcept nogil:
    """Prefetch the keys and values of the sink tokens. They start a block, and their values are spread over its lane
    tiles."""
    cdef const kv_layout *layout = given_of(task).layout
    cdef const kv_side *v = &layout.v
    cdef const char *block = v_block_at(layout, block_of(&keys_of(task).context, 0), task.head)
    cdef Py_ssize_t lane_tiles = 1 if v.family == KV_FLOAT_ROWS else v.padded_dim // KV_LANES
    cdef Py_ssize_t stride = token_bytes(v) * v.block_size // lane_tiles, i
    tokens = min((tokens + KV_LANES - 1) // KV_LANES * KV_LANES, <Py_ssize_t>v.block_size)
    touch(task, 0, tokens)
    for i in range(lane_tiles):
        kv_touch(block + i * stride, stride // v.block_size * tokens)
    kv_touch(k_block_at(layout, block_of(&keys_of(task).context, 0), task.head) + layout.k.scales, tokens * 4)
    kv_touch(block + v.scales, tokens * 4)
