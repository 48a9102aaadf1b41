# cython: language_level=3, boundscheck=False, cdivision=True
"""Blocks that are encoded as a whole, from the float rows of their tokens, and what tokens are decoded to."""
import numpy as np

from cython.parallel cimport prange, threadid
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.stdlib cimport abs, free, malloc

from kvfast.core.interrupt cimport check_stopped, is_stopped, kv_watch, watch_of
from kvfast.core.kernels cimport STREAMED_BYTES, active, kv_kernels, kv_side
from kvfast.core.threads cimport num_threads_for
from kvfast.codec.blocks cimport PIECE, k_block_at, kv_store, patched_from, piece_of, v_block_at
from kvfast.core.wipe cimport kv_wipe

cdef extern from *:
    """
    static void kv_set(unsigned char *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); } /* heads of a block share it */
    """
    void kv_set(uint8_t *flag) noexcept nogil


cdef int seal_blocks(const kv_store *stores, Py_ssize_t num_layers, const int32_t *blocks, Py_ssize_t count,
                     bint at_start, const int16_t *kept_codes, uint8_t *unfit) except -1:
    """Encode blocks whose tokens all have float rows; `at_start`: the first is the first of its sequence.

    Of block b the first abs(kept[b]) tokens have their codes already, which stay, and so do their statistics. unfit[i] is set
    where those of the i-th block do not fit the others, whose codes are not to be read then.
    """
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t heads = stores.num_kv_heads, tasks = count * num_layers * heads, i
    cdef Py_ssize_t elements = <Py_ssize_t>max(stores.k.padded_dim, stores.v.padded_dim) * stores.k.block_size
    cdef int threads = num_threads_for(None, <double>tasks * elements * 8)
    cdef float *rows = <float *>malloc(threads * elements * sizeof(float))
    cdef kv_watch memory
    cdef kv_watch *watch
    if rows == NULL:
        raise MemoryError(f"cannot allocate {threads * elements * 4:,} bytes to encode blocks")
    watch = watch_of(&memory, <double>tasks * elements * 8)
    with nogil:
        if threads == 1:
            for i in range(tasks):
                _seal(kernels, stores + i // heads % num_layers, blocks[i // heads // num_layers], i % heads,
                      at_start and i < num_layers * heads, kept_codes, rows, unfit + i // heads // num_layers, watch)
        else:
            for i in prange(tasks, schedule="dynamic", num_threads=threads):
                _seal(kernels, stores + i // heads % num_layers, blocks[i // heads // num_layers], i % heads,
                      at_start and i < num_layers * heads, kept_codes, rows + threadid() * elements,
                      unfit + i // heads // num_layers, watch)
    if stores.secure:
        kv_wipe(rows, threads * elements * sizeof(float))
    free(rows)
    check_stopped(watch)
    return 0


cdef void _seal(const kv_kernels *kernels, const kv_store *store, int32_t block, Py_ssize_t head, bint at_start,
                const int16_t *kept_codes, float *rows, uint8_t *unfit, kv_watch *watch) noexcept nogil:
    """One head of one block."""
    cdef Py_ssize_t v_dim = store.v.head_dim
    cdef int size = store.k.block_size, good = abs(kept_codes[block])
    if not store.seals or is_stopped(watch, 16):
        return
    _load(kernels, store, block, head, at_start, False, rows)
    if not kernels.seal_k(&store.k, k_block_at(store, block, head), rows, store.k.head_dim, good):
        kv_set(unfit)
    _load(kernels, store, block, head, at_start, True, rows)
    kernels.encode_v(&store.v, v_block_at(store, block, head), good, rows + good * v_dim, v_dim, size - good)


cdef void _load(const kv_kernels *kernels, const kv_store *store, int32_t block, Py_ssize_t head, bint at_start, bint values,
                float *rows) noexcept nogil:
    """The float rows of a block, one after the other. Nobody reads the codes of a sequence's first tokens: the next one
    stands in for them, so that what is unlike all others in them does not widen the statistics."""
    cdef Py_ssize_t offset, first = store.float_tokens if at_start else 0
    cdef Py_ssize_t dim = store.v.head_dim if values else store.k.head_dim
    for offset in range(store.k.block_size):
        kernels.to_float[_dtype(store, values)](_row(store, block, max(offset, first), head, values), dim, rows + offset * dim)


cdef inline int _dtype(const kv_store *store, bint values) noexcept nogil:
    """Of the float rows."""
    return store.floats.v.dtype if values else store.floats.k.dtype


cdef inline char *_row(const kv_store *store, int32_t block, Py_ssize_t offset, Py_ssize_t head, bint values) noexcept nogil:
    """The float row of a token."""
    cdef int32_t piece = piece_of(store, block, offset)
    if values:
        return v_block_at(store.floats, piece, head) + offset % PIECE * store.floats.v.row_stride
    return k_block_at(store.floats, piece, head) + offset % PIECE * store.floats.k.row_stride


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
                kernels.from_float[_dtype(store, False)](row, store.k.head_dim, _row(store, block, offset, head, False))
                kernels.decode_v(&store.v, v_block_at(store, block, head), <int>offset, row)
                kernels.from_float[_dtype(store, True)](row, store.v.head_dim, _row(store, block, offset, head, True))
    return 0


cdef object decode_tokens(const kv_store *store, const int64_t[::1] positions, const int64_t[::1] slots, Py_ssize_t floats_begin,
                          bint values):
    """Keys or values in all heads as they were given, float32: of each token its position, its slot, and from position
    `floats_begin` on, where blocks are finished, its float rows."""
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
            kernels.to_float[_dtype(store, values)](_row(store, block, offset, head, values), side.head_dim, row)
        elif values:
            kernels.decode_v(side, v_block_at(store, block, head), <int>offset, row)
        else:
            kernels.decode_k(side, k_block_at(store, block, head), <int>offset, row)
        if side.rotated:
            kernels.rotate(row, side.head_dim, 1, side.head_dim, row, side.head_dim)
        if nontemporal:
            kernels.store_nontemporal(row, side.head_dim, out)
        out += side.head_dim
