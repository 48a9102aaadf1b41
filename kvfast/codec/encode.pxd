"""Writes rows of keys and values into blocks, normalised and rotated if a model needs it."""
from libc.stdint cimport int64_t

from kvfast.codec.blocks cimport kv_layout
from kvfast.core.arrays cimport Rows, kv_rows
from kvfast.core.threads cimport kv_team
from kvfast.core.kernels cimport kv_kernels, kv_transform


# RMS norm and rotation of rows of Q or K. cos and sin are tables (positions, pairs): token t is rotated by row first + t,
# or by row positions[t].
ctypedef struct kv_rotary:
    kv_transform row
    Py_ssize_t first
    const int64_t *positions


cdef enum kv_written:
    WRITTEN
    UNSTORABLE                 # a value cannot be stored
    OUT_OF_MEMORY


cdef bint split_latent(const kv_layout *layout, kv_rows *rows, kv_rows *rope) noexcept nogil
cdef tuple open_tokens(const kv_layout *layout, object k, object v)
cdef void load_rows(const kv_kernels *kernels, const kv_rows *rows, Py_ssize_t token, Py_ssize_t head,
                    Py_ssize_t num_heads, const kv_rotary *rotary, float *out, Py_ssize_t stride) noexcept nogil
cdef tuple storable(const kv_layout *layout, Rows k, Rows v)
cdef int check_storable(const kv_layout *layout, Rows k, Rows v, const kv_rotary *rotary, const int64_t *slots) except -1
cdef int check_rows(const kv_layout *layout, Rows k, Rows v) except -1
cdef double work_of(const kv_rows *k) noexcept nogil
cdef kv_written encode_rows(const kv_layout *layout, const kv_rows *k, const kv_rows *v, const kv_rotary *rotary, const int64_t *slots,
                            bint in_order, bint checks, kv_team *team) noexcept nogil
cdef int write_rows(const kv_layout *layout, Rows k, Rows v, const kv_rotary *rotary, const int64_t *slots,
                    bint in_order, bint may_stop) except -1
