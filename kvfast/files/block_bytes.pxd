"""The blocks of a table, as files have them."""
from kvfast.storage.tables.block_table cimport BlockTable


cdef bint keeps_all(BlockTable table) noexcept
cdef Py_ssize_t num_full_blocks(BlockTable table) noexcept
