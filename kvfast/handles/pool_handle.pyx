# cython: language_level=3, boundscheck=False, cdivision=True
"""A `kvfast_pool`: batches over the sequences of a pool. As in `cache_handle`, what needs no memory does without the interpreter."""
import numpy as np

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memcpy

from kvfast.attention.cascade cimport (find_prefixes, free_prefixes, gains_nothing, kv_prefixes, set_shareable, share_nothing)
from kvfast.attention.refusals cimport DIMENSION, VALUE, kv_refusal, refuse
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_layout
from kvfast.codec.encode cimport WRITTEN, check_rows, check_storable, encode_rows, work_of
from kvfast.core.arrays cimport Rows, kv_rows
from kvfast.core.checks cimport check_layer
from kvfast.core.threads cimport gather_unwatched, kv_team
from kvfast.handles.arguments cimport ids_of
from kvfast.handles.cache_handle cimport CacheHandle
from kvfast.handles.handle cimport Handle, kv_c_call, next_slots
from kvfast.handles.header cimport KVFAST_OK, kvfast_batch, kvfast_options, kvfast_rows
from kvfast.storage.batches.prepared_batch cimport PreparedBatch
from kvfast.storage.memory.buffer_layers cimport clean_slots
from kvfast.storage.sequences.segments cimport free_segments
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.ring_table cimport RingTable

from kvfast.caches.paged_sequence import advance_all
from kvfast.caches.pool import Pool, batches_in
from kvfast.core.text import shown
from kvfast.errors import DimensionMismatchError

cdef enum:
    FEW_TOKENS = 512       # as in `cache_handle`
    FEW_SLOTS = 64         # the most that are compared with each other
    FEW_SEQUENCES = 64     # likewise


cdef inline Py_ssize_t _start(const kvfast_batch *batch, Py_ssize_t i) noexcept nogil:
    """The first row of sequence i."""
    return i if batch.starts == NULL else batch.starts[i]


cdef inline void _add_tokens(BlockTable table, Py_ssize_t layer, Py_ssize_t n) noexcept nogil:
    table.lengths[layer] += n


cdef class PoolHandle(Handle):
    def __cinit__(self, pool):
        if not isinstance(pool, Pool):
            raise TypeError(f"pool must be a PagedKVCache or PagedMLAKVCache, got {type(pool).__name__}: open() is for other caches")
        self.cache, self.batches = pool, batches_in(pool)
        self.pool = self.batches.pool
        self.plain_tables = self.pool.floats is None and not isinstance(self.batches.kind, RingTable)

    cdef int advance(self, const kvfast_batch *batch, const int64_t *token_ids) noexcept with gil:
        cdef Py_ssize_t i, count
        cdef list sequences = [], counts = []
        try:
            count = 0 if batch == NULL or batch.num_sequences < 1 else _start(batch, batch.num_sequences)
            self.check(batch, count, "the batch", True)
            for i in range(batch.num_sequences):
                if _start(batch, i + 1) > _start(batch, i):
                    sequences.append((<CacheHandle>batch.sequences[i]).cache)
                    counts.append(_start(batch, i + 1) - _start(batch, i))
            if sequences:
                advance_all(sequences, counts, None if token_ids == NULL else ids_of(token_ids, count))
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef bint fits(self, const kvfast_batch *batch, Py_ssize_t num_tokens, bint distinct, kv_refusal *refusal) noexcept nogil:
        """Whether a batch is valid, which has `num_tokens`. In the pool. `check` names what depends on its objects."""
        cdef Py_ssize_t i
        cdef bint rises = True
        if batch == NULL or (batch.sequences == NULL and (distinct or (batch.block_table == NULL and batch.seq_lens == NULL))):
            return refuse(refusal, VALUE, b"batch must point to sequences, got NULL")
        if batch.sequences == NULL and (batch.block_table == NULL or batch.seq_lens == NULL or batch.num_sequences < 1
                                        or batch.max_blocks < 1):
            return refuse(refusal, VALUE, b"without sequences a batch must point to block_table and seq_lens, of at least one sequence "
                          b"and block, got num_sequences {0} and max_blocks {1}{null}", batch.num_sequences, batch.max_blocks)
        if batch.num_sequences < 1:
            return refuse(refusal, VALUE, b"num_sequences must be at least 1, got {0}", batch.num_sequences)
        for i in range(batch.num_sequences if batch.sequences != NULL else 0):
            if batch.sequences[i] == NULL:
                return refuse(refusal, VALUE, b"sequences[{0}] must be a sequence of this pool, got NULL: see new_sequence() and "
                              b"fork()", i)
            if <void *>(<CacheHandle>batch.sequences[i]).pool != <void *>self.pool:
                return refuse(refusal, VALUE, b"sequences[{0}] must be a sequence of this pool, got a {kind} that has other blocks: "
                              b"restore() its snapshot() into a sequence of this pool", i)
            if (<CacheHandle>batch.sequences[i]).is_closed():
                return refuse(refusal, VALUE, b"sequences[{0}] must be a sequence that is in use, got one that has been freed", i)
        if distinct and not _are_distinct(batch, refusal):
            return False
        for i in range(batch.num_sequences):
            rises = rises and _start(batch, i) <= _start(batch, i + 1)
        if not rises or _start(batch, 0) != 0 or _start(batch, batch.num_sequences) != num_tokens:
            return refuse(refusal, DIMENSION, b"starts must rise from 0 to the {tokens} tokens of {rows} in {0} entries, got {starts}",
                          batch.num_sequences + 1)
        return True

    cdef int check(self, const kvfast_batch *batch, Py_ssize_t num_tokens, str rows, bint distinct) except -1:
        """Raise for a batch that does not fit. `rows`: the name of what has `num_tokens`."""
        cdef kv_refusal refusal
        cdef dict told = {"tokens": num_tokens, "rows": rows}
        if self.fits(batch, num_tokens, distinct, &refusal):
            return 0
        if b"{kind}" in refusal.text:
            told["kind"] = type((<CacheHandle>batch.sequences[refusal.numbers[0]]).cache).__name__
        if b"{null}" in refusal.text:
            told["null"] = ", block_table NULL" * (batch.block_table == NULL) + ", seq_lens NULL" * (batch.seq_lens == NULL)
        if b"{starts}" in refusal.text:
            told["starts"] = ("NULL, which is for one token of each sequence" if batch.starts == NULL
                              else shown([batch.starts[i] for i in range(refusal.numbers[0])]))
        raise (DimensionMismatchError if refusal.error == DIMENSION else ValueError)(
            refusal.text.decode().format(*refusal.numbers, **told))

    cdef int append(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
        cdef kv_rows keys, values
        cdef kv_refusal refusal
        cdef bint done = False
        if 0 <= layer < self.pool.num_layers and self.split_pair(self.pool.layouts + layer, k, v, &keys, &values) and self.try_enter():
            if batch != NULL and batch.sequences == NULL:
                done = self.write_in_place(layer, batch.slots, &keys, &values)
            elif keys.tokens <= FEW_TOKENS and self.fits(batch, keys.tokens, True, &refusal):
                done = self.append_in_place(layer, batch, &keys, &values)
            self.pool.leave()
        return KVFAST_OK if done else self.append_blocks(layer, batch, k, v)

    cdef bint append_in_place(self, Py_ssize_t layer, const kvfast_batch *batch, const kv_rows *k, const kv_rows *v) noexcept nogil:
        """Append tokens that need no memory; False for others, and for what Python refuses."""
        cdef int64_t slots[FEW_TOKENS]
        cdef Py_ssize_t i
        cdef kv_team team
        for i in range(batch.num_sequences):
            if not next_slots(<BlockTable>(<CacheHandle>batch.sequences[i]).tables[0], layer, _start(batch, i + 1) - _start(batch, i),
                              slots + _start(batch, i)):
                return False
        gather_unwatched(&team, 0, work_of(k))
        if encode_rows(self.pool.layouts + layer, k, v, NULL, slots, False, False, &team) != WRITTEN:
            return False
        for i in range(batch.num_sequences):
            _add_tokens(<BlockTable>(<CacheHandle>batch.sequences[i]).tables[0], layer, _start(batch, i + 1) - _start(batch, i))
        return True

    cdef bint write_in_place(self, Py_ssize_t layer, const int64_t *slots, const kv_rows *k, const kv_rows *v) noexcept nogil:
        """Write to slots of another scheduler, whose blocks all of them are already; False as `append_in_place`."""
        cdef const kv_layout *layout = self.pool.layouts + layer
        cdef int64_t total = <int64_t>self.pool.num_blocks * self.pool.block_size
        cdef Py_ssize_t i, j
        cdef kv_team team
        if slots == NULL or k.tokens > FEW_SLOTS or not self.plain_tables or not self.batches.is_external:
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

    cdef int append_blocks(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil:
        """Append tokens, and take blocks for them; or tell what is wrong."""
        cdef Rows keys, values
        cdef BlockTable table
        cdef list tables = [], counts = [], known = []
        cdef Py_ssize_t i
        try:
            check_layer(layer, self.pool.num_layers)
            keys, values = self.open_pair(self.pool.layouts + layer, k, v)
            check_rows(self.pool.layouts + layer, keys, values)
            if batch != NULL and batch.sequences == NULL and batch.slots != NULL:
                self.batches.append_batch(layer, keys, values, ids_of(batch.slots, keys.rows.tokens))
                return KVFAST_OK
            self.check(batch, keys.rows.tokens, "k", True)
            check_storable(self.pool.layouts + layer, keys, values, NULL, NULL)  # before the sequences take blocks
            # Slots are given out after the complete tokens, also those that this layer has already.
            for i in range(batch.num_sequences):
                table = (<CacheHandle>batch.sequences[i]).storage.tables[0]
                tables.append(table)
                known.append(table.lengths[layer] - table.length)
                counts.append(known[i] + _start(batch, i + 1) - _start(batch, i))
            parts = np.split(self.batches.slot_mapping(tables, counts), np.cumsum(counts)[:-1])
            self.batches.append_batch(layer, keys, values, np.concatenate([part[held:] for part, held in zip(parts, known)]))
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int attend(self, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                    const kvfast_rows *out) noexcept nogil:
        cdef kv_c_call call
        cdef kv_member *members = NULL
        cdef void *keepalive = NULL
        cdef int code = KVFAST_OK
        call.layer, call.q, call.options, call.out = layer, q, options, out
        if not 0 <= layer < self.pool.num_layers:
            return self.no_layer(layer, self.pool.num_layers)
        code = self.enter_reading()
        if code != KVFAST_OK:
            return code
        code = self.open_call(&call, self.pool.layouts + layer, self.batches.reads_as)
        if code == KVFAST_OK:
            code = self.describe_batch(&call, batch, &members, &keepalive)
        if code == KVFAST_OK:
            code = self.read_batch(&call, batch, members)
        if members != NULL:
            free_segments(members, batch.num_sequences)
            free(members)
        if keepalive != NULL:
            _drop(keepalive)
        self.pool.leave_reading()
        return code

    cdef int describe_batch(self, kv_c_call *call, const kvfast_batch *batch, kv_member **members, void **keepalive) noexcept nogil:
        """Describe the sequences of a batch, or the rows of tables, to attention; returns a code. `keepalive`: who owns the tables."""
        cdef Py_ssize_t i
        cdef kv_member *member
        cdef bint done
        call.request.is_batch = True
        if not self.fits(batch, call.request.q.tokens, False, &call.refusal):
            return self.wrong_batch(batch, call.request.q.tokens)
        call.request.span_counts, call.request.parent_counts = batch.span_counts, batch.parent_counts
        if not self.batches.kind.fit_window(&call.request.options, &call.refusal):
            return self.refused(call)
        members[0] = <kv_member *>calloc(batch.num_sequences, sizeof(kv_member))
        done = members[0] != NULL
        for i in range(batch.num_sequences if done else 0):
            member = members[0] + i
            member.first_query, member.num_queries = _start(batch, i), _start(batch, i + 1) - _start(batch, i)
            if batch.sequences == NULL:
                done = done and self.describe_row(batch, i, member)
            elif (<CacheHandle>batch.sequences[i]).storage.segments is not None:
                done = False
            else:
                (<BlockTable>(<CacheHandle>batch.sequences[i]).tables[0]).describe(call.layer, member)
            set_shareable(member, self.pool.layouts + call.layer)
        return KVFAST_OK if done else self.describe_others(call, batch, members[0], keepalive)

    cdef int wrong_batch(self, const kvfast_batch *batch, Py_ssize_t num_tokens) noexcept with gil:
        try:
            self.check(batch, num_tokens, "q", False)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int describe_others(self, kv_c_call *call, const kvfast_batch *batch, kv_member *members, void **keepalive) noexcept with gil:
        """Describe spliced sequences, tables with windows or float rows; or tell what is wrong. `keepalive` gets a new reference to the
        owner of tables."""
        cdef PreparedBatch prepared
        cdef list storages = None
        try:
            table = lengths = None
            if members == NULL:
                raise MemoryError("cannot allocate the working memory of a batch")
            if batch.sequences == NULL:
                table, lengths = _tables_of(batch)
            else:
                storages = [(<CacheHandle>batch.sequences[i]).storage for i in range(batch.num_sequences)]
            starts = np.array([_start(batch, i) for i in range(batch.num_sequences + 1)], np.int64)
            prepared = self.batches.fill(members, call.layer, call.request.q.tokens, call.request.options.sliding_window,
                                         call.request.options.num_sink_tokens, storages, table, lengths, starts)
            if prepared is not None:
                Py_INCREF(prepared)
                keepalive[0] = <void *>prepared
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef bint describe_row(self, const kvfast_batch *batch, Py_ssize_t i, kv_member *member) noexcept nogil:
        """Describe a row of plain tables, which have no windows and no float rows next to blocks; False for others, and for rows that
        name what is not there."""
        cdef const int32_t *table = batch.block_table + i * batch.max_blocks
        cdef Py_ssize_t length = batch.seq_lens[i], size = self.pool.block_size, j
        if not self.plain_tables or not member.num_queries <= length <= batch.max_blocks * size:
            return False
        for j in range((length + size - 1) // size):
            if not 0 <= table[j] < self.pool.num_blocks or not (self.batches.is_external or self.pool.owners[table[j]]):
                return False
        member.context.table, member.context.length, member.length = table, length, length
        return True

    cdef int read_batch(self, kv_c_call *call, const kvfast_batch *batch, kv_member *members) noexcept nogil:
        cdef const kv_layout *layout = self.pool.layouts + call.layer
        cdef kv_prefixes prefixes
        cdef int code = KVFAST_OK
        prefixes.first, prefixes.count = NULL, 0
        if not (batch.no_cascade or gains_nothing(&call.request, layout, batch.num_sequences)
                or share_nothing(members, batch.num_sequences, layout)):
            code = self.share(members, batch.num_sequences, &prefixes)
        if code == KVFAST_OK:
            code = self.answer(call, layout, members, batch.num_sequences, prefixes.first, prefixes.count)
        free_prefixes(&prefixes)
        return code

    cdef int share(self, const kv_member *members, Py_ssize_t count, kv_prefixes *prefixes) noexcept with gil:
        try:
            find_prefixes(members, count, self.pool.layouts, prefixes)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)


cdef void _drop(void *reference) noexcept with gil:
    Py_DECREF(<object>reference)


cdef int _compare(const void *a, const void *b) noexcept nogil:
    cdef size_t first = (<const size_t *>a)[0], second = (<const size_t *>b)[0]
    return (first > second) - (first < second)


cdef bint _are_distinct(const kvfast_batch *batch, kv_refusal *refusal) noexcept nogil:
    """Whether no sequence comes twice in a batch."""
    cdef Py_ssize_t count = batch.num_sequences, i, j
    cdef size_t *tables = <size_t *>malloc(count * sizeof(size_t)) if count > FEW_SEQUENCES else NULL
    cdef bint found = tables == NULL
    for i in range(count if tables != NULL else 0):
        tables[i] = <size_t>(<CacheHandle>batch.sequences[i]).tables[0]
    if tables != NULL:
        qsort(tables, count, sizeof(size_t), _compare)
        for i in range(1, count):
            found = found or tables[i - 1] == tables[i]
        free(tables)
    for i in range(count if found else 0):
        for j in range(i):
            if (<CacheHandle>batch.sequences[i]).tables[0] == (<CacheHandle>batch.sequences[j]).tables[0]:
                return refuse(refusal, VALUE, b"sequences[{0}] must be another than sequences[{1}]: a call appends to a sequence once, "
                              b"all of its tokens one after the other", i, j)
    return True


cdef tuple _tables_of(const kvfast_batch *batch):
    """`block_table` and `seq_lens` of a batch, as Python has them."""
    cdef int32_t[:, ::1] table
    cdef int32_t[::1] lengths
    rows = table = np.empty((batch.num_sequences, batch.max_blocks), np.int32)
    memcpy(&table[0, 0], batch.block_table, rows.nbytes)
    counts = lengths = np.empty(batch.num_sequences, np.int32)
    memcpy(&lengths[0], batch.seq_lens, counts.nbytes)
    return rows, counts
