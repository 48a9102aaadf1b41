# cython: language_level=3, boundscheck=False, cdivision=True
"""Block tables: which tokens of a sequence each layer has, and in which state, in the blocks that a map tells."""
cimport cython
import numpy as np

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.stdlib cimport abs, calloc, free
from libc.string cimport memcpy

from kvfast.codec.blocks cimport kv_context, kv_store
from kvfast.core.limits cimport KV_OPEN_TOKENS, KV_PIECE
from kvfast.codec.decode cimport decode_tokens
from kvfast.codec.encode cimport check_rows, kv_rotary, write_rows
from kvfast.codec.seal cimport seal_blocks
from kvfast.core.arrays cimport Rows
from kvfast.core.checks cimport check_count
from kvfast.storage.block_map cimport BlockMap, entry_of
from kvfast.storage.pool cimport BlockPool

from kvfast.core.interchange import aligned


cdef class BlockTable(BlockMap):
    """The tokens of one sequence. It never forgets; see `RingTable` for one that does."""

    def __cinit__(self, BlockPool pool, *args):
        self.lengths = <Py_ssize_t *>calloc(pool.num_layers, sizeof(Py_ssize_t))
        if self.lengths == NULL:
            raise MemoryError("cannot allocate the lengths of a sequence")

    def __dealloc__(self):
        free(self.lengths)

    cdef void context(self, Py_ssize_t layer, kv_context *context) noexcept nogil:
        context.table = self.blocks
        context.length = self.lengths[layer]
        context.sink_blocks = self.sink_blocks
        context.skipped = self.skipped
        context.floats_begin, context.codes_end = self.floats_begin, self.codes_end()

    cdef Py_ssize_t codes_end(self) noexcept nogil:
        """Tokens whose blocks are encoded, where blocks are sealed."""
        return max(self.floats_begin, self.length // self.pool.block_size * self.pool.block_size)

    cdef Py_ssize_t num_positions(self) noexcept nogil:
        return self.num_slots() + self.skipped * self.pool.block_size

    cdef Py_ssize_t _kept_codes(self) noexcept nogil:
        """Tokens behind the coded ones whose block was cut: they have codes as well, which stay when it is full again."""
        cdef Py_ssize_t longest = self.num_positions()
        if not self.pool.seals or self.floats_begin % self.pool.block_size or self.floats_begin >= longest:
            return 0
        if self.count == 0:
            return self.kept_codes
        return min(abs(self.pool.floats.kept_codes[self.slot(self.floats_begin) // self.pool.block_size]), longest - self.floats_begin)

    cdef Py_ssize_t slots_with_codes(self) noexcept nogil:
        """Of the blocks in use, where blocks are sealed."""
        return max(self.codes_end(), self.floats_begin + self._kept_codes()) - self.skipped * self.pool.block_size

    cdef bint is_writable(self, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
        """Whether `make_writable` has nothing to do."""
        cdef Py_ssize_t size = self.pool.block_size, end = (last + size - 1) // size, index
        cdef int32_t block
        # What a pool knows by its tokens only Python can tell.
        if end > self.count + self.skipped or self.pool.index is not None or self.pool.seals and self.floats_begin % size:
            return False
        for index in range(first // size, end):
            block = self.blocks[entry_of(self, index)]
            if self.pool.owners[block] > 1:
                return False
            if self.pool.floats is not None and not self.pool.floats.is_open(block, index, first - index * size, last - index * size):
                return False
        return True

    cdef Py_ssize_t floats_needed(self, Py_ssize_t first, Py_ssize_t last) noexcept:
        """Pieces of float rows that `make_writable` takes."""
        cdef Py_ssize_t needed = 0, size = self.pool.block_size, index, at, begin
        cdef int32_t block, source
        if self.pool.floats is None:
            return 0
        for index in range(first // size, (last + size - 1) // size):
            at = entry_of(self, index)
            block = self.blocks[at] if at < self.count else -1
            source = -1
            if block >= 0 and self.pool.is_frozen(block):
                block, source = -1, block
            begin = first - index * size
            if self.floats_begin % size and index == self.floats_begin // size:
                begin = 0  # see `_reopen_block`
            needed += self.pool.floats.needed(block, source, index, begin, last - index * size)
        return needed

    cdef int make_writable(self, Py_ssize_t first, Py_ssize_t last) except -1:
        """Give the positions first to last blocks of their own; those shared with others are copied."""
        cdef Py_ssize_t index, at, size = self.pool.block_size, end = (last + size - 1) // size, needed
        cdef int32_t block
        # First all that can fail. Blocks and float rows come at once, because large pieces of memory lie in huge pages.
        self.reserve_blocks(last)
        self.ensure(self.blocks_needed(first, last))
        needed = self.floats_needed(first, last)
        if needed:
            self.pool.floats.pieces.ensure_apart(needed)
        for index in range(first // self.pool.block_size, end):
            at = entry_of(self, index)
            if at >= self.count:
                self.blocks[at] = self.pool.take(self.blocks[at - 1] if at else -1)
                self.count += 1
            elif self.pool.is_frozen(self.blocks[at]):
                block = self.pool.take(self.blocks[at - 1] if at else -1)
                self.pool.copy_block(self.blocks[at], block)
                self.pool.release(self.blocks[at])
                self.blocks[at] = block
                if self.pool.secure:
                    self._wipe_behind(index)
            if self.pool.seals and self.floats_begin % size and index == self.floats_begin // size:
                self._reopen_block()
            if self.pool.floats is not None:
                self.pool.floats.open(self.blocks[at], index, first - index * size, last - index * size)
        return 0

    cdef int16_t _kept_codes_of_cut(self) noexcept nogil:
        """What FloatRows keeps of a sealed block that was cut, or 0 where none is."""
        if not self.pool.seals or self.floats_begin % self.pool.block_size == 0:
            return 0
        return self.pool.floats.kept_codes[self.slot(self.floats_begin - 1) // self.pool.block_size]

    cdef int _reopen_block(self) except -1:
        """Give the tokens of a sealed block that was cut float rows again, for others to follow."""
        cdef Py_ssize_t size = self.pool.block_size, index = self.floats_begin // size
        self.pool.floats.restore(<int32_t>(self.slot(index * size) // size), index, self.floats_begin % size)
        self.floats_begin = index * size
        return 0

    cdef int _undo_reopening(self) except -1:
        """A cut block whose new tokens are all gone again is read as its codes, as before they came."""
        cdef Py_ssize_t size = self.pool.block_size, begin = self.length // size * size
        cdef int32_t block
        if self.floats_begin != begin or begin == self.length:
            return 0
        block = <int32_t>(self.slot(begin) // size)
        if self.pool.owners[block] == 1 and self.pool.floats.kept_codes[block] >= self.length - begin:
            self.pool.floats.release(block, 1 if begin == 0 and self.pool.has_sinks else 0)
            self.pool.floats.set_kept_codes(block, 0)
            self.floats_begin = self.length
        return 0

    cdef int append(self, Py_ssize_t layer, Rows k, Rows v, const kv_rotary *rotary) except -1:
        """Write tokens behind those of a layer. A value that cannot be stored leaves the table as it was."""
        cdef kv_store *store = self.pool.stores + layer
        cdef Py_ssize_t first = self.lengths[layer], i, n = k.rows.tokens, floats_begin = self.floats_begin, count = self.count
        cdef int16_t kept_codes = self._kept_codes_of_cut()
        cdef int64_t[::1] view
        cdef int64_t slot
        check_rows(store, k, v)
        if n > 1:
            view = np.empty(n, np.int64)
        self.make_writable(first, first + n)
        try:
            if n == 1:
                slot = self.slot(first)
                write_rows(store, k, v, rotary, &slot, True, True)
            else:
                for i in range(n):
                    view[i] = self.slot(first + i)
                write_rows(store, k, v, rotary, &view[0], True, True)
        except BaseException:
            self.floats_begin = floats_begin  # a block that was cut is still what its codes tell, and the float rows of a patch
            if kept_codes < 0:
                self.pool.floats.set_kept_codes(<int32_t>(self.slot(floats_begin - 1) // self.pool.block_size), kept_codes)
            self.release_from(count)
            raise
        self.lengths[layer] += n
        return 0

    cdef int prepare(self, Py_ssize_t n) except -1:
        """What of `advance` can fail: encode the blocks that become full. Nobody reads their codes before."""
        cdef Py_ssize_t size = self.pool.block_size, skipped = self.skipped, index, gone
        cdef int32_t[::1] view
        cdef uint8_t[::1] unfit
        if not self.pool.seals:
            return 0
        if self.pool.index is None:  # else also those that go at once may be found by their tokens
            skipped = self.skipped_at(self.length + n)
        gone = self.sink_blocks + skipped if skipped else 0
        full = [self.slot(index * size) // size for index in range(self.length // size, (self.length + n) // size)
                if index >= gone or index < self.sink_blocks]
        if full:
            view = np.array(full, np.int32)
            unfit = np.zeros(len(full), np.uint8)
            seal_blocks(self.pool.stores, self.pool.num_layers, &view[0], view.shape[0],
                        self.length < size and (gone == 0 or self.sink_blocks > 0), self.pool.floats.kept_codes, &unfit[0])
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
        """Blocks that are skipped once a sequence has `length` tokens; see `RingTable`."""
        return self.skipped

    cdef bint just_counts(self, Py_ssize_t n) noexcept nogil:
        """Whether `advance` encodes no block and gives none back."""
        cdef Py_ssize_t size = self.pool.block_size, length = self.length + n
        return not self.pool.seals or length // size == self.length // size and self._floats_begin_at(length) <= self.floats_begin

    cdef void count_tokens(self, Py_ssize_t n) noexcept nogil:
        """`advance` where it just counts."""
        self.length += n

    cdef int release_evicted(self) except -1:
        """Give back what a sequence of this length needs no more; see `RingTable`."""
        return 0

    cdef Py_ssize_t _floats_begin_at(self, Py_ssize_t length) noexcept nogil:
        """First tokens that a sequence of `length` needs no float rows of."""
        return (length - KV_OPEN_TOKENS) // self.pool.block_size * self.pool.block_size if length > KV_OPEN_TOKENS else 0

    cdef int _release_float_rows(self) except -1:
        """Give back the float rows that no query reads any more."""
        cdef Py_ssize_t size = self.pool.block_size, index, floats_begin
        cdef Py_ssize_t gone = self.sink_blocks + self.skipped if self.skipped else 0
        cdef int32_t block
        floats_begin = max(self.floats_begin, self._floats_begin_at(self.length), gone * size)
        for index in range(self.floats_begin // size, floats_begin // size):
            if gone > index >= self.sink_blocks:
                continue
            block = <int32_t>(self.slot(index * size) // size)
            # A fork or a snapshot may still read them; they go with the block then.
            if self.pool.owners[block] == 1:
                self.pool.floats.release_sealed(block, 1 if index == 0 and self.pool.has_sinks else 0)
        if floats_begin > self.floats_begin:
            self.floats_begin = floats_begin
            # What the newest tokens of a prompt have lies behind all that went.
            for index in range(floats_begin // size, (self.length + size - 1) // size):
                self.pool.floats.move_down(<int32_t>(self.slot(index * size) // size))
            self.pool.floats.pieces.trim()
        return 0

    cdef Py_ssize_t oldest(self, Py_ssize_t length) noexcept nogil:
        """First position outside the sinks that a sequence of `length` tokens holds; see `RingTable`."""
        return 0

    cdef bint limit(self, Py_ssize_t *window, Py_ssize_t *num_sink_tokens) noexcept nogil:
        """Fit a window, 0 for none, and a number of sinks, -1 for any, to what the table keeps; False if that is less."""
        return True

    cdef bint holds(self, Py_ssize_t position) noexcept nogil:
        """Whether all positions from this one on are still there."""
        return True

    cdef int check_truncate(self, Py_ssize_t n) except -1:
        """Raise if the first n tokens cannot be brought back."""
        return 0

    cdef int truncate(self, Py_ssize_t n) except -1:
        """Keep the first n tokens, after `check_truncate`."""
        cdef Py_ssize_t count = (n + self.pool.block_size - 1) // self.pool.block_size, i
        if count <= self.sink_blocks:
            count += self.skipped
        count -= self.skipped
        self.release_from(count)
        if count <= self.sink_blocks:
            self.skipped = 0
        self.length = n
        self.floats_begin = min(self.floats_begin, n)
        for i in range(self.pool.num_layers):
            self.lengths[i] = min(self.lengths[i], n)
        if self.pool.seals:
            self._undo_reopening()
        if self.pool.secure and n % self.pool.block_size:
            self._wipe_behind(n // self.pool.block_size)
        return 0

    cdef int _wipe_behind(self, Py_ssize_t index) except -1:
        """Overwrite what a block of a secure pool holds behind the tokens of each layer, unless others read it."""
        cdef Py_ssize_t at = entry_of(self, index), i, size = self.pool.block_size
        if at >= self.count or self.pool.is_frozen(self.blocks[at]):
            return 0
        for i in range(self.pool.num_layers):
            self.pool.wipe_from(self.blocks[at], i, max(<Py_ssize_t>0, min(self.lengths[i] - index * size, size)))
        return 0

    cdef BlockTable empty(self, BlockPool pool):
        """A table of the same kind for another pool."""
        return BlockTable(pool)

    cdef int copy_resume_state(self, BlockTable other) except -1:
        """Take over how many tokens there are, and which of them are left, of a sequence of the same kind."""
        self.skipped, self.length, self.floats_begin = self.skipped_of(other), other.length, other.floats_begin
        memcpy(self.lengths, other.lengths, self.pool.num_layers * sizeof(Py_ssize_t))
        return 0

    cdef int share(self, BlockTable other) except -1:
        """Become the equal of another sequence of this pool, with the same blocks."""
        cdef Py_ssize_t i
        self.reserve_list(other.count)
        for i in range(other.count):
            self.spare[i] = other.blocks[i]
            self.pool.retain(other.blocks[i])
        self.release()
        self._use_list(other.count)
        self.count = other.count
        self.copy_resume_state(other)
        return 0

    cdef int reserve(self, Py_ssize_t count, Py_ssize_t pieces) except -1:
        """Make sure that all blocks can be exchanged for `count` others with so many pieces of float rows; else CacheFullError
        or MemoryError, and nothing has changed."""
        cdef Py_ssize_t i, own = 0, own_pieces = 0
        for i in range(self.count):
            if self.pool.owners[self.blocks[i]] == 1:
                own += 1
                if pieces:
                    own_pieces += self.pool.floats.count(self.blocks[i])
        if self.pool.available() + own < count:
            self.pool.ensure(count - own)
        if pieces > own_pieces:
            self.pool.floats.pieces.ensure(pieces - own_pieces)
        self.reserve_list(count)
        return 0

    cdef int start(self, digests) except -1:
        """Let an empty table begin with the blocks that its pool knows by the first of some digests."""
        self.begin_with(self.pool.index.find(digests), 0)
        return 0

    cdef int begin_with(self, list blocks, Py_ssize_t skipped) except -1:
        """Let an empty table have full blocks whose contents are known, where so many of them are skipped."""
        cdef Py_ssize_t i
        self.adopt(blocks)
        self.skipped = skipped
        self.length = self.floats_begin = (self.count + skipped) * self.pool.block_size
        for i in range(self.pool.num_layers):
            self.lengths[i] = self.length
        return 0

    def knowable_block(self, Py_ssize_t index):
        """The full block of an index, or -1 if not all its tokens are there, as codes: whoever finds it reads those."""
        cdef int32_t block
        if not self.holds(index * self.pool.block_size):
            return -1
        block = self.blocks[entry_of(self, index)]
        return -1 if self.pool.is_patched(block) else block

    cdef int open(self, Py_ssize_t count) except -1:
        """Exchange all blocks for `count` others."""
        self.reserve(count, 0)
        self._exchange(count)
        return 0

    cdef int _exchange(self, Py_ssize_t count) except -1:
        """`open`, after `reserve`."""
        self.release()
        self.take_blocks(count)
        return 0

    cdef Py_ssize_t num_slots(self) noexcept nogil:
        """Places of the blocks that are in use."""
        cdef Py_ssize_t longest = 0, i
        for i in range(self.pool.num_layers):
            longest = max(longest, self.lengths[i])
        return longest - self.skipped * self.pool.block_size

    cdef Py_ssize_t skipped_of(self, BlockTable other) noexcept:
        """Blocks that this table skips where it is the equal of another; see `RingTable`."""
        return other.skipped

    cdef Py_ssize_t blocks_of(self, BlockTable other) noexcept:
        """Blocks of this pool that hold what another table holds."""
        return (other.num_positions() + self.pool.block_size - 1) // self.pool.block_size - self.skipped_of(other)

    cdef list pieces_of(self, BlockTable other):
        """`pieces` of this table where it is the equal of another; see `RingTable`."""
        return other.pieces(other.num_positions())

    cdef void set_kept_codes(self, Py_ssize_t kept_codes) noexcept:
        """Take over `_kept_codes`."""
        if kept_codes:
            self.pool.floats.kept_codes[self.slot(self.floats_begin) // self.pool.block_size] = <int16_t>kept_codes

    cdef list pieces(self, Py_ssize_t longest):
        """First positions of the pieces of float rows that a sequence of `longest` tokens reads, or will."""
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
        """Sealed blocks that are patched, see `kv_store`: the index of each, and how many of its tokens have codes. Queries read
        those from `floats_begin` on as float rows still, in full."""
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
        """What a file tells of a table besides its blocks, for `set_resume_state`."""
        floats_begin = {"coded_tokens": self.floats_begin, "kept_tokens": self._kept_codes()} if self.pool.seals else {}
        patches = [list(patch) for patch in self.patches(self.length)]
        return {"skipped_blocks": self.skipped} | floats_begin | ({"patches": patches} if patches else {})

    cdef int set_resume_state(self, Py_ssize_t length, dict state) except -1:
        """Be a sequence of `length` tokens, after `check_resume_state`; its blocks are the caller's."""
        cdef Py_ssize_t i
        self.skipped, self.length, self.floats_begin = state["skipped_blocks"], length, state.get("coded_tokens", 0)
        for i in range(self.pool.num_layers):
            self.lengths[i] = length
        return 0

    cdef Py_ssize_t check_resume_state(self, Py_ssize_t length, dict state) except -1:
        """Number of blocks of a sequence of `length` tokens; ValueError if `state` cannot be."""
        if self._check_codes(length, state) != {"skipped_blocks": 0}:
            raise ValueError(f"a cache that keeps everything cannot be {state}")
        return (length + self.pool.block_size - 1) // self.pool.block_size

    cdef dict _check_codes(self, Py_ssize_t length, dict state):
        """The other entries of `state`, after a check of what it tells of sealed blocks."""
        cdef Py_ssize_t floats_begin, kept_codes
        if not self.pool.seals:
            return state
        # What no query reads as floats any more has none; and however long a file says it is, few tokens have.
        floats_begin = check_count(state.get("coded_tokens"), "coded_tokens", self._floats_begin_at(length), length)
        if floats_begin != length and floats_begin % self.pool.block_size:
            raise ValueError(f"of {length} tokens the first {floats_begin} cannot be coded alone: blocks have {self.pool.block_size}")
        kept_codes = min(length - floats_begin, self.pool.block_size)
        check_count(state.get("kept_tokens"), "kept_tokens", 0, kept_codes)
        self._check_patches(floats_begin, length, state.get("patches", []))
        return {name: value for name, value in state.items() if name not in ("coded_tokens", "kept_tokens", "patches")}

    def _check_patches(self, Py_ssize_t floats_begin, Py_ssize_t length, patches):
        """Each in a block of its own: one that is full, or below the coded tokens."""
        cdef Py_ssize_t size = self.pool.block_size, last = -1, blocks = max((floats_begin + size - 1) // size, length // size)
        for index, kept_codes in patches:
            index = check_count(index, "the block of a patch", last + 1, max(last + 1, blocks - 1))
            kept_codes = check_count(kept_codes, "the coded tokens of a patched block", 1, size - 1)
            if index >= blocks or index * size < floats_begin <= index * size + kept_codes:
                raise ValueError(f"a patch behind {kept_codes} tokens of block {index} cannot be among {floats_begin} coded tokens")
            last = index

    @property
    def nbytes_alone(self):
        """Bytes that this table keeps from being freed: its own, and blocks without another owner."""
        cdef Py_ssize_t i
        with cython.critical_section(self.pool):
            alone = [self.blocks[i] for i in range(self.count) if self.pool.owners[self.blocks[i]] == 1]
        return self.pool.bytes_of_blocks(alone) + self.capacity * sizeof(int32_t) + self.pool.num_layers * sizeof(Py_ssize_t)

    cdef int release(self) except -1:
        """Give all blocks back."""
        self.truncate(0)
        return 0

    cdef object rows(self, Py_ssize_t layer, object positions, bint values):
        """Keys or values at some positions, decoded to float32."""
        cdef const int64_t[::1] at = aligned(positions, np.int64)
        cdef int64_t[::1] slots = np.empty(at.shape[0], np.int64)
        cdef Py_ssize_t i
        for i in range(at.shape[0]):
            slots[i] = self.slot(at[i])
        return decode_tokens(self.pool.stores + layer, at, slots, self.floats_begin, values)

    cdef int close(self) except -1:
        """Give all blocks back, for good."""
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
