# cython: language_level=3, boundscheck=False, cdivision=True
"""The sequences of a pool: which blocks they take, share and give back, and the slots of their next tokens."""
cimport cython
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc

from kvfast.core.kernels cimport parse_precision
from kvfast.storage.batches.scheduler_blocks cimport SchedulerBlocks
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.memory.prefix_index cimport PrefixIndex
from kvfast.storage.tables.block_table cimport BlockTable
from kvfast.storage.tables.ring_table cimport RingTable
from kvfast.storage.tables.token_states cimport coded_at

from kvfast.core.checks import check_block_size
from kvfast.core.kernels import name_of_precision


cdef int check_all_open(list tables) except -1:
    cdef BlockTable table
    for table in tables:
        table.check_open()
    return 0


cdef class PagedSequences:
    def __init__(self, num_layers, num_kv_heads, head_dim, num_blocks, block_size, formats, rope_dim=None, secure=False,
                 v_head_dim=None, ring=None, buffer=None):
        """`ring`: window, number of sinks and rollback of a `RingTable`, or None; `buffer`: a caller's memory, or None."""
        size = check_block_size(block_size)
        if num_blocks is None:
            raise TypeError("num_blocks must be an integer, got None")
        self.pool = BlockPool(num_layers, num_kv_heads, head_dim, size, formats, num_blocks, False, True, rope_dim, secure,
                              v_head_dim, buffer)
        self.index = self.pool.index = PrefixIndex(self.pool.num_blocks)
        self.kind = BlockTable(self.pool) if ring is None else RingTable(self.pool, *ring)
        self.scheduler = None if self.pool.floats is None else SchedulerBlocks(self.pool)
        self.given = [None] * self.pool.num_blocks
        self.given_at = <Py_ssize_t *>malloc(self.pool.num_blocks * sizeof(Py_ssize_t))
        if self.given_at == NULL:
            raise MemoryError("cannot allocate the slots of a pool")

    def __dealloc__(self):
        free(self.given_at)

    @property
    def precision(self):
        """As of `SequenceStorage`."""
        return name_of_precision(self.reads_as)

    @precision.setter
    def precision(self, name):
        self.reads_as = parse_precision(name)

    def new_table(self):
        """An empty table, for `start` or `fork`."""
        return self.kind.empty(self.pool)

    def num_coded(self, Py_ssize_t num_tokens):
        """Number of first tokens that all layers of a sequence of `num_tokens` computed tokens read as codes."""
        return coded_at(num_tokens, self.pool.rules[-1], self.pool.block_size) if self.pool.seals else num_tokens

    def start(self, BlockTable table, digests):
        """Begin a sequence: its empty table takes the blocks that the pool knows by the first of these digests."""
        self.pool.enter()
        try:
            if self.is_external:
                raise ValueError("another scheduler gives out the blocks of this pool (append_batch was given "
                                 "slots that no sequence has); clear() the pool before making sequences")
            # Inside of the lock, where no other thread can take a block that is found.
            table.start(digests)
            table.is_counted = True
            self.pool.num_sequences += 1
        finally:
            self.pool.leave()

    def fork(self, BlockTable table, BlockTable other, then):
        """Let the empty table `table` share the blocks of another. Calls `then` before another thread can come in."""
        self.pool.enter()
        try:
            table.check_open()
            other.share(table)
            then()
        finally:
            self.pool.leave()

    def free(self, BlockTable table):
        """Release the blocks of a sequence."""
        cdef Py_ssize_t i
        self.pool.enter()
        try:
            for i in range(table.map.count):
                self.given[table.map.blocks[i]] = None
            table.close()
        finally:
            self.pool.leave()

    def clear(self):
        """Forget known prefixes and the slots of another scheduler; no block may have an owner."""
        self.pool.enter()
        try:
            if self.num_owned:
                raise ValueError(f"{self.num_owned} blocks still belong to sequences or snapshots; free them first")
            self.evict_all()
            if self.is_external:
                self._forget_slots()
        finally:
            self.pool.leave()

    cdef int _forget_slots(self) except -1:
        """Forget what another scheduler has written."""
        cdef Py_ssize_t block
        if self.scheduler is not None:
            self.scheduler.forget()
        for block in range(self.pool.num_blocks if self.pool.secure else 0):
            self.pool.wipe_block(<int32_t>block)
        if self.pool.secure:
            self.pool.workspace.wipe()
        self.is_external = False
        return 0

    cdef int evict_all(self) except -1:
        """Forget all known prefixes."""
        while self.index.num_idle:
            self.pool.put_free(self.index.evict())
        return 0

    @property
    def num_free(self):
        self.pool.release_pending()
        return self.pool.available()

    @property
    def num_sequences(self):
        self.pool.release_pending()
        return self.pool.num_sequences

    @property
    def num_owned(self):
        return self.pool.num_blocks - self.pool.available()

    def owners(self):
        """Number of owners of each block."""
        with cython.critical_section(self.pool):
            return np.array([self.pool.owners[i] for i in range(self.pool.num_blocks)], np.int32)

    def blocks_needed(self, list tables, list counts):
        """Number of blocks to take before `counts` tokens can be written after the complete ones of each table."""
        cdef BlockTable table
        cdef Py_ssize_t needed = 0, i, end, size = self.pool.block_size
        cdef int32_t block
        shared = {}
        with cython.critical_section(self.pool):
            for table, count in zip(tables, counts):
                if count == 0:
                    continue
                end = (table.length + <Py_ssize_t>count + size - 1) // size
                needed += max(0, end - table.map.end())
                for i in range(table.length // size, min(end, table.map.end())):
                    block = table.map.block(i)
                    if self.index.knows(block):
                        needed += 1
                    elif self.pool.owners[block] > 1:
                        shared[block] = shared.get(block, 0) + 1
            # The last owner of a block to write to it need not copy it.
            for number, writers in shared.items():
                needed += writers if writers < self.pool.owners[<int32_t>number] else writers - 1
        return needed

    def slot_mapping(self, list tables, list counts):
        """Make the slots of the next tokens of some sequences writable, and return them."""
        cdef BlockTable table
        cdef Py_ssize_t i, at = 0, n, floats = 0
        cdef int32_t block
        cdef int64_t[::1] view
        self.pool.enter()
        try:
            if len({id(table) for table in tables}) != len(tables):
                raise ValueError("a sequence may appear only once in slot_mapping")
            check_all_open(tables)
            # Do first, for all tables, what can fail.
            self.pool.ensure(self.blocks_needed(tables, counts))
            slots = np.empty(sum(counts), np.int64)
            view = slots
            pairs = [pair for pair in zip(tables, counts) if pair[1]]
            for table, n in pairs:
                table.map.reserve_blocks(table.length + n)
                floats += table.floats_needed(table.length, table.length + n)
            if floats:
                self.pool.floats.pieces.ensure(floats)
            for table, n in pairs:
                table.make_writable(-1, table.length, table.length + n, None)
                for i in range(table.length, table.length + n):
                    view[at] = table.map.slot(i)
                    at += 1
                for i in range(table.length // self.pool.block_size, table.map.end()):
                    block = table.map.block(i)
                    self.given[block], self.given_at[block] = table, i
            return slots
        finally:
            self.pool.leave()
