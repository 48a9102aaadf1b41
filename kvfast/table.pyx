# cython: language_level=3, boundscheck=False, cdivision=True
"""Block tables: position p of a sequence is place p % block_size of the block at index p // block_size."""
import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from kvfast._arrays cimport Rows
from kvfast._kernels cimport active, kv_kernels
from kvfast._openmp cimport num_threads_for
from kvfast.blocks cimport CHUNK_SHIFT, k_block_at, kv_context, kv_store, v_block_at
from kvfast.encode cimport check_rows, kv_rotary, write_rows
from kvfast.pool cimport BlockPool
from kvfast.transfer cimport copy_slots


cdef class BlockTable:
    """The blocks of one sequence in a pool. It never forgets; see `ring.RingTable` for one that does."""

    def __cinit__(self, BlockPool pool, *args):
        self.pool = pool
        self.lengths = <Py_ssize_t *>calloc(pool.num_layers, sizeof(Py_ssize_t))
        if self.lengths == NULL:
            raise MemoryError("cannot allocate the lengths of a sequence")

    def __dealloc__(self):
        free(self.blocks)
        free(self.lengths)

    cdef void context(self, Py_ssize_t layer, kv_context *context) noexcept:
        context.table = self.blocks
        context.length = self.lengths[layer]
        context.sink_blocks = self.sink_blocks
        context.skipped = self.skipped

    cdef int64_t slot(self, Py_ssize_t position) noexcept:
        cdef Py_ssize_t index = position // self.pool.block_size
        if index >= self.sink_blocks:
            index -= self.skipped
        return <int64_t>self.blocks[index] * self.pool.block_size + position % self.pool.block_size

    cdef Py_ssize_t blocks_needed(self, Py_ssize_t first, Py_ssize_t last) except -1:
        """Blocks to take before the positions first to last can be written."""
        cdef Py_ssize_t end = self.count + self.skipped, i
        cdef Py_ssize_t needed = max(<Py_ssize_t>0, (last + self.pool.block_size - 1) // self.pool.block_size - end)
        for i in range(first // self.pool.block_size, min(end, (last + self.pool.block_size - 1) // self.pool.block_size)):
            if self.pool.is_frozen(self.blocks[i if i < self.sink_blocks else i - self.skipped]):
                needed += 1
        return needed

    cdef int make_writable(self, Py_ssize_t first, Py_ssize_t last) except -1:
        """Give the positions first to last blocks of their own; those shared with others are copied."""
        cdef Py_ssize_t index, at, end = (last + self.pool.block_size - 1) // self.pool.block_size
        cdef int32_t block
        cdef void *grown
        self.pool.ensure(self.blocks_needed(first, last))
        if end - self.skipped > self.capacity:
            grown = realloc(self.blocks, max(2 * self.capacity, end - self.skipped) * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError("cannot allocate the block table of a sequence")
            self.blocks = <int32_t *>grown
            self.capacity = max(2 * self.capacity, end - self.skipped)
        for index in range(first // self.pool.block_size, end):
            at = index if index < self.sink_blocks else index - self.skipped
            if at >= self.count:
                self.blocks[at] = self.pool.take(self.blocks[at - 1] if at else -1)
                self.count += 1
            elif self.pool.is_frozen(self.blocks[at]):
                block = self.pool.take(self.blocks[at - 1] if at else -1)
                self.pool.copy(self.blocks[at], block)
                self.pool.release(self.blocks[at])
                self.blocks[at] = block
        return 0

    cdef int append(self, Py_ssize_t layer, Rows k, Rows v, const kv_rotary *rotary) except -1:
        """Write tokens behind those of a layer. A value that cannot be stored leaves the table as it was."""
        cdef kv_store *store = self.pool.stores + layer
        cdef Py_ssize_t first = self.lengths[layer], i, n = k.rows.tokens
        cdef int64_t[::1] view
        cdef int64_t slot
        check_rows(store, k, v)
        self.make_writable(first, first + n)
        if n == 1:
            slot = self.slot(first)
            write_rows(store, k, v, rotary, &slot, True)
        else:
            view = np.empty(n, np.int64)
            for i in range(n):
                view[i] = self.slot(first + i)
            write_rows(store, k, v, rotary, &view[0], True)
        self.lengths[layer] += n
        return 0

    cdef int advance(self, Py_ssize_t n) except -1:
        self.length += n
        return 0

    cdef Py_ssize_t oldest(self, Py_ssize_t length) noexcept:
        """First position outside the sinks that a sequence of `length` tokens holds; see `ring`."""
        return 0

    cdef bint holds(self, Py_ssize_t position) noexcept:
        """Whether all positions from this one on are still there."""
        return True

    cdef int check_truncate(self, Py_ssize_t n) except -1:
        """Raise if the first n tokens cannot be brought back."""
        return 0

    cdef int truncate(self, Py_ssize_t n) except -1:
        """Keep the first n tokens, after `check_truncate`."""
        cdef Py_ssize_t kept = (n + self.pool.block_size - 1) // self.pool.block_size, i
        if kept <= self.sink_blocks:
            kept += self.skipped
        kept -= self.skipped
        for i in range(self.count - 1, kept - 1, -1):  # so that the next to be taken is the first
            self.pool.release(self.blocks[i])
        if kept < self.count:
            self.count = kept
        if kept <= self.sink_blocks:
            self.skipped = 0
        self.length = n
        for i in range(self.pool.num_layers):
            self.lengths[i] = min(self.lengths[i], n)
        return 0

    cdef int adopt(self, list blocks) except -1:
        """Start an empty table with blocks whose contents are known."""
        cdef Py_ssize_t i, count = len(blocks)
        self.blocks = <int32_t *>calloc(max(count, 1), sizeof(int32_t))
        if self.blocks == NULL:
            raise MemoryError("cannot allocate the block table of a sequence")
        self.capacity = max(count, 1)
        for i in range(count):
            self.blocks[i] = blocks[i]
            self.pool.retain(self.blocks[i])
            self.count += 1
        return 0

    cdef bint has(self, Py_ssize_t index, int32_t block) noexcept:
        return index < self.count and self.blocks[index] == block

    cdef bint is_in_one_piece(self) noexcept:
        """Whether block i of the pool's first chunk is the table's entry i, so that the tokens lie one after the other."""
        cdef Py_ssize_t i
        if self.count > self.pool.first_blocks:
            return False
        for i in range(self.count):
            if self.blocks[i] != i:
                return False
        return True

    cdef BlockTable empty(self, BlockPool pool):
        """A table of the same kind for another pool."""
        return BlockTable(pool)

    cdef int copy_place(self, BlockTable other) except -1:
        """Take over how many tokens there are, and which of them are left, of a sequence of the same kind."""
        self.sink_blocks, self.skipped, self.length = other.sink_blocks, other.skipped, other.length
        memcpy(self.lengths, other.lengths, self.pool.num_layers * sizeof(Py_ssize_t))
        return 0

    cdef int share(self, BlockTable other) except -1:
        """Become the equal of another sequence of this pool, with the same blocks."""
        cdef Py_ssize_t i
        cdef int32_t *blocks = <int32_t *>calloc(max(other.count, 1), sizeof(int32_t))
        if blocks == NULL:
            raise MemoryError("cannot allocate the block table of a sequence")
        for i in range(other.count):
            blocks[i] = other.blocks[i]
            self.pool.retain(blocks[i])
        self.release()
        free(self.blocks)
        self.blocks, self.capacity, self.count = blocks, max(other.count, 1), other.count
        self.copy_place(other)
        return 0

    cdef int reserve(self, Py_ssize_t count) except -1:
        """Make sure that `open` finds its blocks; else CacheFullError or MemoryError, and nothing has changed."""
        cdef Py_ssize_t i, own = 0
        for i in range(self.count):
            own += self.pool.owners[self.blocks[i]] == 1
        if self.pool.available() + own < count:
            self.pool.ensure(count - own)
        return 0

    cdef int open(self, Py_ssize_t count) except -1:
        """Exchange all blocks for `count` others."""
        cdef Py_ssize_t i
        cdef int32_t *blocks
        self.reserve(count)
        blocks = <int32_t *>calloc(max(count, 1), sizeof(int32_t))
        if blocks == NULL:
            raise MemoryError("cannot allocate the block table of a sequence")
        self.release()
        free(self.blocks)
        self.blocks, self.capacity = blocks, max(count, 1)
        for i in range(count):
            self.blocks[i] = self.pool.take(self.blocks[i - 1] if i else -1)
            self.count += 1
        return 0

    cdef Py_ssize_t num_slots(self) noexcept:
        """Places of the blocks that are in use."""
        cdef Py_ssize_t longest = 0, i
        for i in range(self.pool.num_layers):
            longest = max(longest, self.lengths[i])
        return longest - self.skipped * self.pool.block_size

    cdef Py_ssize_t blocks_of(self, BlockTable other) noexcept:
        """Blocks of this pool that hold what another table holds."""
        return (other.num_slots() + self.pool.block_size - 1) // self.pool.block_size

    cdef int fill(self, BlockTable other) except -1:
        """Become the equal of a sequence of another pool of the same layers, with a copy of its tokens."""
        self.open(self.blocks_of(other))
        copy_slots(other.pool.stores, other.blocks, self.pool.stores, self.blocks, self.pool.num_layers, other.num_slots())
        self.copy_place(other)
        return 0

    cdef BlockTable clone(self, BlockPool pool):
        """A deep copy in another pool."""
        cdef BlockTable other = self.empty(pool)
        other.fill(self)
        return other

    cdef BlockTable straight(self):
        """This table, or a copy of it, whose full blocks lie one after the other in memory."""
        cdef Py_ssize_t i, full = self.num_slots() // self.pool.block_size
        for i in range(1, full):
            if (self.blocks[i] != self.blocks[0] + i
                    or self.pool.chunk_of[self.blocks[i] >> CHUNK_SHIFT] != self.pool.chunk_of[self.blocks[0] >> CHUNK_SHIFT]):
                return self.clone(self.pool.exact(self.count))
        return self

    cdef BlockTable tail(self):
        """A copy of the last block, if it is not full, in which only this sequence's tokens are left; else None."""
        cdef Py_ssize_t full = self.num_slots() // self.pool.block_size, rest = self.num_slots() % self.pool.block_size
        cdef BlockTable other
        if rest == 0:
            return None
        other = BlockTable(self.pool.exact(1))
        other.open(1)
        copy_slots(self.pool.stores, self.blocks + full, other.pool.stores, other.blocks, self.pool.num_layers, rest)
        return other

    def place(self):
        """What a file tells of a table besides its blocks, for `reopen`."""
        return {"skipped_blocks": self.skipped}

    def reopen(self, Py_ssize_t length, dict place):
        """Take the blocks of a sequence of `length` tokens, for their bytes to be put in; ValueError if `place` cannot be."""
        cdef Py_ssize_t count = self._check_place(length, place), i
        if self.pool.num_blocks == 0:
            # A file's window is no reason to reserve more than what its bytes speak for.
            self.pool.first_blocks = min(self.pool.first_blocks, max(4 * count, <Py_ssize_t>8))
        self.open(count)
        self.skipped, self.length = place["skipped_blocks"], length
        for i in range(self.pool.num_layers):
            self.lengths[i] = length

    cdef Py_ssize_t _check_place(self, Py_ssize_t length, dict place) except -1:
        """Number of blocks."""
        if place != {"skipped_blocks": 0}:
            raise ValueError(f"a cache that keeps everything cannot be {place}")
        return (length + self.pool.block_size - 1) // self.pool.block_size

    @property
    def nbytes_alone(self):
        """Bytes that this table keeps from being freed: its own, and blocks without another owner."""
        cdef Py_ssize_t i, alone = 0
        for i in range(self.count):
            alone += self.pool.owners[self.blocks[i]] == 1
        return alone * self.pool.block_bytes + self.capacity * sizeof(int32_t) + self.pool.num_layers * sizeof(Py_ssize_t)

    cdef int release(self) except -1:
        """Give all blocks back."""
        self.truncate(0)
        return 0

    cdef object rows(self, Py_ssize_t layer, object positions, bint values):
        """Keys or values at some positions, decoded to float32."""
        cdef kv_store *store = self.pool.stores + layer
        cdef const kv_kernels *kernels = active()
        cdef const int64_t[::1] at = np.ascontiguousarray(positions, np.int64)
        cdef float[:, :, ::1] out
        cdef Py_ssize_t i, n = at.shape[0]
        cdef int threads
        cdef int64_t[::1] slots = np.empty(n, np.int64)
        array = np.empty((n, self.pool.num_kv_heads, self.pool.head_dim), np.float32)
        if n == 0:
            return array
        out = array
        for i in range(n):
            slots[i] = self.slot(at[i])
        threads = num_threads_for(None, <double>n * self.pool.num_kv_heads * self.pool.head_dim * 8)
        with nogil:
            if threads == 1:
                for i in range(n):
                    _decode_token(kernels, store, slots[i], &out[i, 0, 0], values)
            else:
                for i in prange(n, schedule="static", num_threads=threads):
                    _decode_token(kernels, store, slots[i], &out[i, 0, 0], values)
        return array

    def give_up(self):
        """Release, for a pool that has been entered."""
        self.release()
        self.pool.drop_surplus()

    def block_ids(self):
        """The blocks in the order of their tokens."""
        return np.array([self.blocks[i] for i in range(self.count)], np.int32)


cdef void _decode_token(const kv_kernels *kernels, const kv_store *store, int64_t slot, float *out,
                        bint values) noexcept nogil:
    cdef Py_ssize_t head
    cdef int32_t block = <int32_t>(slot // store.k.block_size)
    cdef int place = <int>(slot % store.k.block_size)
    for head in range(store.num_kv_heads):
        if values:
            kernels.decode_v(&store.v, v_block_at(store, block, head), place, out)
        else:
            kernels.decode_k(&store.k, k_block_at(store, block, head), place, out)
        out += store.k.head_dim
