# cython: language_level=3, boundscheck=False, cdivision=True
"""Copies the stored tokens of a sequence. Codes and scales do not change, even if the block size does."""
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

from kvfast.codec.blocks cimport block_at, kv_layout, side_of
from kvfast.core.interrupt cimport is_stopped, kv_watch
from kvfast.core.kernels cimport active, kv_kernels, kv_side
from kvfast.core.limits cimport KV_PIECE
from kvfast.core.threads cimport DYNAMIC, for_each, gather, kv_team
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_table cimport BlockTable


ctypedef struct kv_copy:
    const kv_kernels *kernels
    const kv_layout *source
    const int32_t *from_blocks
    const kv_layout *target
    const int32_t *to_blocks
    Py_ssize_t num_slots
    const Py_ssize_t *codes_end


cdef Py_ssize_t blocks_for(BlockTable target, BlockTable source) noexcept:
    """Number of blocks of its pool that `target` needs to become a copy of `source`."""
    return (source.longest() + target.pool.block_size - 1) // target.pool.block_size - target.skipped_of(source)


cdef class CopyPlan:
    """All that `copy_table` needs. Making it may fail; `copy_table` must not."""


cdef CopyPlan plan_copy(BlockTable target, BlockTable source):
    cdef CopyPlan plan = CopyPlan.__new__(CopyPlan)
    cdef Py_ssize_t size, first, gap
    plan.codes, plan.layers = slots_with_codes(source), source.life.layers()
    plan.pieces = source.life.pieces()
    if target.pool.block_size != source.pool.block_size:
        size, first, gap = target.pool.block_size, target.map.sink_blocks, target.skipped_of(source)
        kept = {position for position in plan.pieces if not first <= position // size < first + gap}
        if target.pool.has_sinks and source.longest() and (first or gap == 0):
            kept.add(0)
        plan.pieces = sorted(kept)
    return plan


cdef Py_ssize_t[::1] slots_with_codes(BlockTable table):
    """Number of slots in use that have codes, of each layer."""
    cdef Py_ssize_t layer
    return np.array([table.life.slots_with_codes(layer) for layer in range(table.pool.num_layers)], np.intp)


cdef BlockTable clone_table(BlockTable table, BlockPool pool, bint may_stop=True):
    """A deep copy in another pool of the same layers. With `may_stop`, a signal handler that raises ends it early, as no one uses
    the copy yet."""
    cdef BlockTable other = table.empty(pool)
    cdef CopyPlan plan = plan_copy(other, table)
    other.reserve(blocks_for(other, table), len(plan.pieces))
    copy_table(table, other, plan, may_stop)
    return other


cdef int copy_table(BlockTable source, BlockTable target, CopyPlan plan, bint may_stop) except -1:
    """Make `target` equal to `source`, a table of another pool, with a copy of its tokens. Call `reserve` before."""
    target._exchange(blocks_for(target, source))
    target.copy_resume_state(source)
    target.life.raise_to(target.map.gap_end() * target.pool.block_size)
    if source.pool.block_size != target.pool.block_size and (source.map.skipped or target.map.skipped):
        _copy_held(source, target)
    else:
        copy_slots(source.pool.layouts, source.map.blocks, target.pool.layouts, target.map.blocks, target.pool.num_layers,
                   source.num_slots(), plan.codes, may_stop)
    target.life.set_codes(plan.layers)
    if target.pool.floats is not None:
        _copy_floats(source, target, plan.pieces)
    return 0


cdef int _copy_floats(BlockTable source, BlockTable target, list pieces) except -1:
    """Copy the float rows of the pieces at these positions."""
    cdef Py_ssize_t position, longest = source.longest(), size = target.pool.block_size
    cdef const kv_layout *layouts
    cdef int32_t piece
    cdef int64_t slot
    for position in pieces:
        slot = target.map.slot(position)
        target.pool.floats.add(<int32_t>(slot // size), slot % size, slot % size + KV_PIECE)
        layouts, piece = target.pool.floats.pieces.layouts, target.pool.floats.float_of[slot // KV_PIECE]
        if source.map.keeps(position // source.pool.block_size):
            _copy_piece(source.pool.floats.pieces.layouts, source.pool.floats.float_of[source.map.slot(position) // KV_PIECE],
                        layouts, piece, target.pool.num_layers, min(longest - position, KV_PIECE))
        else:
            _copy_piece(layouts, piece, layouts, piece, target.pool.num_layers, 0)  # zeros, which are never read
    return 0


cdef int _copy_held(BlockTable source, BlockTable target) except -1:
    """Copy the codes of the positions that both tables have blocks for, and zero all others.

    Used for rings with different block sizes: one may have skipped tokens that the other still has, but which no query can see.
    They hold no more than a window, and no layer seals blocks.
    """
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t task
    with nogil:
        for task in range(target.pool.num_layers * target.pool.num_kv_heads * 2):
            _copy_held_side(kernels, source, target, task)
    return 0


cdef void _copy_held_side(const kv_kernels *kernels, BlockTable source, BlockTable target, Py_ssize_t task) noexcept nogil:
    """Copy one side of one head of one layer."""
    cdef bint values = task % 2
    cdef Py_ssize_t head = task // 2 % source.pool.num_kv_heads, layer = task // 2 // source.pool.num_kv_heads
    cdef Py_ssize_t size = source.pool.block_size, target_size = target.pool.block_size, entry, position, first
    cdef const kv_layout *layout = source.pool.layouts + layer
    cdef const kv_layout *into = target.pool.layouts + layer
    cdef const kv_side *side = side_of(layout, values)
    cdef const kv_side *target_side = side_of(into, values)
    for entry in range(target.map.count):
        memset(block_at(into, target.map.blocks[entry], head, values), 0, target_side.bytes)
    for entry in range(source.map.count):
        first = (entry if entry < source.map.sink_blocks else entry + source.map.skipped) * size
        for position in range(first, min(first + size, source.lengths[layer])):
            if target.map.keeps(position // target_size):
                kernels.copy_token(side, block_at(layout, source.map.blocks[entry], head, values), <int>(position - first), target_side,
                                   block_at(into, <int32_t>(target.map.slot(position) // target_size), head, values),
                                   <int>(position % target_size), values)


cdef int copy_slots(const kv_layout *source, const int32_t *from_blocks, const kv_layout *target, const int32_t *to_blocks,
                    Py_ssize_t num_layers, Py_ssize_t num_slots, const Py_ssize_t[::1] codes_end, bint may_stop) except -1:
    """Copy the first `num_slots` slots of a list of blocks to another list, and zero the rest of the last block.

    Both have the same layers, heads, head_dim and formats. A layer that seals blocks has codes of `codes_end` slots alone. With
    `may_stop`, a signal handler that raises ends the copy.
    """
    cdef Py_ssize_t layer, nbytes = 0
    cdef kv_team team
    cdef kv_copy call
    for layer in range(num_layers):
        nbytes += (source[layer].k.bytes + source[layer].v.bytes) * source.num_kv_heads
    call.kernels, call.source, call.from_blocks, call.target, call.to_blocks = active(), source, from_blocks, target, to_blocks
    call.num_slots, call.codes_end = num_slots, &codes_end[0]
    gather(&team, None, <double>(nbytes / source.k.block_size) * num_slots)
    if not may_stop:
        team.watch = NULL
    for_each(&team, _copy_side, &call, num_layers * source.num_kv_heads * 2, DYNAMIC)
    return 0


cdef int _copy_side(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """Copy one side of one head of one layer."""
    cdef const kv_copy *call = <const kv_copy *>shared
    cdef const int32_t *from_blocks = call.from_blocks
    cdef const int32_t *to_blocks = call.to_blocks
    cdef bint values = index % 2
    cdef Py_ssize_t heads = call.source.num_kv_heads, head = index // 2 % heads, slot, whole = 0, num_slots = call.num_slots
    cdef Py_ssize_t codes_end = call.codes_end[index // 2 // heads]
    cdef const kv_layout *source = call.source + index // 2 // heads
    cdef const kv_layout *target = call.target + index // 2 // heads
    cdef const kv_side *side = side_of(source, values)
    cdef const kv_side *into = side_of(target, values)
    if source.seals:
        for slot in range(codes_end // side.block_size, (num_slots + side.block_size - 1) // side.block_size):
            memset(block_at(target, to_blocks[slot], head, values), 0, side.bytes)
        num_slots = min(num_slots, codes_end)
    if side.block_size == into.block_size:
        whole = num_slots // side.block_size
        for slot in range(whole):
            if is_stopped(watch):
                return 0
            memcpy(block_at(target, to_blocks[slot], head, values), block_at(source, from_blocks[slot], head, values), side.bytes)
    if num_slots % into.block_size:
        memset(block_at(target, to_blocks[num_slots // into.block_size], head, values), 0, into.bytes)
        if side.means:
            memcpy(block_at(target, to_blocks[whole], head, values) + side.means,
                   block_at(source, from_blocks[whole], head, values) + side.means, side.bytes - side.means)
    for slot in range(whole * side.block_size, num_slots):
        if is_stopped(watch):
            return 0
        call.kernels.copy_token(side, block_at(source, from_blocks[slot // side.block_size], head, values),
                                <int>(slot % side.block_size), into,
                                block_at(target, to_blocks[slot // into.block_size], head, values),
                                <int>(slot % into.block_size), values)
    return 0


cdef int _copy_piece(const kv_layout *source, int32_t from_piece, const kv_layout *target, int32_t to_piece,
                     Py_ssize_t num_layers, Py_ssize_t count) except -1:
    """Copy the first `count` tokens of a piece of float rows to another piece, and zero the others."""
    cdef Py_ssize_t layer, head, used
    cdef const kv_side *side
    cdef bint values
    for layer in range(num_layers):
        for values in range(2):
            side = side_of(source + layer, values)
            used = count * side.row_stride
            for head in range(source.num_kv_heads):
                memcpy(block_at(target + layer, to_piece, head, values), block_at(source + layer, from_piece, head, values), used)
                memset(block_at(target + layer, to_piece, head, values) + used, 0, side.bytes - used)
    return 0
