# cython: language_level=3, freethreading_compatible=True
"""Pools, sequences, snapshots and batches of `kvfast.h` as objects. A code below 0 is a ValueError with code and text."""
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kvfast cimport capi

cdef enum:
    MOST = 1024  # sequences or numbers of a call


cdef class Snapshot:
    cdef capi.kvfast_snapshot *snapshot

    def __dealloc__(self):
        capi.close_snapshot(self.snapshot)


cdef class Sequence:
    """A kvfast_cache."""
    cdef capi.kvfast_cache *cache

    def __dealloc__(self):
        capi.close(self.cache)

    @staticmethod
    def of(cache):
        cdef Sequence self = Sequence()
        self.cache = capi.open(cache)
        return self

    cdef int told(self, int code) except -1:
        if code:
            raise ValueError(f"{code}: {capi.error(self.cache).decode()}")
        return 0

    def __len__(self):
        return capi.length(self.cache)

    def layer_length(self, int layer):
        return capi.layer_length(self.cache, layer)

    def advance(self, Py_ssize_t n):
        cdef int code
        with nogil:
            code = capi.advance(self.cache, n)
        self.told(code)

    def advance_ids(self, const int64_t[::1] ids, n=None):
        cdef Py_ssize_t count = ids.shape[0] if n is None else n
        cdef int code
        with nogil:
            code = capi.advance_ids(self.cache, NULL if ids is None else &ids[0], count)
        self.told(code)

    def truncate(self, Py_ssize_t n, keep=None, num_kept=None):
        cdef Py_ssize_t numbers[MOST]
        cdef Py_ssize_t count, i
        cdef int code
        if keep is None and num_kept is None:
            return self.told(capi.truncate(self.cache, n))
        for i, number in enumerate(keep or ()):
            numbers[i] = number
        count = len(keep) if num_kept is None else num_kept
        with nogil:
            code = capi.keep_branch(self.cache, n, NULL if keep is None else &numbers[0], count)
        self.told(code)

    def fork(self, bint nowhere=False):
        cdef Sequence other = Sequence()
        cdef int code
        with nogil:
            code = capi.fork(self.cache, NULL if nowhere else &other.cache)
        self.told(code)
        return other

    def free(self):
        cdef int code
        with nogil:
            code = capi.free_sequence(self.cache)
        self.told(code)

    def snapshot(self, bint nowhere=False):
        cdef Snapshot taken = Snapshot()
        cdef int code
        with nogil:
            code = capi.snapshot(self.cache, NULL if nowhere else &taken.snapshot)
        if code and taken.snapshot != NULL:
            raise AssertionError("a refused call leaves a snapshot")
        self.told(code)
        return taken

    def restore(self, Snapshot taken):
        cdef capi.kvfast_snapshot *given = NULL if taken is None else taken.snapshot
        cdef int code
        with nogil:
            code = capi.restore(self.cache, given)
        self.told(code)

    def save(self, path):
        self.told(capi.save(self.cache, NULL if path is None else <const char *>path))

    def load(self, path):
        self.told(capi.load(self.cache, NULL if path is None else <const char *>path))

    def append(self, int layer, float[:, :, :] k, float[:, :, :] v):
        cdef capi.kvfast_rows keys = _rows(k), values = _rows(v)
        cdef int code
        with nogil:
            code = capi.append(self.cache, layer, &keys, &values)
        self.told(code)

    def attend(self, int layer, float[:, :, :] q, float[:, :, :] out):
        cdef capi.kvfast_rows queries = _rows(q), target = _rows(out)
        cdef int code
        with nogil:
            code = capi.attend(self.cache, layer, &queries, NULL, &target)
        self.told(code)


cdef class Pool:
    """A kvfast_pool. Sequences of a batch may be None, for NULL; `count`: a number of them that may be wrong."""
    cdef capi.kvfast_pool *pool

    def __cinit__(self, pool):
        self.pool = capi.open_batches(pool)

    def __dealloc__(self):
        capi.close_batches(self.pool)

    cdef int told(self, int code) except -1:
        if code:
            raise ValueError(f"{code}: {capi.pool_error(self.pool).decode()}")
        return 0

    def new_sequence(self, bint nowhere=False):
        cdef Sequence sequence = Sequence()
        cdef int code
        with nogil:
            code = capi.new_sequence(self.pool, NULL if nowhere else &sequence.cache)
        self.told(code)
        return sequence

    def match_prefix(self, const int64_t[::1] ids, salt=None, n=None, salt_nbytes=None, bint nowhere=False):
        cdef Sequence sequence = Sequence()
        cdef Py_ssize_t count = ids.shape[0] if n is None else n, room = len(salt or b"") if salt_nbytes is None else salt_nbytes
        cdef const char *given = NULL if salt is None else <const char *>salt
        cdef int code
        with nogil:
            code = capi.match_prefix(self.pool, NULL if ids is None else &ids[0], count, given, room,
                                     NULL if nowhere else &sequence.cache)
        self.told(code)
        return sequence

    @property
    def num_free_blocks(self):
        return capi.num_free_blocks(self.pool)

    def append(self, int layer, sequences, k, v, starts=None, count=None):
        cdef Batch batch = Batch(sequences, starts, count)
        cdef capi.kvfast_rows keys = _given(k), values = _given(v)
        cdef bint none = v is None
        cdef int code
        with nogil:
            code = capi.append_batch(self.pool, layer, &batch.batch, &keys, NULL if none else &values)
        self.told(code)

    def append_slots(self, int layer, const int64_t[::1] slots, k, v):
        cdef Batch batch = Batch(None, None, None)
        cdef capi.kvfast_rows keys = _given(k), values = _given(v)
        cdef bint none = v is None
        cdef int code
        batch.batch.slots = NULL if slots is None else &slots[0]
        with nogil:
            code = capi.append_batch(self.pool, layer, &batch.batch, &keys, NULL if none else &values)
        self.told(code)

    def attend_tables(self, int layer, const int32_t[:, ::1] block_table, const int32_t[::1] seq_lens, q, out, starts=None,
                      count=None, bint no_cascade=False, float[:, ::1] lse=None, Py_ssize_t window=0):
        cdef Batch batch = Batch(None, starts, None)
        cdef capi.kvfast_rows queries = _given(q), target = _given(out)
        cdef capi.kvfast_options options
        cdef int code
        memset(&options, 0, sizeof(options))
        options.sliding_window = window
        if lse is not None:
            options.lse = &lse[0, 0]
        batch.batch.no_cascade = no_cascade
        if block_table is not None:
            batch.batch.block_table = &block_table[0, 0]
            batch.batch.num_sequences, batch.batch.max_blocks = block_table.shape[0], block_table.shape[1]
        if seq_lens is not None:
            batch.batch.seq_lens = &seq_lens[0]
        if count is not None:
            batch.batch.num_sequences = count
        with nogil:
            code = capi.attend_batch(self.pool, layer, &batch.batch, &queries, &options, &target)
        self.told(code)

    def advance(self, sequences, starts=None, const int64_t[::1] ids=None, count=None):
        cdef Batch batch = Batch(sequences, starts, count)
        cdef int code
        with nogil:
            code = capi.advance_batch(self.pool, &batch.batch, NULL if ids is None else &ids[0])
        self.told(code)

    def attend(self, int layer, sequences, q, out, starts=None, count=None, bint no_cascade=False, spans=None, span_counts=None,
               tree_parents=None, parent_counts=None, float[:, ::1] lse=None):
        cdef Batch batch = Batch(sequences, starts, count)
        cdef capi.kvfast_rows queries = _given(q), target = _given(out)
        cdef capi.kvfast_options options
        cdef Py_ssize_t[:, ::1] of_spans
        cdef Py_ssize_t[::1] of_parents, counts_of_spans, counts_of_parents
        cdef int code
        memset(&options, 0, sizeof(options))
        batch.batch.no_cascade = no_cascade
        if spans is not None:
            of_spans = spans
            options.spans, options.num_spans = &of_spans[0, 0], of_spans.shape[0]
        if tree_parents is not None:
            of_parents = tree_parents
            options.tree_parents, options.num_parents = &of_parents[0], of_parents.shape[0]
        if span_counts is not None:
            counts_of_spans = span_counts
            batch.batch.span_counts = &counts_of_spans[0]
        if parent_counts is not None:
            counts_of_parents = parent_counts
            batch.batch.parent_counts = &counts_of_parents[0]
        if lse is not None:
            options.lse = &lse[0, 0]
        with nogil:
            code = capi.attend_batch(self.pool, layer, &batch.batch, &queries, &options, &target)
        self.told(code)


cdef class Batch:
    cdef capi.kvfast_batch batch
    cdef capi.kvfast_cache **sequences
    cdef Py_ssize_t starts[MOST + 1]

    def __cinit__(self, sequences, starts, count):
        cdef Py_ssize_t i
        memset(&self.batch, 0, sizeof(self.batch))
        if sequences is not None:
            self.batch.num_sequences = len(sequences) if count is None else count
            self.sequences = <capi.kvfast_cache **>malloc(MOST * sizeof(void *))
            self.batch.sequences = self.sequences
            for i, sequence in enumerate(sequences):
                self.sequences[i] = NULL if sequence is None else (<Sequence>sequence).cache
        if starts is not None:
            for i, number in enumerate(starts):
                self.starts[i] = number
            self.batch.starts = self.starts

    def __dealloc__(self):
        free(self.sequences)


cdef capi.kvfast_rows _given(array):
    """Rows, or none for None."""
    cdef capi.kvfast_rows none
    memset(&none, 0, sizeof(none))
    return none if array is None else _rows(array)


cdef capi.kvfast_rows _rows(float[:, :, :] array) noexcept:
    return capi.kvfast_rows(data=&array[0, 0, 0], num_tokens=array.shape[0], num_heads=array.shape[1], dim=array.shape[2],
                            token_stride=array.strides[0], head_stride=array.strides[1], dtype=capi.KVFAST_FLOAT32)
