"""The map from a sequence's positions to blocks."""
from libc.stdint cimport int32_t, int64_t

from kvfast.storage.memory.pool cimport BlockPool


cdef class BlockMap:
    cdef readonly BlockPool pool
    cdef int32_t *blocks               # (count,) as in kv_context
    cdef Py_ssize_t capacity
    cdef int32_t *spare                # the list that `reserve_list` allocated, to become `blocks`; or NULL
    cdef Py_ssize_t count
    cdef Py_ssize_t sink_blocks
    cdef Py_ssize_t skipped            # blocks, see kv_context

    cdef int32_t block(self, Py_ssize_t index) noexcept nogil
    cdef int64_t slot(self, Py_ssize_t position) noexcept nogil
    cdef Py_ssize_t end(self) noexcept nogil
    cdef Py_ssize_t blocks_needed(self, Py_ssize_t first, Py_ssize_t last) except -1
    cdef int reserve_blocks(self, Py_ssize_t last) except -1
    cdef void release_from(self, Py_ssize_t count) noexcept
    cdef int skip(self, Py_ssize_t gone) except -1
    cdef int reserve_list(self, Py_ssize_t num_blocks) except -1
    cdef void use_list(self, Py_ssize_t num_blocks) noexcept
    cdef int adopt(self, list blocks) except -1
    cdef bint keeps(self, Py_ssize_t index) noexcept nogil
    cdef Py_ssize_t gap_end(self) noexcept nogil
    cdef bint has(self, Py_ssize_t index, int32_t block) noexcept
    cdef bint is_in_one_piece(self) noexcept
    cdef int extend(self, Py_ssize_t count) except -1


cdef inline Py_ssize_t entry_of(BlockMap table, Py_ssize_t index) noexcept nogil:
    """The entry of `blocks` for the block with this index."""
    return index if index < table.sink_blocks else index - table.skipped
