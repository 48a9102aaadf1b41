"""The blocks of a pool with float rows that another scheduler gives out."""
from libc.stdint cimport int16_t, uint8_t

from kvfast.storage.pool cimport BlockPool
from kvfast.storage.prepared_batch cimport PreparedBatch


cdef class SchedulerBlocks:
    cdef BlockPool pool
    cdef int16_t *written      # (num_blocks,) number of first tokens of a block that have been written
    cdef uint8_t *state        # (num_blocks,) OPEN, SEALED or CODES
    cdef Py_ssize_t step       # number of the newest batch

    cdef int prepare(self, PreparedBatch batch) except -1
    cdef int check(self, PreparedBatch batch) except -1
    cdef int forget(self) except -1
    cdef list _writes_of(self, PreparedBatch batch)
    cdef int _check_read(self, PreparedBatch batch, dict ends) except -1
    cdef int _seal(self, PreparedBatch batch, dict ends) except -1
    cdef int _release_float_rows(self, PreparedBatch batch) except -1
    cdef void _set_states(self, PreparedBatch batch) noexcept
