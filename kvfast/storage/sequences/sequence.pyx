# cython: language_level=3, boundscheck=False, cdivision=True
"""The storage of one sequence: append, attend, truncate. The caches are thin layers over it."""
import numpy as np

from libc.string cimport memset

from kvfast.attention.indexer cimport best_positions
from kvfast.attention.options cimport kvfast_options
from kvfast.attention.refusals cimport VALUE, kv_refusal, refuse
from kvfast.attention.request cimport Request, imagined_rows, kv_request, open_request, raise_refusal
from kvfast.attention.run cimport answer
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_context, kv_layout, view_of
from kvfast.codec.projection cimport Projection, Transform, open_projection, write_queries
from kvfast.core.arrays cimport Rows, open_pair, open_rows
from kvfast.core.checks cimport as_integer, check_count, check_layer
from kvfast.core.kernels cimport KV_FLOAT32, kv_side
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.sequences.segments cimport Segment, blocks_of_copies, close_members, copied, fill_segments
from kvfast.storage.sequences.sequence_tables cimport SequenceTables, rows_at
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.copying cimport CopyPlan, blocks_for, clone_table, copy_table, plan_copy
from kvfast.storage.tables.ring_table cimport RingTable

from kvfast.core.text import shown
from kvfast.errors import CacheFullError


cdef bint fit_window(BlockTable table, kv_request *request, kv_refusal *refusal) noexcept nogil:
    """Fill in the window and sink tokens of a ring's request. It may ask for less than the ring keeps, not for more."""
    cdef kvfast_options *options = &request.options
    if table.limit(&options.sliding_window, &options.num_sink_tokens):
        return True
    if options.sliding_window > (<RingTable>table).window:
        return refuse(refusal, VALUE, b"sliding_window must be at most the {0} tokens that the ring keeps, got {1}",
                      (<RingTable>table).window, options.sliding_window)
    return refuse(refusal, VALUE, b"num_sink_tokens must be at most the {0} that the ring keeps, got {1}",
                  (<RingTable>table).num_sink_tokens, options.num_sink_tokens)


cdef void describe(BlockTable table, Py_ssize_t layer, kv_member *member) noexcept nogil:
    """Describe a layer's tokens to attention, but for those of segments."""
    table.context(layer, &member.context)
    member.length, member.uncounted = table.lengths[layer], table.lengths[layer] - table.length
    member.held_from = table.held_from()


cdef class SequenceStorage(SequenceTables):
    def __init__(self, list tables, list layer_tables, max_seq_len=None, checkpoints=None, precision=None):
        self.tables, self.layer_tables, self.max_seq_len, self.checkpoints = tables, layer_tables, max_seq_len, checkpoints
        self.num_layers, self.precision = len(layer_tables), precision

    @property
    def max_seq_len(self):
        """Most tokens, or None."""
        return None if self.most < 0 else self.most

    @max_seq_len.setter
    def max_seq_len(self, value):
        self.most = -1 if value is None else value

    cdef int _check_room(self, object index, Py_ssize_t held, Py_ssize_t n) except -1:
        if self.most >= 0 and held + n > self.most:
            room = self.most - held
            raise CacheFullError(f"layer {index} has room for {room} of {self.most} tokens, got {n}: make the cache with a larger "
                                 f"max_seq_len, or without one to let it grow; a RingKVCache keeps a window of any text", n, room)
        return 0

    def append(self, index, k, v, Transform transform=None):
        cdef Py_ssize_t layer
        cdef BlockTable table = self._table(index, &layer)
        cdef Rows keys, values
        keys, values = open_pair(k, v, table.pool.rope_dim is not None)
        self._enter()
        try:
            self._check_room(index, table.lengths[layer] + self.base, keys.rows.tokens)
            if transform is not None:
                transform.fit(keys.rows.tokens, table.lengths[layer] + self.base)
            table.append(layer, keys, values, NULL if transform is None else &transform.c)
        finally:
            self._leave()

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
            self._leave()

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
            request = open_request(&table.pool.layouts[layer], q, options, sink_q)
            request.of = f"layer {index}"
            request.read_as(self.reads_as)
            if not fit_window(table, &request.c, &refusal):
                raise_refusal(&refusal, request)
            self.fill(table, layer, check_layer(index, self.num_layers), &member)
            member.num_queries = request.c.q.tokens
            return answer(request, &table.pool.layouts[layer], table.pool.workspace, &member, 1, NULL, 0, str(table.pool.formats[layer])
                          if request.c.q.data == NULL else None)
        finally:
            close_members(&member, 1)
            self.leave_reading()

    cdef int fill(self, BlockTable table, Py_ssize_t layer, Py_ssize_t index, kv_member *member) except -1:
        """Describe the tokens of a layer to attention, with their segments, which `close_members` frees."""
        describe(table, layer, member)
        if self.segments is not None:
            member.length += self.base
            member.held_from = 0
            fill_segments(self.all_segments(table.lengths[layer]), table, self.tables.index(table), layer, index, member)
        return 0

    def top_k(self, index, q, weights, k, num_threads):
        cdef Py_ssize_t layer
        cdef BlockTable table = self._table(index, &layer)
        cdef kv_context context
        cdef Rows rows = open_rows(q, "q")
        self.enter_reading()
        try:
            table.context(layer, &context)
            if context.length == 0:
                raise ValueError(f"layer {index} holds no tokens to choose from")
            if not 0 < rows.rows.tokens <= context.length:
                raise ValueError(f"q must hold 1 to {context.length} tokens, as the layer has, got {rows.rows.tokens}")
            starts = np.array([0, rows.rows.tokens], np.int32)
            return best_positions(&table.pool.layouts[layer], &context, starts, rows, weights, k, num_threads)
        finally:
            self.leave_reading()

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
            self._leave()

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
            self._leave()

    def states_at(self, n):
        """The states after `n` tokens, or None for all of them: read-only arrays by name."""
        self.enter_reading()
        try:
            if self.checkpoints is None:
                raise ValueError("this cache keeps no states: it was made without max_state_bytes")
            checkpoint = self.checkpoints.at(self.length if n is None else check_count(n, "n", 0))
        finally:
            self.leave_reading()
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
        cdef kv_side *side = &layout.v if values else &layout.k
        self.enter_reading()
        try:
            if self.segments is not None:
                return self.spliced_rows(check_layer(index, self.num_layers), table, layer, values), self.positions(index)
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
            self.leave_reading()

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
            self.leave_reading()

    def share(self):
        """Another storage with the same tokens, in the same blocks."""
        self._enter()
        try:
            return self._shared(False)
        finally:
            self._leave()

    def share_counted(self, uncounted, then=None):
        """`share` without tokens that were not counted; see `check_counted`. `then` is called before another thread can come in."""
        self._enter()
        try:
            self.check_counted(uncounted)
            shared = self._shared(True)
            if then is not None:
                then()
            return shared
        finally:
            self._leave()

    cdef SequenceTables _shared(self, bint counted):
        cdef BlockTable table, other
        shared = {}
        for table in self.tables:
            shared[table] = other = table.empty(table.pool)
            other.share(table)
            if counted:
                other.cut(other.length)
        return self.give_segments(self._like(shared), False)

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
            if other._pool() is self._pool():
                self._share_blocks(other, begin)
            else:
                other.enter_reading()
                try:
                    self._copy_blocks(other, begin)
                finally:
                    other.leave_reading()
            self.checkpoints = checkpoints
            self._trim_surplus()
            if then is not None:
                then()
        finally:
            self._leave()

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
        cdef Py_ssize_t i
        cdef BlockTable table
        cdef list plans = [plan_copy(<BlockTable>mine, <BlockTable>table) for mine, table in zip(self.tables, other.tables)]
        for i in range(len(self.tables)):
            table = self.tables[i]
            table.reserve(blocks_for(table, other.tables[i]), len((<CopyPlan>plans[i]).pieces))
        if other.segments is not None:
            return self._copy_spliced(other, plans, begin)
        if begin is not None:
            begin()
        for i in range(len(self.tables)):
            copy_table(other.tables[i], self.tables[i], plans[i], False)
        self.forget_segments()
        return 0

    cdef int _copy_spliced(self, SequenceStorage other, list plans, begin) except -1:
        """`_copy_blocks` of a spliced sequence."""
        cdef BlockTable table
        cdef Py_ssize_t i, copies
        table = self.tables[0]
        if table.pool.is_shared:
            frozen = [segment for segment in other.segments if (<Segment>segment).frozen is not None]
            copies = blocks_of_copies(frozen, other.tables, table)
            table.reserve(copies + blocks_for(table, other.tables[0]), 0)
            table.pool.ensure(copies)
        segments = copied(other.segments, self.tables)
        for i in range(len(self.tables)):  # again, as the copies took blocks
            table = self.tables[i]
            table.reserve(blocks_for(table, other.tables[i]), len((<CopyPlan>plans[i]).pieces))
        if begin is not None:
            begin()
        for i in range(len(self.tables)):
            copy_table(other.tables[i], self.tables[i], plans[i], False)
        self.set_segments(segments, other.base, other.ropes)
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
            self._leave()

    def __del__(self):
        cdef BlockTable table
        if self.tables is not None and not self.closed:
            for table in self.tables:
                self._pool().release_later(table)
