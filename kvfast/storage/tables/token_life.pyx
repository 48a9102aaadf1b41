# cython: language_level=3, boundscheck=False, cdivision=True
"""Which tokens of a sequence have codes, which have float rows, and which have both."""
from libc.stdint cimport int32_t
from libc.stdlib cimport abs, calloc, free
from libc.string cimport memcpy

from kvfast.codec.blocks cimport coded_at
from kvfast.core.checks cimport check_count
from kvfast.core.limits cimport KV_PIECE, KV_UNLIMITED
from kvfast.storage.tables.block_map cimport BlockMap


cdef class TokenLife:
    """From which token on the layers of a sequence read float rows; see `FloatRows` for the life of a block."""

    def __cinit__(self, BlockMap map):
        self.map, self.pool = map, map.pool
        self.begins = <Py_ssize_t *>calloc(self.pool.num_layers, sizeof(Py_ssize_t))
        if self.begins == NULL:
            raise MemoryError("cannot allocate the life of a sequence's tokens")

    def __dealloc__(self):
        free(self.begins)

    cdef void _sum_up(self) noexcept nogil:
        cdef Py_ssize_t i
        self.floats_begin, self.cut_end = KV_UNLIMITED if self.pool.keeps_newest else 0, 0
        for i in range(self.pool.num_layers):
            if self.pool.layouts[i].open_tokens:
                self.floats_begin = min(self.floats_begin, self.begins[i])
            if self.pool.layouts[i].seals:
                self.cut_end = max(self.cut_end, self.begins[i])

    cdef Py_ssize_t longest(self) noexcept nogil:
        """Tokens of the longest layer."""
        cdef Py_ssize_t longest = 0, i
        for i in range(self.pool.num_layers):
            longest = max(longest, self.lengths[i])
        return longest

    cdef Py_ssize_t _coded_at(self, Py_ssize_t layer, Py_ssize_t length) noexcept nogil:
        """Number of first tokens of a sequence of `length` tokens that a layer keeps no float rows of."""
        return coded_at(length, self.pool.layouts[layer].kept_tokens, self.pool.layouts[layer].border)

    cdef Py_ssize_t read_from(self, Py_ssize_t layer, Py_ssize_t length) noexcept nogil:
        """First position that queries at the `length` counted tokens, or after them, may read from its float row."""
        return max(self.begins[layer], coded_at(length, self.pool.layouts[layer].open_tokens, self.pool.layouts[layer].border))

    cdef Py_ssize_t shown_from(self, Py_ssize_t layer, Py_ssize_t length) noexcept nogil:
        """First position that the query of a layer's last token reads from its float row, when `length` tokens are counted."""
        cdef Py_ssize_t last = max(length, self.lengths[layer] - 1)
        if self.pool.layouts[layer].floats_of_steps:  # as `floats_from` of attention/source.pyx
            last = min(last, length + self.pool.layouts[layer].open_tokens)
        return self.read_from(layer, last)

    cdef Py_ssize_t codes_end(self, Py_ssize_t layer) noexcept nogil:
        """If a layer seals blocks, number of its first tokens with codes."""
        return max(self.begins[layer], self.lengths[layer] // self.pool.block_size * self.pool.block_size)

    cdef Py_ssize_t kept_codes_of_cut(self, Py_ssize_t layer) except -1:
        """Number of a layer's tokens from `begins` on, in a block that was cut, whose old codes are used again when it fills up."""
        cdef Py_ssize_t begin = self.begins[layer], longest = self.longest()
        if not self.pool.layouts[layer].seals or begin % self.pool.block_size or begin >= longest:
            return 0
        if self.map.count == 0:
            return self.planned[layer]["kept_codes"]
        return min(abs(self.pool.floats.kept_codes[layer][self.map.block(begin // self.pool.block_size)]), longest - begin)

    cdef Py_ssize_t slots_with_codes(self, Py_ssize_t layer) except -1:
        """Number of slots in use that have codes in a layer."""
        cdef Py_ssize_t end = self.longest()
        if self.pool.layouts[layer].seals:
            end = max(self.codes_end(layer), self.begins[layer] + self.kept_codes_of_cut(layer))
        return end - self.map.skipped * self.pool.block_size

    cdef bint is_cut(self, Py_ssize_t layer, Py_ssize_t index) noexcept nogil:
        """Whether this is a sealed block of a layer, or with -1 of any, that was cut, which must be opened again before others can
        follow."""
        cdef Py_ssize_t end = self.cut_end
        if layer >= 0:
            end = self.begins[layer] if self.pool.layouts[layer].seals else 0
        return end % self.pool.block_size and index == end // self.pool.block_size

    cdef bint just_counts(self, Py_ssize_t length) noexcept nogil:
        """Whether a sequence that has grown to `length` releases no float rows."""
        cdef Py_ssize_t i
        for i in range(self.pool.num_layers if self.pool.keeps_newest else 0):
            if self.pool.layouts[i].open_tokens and self._coded_at(i, length) > self.begins[i]:
                return False
        return True

    cdef bint fills(self, Py_ssize_t layer, Py_ssize_t before, Py_ssize_t after) noexcept nogil:
        """Whether a layer that grows from `before` to `after` tokens has blocks to seal."""
        return self.pool.layouts[layer].seals and before // self.pool.block_size < after // self.pool.block_size

    cdef int seal(self, Py_ssize_t layer, Py_ssize_t before, Py_ssize_t after) except -1:
        """Seal the blocks of a layer that became full when it grew from `before` to `after` tokens, which have been written."""
        cdef Py_ssize_t size = self.pool.block_size, index
        if self.fills(layer, before, after):
            full = [self.map.block(index) for index in range(before // size, after // size)]
            self.pool.floats.seal(layer, full, before < size)
        return 0

    cdef int release_float_rows(self, Py_ssize_t length) except -1:
        """Release the float rows that no query reads any more."""
        cdef Py_ssize_t size = self.pool.block_size, index, i, before = self.floats_begin
        for i in range(self.pool.num_layers):
            if self.pool.layouts[i].open_tokens:
                self.begins[i] = max(self.begins[i], self._coded_at(i, length))
        self.raise_to(self.map.gap_end() * size)
        self._release(before, self.floats_begin)
        if self.floats_begin > before:
            # The float rows of the newest tokens of a prompt lie after all that were released.
            for index in range(self.floats_begin // size, (length + size - 1) // size):
                self.pool.floats.move_down(self.map.block(index))
            self.pool.floats.pieces.trim()
        return 0

    cdef int settle(self, Py_ssize_t length) except -1:
        """Let queries read tokens by their codes alone, as far as they have any, as no more tokens follow."""
        cdef Py_ssize_t before = self.floats_begin, i
        if self.pool.keeps_newest:
            for i in range(self.pool.num_layers):
                if self.pool.layouts[i].open_tokens:
                    self.begins[i] = max(self.begins[i], length & -self.pool.block_size if self.pool.layouts[i].seals else length)
            self._sum_up()
            self._release(before, self.floats_begin)
        return 0

    cdef void raise_to(self, Py_ssize_t position) noexcept nogil:
        """Let the tokens below `position` have codes alone."""
        cdef Py_ssize_t i
        for i in range(self.pool.num_layers):
            if self.pool.layouts[i].open_tokens:
                self.begins[i] = max(self.begins[i], position)
        self._sum_up()

    cdef int _release(self, Py_ssize_t first, Py_ssize_t last) except -1:
        """Release the float rows of the positions first to last, which have codes, in whole pieces. A fork or a snapshot may still read
        them. Then they are released with the block."""
        cdef Py_ssize_t size = self.pool.block_size, index
        for index in range(first // size, (last + size - 1) // size):
            if self.map.keeps(index) and self.pool.owners[self.map.block(index)] == 1:
                self.pool.floats.release_coded(self.map.block(index), index == 0, min(last - index * size, size))
        return 0

    cdef int reopen(self, Py_ssize_t layer) except -1:
        """Give the tokens of the block that was cut float rows again in a layer, or with -1 in all, so that others can follow."""
        cdef Py_ssize_t size = self.pool.block_size, i, index
        for i in range(self.pool.num_layers):
            index = self.begins[i] // size
            if (layer < 0 or i == layer) and self.pool.layouts[i].seals and self.begins[i] % size:
                self.pool.floats.restore(i, self.map.block(index), index, self.begins[i] % size)
                self.begins[i] = index * size
        self._sum_up()
        return 0

    cdef int cut(self, Py_ssize_t length) except -1:
        """The sequence was cut to `length` tokens. If these are all that a layer had in a block before it was opened again, its codes
        are read, whoever shares its float rows."""
        cdef Py_ssize_t size = self.pool.block_size, begin = length // size * size, i
        cdef int32_t block = self.map.block(begin // size) if self.pool.keeps_newest and begin < length else -1
        for i in range(self.pool.num_layers if self.pool.keeps_newest else 0):
            self.begins[i] = min(self.begins[i], length)
            if (block >= 0 and self.pool.layouts[i].seals and self.begins[i] == begin
                    and abs(self.pool.floats.kept_codes[i][block]) >= length - begin):
                self.begins[i] = length
                if self.pool.owners[block] == 1:
                    self.pool.floats.set_kept_codes(i, block, 0)
        self._sum_up()
        if block >= 0 and self.floats_begin == length and self.pool.owners[block] == 1:
            self.pool.floats.release_coded(block, begin == 0, size)
        return 0

    cdef int take(self, const Py_ssize_t *begins) except -1:
        """Take over the `begins` of another table with the same layers."""
        memcpy(self.begins, begins, self.pool.num_layers * sizeof(Py_ssize_t))
        self._sum_up()
        return 0

    cdef list listed(self):
        """`begins`; None for layers that do not keep newest tokens as floats."""
        cdef Py_ssize_t i
        return [self.begins[i] if self.pool.layouts[i].open_tokens else None for i in range(self.pool.num_layers)]

    cdef int set_begins(self, list begins) except -1:
        """Take over `begins`, as `listed`."""
        cdef Py_ssize_t i
        for i in range(self.pool.num_layers):
            self.begins[i] = begins[i] or 0
        self._sum_up()
        return 0

    cdef list pieces(self):
        """First positions of the pieces of float rows that the sequence reads, or will read."""
        cdef Py_ssize_t size = self.pool.block_size, longest = self.longest(), layer
        first = [0] if self.pool.has_sinks and longest > 0 and (self.map.skipped == 0 or self.map.sink_blocks) else []
        if not self.pool.keeps_newest:
            return first
        patched = {}
        for layer in range(self.pool.num_layers):
            for index, kept_codes in self.patches(layer):
                if index * size < self.floats_begin:
                    patched[index] = min(kept_codes, patched.get(index, size))
        pieces = first
        for index in sorted(patched):
            begin = max(index * size + patched[index] // KV_PIECE * KV_PIECE, KV_PIECE * len(first))
            pieces = pieces + list(range(begin, min((index + 1) * size, longest), KV_PIECE))
        begin = self.floats_begin // KV_PIECE * KV_PIECE if self.floats_begin < longest else longest
        return pieces + list(range(max(begin, KV_PIECE * len(first)), longest, KV_PIECE))

    cdef list patches(self, Py_ssize_t layer):
        """Patched blocks of a layer, see `kv_layout`: the index of each, and the number of its tokens that have codes. Queries still
        read all tokens from `begins` on as float rows."""
        cdef Py_ssize_t size = self.pool.block_size, longest = self.longest(), index, kept_codes
        cdef list patches = []
        if self.map.count == 0 and self.planned is not None and self.pool.layouts[layer].seals:
            return self.planned[layer].get("patches", [])
        for index in range((self.codes_end(layer) + size - 1) // size if self.pool.layouts[layer].num_patched else 0):
            if self.map.keeps(index):
                kept_codes = -self.pool.floats.kept_codes[layer][self.map.block(index)]
                if kept_codes > 0 and index * size + kept_codes < longest:
                    patches.append([index, kept_codes])
        return patches

    cdef list layers(self):
        """The state of each layer that keeps newest tokens as floats; None for the others."""
        cdef Py_ssize_t layer
        cdef list patches, layers = [None] * self.pool.num_layers
        for layer in range(self.pool.num_layers):
            if self.pool.layouts[layer].open_tokens:
                patches = self.patches(layer)
                layers[layer] = {"floats_begin": self.begins[layer], "kept_codes": self.kept_codes_of_cut(layer)}
                layers[layer] |= {"patches": patches} if patches else {}
        return layers

    cdef int set_codes(self, list layers) except -1:
        """Take over `layers`, once the blocks are there."""
        cdef Py_ssize_t layer, index, kept_codes
        cdef dict state
        for layer in range(self.pool.num_layers if self.pool.keeps_newest else 0):
            state = layers[layer]
            if state is None:
                continue
            if state["kept_codes"]:
                self.pool.floats.set_kept_codes(layer, self.map.block(self.begins[layer] // self.pool.block_size), state["kept_codes"])
            for index, kept_codes in state.get("patches", ()):
                self.pool.floats.set_kept_codes(layer, self.map.block(index), -kept_codes)
        return 0

    cdef dict saved(self):
        """The fields for a file: one state for all layers, or one for each if they differ."""
        cdef list layers = [state for state in self.layers() if state is not None]
        if not layers:
            return {}
        return layers[0] if layers.count(layers[0]) == len(layers) else {"layers": layers}

    cdef list saved_layers(self, dict state):
        """`layers` of what `saved` returned."""
        cdef Py_ssize_t i
        states = iter(state.get("layers", [state] * self.pool.num_layers))
        return [next(states) if self.pool.layouts[i].open_tokens else None for i in range(self.pool.num_layers)]

    cdef dict check_saved(self, Py_ssize_t length, dict state):
        """Check the entries of `state` about newest tokens and sealed blocks; returns the other entries."""
        cdef Py_ssize_t i, count = 0
        if not self.pool.keeps_newest:
            return state
        for i in range(self.pool.num_layers):
            count += self.pool.layouts[i].open_tokens > 0
        layers = state.get("layers")
        if layers is not None and (len(layers) != count or layers.count(layers[0]) == count):
            raise ValueError(f"layers must be {count} that differ, one for each layer of the table that keeps newest tokens as floats")
        for i, one in enumerate(self.saved_layers(state)):
            if one is not None:
                self._check_layer(i, length, one)
        names = ("layers",) if layers is not None else ("floats_begin", "kept_codes", "patches")
        return {name: value for name, value in state.items() if name not in names}

    def _check_layer(self, Py_ssize_t layer, Py_ssize_t length, dict state):
        cdef Py_ssize_t size = self.pool.block_size, floats_begin, last = -1, blocks
        # Tokens that no query reads as floats have no float rows. So few tokens have them, however long the file claims to be.
        floats_begin = check_count(state.get("floats_begin"), "floats_begin", self._coded_at(layer, length), length)
        if not self.pool.layouts[layer].seals:
            if check_count(state.get("kept_codes"), "kept_codes", 0, 0) or "patches" in state:
                raise ValueError("a layer whose tokens all have codes has no patches")
            return
        if floats_begin != length and floats_begin % size:
            raise ValueError(f"floats_begin must be all {length} tokens or a multiple of the block size {size}, got {floats_begin}")
        check_count(state.get("kept_codes"), "kept_codes", 0, min(length - floats_begin, size))
        # Each patch is in a block of its own, which is full or below the coded tokens.
        blocks = max((floats_begin + size - 1) // size, length // size)
        for index, kept_codes in state.get("patches", []):
            index = check_count(index, "the block of a patch", last + 1, max(last + 1, blocks - 1))
            kept_codes = check_count(kept_codes, "the coded tokens of a patched block", 1, size - 1)
            if index >= blocks or index * size < floats_begin <= index * size + kept_codes:
                raise ValueError(f"a patch must be in a full block or below the {floats_begin} coded tokens, got one after "
                                 f"{kept_codes} tokens of block {index}")
            last = index
