from kvfast.attention.sight cimport kv_member
from kvfast.handles.handle cimport Handle, kv_c_call
from kvfast.handles.header cimport kvfast_cache, kvfast_options, kvfast_rows
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable


cdef class CacheHandle(Handle):
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


cdef kvfast_cache *pointer_to(object cache) except NULL
