# cython: language_level=3, boundscheck=False, cdivision=True
"""A `kvfast_pool`: batches over the sequences of a pool. As in `cache_handle`, the methods ``quick_*`` do without the interpreter."""
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

from kvfast.attention.request cimport FITS, has_finite_queries, kv_request, misfit
from kvfast.attention.run cimport LOGS
from kvfast.attention.spans cimport floats_from
from kvfast.attention.workspace cimport MEMBERS
from kvfast.codec.blocks cimport kv_layout
from kvfast.codec.encode cimport WRITTEN, check_rows, check_storable, encode_rows, work_of
from kvfast.core.arrays cimport Rows, kv_rows
from kvfast.core.checks cimport check_layer
from kvfast.core.threads cimport gather_unwatched, kv_team
from kvfast.handles.arguments cimport convert_output, divided, ids_of, integers, request_of
from kvfast.handles.cache_handle cimport CacheHandle, pointer_to
from kvfast.handles.handle cimport Handle, add_tokens, copy_lse, have_shape_of, next_slots
from kvfast.handles.header cimport KVFAST_OK, kvfast_batch, kvfast_cache, kvfast_options, kvfast_rows
from kvfast.storage.batches.cascade cimport MAX_SHARED_QUERIES, kv_member, share_nothing
from kvfast.storage.memory.buffer_layers cimport clean_slots
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.ring_table cimport RingTable

from kvfast.caches.paged_sequence import advance_all
from kvfast.caches.paged_storage import PagedStorage, batches_in
from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError

cdef enum:
    QUICK_TOKENS = 512     # as in `cache_handle`
    QUICK_SEQUENCES = 512  # the most that are compared with each other
    QUICK_SLOTS = 64       # likewise


cdef inline Py_ssize_t _start(const kvfast_batch *batch, Py_ssize_t i) noexcept nogil:
    """The first row of sequence i."""
    return i if batch.starts == NULL else batch.starts[i]


cdef class PoolHandle(Handle):
    def __cinit__(self, pool):
        if not isinstance(pool, PagedStorage):
            raise TypeError(f"pool must be a PagedKVCache or PagedMLAKVCache, got {type(pool).__name__}: open() is for other caches")
        self.cache, self.batches = pool, batches_in(pool)
        self.over(self.batches.pool)
        self.plain_tables = self.pool.floats is None and not isinstance(self.batches.kind, RingTable)

    cdef int new_sequence(self, kvfast_cache **sequence) noexcept with gil:
        try:
            if sequence == NULL:
                raise ValueError("sequence must point to where the new sequence goes, got NULL")
            sequence[0] = pointer_to(self.cache.new_sequence())
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int match_prefix(self, const int64_t *token_ids, Py_ssize_t n, const void *salt, Py_ssize_t salt_nbytes,
                          kvfast_cache **sequence) noexcept with gil:
        try:
            if sequence == NULL:
                raise ValueError("sequence must point to where the new sequence goes, got NULL")
            if salt_nbytes < 0 or (salt == NULL and salt_nbytes > 0):
                raise ValueError(f"salt must point to salt_nbytes bytes, got {salt_nbytes} and "
                                 + ("NULL" if salt == NULL else "an address"))
            given = (<const char *>salt)[:salt_nbytes] if salt_nbytes else b""
            sequence[0] = pointer_to(self.cache.match_prefix(ids_of(token_ids, n), given))
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef Py_ssize_t num_free_blocks(self) noexcept with gil:
        try:
            return self.cache.num_free_blocks
        except BaseException as error:
            return self.failed(error)

    cdef int advance(self, const kvfast_batch *batch, const int64_t *token_ids) noexcept with gil:
        cdef CacheHandle handle
        cdef Py_ssize_t i, count
        cdef list sequences = [], counts = []
        try:
            count = 0 if batch == NULL or batch.num_sequences < 1 else _start(batch, batch.num_sequences)
            for i, handle in enumerate(self.checked(batch, count, "the batch", True)):
                if _start(batch, i + 1) > _start(batch, i):
                    sequences.append(handle.cache)
                    counts.append(_start(batch, i + 1) - _start(batch, i))
            if sequences:
                advance_all(sequences, counts, None if token_ids == NULL else ids_of(token_ids, count))
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef bint fits(self, const kvfast_batch *batch, Py_ssize_t num_tokens, bint distinct) noexcept nogil:
        """Whether a batch is valid, and its sequences or tables plain; not so for more than QUICK_SEQUENCES. In the pool."""
        cdef Py_ssize_t i, j
        if batch == NULL or not 1 <= batch.num_sequences <= QUICK_SEQUENCES:
            return False
        if _start(batch, 0) != 0 or _start(batch, batch.num_sequences) != num_tokens:
            return False
        for i in range(batch.num_sequences):
            if _start(batch, i) > _start(batch, i + 1):
                return False
        if batch.sequences == NULL:
            return self.plain_tables and batch.block_table != NULL and batch.seq_lens != NULL and batch.max_blocks > 0
        for i in range(batch.num_sequences):
            if (batch.sequences[i] == NULL or <void *>(<CacheHandle>batch.sequences[i]).pool != <void *>self.pool
                    or not (<CacheHandle>batch.sequences[i]).is_plain()):
                return False
            for j in range(i if distinct else 0):
                if (<CacheHandle>batch.sequences[i]).tables[0] == (<CacheHandle>batch.sequences[j]).tables[0]:
                    return False
        return True

    cdef list checked(self, const kvfast_batch *batch, Py_ssize_t num_tokens, str rows, bint distinct):
        """The handles of a batch, or the error that `fits` has no words for. `rows`: the name of what has `num_tokens`."""
        cdef CacheHandle handle
        cdef Py_ssize_t i
        cdef list handles = []
        cdef dict places = {}
        if batch == NULL or batch.sequences == NULL:
            raise ValueError("batch must point to sequences, got NULL")
        if batch.num_sequences < 1:
            raise ValueError(f"num_sequences must be at least 1, got {batch.num_sequences}")
        for i in range(batch.num_sequences):
            if batch.sequences[i] == NULL:
                raise ValueError(f"sequences[{i}] must be a sequence of this pool, got NULL: see new_sequence() and fork()")
            handle = <CacheHandle>batch.sequences[i]
            if handle.pool is not self.pool:
                raise ValueError(f"sequences[{i}] must be a sequence of this pool, got a {type(handle.cache).__name__} that has other "
                                 f"blocks: restore() its snapshot() into a sequence of this pool")
            if handle.storage.closed:
                raise ValueError(f"sequences[{i}] must be a sequence that is in use, got one that has been freed")
            if distinct and places.setdefault(handle.storage, i) != i:
                raise ValueError(f"sequences[{i}] must be another than sequences[{places[handle.storage]}]: a call appends to a "
                                 f"sequence once, all of its tokens one after the other")
            handles.append(handle)
        _check_starts(batch, num_tokens, rows)
        return handles

    cdef int append(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
        return KVFAST_OK if self.try_append(layer, batch, k, v) else self.python_append(layer, batch, k, v)

    cdef bint try_append(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
        """`append` without the interpreter; False if only Python can do it, or say what is wrong."""
        cdef kv_rows keys, values
        cdef bint done = False
        if 0 <= layer < self.pool.num_layers and self.split_pair(k, v, &keys, &values) and self.try_enter():
            if batch != NULL and batch.sequences == NULL:
                done = self.quick_write(layer, batch.slots, &keys, &values)
            else:
                done = self.fits(batch, keys.tokens, True) and self.quick_append(layer, batch, &keys, &values)
            self.leave()
        return done

    cdef bint quick_append(self, Py_ssize_t layer, const kvfast_batch *batch, const kv_rows *k, const kv_rows *v) noexcept nogil:
        cdef int64_t slots[QUICK_TOKENS]
        cdef const kv_layout *layout = self.pool.layouts + layer
        cdef Py_ssize_t i
        cdef kv_team team
        if k.tokens > QUICK_TOKENS or not have_shape_of(layout, k, v):
            return False
        for i in range(batch.num_sequences):
            if not next_slots(<BlockTable>(<CacheHandle>batch.sequences[i]).tables[0], layer, _start(batch, i + 1) - _start(batch, i),
                              slots + _start(batch, i)):
                return False
        gather_unwatched(&team, 0, work_of(k))
        if encode_rows(layout, k, v, NULL, slots, False, False, &team) != WRITTEN:
            return False
        for i in range(batch.num_sequences):
            add_tokens(<BlockTable>(<CacheHandle>batch.sequences[i]).tables[0], layer, _start(batch, i + 1) - _start(batch, i))
        return True

    cdef bint quick_write(self, Py_ssize_t layer, const int64_t *slots, const kv_rows *k, const kv_rows *v) noexcept nogil:
        """Write to slots of another scheduler, whose blocks all of them are already."""
        cdef const kv_layout *layout = self.pool.layouts + layer
        cdef int64_t total = <int64_t>self.pool.num_blocks * self.pool.block_size
        cdef Py_ssize_t i, j
        cdef kv_team team
        if (slots == NULL or k.tokens > QUICK_SLOTS or not self.plain_tables or not self.batches.is_external
                or not have_shape_of(layout, k, v)):
            return False
        for i in range(k.tokens):
            if not -1 <= slots[i] < total:
                return False
            for j in range(i if slots[i] >= 0 else 0):
                if slots[j] == slots[i]:
                    return False
        # No length hides what a refused call has written.
        gather_unwatched(&team, 0, work_of(k))
        if encode_rows(layout, k, v, NULL, slots, False, True, &team) != WRITTEN:
            return False
        if self.pool.layers is not None:
            clean_slots(layout, slots, k.tokens)
        return encode_rows(layout, k, v, NULL, slots, False, False, &team) == WRITTEN

    cdef int python_append(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil:
        cdef Rows keys, values
        cdef CacheHandle handle
        cdef list handles, tables = [], counts = [], known = []
        cdef Py_ssize_t i
        try:
            check_layer(layer, self.pool.num_layers)
            keys, values = self.open_pair(k, v)
            check_rows(self.pool.layouts + layer, keys, values)
            if batch != NULL and batch.sequences == NULL and batch.slots != NULL:
                self.batches.append_batch(layer, keys, values, ids_of(batch.slots, keys.rows.tokens))
                return KVFAST_OK
            handles = self.checked(batch, keys.rows.tokens, "k", True)
            check_storable(self.pool.layouts + layer, keys, values, NULL, NULL)  # before the sequences take blocks
            # Slots are given out after the complete tokens, also those that this layer has already.
            for i in range(batch.num_sequences):
                handle = handles[i]
                tables.append(handle.storage.tables[0])
                known.append((<BlockTable>tables[i]).lengths[layer] - (<BlockTable>tables[i]).length)
                counts.append(known[i] + _start(batch, i + 1) - _start(batch, i))
            parts = np.split(self.batches.slot_mapping(tables, counts), np.cumsum(counts)[:-1])
            slots = np.concatenate([part[held:] for part, held in zip(parts, known)])
            self.batches.append_batch(layer, keys, values, slots)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int attend(self, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                    const kvfast_rows *out) noexcept nogil:
        return KVFAST_OK if self.try_attend(layer, batch, q, options, out) else self.python_attend(layer, batch, q, options, out)

    cdef bint try_attend(self, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                         const kvfast_rows *out) noexcept nogil:
        """`attend` without the interpreter, as `try_append`."""
        cdef kv_rows queries, rope, target
        cdef bint done = False
        if (0 <= layer < self.pool.num_layers and self.split(q, &queries, &rope) and convert_output(out, &target)
                and self.try_enter_reading()):
            done = self.fits(batch, queries.tokens, False) and self.quick_attend(layer, batch, &queries, &rope, options, &target)
            self.leave_reading()
        return done

    cdef bint quick_attend(self, Py_ssize_t layer, const kvfast_batch *batch, const kv_rows *q, const kv_rows *rope_q,
                           const kvfast_options *options, const kv_rows *out) noexcept nogil:
        """As `PagedBatches` attends, but without prefixes that are read together."""
        cdef const kv_layout *layout = self.pool.layouts + layer
        cdef kv_request request
        cdef kv_member *members
        cdef Py_ssize_t i
        if LOGS or not request_of(options, q, rope_q, out, self.batches.reads_as, &request):
            return False
        if misfit(&request, layout) != FITS or not has_finite_queries(&request):
            return False
        if not self.batches.kind.limit(&request.window, &request.num_sink_tokens):
            return False
        if not self.plan.begin(&request, layout, batch.num_sequences):
            return False
        members = <kv_member *>self.plan.workspace.reserve(MEMBERS, batch.num_sequences * sizeof(kv_member))
        if members == NULL:
            return False
        for i in range(batch.num_sequences):
            if (batch.span_counts != NULL and batch.span_counts[i]) or (batch.parent_counts != NULL and batch.parent_counts[i]):
                return False
            members[i].first_query, members[i].num_queries = _start(batch, i), _start(batch, i + 1) - _start(batch, i)
            if batch.sequences == NULL:
                if not self._ask_table(batch, i, members + i):
                    return False
            elif not self._ask(<BlockTable>(<CacheHandle>batch.sequences[i]).tables[0], layer, members + i):
                return False
        # With a window, tables hold the blocks of the last tokens alone, and no prefix is read together.
        if (not batch.no_cascade and request.window == 0 and request.chunk == 0
                and not share_nothing(members, batch.num_sequences, self.pool.block_size)):
            return False
        for i in range(batch.num_sequences):
            self.plan.add(&members[i].context, members[i].first_query, members[i].num_queries, 0, 0)
        return self.run(options.num_threads)

    cdef bint _ask(self, BlockTable table, Py_ssize_t layer, kv_member *member) noexcept nogil:
        """Ask for the queries of a sequence; False if it does not hold what they see."""
        cdef Py_ssize_t first
        table.context(layer, &member.context)
        first = member.context.length - member.num_queries
        member.shareable = 0
        if member.num_queries <= MAX_SHARED_QUERIES:
            member.shareable = min(first, floats_from(self.pool.layouts + layer, &member.context, first)) // self.pool.block_size
        if first < 0:
            return False
        self.plan.ask(member.context.length, member.first_query, member.num_queries)
        return member.num_queries == 0 or table.holds(self.plan.call.queries[member.first_query].start)

    cdef bint _ask_table(self, const kvfast_batch *batch, Py_ssize_t i, kv_member *member) noexcept nogil:
        """Ask for the queries of a row of tables; False if they name what is not there."""
        cdef const int32_t *table = batch.block_table + i * batch.max_blocks
        cdef Py_ssize_t length = batch.seq_lens[i], size = self.pool.block_size, j
        if not member.num_queries <= length <= batch.max_blocks * size:
            return False
        for j in range((length + size - 1) // size):
            if not 0 <= table[j] < self.pool.num_blocks or not (self.batches.is_external or self.pool.owners[table[j]]):
                return False
        memset(&member.context, 0, sizeof(member.context))
        member.context.table, member.context.length = table, length
        member.shareable = 0 if member.num_queries > MAX_SHARED_QUERIES else (length - member.num_queries) // size
        self.plan.ask(length, member.first_query, member.num_queries)
        return True

    cdef int python_attend(self, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                           const kvfast_rows *out) noexcept with gil:
        cdef Rows queries
        cdef list spans, parents, storages = None
        table = lengths = None
        try:
            check_layer(layer, self.pool.num_layers)
            queries, _ = self.open_rows(q, "q")
            if batch != NULL and batch.sequences == NULL and (batch.block_table != NULL or batch.seq_lens != NULL):
                table, lengths = _tables_of(batch)
                _check_starts(batch, queries.rows.tokens, "q")
            else:
                storages = [(<CacheHandle>one).storage for one in self.checked(batch, queries.rows.tokens, "q", False)]
            spans = integers(options.spans, options.num_spans, 2, "spans")
            spans = divided(spans, batch.span_counts, batch.num_sequences, "spans")
            parents = integers(options.parents, options.num_parents, 1, "parents")
            parents = divided(parents, batch.parent_counts, batch.num_sequences, "parents")
            queries, rope, settings = self.open_call(q, options, out, spans, parents)
            starts = [_start(batch, i) for i in range(batch.num_sequences + 1)]
            result = self.batches.attend_batch(layer, queries, storages, table, lengths, starts, settings, not batch.no_cascade, rope)
            copy_lse(result, options.lse)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)


cdef int _check_starts(const kvfast_batch *batch, Py_ssize_t num_tokens, str rows) except -1:
    """Check the rows of each sequence. `rows`: the name of what has `num_tokens`."""
    starts = [_start(batch, i) for i in range(batch.num_sequences + 1)]
    if starts[0] != 0 or starts[-1] != num_tokens or starts != sorted(starts):
        got = "NULL, which is for one token of each sequence" if batch.starts == NULL else shown(starts)
        raise DimensionMismatchError(f"starts must rise from 0 to the {num_tokens} tokens of {rows} in {len(starts)} entries, "
                                     f"got {got}")
    return 0


cdef tuple _tables_of(const kvfast_batch *batch):
    """`block_table` and `seq_lens` of a batch, as Python has them."""
    cdef int32_t[:, ::1] table
    cdef int32_t[::1] lengths
    if batch.block_table == NULL or batch.seq_lens == NULL or batch.num_sequences < 1 or batch.max_blocks < 1:
        raise ValueError(f"without sequences a batch must point to block_table and seq_lens, of at least one sequence and block, got "
                         f"num_sequences {batch.num_sequences} and max_blocks {batch.max_blocks}"
                         + ("" if batch.block_table != NULL else ", block_table NULL")
                         + ("" if batch.seq_lens != NULL else ", seq_lens NULL"))
    rows = table = np.empty((batch.num_sequences, batch.max_blocks), np.int32)
    memcpy(&table[0, 0], batch.block_table, rows.nbytes)
    counts = lengths = np.empty(batch.num_sequences, np.int32)
    memcpy(&lengths[0], batch.seq_lens, counts.nbytes)
    return rows, counts
