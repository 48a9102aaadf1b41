# cython: language_level=3, boundscheck=False, cdivision=True
"""Memory of blocks, the list of free blocks, and the number of owners of each."""
import numpy as np

from libc.stdint cimport int32_t, intptr_t, uint8_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from kvfast.codec.blocks cimport (Arena, arena_over, block_at, init_sides, k_block_at, kv_slab, kv_layout, set_bases, side_of,
                                  v_block_at)
from kvfast.core.checks cimport check_count
from kvfast.core.kernels cimport active, kv_kernels
from kvfast.core.limits cimport (KV_SLAB_BLOCKS, KV_SLAB_SHIFT, KV_MAX_HEAD_DIM, KV_MAX_KV_HEADS, KV_MAX_LAYERS, KV_MAX_ROPE_DIM,
                                 KV_MAX_TOKENS, KV_UNLIMITED)
from kvfast.core.wipe cimport kv_wipe

from kvfast.errors import CacheFullError


cdef object _stride(object nbytes):
    """Bytes from head to head. Not a multiple of a page, so that the heads and sides, which are read side by side, do not
    fall into the same sets of the processor's caches."""
    return nbytes + 64 if nbytes % 4096 == 0 else nbytes


cdef enum:
    GROUP_BLOCKS = 16          # free blocks in a row that a new sequence of a shared pool looks for
    MAX_SLABS = 255
    START_BYTES = 4096


cdef class BlockMemory:
    """Blocks of `num_layers` layers in slabs of memory. In a slab, all blocks of one KV head lie together.

    Call `ensure(count)` before `take`. With `is_shared`, several sequences take blocks, and the blocks of each are kept
    together as well as possible. Otherwise the lowest free block is taken next, and blocks are added when all have owners.
    """

    def __cinit__(self, num_layers, num_kv_heads, head_dim, int block_size, formats, num_blocks, *, bint grows=False,
                  bint is_shared=False, rope_dim=None, bint secure=False, v_head_dim=None, buffer=None):
        """`formats`: the KVFormat of each layer, or None for a layer that needs no bytes. With `rope_dim`, blocks hold latent
        rows of width `head_dim` and their rotary part. If `secure`, blocks are wiped when they are released. `v_head_dim`: width
        of values, if it differs from that of keys. `buffer`: see `BlockPool`."""
        cdef Py_ssize_t i, largest = 1
        cdef kv_layout *layout
        self.num_layers = check_count(num_layers, "num_layers", 1, KV_MAX_LAYERS)
        self.num_kv_heads = check_count(num_kv_heads, "num_kv_heads", 1, KV_MAX_KV_HEADS)
        self.head_dim = check_count(head_dim, "head_dim", 1, KV_MAX_HEAD_DIM)
        self.v_head_dim = self.head_dim if v_head_dim is None else check_count(v_head_dim, "v_head_dim", 1, KV_MAX_HEAD_DIM)
        self.block_size = block_size
        self.formats = formats
        self.settings = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size,
                         "formats": formats, "num_blocks": num_blocks, "grows": grows, "is_shared": is_shared, "rope_dim": rope_dim,
                         "secure": secure, "v_head_dim": v_head_dim}
        if rope_dim is not None:
            self.rope_dim = check_count(rope_dim, "rope_dim", 0, KV_MAX_ROPE_DIM)
        self.grows, self.is_shared, self.secure = grows, is_shared, secure
        self.bases = []
        self.layouts = <kv_layout *>calloc(self.num_layers, sizeof(kv_layout))
        if self.layouts == NULL:
            raise MemoryError("cannot allocate the layers of a cache")
        for i in range(self.num_layers):
            layout = self.layouts + i
            layout.num_kv_heads, layout.secure = <int>self.num_kv_heads, secure
            layout.block_shift = <int>((<object>block_size).bit_length() - 1)
            if formats[i] is not None:
                init_sides(layout, formats[i], <int>self.head_dim, <int>self.v_head_dim, block_size, self.rope_dim)
                largest = max(largest, layout.k.bytes, layout.v.bytes)
                if formats[i].calibration is not None:
                    self.bases.append(set_bases(layout, formats[i].calibration))
        if secure:
            self.zeros = <char *>calloc(largest, 1)
            if self.zeros == NULL:
                raise MemoryError("cannot allocate a block of a cache")
        self.arenas, self.sizes = [], []
        self.first_blocks = self.start_blocks = check_count(num_blocks, "num_blocks", 1, KV_MAX_TOKENS)

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.layouts != NULL:
            for i in range(self.num_layers):
                free(self.layouts[i].slabs)
        free(self.layouts)
        free(self.slab_of)
        free(self.owners)
        free(self.next_free)
        free(self.prev_free)
        free(self.zeros)

    cdef int _add_slab(self, Py_ssize_t blocks, Arena arena=None, object offsets=None) except -1:
        """Add blocks at the end. If it fails, nothing has changed.

        With an arena, its bytes become the blocks. `offsets` has for each layer and side the byte where the blocks of the
        first head start, and the bytes from head to head.
        """
        cdef Py_ssize_t i, count = self.num_slabs, first, total
        cdef kv_layout *layout
        cdef kv_slab *slab
        first = (self.num_blocks + KV_SLAB_BLOCKS - 1) // KV_SLAB_BLOCKS * KV_SLAB_BLOCKS
        total = first + blocks
        if total > 0x7FFFFFF0 or count == MAX_SLABS:
            raise MemoryError(f"a cache of {total:,} blocks is beyond what kvfast can count")
        nbytes = 0
        for i in range(self.num_layers):
            layout = self.layouts + i
            layout.slabs = <kv_slab *>grown(layout.slabs, (count + 1) * sizeof(kv_slab))
            k_stride, v_stride = _stride(int(layout.k.bytes) * blocks), _stride(int(layout.v.bytes) * blocks)
            end = nbytes + int(self.num_kv_heads) * (k_stride + v_stride)
            if end > KV_UNLIMITED:
                raise MemoryError(f"a cache of more than {end:,} bytes is beyond the address space")
            slab = layout.slabs + count
            slab.first = <int32_t>first
            slab.k_head_stride, slab.v_head_stride = k_stride, v_stride
            slab.k_block_stride, slab.v_block_stride = layout.k.bytes, layout.v.bytes
            slab.k = nbytes
            slab.v = nbytes + self.num_kv_heads * slab.k_head_stride
            if offsets is not None:
                (slab.k, slab.k_head_stride), (slab.v, slab.v_head_stride) = offsets[i]
            nbytes = end
        if arena is None:
            arena = Arena(nbytes, self.secure)
        self._grow_tables(total)
        if len(self.sizes) == count:
            self.sizes.append(0)
        if len(self.arenas) == count:
            self.arenas.append(None)
        self.arenas[count], self.sizes[count] = arena, nbytes
        self.num_slabs += 1
        for i in range(first // KV_SLAB_BLOCKS, (total + KV_SLAB_BLOCKS - 1) // KV_SLAB_BLOCKS):
            self.slab_of[i] = <uint8_t>count
        for i in range(self.num_layers):
            layout = self.layouts + i
            if count == 0:
                layout.base = arena.data
            slab = layout.slabs + count
            slab.k += <intptr_t>arena.data - <intptr_t>layout.base
            slab.v += <intptr_t>arena.data - <intptr_t>layout.base
            layout.slab_of = self.slab_of if count else NULL
        if count == 0:
            self.next_free[0] = self.prev_free[0] = 0
        for i in range(self.num_blocks, first):
            self.owners[i], self.next_free[i + 1], self.prev_free[i + 1] = 0, -1, -1
        for i in range(first, total):
            self.owners[i] = 0
            self._insert(<int32_t>i, self.prev_free[0])
        self.num_free += blocks
        self.num_gaps += first - self.num_blocks
        self.num_blocks = total
        return 0

    cdef int _use_layers(self, list layers, list strides) except -1:
        """Let all blocks, where there are none yet, lie in an Arena per layer, the layer's stride apart. In a block they lie
        head after head, keys before values."""
        cdef Py_ssize_t i
        cdef kv_layout *layout
        cdef kv_slab *slab
        cdef list offsets = []
        for i in range(self.num_layers):
            layout = self.layouts + i
            offsets.append(((0, layout.k.bytes + layout.v.bytes), (layout.k.bytes, layout.k.bytes + layout.v.bytes)))
        self._add_slab(self.first_blocks, layers[0], offsets)
        for i in range(self.num_layers):
            layout, slab = self.layouts + i, self.layouts[i].slabs
            layout.base = (<Arena>layers[i]).data
            slab.k_block_stride = slab.v_block_stride = strides[i]
        self.layers, self.sizes[0] = layers, self.block_bytes * self.num_blocks
        return 0

    cdef int _grow_tables(self, Py_ssize_t total) except -1:
        """Make the tables large enough for `total` blocks. If it fails, some have grown and moved; the layouts point to them."""
        cdef Py_ssize_t i
        self.owners = <int32_t *>grown(self.owners, total * sizeof(int32_t))
        self.next_free = <int32_t *>grown(self.next_free, (total + 1) * sizeof(int32_t))
        self.prev_free = <int32_t *>grown(self.prev_free, (total + 1) * sizeof(int32_t))
        self.slab_of = <uint8_t *>grown(self.slab_of, (total + KV_SLAB_BLOCKS - 1) // KV_SLAB_BLOCKS)
        for i in range(self.num_layers):
            if self.layouts[i].slab_of != NULL:
                self.layouts[i].slab_of = self.slab_of
        return 0

    cdef void _insert(self, int32_t block, int32_t behind) noexcept:
        """Put a block into the ring of free blocks, after one of its entries."""
        cdef int32_t entry = block + 1, before = self.next_free[behind]
        self.prev_free[entry], self.next_free[entry] = behind, before
        self.next_free[behind] = self.prev_free[before] = entry

    cdef void _remove(self, int32_t block) noexcept:
        cdef int32_t entry = block + 1
        self.next_free[self.prev_free[entry]] = self.next_free[entry]
        self.prev_free[self.next_free[entry]] = self.prev_free[entry]
        self.next_free[entry] = self.prev_free[entry] = -1
        self.num_free -= 1

    cdef Py_ssize_t available(self) except -1:
        """Number of blocks that can be taken without growing."""
        return self.num_free

    cdef int ensure(self, Py_ssize_t num_blocks) except -1:
        """Make sure that `num_blocks` blocks can be taken; else CacheFullError, and nothing has changed."""
        cdef Py_ssize_t held = self.num_blocks - self.num_gaps, more = num_blocks - self.num_free
        if not self.is_shared and more > 0:
            if held == 0 and more <= min(self.start_blocks, self.first_blocks):
                more = min(self.start_blocks, self.first_blocks)
            elif held + more <= self.first_blocks:
                more = self.first_blocks - held
            else:
                # Grow by half: this makes few slabs, as reading is slower across their borders. A pool with all the blocks that
                # its sequence can need grows only because snapshots keep blocks from being overwritten.
                more = max(more, self.num_blocks // (2 if self.grows else 16))
                more = (more + KV_SLAB_BLOCKS - 1) // KV_SLAB_BLOCKS * KV_SLAB_BLOCKS
            self._add_slab(more)
        elif self.available() < num_blocks:
            raise CacheFullError(f"{num_blocks} blocks of {self.block_size} tokens are needed, and "
                                 f"{self.available()} of {self.num_blocks} are free", num_blocks, self.available())
        return 0

    cdef int ensure_apart(self, Py_ssize_t num_blocks) except -1:
        """`ensure`, with `first_blocks` in slabs of their own, however many blocks a prompt needs: `trim` frees the last slabs."""
        cdef Py_ssize_t missing = self.first_blocks - (self.num_blocks - self.num_gaps)
        if self.grows and 0 < missing < num_blocks - self.num_free:
            self.ensure(self.num_free + missing)
        return self.ensure(num_blocks)

    cdef void start_small(self) noexcept:
        """Begin with few blocks: with one, or as many as take 4 KiB of a side of a layer."""
        cdef Py_ssize_t i, largest = 1
        for i in range(self.num_layers):
            largest = max(largest, max(self.layouts[i].k.bytes, self.layouts[i].v.bytes) * self.num_kv_heads)
        self.start_blocks = max(<Py_ssize_t>1, START_BYTES // largest)

    cdef int32_t take(self, int32_t after) except -1:
        """Take a block, after `ensure`: the one after block `after` if possible; with -1 the first of a new run."""
        cdef int32_t block = after + 1
        if not self.is_shared or block == 0 or block >= self.num_blocks or self.prev_free[block + 1] < 0:
            block = self._free_group() if self.is_shared else -1
            if block < 0:
                block = self.next_free[0] - 1
        self._remove(block)
        self.owners[block] = 1
        return block

    cdef bint has_room_below(self, int32_t block) noexcept:
        """Whether a slab before that of a block has a free block. It is taken next, as this memory is not shared."""
        return self.num_free > 0 and self.slab_of[(self.next_free[0] - 1) >> KV_SLAB_SHIFT] < self.slab_of[block >> KV_SLAB_SHIFT]

    cdef int32_t _free_group(self) noexcept:
        """First of GROUP_BLOCKS free blocks in a row, or -1."""
        cdef Py_ssize_t groups = self.num_blocks // GROUP_BLOCKS, i, j
        if self.num_free < GROUP_BLOCKS:
            return -1
        for i in range(groups):  # no-cython-lint
            if self.group >= groups:
                self.group = 0
            for j in range(GROUP_BLOCKS):
                if self.prev_free[self.group * GROUP_BLOCKS + j + 1] < 0:
                    break
            else:
                return <int32_t>(self.group * GROUP_BLOCKS)
            self.group += 1
        return -1

    cdef int release(self, int32_t block) except -1:
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.put_free(block)
        return 0

    cdef int put_free(self, int32_t block) except -1:
        """Put a block without owners into the ring of free blocks."""
        cdef int32_t behind = 0
        if self.secure:
            self.wipe_block(block)
        if not self.is_shared:
            while self.next_free[behind] != 0 and self.next_free[behind] <= block:
                behind = self.next_free[behind]
        self._insert(block, behind)
        self.num_free += 1
        return 0

    cdef void wipe_block(self, int32_t block) noexcept:
        """Overwrite a whole block."""
        cdef Py_ssize_t i, h
        cdef kv_layout *layout
        for i in range(self.num_layers):
            layout = self.layouts + i
            for h in range(self.num_kv_heads):
                kv_wipe(k_block_at(layout, block, h), layout.k.bytes)
                kv_wipe(v_block_at(layout, block, h), layout.v.bytes)

    cdef void zero_block(self, int32_t block) noexcept:
        cdef Py_ssize_t i, h
        for i in range(self.num_layers):
            for h in range(self.num_kv_heads):
                memset(k_block_at(self.layouts + i, block, h), 0, self.layouts[i].k.bytes)
                memset(v_block_at(self.layouts + i, block, h), 0, self.layouts[i].v.bytes)

    cdef void wipe_tokens(self, int32_t block, Py_ssize_t layer, Py_ssize_t first, Py_ssize_t last) noexcept:
        """Overwrite a layer's tokens of a block at the offsets first to last."""
        cdef kv_layout *layout = self.layouts + layer
        cdef const kv_kernels *kernels = active()
        cdef Py_ssize_t offset, h
        for offset in range(first, last):
            for h in range(self.num_kv_heads):
                kernels.copy_token(&layout.k, self.zeros, 0, &layout.k, k_block_at(layout, block, h), <int>offset, False)
                kernels.copy_token(&layout.v, self.zeros, 0, &layout.v, v_block_at(layout, block, h), <int>offset, True)

    cdef void copy(self, int32_t source, int32_t target) noexcept:
        """Copy a whole block."""
        cdef Py_ssize_t i, h
        cdef kv_layout *layout
        for i in range(self.num_layers):
            layout = self.layouts + i
            for h in range(self.num_kv_heads):
                memcpy(k_block_at(layout, target, h), k_block_at(layout, source, h), layout.k.bytes)
                memcpy(v_block_at(layout, target, h), v_block_at(layout, source, h), layout.v.bytes)

    def map(self, memory, Py_ssize_t num_blocks, offsets):
        """Use bytes of `memory` as the first blocks of a memory without blocks; see `_add_slab`."""
        self._add_slab(num_blocks, arena_over(memory), offsets)

    def bytes_of_head(self, Py_ssize_t layer, int32_t first, Py_ssize_t count, Py_ssize_t head, bint values):
        """Bytes of `count` blocks in a row: a writable view, uint8 of shape (count, bytes of a block)."""
        cdef kv_layout *layout = self.layouts + layer
        cdef const kv_slab *slab
        cdef Py_ssize_t nbytes = side_of(layout, values).bytes
        cdef Arena arena
        cdef char *start
        if count == 0:
            return np.empty((0, nbytes), np.uint8)
        slab = layout.slabs + self.slab_of[first >> KV_SLAB_SHIFT]
        arena = self.arenas[self.slab_of[first >> KV_SLAB_SHIFT]] if self.layers is None else self.layers[layer]
        start = block_at(layout, first, head, values)
        return np.ndarray((count, nbytes), np.uint8, buffer=arena, offset=start - arena.data,
                          strides=(slab.v_block_stride if values else slab.k_block_stride, 1))

    cdef int trim(self) except -1:
        """Give the last slabs back to the system as long as none of their blocks has an owner; the first slab stays."""
        cdef Py_ssize_t i, first
        while self.num_slabs > 1:
            first = self.layouts[0].slabs[self.num_slabs - 1].first
            for i in range(first, self.num_blocks):
                if self.owners[i]:
                    return 0
            for i in range(first, self.num_blocks):
                if self.prev_free[i + 1] < 0:  # a number without a block
                    self.num_gaps -= 1
                else:
                    self._remove(<int32_t>i)
            self.num_blocks = first
            self.num_slabs -= 1
            self.arenas[self.num_slabs], self.sizes[self.num_slabs] = None, 0    # not deleted, as shortening a list may need memory
        return 0

    cdef bint has_surplus(self) noexcept:
        """Whether the blocks that have owners would fit without the last slab."""
        cdef Py_ssize_t last = self.layouts[0].slabs[self.num_slabs - 1].first if self.num_slabs > 1 else self.num_blocks
        return self.num_free >= self.num_blocks - last > 0

    def bytes_for(self, Py_ssize_t blocks):
        """Bytes of a slab of `blocks` blocks."""
        cdef Py_ssize_t i
        return int(self.num_kv_heads) * sum([
            _stride(int(self.layouts[i].k.bytes) * blocks) + _stride(int(self.layouts[i].v.bytes) * blocks)
            for i in range(self.num_layers)
        ])

    @property
    def nbytes(self):
        return sum(self.sizes)

    @property
    def bytes_per_token(self):
        return self.block_bytes // self.block_size

    @property
    def block_bytes(self):
        """Bytes of one block over all layers."""
        cdef Py_ssize_t i, total = 0
        for i in range(self.num_layers):
            total += (self.layouts[i].k.bytes + self.layouts[i].v.bytes) * self.num_kv_heads
        return total


cdef void *grown(void *memory, Py_ssize_t nbytes) except NULL:
    memory = realloc(memory, nbytes)
    if memory == NULL:
        raise MemoryError("cannot allocate the tables of a cache")
    return memory
