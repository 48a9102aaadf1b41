# cython: language_level=3, boundscheck=False, cdivision=True
"""Codes and float rows to floats."""
import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t

from kvfast.codec.blocks cimport float_dtype_of, float_row_at, k_block_at, kv_store, patched_from, v_block_at
from kvfast.core.interrupt cimport check_stopped, is_stopped, kv_watch, watch_of
from kvfast.core.kernels cimport STREAMED_BYTES, active, kv_kernels, kv_side
from kvfast.core.threads cimport num_threads_for


cdef int restore_floats(const kv_store *stores, Py_ssize_t num_layers, int32_t block, bint at_start,
                        Py_ssize_t count) except -1:
    """Give the first `count` tokens of a block the float rows that their codes tell; those that start a sequence have
    some already."""
    cdef const kv_kernels *kernels = active()
    cdef const kv_store *store
    cdef Py_ssize_t layer, head, offset
    cdef float row[512]
    for layer in range(num_layers):
        store = stores + layer
        if not store.seals:
            continue
        for head in range(store.num_kv_heads):
            for offset in range(store.float_tokens if at_start else 0, count):
                kernels.decode_k(&store.k, k_block_at(store, block, head), <int>offset, row)
                kernels.from_float[float_dtype_of(store, False)](row, store.k.head_dim, float_row_at(store, block, offset, head, False))
                kernels.decode_v(&store.v, v_block_at(store, block, head), <int>offset, row)
                kernels.from_float[float_dtype_of(store, True)](row, store.v.head_dim, float_row_at(store, block, offset, head, True))
    return 0


cdef object decode_tokens(const kv_store *store, const int64_t[::1] positions, const int64_t[::1] slots, Py_ssize_t floats_begin,
                          bint values):
    """Keys or values in all heads as they were given, float32: of each token its position, its slot, and from position
    `floats_begin` on, where blocks are sealed, its float rows."""
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t i, n = positions.shape[0], heads = store.num_kv_heads
    cdef Py_ssize_t dim = store.v.head_dim if values else store.k.head_dim
    cdef int threads = num_threads_for(None, <double>n * heads * dim * 8)
    cdef kv_watch memory
    cdef kv_watch *watch = watch_of(&memory, <double>n * heads * dim * 8)
    cdef float[:, :, ::1] out
    cdef bint nontemporal = n * heads * dim * <Py_ssize_t>sizeof(float) >= STREAMED_BYTES
    array = np.empty((n, heads, dim), np.float32)
    if array.size == 0:
        return array
    out = array
    with nogil:
        if threads == 1:
            for i in range(n):
                _decode(kernels, store, positions[i], slots[i], floats_begin, values, nontemporal, &out[i, 0, 0],
                        watch)
            kernels.store_nontemporal(NULL, 0, NULL)
        else:  # at whose end a barrier orders what was streamed
            for i in prange(n, schedule="static", num_threads=threads):
                _decode(kernels, store, positions[i], slots[i], floats_begin, values, nontemporal, &out[i, 0, 0],
                        watch)
    check_stopped(watch)
    return array


cdef void _decode(const kv_kernels *kernels, const kv_store *store, Py_ssize_t position, int64_t slot, Py_ssize_t floats_begin,
                  bint values, bint nontemporal, float *out, kv_watch *watch) noexcept nogil:
    """A token, from its float rows or its codes."""
    cdef float buffer[512]
    cdef float *row
    cdef int32_t block = <int32_t>(slot // store.k.block_size)
    cdef Py_ssize_t offset = slot % store.k.block_size, head
    cdef bint floats = store.floats != NULL and (position < store.float_tokens or store.seals and (
        position >= floats_begin or offset >= patched_from(store, block)))
    cdef const kv_side *side = &store.v if values else &store.k
    if is_stopped(watch):
        return
    for head in range(store.num_kv_heads):
        row = &buffer[0] if nontemporal else out
        if floats:
            kernels.to_float[float_dtype_of(store, values)](float_row_at(store, block, offset, head, values), side.head_dim, row)
        elif values:
            kernels.decode_v(side, v_block_at(store, block, head), <int>offset, row)
        else:
            kernels.decode_k(side, k_block_at(store, block, head), <int>offset, row)
        if side.rotated:
            kernels.rotate(row, side.head_dim, 1, side.head_dim, row, side.head_dim)
        if nontemporal:
            kernels.store_nontemporal(row, side.head_dim, out)
        out += side.head_dim
