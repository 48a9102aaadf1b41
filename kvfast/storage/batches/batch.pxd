"""Batches over the sequences of a pool, or over the blocks of another scheduler."""
from kvfast.attention.request cimport kv_request
from kvfast.attention.sight cimport kv_member
from kvfast.storage.batches.paged_sequences cimport PagedSequences
from kvfast.storage.batches.prepared_batch cimport PreparedBatch


cdef class PagedBatches(PagedSequences):
    cdef int _check_external(self) except -1
    cdef int _check_no_sequences(self, str found) except -1
    cdef int _become_external(self) except -1
    cdef list _checked_blocks(self, block_ids)
    cdef int _check_owned(self, PreparedBatch batch) except -1
    cdef PreparedBatch _batch_of(self, object block_table, object seq_lens, object cu_seqlens_q, Py_ssize_t num_tokens,
                                 Py_ssize_t window, Py_ssize_t num_sink_tokens)
    cdef object _check_slots(self, Py_ssize_t layer, object slot_mapping, Py_ssize_t n)
    cdef object _check_batch(self, list storages, object block_table, object seq_lens)
    cdef PreparedBatch fill(self, kv_member *members, Py_ssize_t layer, const kv_request *request, list storages, object block_table,
                            object seq_lens, object cu_seqlens_q)
