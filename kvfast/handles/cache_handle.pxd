"""A `kvfast_cache`."""
from libc.stdint cimport int64_t

from kvfast.core.arrays cimport kv_rows
from kvfast.handles.handle cimport Handle
from kvfast.handles.header cimport kvfast_cache, kvfast_options, kvfast_rows, kvfast_snapshot
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable


cdef class CacheHandle(Handle):
    cdef object cache
    cdef SequenceStorage storage
    cdef void **tables         # (num_layers,) BlockTable of each layer, owned by the storage
    cdef Py_ssize_t *layers    # (num_layers,) number of the layer in its table
    cdef bint is_paged         # a sequence, which knows more about its tokens than the storage does

    cdef bint is_plain(self) noexcept nogil
    cdef bint has(self, int layer) noexcept nogil
    cdef Py_ssize_t length(self) noexcept nogil
    cdef Py_ssize_t layer_length(self, int layer) noexcept nogil
    cdef int append(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
    cdef int attend(self, int layer, const kvfast_rows *q, const kvfast_options *options, const kvfast_rows *out) noexcept nogil
    cdef int advance(self, Py_ssize_t n) noexcept nogil
    cdef bint quick_append(self, BlockTable table, Py_ssize_t layer, const kv_rows *k, const kv_rows *v) noexcept nogil
    cdef bint quick_attend(self, BlockTable table, Py_ssize_t layer, const kv_rows *q, const kv_rows *rope_q,
                           const kvfast_options *options, const kv_rows *out) noexcept nogil
    cdef bint quick_advance(self, Py_ssize_t n) noexcept nogil
    cdef int python_append(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil
    cdef int python_attend(self, int layer, const kvfast_rows *q, const kvfast_options *options,
                           const kvfast_rows *out) noexcept with gil
    cdef int python_advance(self, Py_ssize_t n) noexcept with gil
    cdef Py_ssize_t python_layer_length(self, int layer) noexcept with gil
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
