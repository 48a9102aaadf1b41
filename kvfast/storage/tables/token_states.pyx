# cython: language_level=3, boundscheck=False, cdivision=True
"""Which tokens of a sequence have codes, which have float rows, and which have both."""
from libc.stdint cimport int16_t, int32_t
from libc.stdlib cimport abs

from kvfast.core.checks cimport check_count
from kvfast.core.limits cimport KV_PIECE
from kvfast.storage.tables.block_map cimport BlockMap


cdef class TokenStates:
    """The life of a sequence's tokens: float rows in an open block, then codes in a sealed one, which may be cut and opened again."""

    def __cinit__(self, BlockMap map):
        self.map, self.pool = map, map.pool

    cdef Py_ssize_t codes_end(self, Py_ssize_t length) noexcept nogil:
        """If blocks are sealed, number of first tokens with codes."""
        return max(self.floats_begin, length // self.pool.block_size * self.pool.block_size)

    cdef Py_ssize_t kept_codes_of_cut(self, Py_ssize_t longest) noexcept nogil:
        """Number of tokens from `floats_begin` on, in a block that was cut, whose old codes are used again when it fills up."""
        if not self.pool.seals or self.floats_begin % self.pool.block_size or self.floats_begin >= longest:
            return 0
        if self.map.count == 0:
            return self.kept_codes
        return min(abs(self.pool.floats.kept_codes[self.map.block(self.floats_begin // self.pool.block_size)]),
                   longest - self.floats_begin)

    cdef Py_ssize_t slots_with_codes(self, Py_ssize_t length, Py_ssize_t longest) noexcept nogil:
        """If blocks are sealed, number of slots in use that have codes."""
        return (max(self.codes_end(length), self.floats_begin + self.kept_codes_of_cut(longest))
                - self.map.skipped * self.pool.block_size)

    cdef bint is_cut(self, Py_ssize_t index) noexcept nogil:
        """Whether this is a sealed block that was cut, which must be opened again before others can follow."""
        return self.pool.seals and self.floats_begin % self.pool.block_size and index == self.floats_begin // self.pool.block_size

    cdef Py_ssize_t floats_begin_at(self, Py_ssize_t length) noexcept nogil:
        """Number of first tokens of a sequence of `length` tokens that need no float rows."""
        cdef Py_ssize_t end = length - self.pool.open_tokens
        return end // self.pool.block_size * self.pool.block_size if end > 0 else 0

    cdef bint just_counts(self, Py_ssize_t length, Py_ssize_t n) noexcept nogil:
        """Whether `n` more tokens seal no block and release none."""
        cdef Py_ssize_t size = self.pool.block_size
        return not self.pool.seals or (length + n) // size == length // size and self.floats_begin_at(length + n) <= self.floats_begin

    cdef int seal(self, Py_ssize_t length, Py_ssize_t n, Py_ssize_t gone) except -1:
        """Seal the blocks that become full by `n` more tokens. Those between the sinks and block `gone` are dropped at once. The codes
        are not read before the tokens are counted."""
        cdef Py_ssize_t size = self.pool.block_size, index, sinks = self.map.sink_blocks
        full = [self.map.block(index) for index in range(length // size, (length + n) // size) if index >= gone or index < sinks]
        if full:
            self.pool.floats.seal(full, length < size and (gone == 0 or sinks > 0), NULL)
        return 0

    cdef int release_float_rows(self, Py_ssize_t length) except -1:
        """Release the float rows that no query reads any more."""
        cdef Py_ssize_t size = self.pool.block_size, index, gone = self.map.gap_end()
        cdef Py_ssize_t floats_begin = max(self.floats_begin, self.floats_begin_at(length), gone * size)
        self._release(self.floats_begin // size, floats_begin // size)
        if floats_begin > self.floats_begin:
            self.floats_begin = floats_begin
            # The float rows of the newest tokens of a prompt lie after all that were released.
            for index in range(floats_begin // size, (length + size - 1) // size):
                self.pool.floats.move_down(self.map.block(index))
            self.pool.floats.pieces.trim()
        return 0

    cdef int settle(self, Py_ssize_t length) except -1:
        """Let queries read full blocks by their codes alone, as no more tokens follow."""
        cdef Py_ssize_t size = self.pool.block_size
        if self.pool.seals:
            self._release(self.floats_begin // size, length // size)
            self.floats_begin = max(self.floats_begin, length // size * size)
        return 0

    cdef int _release(self, Py_ssize_t first, Py_ssize_t last) except -1:
        """Release the float rows of sealed blocks. A fork or a snapshot may still read them. Then they are released with the block."""
        cdef Py_ssize_t index
        for index in range(first, last):
            if self.map.keeps(index) and self.pool.owners[self.map.block(index)] == 1:
                self.pool.floats.release_sealed(self.map.block(index), index == 0)
        return 0

    cdef int reopen(self) except -1:
        """Give the tokens of a sealed block that was cut float rows again, so that others can follow."""
        cdef Py_ssize_t size = self.pool.block_size, index = self.floats_begin // size
        self.pool.floats.restore(self.map.block(index), index, self.floats_begin % size)
        self.floats_begin = index * size
        return 0

    cdef int cut(self, Py_ssize_t length) except -1:
        """The sequence was cut to `length` tokens. If these are all that a block had before it was opened again, its codes are read,
        whoever shares its float rows."""
        cdef Py_ssize_t size = self.pool.block_size, begin = length // size * size
        cdef int32_t block
        self.floats_begin = min(self.floats_begin, length)
        if not self.pool.seals or self.floats_begin != begin or begin == length:
            return 0
        block = self.map.block(begin // size)
        if self.pool.floats.kept_codes[block] >= length - begin:
            if self.pool.owners[block] == 1:
                self.pool.floats.release(block, 1 if begin == 0 and self.pool.has_sinks else 0)
                self.pool.floats.set_kept_codes(block, 0)
            self.floats_begin = length
        return 0

    cdef void set_kept_codes(self, Py_ssize_t kept_codes) noexcept:
        """Take over `kept_codes_of_cut`."""
        if kept_codes:
            self.pool.floats.kept_codes[self.map.block(self.floats_begin // self.pool.block_size)] = <int16_t>kept_codes

    cdef list pieces(self, Py_ssize_t length, Py_ssize_t longest):
        """First positions of the pieces of float rows that the sequence reads, or will read."""
        first = [0] if self.pool.has_sinks and longest > 0 and (self.map.skipped == 0 or self.map.sink_blocks) else []
        if not self.pool.seals:
            return first
        size, pieces = self.pool.block_size, first
        for index, kept_codes in self.patches(length, longest):
            if index * size >= self.floats_begin:
                continue
            begin = max(index * size + kept_codes // KV_PIECE * KV_PIECE, KV_PIECE * len(first))
            pieces = pieces + list(range(begin, min((index + 1) * size, longest), KV_PIECE))
        begin = self.floats_begin // KV_PIECE * KV_PIECE if self.floats_begin < longest else longest
        return pieces + list(range(max(begin, KV_PIECE * len(first)), longest, KV_PIECE))

    cdef list patches(self, Py_ssize_t length, Py_ssize_t longest):
        """Patched blocks, see `kv_layout`: the index of each, and the number of its tokens that have codes. Queries still read all
        tokens from `floats_begin` on as float rows."""
        cdef Py_ssize_t size = self.pool.block_size, index, kept_codes
        if not self.pool.seals:
            return []
        if self.map.count == 0:
            return self.patched or []
        patches = []
        for index in range(max((self.floats_begin + size - 1) // size, length // size) if self.pool.floats.num_patched else 0):
            if self.map.keeps(index):
                kept_codes = -self.pool.floats.kept_codes[self.map.block(index)]
                if kept_codes > 0 and index * size + kept_codes < longest:
                    patches.append((index, kept_codes))
        return patches

    cdef int set_patches(self, list patches) except -1:
        """Take over `patches`."""
        for index, kept_codes in patches:
            self.pool.floats.set_kept_codes(self.map.block(index), -kept_codes)
        return 0

    cdef dict saved(self, Py_ssize_t length, Py_ssize_t longest):
        """What a file stores of the states."""
        if not self.pool.seals:
            return {}
        patches = [list(patch) for patch in self.patches(length, longest)]
        codes = {"floats_begin": self.floats_begin, "kept_codes": self.kept_codes_of_cut(longest)}
        return codes | ({"patches": patches} if patches else {})

    cdef dict check_saved(self, Py_ssize_t length, dict state):
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
