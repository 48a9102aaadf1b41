"""Batches over the sequences of a pool, or over the blocks of another scheduler."""
from kvfast.attention.call cimport AttendCall
from kvfast.attention.options cimport Options
from kvfast.storage.paged_sequences cimport PagedSequences
from kvfast.storage.prepared_batch cimport PreparedBatch


cdef class PagedBuffer(PagedSequences):
    cdef int _check_external(self) except -1
    cdef int _check_no_sequences(self, slot) except -1
    cdef int _become_external(self) except -1
    cdef int _check_owned(self, PreparedBatch batch) except -1
    cdef object _check_slots(self, Py_ssize_t layer, object slot_mapping, Py_ssize_t n)
    cdef AttendCall _open_call(self, Py_ssize_t number, object q, object rope_q, list buffers, object block_table, object seq_lens,
                               object cu_seqlens_q, Options options, bint cascade)
