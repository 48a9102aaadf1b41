# cython: language_level=3, boundscheck=False, cdivision=True
"""The storage of one sequence: append, attend, truncate. The caches are thin layers over it."""
cimport cython
import numpy as np

from libc.string cimport memset

from kvfast.attention.indexer cimport best_positions
from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.request cimport Request, imagined_rows, open_request, raise_refusal
from kvfast.attention.run cimport answer
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_layout, side_of, view_of
from kvfast.codec.encode cimport open_tokens
from kvfast.codec.projection cimport Projection, Transform, open_projection, write_queries
from kvfast.core.arrays cimport Rows, open_rows
from kvfast.core.checks cimport as_integer, check_count, check_layer
from kvfast.core.kernels cimport KV_FLOAT32, kv_side, parse_precision
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.sequences.segments cimport (FrozenTables, Segment, blocks_of_copies, free_segments, copied, cut, fill_segments,
                                                frozen_of, narrowed, rows_at, spliced_rows)
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.copying cimport CopyPlan, blocks_for, clone_table, copy_table, plan_copy
from kvfast.storage.tables.ring_table cimport RingTable

from kvfast.core.checks import check_choice
from kvfast.core.kernels import name_of_precision
from kvfast.core.text import shown
from kvfast.errors import CacheFullError


cdef tuple _shape_of(BlockTable table):
    return table.pool.num_kv_heads, table.pool.head_dim, table.pool.v_head_dim


def advance_all(list sequences, list counts, list begins):
    """`advance` of some sequences of one pool: of all of them or of none. `begins` has a function, or None, for each."""
    cdef SequenceStorage one, first = sequences[0]
    cdef BlockTable table
    numbers = [check_count(n, "n", 1) for n in counts]
    first._enter()
    try:
        for i, one in enumerate(sequences):
            one._check_advance(numbers[i], f"sequences[{i}]: " if len(sequences) > 1 else "")
        for one, begin in zip(sequences, begins):
            if begin is not None:
                begin(one.length)
        for one, n in zip(sequences, numbers):
            for table in one.tables:
                table.advance(n)
    finally:
        first.pool.leave()


cdef class SequenceStorage:
    """The block tables of a sequence, and the segments before their tokens. Tokens are appended to the tables alone."""

    def __init__(self, list tables, list layer_tables, max_seq_len=None, checkpoints=None, precision=None):
        self.pool = (<BlockTable>tables[0]).pool  # before a setter that can raise: the destructor needs it
        self.tables, self.layer_tables, self.max_seq_len, self.checkpoints = tables, layer_tables, max_seq_len, checkpoints
        self.num_layers, self.precision = len(layer_tables), precision
        self.rope_dim, self.secure, self.block_size = self.pool.rope_dim, self.pool.secure, self.pool.block_size

    @property
    def max_seq_len(self):
        """Most tokens, or None."""
        return None if self.most < 0 else self.most

    @max_seq_len.setter
    def max_seq_len(self, value):
        self.most = -1 if value is None else value

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
        self.pool.enter()
        try:
            self._check_open()  # not before: another thread may be about to close it
        except BaseException:
            self.pool.leave()
            raise
        return 0

    cdef int enter_reading(self) except -1:
        self.pool.enter_reading()
        try:
            self._check_open()
        except BaseException:
            self.pool.leave_reading()
            raise
        return 0

    cdef int _check_room(self, object index, Py_ssize_t held, Py_ssize_t n) except -1:
        if self.most >= 0 and held + n > self.most:
            room = self.most - held
            raise CacheFullError(f"layer {index} has room for {room} of {self.most} tokens, got {n}: make the cache with a larger "
                                 f"max_seq_len, or without one to let it grow; a RingKVCache keeps a window of any text", n, room)
        return 0

    def append(self, index, k, v, Transform transform=None):
        """Append keys and values, or latent rows in `k` alone; see `open_tokens`."""
        cdef Py_ssize_t layer
        cdef BlockTable table = self._table(index, &layer)
        cdef Rows keys, values
        keys, values = open_tokens(table.pool.layouts + layer, k, v)
        self._enter()
        try:
            self._check_room(index, table.lengths[layer] + self.base, keys.rows.tokens)
            if transform is not None:
                transform.fit(keys.rows.tokens, table.lengths[layer] + self.base)
            table.append(layer, keys, values, NULL if transform is None else &transform.c)
        finally:
            self.pool.leave()

    def write(self, index, qkv, num_q_heads, Transform of_q, Transform of_k, out, num_threads):
        """Append the keys and values of a fused projection; returns its queries."""
        cdef Py_ssize_t layer, first
        cdef BlockTable table = self._table(index, &layer)
        cdef Projection parts = open_projection(qkv, num_q_heads, table.pool.num_kv_heads, table.pool.head_dim,
                                                table.pool.v_head_dim)
        self._enter()
        try:
            first = table.lengths[layer] + self.base
            self._check_room(index, first, parts.heads.rows.tokens)
            of_q.fit(parts.heads.rows.tokens, first)
            of_k.fit(parts.heads.rows.tokens, first)
            q = write_queries(parts, of_q, out, num_threads)
            table.append(layer, parts.k, parts.v, &of_k.c)
            return q
        finally:
            self.pool.leave()

    def attend(self, index, q, dict options, sink_q=None, Py_ssize_t made_for=-1):
        """The output of `attend`, or for imagined queries its AttendPlan. `sink_q`: queries for the sink tokens. `made_for`: the layer
        length that queries were rotated for; -1: any."""
        cdef Py_ssize_t layer, held
        cdef BlockTable table = self._table(index, &layer)
        cdef Request request
        cdef kv_refusal refusal
        cdef kv_member member
        memset(&member, 0, sizeof(member))
        self.enter_reading()
        try:
            held = table.lengths[layer] + self.base
            if made_for >= 0 and made_for != held:
                raise RuntimeError(f"another thread has changed layer {index}: it held {made_for} tokens, and holds {held} now")
            request = open_request(&table.pool.layouts[layer], q, options, f"layer {index}", self.reads_as, sink_q)
            if not table.fit_window(&request.c.options, &refusal):
                raise_refusal(&refusal, request)
            self.fill(table, layer, check_layer(index, self.num_layers), &member)
            member.num_queries = request.c.q.tokens
            return answer(request, &table.pool.layouts[layer], table.pool.workspace, &member, 1, NULL, 0, str(table.pool.formats[layer])
                          if request.c.q.data == NULL else None)
        finally:
            free_segments(&member, 1)
            self.pool.leave_reading()

    cdef int fill(self, BlockTable table, Py_ssize_t layer, Py_ssize_t index, kv_member *member) except -1:
        """Describe the tokens of a layer to attention, with their segments, which `free_segments` frees."""
        table.describe(layer, member)
        if self.segments is not None:
            member.length += self.base
            member.held_from = 0
            fill_segments(self.all_segments(table.lengths[layer]), table, self.tables.index(table), layer, index, member)
        return 0

    def top_k(self, index, q, weights, k, num_threads):
        """The best positions of an indexer, whose keys are the rows of a layer."""
        cdef Py_ssize_t layer
        cdef BlockTable table = self._table(index, &layer)
        cdef kv_member member
        cdef Rows rows = open_rows(q, "q")
        self.enter_reading()
        try:
            table.describe(layer, &member)
            if member.length == 0:
                raise ValueError(f"layer {index} holds no tokens to choose from")
            if not 0 < rows.rows.tokens <= member.length:
                raise ValueError(f"q must hold 1 to {member.length} tokens, as the layer has, got {rows.rows.tokens}")
            member.first_query, member.num_queries = 0, rows.rows.tokens
            return best_positions(&table.pool.layouts[layer], &member, 1, rows, weights, k, num_threads)
        finally:
            self.pool.leave_reading()

    def explain(self, index, q, num_q_heads, dtype, dict options):
        """The AttendPlan of `attend` for an array, a shape, or a number of tokens."""
        cdef Py_ssize_t layer
        cdef BlockTable table = self._table(index, &layer)
        return self.attend(index, imagined_rows(q, num_q_heads, dtype, &table.pool.layouts[layer]), options)

    # `begin` is a callback for the owner's own bookkeeping (token ids). It runs while the pool is entered, after the last step
    # that can fail.

    def truncate(self, n, begin=None, states=None):
        """Keep the first `n` tokens. `begin` is called with the new length. `states`: those after `n` tokens, where the caller has
        them. `branches.keep_branch` also keeps some of the other tokens."""
        cdef BlockTable table
        cdef Py_ssize_t count
        cdef list _old = self.segments  # which are released after the end of the call
        self._enter()
        try:
            count = self.checked_length(n)
            for table in self.tables:
                table.check_truncate(count)
            checkpoints = self.checkpoints
            if checkpoints is not None:
                if states is None:
                    checkpoints.check_truncate(count, self.length)
                checkpoints = checkpoints.upto(count)
                if states is not None:
                    checkpoints = checkpoints.with_states(count, states, self.secure)
            if begin is not None:
                begin(count)
            self.keep(count)
            self.checkpoints = checkpoints
            self._trim_surplus()
        finally:
            self.pool.leave()

    cdef Py_ssize_t checked_length(self, n) except -1:
        """A number of complete tokens."""
        number = as_integer(n, "n")
        if not 0 <= number <= self.length:
            raise ValueError(f"n must be between 0 and the {self.length} tokens of the cache, "
                             f"got {shown(number)}{self._text_of_uncounted()}")
        return number

    def _text_of_uncounted(self):
        return f": {self.num_uncounted} more were never counted, call advance({self.num_uncounted}) first" if self.num_uncounted else ""

    def add_checkpoint(self, states, then=None):
        """Keep copies of the states after the complete tokens. `then` is called before another thread can come in."""
        self._enter()
        try:
            if self.checkpoints is None:
                raise ValueError("this cache keeps no states: make it with max_state_bytes, for a model with recurrent layers")
            if self.num_uncounted or self.length == 0:
                raise ValueError(f"a checkpoint holds the states after all tokens of a cache, which has {self.length} complete ones"
                                 f"{self._text_of_uncounted()}")
            self.checkpoints = self.checkpoints.with_states(self.length, states, self.secure)
            if then is not None:
                then()
        finally:
            self.pool.leave()

    def states_at(self, n):
        """The states after `n` tokens, or None for all of them: read-only arrays by name."""
        self.enter_reading()
        try:
            if self.checkpoints is None:
                raise ValueError("this cache keeps no states: it was made without max_state_bytes")
            checkpoint = self.checkpoints.at(self.length if n is None else check_count(n, "n", 0))
        finally:
            self.pool.leave_reading()
        return checkpoint.forms.unpacked(checkpoint.data)

    def positions(self, index):
        """Absolute positions that a layer shows."""
        cdef Py_ssize_t layer, oldest, length
        cdef BlockTable table = self._table(index, &layer)
        length = table.lengths[layer] + self.base
        oldest = table.oldest(length)
        window = np.arange(oldest, length)
        if oldest == 0:
            return window
        return np.concatenate((np.arange(min(oldest, (<RingTable>table).num_sink_tokens)), window))

    def rows(self, index, bint values):
        """Keys or values of a layer as float32, and their positions. A view if they are stored so in one piece, else decoded."""
        cdef Py_ssize_t layer
        cdef BlockTable table = self._table(index, &layer)
        cdef BlockPool pool = table.pool
        cdef kv_layout *layout = pool.layouts + layer
        cdef const kv_side *side = side_of(layout, values)
        self.enter_reading()
        try:
            if self.segments is not None:
                return (spliced_rows(self.all_segments(table.lengths[layer]), table, self.tables.index(table),
                                     check_layer(index, self.num_layers), layer, values), self.positions(index))
            if (side.dtype == KV_FLOAT32 and not layout.latent and not layout.seals and not pool.grows and not pool.is_shared
                    and table.map.is_in_one_piece()):
                return np.ndarray((table.lengths[layer], pool.num_kv_heads, side.head_dim), np.float32,
                                  buffer=view_of(pool.arenas[0]),
                                  offset=layout.slabs.v if values else layout.slabs.k,
                                  strides=(side.row_stride, layout.slabs.v_head_stride if values
                                           else layout.slabs.k_head_stride, 4)), np.arange(table.lengths[layer])
            positions = self.positions(index)
            return rows_at(table, layer, positions, values), positions
        finally:
            self.pool.leave_reading()

    def copy(self):
        """An independent deep copy with pools of its own."""
        cdef BlockTable table
        copies = {}
        self.enter_reading()
        try:
            for table in self.tables:
                copies[table] = clone_table(table, table.pool.clone())
            return self.give_segments(self._like(copies), True)
        finally:
            self.pool.leave_reading()

    def share(self, bint counted=False, uncounted="raise", then=None):
        """Another storage with the same tokens, in the same blocks; with `counted` without tokens that were not counted, see
        `check_counted`. `then` is called before another thread can come in."""
        cdef BlockTable table, other
        shared = {}
        self._enter()
        try:
            if counted:
                self.check_counted(uncounted)
            for table in self.tables:
                shared[table] = other = table.empty(table.pool)
                other.share(table)
                if counted:
                    other.cut(other.length)
            storage = self.give_segments(self._like(shared), False)
            if then is not None:
                then()
            return storage
        finally:
            self.pool.leave()

    def _like(self, tables):
        """A storage with these tables instead of its own."""
        return SequenceStorage([tables[table] for table in self.tables], [(tables[table], layer) for table, layer in self.layer_tables],
                               self.max_seq_len, self.checkpoints, self.precision)

    def restore(self, SequenceStorage other, begin=None, then=None):
        """Become equal to a storage with the same settings: share its blocks, or copy those of another pool. `begin` is called
        when only a signal can still prevent the change, `then` after the change."""
        cdef list _old = self.segments  # as in `truncate`
        self._enter()
        try:
            checkpoints = None if self.checkpoints is None else self.checkpoints.taking(other.checkpoints)
            if other.pool is self.pool:
                self._share_blocks(other, begin)
            else:
                other.enter_reading()
                try:
                    self._copy_blocks(other, begin)
                finally:
                    other.pool.leave_reading()
            self.checkpoints = checkpoints
            self._trim_surplus()
            if then is not None:
                then()
        finally:
            self.pool.leave()

    # Both first do the steps that can fail, for all tables.

    cdef int _share_blocks(self, SequenceStorage other, begin) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.tables)):
            (<BlockTable>self.tables[i]).map.reserve_list((<BlockTable>other.tables[i]).map.count)
        if begin is not None:
            begin()
        for i in range(len(self.tables)):
            (<BlockTable>self.tables[i]).share(other.tables[i])
        self.take_segments(other)
        return 0

    cdef int _copy_blocks(self, SequenceStorage other, begin) except -1:
        cdef Py_ssize_t i, copies
        cdef BlockTable table = self.tables[0], mine
        cdef list plans = [plan_copy(<BlockTable>mine, <BlockTable>theirs) for mine, theirs in zip(self.tables, other.tables)]
        cdef list segments = None
        self._reserve(other, plans)
        if other.segments is not None:
            if table.pool.is_shared:
                frozen = [segment for segment in other.segments if (<Segment>segment).frozen is not None]
                copies = blocks_of_copies(frozen, other.tables, table)
                table.reserve(copies + blocks_for(table, other.tables[0]), 0)
                table.pool.ensure(copies)
            segments = copied(other.segments, self.tables)
            self._reserve(other, plans)  # again, as the copies took blocks
        if begin is not None:
            begin()
        for i in range(len(self.tables)):
            copy_table(other.tables[i], self.tables[i], plans[i], False)
        self.set_segments(segments, other.base, other.ropes)
        return 0

    cdef int _reserve(self, SequenceStorage other, list plans) except -1:
        """Make sure that the tables have room to become those of another storage."""
        cdef BlockTable table
        for i, table in enumerate(self.tables):
            table.reserve(blocks_for(table, other.tables[i]), len((<CopyPlan>plans[i]).pieces))
        return 0

    cdef int _trim_surplus(self) except -1:
        cdef BlockTable table
        for table in self.tables:
            table.pool.trim_surplus()
            if isinstance(table, RingTable) and table.longest() == 0:
                table.pool.trim()  # what a prompt took
        return 0

    def reserve_as(self, SequenceStorage other):
        """Before the tokens of a storage with these settings are taken over: reserve no more at once than it does, as its window may be
        one that a file claims."""
        cdef BlockPool pool, others
        for table, source in zip(self.tables, other.tables):
            pool, others = table.pool, source.pool
            if pool.grows:
                pool.first_blocks = max(<Py_ssize_t>1, min(pool.first_blocks,
                                                           others.first_blocks * others.block_size // pool.block_size))

    def resume_states(self):
        """For `block_bytes.reopen`."""
        self.check_plain()
        self._enter()
        try:
            return [(<BlockTable>table).resume_state() for table in self.tables]
        finally:
            self.pool.leave()

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
            self.pool.leave()

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

    cdef list all_segments(self, Py_ssize_t end):
        """All segments up to position `end` of the tables, with the tokens after those of `segments` as the last one."""
        cdef Segment newest = Segment.__new__(Segment)
        cdef list known = self.known_segments()
        newest.start = (<Segment>known[-1]).end() if known else 0
        newest.first, newest.last = newest.start - self.base, end
        return known + [newest] if newest.first < newest.last else known

    cdef SequenceStorage give_segments(self, SequenceStorage storage, bint copies):
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

    def take_segments(self, SequenceStorage other):
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
    def precision(self):
        """The precision of calls that name none; None: that of the process."""
        return name_of_precision(self.reads_as)

    @precision.setter
    def precision(self, name):
        self.reads_as = parse_precision(name)

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

    def __del__(self):
        cdef BlockTable table
        if self.tables is not None and not self.closed:
            for table in self.tables:
                self.pool.release_later(table)
