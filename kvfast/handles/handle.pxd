"""What a `kvfast_cache` and a `kvfast_pool` share."""
from libc.stdint cimport int64_t

from kvfast.attention.plan cimport Plan
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport kv_rows
from kvfast.handles.header cimport kvfast_options, kvfast_rows
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_table cimport BlockTable

cdef enum:
    MOST_TEXT = 512            # bytes of an error text


cdef class Handle:
    cdef BlockPool pool        # the one that guards all others of a cache
    cdef bint latent
    cdef Plan plan             # used by one thread at a time, between `try_enter_reading` and `leave_reading`
    cdef int busy              # whether a thread is there
    cdef char text[MOST_TEXT]

    cdef int over(self, BlockPool pool) except -1
    cdef bint is_quiet(self) noexcept nogil
    cdef bint try_enter(self) noexcept nogil
    cdef void leave(self) noexcept nogil
    cdef bint try_enter_reading(self) noexcept nogil
    cdef void leave_reading(self) noexcept nogil
    cdef bint split(self, const kvfast_rows *given, kv_rows *rows, kv_rows *rope) noexcept nogil
    cdef bint split_pair(self, const kvfast_rows *k, const kvfast_rows *v, kv_rows *keys, kv_rows *values) noexcept nogil
    cdef bint run(self, int num_threads) noexcept nogil
    cdef tuple open_rows(self, const kvfast_rows *given, str name)
    cdef tuple open_pair(self, const kvfast_rows *k, const kvfast_rows *v)
    cdef tuple open_call(self, const kvfast_rows *q, const kvfast_options *options, const kvfast_rows *out, list spans, list parents)
    cdef int failed(self, object error) noexcept


cdef int copy_lse(object result, float *lse) except -1
cdef bint have_shape_of(const kv_layout *layout, const kv_rows *k, const kv_rows *v) noexcept nogil
cdef bint next_slots(BlockTable table, Py_ssize_t layer, Py_ssize_t n, int64_t *slots) noexcept nogil
cdef void add_tokens(BlockTable table, Py_ssize_t layer, Py_ssize_t n) noexcept nogil
