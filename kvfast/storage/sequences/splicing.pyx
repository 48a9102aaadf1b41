# cython: language_level=3, boundscheck=False, cdivision=True
"""Puts sequences that were computed apart one after another, and takes runs of tokens out, without computing keys again."""
from kvfast.core.checks cimport check_count
from kvfast.storage.sequences.segments cimport (FrozenTables, Segment, blocks_of_copies, copy_tables, cut, frozen_of, narrowed,
                                                rotations_of, share_tables)
from kvfast.storage.sequences.sequence cimport SequenceBuffer
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.ring_table cimport RingTable

from kvfast.errors import CacheFullError


cdef int _check_still(SequenceBuffer buffer, object ropes) except -1:
    """Check that a sequence keeps all of its tokens, that all layers have as many, and that its keys were rotated by `ropes`."""
    cdef BlockTable table
    cdef Py_ssize_t layer
    for table in buffer.tables:
        if isinstance(table, RingTable):
            raise ValueError("a ring or a pool with a window cannot be spliced: it drops tokens by itself")
        for layer in range(table.pool.num_layers):
            if table.lengths[layer] != table.length:
                raise ValueError(f"layers hold {table.lengths[layer] - table.length} tokens that are not complete: advance or "
                                 f"truncate first")
    if buffer.ropes is not None and buffer.ropes != ropes:
        raise ValueError("rope must be the one that the cache was spliced with before")
    return 0


cdef int _move(list segments, Py_ssize_t distance, object ropes) except -1:
    """Move segments that no sequence has yet."""
    cdef Segment segment
    known = {}
    for segment in segments:
        segment.start += distance
        segment.shift += distance
        if segment.shift not in known:
            known[segment.shift] = rotations_of(ropes, segment.shift)
        segment.rotations = known[segment.shift]
    return 0


cdef list _frozen(SequenceBuffer buffer, list segments):
    """Copies of a sequence's segments that read tables of their own where they read those of the sequence."""
    cdef FrozenTables frozen = None
    cdef Segment segment, other
    result = []
    for segment in segments:
        other = segment.part(segment.start, segment.end())
        if other.frozen is None:
            frozen = frozen or share_tables(buffer.tables)
            other.frozen = frozen
        result.append(other)
    return result


cdef int _settle(list frozen_tables) except -1:
    """Settle tables. Allocates nothing, as the splice is done by then."""
    cdef FrozenTables frozen
    cdef BlockTable table
    for frozen in frozen_tables:
        for table in frozen.tables:
            table.states.settle(table.length)
    return 0


cdef list _segments_in(SequenceBuffer buffer, SequenceBuffer chunk):
    """The segments of a chunk, in tables of the buffer's pools."""
    cdef Segment segment
    cdef FrozenTables frozen
    cdef list segments = chunk.all_segments((<BlockTable>chunk.tables[0]).length)
    if chunk._pool() is buffer._pool():
        return _frozen(chunk, segments)
    copies, result = {}, []
    chunk.enter_reading()
    try:
        for segment in segments:
            frozen = segment.frozen
            if frozen not in copies:
                copies[frozen] = copy_tables(chunk.tables if frozen is None else frozen.tables, buffer.tables)
            segment = segment.part(segment.start, segment.end())
            segment.frozen = copies[frozen]
            result.append(segment)
    finally:
        chunk.leave_reading()
    return result


def check_splice(SequenceBuffer buffer, list chunks, ropes, Py_ssize_t recomputed):
    """Check everything about `splice` but the room in a shared pool."""
    cdef SequenceBuffer chunk
    cdef Py_ssize_t length = buffer.length, room
    _check_still(buffer, ropes)
    for chunk in chunks:
        if chunk.ropes is not None and chunk.ropes != ropes:
            raise ValueError("rope must be the one that the chunk was spliced with before")
    if recomputed > length:
        raise ValueError(f"recomputed must be at most the {length} tokens of the cache, got {recomputed}")
    total = sum([(<SequenceBuffer>chunk).length for chunk in chunks]) - recomputed
    if buffer.most >= 0 and length + total > buffer.most:
        room = buffer.most - length
        raise CacheFullError(f"the cache has room for {room} of {buffer.most} tokens, got {total}", total, room)


cdef int _check_room(SequenceBuffer buffer, list chunks) except -1:
    """Check that a shared pool has the blocks for copies of all chunks of other pools."""
    cdef SequenceBuffer chunk
    cdef BlockTable table = buffer.tables[0]
    cdef Py_ssize_t needed = 0
    for chunk in chunks if table.pool.is_shared else ():
        if chunk._pool() is not table.pool:
            needed += blocks_of_copies(chunk.all_segments((<BlockTable>chunk.tables[0]).length), chunk.tables, table)
    return table.pool.ensure(needed) if needed else 0


def splice(SequenceBuffer buffer, list chunks, ropes, Py_ssize_t recomputed, begin=None):
    """Append sequences, one after another, to the tokens of a buffer.

    Parameters
    ----------
    buffer : SequenceBuffer
    chunks : list of SequenceBuffer
        With the same settings. They do not change while the call runs.
    ropes : tuple
        For each layer (frequencies, whether interleaved), or None.
    recomputed : int
        Number of first tokens of the only chunk that are the last tokens of the buffer.
    begin : callable, optional
        Called after the last step that can fail.
    """
    cdef SequenceBuffer chunk
    cdef BlockTable table
    cdef Py_ssize_t length, end
    cdef list segments, added, frozen, _old = buffer.segments  # which are released after the end of the call
    buffer._enter()
    try:
        check_splice(buffer, chunks, ropes, recomputed)
        if sum([(<SequenceBuffer>chunk).length for chunk in chunks]) == recomputed:
            return  # nothing follows, and the cache stays the sequence in one piece that it is
        _check_room(buffer, chunks)
        length = end = buffer.length
        segments = _frozen(buffer, buffer.all_segments(length - buffer.base))
        for chunk in chunks:
            added = _segments_in(buffer, chunk)
            _move(added, end - recomputed, ropes)
            end += chunk.length - recomputed
            segments += [narrowed(<Segment>segment) for segment in cut(added, length if recomputed else 0, end)]
        frozen = frozen_of(segments)
        if begin is not None:
            begin()
        for table in buffer.tables:
            table.truncate(0)
        buffer.set_segments(segments, end, ropes)
        _settle(frozen)
    finally:
        buffer._leave()


def drop(SequenceBuffer buffer, first, last, ropes, truncate, begin=None):
    """Take the positions from `first` to `last` out; later ones move up. Calls `truncate` instead if there are none. See `splice`."""
    cdef BlockTable table
    cdef Segment segment
    cdef Py_ssize_t length, low, high
    cdef list before, behind, live, segments, frozen, _old = buffer.segments  # which are released after the end of the call
    _check_still(buffer, ropes)
    length = buffer.length
    low, high = check_count(first, "first", 0, length), check_count(last, "last", 0, length)
    if low > high:
        raise ValueError(f"first must be at most last, got {low} and {high}")
    if low == high:
        return
    if high == length:
        truncate(low)
        return
    buffer._enter()
    try:
        _check_still(buffer, ropes)  # again: another thread may have changed the cache
        if buffer.length != length:
            raise RuntimeError(f"another thread has changed the cache: it held {length} tokens, and holds {buffer.length} now")
        segments = buffer.all_segments(length - buffer.base)
        before, behind = cut(segments, 0, low), cut(segments, high, length)
        _move(behind, low - high, ropes)
        if (<Segment>behind[-1]).frozen is None:
            before = _frozen(buffer, before)  # the tables themselves go on after the gap
        segments = [narrowed(<Segment>segment) for segment in before + behind]
        frozen = frozen_of(segments)
        live = [segment for segment in behind if (<Segment>segment).frozen is None][:1]  # others follow it in the same tables
        for segment in live:
            for table in buffer.tables:
                table.own(segment.first)
        if begin is not None:
            begin()
        for segment in live:
            for table in buffer.tables:
                table.drop_front(segment.first)
                table.wipe_before(segment.first)
        buffer.set_segments(segments, buffer.base - (high - low), ropes)
        _settle(frozen)
        buffer._trim_surplus()
    finally:
        buffer._leave()
