"""Copies stored tokens from one pool to another."""
from libc.stdint cimport int32_t

from kvfast.codec.blocks cimport kv_layout
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_table cimport BlockTable

cdef Py_ssize_t blocks_for(BlockTable target, BlockTable source) noexcept
cdef list pieces_for(BlockTable target, BlockTable source)
cdef BlockTable clone_table(BlockTable table, BlockPool pool)
cdef int copy_table(BlockTable source, BlockTable target, list pieces, bint may_stop) except -1
cdef int copy_slots(const kv_layout *source, const int32_t *from_blocks, const kv_layout *target, const int32_t *to_blocks,
                    Py_ssize_t num_layers, Py_ssize_t num_slots, Py_ssize_t codes_end, bint may_stop) except -1
