"""A `kvfast_pool`."""
from libc.stdint cimport int64_t

from kvfast.core.arrays cimport kv_rows
from kvfast.handles.handle cimport Handle
from kvfast.handles.header cimport kvfast_batch, kvfast_cache, kvfast_options, kvfast_rows
from kvfast.storage.batches.batch cimport PagedBatches
from kvfast.storage.batches.cascade cimport kv_member
from kvfast.storage.tables.block_table cimport BlockTable


cdef class PoolHandle(Handle):
    cdef object cache
    cdef PagedBatches batches
    cdef bint plain_tables     # tables of block ids alone tell what is read: no windows, and no float rows next to blocks

    cdef int new_sequence(self, kvfast_cache **sequence) noexcept with gil
    cdef int match_prefix(self, const int64_t *token_ids, Py_ssize_t n, const void *salt, Py_ssize_t salt_nbytes,
                          kvfast_cache **sequence) noexcept with gil
    cdef Py_ssize_t num_free_blocks(self) noexcept with gil
    cdef int append(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
    cdef int attend(self, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                    const kvfast_rows *out) noexcept nogil
    cdef bint try_append(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
    cdef bint try_attend(self, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                         const kvfast_rows *out) noexcept nogil
    cdef int advance(self, const kvfast_batch *batch, const int64_t *token_ids) noexcept with gil
    cdef bint fits(self, const kvfast_batch *batch, Py_ssize_t num_tokens, bint distinct) noexcept nogil
    cdef list checked(self, const kvfast_batch *batch, Py_ssize_t num_tokens, str rows, bint distinct)
    cdef bint quick_append(self, Py_ssize_t layer, const kvfast_batch *batch, const kv_rows *k, const kv_rows *v) noexcept nogil
    cdef bint quick_write(self, Py_ssize_t layer, const int64_t *slots, const kv_rows *k, const kv_rows *v) noexcept nogil
    cdef bint quick_attend(self, Py_ssize_t layer, const kvfast_batch *batch, const kv_rows *q, const kv_rows *rope_q,
                           const kvfast_options *options, const kv_rows *out) noexcept nogil
    cdef int python_append(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil
    cdef int python_attend(self, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                           const kvfast_rows *out) noexcept with gil
    cdef bint _ask(self, BlockTable table, Py_ssize_t layer, kv_member *member) noexcept nogil
    cdef bint _ask_table(self, const kvfast_batch *batch, Py_ssize_t i, kv_member *member) noexcept nogil
