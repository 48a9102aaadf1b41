"""The sequences of a pool."""
from kvfast.storage.batches.scheduler_blocks cimport SchedulerBlocks
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.memory.prefix_index cimport PrefixIndex
from kvfast.storage.tables.block_table cimport BlockTable


cdef class PagedSequences:
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


cdef int check_all_open(list tables) except -1
