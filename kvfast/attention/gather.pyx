# cython: language_level=3, boundscheck=False, cdivision=True
"""How a task reads chosen tokens: it copies their stored bytes into one tile, and the usual kernels read this tile.

A line of the memory holds a piece of 16 keys, or of 4 to 16 values (``simd/kernels.h``). So a single token touches as many lines of
keys as 16 neighbours do together, while KV_LANES chosen tokens that lie in the same lines are copied line by line.
"""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from kvfast.attention.cuts cimport token_bytes
from kvfast.attention.source cimport floats_from, open_rows
from kvfast.attention.tasks cimport (KV_CODES, KV_DECODED_KEYS, KV_NUM_KINDS, KV_OWN_FLOATS, given_of, keys_of, kv_chosen, kv_gathered,
                                     kv_given, kv_own, kv_task, kv_touch, kv_traffic, own_of)
from kvfast.attention.tiles cimport attend_range, kv_range, load
from kvfast.codec.blocks cimport block_of, k_block_at, kv_context, kv_layout, patched_from, piece_of, v_block_at
from kvfast.core.interrupt cimport is_stopped
from kvfast.core.kernels cimport KV_FLOAT_ROWS, KV_PACKED_CODES, kv_dtypes, kv_kernels, kv_side
from kvfast.core.limits cimport KV_LANES, KV_PIECE, KV_TASK_ROWS

cdef enum:
    # Tokens or runs that are prefetched before they are copied (bench/bench_chosen.py).
    AHEAD = 2


cdef Py_ssize_t _ZEROS[KV_TASK_ROWS]


cdef void read_chosen(kv_task *task) noexcept nogil:
    """Read the chosen tokens of the task's query that are in its split, which counts tokens; see `kv_source`."""
    cdef const kv_given *given = given_of(task)
    cdef const kv_chosen *chosen = given.chosen
    cdef kv_own *own = own_of(task)
    cdef const int64_t *positions
    cdef Py_ssize_t begin = task.begin, sinks_end = task.begin, at, end
    if not task.loaded:
        open_rows(task)
    at = own.tokens[0] * chosen.heads + (task.head if chosen.heads > 1 else 0)
    end = min(task.end, <Py_ssize_t>chosen.counts[at])
    positions = chosen.positions + chosen.firsts[at]
    if given.request.sink_q.data != NULL:
        while sinks_end < end and positions[sinks_end] < task.call.queries[own.tokens[0]].sink_stop:
            sinks_end += 1
    if begin < sinks_end:
        load(task, &given.request.sink_q)
        _read_positions(task, positions + begin, sinks_end - begin)
    if begin < sinks_end or not task.loaded:
        load(task, &given.request.q)
    _read_positions(task, positions + sinks_end, end - sinks_end)


cdef void _read_positions(kv_task *task, const int64_t *positions, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t from_floats = floats_from(given_of(task).layout, &keys_of(task).context,
                                              task.call.queries[own_of(task).tokens[0]].position)
    cdef int kind
    for kind in range(KV_NUM_KINDS):
        if given_of(task).chosen.kinds[kind].tile:
            _read_kind(task, kind, positions, count, from_floats)


cdef void _read_kind(kv_task *task, int kind, const int64_t *positions, Py_ssize_t count, Py_ssize_t from_floats) noexcept nogil:
    """Read those of `count` tokens that are of a kind, tile by tile."""
    cdef kv_gathered gathered = given_of(task).chosen.kinds[kind]
    cdef const kv_layout *layout = given_of(task).layout
    cdef const kv_context *context = &keys_of(task).context
    cdef Py_ssize_t i = 0, size, next_i
    cdef int filled = 0
    gathered.layout.base, gathered.layout.slabs = own_of(task).gathered, &gathered.slab
    own_of(task).prepared = NULL
    while i < count and not is_stopped(given_of(task).watch):
        size = _run_at(layout, context, positions + i, count - i, from_floats)
        if _kind_of(layout, context, positions[i], size, from_floats) == kind:
            if given_of(task).traffic != NULL:
                _count(task, kind, positions + i, size, i > 0)
            else:
                if filled + size > gathered.tile or (size == KV_LANES and filled % KV_LANES):
                    _attend(task, &gathered, filled)
                    filled = 0
                next_i = min(i + AHEAD * size, count - 1)
                _fetch(layout, context, task.head, positions[next_i], size)
                _copy(task, &gathered.layout, kind, positions[i], size, filled)
                filled += <int>size
        i += size
    if filled:
        _attend(task, &gathered, filled)


cdef inline bint _has_floats(const kv_layout *layout, const kv_context *context, Py_ssize_t position,
                             Py_ssize_t from_floats) noexcept nogil:
    """Whether a token is read from its float row."""
    cdef Py_ssize_t index = position >> layout.block_shift
    if layout.floats == NULL:
        return False
    return (position < layout.float_tokens or position >= from_floats
            or position - (index << layout.block_shift) >= patched_from(layout, block_of(context, index)))


cdef inline Py_ssize_t _run_at(const kv_layout *layout, const kv_context *context, const int64_t *positions, Py_ssize_t count,
                               Py_ssize_t from_floats) noexcept nogil:
    """KV_LANES if KV_LANES tokens lie in the same lines and are read from the same rows, else 1. Positions rise."""
    cdef Py_ssize_t first = positions[0], last = first + KV_LANES - 1
    if (first % KV_LANES or count < KV_LANES or positions[KV_LANES - 1] != last
            or (layout.floats != NULL and (first < layout.float_tokens or _has_floats(layout, context, first, from_floats)
                                           != _has_floats(layout, context, last, from_floats)))):
        return 1
    return KV_LANES


cdef inline int _kind_of(const kv_layout *layout, const kv_context *context, Py_ssize_t position, Py_ssize_t size,
                         Py_ssize_t from_floats) noexcept nogil:
    """The rows or codes that a token or a run is read from. A run of codes takes the statistics of its block along."""
    if _has_floats(layout, context, position, from_floats):
        return KV_OWN_FLOATS
    return KV_DECODED_KEYS if layout.k.means and size == 1 else KV_CODES


cdef void _copy(const kv_task *task, const kv_layout *gathered, int kind, Py_ssize_t position, Py_ssize_t size,
                int slot) noexcept nogil:
    """Copy a token or a run to a slot of the tile."""
    cdef const kv_kernels *kernels = task.kernels
    cdef const kv_layout *layout = given_of(task).layout
    cdef int32_t block = block_of(&keys_of(task).context, position >> layout.block_shift)
    cdef int offset = <int>(position & (layout.k.block_size - 1)), first = slot % KV_LANES
    cdef char *k = k_block_at(gathered, slot // KV_LANES, 0)
    cdef char *v = v_block_at(gathered, slot // KV_LANES, 0)
    cdef const char *from_k
    cdef const char *from_v
    if kind == KV_OWN_FLOATS:
        block, offset = piece_of(layout, block, offset), offset % KV_PIECE
        layout = layout.floats
    from_k, from_v = k_block_at(layout, block, task.head), v_block_at(layout, block, task.head)
    if size == KV_LANES:
        kernels.copy_run(&layout.k, from_k, offset, &gathered.k, k, False)
        kernels.copy_run(&layout.v, from_v, offset, &gathered.v, v, True)
        return
    if first == 0:  # what no token fills must be numbers
        memset(k, 0, gathered.k.bytes)
        memset(v, 0, gathered.v.bytes)
    if kind == KV_DECODED_KEYS:
        kernels.decode_k(&layout.k, from_k, offset, <float *>(k + first * gathered.k.row_stride))
    else:
        kernels.copy_token(&layout.k, from_k, offset, &gathered.k, k, first, False)
    kernels.copy_token(&layout.v, from_v, offset, &gathered.v, v, first, True)


cdef void _attend(kv_task *task, const kv_gathered *gathered, int count) noexcept nogil:
    """Read a tile of `count` tokens, all of which the rows of the task see."""
    cdef kv_range tile = kv_range(&gathered.layout, gathered.tile, 0, count)
    cdef Py_ssize_t *stops = own_of(task).stops
    cdef int filled = (count + KV_LANES - 1) // KV_LANES, r
    memset(k_block_at(&gathered.layout, filled, 0), 0, (gathered.tile // KV_LANES - filled) * gathered.layout.k.bytes)
    memset(v_block_at(&gathered.layout, filled, 0), 0, (gathered.tile // KV_LANES - filled) * gathered.layout.v.bytes)
    for r in range(task.rows):
        stops[r] = count
    attend_range(task, &tile, _ZEROS, stops, NULL)


cdef inline Py_ssize_t _line_tokens(const kv_side *side) noexcept nogil:
    """Tokens of values whose codes share lines."""
    return KV_LANES if side.family == KV_PACKED_CODES else 32 // kv_dtypes[side.dtype].bits


cdef void _fetch(const kv_layout *layout, const kv_context *context, int head, Py_ssize_t position, Py_ssize_t size) noexcept nogil:
    """Prefetch the lines of a token's codes or rows, or those of its run."""
    cdef int32_t block = block_of(context, position >> layout.block_shift)
    cdef Py_ssize_t offset = position & (layout.k.block_size - 1), lanes = offset // KV_LANES * KV_LANES, token, i
    cdef const kv_side *v = &layout.v
    cdef const char *at = v_block_at(layout, block, head)
    if layout.k.family == KV_FLOAT_ROWS:
        kv_touch(k_block_at(layout, block, head) + offset * layout.k.row_stride, size * layout.k.row_stride)
    else:
        kv_touch(k_block_at(layout, block, head) + lanes * token_bytes(&layout.k), KV_LANES * token_bytes(&layout.k))
    if v.family == KV_FLOAT_ROWS:
        kv_touch(at + offset * v.row_stride, size * v.row_stride)
    elif v.as_keys:
        kv_touch(at + lanes * token_bytes(v), KV_LANES * token_bytes(v))
    else:
        token = 2 * kv_dtypes[v.dtype].bits  # bytes of 16 depths
        for i in range(v.padded_dim // KV_LANES):
            kv_touch(at + (i * v.block_size + offset) * token, size * token)


cdef void _count(const kv_task *task, int kind, const int64_t *position, Py_ssize_t size, bint follows) noexcept nogil:
    """Count the bytes of the lines that a token or a run touches, but for those that the token before it has touched."""
    cdef kv_traffic *traffic = given_of(task).traffic
    cdef const kv_layout *layout = given_of(task).layout
    cdef const kv_side *side
    cdef Py_ssize_t together, before = position[-1] if follows else -KV_LANES
    cdef int i
    if kind == KV_OWN_FLOATS:
        layout = layout.floats
    for i in range(2):
        side = &layout.v if i else &layout.k
        if side.family == KV_FLOAT_ROWS:
            traffic.floats += size * side.row_stride
        else:
            together = _line_tokens(side) if i and not side.as_keys else KV_LANES
            if position[0] // together != before // together:
                traffic.codes += max(size, together) * token_bytes(side)
                traffic.scales += side.bytes - side.means if side.means else 0
            traffic.scales += size * side.scale_bytes
        traffic.operations += 2.0 * task.rows * size * side.padded_dim * (2 if layout.latent and i == 0 else 1)
