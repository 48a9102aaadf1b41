from libc.stdint cimport int16_t, int32_t, uint8_t

from kvfast.storage.batches.prepared_batch cimport PreparedBatch
from kvfast.storage.memory.pool cimport BlockPool


cdef class SchedulerBlocks:
    cdef BlockPool pool
    cdef int16_t *written      # (num_blocks,) number of first tokens of a block that have been written
    cdef uint8_t *begins       # (num_blocks,) whether a block was written as the first of a sequence
    cdef Py_ssize_t num_blocks
    # What follows is apart for each rule, as in a pool of such layers alone; see `BlockPool.rules`.
    cdef Py_ssize_t num_rules
    cdef uint8_t *state        # (num_rules, num_blocks) CODES, OPEN or SEALED
    cdef int16_t *floats_from  # (num_rules, num_blocks) first offset of a block that is not CODES whose token has a float row
    cdef int32_t *holders      # (num_rules, num_blocks) number of sequences that hold the float rows of a block
    # The position from which on each sequence reads float rows, and the blocks that it holds for that, by its last block and the place
    # of that in its table; the sequence that was seen last comes last. In the same way, the ends of prompts.
    cdef list held, ends       # (num_rules,) of dict
    cdef Py_ssize_t step       # number of the newest batch

    cdef int prepare(self, PreparedBatch batch, Py_ssize_t max_num_seqs) except -1
    cdef int check(self, PreparedBatch batch) except -1
    cdef int forget(self) except -1
    cdef object are_coded(self, list blocks)
    cdef int seal(self, PreparedBatch batch, Py_ssize_t layer) except -1
    cdef object first_rows(self, int32_t first)
    cdef int take(self, list blocks, first_rows) except -1
    cdef Py_ssize_t first_rows_nbytes(self) except -1
    cdef list _first_rows(self, int32_t block, bint copies)
    cdef list _writes_of(self, PreparedBatch batch)
    cdef int _check_read(self, PreparedBatch batch, dict ends) except -1
    cdef tuple _starts_first(self, list blocks)
    cdef uint8_t *_state_of(self, int rule) noexcept
    cdef bint _seals(self, int rule) noexcept
    cdef bint _is_coded(self, int32_t block) noexcept
    cdef int _begin_anew(self, list blocks) except -1
    cdef list _going_on(self, int rule, PreparedBatch batch)
    cdef int _forget_behind(self, int rule, set anew) except -1
    cdef int _hold(self, int rule, PreparedBatch batch, list going_on, Py_ssize_t max_num_seqs) except -1
    cdef list _hold_row(self, int rule, dict held, PreparedBatch batch, Py_ssize_t i, Py_ssize_t begin, Py_ssize_t end)
    cdef list _end(self, int rule, Py_ssize_t index, begin, list blocks)
    cdef int _let_go(self, int rule, list blocks, anew) except -1
    cdef int _set_begins(self, int rule, PreparedBatch batch, list going_on) except -1
