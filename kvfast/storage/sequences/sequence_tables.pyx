# cython: language_level=3, boundscheck=False, cdivision=True
"""The tables of a sequence: which layer is in which, who may enter their pools, their shapes and sizes; and the segments of a
spliced sequence. `segments` defines them, and `splicing` makes them."""
cimport cython
import numpy as np

from libc.stdint cimport int64_t

from kvfast.codec.decode cimport decode_tokens
from kvfast.core.checks cimport check_count, check_layer
from kvfast.core.kernels cimport parse_precision
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.sequences.segments cimport FrozenTables, Segment, copied, cut, frozen_of, narrowed, rotated_keys
from kvfast.storage.tables.block_table cimport BlockTable

from kvfast.core.checks import check_choice
from kvfast.core.interchange import aligned
from kvfast.core.kernels import name_of_precision


cdef tuple _shape_of(BlockTable table):
    return table.pool.num_kv_heads, table.pool.head_dim, table.pool.v_head_dim


cdef object rows_at(BlockTable table, Py_ssize_t layer, object positions, bint values):
    """Keys or values of a layer at some positions, decoded to float32."""
    cdef const int64_t[::1] at = aligned(positions, np.int64)
    cdef int64_t[::1] slots = np.empty(at.shape[0], np.int64)
    cdef Py_ssize_t i
    for i in range(at.shape[0]):
        slots[i] = table.map.slot(at[i])
    return decode_tokens(table.pool.layouts + layer, at, slots, table.states.begins[layer], values)


def advance_all(list sequences, list counts, list begins):
    """`advance` of some sequences of one pool: of all of them or of none. `begins` has a function, or None, for each."""
    cdef SequenceTables one, first = sequences[0]
    cdef BlockTable table
    numbers = [check_count(n, "n", 1) for n in counts]
    first._enter()
    try:
        for i, one in enumerate(sequences):
            one._check_advance(numbers[i], f"sequences[{i}]: " if len(sequences) > 1 else "")
        for one, n in zip(sequences, numbers):  # what can fail comes first, for all
            for table in one.tables:
                table.seal_full(n)
        for one, begin in zip(sequences, begins):
            if begin is not None:
                begin(one.length)
        for one, n in zip(sequences, numbers):
            for table in one.tables:
                table.advance(n)
    finally:
        first._leave()


cdef class SequenceTables:
    """Block tables, and the segments before their tokens. Tokens are appended to the tables alone."""

    cdef BlockTable _table(self, object index, Py_ssize_t *layer):
        self._check_open()
        table, layer[0] = self.layer_tables[check_layer(index, self.num_layers)]
        return table

    @property
    def closed(self):
        """Whether the sequence was freed."""
        return bool((<BlockTable>self.tables[0]).closed)

    cdef int _check_open(self) except -1:
        return (<BlockTable>self.tables[0]).check_open()

    cdef int _enter(self) except -1:
        self._pool().enter()
        try:
            self._check_open()  # not before: another thread may be about to close it
        except BaseException:
            self._pool().leave()
            raise
        return 0

    cdef int _leave(self) except -1:
        self._pool().leave()
        return 0

    cdef int enter_reading(self) except -1:
        self._pool().enter_reading()
        try:
            self._check_open()
        except BaseException:
            self._pool().leave_reading()
            raise
        return 0

    cdef int leave_reading(self) except -1:
        self._pool().leave_reading()
        return 0

    def advance(self, n, begin=None):
        """Count `n` tokens as complete in all layers. `begin` is called with the length before."""
        advance_all([self], [n], [begin])

    cdef int _check_advance(self, Py_ssize_t n, str name) except -1:
        """Check that all layers have `n` new tokens."""
        cdef Py_ssize_t i, layer, after = self.length + n
        cdef BlockTable table
        wrong = []
        for i in range(self.num_layers):
            table = self._table(i, &layer)
            if table.lengths[layer] + self.base != after:
                wrong.append(f"layer {i} has {table.lengths[layer] + self.base}")
        if wrong:
            raise ValueError(f"{name}advance({n}) needs {after} tokens in every layer, but " + ", ".join(wrong[:8])
                             + (", ..." if len(wrong) > 8 else ""))
        return 0

    def alone(self, then):
        """Call `then` while no other thread is in the pool."""
        self._enter()
        try:
            then()
        finally:
            self._leave()

    @property
    def length(self):
        return (<BlockTable>self.tables[0]).length + self.base

    @property
    def num_held(self):
        """Tokens that are shown: all but those that were evicted on request."""
        return (<BlockTable>self.tables[0]).num_held() + self.base

    @property
    def num_uncounted(self):
        """Most tokens of a layer that `advance` has not counted."""
        return max([(<BlockTable>table).num_uncounted() for table in self.tables])

    def check_counted(self, uncounted):
        """Refuse what leaves out tokens that were not counted, unless `uncounted` is "drop"."""
        check_choice(uncounted, "uncounted", ("raise", "drop"), '"raise" or "drop"')
        count = self.num_uncounted if uncounted == "raise" else 0
        if count:
            raise ValueError(f"layers hold {count} tokens that were never counted and would be left out: call advance({count}) when "
                             f'all layers have them, or leave them out with uncounted="drop"')

    def layer_length(self, index):
        cdef Py_ssize_t layer
        cdef BlockTable table = self._table(index, &layer)
        return table.lengths[layer] + self.base

    cdef BlockPool _pool(self):
        return (<BlockTable>self.tables[0]).pool

    cdef list all_segments(self, Py_ssize_t end):
        """All segments up to position `end` of the tables, with the tokens after those of `segments` as the last one."""
        cdef Segment newest = Segment.__new__(Segment)
        cdef list known = self.known_segments()
        newest.start = (<Segment>known[-1]).end() if known else 0
        newest.first, newest.last = newest.start - self.base, end
        return known + [newest] if newest.first < newest.last else known

    cdef SequenceTables give_segments(self, SequenceTables storage, bint copies):
        """A storage with tables like those of this one, and with its segments."""
        if self.segments is not None:
            storage.set_segments(copied(self.segments, storage.tables) if copies else self.segments, self.base, self.ropes)
        return storage

    cdef int set_segments(self, list segments, Py_ssize_t base, object ropes) except -1:
        with cython.critical_section(self):
            self.segments, self.base, self.ropes = segments, base, ropes
        return 0

    cdef list known_segments(self):
        """The segments, for queries that do not enter the pool."""
        with cython.critical_section(self):
            return self.segments or []

    def take_segments(self, SequenceTables other):
        """Take over the segments of a sequence of the same pool, whose tables were shared."""
        self.set_segments(other.segments, other.base, other.ropes)

    def forget_segments(self):
        self.set_segments(None, 0, None)

    @property
    def is_spliced(self):
        return self.segments is not None

    def segment_list(self):
        """The start of each segment, its first and last position in its tables, and its shift."""
        return [(<Segment>segment).describe() for segment in self.all_segments((<BlockTable>self.tables[0]).length)]

    def check_plain(self):
        if self.segments is not None:
            raise ValueError("a spliced cache cannot be written, nor given to another scheduler: save the caches that it was spliced "
                             "from, or convert it: Snapshot.from_arrays(*cache.snapshot().to_arrays(), num_kv_heads)")

    cdef object spliced_rows(self, Py_ssize_t index, BlockTable table, Py_ssize_t layer, bint values):
        cdef Segment segment
        cdef BlockTable source
        cdef list parts = [np.empty((0, table.pool.num_kv_heads, table.pool.v_head_dim if values else table.pool.head_dim), np.float32)]
        which = self.tables.index(table)
        for segment in self.all_segments(table.lengths[layer]):
            source = table if segment.frozen is None else segment.frozen.tables[which]
            rows = rows_at(source, layer, np.arange(segment.first, segment.last), values)
            parts.append(rows if values or segment.rotations is None else rotated_keys(rows, segment.rotations[index]))
        return np.concatenate(parts)

    cdef int keep(self, Py_ssize_t n) except -1:
        """Keep the first n positions."""
        cdef BlockTable table
        cdef Segment last
        cdef Py_ssize_t kept = n - self.base
        if self.segments is not None and n <= (<Segment>self.segments[-1]).end():
            kept, segments = 0, cut(self.segments, 0, n)
            if segments:
                segments[-1:] = narrowed(segments[-1:], 0)
                last = segments[-1]
                if len(segments) == 1 and last.frozen is not None and last.first == 0 and last.shift == 0:
                    return self._keep_plain(last)
                kept = last.last if last.frozen is None else 0
                self.set_segments(segments, n - kept, self.ropes)
            else:
                self.forget_segments()
        for table in self.tables:
            table.cut(kept)
        return 0

    cdef int _keep_plain(self, Segment segment) except -1:
        """Become the ordinary sequence that only this segment is left of."""
        cdef Py_ssize_t i
        for i in range(len(self.tables)):  # first what can fail
            (<BlockTable>self.tables[i]).map.reserve_list((<BlockTable>segment.frozen.tables[i]).map.count)
        for i in range(len(self.tables)):
            (<BlockTable>self.tables[i]).share(segment.frozen.tables[i])
            (<BlockTable>self.tables[i]).truncate(segment.last)
        self.forget_segments()
        return 0

    cdef object blocks_of(self, Py_ssize_t which):
        """Blocks of one of the tables, and of those of the same layers in all segments."""
        cdef FrozenTables frozen
        tables = [*[frozen.tables[which] for frozen in frozen_of(self.known_segments())], self.tables[which]]
        return np.concatenate([table.map.block_ids() for table in tables])

    @property
    def nbytes_alone(self):
        """Bytes that only this storage keeps."""
        cdef BlockTable table
        total = 0
        for table in self.tables:
            total += table.nbytes_alone
        total += 0 if self.checkpoints is None else self.checkpoints.nbytes_alone
        return total + sum([frozen.nbytes_alone for frozen in frozen_of(self.known_segments())])

    @property
    def formats(self):
        """KVFormat of each layer."""
        return [(<BlockTable>table).pool.formats[layer] for table, layer in self.layer_tables]

    def block_ids(self, index):
        """Blocks of a layer in the order of their tokens, int32."""
        cdef Py_ssize_t layer
        cdef BlockTable table = self._table(index, &layer)
        return self.blocks_of(self.tables.index(table))

    def capacity(self, index):
        """Number of tokens that fit the blocks of a layer's pool."""
        cdef Py_ssize_t layer
        cdef BlockPool pool = self._table(index, &layer).pool
        return (pool.num_blocks - pool.num_gaps) * pool.block_size

    def shape(self, index):
        """KV heads, head_dim and v_head_dim of a layer."""
        cdef Py_ssize_t layer
        return _shape_of(self._table(index, &layer))

    def _of_layers(self, Py_ssize_t which):
        """A part of `shape`: a number, or a tuple with one per layer if layers differ."""
        values = {_shape_of(table)[which] for table in self.tables}
        return values.pop() if len(values) == 1 else tuple([self.shape(i)[which] for i in range(self.num_layers)])

    @property
    def num_kv_heads(self):
        return self._of_layers(0)

    @property
    def head_dim(self):
        return self._of_layers(1)

    @property
    def v_head_dim(self):
        return self._of_layers(2)

    @property
    def rope_dim(self):
        return (<BlockTable>self.tables[0]).pool.rope_dim

    @property
    def secure(self):
        return bool((<BlockTable>self.tables[0]).pool.secure)

    @property
    def precision(self):
        """The precision of calls that name none; None: that of the process."""
        return name_of_precision(self.reads_as)

    @precision.setter
    def precision(self, name):
        self.reads_as = parse_precision(name)

    @property
    def block_size(self):
        return (<BlockTable>self.tables[0]).pool.block_size

    @property
    def nbytes_states(self):
        """Bytes of the checkpoints."""
        return 0 if self.checkpoints is None else self.checkpoints.nbytes

    @property
    def nbytes(self):
        return sum(table.pool.nbytes for table in self.tables) + self.nbytes_states

    @property
    def nbytes_used(self):
        """Bytes of the blocks and float rows that hold the tokens, and of the checkpoints."""
        blocks = [(<BlockTable>table).pool.bytes_of_blocks(np.unique(self.blocks_of(i))) for i, table in enumerate(self.tables)]
        return self.nbytes_states + sum(blocks)

    @property
    def bytes_per_token(self):
        return sum(table.pool.block_bytes for table in self.tables) // self.block_size
