# cython: language_level=3, boundscheck=False, cdivision=True
"""The tokens that were chosen for each query: checked, and those that it sees in ascending order."""
from libc.stdint cimport int64_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy, memset

from kvfast.attention.cuts cimport choose_tile, panels_of_chosen
from kvfast.attention.options cimport kvfast_options
from kvfast.attention.refusals cimport VALUE, kv_refusal, no_memory, refuse
from kvfast.attention.tasks cimport (KV_CODES, KV_DECODED_KEYS, KV_NUM_KINDS, KV_OWN_FLOATS, kv_call, kv_chosen, kv_gathered, kv_given,
                                     kv_query)
from kvfast.attention.workspace cimport CHOSEN, kv_workspace, reserve
from kvfast.codec.blocks cimport init_side, kv_layout
from kvfast.core.kernels cimport KV_FLOAT32, kv_side
from kvfast.core.limits cimport KV_LANES, KV_MATRIX_TILE, KV_MAX_TOKENS

cdef int _LANE_SHIFT = <int>((<object>KV_LANES).bit_length() - 1)


cdef Py_ssize_t most_chosen(const kv_chosen *chosen, Py_ssize_t query) noexcept nogil:
    """The number of tokens of a query, in the KV head that has most."""
    cdef Py_ssize_t most = 0, head
    for head in range(chosen.heads):
        most = max(most, <Py_ssize_t>chosen.counts[query * chosen.heads + head])
    return most


cdef bint split_chosen(const kv_chosen *chosen, Py_ssize_t query, Py_ssize_t row, Py_ssize_t end, Py_ssize_t base) noexcept nogil:
    """Give `row` those tokens before position `end` that a query still has, with positions from `base` on; False if there are none."""
    cdef Py_ssize_t head, count, at, to
    cdef int64_t *positions
    cdef bint some = False
    for head in range(chosen.heads):
        at, to, count = query * chosen.heads + head, row * chosen.heads + head, 0
        positions = chosen.positions + chosen.firsts[at]
        while count < chosen.counts[at] and positions[count] < end:
            positions[count] -= base
            count += 1
        chosen.firsts[to], chosen.counts[to] = chosen.firsts[at], count
        if to != at:
            chosen.firsts[at] += count
            chosen.counts[at] -= count
        some = some or count > 0
    return some


cdef int _compare(const void *a, const void *b) noexcept nogil:
    cdef int64_t first = (<const int64_t *>a)[0], second = (<const int64_t *>b)[0]
    return (first > second) - (first < second)


cdef bint _rise(const int64_t *values, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count - 1):
        if values[i] > values[i + 1]:
            return False
    return True


cdef bint open_chosen(kv_chosen *chosen, const kv_call *call, kv_workspace *workspace, kv_refusal *refusal) noexcept nogil:
    """Check what was chosen for queries that know what they see."""
    cdef const kv_given *given = <const kv_given *>call.given
    cdef const kvfast_options *options = &given.request.options
    cdef const kv_layout *layout = given.layout
    cdef Py_ssize_t tokens = given.request.q.tokens, k = options.num_indices, run = max(options.index_block, 1), heads, rows, i
    cdef int64_t *sorted_
    memset(chosen, 0, sizeof(kv_chosen))
    chosen.heads = heads = max(options.index_heads, 1)
    rows = call.num_queries * heads
    if <double>tokens * heads * k * run > KV_MAX_TOKENS:  # their bytes are counted in 64 bits
        return no_memory(refusal)
    chosen.positions = <int64_t *>reserve(workspace, CHOSEN, (tokens * heads * k * run + 2 * rows + k) * sizeof(int64_t))
    if chosen.positions == NULL:
        return no_memory(refusal)
    chosen.firsts = chosen.positions + tokens * heads * k * run
    chosen.counts, sorted_ = chosen.firsts + rows, chosen.firsts + 2 * rows
    memset(chosen.firsts, 0, 2 * rows * sizeof(int64_t))
    for i in range(tokens * heads):
        chosen.firsts[i] = i * k * run
        memcpy(sorted_, options.indices + i * k, k * sizeof(int64_t))
        if not _rise(sorted_, k):
            qsort(sorted_, k, sizeof(int64_t), _compare)
        if not _take(chosen, call.queries + i // heads, i, sorted_, k, run, refusal):
            return False
    _gather_as(&chosen.kinds[KV_CODES], call, layout, layout.k.dtype, False)
    if layout.k.means:
        _gather_as(&chosen.kinds[KV_DECODED_KEYS], call, layout, KV_FLOAT32, False)
    if layout.floats != NULL:
        _gather_as(&chosen.kinds[KV_OWN_FLOATS], call, layout.floats, layout.floats.k.dtype, True)
    for i in range(KV_NUM_KINDS):
        chosen.room_bytes = max(chosen.room_bytes, chosen.kinds[i].tile // KV_LANES
                                * (chosen.kinds[i].layout.k.bytes + chosen.kinds[i].layout.v.bytes))
    return True


cdef bint _take(kv_chosen *chosen, const kv_query *query, Py_ssize_t at, const int64_t *sorted_, Py_ssize_t k, Py_ssize_t run,
                kv_refusal *refusal) noexcept nogil:
    """Take what a query sees of its choice in a KV head; each position stands for `run` tokens from it on."""
    cdef int64_t *positions = chosen.positions + chosen.firsts[at]
    cdef Py_ssize_t count = 0, before, i, head = at % chosen.heads if chosen.heads > 1 else -1
    cdef int64_t position, first
    for i in range(k):
        first, before = sorted_[i], count
        if first == -1:
            continue
        if first < -1 or first % run:
            return refuse(refusal, VALUE, b"indices must hold -1 or {multiples}, got {2} for {query}", query.token, head, first, run)
        if i and sorted_[i - 1] == first:
            return refuse(refusal, VALUE, b"indices must not hold a position twice, got {2} for {query}", query.token, head, first)
        for position in range(first, first + min(run, query.stop - first)):
            if position >= query.start or position < query.sink_stop:
                positions[count] = position
                count += 1
        if count == before:
            return refuse(refusal, VALUE, b"indices hold {2} for {query}, which sees the positions {3} to {4}{first}", query.token,
                          head, first, query.start, query.stop - 1, query.sink_stop)
    chosen.counts[at] = count
    return count > 0 or refuse(refusal, VALUE, b"indices must hold a position for each query, got none for {query}", query.token, head)


cdef void _gather_as(kv_gathered *gathered, const kv_call *call, const kv_layout *layout, int k_dtype, bint few_rows) noexcept nogil:
    """Blocks of KV_LANES tokens of a layout, with keys of a dtype."""
    gathered.layout = layout[0]
    _resize(&gathered.layout.k, &layout.k, k_dtype)
    _resize(&gathered.layout.v, &layout.v, layout.v.dtype)
    gathered.tile = KV_MATRIX_TILE if panels_of_chosen(call) else choose_tile(&gathered.layout, call.kernels, few_rows)
    memset(&gathered.slab, 0, sizeof(gathered.slab))
    gathered.slab.k_block_stride, gathered.slab.v_block_stride = gathered.layout.k.bytes, gathered.layout.v.bytes
    gathered.slab.v = gathered.tile // KV_LANES * gathered.layout.k.bytes
    gathered.layout.slabs, gathered.layout.slab_of, gathered.layout.block_shift = &gathered.slab, NULL, _LANE_SHIFT


cdef void _resize(kv_side *side, const kv_side *given, int dtype) noexcept nogil:
    """A side like another, of KV_LANES tokens."""
    init_side(side, dtype, given.head_dim, KV_LANES, given.means and dtype == given.dtype, given.channels and dtype == given.dtype)
    side.rotated, side.in_basis, side.gaussian, side.as_keys = given.rotated, given.in_basis, given.gaussian, given.as_keys
    side.clip_search = given.clip_search
