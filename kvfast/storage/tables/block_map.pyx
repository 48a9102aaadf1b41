# cython: language_level=3, boundscheck=False, cdivision=True
"""The map from positions to blocks: position p is at offset p % block_size of the block with index p // block_size."""
cimport cython
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

from kvfast.storage.memory.pool cimport BlockPool


cdef class BlockMap:
    """The blocks of one sequence, in the order of their tokens."""

    def __cinit__(self, BlockPool pool, Py_ssize_t sink_blocks):
        self.pool, self.sink_blocks = pool, sink_blocks

    def __dealloc__(self):
        free(self.blocks)
        free(self.spare)

    cdef int32_t block(self, Py_ssize_t index) noexcept nogil:
        """The block with this index."""
        return self.blocks[entry_of(self, index)]

    cdef int64_t slot(self, Py_ssize_t position) noexcept nogil:
        cdef Py_ssize_t size = self.pool.block_size
        return <int64_t>self.block(position // size) * size + position % size

    cdef Py_ssize_t end(self) noexcept nogil:
        """Index after that of the last block."""
        return self.count + self.skipped

    cdef Py_ssize_t blocks_needed(self, Py_ssize_t first, Py_ssize_t last) except -1:
        """Number of blocks to take before the positions first to last can be written."""
        cdef Py_ssize_t size = self.pool.block_size, i
        cdef Py_ssize_t needed = max(<Py_ssize_t>0, (last + size - 1) // size - self.end())
        for i in range(first // size, min(self.end(), (last + size - 1) // size)):
            if self.pool.is_frozen(self.block(i)):
                needed += 1
        return needed

    cdef int reserve_blocks(self, Py_ssize_t last) except -1:
        """Make sure that the list has room for the blocks up to position `last`."""
        cdef Py_ssize_t count = (last + self.pool.block_size - 1) // self.pool.block_size - self.skipped
        cdef void *grown
        if count > self.capacity:
            with cython.critical_section(self.pool):
                grown = realloc(self.blocks, max(2 * self.capacity, count) * sizeof(int32_t))
                if grown == NULL:
                    raise MemoryError("cannot allocate the block table of a sequence")
                self.blocks = <int32_t *>grown
                self.capacity = max(2 * self.capacity, count)
        return 0

    cdef void release_from(self, Py_ssize_t count) noexcept:
        """Release the blocks from index `count` on, the last one first, so that the first of them is taken next."""
        while self.count > count:
            self.count -= 1
            self.pool.release(self.blocks[self.count])

    cdef int skip(self, Py_ssize_t gone) except -1:
        """Release the first `gone` blocks after those of the sink tokens."""
        cdef Py_ssize_t i
        for i in range(gone):
            self.pool.release(self.blocks[self.sink_blocks + i])
        memmove(self.blocks + self.sink_blocks, self.blocks + self.sink_blocks + gone,
                (self.count - self.sink_blocks - gone) * sizeof(self.blocks[0]))
        self.count -= gone
        self.skipped += gone
        return 0

    cdef int reserve_list(self, Py_ssize_t num_blocks) except -1:
        """Make sure that there is memory for another list, of `num_blocks` blocks."""
        cdef void *grown = realloc(self.spare, max(num_blocks, 1) * sizeof(int32_t))
        if grown == NULL:
            raise MemoryError("cannot allocate the block table of a sequence")
        self.spare = <int32_t *>grown
        return 0

    cdef void use_list(self, Py_ssize_t num_blocks) noexcept:
        """Replace the list of an empty map by the one that was reserved."""
        with cython.critical_section(self.pool):
            free(self.blocks)
            self.blocks, self.capacity, self.spare = self.spare, max(num_blocks, 1), NULL

    cdef int adopt(self, list blocks) except -1:
        """Give known blocks to an empty map."""
        cdef Py_ssize_t i, count = len(blocks)
        self.reserve_list(count)
        self.use_list(count)
        for i in range(count):
            self.blocks[i] = blocks[i]
            self.pool.retain(self.blocks[i])
            self.count += 1
        return 0

    cdef bint keeps(self, Py_ssize_t index) noexcept nogil:
        """Whether the block with this index is not skipped."""
        return index < self.sink_blocks or index >= self.sink_blocks + self.skipped

    cdef Py_ssize_t gap_end(self) noexcept nogil:
        """Index of the first block after the skipped ones, or 0 if none are skipped."""
        return self.sink_blocks + self.skipped if self.skipped else 0

    cdef bint has(self, Py_ssize_t index, int32_t block) noexcept:
        return self.keeps(index) and index < self.end() and self.block(index) == block

    cdef bint is_in_one_piece(self) noexcept:
        """Whether entry i is block i of the pool's first slab, so that the tokens lie one after the other."""
        cdef Py_ssize_t i
        if self.count > self.pool.first_blocks:
            return False
        for i in range(self.count):
            if self.blocks[i] != i:
                return False
        return True

    cdef int extend(self, Py_ssize_t count) except -1:
        """Take blocks until there are `count`, after `reserve_blocks`."""
        while self.count < count:
            self.blocks[self.count] = self.pool.take(self.blocks[self.count - 1] if self.count else -1)
            self.count += 1
        return 0

    def block_ids(self):
        """The blocks in the order of their tokens."""
        with cython.critical_section(self.pool):
            return np.array([self.blocks[i] for i in range(self.count)], np.int32)

    def block_row(self):
        """The blocks by their indices, -1 for a skipped one."""
        if self.count + self.skipped > 0x7FFFFFFF // self.pool.block_size:  # as a forged file may have it
            raise ValueError(f"a block table must be for at most {0x7FFFFFFF} tokens, got {self.count + self.skipped} "
                             f"blocks of {self.pool.block_size}")
        with cython.critical_section(self.pool):
            row = np.full(self.count + self.skipped, -1, np.int32)
            for i in range(self.count):
                row[i if i < self.sink_blocks else i + self.skipped] = self.blocks[i]
            return row
