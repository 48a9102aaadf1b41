"""Copies stored tokens from one pool to another."""
from libc.stdint cimport int32_t

from kvfast.codec.blocks cimport kv_layout
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_table cimport BlockTable


cdef class CopyPlan:
    cdef list pieces                   # of the target, once it is a copy of the source
    cdef Py_ssize_t[::1] codes         # slots of the source with codes, of each layer
    cdef list layers                   # as of `TokenLife`


cdef Py_ssize_t blocks_for(BlockTable target, BlockTable source) noexcept
cdef CopyPlan plan_copy(BlockTable target, BlockTable source)
cdef Py_ssize_t[::1] slots_with_codes(BlockTable table)
cdef BlockTable clone_table(BlockTable table, BlockPool pool, bint may_stop=*)
cdef int copy_table(BlockTable source, BlockTable target, CopyPlan plan, bint may_stop) except -1
cdef int copy_slots(const kv_layout *source, const int32_t *from_blocks, const kv_layout *target, const int32_t *to_blocks,
                    Py_ssize_t num_layers, Py_ssize_t num_slots, const Py_ssize_t[::1] codes_end, bint may_stop) except -1
