# cython: language_level=3, boundscheck=False, cdivision=True
"""Puts sequences that were computed apart one after another, and takes runs of tokens out, without computing keys again."""
from kvfast.core.checks cimport check_count
from kvfast.storage.sequences.segments cimport (FrozenTables, Segment, blocks_of_copies, copied, cut, frozen_of, narrowed, rotations_of,
                                                share_tables)
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.ring_table cimport RingTable

from kvfast.errors import CacheFullError


cdef int _check_still(SequenceStorage storage, object ropes) except -1:
    """Check that a sequence keeps all of its tokens, that all layers have as many, and that its keys were rotated by `ropes`."""
    cdef BlockTable table
    cdef Py_ssize_t layer
    for table in storage.tables:
        if isinstance(table, RingTable):
            raise ValueError("a ring or a pool with a window cannot be spliced: it drops tokens by itself")
        for layer in range(table.pool.num_layers):
            if table.lengths[layer] != table.length:
                raise ValueError(f"layers hold {table.lengths[layer] - table.length} tokens that are not complete: advance or "
                                 f"truncate first")
    if storage.ropes is not None and storage.ropes != ropes:
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


cdef list _frozen(SequenceStorage storage, list segments):
    """Copies of a sequence's segments that read tables of their own where they read those of the sequence."""
    cdef FrozenTables frozen = None
    cdef Segment segment
    result = []
    for segment in segments:
        if segment.frozen is None and frozen is None:
            frozen = share_tables(storage.tables)
        result.append(segment.in_tables(segment.frozen or frozen))
    return result


cdef int _settle(list frozen_tables) except -1:
    """Settle tables. Allocates nothing, as the splice is done by then."""
    cdef FrozenTables frozen
    cdef BlockTable table
    for frozen in frozen_tables:
        for table in frozen.tables:
            table.life.settle(table.length)
    return 0


cdef list _segments_in(SequenceStorage storage, SequenceStorage part):
    """The segments of a part, in tables of the storage's pools."""
    cdef list segments = part.all_segments((<BlockTable>part.tables[0]).length)
    if part.pool is storage.pool:
        return _frozen(part, segments)
    part.enter_reading()
    try:
        return copied(segments, storage.tables, part.tables)
    finally:
        part.pool.leave_reading()


def check_splice(SequenceStorage storage, list parts, ropes, Py_ssize_t recomputed):
    """Check everything about `splice` but the room in a shared pool."""
    cdef SequenceStorage part
    cdef Py_ssize_t length = storage.length, room
    _check_still(storage, ropes)
    for part in parts:
        if part.ropes is not None and part.ropes != ropes:
            raise ValueError("rope must be the one that the part was spliced with before")
    if recomputed > length:
        raise ValueError(f"recomputed must be at most the {length} tokens of the cache, got {recomputed}")
    total = sum([(<SequenceStorage>part).length for part in parts]) - recomputed
    if storage.most >= 0 and length + total > storage.most:
        room = storage.most - length
        raise CacheFullError(f"the cache has room for {room} of {storage.most} tokens, got {total}", total, room)


cdef int _check_room(SequenceStorage storage, list parts) except -1:
    """Check that a shared pool has the blocks for copies of all parts of other pools."""
    cdef SequenceStorage part
    cdef BlockTable table = storage.tables[0]
    cdef Py_ssize_t needed = 0
    for part in parts if table.pool.is_shared else ():
        if part.pool is not table.pool:
            needed += blocks_of_copies(part.all_segments((<BlockTable>part.tables[0]).length), part.tables, table)
    return table.pool.ensure(needed) if needed else 0


def splice(SequenceStorage storage, list parts, ropes, Py_ssize_t recomputed, begin=None):
    """Append the storages `parts`, one after another, to the tokens of a storage; the first `recomputed` tokens of an only part are
    its last tokens already.

    `ropes` has (frequencies, whether interleaved) or None for each layer. `begin` is called after the last step that can fail. No part
    may change meanwhile.
    """
    cdef SequenceStorage part
    cdef BlockTable table
    cdef Py_ssize_t length, end
    cdef list segments, added, frozen, _old = storage.segments  # which are released after the end of the call
    storage._enter()
    try:
        check_splice(storage, parts, ropes, recomputed)
        if sum([(<SequenceStorage>part).length for part in parts]) == recomputed:
            return  # nothing follows, and the cache stays the sequence in one piece that it is
        _check_room(storage, parts)
        length = end = storage.length
        segments = _frozen(storage, storage.all_segments(length - storage.base))
        for part in parts:
            added = _segments_in(storage, part)
            _move(added, end - recomputed, ropes)
            end += part.length - recomputed
            segments += narrowed(cut(added, length if recomputed else 0, end), 0)
        frozen = frozen_of(segments)
        if begin is not None:
            begin()
        for table in storage.tables:
            table.truncate(0)
        storage.set_segments(segments, end, ropes)
        _settle(frozen)
    finally:
        storage.pool.leave()


def drop(SequenceStorage storage, first, last, ropes, truncate, begin=None):
    """Take the positions from `first` to `last` out; later ones move up. Calls `truncate` instead if there are none. See `splice`."""
    cdef BlockTable table
    cdef Segment segment
    cdef Py_ssize_t length, low, high
    cdef list before, behind, live, segments, frozen, _old = storage.segments  # which are released after the end of the call
    _check_still(storage, ropes)
    length = storage.length
    low, high = check_count(first, "first", 0, length), check_count(last, "last", 0, length)
    if low > high:
        raise ValueError(f"first must be at most last, got {low} and {high}")
    if low == high:
        return
    if high == length:
        truncate(low)
        return
    storage._enter()
    try:
        _check_still(storage, ropes)  # again: another thread may have changed the cache
        if storage.length != length:
            raise RuntimeError(f"another thread has changed the cache: it held {length} tokens, and holds {storage.length} now")
        segments = storage.all_segments(length - storage.base)
        before, behind = cut(segments, 0, low), cut(segments, high, length)
        _move(behind, low - high, ropes)
        if (<Segment>behind[-1]).frozen is None:
            before = _frozen(storage, before)  # the tables themselves go on after the gap
        live = [segment for segment in behind if (<Segment>segment).frozen is None][:1]  # others follow it in the same tables
        segments = narrowed(before + behind, sum([(<BlockTable>storage.tables[0]).is_shared_at((<Segment>segment).first)
                                                  for segment in live]))
        frozen = frozen_of(segments)
        for segment in live:
            for table in storage.tables:
                table.own(segment.first)
        if begin is not None:
            begin()
        for segment in live:
            for table in storage.tables:
                table.drop_front(segment.first)
                table.wipe_before(segment.first)
        storage.set_segments(segments, storage.base - (high - low), ropes)
        _settle(frozen)
        storage._trim_surplus()
    finally:
        storage.pool.leave()
