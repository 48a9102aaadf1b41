# cython: language_level=3, boundscheck=False, cdivision=True
"""Pools, from which caches take their blocks: memory, float rows, known prefixes, and which threads may enter."""
cimport cython

from libc.stdint cimport int32_t

from kvfast.attention.workspace cimport Workspace
from kvfast.core.flags cimport kv_drop, kv_share, kv_take, kv_unshare
from kvfast.core.system cimport kv_yield
from kvfast.storage.memory.block_memory cimport BlockMemory
from kvfast.storage.memory.float_rows cimport float_rows_of

from kvfast.storage.memory.buffer_layers import buffer_layers


cdef extern from *:
    unsigned long PyThread_get_thread_ident() nogil


cdef enum:
    # Values of `busy`. Above 0 it is the number of threads that read; then only threads that write are refused.
    IN_A_CALL = -1             # a thread writes: others are refused
    TIDYING = -2               # a thread releases pending tables: others wait, as this is short and no call asked for it


cdef class BlockPool(BlockMemory):
    """Blocks, the float rows of their tokens, and the index of known blocks.

    All memory is allocated at the start, in one slab; if the pool `grows`, only when it is needed. With a `buffer`, the memory
    is a caller's, see `buffer_layers`.
    """

    def __cinit__(self, num_layers, num_kv_heads, head_dim, int block_size, formats, num_blocks, *, bint grows=False,
                  bint is_shared=False, rope_dim=None, bint secure=False, v_head_dim=None, buffer=None):
        cdef Py_ssize_t i
        for i in range(self.num_layers):
            self.seals |= self.layouts[i].seals
            self.keeps_newest |= self.layouts[i].open_tokens > 0
            self.has_sinks |= self.layouts[i].float_tokens > 0
        rules = [(self.layouts[i].kept_tokens, self.layouts[i].border) for i in range(self.num_layers)]
        self.rules = tuple(sorted({rule for rule in rules if rule[0]}))
        for i in range(self.num_layers):
            self.layouts[i].rule = self.rules.index(rules[i]) if self.layouts[i].open_tokens else -1
        self.floats = float_rows_of(self)
        self.to_release = []
        self.workspace = Workspace()
        self.workspace.c.secure = secure
        if buffer is not None:
            sizes = [(self.layouts[i].k.bytes + self.layouts[i].v.bytes) * self.num_kv_heads for i in range(self.num_layers)]
            layers, strides = buffer_layers(buffer, sizes, self.first_blocks)
            self._use_layers(layers, strides)
        elif grows:
            self.start_small()
            if self.floats is not None:
                self.floats.pieces.start_small()
        else:
            self._add_slab(self.first_blocks)

    cdef bint try_enter(self) noexcept nogil:
        return kv_take(&self.busy, IN_A_CALL) == 0

    cdef void leave(self) noexcept nogil:
        kv_drop(&self.busy)

    cdef bint try_enter_reading(self) noexcept nogil:
        return kv_share(&self.busy) == 0

    cdef void leave_reading(self) noexcept nogil:
        kv_unshare(&self.busy)

    cdef bint _waits_for(self, int holder) noexcept:
        """Wait a moment if another thread releases pending tables; False if there is nothing to wait for. A finalizer may come
        here on the thread that releases them, which must not wait for itself."""
        if holder != TIDYING or self.tidier == PyThread_get_thread_ident():
            return False
        with nogil:
            kv_yield()
        return True

    cdef int enter_reading(self) except -1:
        """Enter for a call that only reads. Other threads may read at the same time."""
        cdef int holder
        self.release_pending()
        holder = kv_share(&self.busy)
        while self._waits_for(holder):
            holder = kv_share(&self.busy)
        if holder:
            raise RuntimeError("this cache is in use by another thread, which changes it; only threads that read can share it")
        return 0

    cdef int enter(self) except -1:
        cdef int holder = kv_take(&self.busy, IN_A_CALL)
        while self._waits_for(holder):
            holder = kv_take(&self.busy, IN_A_CALL)
        if holder:
            raise RuntimeError("this cache is in use by another thread; a thread that changes it must be alone")
        try:
            self._release_pending()
        except BaseException:
            self.leave()
            raise
        return 0

    cdef bint _start_tidying(self) noexcept:
        if kv_take(&self.busy, TIDYING):
            return False
        self.tidier = PyThread_get_thread_ident()
        return True

    cdef void _stop_tidying(self) noexcept:
        self.tidier = 0  # else this thread would later take the TIDYING of another thread for its own
        self.leave()

    cdef int _release_pending(self) except -1:
        while self.to_release:
            self.to_release.pop().free_entered()
        return 0

    def release_later(self, table):
        """Release a table that Python collects, of this pool or of one that is entered with it: now, or when the pool is next
        entered."""
        if self._start_tidying():
            try:
                table.free_entered()
            finally:
                self._stop_tidying()
        else:
            self.to_release.append(table)

    def release_pending(self):
        """Release the tables that were collected while the pool was busy."""
        if self.to_release and self._start_tidying():
            try:
                self._release_pending()
            finally:
                self._stop_tidying()

    cdef int _grow_tables(self, Py_ssize_t total) except -1:
        with cython.critical_section(self):
            BlockMemory._grow_tables(self, total)
            if self.floats is not None:
                self.floats.grow(self.num_blocks, total)
        return 0

    cdef Py_ssize_t available(self) except -1:
        return self.num_free + (self.index.num_idle if self.index is not None else 0)

    cdef int32_t take(self, int32_t after) except -1:
        """Take a free block, or else a known block without an owner."""
        cdef int32_t block
        if self.num_free:
            block = BlockMemory.take(self, after)
        else:
            block = self.index.evict()
            if self.secure:
                self.wipe_block(block)
            self.owners[block] = 1
        if self.layers is not None:
            self.zero_block(block)  # as memory of its own is at first: what a caller's holds may be no numbers
        if self.floats is not None:
            self.floats.forget(block)
        return block

    cdef int retain(self, int32_t block) except -1:
        """Add an owner, perhaps the first, to a known block."""
        if self.owners[block] == 0:
            self.index.take_known(block)
        self.owners[block] += 1
        return 0

    cdef int release(self, int32_t block) except -1:
        self.owners[block] -= 1
        if self.owners[block] > 0:
            return 0
        if self.index is None or not self.index.retain_known(block):
            self.put_free(block)
        elif self.floats is not None:
            self.floats.release(block, 1 if self.has_sinks else 0)  # a sequence that finds it reads codes, and the first float rows
        return 0

    cdef int put_free(self, int32_t block) except -1:
        BlockMemory.put_free(self, block)
        if self.secure:
            self.workspace.wipe()
        if self.floats is not None:
            self.floats.forget(block)
        return 0

    cdef void wipe_tokens(self, int32_t block, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last) noexcept:
        BlockMemory.wipe_tokens(self, block, layer, first, last)
        self.workspace.wipe()
        if self.floats is not None:
            self.floats.wipe_tokens(block, layer, first, last)

    cdef bint is_frozen(self, int32_t block) noexcept nogil:
        """Whether a block must be copied before it is written."""
        return self.owners[block] > 1 or (self.index is not None and self.index.knows(block))

    def is_patched(self, int32_t block):
        """Whether a sealed block is patched in some layer; see `kv_layout`."""
        return self.floats is not None and self.floats.first_patch(block) < self.block_size

    cdef int copy_block(self, int32_t source, int32_t target) except -1:
        """Copy a block with its float rows."""
        if self.floats is not None:
            self.floats.copy(source, target)
        self.copy(source, target)
        return 0

    cdef int32_t move_down(self, int32_t block) except -1:
        """Move a block without other owners to an earlier slab that has room, so that the last slab can be trimmed. Returns where
        it is then."""
        cdef int32_t target
        if self.owners[block] > 1 or not self.has_room_below(block):
            return block
        target = self.take(-1)
        self.copy(block, target)
        if self.floats is not None:
            self.floats.give(block, target)
        self.release(block)
        return target

    cdef BlockPool clone(self):
        """An empty pool of the same shape."""
        cdef BlockPool other = BlockPool(**self.settings)
        other.first_blocks = self.first_blocks  # fewer than the settings ask for, if a file told them
        return other

    cdef BlockPool exact(self, Py_ssize_t num_blocks):
        """An empty pool of the same layers with `num_blocks` blocks."""
        return BlockPool(**(self.settings | {"num_blocks": max(num_blocks, 1), "grows": False, "is_shared": False}))

    cdef int trim_surplus(self) except -1:
        """Trim the slabs that a pool with fixed memory added because snapshots kept its blocks, and those of float rows."""
        if not self.grows:
            self.trim()
        if self.floats is not None:
            self.floats.pieces.trim()
        return 0

    def float_pool(self):
        """An empty BlockMemory for float rows, or None if there are none."""
        return None if self.floats is None else BlockMemory(**self.floats.pieces.settings)

    @property
    def nbytes(self):
        return sum(self.sizes) + (0 if self.floats is None else self.floats.pieces.nbytes)

    def bytes_of_blocks(self, blocks):
        """Bytes of some blocks, including float rows."""
        cdef Py_ssize_t count = 0
        cdef int32_t block
        if self.floats is None:
            return len(blocks) * self.block_bytes
        with cython.critical_section(self):
            for block in blocks:
                count += self.floats.num_pieces(block)
        return len(blocks) * self.block_bytes + count * self.floats.pieces.block_bytes

    @property
    def nbytes_used(self):
        """Bytes of the blocks that have owners."""
        with cython.critical_section(self):
            owned = [i for i in range(self.num_blocks) if self.owners[i]]
        return self.bytes_of_blocks(owned)
