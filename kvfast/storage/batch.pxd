"""Many sequences in one pool."""
from kvfast.attention.call cimport AttendCall
from kvfast.attention.options cimport Options
from kvfast.storage.block_table cimport BlockTable
from kvfast.storage.pool cimport BlockPool
from kvfast.storage.prefix_index cimport PrefixIndex
from kvfast.storage.prepared_batch cimport PreparedBatch
from kvfast.storage.scheduler_blocks cimport SchedulerBlocks


cdef class PagedBuffer:
    cdef readonly BlockPool pool
    cdef readonly PrefixIndex index
    cdef readonly bint is_external     # another scheduler gives out the slots
    cdef list given                    # (num_blocks,) the table that slot_mapping gave a block's slots out for, or None,
    cdef Py_ssize_t *given_at          # and the block's index in it
    cdef BlockTable kind               # an empty table, as those of sequences are
    cdef SchedulerBlocks scheduler     # what another scheduler has written, or None if its blocks hold all of their tokens

    cdef int _check_external(self) except -1
    cdef int _check_no_sequences(self, slot) except -1
    cdef int _become_external(self) except -1
    cdef int _check_owned(self, PreparedBatch batch) except -1
    cdef object _check_slots(self, Py_ssize_t layer, object slot_mapping, Py_ssize_t n)
    cdef AttendCall _open_call(self, Py_ssize_t number, object q, object rope_q, list buffers, object block_table, object seq_lens,
                               object cu_seqlens_q, Options options, bint cascade)
