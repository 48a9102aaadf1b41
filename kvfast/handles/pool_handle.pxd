from libc.stdint cimport int64_t

from kvfast.attention.cascade cimport kv_prefixes
from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.sight cimport kv_member
from kvfast.core.arrays cimport kv_rows
from kvfast.handles.handle cimport Handle, kv_c_call
from kvfast.handles.header cimport kvfast_batch, kvfast_options, kvfast_rows
from kvfast.storage.batches.batch cimport PagedBatches


cdef class PoolHandle(Handle):
    cdef PagedBatches batches
    cdef bint plain_tables     # tables of block ids alone tell what is read: no windows, and no float rows next to blocks

    cdef int append(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
    cdef int attend(self, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                    const kvfast_rows *out) noexcept nogil
    cdef int advance(self, const kvfast_batch *batch, const int64_t *token_ids) noexcept with gil
    cdef bint fits(self, const kvfast_batch *batch, Py_ssize_t num_tokens, bint distinct, kv_refusal *refusal) noexcept nogil
    cdef int check(self, const kvfast_batch *batch, Py_ssize_t num_tokens, str rows, bint distinct) except -1
    cdef bint append_in_place(self, Py_ssize_t layer, const kvfast_batch *batch, const kv_rows *k, const kv_rows *v) noexcept nogil
    cdef bint write_in_place(self, Py_ssize_t layer, const int64_t *slots, const kv_rows *k, const kv_rows *v) noexcept nogil
    cdef int append_blocks(self, int layer, const kvfast_batch *batch, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil
    cdef int describe_batch(self, kv_c_call *call, const kvfast_batch *batch, kv_member **members, void **keepalive) noexcept nogil
    cdef int describe_others(self, kv_c_call *call, const kvfast_batch *batch, kv_member *members, void **keepalive) noexcept with gil
    cdef int wrong_batch(self, const kvfast_batch *batch, Py_ssize_t num_tokens) noexcept with gil
    cdef int share(self, const kv_member *members, Py_ssize_t count, kv_prefixes *prefixes) noexcept with gil
    cdef bint describe_row(self, const kvfast_batch *batch, Py_ssize_t i, kv_member *member) noexcept nogil
    cdef int read_batch(self, kv_c_call *call, const kvfast_batch *batch, kv_member *members) noexcept nogil
