# cython: language_level=3, boundscheck=False, cdivision=True
"""Segments: runs of positions whose keys were rotated for other positions (PromptCache, arXiv 2311.04934; llama.cpp's context shift).

Rotary scores depend on distances alone. So keys stay as they are stored, and the queries are rotated back by the shift of each
segment. To attention a segment is a context of its own. The same tasks read all segments for many queries; for a few, partial results
are merged like those of any other split.
"""
import numpy as np

from kvfast.attention.plan cimport Plan, no_memory
from kvfast.attention.tasks cimport kv_query
from kvfast.codec.blocks cimport kv_context
from kvfast.codec.projection import rotated
from kvfast.core.kernels cimport kv_transform
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.copying cimport CopyPlan, blocks_for, copy_table, plan_copy


cdef class FrozenTables:
    """Tables that no token follows any more. Several segments, and several sequences, may read them."""

    def __del__(self):
        cdef BlockTable table
        if self.tables is not None:
            for table in self.tables:
                (<BlockTable>self.tables[0]).pool.release_later(table)

    @property
    def nbytes_alone(self):
        """Bytes that these tables keep from being freed."""
        return sum([table.nbytes_alone for table in self.tables])


cdef class Segment:
    """Positions that lie one after the other in one table."""

    cdef Py_ssize_t end(self) noexcept:
        return self.start + self.last - self.first

    cdef Segment part(self, Py_ssize_t begin, Py_ssize_t end):
        """The positions of the segment from `begin` to `end`."""
        cdef Segment other = Segment.__new__(Segment)
        other.frozen, other.shift, other.rotations = self.frozen, self.shift, self.rotations
        other.start = max(begin, self.start)
        other.first = other.start - self.start + self.first
        other.last = min(end, self.end()) - self.start + self.first
        return other

    def describe(self):
        """What is equal if two segments show the same tokens at the same positions, tables apart."""
        return self.start, self.first, self.last, self.shift


cdef FrozenTables share_tables(list tables):
    """Tables that share the blocks of others of the same pools."""
    cdef FrozenTables frozen = FrozenTables.__new__(FrozenTables)
    cdef BlockTable table, other
    frozen.tables = []
    for table in tables:
        other = table.empty(table.pool)
        frozen.tables.append(other)
        other.share(table)
    return frozen


cdef FrozenTables copy_tables(list tables, list live):
    """Copies of tables in the pools of the tables of a sequence."""
    cdef FrozenTables frozen = FrozenTables.__new__(FrozenTables)
    cdef BlockTable table, mine, other
    cdef CopyPlan plan
    frozen.tables = []
    for table, mine in zip(tables, live):
        other = mine.empty(mine.pool)
        frozen.tables.append(other)
        plan = plan_copy(other, table)
        other.reserve(blocks_for(other, table), len(plan.pieces))
        copy_table(table, other, plan, False)
    return frozen


cdef list cut(list segments, Py_ssize_t begin, Py_ssize_t end):
    """The parts of some segments between two positions."""
    cdef Segment segment
    return [segment.part(begin, end) for segment in segments if segment.start < end and begin < segment.end()]


cdef bint _is_narrow(Segment segment):
    """Whether the tables of a segment cannot do without a block; in a secure pool, whether they have no other token."""
    cdef BlockTable table
    if segment.frozen is None:
        return True
    table = segment.frozen.tables[0]
    return (segment.first // table.pool.block_size == table.map.skipped
            and (segment.last + table.pool.block_size - 1) // table.pool.block_size == table.map.end()
            and (not table.pool.secure or segment.first == segment.frozen.wiped and segment.last == table.longest()))


cdef Py_ssize_t _num_cut(Segment segment):
    """Number of blocks that a segment begins or ends inside of."""
    cdef BlockTable table = segment.frozen.tables[0]
    cdef Py_ssize_t size = table.pool.block_size
    cdef bint begins = segment.first % size != 0, ends = segment.last % size != 0 and segment.last < table.longest()
    return begins + (ends and not (begins and segment.first // size == segment.last // size))


cdef list narrowed(list segments, Py_ssize_t more):
    """Segments with tables of their own, where these can do without some of the blocks; in a secure pool without any other token.
    CacheFullError, before anything changes, if a shared pool lacks the blocks for that and `more` others."""
    cdef BlockTable table
    cdef Segment segment
    cdef list wide = [segment for segment in segments if not _is_narrow(segment)]
    for segment in wide:
        more += _num_cut(segment)
    for segment in wide[:1]:
        table = segment.frozen.tables[0]
        if table.pool.secure and table.pool.is_shared:
            table.pool.ensure(more)
    return [segment if _is_narrow(segment) else _alone(segment) for segment in segments]


cdef Segment _alone(Segment segment):
    cdef BlockTable table
    cdef Segment other = segment.part(segment.start, segment.end())
    other.frozen = share_tables(segment.frozen.tables)
    for table in other.frozen.tables:
        table.own(segment.last)
        table.own(segment.first)
        table.truncate(segment.last)
        table.drop_front(segment.first)
        table.wipe_before(segment.first)
    other.frozen.wiped = segment.first
    return other


cdef list frozen_of(list segments):
    """The FrozenTables of some segments, each once."""
    cdef Segment segment
    return list(dict.fromkeys([segment.frozen for segment in segments or () if segment.frozen is not None]))


cdef Py_ssize_t blocks_of_copies(list segments, list tables, BlockTable live) except -1:
    """Number of blocks of a pool with one table a sequence that copies of the tables of some segments need: their own, or `tables`."""
    cdef Py_ssize_t needed = 0
    for frozen in dict.fromkeys([(<Segment>segment).frozen for segment in segments]):
        needed += blocks_for(live, tables[0] if frozen is None else (<FrozenTables>frozen).tables[0])
    return needed


cdef list copied(list segments, list live):
    """Segments with copies of their tables in the pools of other tables."""
    cdef Segment segment, other
    cdef FrozenTables frozen
    copies, result = {}, []
    for frozen in frozen_of(segments):
        copies[frozen] = copy_tables(frozen.tables, live)
    for segment in segments:
        other = segment.part(segment.start, segment.end())
        other.frozen = copies.get(segment.frozen)
        result.append(other)
    return result


cdef list rotations_of(object ropes, Py_ssize_t shift):
    """`Segment.rotations` for the rotation of each layer: (frequencies, whether interleaved), or None."""
    known = {None: None}
    for rope in ropes if shift else ():
        if rope not in known:
            angles = -shift * np.array(rope[0], np.float64)
            known[rope] = np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)[:, None], rope[1]
    return [known[rope] if shift else None for rope in ropes]


cdef object rotated_keys(object k, object rotation):
    """Decoded keys of a segment, rotated for its positions."""
    if rotation is None or not len(k):
        return k
    angles, interleaved = rotation
    cos, sin = np.repeat(angles, len(k), axis=1)
    return rotated(k, cos, -sin, interleaved)


cdef list _views(Plan plan, SplicedReader reader):
    """The segments that some query sees, with whether as sink tokens alone.

    A segment that begins as a sequence does is one view, sink tokens and window, so that a query which sees no other has the bits
    that it has in a sequence that is not spliced. Another segment may have two views.
    """
    cdef kv_query oldest, newest
    cdef Segment segment
    cdef bint has_sinks
    plan.sees(&oldest, reader.length - reader.num_queries, reader.length)
    plan.sees(&newest, reader.length - 1, reader.length)
    views = []
    for segment in reader.segments if reader.num_queries else ():
        has_sinks = segment.start < newest.sink_stop
        if has_sinks and not _begins(segment):
            views.append((segment, True))
        if oldest.start < segment.end() and segment.start < newest.stop or has_sinks and _begins(segment):
            views.append((segment, False))
    return views


cdef inline bint _begins(Segment segment) noexcept:
    """Whether a segment has the first token of its tables at position 0."""
    return segment.start == 0 and segment.first == 0


cdef inline (Py_ssize_t, Py_ssize_t) _within(Segment segment, Py_ssize_t begin, Py_ssize_t end) noexcept:
    """The part of a range of positions that lies in a segment."""
    begin = min(max(begin, segment.start), segment.end())
    return begin, min(max(end, begin), segment.end())


cdef inline bint _is_plain(SplicedReader reader, Segment segment, bint sinks):
    """Whether a view is read by the first queries of the tokens, which are not rotated."""
    return not sinks and segment.frozen is None and segment.shift == 0 and segment is reader.segments[-1]


cdef int _begin(Plan plan, SplicedReader reader) except -1:
    """Let the next queries of a plan be those of a sequence."""
    cdef Py_ssize_t newest = reader.length - (<Segment>reader.segments[-1]).start
    plan.use_spans(reader.spans, f"spans{reader.name}", reader.length)
    plan.use_parents(reader.parents, f"parents{reader.name}", reader.num_queries)
    if plan.num_drafts > newest:
        raise ValueError(f"parents{reader.name} must have at most {newest} drafts, as many tokens as were appended since the last "
                         f"splice, got {plan.num_drafts}")
    return 0


cdef int plan_spliced(Plan plan, list readers) except -1:
    """Make room in a call for the queries of some spliced sequences, before any `ask`, and set which positions each of them sees."""
    cdef SplicedReader reader
    cdef Segment segment
    cdef Py_ssize_t rows = plan.given.request.q.tokens, contexts = 1
    for reader in readers:
        _begin(plan, reader)
        reader.views = _views(plan, reader)
        contexts += len(reader.views) + 1
        for segment, sinks in reader.views:
            if not _is_plain(reader, segment, sinks):
                rows += reader.num_queries
    if not plan.reserve_queries(rows, contexts + plan.given.request.q.tokens):
        raise no_memory()
    for reader in readers:
        _begin(plan, reader)
        plan.ask(reader.length, reader.first_query, reader.num_queries)
    plan.keepalive = plan.keepalive, readers  # with the tables of their rotations
    return 0


cdef int _rotate_back(object rotation, kv_transform *transform) except -1:
    """Set what rotates the queries to a segment."""
    cdef const float[:, :, ::1] table
    if rotation is not None:
        table, transform.interleaved = rotation
        transform.cos, transform.sin, transform.pairs = &table[0, 0, 0], &table[1, 0, 0], table.shape[2]
    return 0


cdef void _narrow(kv_query *query, Segment segment, bint sinks) noexcept:
    """Let a query see a segment alone, whose tokens it counts as their tables do; `sinks`: the sink tokens of it."""
    cdef Py_ssize_t base = segment.start - segment.first, begin, end
    cdef bint begins = _begins(segment)
    if sinks or segment.end() <= query.tree:  # a tree lies in the last segment
        query.ancestors = 0
    query.tree -= base
    begin, end = _within(segment, query.start, query.stop)
    if sinks or begins and begin == end and query.ancestors == 0:
        begin, end = _within(segment, 0, query.sink_stop)
        begins = False
    query.position -= base
    query.start, query.stop = begin - base, end - base
    query.sink_stop = min(query.sink_stop, segment.end()) if begins else 0


cdef int ask_spliced(Plan plan, list readers) except -1:
    """Add the items of the sequences of `plan_spliced`."""
    cdef SplicedReader reader
    cdef Segment segment
    cdef Py_ssize_t row, extra = plan.given.request.q.tokens, i, first, last, items, first_item
    cdef int part
    cdef bint sinks
    cdef kv_query *query
    cdef kv_context context
    cdef BlockTable table
    for reader in readers:
        part, first_item = 0, plan.call.num_items
        for segment, sinks in reader.views:
            row = reader.first_query
            if not _is_plain(reader, segment, sinks):
                row, extra = extra, extra + reader.num_queries
            first, last = reader.num_queries, -1  # that see some of it
            for i in range(reader.num_queries):
                query = plan.call.queries + row + i
                query[0] = plan.call.queries[reader.first_query + i]
                _narrow(query, segment, sinks)
                if query.start < query.stop or query.ancestors:
                    first, last = min(first, i), i
            table = reader.live if segment.frozen is None else segment.frozen.tables[reader.which]
            table.context(reader.layer, &context)
            items = plan.call.num_items
            if plan.given.chosen != NULL:
                for i in range(reader.num_queries):
                    if plan.chosen.split(reader.first_query + i, row + i, segment.end(), segment.start - segment.first):
                        query = plan.call.queries + reader.first_query + i
                        plan.add(&context, row + i, 1, 0, query.parts)
                        query.parts += <int>plan.call.items[plan.call.num_items - 1].splits
            elif first <= last:
                plan.add(&context, row + first, last + 1 - first, 0, part)
                if plan.call.num_items == items + 1:
                    plan.join(first_item)
            for i in range(items, plan.call.num_items):
                if segment.rotations is not None:
                    _rotate_back(segment.rotations[reader.index], &plan.keys[i].rotation)
                part = max(part, plan.call.items[i].part + <int>plan.call.items[i].splits)
    return 0
