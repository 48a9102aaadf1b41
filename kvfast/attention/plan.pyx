# cython: language_level=3, boundscheck=False, cdivision=True
"""The second step of attention: a request and the sequences that it reads become tasks. `sight` tells what each query sees, and `cuts`
cuts the items that read it."""
from libc.stdint cimport uint16_t
from libc.string cimport memset

from kvfast.attention.chosen cimport most_chosen, open_chosen, split_chosen
from kvfast.attention.cuts cimport choose_tile, cut_context, cut_rows, deal_splits, takes_whole, work_of
from kvfast.attention.families cimport NO_PACKED_PANELS
from kvfast.attention.refusals cimport VALUE, no_memory, refuse
from kvfast.attention.request cimport kv_request
from kvfast.attention.sight cimport AS_SINKS, AS_WINDOW, end_of, kv_member, kv_segment, narrow, open_sight, see, views_of
from kvfast.attention.tasks cimport kv_clear_partials, kv_count_tasks, kv_item, kv_keys, kv_count_slots, kv_partial_size, kv_query
from kvfast.attention.workspace cimport (COUNTS, DECODED, FOLDS, GATHERED, ITEMS, PARTIALS, QUERIES, ROPE, SCRATCH, WIDE, give_back,
                                         kv_workspace, lend, release, reserve)
from kvfast.codec.blocks cimport kv_context, kv_layout, values_of
from kvfast.core.kernels cimport active_for, kv_rope_scratch, kv_wide_scratch
from kvfast.core.limits cimport KV_TILE
from kvfast.core.threads cimport gather_unwatched, work_of_attention

cdef void open_plan(kv_plan *plan, kv_workspace *workspace) noexcept nogil:
    """Begin a call, which `close_plan` ends, in the working memory of a cache."""
    plan.workspace, plan.given.wide = lend(workspace, &plan.own), NULL


cdef void close_plan(kv_plan *plan) noexcept nogil:
    if plan.given.wide != NULL and not plan.given.layout.latent:  # megabytes, which each token of latent rows needs
        release(plan.workspace, WIDE)
        release(plan.workspace, FOLDS)
    give_back(plan.workspace, &plan.own)


cdef bint plan_of(kv_plan *plan, const kv_request *request, const kv_layout *layout, kv_member *members, Py_ssize_t count,
                  const kv_prefix *prefixes, Py_ssize_t num_prefixes) noexcept nogil:
    """Plan a request that fits the layout, for the sequences that its queries belong to. False if it is refused; `refusal` says why."""
    cdef Py_ssize_t i
    _begin(plan, request, layout)
    if members[0].length == 0 and not request.is_batch:
        return refuse(&plan.refusal, VALUE, b"{of} holds no tokens to attend to")
    for i in range(count):
        if members[i].num_queries > members[i].length and not members[i].is_foreign:
            refuse(&plan.refusal, VALUE, b"sequence {member} of the batch holds {0} tokens, and q {1} of them" if request.is_batch
                   else b"q must hold at most the {0} tokens of {of}, got {1}", members[i].length, members[i].num_queries)
            plan.refusal.member = i
            return False
    if not (open_sight(request, plan.workspace, members, count, &plan.refusal) and _reserve_queries(plan, members, count)):
        return False
    for i in range(count):
        if not _see(plan, members + i):
            return False
    if request.options.indices != NULL:
        if not open_chosen(&plan.chosen, &plan.call, plan.workspace, &plan.refusal):
            return False
        plan.given.chosen = &plan.chosen
    for i in range(num_prefixes):
        _read_together(plan, prefixes + i, members)
    for i in range(count):
        if members[i].num_segments:
            _add_segments(plan, members + i)
        else:
            _add(plan, &members[i].context, members[i].first_query, members[i].num_queries, members[i].begin, members[i].parts)
    gather_unwatched(&plan.team, request.options.num_threads, <double>plan.work)
    return _make_room(plan, _deal(plan)) or no_memory(&plan.refusal)


cdef void _begin(kv_plan *plan, const kv_request *request, const kv_layout *layout) noexcept nogil:
    memset(&plan.call, 0, sizeof(plan.call))
    memset(&plan.given, 0, sizeof(plan.given))
    plan.work = plan.context = plan.uncounted = 0
    plan.team.watch = NULL
    plan.wide = plan.packed = plan.bad = False
    plan.extra = request.q.tokens
    plan.given.request, plan.given.layout, plan.given.bad = request[0], layout, &plan.bad
    plan.call.given, plan.call.kernels, plan.call.values = &plan.given, active_for(request.options.precision), values_of(layout)
    plan.call.sinks, plan.call.own_folds = request.options.sinks, True
    plan.call.num_q_heads, plan.call.group = request.q.heads, <int>(request.q.heads // layout.num_kv_heads)
    plan.given.tile = choose_tile(layout, plan.call.kernels, False)
    if layout.floats != NULL:
        plan.given.float_tile = choose_tile(layout.floats, plan.call.kernels, True)


cdef inline Py_ssize_t _views(int views, const kv_segment *segment) noexcept nogil:
    """The views of a segment whose queries are not those of the tokens: its own are rotated, or have other positions."""
    return (views & AS_SINKS != 0) + (views & AS_WINDOW != 0 and not segment.is_newest)


cdef bint _reserve_queries(kv_plan *plan, const kv_member *members, Py_ssize_t count) noexcept nogil:
    """Make room for the queries of the tokens, and for those of segments."""
    cdef const kv_request *request = &plan.given.request
    cdef Py_ssize_t queries = request.q.tokens, contexts = count, items, i, j
    cdef int views
    for i in range(count):
        for j in range(members[i].num_segments):
            views = views_of(request, members + i, members[i].segments + j)
            contexts += 2  # views
            queries += members[i].num_queries * _views(views, members[i].segments + j)
    items = queries if request.options.indices != NULL else 2 * contexts  # one for each, and those for shared prefixes
    plan.call.num_queries = queries
    plan.call.items = <kv_item *>reserve(plan.workspace, ITEMS, items * (sizeof(kv_item) + sizeof(kv_keys)))
    plan.keys = <kv_keys *>(plan.call.items + items)
    plan.call.queries = <kv_query *>reserve(plan.workspace, QUERIES, queries * sizeof(kv_query))
    return (plan.call.items != NULL and plan.call.queries != NULL) or no_memory(&plan.refusal)


cdef bint _see(kv_plan *plan, kv_member *member) noexcept nogil:
    """Set what the queries of a sequence see; False if the first one needs keys that were dropped."""
    cdef kv_query *first = plan.call.queries + member.first_query
    member.begin, member.parts = 0, 0
    plan.context += member.length
    plan.uncounted += member.uncounted
    see(&plan.given.request, member, first)
    if member.num_queries and first.start < member.held_from:
        return refuse(&plan.refusal, VALUE, b"the first query, at position {0}, needs the keys from position {1} on, and the ring has "
                      b"dropped some of them", first.position, first.start)
    return True


cdef void _add(kv_plan *plan, const kv_context *context, Py_ssize_t first_query, Py_ssize_t num_queries, Py_ssize_t begin,
               int part) noexcept nogil:
    """Add an item for queries, which read their context from position `begin` on. Each query with chosen tokens has an item of its
    own; its positions are indices into the chosen tokens."""
    cdef kv_item *item
    cdef kv_query *first = plan.call.queries + first_query
    cdef Py_ssize_t i, start, end
    while num_queries and plan.given.chosen != NULL:
        item = _open_item(plan, context)
        item.first_query, item.num_queries, item.part = first_query, 1, part
        _close(plan, item, most_chosen(&plan.chosen, first_query))
        first_query += 1
        num_queries -= 1
    if num_queries:
        item = _open_item(plan, context)
        item.first_query, item.num_queries, item.part = first_query, num_queries, part
        start, end = first.start, 0
        for i in range(num_queries):
            start = min(start, first[i].start)
            end = max(end, first[i].stop, first[i].start + 1 if first[i].sink_stop else 0,
                      first[i].tree + 1 if first[i].num_stretches else 0)
        item.begin = max(begin, start // KV_TILE * KV_TILE)
        _close(plan, item, max(end, item.begin + 1))


cdef kv_item *_open_item(kv_plan *plan, const kv_context *context) noexcept nogil:
    """The next item, which reads a context; `_close` adds it."""
    cdef kv_item *item = plan.call.items + plan.call.num_items
    memset(item, 0, sizeof(kv_item))
    item.keys = memset(plan.keys + plan.call.num_items, 0, sizeof(kv_keys))
    plan.keys[plan.call.num_items].context = context[0]
    return item


cdef void _close(kv_plan *plan, kv_item *item, Py_ssize_t end) noexcept nogil:
    """Split the item's positions up to `end`."""
    cdef Py_ssize_t span = end - item.begin
    cdef int panels
    cut_context(&plan.call, item, end)
    panels = cut_rows(&plan.call, item)
    if panels >= 0:
        plan.wide, plan.given.panel_kind = True, panels
    plan.packed = plan.packed or panels == NO_PACKED_PANELS
    plan.call.num_items += 1
    plan.work += <Py_ssize_t>(work_of_attention(work_of(plan.given.layout, span))
                              * max(1.0, item.num_queries * plan.call.group / 8.0))


cdef void _read_together(kv_plan *plan, const kv_prefix *prefix, kv_member *members) noexcept nogil:
    """Add an item for a prefix that members share. Sets where their own items begin, and the number of partial results before these."""
    cdef kv_member *first = members + prefix.members[0]
    cdef kv_item *item = _open_item(plan, &first.context)
    cdef Py_ssize_t i
    item.members, item.num_queries = prefix.queries, prefix.num_queries
    item.begin, item.part = prefix.begin, first.parts
    _close(plan, item, prefix.end)
    for i in range(prefix.num_members):
        members[prefix.members[i]].begin = prefix.end
        members[prefix.members[i]].parts = item.part + <int>item.splits


cdef void _add_segments(kv_plan *plan, const kv_member *member) noexcept nogil:
    """Add the items of a spliced sequence. To its tasks, each segment is a context of its own."""
    cdef const kv_segment *segment
    cdef Py_ssize_t first_item = plan.call.num_items, number
    cdef int part = 0, views
    for number in range(member.num_segments):
        segment = member.segments + number
        views = views_of(&plan.given.request, member, segment)
        if views & AS_SINKS:
            part = _add_view(plan, member, segment, True, part, first_item)
        if views & AS_WINDOW:
            part = _add_view(plan, member, segment, False, part, first_item)


cdef int _add_view(kv_plan *plan, const kv_member *member, const kv_segment *segment, bint as_sinks, int part,
                   Py_ssize_t first_item) noexcept nogil:
    """Add the items that read a segment, or the sink tokens in it. Returns the number of partial results of them and those before."""
    cdef Py_ssize_t row = member.first_query, i, first = member.num_queries, last = -1, items = plan.call.num_items
    cdef kv_query *query
    if as_sinks or not segment.is_newest:
        row, plan.extra = plan.extra, plan.extra + member.num_queries
    for i in range(member.num_queries):
        query = plan.call.queries + row + i
        query[0] = plan.call.queries[member.first_query + i]
        narrow(query, segment, as_sinks)
        if query.start < query.stop or query.num_stretches:
            first, last = min(first, i), i
    if plan.given.chosen != NULL:
        for i in range(member.num_queries):
            if split_chosen(&plan.chosen, member.first_query + i, row + i, end_of(segment), segment.start - segment.first):
                query = plan.call.queries + member.first_query + i
                _add(plan, &segment.context, row + i, 1, 0, query.parts)
                query.parts += <int>plan.call.items[plan.call.num_items - 1].splits
    elif first <= last:
        _add(plan, &segment.context, row + first, last + 1 - first, 0, part)
        if plan.call.num_items == items + 1:
            _join(plan, first_item)
    for i in range(items, plan.call.num_items):
        plan.keys[i].rotation = segment.rotation
        part = max(part, plan.call.items[i].part + <int>plan.call.items[i].splits)
    return part


cdef void _join(kv_plan *plan, Py_ssize_t first_item) noexcept nogil:
    """Let the last item continue the one before it, if that is not before `first_item` and their tasks have the same rows. So these
    leave one partial result for many segments."""
    cdef kv_item *item = plan.call.items + plan.call.num_items - 1
    cdef kv_item *before = item - 1
    item.continues = (plan.call.num_items - 2 >= first_item and item.num_queries == before.num_queries
                      and plan.call.queries[item.first_query].token == plan.call.queries[before.first_query].token
                      and item.block_rows == before.block_rows and takes_whole(&plan.call, item) and takes_whole(&plan.call, before))


cdef Py_ssize_t _deal(kv_plan *plan) noexcept nogil:
    """Deal the splits of all items out to tasks, and number the partial results of each query, per query head; returns how many
    slots there are for them."""
    cdef Py_ssize_t i, j
    cdef kv_item *item
    cdef kv_query *query
    deal_splits(&plan.call, plan.team.threads)
    for i in range(plan.call.num_items):
        item = plan.call.items + i
        for j in range(item.num_queries):
            query = plan.call.queries + (item.members[j] if item.members != NULL else item.first_query + j)
            query = plan.call.queries + query.token
            query.parts = max(query.parts, item.part + <int>item.splits)
    return kv_count_slots(&plan.call, plan.given.request.q.tokens)


cdef bint _make_room(kv_plan *plan, Py_ssize_t slots) noexcept nogil:
    """Reserve memory for partial results and threads; False if out of memory."""
    cdef const kv_request *request = &plan.given.request
    cdef const kv_layout *layout = plan.given.layout
    cdef Py_ssize_t threads = plan.team.threads, width = kv_partial_size(plan.call.values), rows = 0, i
    if request.q.data == NULL:  # for a plan that only explains
        return True
    for i in range(plan.call.num_items):
        rows = max(rows, <Py_ssize_t>plan.call.items[i].block_rows)
    plan.given.folds_size = rows * width
    plan.given.folds = <double *>reserve(plan.workspace, FOLDS, threads * plan.given.folds_size * sizeof(double))
    if slots:
        slots *= plan.call.num_q_heads * width
        plan.call.partials = <double *>reserve(plan.workspace, PARTIALS, slots * sizeof(float))
        plan.call.unfinished = <int *>reserve(plan.workspace, COUNTS, request.q.tokens * layout.num_kv_heads * sizeof(int))
        if plan.call.partials == NULL or plan.call.unfinished == NULL:
            return False
        kv_count_tasks(&plan.call, request.q.tokens)
        if plan.call.num_queries > request.q.tokens:
            kv_clear_partials(&plan.call, request.q.tokens)
    if plan.wide:
        plan.given.wide = <kv_wide_scratch *>reserve(plan.workspace, WIDE, threads * sizeof(kv_wide_scratch))
    if request.rope_q.data != NULL:
        plan.given.rope = <kv_rope_scratch *>reserve(plan.workspace, ROPE, threads * sizeof(kv_rope_scratch))
    if layout.decode != NULL:
        plan.given.decoded_size = plan.given.tile * max(layout.k.padded_dim, layout.v.padded_dim)
        plan.given.decoded = <uint16_t *>reserve(plan.workspace, DECODED, threads * plan.given.decoded_size * sizeof(uint16_t))
    if plan.given.chosen != NULL:
        plan.chosen.room = <char *>reserve(plan.workspace, GATHERED, threads * plan.chosen.room_bytes)
    plan.given.scratch = <void **>reserve(plan.workspace, SCRATCH, threads * sizeof(void *))
    return (plan.given.scratch != NULL and plan.given.folds != NULL and (not plan.wide or plan.given.wide != NULL)
            and (request.rope_q.data == NULL or plan.given.rope != NULL)
            and (layout.decode == NULL or plan.given.decoded != NULL)
            and (plan.given.chosen == NULL or plan.chosen.room != NULL))
