"""The sequences of a pool, and batches over them or over the blocks of another scheduler."""
from kvfast.attention.sight cimport kv_member
from kvfast.storage.batches.prepared_batch cimport PreparedBatch
from kvfast.storage.batches.scheduler_blocks cimport SchedulerBlocks
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.memory.prefix_index cimport PrefixIndex
from kvfast.storage.tables.block_table cimport BlockTable


cdef class PagedBatches:
    cdef readonly BlockPool pool
    cdef readonly PrefixIndex index
    cdef readonly bint is_external     # another scheduler gives out the slots
    cdef list given                    # (num_blocks,) the table that slot_mapping gave a block's slots out for, or None,
    cdef Py_ssize_t *given_at          # and the block's index in it
    cdef BlockTable kind               # an empty table, as those of sequences are
    cdef int reads_as                  # a kv_precision, of calls of batches that name none, and of new sequences
    cdef SchedulerBlocks scheduler     # what another scheduler has written, or None if its blocks hold all of their tokens

    cdef int evict_all(self) except -1
    cdef int _forget_slots(self) except -1
    cdef int _check_external(self) except -1
    cdef int _check_no_sequences(self, str found) except -1
    cdef int _become_external(self) except -1
    cdef list _checked_blocks(self, block_ids)
    cdef int _check_owned(self, PreparedBatch batch) except -1
    cdef PreparedBatch _batch_of(self, object block_table, object seq_lens, object cu_seqlens_q, Py_ssize_t num_tokens,
                                 Py_ssize_t window, Py_ssize_t num_sink_tokens)
    cdef object _check_slots(self, Py_ssize_t layer, object slot_mapping, Py_ssize_t n)
    cdef object _check_batch(self, list storages, object block_table, object seq_lens)
    cdef PreparedBatch fill(self, kv_member *members, Py_ssize_t layer, Py_ssize_t num_tokens, Py_ssize_t window,
                            Py_ssize_t num_sink_tokens, list storages, object block_table, object seq_lens, object cu_seqlens_q)
