# cython: language_level=3, boundscheck=False, cdivision=True
"""Segments: runs of positions whose keys were rotated for other positions (PromptCache, arXiv 2311.04934; llama.cpp's context shift).

Rotary scores depend on distances alone. So keys stay as they are stored, and the queries are rotated back by the shift of each
segment. To attention a segment is a context of its own. The same tasks read all segments for many queries; for a few, partial results
are merged like those of any other split.
"""
import numpy as np

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from kvfast.attention.sight cimport kv_member, kv_segment
from kvfast.codec.decode cimport decode_tokens
from kvfast.codec.projection import rotated
from kvfast.core.kernels cimport kv_transform
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.copying cimport blocks_for, clone_table

from kvfast.core.interchange import aligned


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

    cdef Segment in_tables(self, FrozenTables frozen):
        """The segment in other tables, with the same tokens."""
        cdef Segment other = self.part(self.start, self.end())
        other.frozen = frozen
        return other

    def describe(self):
        """Equal for two segments that show the same tokens at the same positions, except for their tables."""
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
    frozen.tables = []
    for table, mine in zip(tables, live):
        frozen.tables.append(clone_table(table, (<BlockTable>mine).pool, False))
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
    cdef Segment other = segment.in_tables(share_tables(segment.frozen.tables))
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


cdef list copied(list segments, list live, list own=None):
    """Segments with copies of their tables in the pools of the tables `live`. `own`: the tables of their sequence, to copy them, too;
    without it, segments that read these stay without tables of their own."""
    cdef Segment segment
    cdef list tables
    copies, result = {}, []
    for segment in segments:
        if segment.frozen not in copies:
            tables = own if segment.frozen is None else segment.frozen.tables
            copies[segment.frozen] = None if tables is None else copy_tables(tables, live)
        result.append(segment.in_tables(copies[segment.frozen]))
    return result


cdef list rotations_of(object ropes, Py_ssize_t shift):
    """`Segment.rotations` for the rotation of each layer: (frequencies, whether interleaved), or None."""
    known = {None: None}
    for rope in ropes if shift else ():
        if rope not in known:
            angles = -shift * np.array(rope[0], np.float64)
            known[rope] = np.stack((np.cos(angles), np.sin(angles))).astype(np.float32)[:, None], rope[1]
    return [known[rope] if shift else None for rope in ropes]


cdef object _rotated_keys(object k, object rotation):
    """Decoded keys of a segment, rotated for its positions."""
    if rotation is None or not len(k):
        return k
    angles, interleaved = rotation
    cos, sin = np.repeat(angles, len(k), axis=1)
    return rotated(k, cos, -sin, interleaved)


cdef object rows_at(BlockTable table, Py_ssize_t layer, object positions, bint values):
    """Keys or values of a layer at some positions, decoded to float32."""
    cdef const int64_t[::1] at = aligned(positions, np.int64)
    cdef int64_t[::1] slots = np.empty(at.shape[0], np.int64)
    cdef Py_ssize_t i
    for i in range(at.shape[0]):
        slots[i] = table.map.slot(at[i])
    return decode_tokens(table.pool.layouts + layer, at, slots, table.life.shown_from(layer, table.length), values)


cdef object spliced_rows(list segments, BlockTable live, Py_ssize_t which, Py_ssize_t index, Py_ssize_t layer, bint values):
    """Keys, rotated for their positions, or values of a layer in all segments of a sequence; `live`: its own table, number `which`."""
    cdef Segment segment
    cdef BlockTable source
    cdef list parts = [np.empty((0, live.pool.num_kv_heads, live.pool.v_head_dim if values else live.pool.head_dim), np.float32)]
    for segment in segments:
        source = live if segment.frozen is None else segment.frozen.tables[which]
        rows = rows_at(source, layer, np.arange(segment.first, segment.last), values)
        parts.append(rows if values or segment.rotations is None else _rotated_keys(rows, segment.rotations[index]))
    return np.concatenate(parts)


cdef int fill_segments(list segments, BlockTable live, Py_ssize_t which, Py_ssize_t layer, Py_ssize_t index,
                       kv_member *member) except -1:
    """Describe the segments of a layer to attention: `layer` of the tables number `which`, `live` for the newest tokens.
    `free_segments` frees the memory."""
    cdef kv_segment *one = <kv_segment *>calloc(len(segments), sizeof(kv_segment))
    cdef BlockTable table
    cdef Segment segment
    if one == NULL:
        raise MemoryError("cannot allocate the segments of a spliced sequence")
    member.segments, member.num_segments = one, len(segments)
    for segment in segments:
        table = live if segment.frozen is None else segment.frozen.tables[which]
        table.context(layer, &one.context)
        one.start, one.first, one.last = segment.start, segment.first, segment.last
        one.is_newest = segment.frozen is None and segment.shift == 0 and segment is segments[-1]
        if segment.rotations is not None:
            _rotate_back(segment.rotations[index], &one.rotation)
        one += 1
    return 0


cdef void free_segments(kv_member *members, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(count):
        free(<void *>members[i].segments)


cdef int _rotate_back(object rotation, kv_transform *transform) except -1:
    """Set what rotates the queries to a segment."""
    cdef const float[:, :, ::1] table
    if rotation is not None:
        table, transform.interleaved = rotation
        transform.cos, transform.sin, transform.pairs = &table[0, 0, 0], &table[1, 0, 0], table.shape[2]
    return 0
