"""Rows of keys and values into blocks, normalised and rotated on the way where a model asks for it."""
from libc.stdint cimport int64_t

from kvfast._arrays cimport Rows, kv_rows
from kvfast._kernels cimport kv_kernels
from kvfast.blocks cimport kv_store


# What becomes of a row of Q or K before it is used: RMS norm, then rotation.
ctypedef struct kv_transform:
    const float *norm          # (head_dim,) weights or NULL
    float eps
    const float *cos           # (rows, pairs) or NULL
    const float *sin
    Py_ssize_t pairs
    Py_ssize_t first           # token t turns by row first + t of the tables, or by row positions[t]
    const int64_t *positions
    bint interleaved


cdef bint is_identity(const kv_transform *transform) noexcept nogil
cdef void load_row(const kv_kernels *kernels, const kv_rows *rows, Py_ssize_t token, Py_ssize_t head,
                   const kv_transform *transform, float *row) noexcept nogil
cdef int write_rows(const kv_store *store, Rows k, Rows v, const kv_transform *transform, const int64_t *slots,
                    bint in_order) except -1
