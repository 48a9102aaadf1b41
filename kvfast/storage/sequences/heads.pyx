# cython: language_level=3, boundscheck=False, cdivision=True
"""The storage of one layer, accessed head by head: scores, attention and rows of some of its heads. Its table is a `RingTable` that
evicts on request."""
import math

import numpy as np

from libc.math cimport expf
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from kvfast.attention.request cimport Request, open_request
from kvfast.attention.run cimport answer
from kvfast.attention.sight cimport kv_member
from kvfast.attention.tasks cimport kv_own
from kvfast.codec.blocks cimport KV_NUM_BASES, KV_TO_QUERIES, block_of, change_key_basis, k_offset_of, kv_slab, kv_context, kv_layout
from kvfast.codec.decode cimport decode_tokens
from kvfast.core.arrays cimport Rows, kv_rows, open_rows
from kvfast.core.checks cimport check_count
from kvfast.core.interrupt cimport is_stopped, kv_watch
from kvfast.core.kernels cimport active, kv_ahead, kv_kernels, kv_scratch, kv_side, kv_tile
from kvfast.core.limits cimport KV_LANES, KV_MAX_FLOAT32, KV_ROWS, KV_TILE
from kvfast.core.scratch cimport give_scratch, take_scratch
from kvfast.core.threads cimport DYNAMIC, STATIC, for_each, gather, kv_team
from kvfast.core.wipe cimport kv_wipe_pages
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.ring_table cimport RingTable

from kvfast.errors import NonFiniteInputError

cdef class Heads:
    """A layout with some of the KV heads of another layout."""
    cdef kv_layout layout
    cdef kv_slab *slabs

    def __dealloc__(self):
        free(self.slabs)


cdef Heads heads_of(BlockPool pool, Py_ssize_t first, Py_ssize_t count):
    """`count` KV heads, from `first` on, of a pool's only layer."""
    cdef Heads self = Heads.__new__(Heads)
    cdef Py_ssize_t i, slabs = pool.num_slabs
    cdef kv_slab *slab
    self.layout = pool.layouts[0]
    self.layout.num_kv_heads = <int>count
    self.slabs = <kv_slab *>malloc(max(slabs, 1) * sizeof(kv_slab))
    if self.slabs == NULL:
        raise MemoryError("cannot allocate the view of some heads")
    for i in range(slabs):
        slab = self.slabs + i
        slab[0] = self.layout.slabs[i]
        slab.k += first * slab.k_head_stride
        slab.v += first * slab.v_head_stride
    self.layout.slabs = self.slabs
    if self.layout.bases != NULL:
        self.layout.bases += first * KV_NUM_BASES * self.layout.k.head_dim * self.layout.k.padded_dim
    return self


ctypedef struct kv_score_call:
    const kv_kernels *kernels
    const kv_layout *layout
    kv_context context
    const kv_rows *q
    Py_ssize_t group           # query heads per KV head
    float scale
    Py_ssize_t begin           # the first position
    Py_ssize_t tokens          # number of tokens from there on
    float *out                 # (query heads, tokens)


cdef enum:
    NOT_FINITE = 1
    NO_MEMORY = 2


cdef int _score_head(void *shared, Py_ssize_t head, int thread, kv_watch *watch) noexcept nogil:
    """Scores of the query heads of one KV head; flags of what failed."""
    cdef const kv_score_call *call = <const kv_score_call *>shared
    cdef void *memory
    cdef bint good
    if not take_scratch(&memory, 1):
        return NO_MEMORY
    good = _score_rows(call, head, <kv_own *>memory, watch)
    if call.layout.secure:
        kv_wipe_pages(<char *>memory, sizeof(kv_own))
    give_scratch(&memory, 1)
    return 0 if good else NOT_FINITE


cdef bint _score_rows(const kv_score_call *call, Py_ssize_t head, kv_own *own, kv_watch *watch) noexcept nogil:
    """False if a score is not finite."""
    cdef const kv_kernels *kernels = call.kernels
    cdef const kv_layout *layout = call.layout
    cdef const kv_context *context = &call.context
    cdef const kv_rows *q = call.q
    cdef Py_ssize_t group = call.group, tokens = call.tokens
    cdef float *out = call.out + head * group * tokens
    cdef bint good = True
    cdef kv_scratch *scratch = &own.scratch
    cdef kv_tile tile
    cdef kv_ahead ahead
    cdef const kv_side *k = &layout.k
    cdef Py_ssize_t row0 = 0, t, first
    cdef Py_ssize_t at[2]
    cdef int rows, r, skip
    cdef float *row
    memset(&ahead, 0, sizeof(ahead))
    scratch.queries.room = &own.room
    while row0 < group:
        rows = <int>min(<Py_ssize_t>KV_ROWS, group - row0)
        for r in range(rows):
            row = scratch.rows + r * k.padded_dim
            kernels.to_float[q.dtype](q.data + (head * group + row0 + r) * q.head_stride, k.head_dim, row)
            memset(row + k.head_dim, 0, (k.padded_dim - k.head_dim) * sizeof(float))
        change_key_basis(kernels, layout, head, KV_TO_QUERIES, scratch.rows, k.padded_dim, rows, scratch.rows, k.padded_dim)
        kernels.prepare[k.dtype](k, scratch.rows, rows, call.scale, &scratch.queries)
        t = call.begin
        while t < context.length:
            if is_stopped(watch):
                return True
            first = t % k.block_size // KV_LANES * KV_LANES
            skip = <int>(t % KV_LANES)
            at[0] = at[1] = k_offset_of(layout, block_of(context, t >> layout.block_shift), head)
            tile.base, tile.at[0], tile.first = layout.base, at[0], <int>first
            tile.count = <int>min(min(<Py_ssize_t>KV_TILE, k.block_size - first), context.length - t + skip)
            if t - skip + tile.count < context.length:  # the rest of this block, or the next one
                at[1] = k_offset_of(layout, block_of(context, (t - skip + tile.count) >> layout.block_shift), head)
            # Prefetch the codes of as many tokens again. Codes of 16 tokens at a time are contiguous.
            ahead.next.base, ahead.next.at = layout.base, &at[1]
            ahead.next.piece = ahead.next.bytes = k.scales
            ahead.next.scales, ahead.next.scale_bytes = k.scales, k.scale_bytes * k.block_size
            ahead.after = ahead.next
            kernels.scores[k.dtype](k, &scratch.queries, rows, &tile, &ahead, scratch.softmax.weights)
            for r in range(rows):
                row = scratch.softmax.weights + r * KV_TILE + skip
                good &= kernels.find_unstorable(row, tile.count - skip, KV_MAX_FLOAT32) < 0
                memcpy(out + (row0 + r) * tokens + t - call.begin, row, (tile.count - skip) * sizeof(float))
            t += tile.count - skip
        row0 += KV_ROWS
    return good


cdef int _to_weights(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """Softmax over the scores of one query head, in place."""
    cdef const kv_score_call *call = <const kv_score_call *>shared
    cdef Py_ssize_t i, n = call.tokens
    cdef float *scores = call.out + index * n
    cdef float top = scores[0], total
    cdef double sum_ = 0
    for i in range(n):
        top = max(top, scores[i])
    for i in range(n):
        scores[i] = expf(scores[i] - top)
        sum_ += scores[i]
    total = <float>(1.0 / sum_)
    for i in range(n):
        scores[i] *= total
    return 0


def truncate_held(SequenceStorage storage, n):
    """Keep the first `n` of the tokens that are held."""
    cdef Py_ssize_t held = storage.num_held, kept = check_count(n, "n", 0)
    if kept > held:
        raise ValueError(f"n must be between 0 and the {held} tokens of the cache, got {n}")
    storage.truncate(storage.length - held + kept if kept else 0)


def evict(SequenceStorage storage, Py_ssize_t window):
    """Keep the last `window` tokens; returns the number of evicted tokens."""
    cdef RingTable table = storage.tables[0]
    cdef Py_ssize_t before
    storage._enter()
    try:
        before = table.num_held()
        table.evict(window)
        return before - table.num_held()
    finally:
        storage.pool.leave()


def push(SequenceStorage storage, k, v):
    """Append tokens, and count them as complete."""
    cdef RingTable table = storage.tables[0]
    cdef Rows keys, values
    keys, values = open_rows(k, "k"), open_rows(v, "v")
    storage._enter()
    try:
        table.append(0, keys, values, NULL)
        table.advance(keys.rows.tokens)
    finally:
        storage.pool.leave()


def scores(SequenceStorage storage, q, Py_ssize_t head, Py_ssize_t count, bint softmax, num_threads):
    """Scores of q, (1, query heads, head_dim), over the tokens of `count` KV heads from `head` on."""
    cdef RingTable table = storage.tables[0]
    cdef Rows queries = open_rows(q, "q")
    cdef Heads part
    cdef kv_score_call call
    cdef kv_team team
    cdef float[:, ::1] out
    cdef int failed
    call.kernels, call.q, call.group = active(), &queries.rows, queries.rows.heads // count
    call.scale = 1.0 / math.sqrt(queries.rows.dim)
    storage.enter_reading()
    try:
        table.context(0, &call.context)
        call.begin, call.tokens = table.evicted, call.context.length - table.evicted
        gather(&team, num_threads, <double>call.tokens * queries.rows.heads * queries.rows.dim)
        array = np.empty((queries.rows.heads, call.tokens), np.float32)
        if call.tokens == 0:
            return array
        out = array
        part = heads_of(table.pool, head, count)
        call.layout, call.out = &part.layout, &out[0, 0]
        failed = for_each(&team, _score_head, &call, count, DYNAMIC)
        if softmax:
            for_each(&team, _to_weights, &call, queries.rows.heads, STATIC)
    finally:
        storage.pool.leave_reading()
    if failed & NO_MEMORY:
        raise MemoryError("cannot allocate the working memory of scores")
    if failed:
        raise NonFiniteInputError("queries and keys are too large together: a score is beyond float32")
    return array


def attend_heads(SequenceStorage storage, q, Py_ssize_t head, Py_ssize_t count, num_threads):
    """`attend` for one query token and `count` KV heads from `head` on."""
    cdef RingTable table = storage.tables[0]
    cdef Heads part
    cdef Request request
    cdef kv_member member
    memset(&member, 0, sizeof(member))
    storage.enter_reading()
    try:
        table.context(0, &member.context)
        if member.context.length == table.evicted:
            raise ValueError("the cache holds no tokens to attend to")
        part = heads_of(table.pool, head, count)
        request = open_request(&part.layout, q, {"num_threads": num_threads}, "the cache", storage.reads_as)
        request.c.options.sliding_window = member.context.length - table.evicted
        member.length, member.num_queries = member.context.length, 1
        return answer(request, &part.layout, table.pool.workspace, &member, 1)
    finally:
        storage.pool.leave_reading()


def rows_of(SequenceStorage storage, Py_ssize_t head, Py_ssize_t count, bint values):
    """Keys or values of `count` KV heads from `head` on, decoded."""
    cdef RingTable table = storage.tables[0]
    cdef Heads part
    cdef Py_ssize_t i, n
    cdef int64_t[::1] positions, slots
    storage.enter_reading()
    try:
        n = table.length - table.evicted
        positions, slots = np.arange(table.evicted, table.length), np.empty(n, np.int64)
        for i in range(n):
            slots[i] = table.map.slot(positions[i])
        part = heads_of(table.pool, head, count)
        return decode_tokens(&part.layout, positions, slots, table.length, values)
    finally:
        storage.pool.leave_reading()
