# cython: language_level=3, boundscheck=False, cdivision=True
"""How one task of attention reads a span of positions: tile by tile, from codes or float rows, for a few query
rows or for panels of them.

The task finds the blocks of its sequence, and prefetches the next tile while it reads one.
"""
from libc.stdint cimport int32_t
from libc.string cimport memcpy, memset

from kvfast.attention.tile_size cimport token_bytes
from kvfast.codec.blocks cimport block_of, k_block_at, k_offset_of, kv_context, kv_store, piece_of, v_block_at, v_offset_of
from kvfast.core.interrupt cimport is_stopped
from kvfast.core.kernels cimport (KV_FLOAT_ROWS, KV_INT8, int8_by_side, kv_ahead, kv_bends, kv_kernels, kv_panel, kv_prefetch,
                                  kv_scratch, kv_side, kv_softmax, kv_tile)
from kvfast.core.limits cimport KV_LANES, KV_MATRIX_TILE, KV_PIECE, KV_ROWS, KV_TILE, KV_WORD_GROUP

cdef extern from *:
    """
    #define kv_touch(address) __builtin_prefetch(address)
    """
    void kv_touch(const void *address) noexcept nogil

cdef int step_of(const kv_task *task) noexcept nogil:
    """A task may begin to read codes at multiples of this: panels where their tiles begin, as these sum tokens in groups that lie at
    the same positions for all rows; a few rows at a block, too."""
    return KV_MATRIX_TILE if task.wide != NULL else min(task.call.tile, task.call.store.k.block_size)


cdef inline void _locate(const kv_task *task, const kv_store *store, Py_ssize_t position, int tile, kv_tile *k,
                         kv_tile *v) noexcept nogil:
    """Find the blocks of the tile at `position`, or its pieces in the store of float rows.

    A position without a block is mapped to any block that exists: its tokens are masked or only prefetched, so the
    address just has to be readable.
    """
    cdef const kv_context *context = &task.item.context
    cdef const kv_store *blocks = task.call.store
    cdef int shift = store.block_shift, coarser = blocks.block_shift - shift, i
    cdef bint floats = store != blocks   # a piece has as many tokens as the smallest block
    cdef Py_ssize_t index = position >> shift, last = (context.length - 1) >> shift, at
    cdef int32_t block, piece
    k.base = v.base = store.base
    k.first = v.first = <int>(position & (store.k.block_size - 1))
    for i in range(max(tile >> shift, 1)):
        at = min(index + i, last) >> coarser
        if at >= context.sink_blocks:
            at = max(at, context.sink_blocks + context.skipped)
        block = block_of(context, at)
        if floats:
            piece = piece_of(blocks, block, min(index + i, last) * KV_PIECE & (blocks.k.block_size - 1))
            block = max(piece, 0)
        k.at[i] = k_offset_of(store, block, task.head)
        v.at[i] = v_offset_of(store, block, task.head)


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
    if task.call.traffic != NULL:
        _count(task, range_)
    elif task.wide == NULL:
        _attend_tiles(task, range_, starts, stops, following)
    else:
        _attend_panels(task, range_, starts, stops)


cdef void copy_rows(const kv_softmax *state, const float *acc, Py_ssize_t dim, unsigned rows, kv_panel *panel) noexcept nogil:
    """Copy the running softmax of the rows whose bit is set to a panel."""
    cdef int r
    cdef Py_ssize_t i
    for r in range(panel.rows):
        if not rows >> r & 1:
            continue
        for i in range(dim // KV_LANES):
            memcpy(panel.acc + (i * KV_ROWS + r) * KV_LANES, acc + r * dim + i * KV_LANES, KV_LANES * sizeof(float))
        panel.m[r], panel.l[r], panel.noise[r] = state.m[r], state.l[r], state.noise[r]


cdef void _attend_panels(kv_task *task, const kv_range *range_, const Py_ssize_t *starts,
                         const Py_ssize_t *stops) noexcept nogil:
    """Read a range in panels. Tiles end at multiples of KV_MATRIX_TILE, so that a row's result does not depend on
    the other rows of its task."""
    cdef const kv_store *store = range_.store
    cdef kv_panel *panels = task.wide.panels
    cdef kv_panel *panel
    cdef kv_tile keys[2]
    cdef kv_tile values[2]
    cdef Py_ssize_t t = range_.begin, next_t, all_from = 0, all_to = range_.end
    cdef int now = 0, panels_used = num_panels(task), r, count, all_seen = 0   # tokens of a tile that all rows see
    cdef bint seen = False
    if not task.call.kernels.has_matrix:  # words are summed in groups that lie at the same positions for all rows
        t = t // KV_WORD_GROUP * KV_WORD_GROUP
    for r in range(task.rows):
        all_from, all_to = max(all_from, starts[r]), min(all_to, stops[r])
    for r in range(task.rows, panels_used * KV_ROWS):
        panels[panels_used - 1].start[r % KV_ROWS] = panels[panels_used - 1].stop[r % KV_ROWS] = 0
    while t < range_.end:
        if is_stopped(task.call.watch):
            return
        next_t = min((t // KV_MATRIX_TILE + 1) * KV_MATRIX_TILE, range_.end)
        if t <= range_.begin:
            _locate(task, store, t, KV_MATRIX_TILE, &keys[now], &values[now])
        keys[now].count = values[now].count = count = <int>(next_t - t)
        if next_t < range_.end:
            _locate(task, store, next_t, KV_MATRIX_TILE, &keys[1 - now], &values[1 - now])
            keys[1 - now].count = values[1 - now].count = <int>min(<Py_ssize_t>KV_MATRIX_TILE, range_.end - next_t)
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
            task.call.kernels.attend_panels[task.call.wide_kind](
                &store.k, &store.v, &keys[now], &values[now], &keys[1 - now], &values[1 - now], t,
                &task.wide.operands, panels, panels_used)
        now = 1 - now
        t = next_t


cdef void _attend_tiles(kv_task *task, const kv_range *range_, const Py_ssize_t *starts, const Py_ssize_t *stops,
                        const kv_range *following) noexcept nogil:
    """Read a range with vectors. Tiles end at multiples of their size, so that a row's result does not depend on the other rows of
    its task. The first one may begin later: at a block, after tokens that no row sees."""
    cdef const kv_kernels *kernels = task.call.kernels
    cdef const kv_store *store = range_.store
    cdef const kv_store *next_store = store
    cdef const kv_side *k = &store.k
    cdef const kv_side *v = &store.v
    cdef kv_scratch *scratch = &task.scratch
    cdef kv_softmax *state = &scratch.softmax
    cdef kv_ahead ahead
    cdef kv_tile keys[2]
    cdef kv_tile values[2]
    cdef int now = 0, r, count, tile = range_.tile, next_tile = tile
    cdef int first[16]
    cdef int last[16]
    cdef Py_ssize_t t = range_.begin, end = range_.end, next_t, next_count
    cdef Py_ssize_t k_bytes = token_bytes(k) * tile, v_bytes = token_bytes(v) * tile, lead = max(k_bytes, v_bytes)
    # A pass can only prefetch the other side where whole panels of one fit a piece of the other. Latent rows may have no other side.
    cdef bint own_side = (int8_by_side() and k.dtype == KV_INT8 and v.dtype == KV_INT8) or (
        v_bytes > 0 and lead % min(k_bytes, v_bytes) != 0)
    cdef kv_tile *next_keys
    cdef kv_tile *next_values
    kernels.prepare[k.dtype](k, scratch.rows, task.rows, task.call.request.scale, &scratch.queries)
    if not store.latent and not kv_bends(&task.options):
        scratch.queries.most = state.m
    if task.rope != NULL:
        kernels.prepare[v.dtype](v, task.rope.rows, task.rows, task.call.request.scale, &task.rope.queries)
    _locate(task, store, t, tile, &keys[0], &values[0])
    while t < end:
        if is_stopped(task.call.watch):
            break
        next_t = (t // tile + 1) * tile
        count = <int>(min(next_t, end) - t)
        keys[now].count = values[now].count = count
        next_keys, next_values = &keys[1 - now], &values[1 - now]
        next_count = max(end - next_t, <Py_ssize_t>1)
        if next_t < end and keys[now].first + (next_t - t) < k.block_size:  # the next tile is in the same block
            next_keys.base = next_values.base = store.base
            next_keys.at[0], next_values.at[0] = keys[now].at[0], values[now].at[0]
            next_keys.first = next_values.first = keys[now].first + <int>(next_t - t)
        elif next_t < end or following == NULL:
            _locate(task, store, next_t if next_t < end else t, tile, next_keys, next_values)
        else:
            next_store = following.store
            next_tile, next_count = following.tile, following.end - following.begin
            _locate(task, next_store, following.begin, next_tile, next_keys, next_values)
        for r in range(task.rows):
            first[r] = <int>max(<Py_ssize_t>0, min(starts[r] - t, <Py_ssize_t>count))
            last[r] = <int>max(<Py_ssize_t>0, min(stops[r] - t, <Py_ssize_t>count))
        if store.decode != NULL:
            _attend_decoded(task, store, t, count, first, last)
        elif store.latent:
            _aim(&ahead.next, k, next_keys, tile, next_count)
            ahead.after, ahead.lead = ahead.next, 0
            _attend_latent(task, store, &keys[now], &values[now], first, last, t, &ahead)
        else:
            if own_side:
                _aim(&ahead.next, &next_store.k, next_keys, next_tile, next_count)
                ahead.after, ahead.lead = ahead.next, 0
            else:
                _aim(&ahead.next, v, &values[now], <int>(next_t - t), count)
                _aim(&ahead.after, &next_store.k, next_keys, next_tile, next_count)
                ahead.lead = lead - k_bytes
            kernels.scores[k.dtype](k, &scratch.queries, task.rows, &keys[now], &ahead, state.weights)
            kernels.softmax(state, task.rows, count, first, last, t, &task.options)
            if own_side:
                _aim(&ahead.next, &next_store.v, next_values, next_tile, next_count)
                ahead.after = ahead.next
            else:
                ahead.next = ahead.after
                _aim(&ahead.after, &next_store.v, next_values, next_tile, next_count)
                ahead.lead = lead - v_bytes
            kernels.accumulate[v.dtype](v, state, task.rows, &values[now], &ahead, scratch.acc)
        now = 1 - now
        t = next_t


cdef void _attend_latent(kv_task *task, const kv_store *store, const kv_tile *latents, const kv_tile *rope, const int *first,
                         const int *last, Py_ssize_t position, const kv_ahead *ahead) noexcept nogil:
    """Read one tile of latent rows: first as keys, then as values, when they are in the processor's cache."""
    cdef const kv_kernels *kernels = task.call.kernels
    cdef const kv_side *k = &store.k
    cdef kv_scratch *scratch = &task.scratch
    cdef kv_softmax *state = &scratch.softmax
    cdef int r
    kernels.scores[k.dtype](k, &scratch.queries, task.rows, latents, ahead, state.weights)
    if task.rope != NULL:
        kernels.scores[store.v.dtype](&store.v, &task.rope.queries, task.rows, rope, ahead, task.rope.scores)
        for r in range(task.rows):
            kernels.scale_add(state.weights + r * KV_TILE, 1.0, task.rope.scores + r * KV_TILE, 1.0,
                              (latents.count + KV_LANES - 1) // KV_LANES * KV_LANES)
    kernels.softmax(state, task.rows, latents.count, first, last, position, &task.options)
    kernels.accumulate_latent(k, state, task.rows, latents, ahead, scratch.acc)


cdef void _attend_decoded(kv_task *task, const kv_store *store, Py_ssize_t t, int count, const int *first,
                          const int *last) noexcept nogil:
    """Read one tile that has no rows yet: its keys are decoded to float16 into the processor's cache, and then its values."""
    cdef const kv_kernels *kernels = task.call.kernels
    cdef kv_scratch *scratch = &task.scratch
    cdef kv_softmax *state = &scratch.softmax
    cdef kv_tile tile
    cdef kv_ahead ahead
    tile.base, tile.at[0], tile.first, tile.count = <const char *>task.decoded, 0, 0, count
    ahead.lead = 0
    _decode(task, &store.k, store.k_codes, t, count, &ahead)
    kernels.scores[store.k.dtype](&store.k, &scratch.queries, task.rows, &tile, &ahead, state.weights)
    kernels.softmax(state, task.rows, count, first, last, t, &task.options)
    _decode(task, &store.v, store.v_codes, t, count, &ahead)
    kernels.accumulate[store.v.dtype](&store.v, state, task.rows, &tile, &ahead, scratch.acc)


cdef inline void _decode(const kv_task *task, const kv_side *side, const void *codes, Py_ssize_t t, int count,
                         kv_ahead *ahead) noexcept nogil:
    """Decode a tile of a side. What its rows are padded with is 0, as are the rows of a whole tile after the last token."""
    if side.padded_dim > side.head_dim or count < task.call.tile:
        memset(task.decoded, 0, task.call.tile * side.row_stride)
    task.call.store.decode(task.call.kernels, codes, side, task.head, t, count, task.decoded, &ahead.next)
    ahead.after = ahead.next


cdef void _count(const kv_task *task, const kv_range *range_) noexcept nogil:
    """Count the bytes that reading a range takes: whole lane tiles of codes, and the statistics of their blocks."""
    cdef kv_traffic *traffic = task.call.traffic
    cdef const kv_side *side
    cdef Py_ssize_t tokens, blocks
    cdef int i
    for i in range(2):
        side = &range_.store.v if i else &range_.store.k
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
        traffic.operations += 2.0 * task.rows * tokens * side.padded_dim * (2 if range_.store.latent and i == 0 else 1)


cdef void touch(const kv_task *task, Py_ssize_t position, Py_ssize_t tokens) noexcept nogil:
    """Prefetch the keys of `tokens` tokens from a position on, as far as its block goes."""
    cdef const kv_store *store = task.call.store
    cdef kv_tile k, v
    cdef Py_ssize_t size = token_bytes(&store.k), i
    _locate(task, store, position, task.call.tile, &k, &v)
    for i in range(0, min(tokens, store.k.block_size - k.first) * size, 64):
        kv_touch(store.base + k.at[0] + k.first * size + i)


cdef void touch_first_floats(const kv_task *task) noexcept nogil:
    """Prefetch the float rows at the start of the sequence, if it still has them."""
    cdef const kv_store *store = task.call.store
    cdef const kv_context *context = &task.item.context
    cdef int32_t piece
    cdef Py_ssize_t i
    if context.skipped and not context.sink_blocks:
        return
    piece = piece_of(store, block_of(context, 0), 0)
    if piece < 0:
        return
    for i in range(0, store.float_tokens * store.floats.k.row_stride, 64):
        kv_touch(k_block_at(store.floats, piece, task.head) + i)
    for i in range(0, store.float_tokens * store.floats.v.row_stride, 64):
        kv_touch(v_block_at(store.floats, piece, task.head) + i)


cdef void touch_sinks(const kv_task *task, Py_ssize_t tokens) noexcept nogil:
    """Prefetch the keys and values of the sink tokens. They start a block, and their values are spread over its lane
    tiles."""
    cdef const kv_store *store = task.call.store
    cdef const kv_side *v = &store.v
    cdef const char *block = v_block_at(store, block_of(&task.item.context, 0), task.head)
    cdef Py_ssize_t lane_tiles = 1 if v.family == KV_FLOAT_ROWS else v.padded_dim // KV_LANES
    cdef Py_ssize_t stride = token_bytes(v) * v.block_size // lane_tiles, i, j
    tokens = min((tokens + KV_LANES - 1) // KV_LANES * KV_LANES, <Py_ssize_t>v.block_size)
    touch(task, 0, tokens)
    for i in range(lane_tiles):
        for j in range(0, stride // v.block_size * tokens, 64):
            kv_touch(block + i * stride + j)
    for j in range(0, tokens * 4, 64):
        kv_touch(k_block_at(store, block_of(&task.item.context, 0), task.head) + store.k.scales + j)
        kv_touch(block + v.scales + j)
