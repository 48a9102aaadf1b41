# cython: language_level=3, boundscheck=False, cdivision=True
"""The positions that an indexer finds best (the lightning indexer of DeepSeek-V3.2, arXiv 2512.02556; as `DeepseekV32Indexer` in
transformers has it): its many query heads score one key of each token, ``sum of weight x max(query . key, 0)``.

The kernels of attention compute the products, whose integer accumulators are bounded there. The sums of at most `KV_MAX_Q_HEADS` terms
are float32, head by head, so the scores have the same bits for any number of threads. A score that is not finite is an error.
"""
import numpy as np

from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kvfast.attention.cuts cimport choose_tile, work_of
from kvfast.attention.source cimport open_rows as find_rows
from kvfast.attention.sight cimport kv_member
from kvfast.attention.tasks cimport kv_call, kv_given, kv_item, kv_keys, kv_own, kv_query, kv_task
from kvfast.attention.tiles cimport add_scores, load
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport Rows, check_finite
from kvfast.core.checks cimport check_count
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport active
from kvfast.core.limits cimport KV_MAX_FLOAT32, KV_MAX_TOKENS, KV_ROWS, KV_TILE
from kvfast.core.scratch cimport give_scratch, take_scratch
from kvfast.core.threads cimport DYNAMIC, for_each, gather, kv_team
from kvfast.core.wipe cimport kv_wipe, kv_wipe_pages, kv_wipe_stack

from kvfast.core.interchange import as_float32
from kvfast.errors import DimensionMismatchError, NonFiniteInputError

cdef enum:
    RANGE_TOKENS = 4 * KV_TILE   # of a task: keys that stay in the caches while all heads read them
    MOST_SCORES = 1 << 24        # that are kept at once; more queries come in turns
    NO_MEMORY = 1
    NOT_FINITE = 2


ctypedef struct kv_ranking:
    kv_call call
    kv_given given
    const int32_t *item_of     # (queries,)
    const float *weights       # (queries, heads)
    float *scores              # (queries of a turn, longest)
    Py_ssize_t longest         # tokens of the longest context
    Py_ssize_t first           # query of the turn
    Py_ssize_t ranges          # of RANGE_TOKENS tokens
    Py_ssize_t k
    int64_t *best              # (queries, k)


cdef object best_positions(const kv_layout *layout, const kv_member *members, Py_ssize_t count, Rows rows, object weights, object k,
                           object num_threads):
    """The `k` best of the positions that the last tokens of each sequence see; see `MLAKVCache.top_k`."""
    cdef kv_ranking ranking
    cdef kv_team team
    cdef Py_ssize_t tokens = rows.rows.tokens, turn, i
    cdef double work = 0
    cdef const float[:, ::1] of_heads
    cdef int64_t[:, ::1] best
    cdef float[:, ::1] scores
    cdef uint8_t[::1] memory
    cdef int32_t[::1] item_of
    cdef kv_keys *keys
    cdef int failed
    memset(&ranking, 0, sizeof(ranking))
    if rows.rows.dim != layout.k.head_dim:
        raise DimensionMismatchError(f"q must have {layout.k.head_dim} elements in a row, as the keys have, got {rows.rows.dim}")
    check_finite(rows, "q", KV_MAX_FLOAT32, "float32")
    given = np.ascontiguousarray(as_float32(weights, "weights"))
    if given.shape != (tokens, rows.rows.heads):
        raise DimensionMismatchError(f"weights must have shape ({tokens}, {rows.rows.heads}), one for each head of q, got "
                                     f"{given.shape}")
    if not np.isfinite(given).all():
        raise NonFiniteInputError("weights must be finite")
    of_heads = given
    ranking.k = check_count(k, "k", 1, KV_MAX_TOKENS)
    memory = np.zeros(tokens * sizeof(kv_query) + count * (sizeof(kv_item) + sizeof(kv_keys)), np.uint8)
    ranking.call.queries = <kv_query *>&memory[0]
    ranking.call.items = <kv_item *>(ranking.call.queries + tokens)
    keys = <kv_keys *>(ranking.call.items + count)
    item_of = np.empty(tokens, np.int32)
    for i in range(count):
        if members[i].num_queries > members[i].length:
            raise ValueError(f"sequence {i} of the batch holds {members[i].length} tokens, and q {members[i].num_queries} of them")
        keys[i].context, ranking.call.items[i].keys = members[i].context, &keys[i]
        _ask(&ranking, ranking.call.items + i, &item_of[0], <int32_t>i, members[i].first_query, members[i].num_queries)
        work += <double>work_of(layout, members[i].length) * members[i].num_queries
    result = best = np.full((tokens, ranking.k), -1, np.int64)
    turn = max(<Py_ssize_t>1, min(tokens, MOST_SCORES // ranking.longest))
    scores = np.empty((turn, ranking.longest), np.float32)
    ranking.call.kernels, ranking.call.given = active(), &ranking.given
    ranking.call.num_q_heads, ranking.call.group, ranking.call.num_queries = rows.rows.heads, <int>rows.rows.heads, tokens
    ranking.given.layout, ranking.given.request.q, ranking.given.request.options.scale = layout, rows.rows, 1.0
    ranking.given.tile = choose_tile(layout, ranking.call.kernels, False)
    ranking.item_of, ranking.weights, ranking.scores, ranking.best = &item_of[0], &of_heads[0, 0], &scores[0, 0], &best[0, 0]
    ranking.ranges = (ranking.longest + RANGE_TOKENS - 1) // RANGE_TOKENS
    gather(&team, num_threads, work * max(1.0, rows.rows.heads / 8.0))
    ranking.given.watch = team.watch
    while ranking.first < tokens:
        turn = min(turn, tokens - ranking.first)
        failed = for_each(&team, _score, &ranking, turn * ranking.ranges, DYNAMIC)
        if failed & NO_MEMORY:
            raise MemoryError("cannot allocate the working memory of top_k")
        if failed & NOT_FINITE:
            raise NonFiniteInputError("q, weights and keys are too large together: a score is beyond float32")
        for_each(&team, _choose, &ranking, turn, DYNAMIC)
        ranking.first += turn
    if layout.secure:
        kv_wipe(ranking.scores, scores.shape[0] * ranking.longest * sizeof(float))
    return result


cdef void _ask(kv_ranking *ranking, kv_item *item, int32_t *item_of, int32_t number, Py_ssize_t first, Py_ssize_t n) noexcept nogil:
    """Set what the `n` queries of an item see, from query `first` on: the last tokens of its context."""
    cdef Py_ssize_t length = (<const kv_keys *>item.keys).context.length, i
    cdef kv_query *query
    item.first_query, item.num_queries = first, n
    for i in range(n):
        query = ranking.call.queries + first + i
        query.token, query.position, query.stop = first + i, length - n + i, length - n + i + 1
        item_of[first + i] = number
    if n:
        ranking.longest = max(ranking.longest, length)


cdef int _score(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """Score a range of the positions that a query sees."""
    cdef const kv_ranking *ranking = <const kv_ranking *>shared
    cdef Py_ssize_t number = index // ranking.ranges, begin = index % ranking.ranges * RANGE_TOKENS, end, head = 0, i
    cdef Py_ssize_t heads = ranking.call.num_q_heads
    cdef float *sums = ranking.scores + number * ranking.longest
    cdef const kv_item *item = ranking.call.items + ranking.item_of[ranking.first + number]
    cdef kv_own *own
    cdef void *memory
    cdef kv_task task
    end = min(begin + RANGE_TOKENS, ranking.call.queries[ranking.first + number].stop)
    if begin >= end:
        return 0
    if not take_scratch(&memory, 1):
        return NO_MEMORY
    own = <kv_own *>memory
    memset(&task, 0, sizeof(task))
    own.rope, own.decoded, own.gathered = NULL, NULL, NULL
    own.scratch.queries.room = own.scratch.softmax.room = &own.room
    task.call, task.item, task.kernels = &ranking.call, item, ranking.call.kernels
    task.own, task.narrow = own, &own.scratch
    memset(sums + begin, 0, (end - begin) * sizeof(float))
    while head < heads:
        task.first_row = (ranking.first + number - item.first_query) * heads + head
        task.rows = <int>min(heads - head, <Py_ssize_t>KV_ROWS)
        find_rows(&task)
        load(&task, &ranking.given.request.q)
        add_scores(&task, begin, end, ranking.weights + (ranking.first + number) * heads + head, sums + begin)
        head += KV_ROWS
    if ranking.given.layout.secure:
        kv_wipe_pages(<char *>own, sizeof(kv_own))
        kv_wipe_stack()
    give_scratch(&memory, 1)
    for i in range(begin, end):
        if not isfinite(sums[i]):
            return NOT_FINITE
    return 0


cdef inline uint32_t _order_of(float score) noexcept nogil:
    """A number that rises with the score; the same for 0 and -0."""
    cdef uint32_t bits
    score += 0.0
    memcpy(&bits, &score, sizeof(bits))
    return ~bits if bits >> 31 else bits | <uint32_t>1 << 31


cdef int _choose(void *shared, Py_ssize_t number, int thread, kv_watch *watch) noexcept nogil:
    """Take the k best positions of a query: all above the k-th score, then the lowest positions with exactly that score.

    The k-th score is found digit by digit (radix select).
    """
    cdef const kv_ranking *ranking = <const kv_ranking *>shared
    cdef const float *scores = ranking.scores + number * ranking.longest
    cdef int64_t *best = ranking.best + (ranking.first + number) * ranking.k
    cdef Py_ssize_t count = ranking.call.queries[ranking.first + number].stop, left = ranking.k, i
    cdef uint32_t last = 0, order, above
    cdef int shift, digit
    cdef uint32_t counts[256]
    for i in range(count if count <= ranking.k else 0):
        best[i] = i
    if count <= ranking.k:
        return 0
    for shift in range(24, -8, -8):
        memset(counts, 0, sizeof(counts))
        above = <uint32_t>((<uint64_t>0xFFFFFFFF) << (shift + 8))  # the digits that are known
        for i in range(count):
            order = _order_of(scores[i])
            if order & above == last:
                counts[order >> shift & 255] += 1
        digit = 255
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        last |= <uint32_t>digit << shift
    for i in range(count):
        order = _order_of(scores[i])
        if order > last or (order == last and left > 0):
            left -= order == last
            best[0] = i
            best += 1
    return 0
