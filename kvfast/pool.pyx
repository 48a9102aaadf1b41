# cython: language_level=3, boundscheck=False, cdivision=True
"""Memory of blocks, the list of free ones, and how many owners each has."""
import numpy as np

from libc.stdint cimport int16_t, int32_t, intptr_t, uint8_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from kvfast._kernels cimport KV_MAX_HEAD_DIM, KV_MAX_ROPE_DIM, active, kv_kernels
from kvfast.attend_call cimport Workspace
from kvfast.blocks cimport (CHUNK_SHIFT, PIECE, Arena, arena_over, init_sides, k_block_at, kv_chunk, kv_store,
                            v_block_at)
from kvfast.options cimport check_count
from kvfast.wipe cimport kv_wipe

from kvfast.errors import CacheFullError
from kvfast.formats import KVFormat


cdef extern from *:
    """
    static int kv_exchange(int *flag, int value) { return __atomic_exchange_n(flag, value, __ATOMIC_ACQ_REL); }
    """
    int kv_exchange(int *flag, int value) nogil


cdef object _stride(object nbytes):
    """Bytes from head to head: not a multiple of a page, so that the heads' and the sides' streams do not
    fall into the same sets of the processor's caches."""
    return nbytes + 64 if nbytes % 4096 == 0 else nbytes


cdef enum:
    CHUNK_BLOCKS = 1 << CHUNK_SHIFT
    GROUP_BLOCKS = 16          # blocks in a row that a new run of a shared pool looks for
    MAX_CHUNKS = 255
    FIRST_PIECES = 8           # of a pool of float rows: what one sequence has, between prompts


cdef class BlockPool:
    """Blocks of `num_layers` layers.

    `num_blocks` blocks lie in one piece of memory, each KV head a stream of its own. `grows`: not before they are
    needed. `is_shared`: by several sequences, each of which is kept together as well as may be; else the lowest
    free block is always the next, and more are added when all have owners.
    """

    def __cinit__(self, num_layers, num_kv_heads, head_dim, int block_size, formats, num_blocks, bint grows=False,
                  bint is_shared=False, rope_dim=None, bint secure=False):
        """`formats`: a KVFormat for each layer, or None for one that needs no bytes. With `rope_dim`, of latent rows of
        `head_dim` and their rotary part. A `secure` pool wipes what is given back."""
        cdef Py_ssize_t i, largest = 1
        cdef kv_store *store
        self.num_layers = check_count(num_layers, "num_layers", 1, 1 << 16)
        self.num_kv_heads = check_count(num_kv_heads, "num_kv_heads", 1, 1 << 16)
        self.head_dim = check_count(head_dim, "head_dim", 1, KV_MAX_HEAD_DIM)
        self.block_size = block_size
        self.formats = formats
        self.settings = num_layers, num_kv_heads, head_dim, block_size, formats, num_blocks, grows, is_shared, rope_dim, secure
        if rope_dim is not None:
            self.rope_dim = check_count(rope_dim, "rope_dim", 0, KV_MAX_ROPE_DIM)
        self.grows, self.is_shared, self.secure = grows, is_shared, secure
        self.stores = <kv_store *>calloc(self.num_layers, sizeof(kv_store))
        if self.stores == NULL:
            raise MemoryError("cannot allocate the layers of a cache")
        for i in range(self.num_layers):
            store = self.stores + i
            store.num_kv_heads, store.secure = <int>self.num_kv_heads, secure
            store.block_shift = <int>((<object>block_size).bit_length() - 1)
            if formats[i] is not None:
                init_sides(store, formats[i], <int>self.head_dim, block_size, self.rope_dim)
                self.finishes |= store.finishes
                self.has_sinks |= store.float_tokens > 0
                largest = max(largest, store.k.bytes, store.v.bytes)
        if secure:
            self.zeros = <char *>calloc(largest, 1)
            if self.zeros == NULL:
                raise MemoryError("cannot allocate a block of a cache")
        if self.finishes or self.has_sinks:
            of_floats = [KVFormat("float16") if one is not None and (one.finishes or one.num_float_tokens) else None for one in formats]
            self.floats = BlockPool(num_layers, num_kv_heads, head_dim, PIECE, of_floats, FIRST_PIECES, True, secure=secure)
            for i in range(self.num_layers):
                if of_floats[i] is not None:
                    self.stores[i].floats = self.floats.stores + i
        self.arenas, self.sizes, self.abandoned = [], [], []
        self.workspace = Workspace()
        self.workspace.secure = secure
        self.first_blocks = check_count(num_blocks, "num_blocks", 1, 1 << 40)
        if not grows:
            self._add_chunk(self.first_blocks)

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.stores != NULL:
            for i in range(self.num_layers):
                free(self.stores[i].chunks)
        free(self.stores)
        free(self.chunk_of)
        free(self.owners)
        free(self.next_free)
        free(self.prev_free)
        free(self.zeros)
        free(self.float_of)
        free(self.kept)

    cdef bint try_enter(self) noexcept nogil:
        return not kv_exchange(&self.busy, 1)

    cdef void leave(self) noexcept nogil:
        kv_exchange(&self.busy, 0)

    cdef int enter(self) except -1:
        if not self.try_enter():
            raise RuntimeError("this cache is in use by another thread; a cache serves one thread at a time")
        try:
            self._release_abandoned()
        except BaseException:
            self.leave()
            raise
        return 0

    cdef int _release_abandoned(self) except -1:
        while self.abandoned:
            self.abandoned.pop().give_up()
        return 0

    def abandon(self, table):
        """Release a table that Python collects, of this pool or one entered with it: now, or when it is next entered."""
        if self.try_enter():
            try:
                table.give_up()
            finally:
                self.leave()
        else:
            self.abandoned.append(table)

    def settle(self):
        """Release what was abandoned while the pool was busy."""
        if self.try_enter():
            try:
                self._release_abandoned()
            finally:
                self.leave()

    cdef int _add_chunk(self, Py_ssize_t blocks, Arena arena=None, object offsets=None) except -1:
        """More blocks, at the end. Nothing has changed if it fails.

        With an arena, its bytes are the blocks: `offsets` has for each layer and side where the first head's stream
        starts, and how far the next is from it.
        """
        cdef Py_ssize_t i, count = self.num_chunks, first, total
        cdef kv_store *store
        cdef kv_chunk *chunk
        first = (self.num_blocks + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS * CHUNK_BLOCKS
        total = first + blocks
        if total > 0x7FFFFFF0 or count == MAX_CHUNKS:
            raise MemoryError(f"a cache of {total:,} blocks is beyond what kvfast can count")
        nbytes = 0
        for i in range(self.num_layers):
            store = self.stores + i
            store.chunks = <kv_chunk *>_grown(store.chunks, (count + 1) * sizeof(kv_chunk))
            k_stride, v_stride = _stride(int(store.k.bytes) * blocks), _stride(int(store.v.bytes) * blocks)
            end = nbytes + int(self.num_kv_heads) * (k_stride + v_stride)
            if end > 1 << 60:
                raise MemoryError(f"a cache of more than {end:,} bytes is beyond the address space")
            chunk = store.chunks + count
            chunk.first = <int32_t>first
            chunk.k_head_stride, chunk.v_head_stride = k_stride, v_stride
            chunk.k = nbytes
            chunk.v = nbytes + self.num_kv_heads * chunk.k_head_stride
            if offsets is not None:
                (chunk.k, chunk.k_head_stride), (chunk.v, chunk.v_head_stride) = offsets[i]
            nbytes = end
        if arena is None:
            arena = Arena(nbytes, self.secure)
        try:
            self.owners = <int32_t *>_grown(self.owners, total * sizeof(int32_t))
            self.next_free = <int32_t *>_grown(self.next_free, (total + 1) * sizeof(int32_t))
            self.prev_free = <int32_t *>_grown(self.prev_free, (total + 1) * sizeof(int32_t))
            self.chunk_of = <uint8_t *>_grown(self.chunk_of, (total + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS)
            if self.floats is not None:
                self.float_of = <int32_t *>_grown(self.float_of, total * (self.block_size // PIECE) * sizeof(int32_t))
                self.kept = <int16_t *>_grown(self.kept, total * sizeof(int16_t))
            if len(self.sizes) == count:
                self.sizes.append(0)
            if len(self.arenas) == count:
                self.arenas.append(None)
        finally:
            self._aim_stores()  # also where only some have grown, and lie elsewhere now
        self.arenas[count], self.sizes[count] = arena, nbytes
        self.num_chunks += 1
        if self.floats is not None:
            for i in range(self.num_blocks * (self.block_size // PIECE), total * (self.block_size // PIECE)):
                self.float_of[i] = -1
        for i in range(first // CHUNK_BLOCKS, (total + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS):
            self.chunk_of[i] = <uint8_t>count
        for i in range(self.num_layers):
            store = self.stores + i
            if count == 0:
                store.base = arena.data
            chunk = store.chunks + count
            chunk.k += <intptr_t>arena.data - <intptr_t>store.base
            chunk.v += <intptr_t>arena.data - <intptr_t>store.base
            store.chunk_of = self.chunk_of if count else NULL
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

    cdef void _aim_stores(self) noexcept:
        """Tell the stores where the tables of the pool are."""
        cdef Py_ssize_t i
        for i in range(self.num_layers):
            self.stores[i].float_of = self.float_of
            if self.stores[i].chunk_of != NULL:
                self.stores[i].chunk_of = self.chunk_of

    cdef void _insert(self, int32_t block, int32_t behind) noexcept:
        """Put a block into the ring of free ones, behind an entry of it."""
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
        """Blocks that can be taken without growing."""
        return self.num_free + (self.index.num_idle if self.index is not None else 0)

    cdef int ensure(self, Py_ssize_t count) except -1:
        """Make sure that `count` blocks can be taken; else CacheFullError, and nothing has changed."""
        cdef Py_ssize_t more
        if not self.is_shared and self.num_free < count:
            # Half as much again: few pieces of memory, as streams are slower across their borders. A pool that has
            # all that its sequence can need is asked for what snapshots keep from being overwritten.
            more = self.num_blocks // (2 if self.grows else 16) if self.num_blocks else self.first_blocks
            more = max(count - self.num_free, more)
            self._add_chunk((more + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS * CHUNK_BLOCKS)
        elif self.available() < count:
            raise CacheFullError(f"{count} blocks of {self.block_size} tokens are needed, and "
                                 f"{self.available()} of {self.num_blocks} are free", count, self.available())
        return 0

    cdef int ensure_apart(self, Py_ssize_t count) except -1:
        """`ensure`, with what is needed for good in a first piece of memory by itself, however many come with a prompt: it
        is the last pieces that `trim` gives back."""
        if self.grows and self.num_blocks == 0:
            self.ensure(min(count, self.first_blocks))
        return self.ensure(count)

    cdef int32_t take(self, int32_t after) except -1:
        """A block with one owner, after `ensure`; best the one after block `after`, -1 for a new run."""
        cdef int32_t block = after + 1
        if self.num_free == 0:
            block = self.index.evict()
            if self.secure:
                self.wipe_block(block)
        else:
            if not self.is_shared or block == 0 or block >= self.num_blocks or self.prev_free[block + 1] < 0:
                block = self._free_group() if self.is_shared else -1
                if block < 0:
                    block = self.next_free[0] - 1
            self._remove(block)
        self.owners[block] = 1
        if self.floats is not None:
            self.drop_floats(block, 0)
            self.kept[block] = 0
        return block

    cdef int32_t _free_group(self) noexcept:
        """First block of GROUP_BLOCKS free ones in a row, or -1."""
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

    cdef int retain(self, int32_t block) except -1:
        """One owner more, the first perhaps, of a block whose contents are known."""
        if self.owners[block] == 0:
            self.index.reuse(block)
        self.owners[block] += 1
        return 0

    cdef int release(self, int32_t block) except -1:
        self.owners[block] -= 1
        if self.owners[block] > 0:
            return 0
        if self.index is None or not self.index.keep(block):
            self.give_back(block)
        elif self.floats is not None:
            self.drop_floats(block, 1 if self.has_sinks else 0)  # whoever finds it reads codes, and the sequence's start
        return 0

    cdef int give_back(self, int32_t block) except -1:
        """Put a block without owners among the free ones."""
        cdef int32_t behind = 0
        if self.secure:
            self.wipe_block(block)
        if not self.is_shared:
            while self.next_free[behind] != 0 and self.next_free[behind] <= block:
                behind = self.next_free[behind]
        self._insert(block, behind)
        self.num_free += 1
        if self.floats is not None:
            self.drop_floats(block, 0)
        return 0

    cdef void wipe_block(self, int32_t block) noexcept:
        """Overwrite all that a block holds, its float rows aside: they are blocks of a secure pool."""
        cdef Py_ssize_t i, h
        cdef kv_store *store
        for i in range(self.num_layers):
            store = self.stores + i
            for h in range(self.num_kv_heads):
                kv_wipe(k_block_at(store, block, h), store.k.bytes)
                kv_wipe(v_block_at(store, block, h), store.v.bytes)

    cdef void wipe_places(self, int32_t block, Py_ssize_t layer, Py_ssize_t first) noexcept:
        """Overwrite a layer's tokens of a block from place `first` on, and their float rows."""
        cdef kv_store *store = self.stores + layer
        cdef const kv_kernels *kernels = active()
        cdef Py_ssize_t place, h
        cdef int32_t piece = -1
        for place in range(first, self.block_size):
            if self.floats is not None and store.floats != NULL:
                piece = self.float_of[block * (self.block_size // PIECE) + place // PIECE]
            for h in range(self.num_kv_heads):
                kernels.copy_token(&store.k, self.zeros, 0, &store.k, k_block_at(store, block, h), <int>place, False)
                kernels.copy_token(&store.v, self.zeros, 0, &store.v, v_block_at(store, block, h), <int>place, True)
                if piece >= 0:
                    kv_wipe(k_block_at(store.floats, piece, h) + place % PIECE * store.floats.k.row_stride, store.floats.k.row_stride)
                    kv_wipe(v_block_at(store.floats, piece, h) + place % PIECE * store.floats.v.row_stride, store.floats.v.row_stride)

    cdef int drop_floats(self, int32_t block, int first) except -1:
        """Give back the pieces of a block from its piece `first` on."""
        cdef Py_ssize_t pieces = self.block_size // PIECE, i
        for i in range(block * pieces + first, (block + 1) * pieces):
            if self.float_of[i] >= 0:
                self.floats.release(self.float_of[i])
                self.float_of[i] = -1
        return 0

    cdef Py_ssize_t floats_needed(self, int32_t block, int32_t source, Py_ssize_t first, Py_ssize_t last) noexcept:
        """Pieces that the places first to last of a block have no float rows in, -1 for one that is not taken yet; and those
        that it is to have because `source` has, or -1."""
        cdef Py_ssize_t pieces = self.block_size // PIECE, needed = 0, i
        for i in range(pieces):
            if (first // PIECE <= i < (last + PIECE - 1) // PIECE
                    or source >= 0 and self.float_of[source * pieces + i] >= 0):
                needed += block < 0 or self.float_of[block * pieces + i] < 0
        return needed

    cdef int add_floats(self, int32_t block, Py_ssize_t first, Py_ssize_t last) except -1:
        """Give the places first to last of a block float rows. They may have some; MemoryError leaves it as it was."""
        cdef Py_ssize_t pieces = self.block_size // PIECE, i, begin = block * pieces + first // PIECE
        cdef Py_ssize_t end = block * pieces + (last + PIECE - 1) // PIECE
        self.floats.ensure(self.floats_needed(block, -1, first, last))
        for i in range(begin, end):
            if self.float_of[i] < 0:
                self.float_of[i] = self.floats.take(self.float_of[i - 1] if i > begin else -1)
        return 0

    cdef bint is_frozen(self, int32_t block) noexcept:
        """Whether a block must be copied before it is written."""
        return self.owners[block] > 1 or (self.index is not None and self.index.knows(block))

    cdef void copy(self, int32_t source, int32_t target) noexcept:
        """Copy a block, with the float rows that it has into those of the target."""
        cdef Py_ssize_t i, h, pieces
        cdef kv_store *store
        for i in range(self.num_layers):
            store = self.stores + i
            for h in range(self.num_kv_heads):
                memcpy(k_block_at(store, target, h), k_block_at(store, source, h), store.k.bytes)
                memcpy(v_block_at(store, target, h), v_block_at(store, source, h), store.v.bytes)
        if self.floats is None:
            return
        pieces = self.block_size // PIECE
        self.kept[target] = self.kept[source]
        for i in range(pieces):
            if self.float_of[source * pieces + i] >= 0:
                self.floats.copy(self.float_of[source * pieces + i], self.float_of[target * pieces + i])

    cdef int copy_block(self, int32_t source, int32_t target) except -1:
        """Copy a block with its float rows."""
        cdef Py_ssize_t pieces = self.block_size // PIECE, i
        if self.floats is not None:
            for i in range(pieces):
                if self.float_of[source * pieces + i] >= 0:
                    self.add_floats(target, i * PIECE, (i + 1) * PIECE)
        self.copy(source, target)
        return 0

    cdef BlockPool clone(self):
        """An empty pool of the same shape."""
        return BlockPool(*self.settings)

    cdef BlockPool exact(self, Py_ssize_t num_blocks):
        """An empty pool of the same layers with so many blocks."""
        return BlockPool(*self.settings[:5], max(num_blocks, 1), rope_dim=self.rope_dim, secure=self.secure)

    def map(self, memory, Py_ssize_t num_blocks, offsets):
        """Let the first blocks of an empty pool be bytes of `memory`, see `_add_chunk`."""
        self._add_chunk(num_blocks, arena_over(memory), offsets)

    def stream(self, Py_ssize_t layer, int32_t first, Py_ssize_t count, Py_ssize_t head, bint values):
        """Bytes of blocks in a row: a writable view, uint8 of shape (count, bytes of a block)."""
        cdef kv_store *store = self.stores + layer
        cdef Py_ssize_t nbytes = store.v.bytes if values else store.k.bytes
        cdef Arena arena
        cdef char *start
        if count == 0:
            return np.empty((0, nbytes), np.uint8)
        arena = self.arenas[self.chunk_of[first >> CHUNK_SHIFT]]
        start = v_block_at(store, first, head) if values else k_block_at(store, first, head)
        return np.ndarray((count, nbytes), np.uint8, buffer=arena, offset=start - arena.data)

    cdef int trim(self) except -1:
        """Give back the last chunks of a pool that has grown while no block of theirs is in use."""
        cdef Py_ssize_t i, first
        while self.num_chunks > 1:
            first = self.stores[0].chunks[self.num_chunks - 1].first
            for i in range(first, self.num_blocks):
                if self.owners[i]:
                    return 0
            for i in range(first, self.num_blocks):
                self._remove(<int32_t>i)
            self.num_blocks = first
            self.num_chunks -= 1
            self.arenas[self.num_chunks], self.sizes[self.num_chunks] = None, 0  # to make a list shorter may take memory
        return 0

    cdef int drop_surplus(self) except -1:
        """Give back what a pool that had its memory from the start got beside it, while snapshots kept its blocks."""
        if not self.grows:
            self.trim()
        if self.floats is not None:
            self.floats.trim()
        return 0

    def bytes_for(self, Py_ssize_t blocks):
        """Bytes of so many blocks in one piece of memory, float rows aside."""
        cdef Py_ssize_t i
        return int(self.num_kv_heads) * sum([
            _stride(int(self.stores[i].k.bytes) * blocks) + _stride(int(self.stores[i].v.bytes) * blocks)
            for i in range(self.num_layers)
        ])

    def float_pool(self):
        """An empty pool of the float rows of tokens, or None if there are none."""
        return None if self.floats is None else self.floats.clone()

    @property
    def nbytes(self):
        return sum(self.sizes) + (0 if self.floats is None else self.floats.nbytes)

    def bytes_of_blocks(self, blocks):
        """Bytes of some blocks, float rows included."""
        cdef Py_ssize_t pieces = self.block_size // PIECE, i, count = 0
        cdef int32_t block
        if self.floats is None:
            return len(blocks) * self.block_bytes
        for block in blocks:
            for i in range(block * pieces, (block + 1) * pieces):
                count += self.float_of[i] >= 0
        return len(blocks) * self.block_bytes + count * self.floats.block_bytes

    @property
    def nbytes_used(self):
        """Bytes of the blocks that have owners."""
        return self.bytes_of_blocks([i for i in range(self.num_blocks) if self.owners[i]])

    @property
    def bytes_per_token(self):
        return self.block_bytes // self.block_size

    @property
    def block_bytes(self):
        """Bytes of one block over all layers."""
        cdef Py_ssize_t i, total = 0
        for i in range(self.num_layers):
            total += (self.stores[i].k.bytes + self.stores[i].v.bytes) * self.num_kv_heads
        return total


cdef void *_grown(void *memory, Py_ssize_t nbytes) except NULL:
    memory = realloc(memory, nbytes)
    if memory == NULL:
        raise MemoryError("cannot allocate the tables of a cache")
    return memory
