# cython: language_level=3, boundscheck=False, cdivision=True
"""Batches over the sequences of a pool (PagedAttention, arXiv 2309.06180)."""
cimport cython
import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc

from kvfast.attention.cascade cimport find_prefixes, free_prefixes, gains_nothing, kv_prefixes, set_shareable
from kvfast.attention.indexer cimport best_positions
from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.request cimport Request, imagined_rows, open_request, raise_refusal
from kvfast.attention.run cimport answer
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport coded_at, kv_layout
from kvfast.codec.encode cimport check_rows, check_storable, kv_rotary, open_tokens, storable, write_rows
from kvfast.codec.projection cimport Projection, Transform, open_projection, write_queries
from kvfast.core.arrays cimport Rows, open_rows
from kvfast.core.checks cimport check_flag, check_integers, check_layer
from kvfast.core.kernels cimport parse_precision
from kvfast.storage.batches.prepared_batch cimport PreparedBatch, checked_starts, prepare
from kvfast.storage.batches.scheduler_blocks cimport SchedulerBlocks
from kvfast.storage.memory.buffer_layers cimport clean_slots
from kvfast.storage.memory.prefix_index cimport PrefixIndex
from kvfast.storage.sequences.segments cimport free_segments
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.ring_table cimport RingTable

from kvfast.core.interchange import as_array
from kvfast.core.kernels import name_of_precision
from kvfast.errors import DimensionMismatchError
from kvfast.storage.batches.prepared_batch import check_distinct


cdef inline Py_ssize_t _count(list storages, object block_table, object seq_lens):
    """The sequences of a batch."""
    if storages is not None:
        return len(storages)
    return (<PreparedBatch>block_table).num_sequences if type(block_table) is PreparedBatch else len(seq_lens)


cdef int _check_all_open(list tables) except -1:
    cdef BlockTable table
    for table in tables:
        table.check_open()
    return 0


cdef class PagedBatches:
    """The sequences of a pool, which share its blocks, and batches over them or over another scheduler's blocks."""

    def __init__(self, BlockTable kind):
        """`kind`: an empty table of a pool that is shared, as those of its sequences are."""
        self.kind, self.pool = kind, kind.pool
        self.index = self.pool.index = PrefixIndex(self.pool.num_blocks)
        self.scheduler = None if self.pool.floats is None else SchedulerBlocks(self.pool)
        self.given = [None] * self.pool.num_blocks
        self.given_at = <Py_ssize_t *>malloc(self.pool.num_blocks * sizeof(Py_ssize_t))
        if self.given_at == NULL:
            raise MemoryError("cannot allocate the slots of a pool")

    def __dealloc__(self):
        free(self.given_at)

    @property
    def precision(self):
        """As of `SequenceStorage`."""
        return name_of_precision(self.reads_as)

    @precision.setter
    def precision(self, name):
        self.reads_as = parse_precision(name)

    def new_table(self):
        """An empty table, for `start` or `fork`."""
        return self.kind.empty(self.pool)

    def num_coded(self, Py_ssize_t num_tokens):
        """Number of first tokens that all layers of a sequence of `num_tokens` computed tokens read as codes."""
        cdef Py_ssize_t i, least = num_tokens
        for i in range(self.pool.num_layers):
            if self.pool.layouts[i].open_tokens:
                least = min(least, coded_at(num_tokens, self.pool.layouts[i].open_tokens, self.pool.layouts[i].border))
        return least

    def start(self, BlockTable table, digests):
        """Begin a sequence: its empty table takes the blocks that the pool knows by the first of these digests."""
        self.pool.enter()
        try:
            if self.is_external:
                raise ValueError("another scheduler gives out the blocks of this pool (append_batch was given "
                                 "slots that no sequence has); clear() the pool before making sequences")
            # Inside of the lock, where no other thread can take a block that is found.
            table.start(digests)
            table.is_counted = True
            self.pool.num_sequences += 1
        finally:
            self.pool.leave()

    def fork(self, BlockTable table, BlockTable other, then):
        """Let the empty table `table` share the blocks of another. Calls `then` before another thread can come in."""
        self.pool.enter()
        try:
            table.check_open()
            other.share(table)
            then()
        finally:
            self.pool.leave()

    def free(self, BlockTable table):
        """Release the blocks of a sequence."""
        cdef Py_ssize_t i
        self.pool.enter()
        try:
            for i in range(table.map.count):
                self.given[table.map.blocks[i]] = None
            table.close()
        finally:
            self.pool.leave()

    def clear(self):
        """Forget known prefixes and the slots of another scheduler; no block may have an owner."""
        self.pool.enter()
        try:
            if self.num_owned:
                raise ValueError(f"{self.num_owned} blocks still belong to sequences or snapshots; free them first")
            self.evict_all()
            if self.is_external:
                self._forget_slots()
        finally:
            self.pool.leave()

    cdef int _forget_slots(self) except -1:
        """Forget what another scheduler has written."""
        cdef Py_ssize_t block
        if self.scheduler is not None:
            self.scheduler.forget()
        for block in range(self.pool.num_blocks if self.pool.secure else 0):
            self.pool.wipe_block(<int32_t>block)
        if self.pool.secure:
            self.pool.workspace.wipe()
        self.is_external = False
        return 0

    cdef int evict_all(self) except -1:
        """Forget all known prefixes."""
        while self.index.num_idle:
            self.pool.put_free(self.index.evict())
        return 0

    @property
    def num_free(self):
        self.pool.release_pending()
        return self.pool.available()

    @property
    def num_sequences(self):
        self.pool.release_pending()
        return self.pool.num_sequences

    @property
    def num_owned(self):
        return self.pool.num_blocks - self.pool.available()

    def owners(self):
        """Number of owners of each block."""
        with cython.critical_section(self.pool):
            return np.array([self.pool.owners[i] for i in range(self.pool.num_blocks)], np.int32)

    def blocks_needed(self, list tables, list counts):
        """Number of blocks to take before `counts` tokens can be written after the complete ones of each table."""
        cdef BlockTable table
        cdef Py_ssize_t needed = 0, i, end, size = self.pool.block_size
        cdef int32_t block
        shared = {}
        with cython.critical_section(self.pool):
            for table, count in zip(tables, counts):
                if count == 0:
                    continue
                end = (table.length + <Py_ssize_t>count + size - 1) // size
                needed += max(0, end - table.map.end())
                for i in range(table.length // size, min(end, table.map.end())):
                    block = table.map.block(i)
                    if self.index.knows(block):
                        needed += 1
                    elif self.pool.owners[block] > 1:
                        shared[block] = shared.get(block, 0) + 1
            # The last owner of a block to write to it need not copy it.
            for number, writers in shared.items():
                needed += writers if writers < self.pool.owners[<int32_t>number] else writers - 1
        return needed

    def slot_mapping(self, list tables, list counts):
        """Make the slots of the next tokens of some sequences writable, and return them."""
        cdef BlockTable table
        cdef Py_ssize_t i, at = 0, n, floats = 0
        cdef int32_t block
        cdef int64_t[::1] view
        self.pool.enter()
        try:
            if len({id(table) for table in tables}) != len(tables):
                raise ValueError("a sequence may appear only once in slot_mapping")
            _check_all_open(tables)
            # Do first, for all tables, what can fail.
            self.pool.ensure(self.blocks_needed(tables, counts))
            slots = np.empty(sum(counts), np.int64)
            view = slots
            pairs = [pair for pair in zip(tables, counts) if pair[1]]
            for table, n in pairs:
                table.map.reserve_blocks(table.length + n)
                floats += table.floats_needed(table.length, table.length + n)
            if floats:
                self.pool.floats.pieces.ensure(floats)
            for table, n in pairs:
                table.make_writable(-1, table.length, table.length + n, None)
                for i in range(table.length, table.length + n):
                    view[at] = table.map.slot(i)
                    at += 1
                for i in range(table.length // self.pool.block_size, table.map.end()):
                    block = table.map.block(i)
                    self.given[block], self.given_at[block] = table, i
            return slots
        finally:
            self.pool.leave()

    def prepare(self, block_table, seq_lens, cu_seqlens_q, slot_mapping, Py_ssize_t max_num_seqs):
        """A PreparedBatch for the tables and slots of another scheduler."""
        cdef PreparedBatch batch
        cdef Py_ssize_t count, window = 0, num_sink_tokens = 0
        seq_lens = self._check_batch(None, block_table, seq_lens)
        count = len(seq_lens)
        if self.scheduler is None:
            self.pool.enter_reading()
        else:
            self.pool.enter()
        try:
            if isinstance(self.kind, RingTable):
                window, num_sink_tokens = (<RingTable>self.kind).window, (<RingTable>self.kind).num_sink_tokens
            if window and self.scheduler is not None:
                self._check_external()
            batch = prepare(self.pool, block_table, seq_lens, checked_starts(cu_seqlens_q, count, -1), window, num_sink_tokens)
            if slot_mapping is not None:
                batch.set_slots(slot_mapping)
            if self.scheduler is not None:
                self._check_no_sequences(f"block_table holds block {batch.table[0, 0]}, one")
                self.scheduler.prepare(batch, max_num_seqs)
                self._become_external()
            batch.look_for_prefixes()
            return batch
        finally:
            if self.scheduler is None:
                self.pool.leave_reading()
            else:
                self.pool.leave()

    def are_coded(self, block_ids):
        """See `SchedulerBlocks.are_coded`."""
        blocks = self._checked_blocks(block_ids)
        return np.ones(len(blocks), bool) if self.scheduler is None else self.scheduler.are_coded(blocks)

    def first_rows(self, block_id):
        """See `SchedulerBlocks.first_rows`."""
        (block,) = self._checked_blocks([block_id])
        return np.empty(0, np.uint8) if self.first_rows_nbytes() == 0 else self.scheduler.first_rows(block)

    def first_rows_nbytes(self):
        """See `SchedulerBlocks.first_rows_nbytes`."""
        return 0 if self.scheduler is None else self.scheduler.first_rows_nbytes()

    def take_blocks(self, block_ids, first_rows):
        """See `SchedulerBlocks.take`."""
        blocks, expected = self._checked_blocks(block_ids), self.first_rows_nbytes()
        if first_rows is not None:
            first_rows = as_array(first_rows, "first_float_rows")
            if first_rows.dtype != np.uint8 or first_rows.shape != (expected,):
                raise ValueError(f"first_float_rows must be uint8 of shape ({expected},), got {first_rows.dtype} of shape "
                                 f"{first_rows.shape}")
        self.pool.enter()
        try:
            self._check_no_sequences("block_ids are blocks")
            self._become_external()
        finally:
            self.pool.leave()
        if self.scheduler is not None:
            self.scheduler.take(blocks, first_rows)

    cdef list _checked_blocks(self, block_ids):
        ids = check_integers(block_ids, "block_ids", np.int64, 1).tolist()
        for block in ids:
            if not 0 <= block < self.pool.num_blocks:
                raise ValueError(f"block_ids must be between 0 and {self.pool.num_blocks - 1}, got {block}")
        return ids

    cdef int _check_no_sequences(self, str found) except -1:
        """Refuse the slots of another scheduler in a pool with sequences, which would take them, too."""
        if self.num_owned or self.pool.num_sequences:  # also one without blocks, which would take those of the scheduler later
            raise ValueError(f"{found} that no sequence has; while a pool has sequences, slots must come from slot_mapping()")
        return 0

    cdef int _become_external(self) except -1:
        """Leave all blocks to another scheduler."""
        if not self.is_external:
            self.evict_all()
            self.is_external = True
        return 0

    cdef object _check_slots(self, Py_ssize_t layer, object slot_mapping, Py_ssize_t n):
        """Check slots, which must be the next ones of their sequences. Returns them as int64, the number of tokens for each table,
        and whether they are slots of another scheduler."""
        cdef int64_t[::1] slots
        cdef Py_ssize_t i = 0, end, size = self.pool.block_size, expected
        cdef int64_t total = self.pool.num_blocks * size, slot
        cdef int32_t block
        cdef BlockTable table
        cdef PreparedBatch batch = None
        if type(slot_mapping) is PreparedBatch:
            batch = slot_mapping
            batch.check(self.pool)
            if batch.slots is None:
                raise ValueError("the batch was prepared without slot_mapping")
            if self.scheduler is not None:
                self.scheduler.check(batch)
            array = batch.slots
        else:
            array = check_integers(slot_mapping, "slot_mapping", np.int64, 1)
        slots = array
        if slots.shape[0] != n:
            raise DimensionMismatchError(f"slot_mapping must have shape ({n},), one slot per token, got {array.shape}")
        if batch is not None and self.is_external:  # no block has an owner
            return array, {}, True
        gains, foreign = {}, []
        while i < n:
            slot = slots[i]
            if slot == -1:
                i += 1
                continue
            if not 0 <= slot < total:
                raise ValueError(f"slot_mapping[{i}] must be -1 or between 0 and {total - 1}, got {slot}")
            block, end = <int32_t>(slot // size), i + 1
            while end < n and slots[end] == slots[end - 1] + 1 and slots[end] % size:
                end += 1
            if self.pool.owners[block] == 0:
                foreign.append(array[i:end])
            else:
                table, index = self.given[block], self.given_at[block]
                if table is None or not table.map.has(index, block) or self.pool.is_frozen(block):
                    raise ValueError(f"slot_mapping[{i}] is slot {slot}, in a block of a sequence that slot_mapping() "
                                     f"did not give out for writing, or that is shared since: ask it for slots again")
                expected = table.lengths[layer] + gains.get(table, 0)
                if <Py_ssize_t>index * size + slot % size != expected:
                    raise ValueError(f"slot_mapping[{i}] is slot {slot}, position {index * size + slot % size} of its "
                                     f"sequence in layer {layer}, and {expected} is the next to be written")
                gains[table] = gains.get(table, 0) + end - i
            i = end
        if foreign:
            self._check_external()
            self._check_no_sequences(f"slot_mapping holds {foreign[0][0]}, a slot")
            check_distinct(np.concatenate(foreign))
        return array, gains, bool(foreign)

    def append_batch(self, layer, k, v, slot_mapping, zero_nonfinite=False):
        cdef bint zeroes = check_flag(zero_nonfinite, "zero_nonfinite")
        cdef Rows keys, values
        keys, values = open_tokens(self.pool.layouts, k, v)
        self._write(check_layer(layer, self.pool.num_layers), keys, values, slot_mapping, None, zeroes)

    def write_batch(self, layer, qkv, slot_mapping, num_q_heads, Transform of_q, Transform of_k, out, num_threads):
        """Store the keys and values of a fused projection; returns its queries."""
        cdef Projection parts = open_projection(qkv, num_q_heads, self.pool.num_kv_heads, self.pool.head_dim,
                                                self.pool.v_head_dim)
        of_q.fit(parts.heads.rows.tokens, 0)
        of_k.fit(parts.heads.rows.tokens, 0)
        number = check_layer(layer, self.pool.num_layers)
        if type(slot_mapping) is not PreparedBatch:  # which has a copy: the queries may be written over an array
            slot_mapping = check_integers(slot_mapping, "slot_mapping", np.int64, 1)
        q = write_queries(parts, of_q, out, num_threads)
        self._write(number, parts.k, parts.v, slot_mapping, of_k, False)
        return q

    def _write(self, Py_ssize_t layer, Rows keys, Rows values, slot_mapping, Transform transform, bint zero_nonfinite):
        cdef kv_layout *layout = self.pool.layouts + layer
        cdef const kv_rotary *rotary
        cdef int64_t[::1] slots, counts
        cdef list tables
        cdef BlockTable table
        cdef Py_ssize_t i
        self.pool.enter()
        try:
            check_rows(layout, keys, values)
            if zero_nonfinite:
                keys, values = storable(layout, keys, values)
            slots, gains, foreign = self._check_slots(layer, slot_mapping, keys.rows.tokens)
            tables, counts = list(gains), np.array(list(gains.values()), np.int64)  # before the write, after which nothing must fail
            rotary = NULL if transform is None else &transform.c
            if foreign:
                # No length hides what a refused call has written to the slots of another scheduler.
                check_storable(layout, keys, values, rotary, &slots[0])
                if self.pool.layers is not None:
                    clean_slots(layout, &slots[0], slots.shape[0])
            write_rows(layout, keys, values, rotary, &slots[0], False, not foreign)
            if foreign:
                self._become_external()
            if foreign and self.scheduler is not None:
                self.scheduler.seal(slot_mapping, layer)
            for i in range(counts.shape[0]):
                table = tables[i]
                table.life.seal(layer, table.lengths[layer], table.lengths[layer] + counts[i])
            for i in range(counts.shape[0]):
                table = tables[i]
                table.lengths[layer] += counts[i]
        finally:
            self.pool.leave()

    def attend_batch(self, layer, q, list storages, block_table, seq_lens, cu_seqlens_q, dict options, cascade):
        """Attention of a ragged batch: over the storages of sequences, or over the block tables of another scheduler. For imagined
        queries its AttendPlan."""
        cdef Py_ssize_t number = check_layer(layer, self.pool.num_layers), count
        cdef const kv_layout *layout = self.pool.layouts + number
        cdef Request request
        cdef kv_refusal refusal
        cdef kv_member *members = NULL
        cdef kv_prefixes found
        cdef const kv_prefixes *prefixes = &found
        cdef PreparedBatch batch
        found.first, found.count, count = NULL, 0, 0
        self.pool.enter_reading()
        try:
            seq_lens = self._check_batch(storages, block_table, seq_lens)
            count = _count(storages, block_table, seq_lens)
            request = open_request(layout, q, options, "the batch", self.reads_as, None, count)
            if not self.kind.fit_window(&request.c.options, &refusal):
                raise_refusal(&refusal, request)
            members = <kv_member *>calloc(count, sizeof(kv_member))
            if members == NULL:
                raise MemoryError("cannot allocate the working memory of a batch")
            batch = self.fill(members, number, request.c.q.tokens, request.c.options.sliding_window, request.c.options.num_sink_tokens,
                              storages, block_table, seq_lens, cu_seqlens_q)
            if not check_flag(cascade, "cascade") or gains_nothing(&request.c, layout, count):
                pass
            elif batch is not None and batch.prefixes != NULL:
                prefixes = batch.prefixes_of(layout.rule)
            else:
                find_prefixes(members, count, layout, &found)
            return answer(request, layout, self.pool.workspace, members, count, prefixes.first, prefixes.count,
                          str(self.pool.formats[number]) if request.c.q.data == NULL else None)
        finally:
            free_prefixes(&found)
            free_segments(members, count if members != NULL else 0)
            free(members)
            self.pool.leave_reading()

    def explain_batch(self, layer, q, num_q_heads, dtype, list storages, block_table, seq_lens, cu_seqlens_q, dict options, cascade):
        """The AttendPlan of `attend_batch` for an array, a shape, or a number of tokens."""
        cdef Py_ssize_t number = check_layer(layer, self.pool.num_layers)
        q = imagined_rows(q, num_q_heads, dtype, &self.pool.layouts[number])
        return self.attend_batch(layer, q, storages, block_table, seq_lens, cu_seqlens_q, options, cascade)

    cdef PreparedBatch fill(self, kv_member *members, Py_ssize_t layer, Py_ssize_t num_tokens, Py_ssize_t window,
                            Py_ssize_t num_sink_tokens, list storages, object block_table, object seq_lens, object cu_seqlens_q):
        """Describe the sequences of a batch to attention. Returns the batch of another scheduler, or None; `free_segments` frees the
        rest."""
        cdef Py_ssize_t i
        cdef PreparedBatch batch
        cdef const int32_t[::1] starts
        cdef SequenceStorage storage
        if storages is None:
            batch = self._batch_of(block_table, seq_lens, cu_seqlens_q, num_tokens, window if isinstance(self.kind, RingTable) else 0,
                                   num_sink_tokens)
            batch.fill(members, self.pool.layouts[layer].rule)
            return batch
        starts = checked_starts(cu_seqlens_q, len(storages), num_tokens)
        for i, storage in enumerate(storages):
            storage.fill(storage.tables[0], layer, layer, members + i)
            members[i].first_query, members[i].num_queries = starts[i], starts[i + 1] - starts[i]
            set_shareable(members + i, self.pool.layouts + layer)
        return None

    cdef object _check_batch(self, list storages, object block_table, object seq_lens):
        """Check that there are sequences, and that they are open. Returns the lengths of another scheduler as int32."""
        if storages is not None:
            _check_all_open([(<SequenceStorage>storage).tables[0] for storage in storages])
        elif type(block_table) is PreparedBatch:
            (<PreparedBatch>block_table).check(self.pool)
            return None
        else:
            seq_lens = check_integers(seq_lens, "seq_lens", np.int32, 1)
        if not len(seq_lens if storages is None else storages):
            raise ValueError("a batch must hold at least one sequence")
        return seq_lens

    cdef PreparedBatch _batch_of(self, object block_table, object seq_lens, object cu_seqlens_q, Py_ssize_t num_tokens,
                                 Py_ssize_t window, Py_ssize_t num_sink_tokens):
        """The batch of another scheduler's tables, or the prepared one, that `num_tokens` queries read."""
        cdef PreparedBatch batch
        if type(block_table) is PreparedBatch:
            batch = block_table
            if batch.num_tokens != num_tokens:
                raise DimensionMismatchError(f"q must have the {batch.num_tokens} tokens of the batch, got {num_tokens}")
            if self.scheduler is not None:
                self.scheduler.check(batch)
        else:
            starts = checked_starts(cu_seqlens_q, len(seq_lens), num_tokens)
            self._check_external()
            batch = prepare(self.pool, block_table, seq_lens, starts, window, num_sink_tokens)
        self._check_owned(batch)
        return batch

    def top_k_batch(self, layer, q, weights, k, list storages, block_table, seq_lens, cu_seqlens_q, num_threads):
        """The best positions of an indexer, in each sequence of a ragged batch; see `attend_batch`."""
        cdef Py_ssize_t number = check_layer(layer, self.pool.num_layers), count
        cdef Rows rows = open_rows(q, "q")
        cdef uint8_t[::1] memory
        cdef kv_member *members
        self.pool.enter_reading()
        try:
            seq_lens = self._check_batch(storages, block_table, seq_lens)
            count = _count(storages, block_table, seq_lens)
            memory = np.zeros(count * sizeof(kv_member), np.uint8)
            members = <kv_member *>&memory[0]
            _owner = self.fill(members, number, rows.rows.tokens, 0, 0, storages, block_table, seq_lens, cu_seqlens_q)
            if rows.rows.tokens == 0:
                raise ValueError("q must hold at least one token")
            return best_positions(&self.pool.layouts[number], members, count, rows, weights, k, num_threads)
        finally:
            self.pool.leave_reading()

    cdef int _check_owned(self, PreparedBatch batch) except -1:
        """Refuse tables of blocks that nobody has written to, unless another scheduler gives them out, who alone knows."""
        cdef Py_ssize_t i
        for i in range(0 if self.is_external else batch.used.shape[0]):
            if self.pool.owners[batch.used[i]] == 0:
                raise ValueError(f"block_table holds block {batch.used[i]}, which belongs to no sequence (a stale table?)")
        return 0

    cdef int _check_external(self) except -1:
        """Refuse the slots and tables of another scheduler for formats that store more of a sequence than its blocks."""
        if self.pool.floats is not None:
            names = ", ".join(sorted({str(one) for one in self.pool.formats}))
            raise ValueError(f"this pool needs sequences, or batches from prepare_batch without a window, as it keeps the first or "
                             f"newest tokens of a sequence as floats ({names}); a scheduler's own slots and block tables need a "
                             f"format without num_first_float_tokens, num_recent_float_tokens, centring and per_channel, such as "
                             f"int8-rotated")
