# cython: language_level=3, boundscheck=False, cdivision=True
"""Sealing: full blocks are encoded as a whole, from the float rows of their tokens."""
from cython.parallel cimport prange, threadid
from libc.stdint cimport int16_t, int32_t, uint8_t
from libc.stdlib cimport abs, free, malloc

from kvfast.codec.blocks cimport float_dtype_of, float_row_at, k_block_at, kv_store, v_block_at
from kvfast.core.interrupt cimport check_stopped, is_stopped, kv_watch, watch_of
from kvfast.core.kernels cimport active, kv_kernels
from kvfast.core.threads cimport num_threads_for
from kvfast.core.wipe cimport kv_wipe

cdef extern from *:
    """
    static void kv_set(unsigned char *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); } /* heads of a block share it */
    """
    void kv_set(uint8_t *flag) noexcept nogil


cdef int seal_blocks(const kv_store *stores, Py_ssize_t num_layers, const int32_t *blocks, Py_ssize_t count,
                     bint at_start, const int16_t *kept_codes, uint8_t *unfit) except -1:
    """Encode blocks whose tokens all have float rows; `at_start`: the first is the first of its sequence.

    Of block b the first abs(kept_codes[b]) tokens have their codes already, which stay, and so do their statistics. unfit[i] is set
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
        kernels.to_float[float_dtype_of(store, values)](float_row_at(store, block, max(offset, first), head, values), dim,
                                                        rows + offset * dim)
