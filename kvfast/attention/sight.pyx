# cython: language_level=3, boundscheck=False, cdivision=True
"""What a query sees: sink tokens, a window, a chunk, spans, its ancestors in a tree of drafts; in each segment of a spliced sequence.

A query sees its sink tokens, a range of positions, and those stretches of ancestors in a tree that do not follow on it (``kv_query``).
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy

from kvfast.attention.options cimport kvfast_options
from kvfast.attention.refusals cimport VALUE, kv_refusal, no_memory, refuse
from kvfast.attention.request cimport kv_request
from kvfast.attention.tasks cimport kv_query, kv_stretch
from kvfast.attention.workspace cimport SIGHT, kv_workspace, reserve

cdef extern from *:
    """
    #define kv_count_bits(bits) __builtin_popcountll(bits)
    #define kv_first_bit(bits) ((bits) ? __builtin_ctzll(bits) : 64)
    """
    int kv_count_bits(uint64_t bits) nogil
    int kv_first_bit(uint64_t bits) nogil

cdef enum:
    MOST_DRAFTS = 64           # of a tree: the bits of a word
    MOST_STRETCHES = 32        # that these can make


cdef int _compare(const void *a, const void *b) noexcept nogil:
    cdef Py_ssize_t first = (<const Py_ssize_t *>a)[0], second = (<const Py_ssize_t *>b)[0]
    return (first > second) - (first < second)


cdef bint open_sight(const kv_request *request, kv_workspace *workspace, kv_member *members, Py_ssize_t count,
                     kv_refusal *refusal) noexcept nogil:
    """Check spans and parents, and give each sequence its own."""
    cdef const kvfast_options *options = &request.options
    cdef Py_ssize_t span = 0, draft = 0, num_spans = options.num_spans, num_parents = options.num_parents, i, number
    cdef Py_ssize_t *spans
    cdef uint64_t *ancestors
    cdef kv_stretch *stretches
    cdef kv_member *member
    if num_spans == 0 and num_parents == 0 and request.span_counts == NULL and request.parent_counts == NULL:
        return True
    if not _are_counts(request.span_counts, request.is_batch, num_spans, count):
        return refuse(refusal, VALUE, b"span_counts must have a number for each of the {0} sequences, together the {1} spans of the "
                      b"options, got {counts}", count, num_spans, <Py_ssize_t>request.span_counts)
    if not _are_counts(request.parent_counts, request.is_batch, num_parents, count):
        return refuse(refusal, VALUE, b"parent_counts must have a number for each of the {0} sequences, together the {1} tree_parents "
                      b"of the options, got {counts}", count, num_parents, <Py_ssize_t>request.parent_counts)
    for i in range(count):
        member, number = members + i, i if request.is_batch else -1
        member.num_spans = num_spans if number < 0 else request.span_counts[i] if num_spans else 0
        member.num_drafts = num_parents if number < 0 else request.parent_counts[i] if num_parents else 0
        if not _fit_counts(member, refusal):
            refusal.member = number
            return False
    spans = <Py_ssize_t *>reserve(workspace, SIGHT, 2 * num_spans * sizeof(Py_ssize_t)
                                  + num_parents * (sizeof(uint64_t) + MOST_STRETCHES * sizeof(kv_stretch)) + 1)
    if spans == NULL:
        return no_memory(refusal)
    ancestors = <uint64_t *>(spans + 2 * num_spans)
    stretches = <kv_stretch *>(ancestors + num_parents)
    for i in range(count):
        member, number = members + i, i if request.is_batch else -1
        member.spans, member.ancestors, member.stretches = spans + 2 * span, ancestors + draft, stretches + draft * MOST_STRETCHES
        if member.num_spans and not _open_spans(options.spans + 2 * span, spans + 2 * span, member, refusal):
            refusal.member = number
            return False
        if member.num_drafts and not _open_tree(options.tree_parents + draft, ancestors + draft, member, refusal):
            refusal.member = number
            return False
        span += member.num_spans
        draft += member.num_drafts
    return True


cdef bint _are_counts(const Py_ssize_t *counts, bint is_batch, Py_ssize_t total, Py_ssize_t count) noexcept nogil:
    """Whether the counts of the sequences of a batch are those of `total`."""
    cdef Py_ssize_t i
    if not is_batch or counts == NULL:
        return total == 0 or not is_batch
    for i in range(count):
        if not 0 <= counts[i] <= total:
            return False
        total -= counts[i]
    return total == 0


cdef bint _fit_counts(const kv_member *member, kv_refusal *refusal) noexcept nogil:
    """Whether a sequence has room for its spans and drafts, before they are read."""
    cdef Py_ssize_t newest
    if member.num_spans > member.length:
        return refuse(refusal, VALUE, b"spans{at} must not overlap, got {0} of them in {1} tokens", member.num_spans, member.length)
    if member.num_drafts == 0:
        return True
    if member.num_spans:
        return refuse(refusal, VALUE, b"tree_parents{at} need causal=True and spans=None for their sequence: a draft sees its "
                      b"ancestors alone")
    if member.num_drafts > min(member.num_queries, <Py_ssize_t>MOST_DRAFTS):
        return refuse(refusal, VALUE, b"tree_parents{at} must have at most {0} drafts, and no more than the {1} tokens of q, got {2}",
                      MOST_DRAFTS, member.num_queries, member.num_drafts)
    if member.num_segments:
        newest = member.length - member.segments[member.num_segments - 1].start
        if member.num_drafts > newest:
            return refuse(refusal, VALUE, b"tree_parents{at} must have at most {0} drafts, as many tokens as were appended since the "
                          b"last splice, got {1}", newest, member.num_drafts)
    return True


cdef bint _open_spans(const Py_ssize_t *given, Py_ssize_t *spans, const kv_member *member, kv_refusal *refusal) noexcept nogil:
    cdef Py_ssize_t i, start, stop
    memcpy(spans, given, 2 * member.num_spans * sizeof(Py_ssize_t))
    qsort(spans, member.num_spans, 2 * sizeof(Py_ssize_t), _compare)
    for i in range(member.num_spans):
        start, stop = spans[2 * i], spans[2 * i + 1]
        if not 0 <= start < stop:
            return refuse(refusal, VALUE, b"spans{at} must have a start of at least 0 and a later stop each, got {0} and {1}",
                          start, stop)
        if stop > member.length:
            return refuse(refusal, VALUE, b"spans{at} must end within the {2} tokens that are held, got {0} to {1}: append all tokens "
                          b"of a span before its queries attend", start, stop, member.length)
        if i and start < spans[2 * i - 1]:
            return refuse(refusal, VALUE, b"spans{at} must not overlap, got {0} to {1} and {2} to {3}",
                          spans[2 * i - 2], spans[2 * i - 1], start, stop)
    return True


cdef bint _open_tree(const Py_ssize_t *parents, uint64_t *ancestors, const kv_member *member, kv_refusal *refusal) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(member.num_drafts):
        if not -1 <= parents[i] < i:
            return refuse(refusal, VALUE, b"tree_parents{at} must be -1 or a draft before its child, got {0} for draft {1}",
                          parents[i], i)
        ancestors[i] = (<uint64_t>1 << i) | (ancestors[parents[i]] if parents[i] >= 0 else 0)
    return True


cdef void see(const kv_request *request, const kv_member *member, kv_query *queries) noexcept nogil:
    """Set which positions each query of a sequence sees: those of its last tokens."""
    cdef Py_ssize_t i, position, tree = member.length - member.num_drafts
    for i in range(member.num_queries):
        position = member.length - member.num_queries + i
        if position < tree or member.num_drafts == 0:
            _sees(request, member, queries + i, position)
        else:
            _sees_tree(request, member, queries + i, tree, position - tree)
        queries[i].token = member.first_query + i
        if member.stops != NULL:
            queries[i].stop = member.stops[i]


cdef void _sees(const kv_request *request, const kv_member *member, kv_query *query, Py_ssize_t position) noexcept nogil:
    """Set what a query at `position` sees."""
    cdef const kvfast_options *options = &request.options
    cdef Py_ssize_t chunk = options.attention_chunk_size, i
    query.position = position
    query.stop = member.length if options.not_causal else position + 1
    query.start = max(<Py_ssize_t>0, position + 1 - options.sliding_window) if options.sliding_window else 0
    if chunk:
        query.start = max(query.start, position // chunk * chunk)
    for i in range(member.num_spans):
        if member.spans[2 * i] <= position < member.spans[2 * i + 1]:
            query.stop = max(query.stop, member.spans[2 * i + 1])
            if not options.clamp_spans:
                query.start = min(query.start, member.spans[2 * i])
    query.sink_stop = min(max(options.num_sink_tokens, <Py_ssize_t>0), query.start)
    query.parts = 0
    query.num_stretches = query.tree = 0


cdef void _sees_tree(const kv_request *request, const kv_member *member, kv_query *query, Py_ssize_t tree,
                     Py_ssize_t draft) noexcept nogil:
    """Set what a draft sees: positions before `tree`, where the drafts begin, and its ancestors. Its depth is its position."""
    cdef uint64_t kept = 0, ancestors = member.ancestors[draft]
    cdef Py_ssize_t depth = kv_count_bits(ancestors) - 1, place
    cdef kv_stretch *one = member.stretches + draft * MOST_STRETCHES
    _sees(request, member, query, tree + depth)
    query.tree, query.stop = tree, tree
    for place in range(tree, query.start):  # ancestors before a window or a chunk, of which sink tokens stay
        if place < query.sink_stop:
            kept |= ancestors & (~ancestors + 1)
        ancestors &= ancestors - 1
    ancestors |= kept
    query.sink_stop = min(query.sink_stop, tree)
    if query.start > tree:
        query.start = tree
    else:
        while ancestors >> (query.stop - tree) & 1:  # those that follow each other from the first on are as causal tokens
            ancestors ^= <uint64_t>1 << (query.stop - tree)
            query.stop += 1
            if query.stop - tree == MOST_DRAFTS:
                break
    query.stretches = one
    while ancestors:
        # Ancestors follow each other in depth, down to the draft itself. So the distance of these is that of their depths.
        one.first, one.shift = kv_first_bit(ancestors), kv_first_bit(ancestors) - (depth + 1 - kv_count_bits(ancestors))
        one.count = kv_first_bit(~(ancestors >> one.first))
        ancestors &= ~(((<uint64_t>1 << (one.count - 1) << 1) - 1) << one.first)
        query.num_stretches += 1
        one += 1


cdef Py_ssize_t end_of(const kv_segment *segment) noexcept nogil:
    return segment.start + segment.last - segment.first


cdef inline bint _begins(const kv_segment *segment) noexcept nogil:
    """Whether a segment has the first token of its context at position 0."""
    return segment.start == 0 and segment.first == 0


cdef int views_of(const kv_request *request, const kv_member *member, const kv_segment *segment) noexcept nogil:
    """How some query of a spliced sequence sees a segment: AS_SINKS, AS_WINDOW, both or neither.

    The first segment is one view, sink tokens and window. So a query that sees no other has the bits that it has in a sequence that is
    not spliced.
    """
    cdef kv_query oldest, newest
    cdef bint has_sinks, is_seen
    if member.num_queries == 0:
        return 0
    _sees(request, member, &oldest, member.length - member.num_queries)
    _sees(request, member, &newest, member.length - 1)
    has_sinks = segment.start < newest.sink_stop
    is_seen = oldest.start < end_of(segment) and segment.start < newest.stop
    if _begins(segment):
        return AS_WINDOW if is_seen or has_sinks else 0
    return AS_SINKS * has_sinks + AS_WINDOW * is_seen


cdef inline (Py_ssize_t, Py_ssize_t) _within(const kv_segment *segment, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """The part of a range of positions that lies in a segment."""
    begin = min(max(begin, segment.start), end_of(segment))
    return begin, min(max(end, begin), end_of(segment))


cdef void narrow(kv_query *query, const kv_segment *segment, bint as_sinks) noexcept nogil:
    """Let a query see a segment alone, whose tokens it counts as their context does; `as_sinks`: the sink tokens of it."""
    cdef Py_ssize_t base = segment.start - segment.first, begin, end
    cdef bint begins = _begins(segment)
    if as_sinks or end_of(segment) <= query.tree:  # a tree lies in the last segment
        query.num_stretches = 0
    query.tree -= base
    begin, end = _within(segment, query.start, query.stop)
    if as_sinks or begins and begin == end and query.num_stretches == 0:
        begin, end = _within(segment, 0, query.sink_stop)
        begins = False
    query.position -= base
    query.start, query.stop = begin - base, end - base
    query.sink_stop = min(query.sink_stop, end_of(segment)) if begins else 0
