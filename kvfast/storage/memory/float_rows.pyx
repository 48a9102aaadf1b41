# cython: language_level=3, boundscheck=False, cdivision=True
"""Float rows of tokens: which pieces belong to which block, and how a block is sealed from them and opened again."""
import numpy as np

from libc.stdint cimport int16_t, int32_t, uint8_t
from libc.stdlib cimport abs, calloc, free
from libc.string cimport memset

from kvfast.codec.blocks cimport patched_from, side_of
from kvfast.codec.decode cimport restore_floats
from kvfast.codec.seal cimport seal_blocks
from kvfast.core.limits cimport KV_SLAB_BLOCKS, KV_PIECE
from kvfast.storage.memory.block_memory cimport BlockMemory, grown

from kvfast.codec.formats import floats_of


cdef inline void _wanted(FloatRows rows, Py_ssize_t index, Py_ssize_t *first, Py_ssize_t *last) noexcept nogil:
    """The offsets first to last of a sequence's block `index` that need float rows before the given offsets, which may lie
    outside of the block, are written."""
    if rows.keeps_newest:
        first[0], last[0] = max(first[0], <Py_ssize_t>0), min(last[0], <Py_ssize_t>rows.per_block * KV_PIECE)
    else:
        first[0], last[0] = 0, KV_PIECE if index == 0 else 0


cdef class FloatRows:
    """The life of a pool's blocks, and the pieces of their float rows, which are blocks of a BlockMemory of their own.

    If newest tokens are floats, all new tokens get float rows (`open`), and lose them when no query reads them any more
    (`release_coded`). Where blocks are sealed, their tokens have no codes before a block is full (`seal`), and tokens can be appended
    to what is left of it when it has rows again (`restore`). A block is patched if its new tokens do not fit its statistics: these
    keep their rows. `TokenLife` knows which tokens of a sequence are how far, and `SchedulerBlocks` knows it of blocks whose sequences
    it is not told.

    Otherwise only the first tokens of a sequence get float rows, and keep them.
    """

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.num_layers if self.kept_codes != NULL else 0):
            free(self.kept_codes[i])
        free(self.kept_codes)
        free(self.num_kept)
        free(self.float_of)

    cdef int grow(self, Py_ssize_t num_blocks, Py_ssize_t total) except -1:
        """Make room for `total` blocks instead of `num_blocks`. The new ones have no pieces."""
        cdef Py_ssize_t i
        self.float_of = <int32_t *>grown(self.float_of, total * self.per_block * sizeof(int32_t))
        for i in range(self.num_layers):
            self.layouts[i].float_of = self.float_of
        self.num_kept = <int32_t *>grown(self.num_kept, total * sizeof(int32_t))
        memset(self.num_kept + num_blocks, 0, (total - num_blocks) * sizeof(int32_t))
        for i in range(self.num_layers):
            if self.layouts[i].seals:
                self.layouts[i].kept_codes = self.kept_codes[i] = <int16_t *>grown(self.kept_codes[i], total * sizeof(int16_t))
                memset(self.kept_codes[i] + num_blocks, 0, (total - num_blocks) * sizeof(int16_t))
        for i in range(num_blocks * self.per_block, total * self.per_block):
            self.float_of[i] = -1
        return 0

    cdef bint is_open(self, Py_ssize_t layer, int32_t block, Py_ssize_t index, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
        """Whether `open` has nothing to do."""
        cdef Py_ssize_t i
        _wanted(self, index, &first, &last)
        for i in range(self.num_layers if self.num_kept[block] else 0):
            if self.layouts[i].seals and (layer < 0 or i == layer) and not 0 <= self.kept_codes[i][block] <= first:
                return False
        for i in range(first // KV_PIECE, (last + KV_PIECE - 1) // KV_PIECE):
            if self.float_of[block * self.per_block + i] < 0:
                return False
        return True

    cdef Py_ssize_t needed(self, int32_t block, int32_t source, Py_ssize_t index, Py_ssize_t first, Py_ssize_t last) noexcept:
        """Number of pieces to take for a block (-1: not taken yet): those that `open` takes, and those that `source` has, if
        it is not -1."""
        cdef Py_ssize_t count = 0, i
        _wanted(self, index, &first, &last)
        for i in range(self.per_block):
            if (first // KV_PIECE <= i < (last + KV_PIECE - 1) // KV_PIECE
                    or source >= 0 and self.float_of[source * self.per_block + i] >= 0):
                count += block < 0 or self.float_of[block * self.per_block + i] < 0
        return count

    cdef int open(self, Py_ssize_t layer, int32_t block, Py_ssize_t index, Py_ssize_t first, Py_ssize_t last) except -1:
        """Give a sequence's block `index` the float rows that it needs before the offsets first to last are written, in a layer or with
        -1 in all."""
        cdef Py_ssize_t i
        _wanted(self, index, &first, &last)
        self.add(block, first, last)
        for i in range(self.num_layers if self.num_kept[block] else 0):
            if self.layouts[i].seals and (layer < 0 or i == layer):
                self.set_kept_codes(i, block, min(abs(self.kept_codes[i][block]), first))
        return 0

    cdef int restore(self, Py_ssize_t layer, int32_t block, Py_ssize_t index, Py_ssize_t num_tokens) except -1:
        """Give a layer's first `num_tokens` tokens of a sequence's sealed block `index` float rows again, decoded from its codes.

        The codes stay: filled with the same tokens, the block will be the same again. In a patched block some tokens still have
        float rows.
        """
        cdef Py_ssize_t kept = self.kept_codes[layer][block], with_codes = min(num_tokens, -kept if kept < 0 else num_tokens)
        self.add(block, 0, num_tokens)
        restore_floats(self.layouts + layer, block, index == 0, with_codes)
        self.set_kept_codes(layer, block, with_codes)
        return 0

    cdef void set_kept_codes(self, Py_ssize_t layer, int32_t block, Py_ssize_t kept_codes) noexcept:
        """Set the number of a layer's tokens of a block that have valid codes; see `kept_codes`."""
        cdef int16_t *kept = self.kept_codes[layer] + block
        self.layouts[layer].num_patched += (kept_codes < 0) - (kept[0] < 0)
        self.num_kept[block] += (kept_codes != 0) - (kept[0] != 0)
        kept[0] = <int16_t>kept_codes

    cdef list kept_of(self, int32_t block):
        """The layers with kept codes of a block, and `kept_codes` of each."""
        cdef Py_ssize_t i
        return [(i, self.kept_codes[i][block]) for i in range(self.num_layers if self.num_kept[block] else 0)
                if self.layouts[i].seals and self.kept_codes[i][block]]

    cdef int set_kept(self, int32_t block, list kept) except -1:
        """Let a block have the kept codes of `kept_of`, and no others."""
        self._keep_as(-1, block)
        for layer, kept_codes in kept:
            self.set_kept_codes(layer, block, kept_codes)
        return 0

    cdef void _keep_as(self, int32_t source, int32_t block) noexcept:
        """Let a block have the kept codes of another, or with -1 none."""
        cdef Py_ssize_t i
        for i in range(self.num_layers if self.num_kept[block] or source >= 0 and self.num_kept[source] else 0):
            if self.layouts[i].seals:
                self.set_kept_codes(i, block, self.kept_codes[i][source] if source >= 0 else 0)

    cdef Py_ssize_t first_patch(self, int32_t block) noexcept nogil:
        """The first offset of a sealed block at which a layer keeps its float rows; its size if none does."""
        cdef Py_ssize_t i, first = self.per_block * KV_PIECE
        for i in range(self.num_layers if self.num_kept[block] else 0):
            first = min(first, patched_from(self.layouts + i, block))
        return first

    cdef int forget(self, int32_t block) except -1:
        """Release all pieces of a block, and keep none of its codes."""
        self._keep_as(-1, block)
        return self.release(block, 0)

    cdef int add(self, int32_t block, Py_ssize_t first, Py_ssize_t last) except -1:
        """Give the offsets first to last of a block float rows, unless they have them. A MemoryError changes nothing."""
        cdef Py_ssize_t i, begin = block * self.per_block + first // KV_PIECE, missing = 0
        cdef Py_ssize_t end = block * self.per_block + (last + KV_PIECE - 1) // KV_PIECE
        for i in range(begin, end):
            missing += self.float_of[i] < 0
        self.pieces.ensure(missing)
        for i in range(begin, end):
            if self.float_of[i] < 0:
                self.float_of[i] = self.pieces.take(self.float_of[i - 1] if i > begin else -1)
        return 0

    cdef int release(self, int32_t block, int first) except -1:
        """Release the pieces of a block from its piece `first` on."""
        return self._release_range(block, first, self.per_block)

    cdef int release_coded(self, int32_t block, bint is_first, Py_ssize_t last) except -1:
        """Release the pieces of a block before offset `last`, as far as all of their tokens have codes. The first block of a sequence
        keeps those that always are floats."""
        return self._release_range(block, 1 if is_first and self.has_sinks else 0, min(last, self.first_patch(block)) // KV_PIECE)

    cdef int seal(self, Py_ssize_t layer, list blocks, int num_starts) except -1:
        """Encode full blocks of a layer as a whole, from the float rows of their tokens; see `seal_blocks`. A block becomes a patched
        one if its new tokens do not fit the statistics that it has kept."""
        cdef int32_t[::1] view = np.array(blocks, np.int32)
        cdef uint8_t[::1] unfit = np.zeros(view.shape[0], np.uint8)
        cdef Py_ssize_t i
        seal_blocks(self.layouts + layer, &view[0], view.shape[0], num_starts, &unfit[0])
        for i in range(view.shape[0]):
            if unfit[i]:
                self.set_kept_codes(layer, view[i], -abs(self.kept_codes[layer][view[i]]))
        return 0

    cdef int _release_range(self, int32_t block, Py_ssize_t first, Py_ssize_t last) except -1:
        cdef Py_ssize_t i
        for i in range(block * self.per_block + first, block * self.per_block + last):
            if self.float_of[i] >= 0:
                self.pieces.release(self.float_of[i])
                self.float_of[i] = -1
        return 0

    cdef int move_down(self, int32_t block) except -1:
        """Move the float rows of a block to an earlier slab that has room, so that the last slab can be trimmed."""
        cdef Py_ssize_t i
        cdef int32_t piece
        for i in range(block * self.per_block, (block + 1) * self.per_block):
            if self.float_of[i] >= 0 and self.pieces.has_room_below(self.float_of[i]):
                piece = self.pieces.take(-1)
                self.pieces.copy(self.float_of[i], piece)
                self.pieces.release(self.float_of[i])
                self.float_of[i] = piece
        return 0

    cdef int copy(self, int32_t source, int32_t target) except -1:
        """Copy all float rows of a block to another block."""
        cdef Py_ssize_t i
        for i in range(self.per_block):
            if self.float_of[source * self.per_block + i] >= 0:
                self.add(target, i * KV_PIECE, (i + 1) * KV_PIECE)
                self.pieces.copy(self.float_of[source * self.per_block + i], self.float_of[target * self.per_block + i])
        self._keep_as(source, target)
        return 0

    cdef void give(self, int32_t source, int32_t target) noexcept:
        """Let all float rows of a block become those of another block, which must not have any."""
        cdef Py_ssize_t i
        for i in range(self.per_block):
            self.float_of[target * self.per_block + i] = self.float_of[source * self.per_block + i]
            self.float_of[source * self.per_block + i] = -1
        self._keep_as(source, target)

    cdef void wipe_tokens(self, int32_t block, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last) noexcept:
        """Overwrite the float rows of a layer's tokens at the offsets first to last of a block."""
        cdef Py_ssize_t i
        if self.layouts[layer].floats == NULL:
            return
        for i in range(first // KV_PIECE, (last + KV_PIECE - 1) // KV_PIECE):
            if self.float_of[block * self.per_block + i] >= 0:
                self.pieces.wipe_tokens(self.float_of[block * self.per_block + i], layer, max(first - i * KV_PIECE, <Py_ssize_t>0),
                                        min(last - i * KV_PIECE, <Py_ssize_t>KV_PIECE))

    cdef list pieces_of(self, int32_t block):
        """The pieces of a block, -1 for a missing one."""
        return [self.float_of[i] for i in range(block * self.per_block, (block + 1) * self.per_block)]

    cdef int keep_pieces(self, int32_t block, list pieces) except -1:
        """Release the pieces that a block has got since `pieces_of`."""
        cdef Py_ssize_t i
        for i in range(self.per_block):
            if pieces[i] < 0:
                self._release_range(block, i, i + 1)
        return 0

    cdef list first_rows(self, int32_t block, Py_ssize_t layer, bint copies):
        """The rows that a layer keeps of the first tokens of a sequence that begins with `block`: the piece of each head, keys and then
        values, as views of uint8. With `copies`, copies in which all other rows are 0. No piece for a layer without float rows."""
        cdef kv_layout *layout = self.layouts + layer
        cdef Py_ssize_t head, kept
        result = []
        if layout.floats == NULL:
            return result
        for values in (False, True):
            kept = layout.float_tokens * side_of(layout.floats, values).row_stride
            for head in range(self.pieces.num_kv_heads):
                piece = self.pieces.bytes_of_head(layer, self.float_of[block * self.per_block], 1, head, values)[0]
                if copies:
                    piece = piece.copy()
                    piece[kept:] = 0
                result.append(piece)
        return result

    cdef Py_ssize_t first_nbytes(self) noexcept:
        """Bytes of `first_rows` of all layers."""
        cdef Py_ssize_t i, total = 0
        for i in range(self.num_layers if self.has_sinks else 0):
            if self.layouts[i].floats != NULL:
                total += (self.layouts[i].floats.k.bytes + self.layouts[i].floats.v.bytes) * self.pieces.num_kv_heads
        return total

    cdef Py_ssize_t num_pieces(self, int32_t block) noexcept:
        """Number of pieces of a block."""
        cdef Py_ssize_t i, count = 0
        for i in range(block * self.per_block, (block + 1) * self.per_block):
            count += self.float_of[i] >= 0
        return count


cdef FloatRows float_rows_of(BlockMemory blocks):
    """The FloatRows of a new BlockMemory, or None if no layer needs float rows."""
    cdef FloatRows self
    cdef Py_ssize_t i
    formats = [None if one is None else floats_of(one) for one in blocks.formats]
    if formats.count(None) == len(formats):
        return None
    self = FloatRows.__new__(FloatRows)
    self.per_block = blocks.block_size // KV_PIECE
    # The pieces of one sequence between prompts: a block, the tokens after it that stay floats, and the start of the sequence.
    open_pieces = max([(one.kept_tokens + KV_PIECE - 1) // KV_PIECE for one in blocks.formats if one is not None])
    most = self.per_block + open_pieces + 1 if open_pieces else 1
    self.pieces = BlockMemory(blocks.num_layers, blocks.num_kv_heads, blocks.head_dim, KV_PIECE, formats,
                              (most + KV_SLAB_BLOCKS - 1) // KV_SLAB_BLOCKS * KV_SLAB_BLOCKS, grows=True,
                              secure=blocks.secure, v_head_dim=blocks.v_head_dim)
    self.layouts, self.num_layers = blocks.layouts, blocks.num_layers
    self.kept_codes = <int16_t **>calloc(blocks.num_layers, sizeof(int16_t *))
    if self.kept_codes == NULL:
        raise MemoryError("cannot allocate the float rows of a pool")
    for i in range(self.num_layers):
        self.keeps_newest |= self.layouts[i].open_tokens > 0
        self.has_sinks |= self.layouts[i].float_tokens > 0
        if formats[i] is not None:
            self.layouts[i].floats = self.pieces.layouts + i
    return self
