# cython: language_level=3, boundscheck=False, cdivision=True
"""Seals full blocks: encodes them as a whole, from the float rows of their tokens."""
from libc.stdint cimport int32_t, uint8_t
from libc.stdlib cimport abs, free, malloc

from kvfast.codec.blocks cimport float_row_at, k_block_at, kv_layout, side_of, v_block_at
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport active, kv_kernels, kv_room
from kvfast.core.scratch cimport give_scratch, take_scratch
from kvfast.core.threads cimport DYNAMIC, for_each, gather, kv_team
from kvfast.core.wipe cimport kv_wipe, kv_wipe_pages

cdef extern from *:
    """
    static void kv_set(unsigned char *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); } /* heads of a block share it */
    """
    void kv_set(uint8_t *flag) noexcept nogil


ctypedef struct kv_seal:
    const kv_kernels *kernels
    const kv_layout *layout
    const int32_t *blocks
    Py_ssize_t num_starts      # number of first blocks that are the first of their sequences
    uint8_t *unfit             # (blocks,)
    float *rows                # (threads, elements) rows of one head of a block
    Py_ssize_t elements        # floats of a thread's rows
    void **rooms               # (threads,) of kernels


cdef int seal_blocks(const kv_layout *layout, const int32_t *blocks, Py_ssize_t num_blocks, Py_ssize_t num_starts,
                     uint8_t *unfit) except -1:
    """Seal blocks of a layer whose tokens all have float rows. The first `num_starts` are the first of their sequences.

    The first abs(kept_codes[b]) tokens of block b keep their codes, and the block keeps its statistics. unfit[i] is set if the other
    tokens of the i-th block do not fit these statistics; their codes must not be read then.
    """
    cdef Py_ssize_t elements = <Py_ssize_t>max(layout.k.padded_dim, layout.v.padded_dim) * layout.k.block_size
    cdef Py_ssize_t tasks = num_blocks * layout.num_kv_heads, nbytes
    cdef kv_team team
    cdef kv_seal call
    cdef int i
    gather(&team, None, <double>tasks * elements * 8)
    call.kernels, call.layout, call.blocks, call.num_starts = active(), layout, blocks, num_starts
    call.unfit, call.elements = unfit, elements
    nbytes = team.threads * elements * sizeof(float)
    call.rows, call.rooms = <float *>malloc(nbytes), <void **>malloc(team.threads * sizeof(void *))
    if call.rows == NULL or call.rooms == NULL or not take_scratch(call.rooms, team.threads):
        free(call.rows)
        free(call.rooms)
        raise MemoryError(f"cannot allocate {nbytes:,} bytes to encode blocks")
    try:
        for_each(&team, _seal, &call, tasks, DYNAMIC)
    finally:
        if layout.secure:
            kv_wipe(call.rows, nbytes)
            for i in range(team.threads):
                kv_wipe_pages(<char *>call.rooms[i], sizeof(kv_room))
        give_scratch(call.rooms, team.threads)
        free(call.rooms)
        free(call.rows)
    return 0


cdef int _seal(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """Seal one head of one block."""
    cdef const kv_seal *call = <const kv_seal *>shared
    cdef const kv_layout *layout = call.layout
    cdef Py_ssize_t head = index % layout.num_kv_heads, i = index // layout.num_kv_heads
    cdef int32_t block = call.blocks[i]
    cdef bint at_start = i < call.num_starts
    cdef Py_ssize_t v_dim = layout.v.head_dim
    cdef int size = layout.k.block_size, good = abs(layout.kept_codes[block])
    cdef float *rows = call.rows + thread * call.elements
    _load(call.kernels, layout, block, head, at_start, False, rows)
    if not call.kernels.seal_k(&layout.k, k_block_at(layout, block, head), rows, layout.k.head_dim, good,
                               <kv_room *>call.rooms[thread]):
        kv_set(call.unfit + i)
    _load(call.kernels, layout, block, head, at_start, True, rows)
    call.kernels.encode_v(&layout.v, v_block_at(layout, block, head), good, rows + good * v_dim, v_dim, size - good)
    return 0


cdef void _load(const kv_kernels *kernels, const kv_layout *layout, int32_t block, Py_ssize_t head, bint at_start, bint values,
                float *rows) noexcept nogil:
    """Load the float rows of a block. A sequence's first float tokens have unusual values and codes that nobody reads. The token
    after them takes their places, so that the statistics stay narrow."""
    cdef Py_ssize_t offset, first = layout.float_tokens if at_start else 0
    cdef Py_ssize_t dim = side_of(layout, values).head_dim
    for offset in range(layout.k.block_size):
        kernels.to_float[side_of(layout.floats, values).dtype](
            float_row_at(layout, block, max(offset, first), head, values), dim, rows + offset * dim)
