# cython: language_level=3, boundscheck=False, cdivision=True
"""A `kvfast_cache`: one cache or sequence. What needs no memory and no block does without the interpreter."""
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_layout
from kvfast.codec.encode cimport WRITTEN, encode_rows, work_of
from kvfast.core.arrays cimport kv_rows
from kvfast.core.threads cimport gather_unwatched, kv_team
from kvfast.handles.handle cimport Handle, kv_c_call, next_slots
from kvfast.handles.header cimport KVFAST_OK, kvfast_cache, kvfast_options, kvfast_rows
from kvfast.storage.sequences.segments cimport free_segments
from kvfast.storage.tables.block_table cimport BlockTable

from kvfast.caches.sequence_cache import SequenceCache, storage_in

cdef enum:
    FEW_TOKENS = 64        # the most tokens that are appended without the interpreter, which looks for Ctrl-C


cdef class CacheHandle(Handle):
    def __cinit__(self, cache):
        cdef Py_ssize_t i
        if not isinstance(cache, SequenceCache):
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
        self.pool = (<BlockTable>self.tables[0]).pool

    def __dealloc__(self):
        free(self.tables)
        free(self.layers)

    cdef bint is_closed(self) noexcept nogil:
        """Whether the sequence was freed."""
        return (<BlockTable>self.tables[0]).closed

    cdef bint has(self, int layer) noexcept nogil:
        return 0 <= layer < self.storage.num_layers

    cdef Py_ssize_t length(self) noexcept nogil:
        return self.freed() if self.is_closed() else (<BlockTable>self.tables[0]).length + self.storage.base

    cdef Py_ssize_t layer_length(self, int layer) noexcept nogil:
        if self.is_closed() or not self.has(layer):
            return self.freed() if self.is_closed() else self.no_layer(layer, self.storage.num_layers)
        return (<BlockTable>self.tables[layer]).lengths[self.layers[layer]] + self.storage.base

    cdef int freed(self) noexcept with gil:
        try:
            raise ValueError("this sequence has been freed: its handle can only be closed")
        except BaseException as error:
            return self.failed(error)

    cdef int append(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
        cdef bint done = False
        if self.has(layer) and self.try_enter():
            done = not self.is_closed() and self.append_in_place(<BlockTable>self.tables[layer], self.layers[layer], k, v)
            self.pool.leave()
        return KVFAST_OK if done else self.append_blocks(layer, k, v)

    cdef int append_blocks(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil:
        """Append tokens, and take blocks for them; or tell what is wrong."""
        try:
            keys, values = self.open_pair(self.pool.layouts, k, v)
            self.storage.append(layer, keys, values)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef bint append_in_place(self, BlockTable table, Py_ssize_t layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
        """Append tokens that need no memory; False for others, and for what Python refuses."""
        cdef int64_t slots[FEW_TOKENS]
        cdef const kv_layout *layout = table.pool.layouts + layer
        cdef kv_rows keys, values
        cdef kv_team team
        if not self.split_pair(layout, k, v, &keys, &values) or keys.tokens > FEW_TOKENS:
            return False
        if self.storage.most >= 0 and table.lengths[layer] + self.storage.base + keys.tokens > self.storage.most:
            return False
        # If a value cannot be stored, the rows written so far follow the last token, where they are never read.
        gather_unwatched(&team, 0, work_of(&keys))
        if (not next_slots(table, layer, keys.tokens, slots)
                or encode_rows(layout, &keys, &values, NULL, slots, True, False, &team) != WRITTEN):
            return False
        table.lengths[layer] += keys.tokens
        return True

    cdef int attend(self, int layer, const kvfast_rows *q, const kvfast_options *options, const kvfast_rows *out) noexcept nogil:
        cdef kv_c_call call
        cdef kv_member member
        cdef int code
        if not self.has(layer):
            return self.no_layer(layer, self.storage.num_layers)
        call.layer, call.q, call.options, call.out = layer, q, options, out
        code = self.enter_reading()
        if code == KVFAST_OK:
            memset(&member, 0, sizeof(member))
            code = self.read_layer(&call, <BlockTable>self.tables[layer], self.layers[layer], &member)
            free_segments(&member, 1)
            self.pool.leave_reading()
        return code

    cdef int read_layer(self, kv_c_call *call, BlockTable table, Py_ssize_t layer, kv_member *member) noexcept nogil:
        cdef const kv_layout *layout = table.pool.layouts + layer
        cdef int code = self.freed() if self.is_closed() else self.open_call(call, layout, self.storage.reads_as)
        if code == KVFAST_OK and not table.fit_window(&call.request.options, &call.refusal):
            code = self.refused(call)
        if code != KVFAST_OK:
            return code
        table.describe(layer, member)
        if self.storage.segments is not None:
            code = self.describe_segments(table, layer, call.layer, member)
            if code != KVFAST_OK:
                return code
        member.num_queries = call.request.q.tokens
        return self.answer(call, layout, member, 1, NULL, 0)

    cdef int describe_segments(self, BlockTable table, Py_ssize_t layer, Py_ssize_t index, kv_member *member) noexcept with gil:
        try:
            self.storage.fill(table, layer, index, member)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int advance(self, Py_ssize_t n) noexcept nogil:
        cdef bint done = False
        if n > 0 and not self.is_paged and self.try_enter():
            done = self.count_tokens(n)
            self.pool.leave()
        return KVFAST_OK if done else self.seal_tokens(n)

    cdef int seal_tokens(self, Py_ssize_t n) noexcept with gil:
        """Count tokens, and seal or release blocks; or tell what is wrong."""
        try:
            self.cache.advance(n)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef bint count_tokens(self, Py_ssize_t n) noexcept nogil:
        """Count tokens where that seals and releases nothing; False for others, and for what Python refuses."""
        cdef Py_ssize_t i, length = (<BlockTable>self.tables[0]).length
        for i in range(self.storage.num_layers):
            if (<BlockTable>self.tables[i]).lengths[self.layers[i]] != length + n or not (<BlockTable>self.tables[i]).just_counts(n):
                return False
        for i in range(self.storage.num_layers):
            if (<BlockTable>self.tables[i]).length == length:  # not yet, for another layer of the table
                (<BlockTable>self.tables[i]).count_tokens(n)
        return True


cdef kvfast_cache *pointer_to(object cache) except NULL:
    """A new handle of a cache, which whoever gets the pointer owns."""
    handle = CacheHandle(cache)
    Py_INCREF(handle)
    return <kvfast_cache *>handle
