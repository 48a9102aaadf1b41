# cython: language_level=3, boundscheck=False, cdivision=True
"""Block tables: the tokens of a sequence in its blocks, written, taken back, copied and shared."""
cimport cython
import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from kvfast.attention.options cimport kvfast_options
from kvfast.attention.refusals cimport kv_refusal
from kvfast.attention.sight cimport kv_member
from kvfast.codec.blocks cimport kv_context, kv_layout
from kvfast.codec.encode cimport check_rows, check_storable, kv_rotary, write_rows
from kvfast.core.arrays cimport Rows
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_map cimport BlockMap, entry_of
from kvfast.storage.tables.token_life cimport TokenLife

from kvfast.core.text import shown


cdef class BlockTable:
    """The tokens of one sequence. It evicts none; see `RingTable` for a table that does."""

    def __cinit__(self, BlockPool pool, *args):
        self.pool, self.map = pool, BlockMap(pool, 0)
        self.life = TokenLife(self.map)
        self.lengths = <Py_ssize_t *>calloc(pool.num_layers, sizeof(Py_ssize_t))
        if self.lengths == NULL:
            raise MemoryError("cannot allocate the lengths of a sequence")
        self.life.lengths = self.lengths

    def __dealloc__(self):
        free(self.lengths)

    cdef Py_ssize_t longest(self) noexcept nogil:
        """Tokens of the longest layer."""
        return self.life.longest()

    cdef Py_ssize_t num_uncounted(self) noexcept nogil:
        """Most tokens of a layer that `advance` has not counted."""
        return self.longest() - self.length

    cdef Py_ssize_t num_slots(self) noexcept nogil:
        """Number of slots in use."""
        return self.longest() - self.map.skipped * self.pool.block_size

    cdef Py_ssize_t num_held(self) noexcept nogil:
        """Complete tokens, without those that were evicted on request; see `RingTable`."""
        return self.length

    cdef Py_ssize_t held_from(self) noexcept nogil:
        """The first position from which on all tokens are still there."""
        return 0

    def knowable_block(self, Py_ssize_t index):
        """The full block with this index, or -1 if a token of it is gone or has no codes: a sequence that finds it reads codes."""
        if index * self.pool.block_size < self.held_from() or self.pool.is_patched(self.map.block(index)):
            return -1
        return self.map.block(index)

    cdef int advance(self, Py_ssize_t n) except -1:
        """Count tokens as complete."""
        self.length += n
        self.release_evicted()
        if self.pool.keeps_newest:
            self.life.release_float_rows(self.length)
        return 0

    cdef bint just_counts(self, Py_ssize_t n) noexcept nogil:
        """Whether `advance` releases nothing."""
        return self.life.just_counts(self.length + n)

    cdef void count_tokens(self, Py_ssize_t n) noexcept nogil:
        """`advance` when it just counts."""
        self.length += n

    cdef int release_evicted(self) except -1:
        """Release the blocks that a sequence of this length does not need any more; see `RingTable`."""
        return 0

    cdef int ensure(self, Py_ssize_t num_blocks) except -1:
        """Make sure that `num_blocks` blocks can be taken for new tokens."""
        return self.pool.ensure(num_blocks)

    cdef dict resume_state(self):
        """What a file stores of a table besides its blocks, for `set_resume_state`."""
        return {"skipped_blocks": self.map.skipped} | self.life.saved()

    cdef int set_resume_state(self, Py_ssize_t length, dict state) except -1:
        """Become a sequence of `length` tokens, after `check_resume_state`. The caller takes its blocks."""
        self.set_length(length)
        self.map.skipped = state["skipped_blocks"]
        return self.life.set_begins([one and one["floats_begin"] for one in self.life.saved_layers(state)])

    cdef void set_length(self, Py_ssize_t length) noexcept nogil:
        """Let all layers have as many tokens."""
        cdef Py_ssize_t i
        self.length = length
        for i in range(self.pool.num_layers):
            self.lengths[i] = length

    cdef Py_ssize_t check_resume_state(self, Py_ssize_t length, dict state) except -1:
        """Number of blocks of a sequence of `length` tokens; ValueError if `state` is invalid."""
        if self.life.check_saved(length, state) != {"skipped_blocks": 0}:
            raise ValueError(f"the state of a cache that keeps everything must have no dropped blocks, got {shown(state)}")
        return (length + self.pool.block_size - 1) // self.pool.block_size

    cdef void context(self, Py_ssize_t layer, kv_context *context) noexcept nogil:
        context.table = self.map.blocks
        context.length = self.lengths[layer]
        context.sink_blocks = self.map.sink_blocks
        context.skipped = self.map.skipped
        context.floats_begin, context.counted = self.life.read_from(layer, self.length), self.length

    cdef void describe(self, Py_ssize_t layer, kv_member *member) noexcept nogil:
        """Describe a layer's tokens to attention, but for those of segments."""
        self.context(layer, &member.context)
        member.length, member.uncounted = self.lengths[layer], self.lengths[layer] - self.length
        member.held_from = self.held_from()

    cdef bint is_writable(self, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
        """Whether there is nothing to do before a layer's positions first to last are written."""
        cdef Py_ssize_t size = self.pool.block_size, end = (last + size - 1) // size, index
        cdef int32_t block
        if end > self.map.end() or self.pool.layouts[layer].seals and self.life.begins[layer] % size:
            return False
        for index in range(first // size, end):
            block = self.map.block(index)
            if self.pool.is_frozen(block):
                return False
            if self.pool.floats is not None and not self._is_open(layer, block, index, first, last):
                return False
        return True

    cdef bint _is_open(self, Py_ssize_t layer, int32_t block, Py_ssize_t index, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
        return self.pool.floats.is_open(layer, block, index, first - index * self.pool.block_size, last - index * self.pool.block_size)

    cdef Py_ssize_t floats_needed(self, Py_ssize_t first, Py_ssize_t last) noexcept:
        """Number of pieces of float rows that `make_writable` takes."""
        cdef Py_ssize_t needed = 0, size = self.pool.block_size, index, at, begin
        cdef int32_t block, source
        if self.pool.floats is None:
            return 0
        for index in range(first // size, (last + size - 1) // size):
            at = entry_of(self.map, index)
            block = self.map.blocks[at] if at < self.map.count else -1
            source = -1
            if block >= 0 and self.pool.is_frozen(block):
                block, source = -1, block
            begin = first - index * size
            if self.life.is_cut(-1, index):
                begin = 0
            needed += self.pool.floats.needed(block, source, index, begin, last - index * size)
        return needed

    cdef list open_range(self, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last):
        """`make_writable` so that `undo_changes` can go back. Returns the changes for that or for `keep_changes`: the entry of a block
        that was copied, and the block; a block, its pieces of float rows and its kept codes; or `begins` before layers were opened."""
        cdef Py_ssize_t count = self.map.count
        cdef list changes = []
        try:
            self.make_writable(layer, first, last, changes)
        except BaseException:  # also where an object of `changes` could not be made
            self.undo_changes(changes, count)
            raise
        return changes

    cdef int make_writable(self, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last, list changes) except -1:
        """Take blocks for the positions first to last of a layer, or with -1 of all, and copy those that other tables share. Notes in
        `changes`, if it is not None, what `undo_changes` needs; else makes no object, and releases what it copies at once."""
        cdef Py_ssize_t index, at, size = self.pool.block_size, end = (last + size - 1) // size, needed
        cdef int32_t block
        # Do first what can fail. Take all blocks and float rows at once, because large pieces of memory lie in huge pages.
        self.map.reserve_blocks(last)
        self.ensure(self.map.blocks_needed(first, last))
        needed = self.floats_needed(first, last)
        if needed:
            self.pool.floats.pieces.ensure_apart(needed)
        for index in range(first // self.pool.block_size, end):
            at = entry_of(self.map, index)
            if at >= self.map.count:
                self.map.extend(at + 1)
            elif self.pool.is_frozen(self.map.blocks[at]):
                if changes is None:
                    self.pool.release(self._copy_frozen(at))
                else:
                    changes.append((at, self.map.blocks[at]))
                    self._copy_frozen(at)
                if self.pool.secure:
                    self._wipe_behind(index)
            elif changes is not None and self.pool.floats is not None and (
                    self.life.is_cut(layer, index) or not self._is_open(layer, self.map.blocks[at], index, first, last)):
                block = self.map.blocks[at]
                changes.append((block, self.pool.floats.pieces_of(block), self.pool.floats.kept_of(block)))
            if self.life.is_cut(layer, index):
                if changes is not None:
                    changes.append((self.life.listed(),))
                self.life.reopen(layer)
            if self.pool.floats is not None:
                self.pool.floats.open(layer, self.map.blocks[at], index, first - index * size, last - index * size)
        return 0

    cdef int keep_changes(self, list changes) except -1:
        """Release the blocks that were copied."""
        for change in changes:
            if len(change) == 2:
                self.pool.release(change[1])
        return 0

    cdef int undo_changes(self, list changes, Py_ssize_t count) except -1:
        """Go back to before `open_range`, when there were `count` blocks."""
        cdef Py_ssize_t at
        cdef int32_t block
        for change in changes:
            if len(change) == 2:
                at, block = change
                if self.map.blocks[at] != block:
                    self.pool.release(self.map.blocks[at])
                    self.map.blocks[at] = block
            elif len(change) == 3:
                self.pool.floats.keep_pieces(change[0], change[1])
                self.pool.floats.set_kept(change[0], change[2])
            else:
                self.life.set_begins(change[0])
        self.map.release_from(count)
        self.pool.trim_surplus()
        return 0

    cdef int32_t _copy_frozen(self, Py_ssize_t at) except -1:
        """Have a copy of a block that others own, too. Returns that block, which the caller releases."""
        cdef int32_t block = self.pool.take(self.map.blocks[at - 1] if at else -1), before = self.map.blocks[at]
        self.pool.copy_block(before, block)
        self.map.blocks[at] = block
        return before

    cdef bint is_shared_at(self, Py_ssize_t position) noexcept nogil:
        """Whether a table of a secure pool that is cut at this position cuts a block that others own, too."""
        return (self.pool.secure and position % self.pool.block_size != 0 and 0 <= position < self.longest()
                and self.pool.is_frozen(self.map.block(position // self.pool.block_size)))

    cdef int own(self, Py_ssize_t position) except -1:
        """Before a table of a secure pool is cut inside of a block: have this block alone, so that what is cut off can be overwritten.
        CacheFullError changes nothing."""
        if self.is_shared_at(position):
            self.pool.ensure(1)
            if self.pool.floats is not None:
                self.pool.floats.pieces.ensure(self.pool.floats.num_pieces(self.map.block(position // self.pool.block_size)))
            self.pool.release(self._copy_frozen(entry_of(self.map, position // self.pool.block_size)))
        return 0

    cdef int append(self, Py_ssize_t layer, Rows k, Rows v, const kv_rotary *rotary) except -1:
        """Append tokens to those of a layer. If a value cannot be stored, the table and its pool stay as they were."""
        cdef kv_layout *layout = self.pool.layouts + layer
        cdef Py_ssize_t first = self.lengths[layer], i, n = k.rows.tokens
        cdef Py_ssize_t count = self.map.count
        cdef Py_ssize_t num_slabs = max(<Py_ssize_t>1, self.pool.num_slabs)
        cdef int64_t[::1] view
        cdef int64_t slot
        cdef list changes
        check_rows(layout, k, v)
        if n > 1:
            view = np.empty(n, np.int64)
        if self.pool.index is not None and self.map.blocks_needed(first, first + n) > self.pool.num_free:
            self.ensure(self.map.blocks_needed(first, first + n))
            check_storable(layout, k, v, rotary, NULL)  # now, as a known block that is evicted does not come back
        changes = self.open_range(layer, first, first + n)
        try:
            if n == 1:
                slot = self.map.slot(first)
                write_rows(layout, k, v, rotary, &slot, True, True)
            else:
                for i in range(n):
                    view[i] = self.map.slot(first + i)
                write_rows(layout, k, v, rotary, &view[0], True, True)
            self.life.seal(layer, first, first + n)
        except BaseException:
            self.undo_changes(changes, count)
            if self.pool.num_slabs > num_slabs:
                self.pool.trim()
            if self.pool.secure:
                for i in range(first // self.pool.block_size, self.map.end()):
                    self._wipe_behind(i)
            raise
        self.keep_changes(changes)
        self.lengths[layer] += n
        return 0

    cdef Py_ssize_t oldest(self, Py_ssize_t length) noexcept nogil:
        """First position outside the sink tokens that a sequence of `length` tokens holds; see `RingTable`."""
        return 0

    cdef bint fit_window(self, kvfast_options *options, kv_refusal *refusal) noexcept nogil:
        """Limit the window and the sink tokens of a call to those of the table. The call may ask for less than these, not for more."""
        return True

    cdef int check_truncate(self, Py_ssize_t n) except -1:
        """Raise if the table cannot go back to its first n tokens."""
        return 0

    cdef int truncate(self, Py_ssize_t n) except -1:
        """Keep the first n tokens, after `check_truncate`."""
        cdef Py_ssize_t count = (n + self.pool.block_size - 1) // self.pool.block_size, i
        if count <= self.map.sink_blocks:
            count += self.map.skipped
        count -= self.map.skipped
        self.map.release_from(count)
        if count <= self.map.sink_blocks:
            self.map.skipped = 0
        self.length = n
        for i in range(self.pool.num_layers):
            self.lengths[i] = min(self.lengths[i], n)
        self.life.cut(n)
        if self.pool.secure and n % self.pool.block_size:
            self._wipe_behind(n // self.pool.block_size)
        return 0

    cdef int cut(self, Py_ssize_t n) except -1:
        """`truncate`; a secure pool with room overwrites what is cut off even if others own its block, too."""
        if not self.pool.is_shared or self.pool.available():
            self.own(n)
        return self.truncate(n)

    cdef int drop_front(self, Py_ssize_t first) except -1:
        """Release the blocks all of whose positions lie before `first`, which is at most `length`. All layers have as many tokens."""
        cdef Py_ssize_t gone = first // self.pool.block_size - self.map.skipped
        if gone > 0:
            self.map.skip(gone)
            self.life.raise_to(self.map.skipped * self.pool.block_size)
        return 0

    cdef int wipe_before(self, Py_ssize_t first) except -1:
        """In a secure pool, overwrite the tokens before `first` in its block, unless other tables read them. After `drop_front`."""
        cdef Py_ssize_t size = self.pool.block_size, at = entry_of(self.map, first // size), i
        if self.pool.secure and first % size and at < self.map.count and not self.pool.is_frozen(self.map.blocks[at]):
            for i in range(self.pool.num_layers):
                self.pool.wipe_tokens(self.map.blocks[at], i, 0, first % size)
        return 0

    cdef int _wipe_behind(self, Py_ssize_t index) except -1:
        """In a secure pool, overwrite a block after the tokens of each layer, unless other tables read it."""
        cdef Py_ssize_t at = entry_of(self.map, index), i, size = self.pool.block_size
        if at < self.map.count and not self.pool.is_frozen(self.map.blocks[at]):
            for i in range(self.pool.num_layers):
                self.pool.wipe_tokens(self.map.blocks[at], i, max(<Py_ssize_t>0, min(self.lengths[i] - index * size, size)), size)
        return 0

    cdef BlockTable empty(self, BlockPool pool):
        """A table of the same kind for another pool."""
        return BlockTable(pool)

    cdef int copy_resume_state(self, BlockTable other) except -1:
        """Copy the lengths of a table of the same kind, and which of its tokens are left."""
        self.map.skipped, self.length = self.skipped_of(other), other.length
        memcpy(self.lengths, other.lengths, self.pool.num_layers * sizeof(Py_ssize_t))
        return self.life.take(other.life.begins)

    cdef int share(self, BlockTable other) except -1:
        """Become a copy of another table of this pool that shares its blocks."""
        cdef Py_ssize_t i
        self.map.reserve_list(other.map.count)
        for i in range(other.map.count):
            self.map.spare[i] = other.map.blocks[i]
            self.pool.retain(other.map.blocks[i])
        self.release()
        self.map.use_list(other.map.count)
        self.map.count = other.map.count
        self.copy_resume_state(other)
        return 0

    cdef int reserve(self, Py_ssize_t count, Py_ssize_t pieces) except -1:
        """Make sure that this table can exchange its blocks for `count` others with `pieces` pieces of float rows. Otherwise
        raise CacheFullError or MemoryError, and change nothing."""
        cdef Py_ssize_t i, own = 0, own_pieces = 0
        for i in range(self.map.count):
            if self.pool.owners[self.map.blocks[i]] == 1:
                own += 1
                if pieces:
                    own_pieces += self.pool.floats.num_pieces(self.map.blocks[i])
        if self.pool.available() + own < count:
            self.pool.ensure(count - own)
        if pieces > own_pieces:
            self.pool.floats.pieces.ensure(pieces - own_pieces)
        self.map.reserve_list(count)
        return 0

    cdef int start(self, digests) except -1:
        """Let an empty table begin with the blocks that its pool knows by the first of these digests."""
        return self.begin_with(self.pool.index.find(digests), 0)

    cdef int begin_with(self, list blocks, Py_ssize_t skipped) except -1:
        """Let an empty table take full blocks whose contents are known; `skipped` blocks are left out."""
        self.map.adopt(blocks)
        self.map.skipped = skipped
        self.set_length(self.map.end() * self.pool.block_size)
        self.life.raise_to(self.length)
        return 0

    cdef int open(self, Py_ssize_t count) except -1:
        """Exchange all blocks for `count` new ones."""
        self.reserve(count, 0)
        return self._exchange(count)

    cdef int _exchange(self, Py_ssize_t count) except -1:
        """`open`, after `reserve`."""
        self.release()
        self.map.use_list(count)
        return self.map.extend(count)

    cdef Py_ssize_t skipped_of(self, BlockTable other) noexcept:
        """Number of blocks that this table, perhaps with another block size, skips once it is a copy of another; see `RingTable`."""
        return other.map.skipped * other.pool.block_size // self.pool.block_size

    @property
    def nbytes_alone(self):
        """Bytes that this table keeps from being freed: its own, and blocks without another owner."""
        cdef Py_ssize_t i
        with cython.critical_section(self.pool):
            alone = [self.map.blocks[i] for i in range(self.map.count) if self.pool.owners[self.map.blocks[i]] == 1]
        return self.pool.bytes_of_blocks(alone) + self.map.capacity * sizeof(int32_t) + self.pool.num_layers * sizeof(Py_ssize_t)

    cdef int release(self) except -1:
        """Release all blocks."""
        return self.truncate(0)

    cdef int close(self) except -1:
        """Release all blocks, and refuse calls from now on."""
        self.release()
        self.pool.num_sequences -= self.is_counted
        self.is_counted, self.closed = False, True
        return 0

    cdef int check_open(self) except -1:
        if self.closed:
            raise ValueError("this sequence has been freed")
        return 0

    def free_entered(self):
        """Close, for a pool that has been entered."""
        self.close()
        self.pool.trim_surplus()
