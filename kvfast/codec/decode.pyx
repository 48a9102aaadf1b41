# cython: language_level=3, boundscheck=False, cdivision=True
"""Decodes codes and float rows to floats."""
import numpy as np

from libc.stdint cimport int32_t, int64_t

from kvfast.codec.blocks cimport (KV_FROM_STORED, change_key_basis, float_row_at, k_block_at, kv_layout, patched_from, side_of,
                                  v_block_at)
from kvfast.codec.dtypes cimport dtype_limit
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport STREAMED_BYTES, active, kv_kernels, kv_side
from kvfast.core.limits cimport KV_MAX_FLOAT32, KV_MAX_HEAD_DIM
from kvfast.core.threads cimport STATIC, for_each, gather, kv_team

from kvfast.errors import NonFiniteInputError

cdef enum:
    NOT_FINITE = 1


ctypedef struct kv_decode:
    const kv_kernels *kernels
    const kv_layout *layout
    const int64_t *positions   # (tokens,)
    const int64_t *slots       # (tokens,)
    Py_ssize_t floats_begin
    bint values
    bint nontemporal           # the output is written past the caches
    float *out                 # (tokens, heads, head_dim)


cdef void restore_floats(const kv_layout *layout, int32_t block, bint at_start, Py_ssize_t num_tokens) noexcept nogil:
    """Decode the first `num_tokens` tokens of a block to float rows. With `at_start` the first `float_tokens` have theirs
    already."""
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t head, offset, i
    cdef const kv_side *floats
    cdef float limit
    cdef float row[KV_MAX_HEAD_DIM]
    cdef int values
    for head in range(layout.num_kv_heads):
        for offset in range(layout.float_tokens if at_start else 0, num_tokens):
            for values in range(2):
                floats = side_of(layout.floats, values)
                _decode_row(kernels, layout, values, block, head, offset, row)
                limit = dtype_limit(floats.dtype)
                for i in range(floats.head_dim):  # the codes of a number near the limit may stand for one beyond it
                    row[i] = min(max(row[i], -limit), limit)
                kernels.from_float[floats.dtype](row, floats.head_dim, float_row_at(layout, block, offset, head, values))


cdef void _decode_row(const kv_kernels *kernels, const kv_layout *layout, bint values, int32_t block, Py_ssize_t head,
                      Py_ssize_t offset, float *row) noexcept nogil:
    if values:
        kernels.decode_v(&layout.v, v_block_at(layout, block, head), <int>offset, row)
    else:
        kernels.decode_k(&layout.k, k_block_at(layout, block, head), <int>offset, row)


cdef object decode_tokens(const kv_layout *layout, const int64_t[::1] positions, const int64_t[::1] slots, Py_ssize_t floats_begin,
                          bint values):
    """Keys or values of tokens in all heads, float32, rotated back. Each token has a position and a slot. With `open_tokens`, those
    from position `floats_begin` on are read from their float rows. NonFiniteInputError for codes beyond float32, which only others than
    kvfast can have written."""
    cdef Py_ssize_t n = positions.shape[0], dim = side_of(layout, values).head_dim
    cdef kv_team team
    cdef kv_decode call
    cdef float[:, :, ::1] out
    array = np.empty((n, layout.num_kv_heads, dim), np.float32)
    if array.size == 0:
        return array
    out = array
    call.kernels, call.layout, call.positions, call.slots = active(), layout, &positions[0], &slots[0]
    call.floats_begin, call.values, call.out = floats_begin, values, &out[0, 0, 0]
    call.nontemporal = array.nbytes >= STREAMED_BYTES
    gather(&team, None, 2.0 * array.nbytes)
    if for_each(&team, _decode, &call, n, STATIC):
        raise NonFiniteInputError("stored keys or values are beyond float32: kvfast did not write them")
    call.kernels.store_nontemporal(NULL, 0, NULL)  # for this thread; the end of the loop orders the writes of the others
    return array


cdef int _decode(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """Decode a token from its float rows or its codes."""
    cdef const kv_decode *call = <const kv_decode *>shared
    cdef const kv_kernels *kernels = call.kernels
    cdef const kv_layout *layout = call.layout
    cdef bint values = call.values
    cdef const kv_side *side = side_of(layout, values)
    cdef float buffer[KV_MAX_HEAD_DIM]
    cdef float *row
    cdef int flags = 0
    cdef float *out = call.out + index * layout.num_kv_heads * side.head_dim
    cdef Py_ssize_t position = call.positions[index], offset = call.slots[index] % layout.k.block_size, head
    cdef int32_t block = <int32_t>(call.slots[index] // layout.k.block_size)
    cdef bint floats = layout.floats != NULL and (position < layout.float_tokens or layout.open_tokens and (
        position >= call.floats_begin or offset >= patched_from(layout, block)))
    cdef int float_dtype = side_of(layout.floats, values).dtype if floats else 0
    for head in range(layout.num_kv_heads):
        row = &buffer[0] if call.nontemporal else out
        if floats:
            kernels.to_float[float_dtype](float_row_at(layout, block, offset, head, values), side.head_dim, row)
        else:
            _decode_row(kernels, layout, values, block, head, offset, row)
        if not values:
            change_key_basis(kernels, layout, head, KV_FROM_STORED, row, side.head_dim, 1, row, side.head_dim)
        elif side.rotated:
            kernels.rotate(row, side.head_dim, 1, side.head_dim, row, side.head_dim)
        if kernels.find_unstorable(row, side.head_dim, KV_MAX_FLOAT32) >= 0:
            flags = NOT_FINITE
        if call.nontemporal:
            kernels.store_nontemporal(row, side.head_dim, out)
        out += side.head_dim
    return flags
