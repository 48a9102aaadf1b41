# cython: language_level=3, boundscheck=False, cdivision=True
"""A `kvfast_cache`: one cache or sequence. The methods ``quick_*`` do without the interpreter what needs no memory and no block; where
they return False, errors included, the method of Python does all of it."""
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from kvfast.attention.request cimport FITS, has_finite_queries, kv_request, misfit
from kvfast.attention.run cimport LOGS
from kvfast.codec.blocks cimport kv_context, kv_layout
from kvfast.codec.encode cimport WRITTEN, encode_rows, work_of
from kvfast.core.arrays cimport kv_rows
from kvfast.core.threads cimport gather_unwatched, kv_team
from kvfast.handles.arguments cimport convert_output, ids_of, integers, request_of
from kvfast.handles.handle cimport Handle, copy_lse, have_shape_of, next_slots
from kvfast.handles.header cimport KVFAST_OK, kvfast_cache, kvfast_options, kvfast_rows, kvfast_snapshot
from kvfast.storage.tables.block_table cimport BlockTable

from kvfast.caches.snapshot import Snapshot
from kvfast.caches.stored_sequence import StoredSequence, storage_in

cdef enum:
    QUICK_TOKENS = 64      # the most tokens that are appended without the interpreter, which looks for Ctrl-C


cdef class CacheHandle(Handle):
    def __cinit__(self, cache):
        cdef Py_ssize_t i
        if not isinstance(cache, StoredSequence):
            raise TypeError(f"cache must be a KVCache, RingKVCache, MLAKVCache or Sequence, got {type(cache).__name__}")
        if getattr(cache, "_rope", None) is not None:
            raise ValueError("the C interface needs rope=None, got a ring with a rope, which rotates queries and keys itself")
        self.cache, self.storage, self.is_paged = cache, storage_in(cache), cache.is_paged
        self.tables = <void **>calloc(self.storage.num_layers, sizeof(void *))
        self.layers = <Py_ssize_t *>calloc(self.storage.num_layers, sizeof(Py_ssize_t))
        if self.tables == NULL or self.layers == NULL:
            raise MemoryError("cannot allocate the layers of a cache")
        for i, (table, layer) in enumerate(self.storage.layer_tables):
            self.tables[i], self.layers[i] = <void *>table, layer
        self.over((<BlockTable>self.tables[0]).pool)

    def __dealloc__(self):
        free(self.tables)
        free(self.layers)

    cdef bint is_plain(self) noexcept nogil:
        """Whether the tokens are those of the tables alone: of a sequence that was neither freed nor spliced."""
        return not (<BlockTable>self.tables[0]).closed and self.storage.segments is None

    cdef bint has(self, int layer) noexcept nogil:
        return 0 <= layer < self.storage.num_layers

    cdef Py_ssize_t length(self) noexcept nogil:
        if (<BlockTable>self.tables[0]).closed:
            return self.python_layer_length(0)
        return (<BlockTable>self.tables[0]).length + self.storage.base

    cdef Py_ssize_t layer_length(self, int layer) noexcept nogil:
        if not self.has(layer) or (<BlockTable>self.tables[0]).closed:
            return self.python_layer_length(layer)
        return (<BlockTable>self.tables[layer]).lengths[self.layers[layer]] + self.storage.base

    cdef Py_ssize_t python_layer_length(self, int layer) noexcept with gil:
        try:
            if (<BlockTable>self.tables[0]).closed:
                raise ValueError("this sequence has been freed: its handle can only be closed")
            return self.storage.layer_length(layer)
        except BaseException as error:
            return self.failed(error)

    cdef int append(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
        cdef kv_rows keys, values
        cdef bint done = False
        if self.has(layer) and self.split_pair(k, v, &keys, &values) and self.try_enter():
            done = self.is_plain() and self.quick_append(<BlockTable>self.tables[layer], self.layers[layer], &keys, &values)
            self.leave()
        return KVFAST_OK if done else self.python_append(layer, k, v)

    cdef bint quick_append(self, BlockTable table, Py_ssize_t layer, const kv_rows *k, const kv_rows *v) noexcept nogil:
        cdef int64_t slots[QUICK_TOKENS]
        cdef const kv_layout *layout = table.pool.layouts + layer
        cdef Py_ssize_t n = k.tokens
        cdef kv_team team
        if (n > QUICK_TOKENS or self.storage.most >= 0 and table.lengths[layer] + n > self.storage.most
                or not have_shape_of(layout, k, v) or not next_slots(table, layer, n, slots)):
            return False
        # If a value cannot be stored, the rows written so far follow the last token, where they are never read.
        gather_unwatched(&team, 0, work_of(k))
        if encode_rows(layout, k, v, NULL, slots, True, False, &team) != WRITTEN:
            return False
        table.lengths[layer] += n
        return True

    cdef int python_append(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil:
        try:
            keys, values = self.open_pair(k, v)
            self.storage.append(layer, keys, values)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int attend(self, int layer, const kvfast_rows *q, const kvfast_options *options, const kvfast_rows *out) noexcept nogil:
        cdef kv_rows queries, rope, target
        cdef bint done = False
        if self.has(layer) and self.split(q, &queries, &rope) and convert_output(out, &target) and self.try_enter_reading():
            done = self.is_plain() and self.quick_attend(<BlockTable>self.tables[layer], self.layers[layer], &queries, &rope, options,
                                                         &target)
            self.leave_reading()
        return KVFAST_OK if done else self.python_attend(layer, q, options, out)

    cdef bint quick_attend(self, BlockTable table, Py_ssize_t layer, const kv_rows *q, const kv_rows *rope_q,
                           const kvfast_options *options, const kv_rows *out) noexcept nogil:
        cdef const kv_layout *layout = table.pool.layouts + layer
        cdef kv_context context
        cdef kv_request request
        table.context(layer, &context)
        if LOGS or q.tokens > context.length or not request_of(options, q, rope_q, out, self.storage.reads_as, &request):
            return False
        if misfit(&request, layout) != FITS or not has_finite_queries(&request):
            return False
        if not table.limit(&request.window, &request.num_sink_tokens) or not self.plan.begin(&request, layout, 1):
            return False
        self.plan.ask(context.length, 0, q.tokens)
        if not table.holds(self.plan.call.queries[0].start):
            return False
        self.plan.add(&context, 0, q.tokens, 0, 0)
        return self.run(options.num_threads)

    cdef int python_attend(self, int layer, const kvfast_rows *q, const kvfast_options *options,
                           const kvfast_rows *out) noexcept with gil:
        try:
            queries, rope, settings = self.open_call(q, options, out, integers(options.spans, options.num_spans, 2, "spans"),
                                                     integers(options.parents, options.num_parents, 1, "parents"))
            copy_lse(self.storage.attend(layer, queries, None, settings, rope), options.lse)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int advance(self, Py_ssize_t n) noexcept nogil:
        cdef bint done = False
        if self.try_enter():
            done = self.is_plain() and self.quick_advance(n)
            self.leave()
        return KVFAST_OK if done else self.python_advance(n)

    cdef bint quick_advance(self, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i, length = (<BlockTable>self.tables[0]).length
        if n < 1 or self.is_paged:
            return False
        for i in range(self.storage.num_layers):
            if (<BlockTable>self.tables[i]).lengths[self.layers[i]] != length + n or not (<BlockTable>self.tables[i]).just_counts(n):
                return False
        for i in range(self.storage.num_layers):
            if (<BlockTable>self.tables[i]).length == length:  # not yet, for another layer of the table
                (<BlockTable>self.tables[i]).count_tokens(n)
        return True

    cdef int python_advance(self, Py_ssize_t n) noexcept with gil:
        try:
            self.cache.advance(n)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int advance_ids(self, const int64_t *token_ids, Py_ssize_t n) noexcept with gil:
        try:
            if not self.is_paged:
                raise ValueError(f"advance_ids needs a sequence of a pool, got a {type(self.cache).__name__}: call advance")
            self.cache.advance(n, ids_of(token_ids, n))
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int truncate(self, Py_ssize_t n) noexcept with gil:
        try:
            self.cache.truncate(n)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int keep_branch(self, Py_ssize_t n, const Py_ssize_t *keep, Py_ssize_t num_kept) noexcept with gil:
        try:
            if num_kept < 0 or (keep == NULL and num_kept > 0):
                raise ValueError(f"keep must point to num_kept numbers, got {num_kept} and {'NULL' if keep == NULL else 'an address'}")
            self.cache.truncate(n, [keep[i] for i in range(num_kept)])
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int fork(self, kvfast_cache **other) noexcept with gil:
        try:
            if other == NULL:
                raise ValueError("other must point to where the fork goes, got NULL")
            other[0] = pointer_to(self.cache.fork())
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int free_sequence(self) noexcept with gil:
        try:
            if not self.is_paged:
                raise ValueError(f"free_sequence needs a sequence of a pool, got a {type(self.cache).__name__}: call "
                                 f"truncate(cache, 0) to drop its tokens, or close(cache)")
            self.cache.free()
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int snapshot(self, kvfast_snapshot **snapshot) noexcept with gil:
        try:
            if snapshot == NULL:
                raise ValueError("snapshot must point to where the snapshot goes, got NULL")
            taken = self.cache.snapshot()
            Py_INCREF(taken)
            snapshot[0] = <kvfast_snapshot *>taken
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int restore(self, kvfast_snapshot *snapshot) noexcept with gil:
        try:
            if snapshot == NULL:
                raise ValueError("snapshot must be one that snapshot() has made, got NULL")
            self.cache.restore(<object>snapshot)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int save(self, const char *path) noexcept with gil:
        try:
            self.cache.save(_path_of(path))
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int load(self, const char *path) noexcept with gil:
        try:
            self.cache.restore(Snapshot.load(_path_of(path)))
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)


cdef bytes _path_of(const char *path):
    if path == NULL:
        raise ValueError("path must be the name of a file, got NULL")
    return <bytes>path


cdef kvfast_cache *pointer_to(object cache) except NULL:
    """A new handle of a cache, which whoever gets the pointer owns."""
    handle = CacheHandle(cache)
    Py_INCREF(handle)
    return <kvfast_cache *>handle
