"""Segments of a spliced sequence."""
from kvfast.attention.sight cimport kv_member
from kvfast.storage.tables.block_table cimport BlockTable


cdef class FrozenTables:
    cdef list tables  # of BlockTable: one for each group of layers
    cdef Py_ssize_t wiped  # a secure pool has overwritten all tokens before this position


cdef class Segment:
    cdef FrozenTables frozen  # None: the tokens are in the tables of the sequence itself
    cdef Py_ssize_t start  # first position in the sequence
    cdef Py_ssize_t first, last  # in the tables: the first position, and the end
    cdef Py_ssize_t shift  # distance from the positions that its keys were rotated for
    cdef list rotations  # of each layer: None, or cos and sin of -shift, float32 of shape (2, 1, pairs), and if interleaved

    cdef Py_ssize_t end(self) noexcept
    cdef Segment part(self, Py_ssize_t begin, Py_ssize_t end)
    cdef Segment in_tables(self, FrozenTables frozen)


cdef FrozenTables share_tables(list tables)
cdef list cut(list segments, Py_ssize_t begin, Py_ssize_t end)
cdef list narrowed(list segments, Py_ssize_t more)
cdef list frozen_of(list segments)
cdef Py_ssize_t blocks_of_copies(list segments, list tables, BlockTable live) except -1
cdef list copied(list segments, list live, list own=*)
cdef list rotations_of(object ropes, Py_ssize_t shift)
cdef object rows_at(BlockTable table, Py_ssize_t layer, object positions, bint values)
cdef object spliced_rows(list segments, BlockTable live, Py_ssize_t which, Py_ssize_t index, Py_ssize_t layer, bint values)
cdef int fill_segments(list segments, BlockTable live, Py_ssize_t which, Py_ssize_t layer, Py_ssize_t index,
                       kv_member *member) except -1
cdef void free_segments(kv_member *members, Py_ssize_t count) noexcept nogil
