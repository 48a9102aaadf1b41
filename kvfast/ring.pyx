# cython: language_level=3, boundscheck=False, cdivision=True
"""The ring: the last `window` tokens, the first `num_sink_tokens` (StreamingLLM, arXiv 2309.17453), and a
slack of `rollback` tokens behind the window, so that going back that far is exact."""
from libc.string cimport memmove

from kvfast.pool cimport BlockPool
from kvfast.table cimport BlockTable


cdef class RingTable(BlockTable):
    def __cinit__(self, BlockPool pool, Py_ssize_t window, Py_ssize_t num_sink_tokens, Py_ssize_t rollback):
        self.window, self.num_sink_tokens, self.rollback = window, num_sink_tokens, rollback
        self.sink_blocks = (num_sink_tokens + pool.block_size - 1) // pool.block_size

    cdef Py_ssize_t oldest(self, Py_ssize_t length) noexcept:
        return max(<Py_ssize_t>0, length - self.window)

    cdef int advance(self, Py_ssize_t n) except -1:
        cdef Py_ssize_t i, gone
        self.length += n
        self.evicted = max(self.evicted, self.length - self.window - self.rollback)
        # Whole blocks behind the slack go back to the pool.
        gone = self.evicted // self.pool.block_size - self.sink_blocks - self.skipped
        if gone <= 0:
            return 0
        for i in range(gone):
            self.pool.release(self.blocks[self.sink_blocks + i])
        memmove(self.blocks + self.sink_blocks, self.blocks + self.sink_blocks + gone,
                (self.count - self.sink_blocks - gone) * sizeof(self.blocks[0]))
        self.count -= gone
        self.skipped += gone
        self.pool.trim()
        return 0

    cdef BlockTable empty(self, BlockPool pool):
        cdef RingTable other = RingTable(pool, self.window, self.num_sink_tokens, self.rollback)
        other.evicted = self.evicted
        return other

    cdef bint holds(self, Py_ssize_t position) noexcept:
        return position >= self.evicted or self.evicted <= self.num_sink_tokens

    cdef int check_truncate(self, Py_ssize_t n) except -1:
        """Going back is exact as long as the window of n tokens is still held."""
        if n > 0 and not self.holds(self.oldest(n)):
            raise ValueError(f"cannot go back to {n} tokens: of {self.length}, a window of {self.window} with a "
                             f"rollback of {self.rollback} can be restored down to {self.evicted + self.window}")
        return 0

    cdef int truncate(self, Py_ssize_t n) except -1:
        if n == 0:
            self.evicted = 0
        BlockTable.truncate(self, n)
        return 0
