from libc.stdint cimport int64_t

from kvfast.attention.options cimport kvfast_options
from kvfast.attention.plan cimport kv_plan, kv_prefix
from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.request cimport kv_request
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport kv_rows
from kvfast.handles.header cimport kvfast_rows
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_table cimport BlockTable

cdef enum:
    MOST_TEXT = 512            # bytes of an error text


# A call of `attend` from C.
ctypedef struct kv_c_call:
    int layer
    const kvfast_rows *q
    const kvfast_options *options
    const kvfast_rows *out
    kv_request request
    kv_refusal refusal


cdef class Handle:
    cdef object cache
    cdef BlockPool pool        # the one that guards all others of a cache
    cdef char text[MOST_TEXT]

    cdef bint try_enter(self) noexcept nogil
    cdef int enter_reading(self) noexcept nogil
    cdef int tidy_and_read(self) noexcept with gil
    cdef bint split_pair(self, const kv_layout *layout, const kvfast_rows *k, const kvfast_rows *v, kv_rows *keys,
                         kv_rows *values) noexcept nogil
    cdef tuple open_pair(self, const kv_layout *layout, const kvfast_rows *k, const kvfast_rows *v)
    cdef int open_call(self, kv_c_call *call, const kv_layout *layout, int precision) noexcept nogil
    cdef int answer(self, kv_c_call *call, const kv_layout *layout, kv_member *members, Py_ssize_t count, const kv_prefix *prefixes,
                    Py_ssize_t num_prefixes) noexcept nogil
    cdef int end(self, kv_plan *plan) noexcept with gil
    cdef int refused(self, const kv_c_call *call) noexcept with gil
    cdef int wrong_rows(self, const kv_c_call *call) noexcept with gil
    cdef int no_layer(self, int layer, Py_ssize_t num_layers) noexcept with gil
    cdef int failed(self, object error) noexcept


cdef bint next_slots(BlockTable table, Py_ssize_t layer, Py_ssize_t n, int64_t *slots) noexcept nogil
