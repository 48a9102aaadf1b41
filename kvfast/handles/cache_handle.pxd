"""A `kvfast_cache`."""
from libc.stdint cimport int64_t

from kvfast.attention.sight cimport kv_member
from kvfast.handles.handle cimport Handle, kv_c_call
from kvfast.handles.header cimport kvfast_cache, kvfast_options, kvfast_rows, kvfast_snapshot
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable


cdef class CacheHandle(Handle):
    cdef object cache
    cdef SequenceStorage storage
    cdef void **tables         # (num_layers,) BlockTable of each layer, owned by the storage
    cdef Py_ssize_t *layers    # (num_layers,) number of the layer in its table
    cdef bint is_paged         # a sequence, which knows more about its tokens than the storage does

    cdef bint is_closed(self) noexcept nogil
    cdef bint has(self, int layer) noexcept nogil
    cdef Py_ssize_t length(self) noexcept nogil
    cdef Py_ssize_t layer_length(self, int layer) noexcept nogil
    cdef int freed(self) noexcept with gil
    cdef int append(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
    cdef int append_blocks(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil
    cdef bint append_in_place(self, BlockTable table, Py_ssize_t layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
    cdef int attend(self, int layer, const kvfast_rows *q, const kvfast_options *options, const kvfast_rows *out) noexcept nogil
    cdef int read_layer(self, kv_c_call *call, BlockTable table, Py_ssize_t layer, kv_member *member) noexcept nogil
    cdef int describe_segments(self, BlockTable table, Py_ssize_t layer, Py_ssize_t index, kv_member *member) noexcept with gil
    cdef int advance(self, Py_ssize_t n) noexcept nogil
    cdef int seal_tokens(self, Py_ssize_t n) noexcept with gil
    cdef bint count_tokens(self, Py_ssize_t n) noexcept nogil
    cdef int advance_ids(self, const int64_t *token_ids, Py_ssize_t n) noexcept with gil
    cdef int truncate(self, Py_ssize_t n) noexcept with gil
    cdef int keep_branch(self, Py_ssize_t n, const Py_ssize_t *keep, Py_ssize_t num_kept) noexcept with gil
    cdef int fork(self, kvfast_cache **other) noexcept with gil
    cdef int free_sequence(self) noexcept with gil
    cdef int snapshot(self, kvfast_snapshot **snapshot) noexcept with gil
    cdef int restore(self, kvfast_snapshot *snapshot) noexcept with gil
    cdef int save(self, const char *path) noexcept with gil
    cdef int load(self, const char *path) noexcept with gil


cdef kvfast_cache *pointer_to(object cache) except NULL
