"""All layers of one sequence."""
from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.request cimport kv_request
from kvfast.attention.sight cimport kv_member
from kvfast.storage.sequences.sequence_tables cimport SequenceTables
from kvfast.storage.tables.block_table cimport BlockTable


cdef bint fit_window(BlockTable table, kv_request *request, kv_refusal *refusal) noexcept nogil
cdef void describe(BlockTable table, Py_ssize_t layer, kv_member *member) noexcept nogil


cdef class SequenceStorage(SequenceTables):
    cdef Py_ssize_t most               # most tokens, or -1: any number

    cdef Py_ssize_t checked_length(self, n) except -1
    cdef int _trim_surplus(self) except -1
    cdef SequenceTables _shared(self, bint counted)
    cdef int _share_blocks(self, SequenceStorage other, begin) except -1
    cdef int _copy_blocks(self, SequenceStorage other, begin) except -1
    cdef int _copy_spliced(self, SequenceStorage other, list plans, begin) except -1
    cdef int _check_room(self, object index, Py_ssize_t held, Py_ssize_t n) except -1
    cdef int fill(self, BlockTable table, Py_ssize_t layer, Py_ssize_t index, kv_member *member) except -1
