# cython: language_level=3, boundscheck=False, cdivision=True
"""Batches over the sequences of a pool (PagedAttention, arXiv 2309.06180)."""
cimport cython
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kvfast.attention.call cimport AttendCall, imagined_rows, open_call
from kvfast.attention.options cimport Options
from kvfast.attention.tiles cimport floats_from
from kvfast.codec.blocks cimport kv_store
from kvfast.codec.encode cimport check_rows, check_storable, write_rows
from kvfast.codec.projection cimport Projection, Transform, open_projection, transform_rows, write_queries
from kvfast.core.arrays cimport Rows, open_pair, open_rows
from kvfast.core.checks cimport check_integers, check_layer, rises
from kvfast.core.limits cimport KV_ROWS
from kvfast.storage.block_map cimport entry_of
from kvfast.storage.block_table cimport BlockTable
from kvfast.storage.buffer_layers cimport clean_slots
from kvfast.storage.cascade cimport MAX_SHARED_QUERIES, Context, read_together
from kvfast.storage.pool cimport BlockPool
from kvfast.storage.prefix_index cimport PrefixIndex
from kvfast.storage.ring_table cimport RingTable
from kvfast.storage.sequence cimport check_held, fit_window

from kvfast.errors import DimensionMismatchError
from kvfast.core.checks import check_block_size


cdef int _check_all_open(list tables) except -1:
    cdef BlockTable table
    for table in tables:
        table.check_open()
    return 0


cdef class PagedBuffer:
    def __init__(self, num_layers, num_kv_heads, head_dim, num_blocks, block_size, formats, rope_dim=None, secure=False,
                 v_head_dim=None, ring=None, buffer=None):
        """`ring`: window, number of sinks and rollback of a `RingTable`, or None; `buffer`: a caller's memory, or None."""
        size = check_block_size(block_size)
        if num_blocks is None:
            raise TypeError("num_blocks must be an integer, got None")
        self.pool = BlockPool(num_layers, num_kv_heads, head_dim, size, formats, num_blocks, False, True, rope_dim, secure,
                              v_head_dim, buffer)
        self.index = self.pool.index = PrefixIndex(self.pool.num_blocks)
        self.kind = BlockTable(self.pool) if ring is None else RingTable(self.pool, *ring)
        self.given = [None] * self.pool.num_blocks
        self.given_at = <Py_ssize_t *>malloc(self.pool.num_blocks * sizeof(Py_ssize_t))
        if self.given_at == NULL:
            raise MemoryError("cannot allocate the slots of a pool")

    def __dealloc__(self):
        free(self.given_at)

    def new_table(self):
        """An empty table, for `start` or `fork`."""
        return self.kind.empty(self.pool)

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
            for i in range(table.count):
                self.given[table.blocks[i]] = None
            table.close()
        finally:
            self.pool.leave()

    def clear(self):
        """Forget known prefixes and the slots of another scheduler; no block may have an owner."""
        self.pool.enter()
        try:
            if self.num_owned:
                raise ValueError(f"{self.num_owned} blocks still belong to sequences or snapshots; free them first")
            self._evict_all()
            self.is_external = False
        finally:
            self.pool.leave()

    def _evict_all(self):
        """Forget all known prefixes."""
        while self.index.num_idle:
            self.pool.put_free(self.index.evict())

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
        """Number of blocks to take before `counts` tokens can be written behind the complete ones of each table."""
        cdef BlockTable table
        cdef Py_ssize_t needed = 0, i, end, size = self.pool.block_size
        cdef int32_t block
        shared = {}
        with cython.critical_section(self.pool):
            for table, count in zip(tables, counts):
                if count == 0:
                    continue
                end = (table.length + <Py_ssize_t>count + size - 1) // size
                needed += max(0, end - table.count - table.skipped)
                for i in range(table.length // size, min(end, table.count + table.skipped)):
                    block = table.blocks[entry_of(table, i)]
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
                table.reserve_blocks(table.length + n)
                floats += table.floats_needed(table.length, table.length + n)
            if floats:
                self.pool.floats.pieces.ensure(floats)
            for table, n in pairs:
                table.make_writable(table.length, table.length + n)
                for i in range(table.length, table.length + n):
                    view[at] = table.slot(i)
                    at += 1
                for i in range(table.length // self.pool.block_size, table.count + table.skipped):
                    block = table.blocks[entry_of(table, i)]
                    self.given[block], self.given_at[block] = table, i
            return slots
        finally:
            self.pool.leave()

    cdef object _check_slots(self, Py_ssize_t layer, object slot_mapping, Py_ssize_t n):
        """Check slots, which must be the next ones of their sequences. Returns them as int64, the number of tokens for each table,
        and whether they are slots of another scheduler."""
        cdef int64_t[::1] slots
        cdef Py_ssize_t i = 0, end, size = self.pool.block_size, expected
        cdef int64_t total = self.pool.num_blocks * size, slot
        cdef int32_t block
        cdef BlockTable table
        array = check_integers(slot_mapping, "slot_mapping", np.int64, 1)
        if array.shape[0] != n:
            raise DimensionMismatchError(f"slot_mapping must have shape ({n},), one slot per token, got {array.shape}")
        slots = array
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
                if table is None or not table.has(index, block) or self.pool.is_frozen(block):
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
            # A sequence without blocks would take those of the other scheduler later.
            if self.num_owned or self.pool.num_sequences:
                raise ValueError(f"slot_mapping holds {foreign[0][0]}, a slot that no sequence has; while a pool has "
                                 f"sequences, slots must come from slot_mapping()")
            unique = np.unique(np.concatenate(foreign))
            if unique.size != sum(part.size for part in foreign):
                raise ValueError("slot_mapping must not hold a slot twice")
        return array, gains, bool(foreign)

    def append_batch(self, layer, k, v, slot_mapping):
        cdef Rows keys, values
        keys, values = open_pair(k, v, self.pool.rope_dim is not None)
        self._write(check_layer(layer, self.pool.num_layers), keys, values, slot_mapping, None)

    def write_batch(self, layer, qkv, slot_mapping, num_q_heads, Transform of_q, Transform of_k, out, num_threads):
        cdef Projection parts = open_projection(qkv, num_q_heads, self.pool.num_kv_heads, self.pool.head_dim,
                                                self.pool.v_head_dim)
        of_q.fit(parts.heads.rows.tokens, 0)
        of_k.fit(parts.heads.rows.tokens, 0)
        number = check_layer(layer, self.pool.num_layers)
        slot_mapping = check_integers(slot_mapping, "slot_mapping", np.int64, 1)  # a copy, as the queries may be written over it
        q = write_queries(parts, of_q, out, num_threads)
        self._write(number, parts.k, parts.v, slot_mapping, of_k)
        return q

    def _write(self, Py_ssize_t layer, Rows keys, Rows values, slot_mapping, Transform transform):
        cdef kv_store *store = self.pool.stores + layer
        cdef int64_t[::1] slots, counts
        cdef list tables
        cdef BlockTable table
        cdef Py_ssize_t i
        self.pool.enter()
        try:
            check_rows(store, keys, values)
            slots, gains, foreign = self._check_slots(layer, slot_mapping, keys.rows.tokens)
            tables, counts = list(gains), np.array(list(gains.values()), np.int64)  # before the write, after which nothing must fail
            if foreign:
                # No length hides what a refused call has written to the slots of another scheduler.
                if transform is not None:
                    keys = open_rows(transform_rows(keys, transform, None, None), "k")
                    transform = None
                check_storable(store, keys, values)
                if self.pool.layers is not None:
                    clean_slots(store, &slots[0], slots.shape[0])
            write_rows(store, keys, values, NULL if transform is None else &transform.c, &slots[0], False, not foreign)
            if foreign:
                self._evict_all()
                self.is_external = True
            for i in range(counts.shape[0]):
                table = tables[i]
                table.lengths[layer] += counts[i]
        finally:
            self.pool.leave()

    def attend_batch(self, layer, q, list tables, block_table, seq_lens, cu_seqlens_q, Options options, bint cascade,
                     rope_q=None):
        """Attention of a ragged batch: over the `tables` of sequences, or over the block tables of another scheduler."""
        cdef Py_ssize_t number = check_layer(layer, self.pool.num_layers)
        self.pool.enter_reading()
        try:
            return self._open_call(number, q, rope_q, tables, block_table, seq_lens, cu_seqlens_q, options, cascade).run()
        finally:
            self.pool.leave_reading()

    def explain_batch(self, layer, q, num_q_heads, dtype, list tables, block_table, seq_lens, cu_seqlens_q, Options options,
                      bint cascade):
        """The AttendPlan of `attend_batch` for an array, a shape, or a number of tokens."""
        cdef Py_ssize_t number = check_layer(layer, self.pool.num_layers)
        cdef Rows rows = imagined_rows(q, num_q_heads, dtype, &self.pool.stores[number])
        self.pool.enter_reading()
        try:
            return self._open_call(number, rows, None, tables, block_table, seq_lens, cu_seqlens_q, options,
                                   cascade).explain(str(self.pool.formats[number]))
        finally:
            self.pool.leave_reading()

    cdef AttendCall _open_call(self, Py_ssize_t number, object q, object rope_q, list tables, object block_table, object seq_lens,
                               object cu_seqlens_q, Options options, bint cascade):
        cdef Py_ssize_t i, count, first
        cdef AttendCall call
        cdef Context context
        cdef BlockTable table
        cdef const int32_t[:, ::1] plain
        cdef const int32_t[::1] lens, starts
        if tables is not None:
            _check_all_open(tables)
        count = len(tables) if tables is not None else len(seq_lens)
        if count == 0:
            raise ValueError("a batch must hold at least one sequence")
        call = open_call(&self.pool.stores[number], self.pool.workspace, q, options, count)
        fit_window(self.kind, call)
        if rope_q is not None:
            call.set_rope(rope_q)
        if cu_seqlens_q is None:
            cu_seqlens_q = np.arange(count + 1, dtype=np.int32)
        starts = cu_seqlens_q = check_integers(cu_seqlens_q, "cu_seqlens_q", np.int32, 1)
        if starts.shape[0] != count + 1 or starts[0] != 0 or starts[count] != call.call.q.tokens or not rises(starts):
            raise DimensionMismatchError(
                f"cu_seqlens_q must rise from 0 to the {call.call.q.tokens} tokens of q in {count + 1} entries, got "
                f"{np.array2string(cu_seqlens_q, threshold=8)}; without it q must hold one token per sequence")
        if tables is None:
            lens = seq_lens = check_integers(seq_lens, "seq_lens", np.int32, 1)
            plain = block_table = self._check_blocks(block_table, seq_lens, np.diff(cu_seqlens_q), call)
        contexts = []
        for i in range(count):
            context = Context.__new__(Context)
            if tables is not None:
                table = tables[i]
                table.context(number, &context.c)
            else:
                memset(&context.c, 0, sizeof(context.c))
                context.c.table, context.c.length = &plain[i, 0], lens[i]
            context.first_query, context.num_queries = starts[i], starts[i + 1] - starts[i]
            if context.num_queries > context.c.length:
                raise ValueError(f"sequence {i} of the batch holds {context.c.length} tokens, and q "
                                 f"{context.num_queries} of them")
            if context.num_queries <= MAX_SHARED_QUERIES:
                first = context.c.length - context.num_queries
                context.shareable = min(first, floats_from(call.call.store, &context.c, first)) // self.pool.block_size
            call.ask(&context.c, context.first_query, context.num_queries)
            if tables is not None and context.num_queries:
                check_held(table, call, context.first_query)
            contexts.append(context)

        begins, parts, keepalive = [0] * count, [0] * count, []
        if call.call.store.latent and call.call.group % KV_ROWS == 0:
            cascade = False  # each query has whole passes of its own: to read together would save only bytes, and there are few
        if cascade and call.window == 0 and call.options.attention_chunk_size == 0 and count > 1:
            read_together(call, contexts, [i for i in range(count) if (<Context>contexts[i]).num_queries], 0, self.pool.block_size,
                          begins, parts, keepalive)
        for i in range(count):
            context = contexts[i]
            call.add(&context.c, context.first_query, context.num_queries, begins[i], parts[i])
        call.keepalive = block_table, seq_lens, keepalive
        return call

    cdef int _check_external(self) except -1:
        """Refuse the slots and tables of another scheduler for formats that store more of a sequence than its blocks."""
        if self.pool.floats is not None:
            raise ValueError(f"this pool needs sequences, whose first or newest tokens it keeps as floats "
                             f"({', '.join(sorted({str(one) for one in self.pool.formats}))}); a scheduler's own slots and "
                             f"block tables need a format without num_float_tokens, centring and per_channel")

    def _check_blocks(self, block_table, seq_lens, num_queries, AttendCall call):
        """Check the block table of another scheduler: each block that is read must hold tokens.

        In a pool with a window, blocks between the sinks and the window of the first query are not read: in their place the
        result has another block of the row.
        """
        cdef Py_ssize_t size = self.pool.block_size, i
        cdef const int32_t[::1] blocks
        self._check_external()
        table = check_integers(block_table, "block_table", np.int32, 2)
        if table.shape[0] != seq_lens.shape[0] or table.shape[1] == 0:
            raise DimensionMismatchError(f"block_table must have shape ({seq_lens.shape[0]}, max_blocks), one row per "
                                         f"sequence, got {table.shape}")
        if seq_lens.min() < 0 or seq_lens.max() > table.shape[1] * size:
            raise ValueError(f"seq_lens must lie between 0 and the {table.shape[1] * size} tokens of block_table's "
                             f"{table.shape[1]} blocks, got {seq_lens.min()} to {seq_lens.max()}")
        begins = np.arange(table.shape[1], dtype=np.int64) * size
        is_used = begins < seq_lens[:, None]
        if isinstance(self.kind, RingTable):
            first = seq_lens.astype(np.int64) - np.maximum(num_queries, 1) + 1 - call.window
            is_used &= (begins + size > first[:, None]) | (begins < max(call.options.num_sink_tokens, 0))
            last = np.maximum(seq_lens - 1, 0) // size
            table = np.where(is_used, table, np.take_along_axis(table, last[:, None], 1))
        used = table[is_used]
        if used.size and (used.min() < 0 or used.max() >= self.pool.num_blocks):
            raise ValueError(f"block_table must hold blocks between 0 and {self.pool.num_blocks - 1} for the tokens of "
                             f"seq_lens, got {used.min()} to {used.max()}")
        blocks = used
        for i in range(0 if self.is_external else blocks.shape[0]):
            if self.pool.owners[blocks[i]] == 0:
                raise ValueError(f"block_table holds block {blocks[i]}, which belongs to no sequence (a stale table?)")
        return table
