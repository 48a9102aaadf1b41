"""All layers of one sequence."""
from kvfast.attention.options cimport Options
from kvfast.attention.plan cimport Plan
from kvfast.attention.request cimport Request, kv_request
from kvfast.storage.sequences.sequence_tables cimport SequenceTables
from kvfast.storage.tables.block_table cimport BlockTable


cdef int fit_window(BlockTable table, kv_request *request) except -1
cdef int check_held(BlockTable table, Plan plan, Py_ssize_t first_query) except -1


cdef class SequenceStorage(SequenceTables):
    cdef Py_ssize_t most               # most tokens, or -1: any number

    cdef Py_ssize_t checked_length(self, n) except -1
    cdef int _trim_surplus(self) except -1
    cdef SequenceTables _shared(self, bint counted)
    cdef int _share_blocks(self, SequenceStorage other, begin) except -1
    cdef int _copy_blocks(self, SequenceStorage other, begin) except -1
    cdef int _copy_spliced(self, SequenceStorage other, list plans, begin) except -1
    cdef int _check_room(self, object index, Py_ssize_t held, Py_ssize_t n) except -1
    cdef Request _request(self, object index, BlockTable table, Py_ssize_t layer, Options options, q, sink_q, rope_q)
    cdef Plan _plan(self, object index, BlockTable table, Py_ssize_t layer, Request request)
