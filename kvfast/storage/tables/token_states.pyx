# cython: language_level=3, boundscheck=False, cdivision=True
"""Which tokens of a sequence each layer has, and which of them have codes, float rows, or both."""
import numpy as np

from libc.stdint cimport int16_t, int32_t, uint8_t
from libc.stdlib cimport abs, calloc, free

from kvfast.codec.seal cimport seal_blocks
from kvfast.core.checks cimport check_count
from kvfast.core.limits cimport KV_PIECE
from kvfast.storage.memory.pool cimport BlockPool
from kvfast.storage.tables.block_map cimport BlockMap, entry_of

from kvfast.core.text import shown


cdef class TokenStates(BlockMap):
    """The lengths of a sequence, and the life of its tokens: float rows, an open block, a sealed one, one that was cut."""

    def __cinit__(self, BlockPool pool, *args):
        self.lengths = <Py_ssize_t *>calloc(pool.num_layers, sizeof(Py_ssize_t))
        if self.lengths == NULL:
            raise MemoryError("cannot allocate the lengths of a sequence")

    def __dealloc__(self):
        free(self.lengths)

    cdef Py_ssize_t codes_end(self) noexcept nogil:
        """If blocks are sealed, number of first tokens with codes."""
        return max(self.floats_begin, self.length // self.pool.block_size * self.pool.block_size)

    cdef Py_ssize_t num_positions(self) noexcept nogil:
        return self.num_slots() + self.skipped * self.pool.block_size

    cdef Py_ssize_t num_uncounted(self) noexcept nogil:
        """Most tokens of a layer that `advance` has not counted."""
        return self.num_positions() - self.length

    cdef Py_ssize_t num_slots(self) noexcept nogil:
        """Number of slots in use."""
        cdef Py_ssize_t longest = 0, i
        for i in range(self.pool.num_layers):
            longest = max(longest, self.lengths[i])
        return longest - self.skipped * self.pool.block_size

    cdef Py_ssize_t _kept_codes(self) noexcept nogil:
        """Number of tokens from `floats_begin` on that keep their old codes when their block, which was cut, fills up again."""
        cdef Py_ssize_t longest = self.num_positions()
        if not self.pool.seals or self.floats_begin % self.pool.block_size or self.floats_begin >= longest:
            return 0
        if self.count == 0:
            return self.kept_codes
        return min(abs(self.pool.floats.kept_codes[self.slot(self.floats_begin) // self.pool.block_size]), longest - self.floats_begin)

    cdef Py_ssize_t slots_with_codes(self) noexcept nogil:
        """If blocks are sealed, number of slots in use that have codes."""
        return max(self.codes_end(), self.floats_begin + self._kept_codes()) - self.skipped * self.pool.block_size

    cdef bint holds(self, Py_ssize_t position) noexcept nogil:
        """Whether all positions from this one on are still there."""
        return True

    def knowable_block(self, Py_ssize_t index):
        """The full block with this index, or -1 if a token of it is gone or has no codes: a sequence that finds it reads codes."""
        cdef int32_t block
        if not self.holds(index * self.pool.block_size):
            return -1
        block = self.blocks[entry_of(self, index)]
        return -1 if self.pool.is_patched(block) else block

    cdef int _reopen_block(self) except -1:
        """Give the tokens of a sealed block that was cut float rows again, so that others can follow."""
        cdef Py_ssize_t size = self.pool.block_size, index = self.floats_begin // size
        self.pool.floats.restore(<int32_t>(self.slot(index * size) // size), index, self.floats_begin % size)
        self.floats_begin = index * size
        return 0

    cdef int _undo_reopening(self) except -1:
        """If all new tokens of a cut block are gone again, read its codes, as before they came: whoever shares its float rows."""
        cdef Py_ssize_t size = self.pool.block_size, begin = self.length // size * size
        cdef int32_t block
        if self.floats_begin != begin or begin == self.length:
            return 0
        block = <int32_t>(self.slot(begin) // size)
        if self.pool.floats.kept_codes[block] >= self.length - begin:
            if self.pool.owners[block] == 1:
                self.pool.floats.release(block, 1 if begin == 0 and self.pool.has_sinks else 0)
                self.pool.floats.set_kept_codes(block, 0)
            self.floats_begin = self.length
        return 0

    cdef int prepare(self, Py_ssize_t n) except -1:
        """The part of `advance` that can fail: seal the blocks that become full. Their codes are not read before `advance`."""
        cdef Py_ssize_t size = self.pool.block_size, skipped = self.skipped, index, gone
        cdef int32_t[::1] view
        cdef uint8_t[::1] unfit
        if not self.pool.seals:
            return 0
        if self.pool.index is None:  # else even blocks that are evicted at once may be found by their tokens
            skipped = self.skipped_at(self.length + n)
        gone = self.sink_blocks + skipped if skipped else 0
        full = [self.slot(index * size) // size for index in range(self.length // size, (self.length + n) // size)
                if index >= gone or index < self.sink_blocks]
        if full:
            view = np.array(full, np.int32)
            unfit = np.zeros(len(full), np.uint8)
            seal_blocks(self.pool.stores, self.pool.num_layers, &view[0], view.shape[0],
                        self.length < size and (gone == 0 or self.sink_blocks > 0), self.pool.floats.kept_codes, &unfit[0], NULL)
            for index in range(view.shape[0]):
                if unfit[index]:
                    self.pool.floats.set_kept_codes(view[index], -abs(self.pool.floats.kept_codes[view[index]]))
        return 0

    cdef int advance(self, Py_ssize_t n) except -1:
        """Count tokens as complete, after `prepare`."""
        self.length += n
        self.release_evicted()
        if self.pool.seals:
            self._release_float_rows()
        return 0

    cdef Py_ssize_t skipped_at(self, Py_ssize_t length) noexcept nogil:
        """Number of skipped blocks of a sequence of `length` tokens; see `RingTable`."""
        return self.skipped

    cdef bint just_counts(self, Py_ssize_t n) noexcept nogil:
        """Whether `advance` seals no block and releases none."""
        cdef Py_ssize_t size = self.pool.block_size, length = self.length + n
        return not self.pool.seals or length // size == self.length // size and self.floats_begin_at(length) <= self.floats_begin

    cdef void count_tokens(self, Py_ssize_t n) noexcept nogil:
        """`advance` when it just counts."""
        self.length += n

    cdef int release_evicted(self) except -1:
        """Release the blocks that a sequence of this length does not need any more; see `RingTable`."""
        return 0

    cdef Py_ssize_t floats_begin_at(self, Py_ssize_t length) noexcept nogil:
        """Number of first tokens of a sequence of `length` tokens that need no float rows."""
        cdef Py_ssize_t end = length - self.pool.open_tokens
        return end // self.pool.block_size * self.pool.block_size if end > 0 else 0

    cdef int _release_float_rows(self) except -1:
        """Release the float rows that no query reads any more."""
        cdef Py_ssize_t size = self.pool.block_size, index, floats_begin
        cdef Py_ssize_t gone = self.sink_blocks + self.skipped if self.skipped else 0
        cdef int32_t block
        floats_begin = max(self.floats_begin, self.floats_begin_at(self.length), gone * size)
        for index in range(self.floats_begin // size, floats_begin // size):
            if gone > index >= self.sink_blocks:
                continue
            block = <int32_t>(self.slot(index * size) // size)
            # A fork or a snapshot may still read them. Then they are released with the block.
            if self.pool.owners[block] == 1:
                self.pool.floats.release_sealed(block, 1 if index == 0 and self.pool.has_sinks else 0)
        if floats_begin > self.floats_begin:
            self.floats_begin = floats_begin
            # The float rows of the newest tokens of a prompt lie after all that were released.
            for index in range(floats_begin // size, (self.length + size - 1) // size):
                self.pool.floats.move_down(<int32_t>(self.slot(index * size) // size))
            self.pool.floats.pieces.trim()
        return 0

    cdef int settle(self) except -1:
        """Let queries read full blocks by their codes alone, as no more tokens follow."""
        cdef Py_ssize_t size = self.pool.block_size, index
        cdef int32_t block
        if not self.pool.seals:
            return 0
        for index in range(self.floats_begin // size, self.length // size):
            block = <int32_t>(self.slot(index * size) // size)
            if self.pool.owners[block] == 1:
                self.pool.floats.release_sealed(block, 1 if index == 0 and self.pool.has_sinks else 0)
        self.floats_begin = max(self.floats_begin, self.length // size * size)
        return 0

    cdef void set_kept_codes(self, Py_ssize_t kept_codes) noexcept:
        """Take over `_kept_codes`."""
        if kept_codes:
            self.pool.floats.kept_codes[self.slot(self.floats_begin) // self.pool.block_size] = <int16_t>kept_codes

    cdef list pieces(self, Py_ssize_t longest):
        """First positions of the pieces of float rows that a sequence of `longest` tokens reads, or will read."""
        first = [0] if self.pool.has_sinks and longest > 0 and (self.skipped == 0 or self.sink_blocks) else []
        if not self.pool.seals:
            return first
        size, pieces = self.pool.block_size, first
        for index, kept_codes in self.patches(longest):
            if index * size >= self.floats_begin:
                continue
            begin = max(index * size + kept_codes // KV_PIECE * KV_PIECE, KV_PIECE * len(first))
            pieces = pieces + list(range(begin, min((index + 1) * size, longest), KV_PIECE))
        begin = self.floats_begin // KV_PIECE * KV_PIECE if self.floats_begin < longest else longest
        return pieces + list(range(max(begin, KV_PIECE * len(first)), longest, KV_PIECE))

    cdef list patches(self, Py_ssize_t longest):
        """Patched blocks, see `kv_store`: the index of each, and the number of its tokens that have codes. Queries still read all
        tokens from `floats_begin` on as float rows."""
        cdef Py_ssize_t size = self.pool.block_size, index, kept_codes
        cdef Py_ssize_t gone = self.sink_blocks + self.skipped if self.skipped else 0
        if not self.pool.seals:
            return []
        if self.count == 0:
            return self.patched or []
        patches = []
        for index in range(max((self.floats_begin + size - 1) // size, self.length // size) if self.pool.floats.num_patched else 0):
            if index >= gone or index < self.sink_blocks:
                kept_codes = -self.pool.floats.kept_codes[self.slot(index * size) // size]
                if kept_codes > 0 and index * size + kept_codes < longest:
                    patches.append((index, kept_codes))
        return patches

    cdef int set_patches(self, list patches) except -1:
        """Take over `patches`."""
        for index, kept_codes in patches:
            self.pool.floats.set_kept_codes(<int32_t>(self.slot(index * self.pool.block_size) // self.pool.block_size), -kept_codes)
        return 0

    cdef dict resume_state(self):
        """What a file stores of a table besides its blocks, for `set_resume_state`."""
        floats_begin = {"floats_begin": self.floats_begin, "kept_codes": self._kept_codes()} if self.pool.seals else {}
        patches = [list(patch) for patch in self.patches(self.length)]
        return {"skipped_blocks": self.skipped} | floats_begin | ({"patches": patches} if patches else {})

    cdef int set_resume_state(self, Py_ssize_t length, dict state) except -1:
        """Become a sequence of `length` tokens, after `check_resume_state`. The caller takes its blocks."""
        cdef Py_ssize_t i
        self.skipped, self.length, self.floats_begin = state["skipped_blocks"], length, state.get("floats_begin", 0)
        for i in range(self.pool.num_layers):
            self.lengths[i] = length
        return 0

    cdef Py_ssize_t check_resume_state(self, Py_ssize_t length, dict state) except -1:
        """Number of blocks of a sequence of `length` tokens; ValueError if `state` is invalid."""
        if self._check_codes(length, state) != {"skipped_blocks": 0}:
            raise ValueError(f"the state of a cache that keeps everything must have no dropped blocks, got {shown(state)}")
        return (length + self.pool.block_size - 1) // self.pool.block_size

    cdef dict _check_codes(self, Py_ssize_t length, dict state):
        """Check the entries of `state` about sealed blocks; returns the other entries."""
        cdef Py_ssize_t floats_begin, kept_codes
        if not self.pool.seals:
            return state
        # Tokens that no query reads as floats have no float rows. So few tokens have them, however long the file claims to be.
        floats_begin = check_count(state.get("floats_begin"), "floats_begin", self.floats_begin_at(length), length)
        if floats_begin != length and floats_begin % self.pool.block_size:
            raise ValueError(f"floats_begin must be all {length} tokens or a multiple of the block size {self.pool.block_size}, "
                             f"got {floats_begin}")
        kept_codes = min(length - floats_begin, self.pool.block_size)
        check_count(state.get("kept_codes"), "kept_codes", 0, kept_codes)
        self._check_patches(floats_begin, length, state.get("patches", []))
        return {name: value for name, value in state.items() if name not in ("floats_begin", "kept_codes", "patches")}

    def _check_patches(self, Py_ssize_t floats_begin, Py_ssize_t length, patches):
        """Check that each patch is in a block of its own, which is full or below the coded tokens."""
        cdef Py_ssize_t size = self.pool.block_size, last = -1, blocks = max((floats_begin + size - 1) // size, length // size)
        for index, kept_codes in patches:
            index = check_count(index, "the block of a patch", last + 1, max(last + 1, blocks - 1))
            kept_codes = check_count(kept_codes, "the coded tokens of a patched block", 1, size - 1)
            if index >= blocks or index * size < floats_begin <= index * size + kept_codes:
                raise ValueError(f"a patch must be in a full block or below the {floats_begin} coded tokens, got one after "
                                 f"{kept_codes} tokens of block {index}")
            last = index
