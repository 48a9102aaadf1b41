# cython: language_level=3, boundscheck=False, cdivision=True
"""Memory of blocks, the list of free ones, and how many owners each has."""
from libc.stdint cimport int32_t, intptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from kvfast._kernels cimport KV_MAX_HEAD_DIM
from kvfast.blocks cimport Arena, dtype_name, init_side, k_block_at, kv_store, parse_dtype, v_block_at
from kvfast.plan cimport Workspace, check_count

from kvfast.errors import CacheFullError, DimensionMismatchError

def per_layer(dtype, num_layers, name):
    """A dtype name for each layer, from one dtype or a list."""
    if not isinstance(dtype, (list, tuple)):
        dtype = [dtype] * num_layers
    if len(dtype) != num_layers:
        raise DimensionMismatchError(f"{name} must be one dtype or a list of {num_layers}, one per layer, "
                                     f"got {len(dtype)}")
    return [dtype_name(parse_dtype(one)) for one in dtype]


cdef Py_ssize_t _stride(Py_ssize_t nbytes) noexcept:
    """Bytes from head to head: not a multiple of a page, so that the heads' and the sides' streams do not
    fall into the same sets of the processor's caches."""
    return nbytes + 64 if nbytes % 4096 == 0 else nbytes


cdef class BlockPool:
    """`num_blocks` None: grows by `chunk_blocks`, a power of two. `interleaved`: all heads of a block lie together, so that few used
    blocks touch little memory; else each head is a stream of its own."""

    def __cinit__(self, num_layers, num_kv_heads, head_dim, int block_size, k_dtypes, v_dtypes, num_blocks,
                  bint interleaved=False, Py_ssize_t chunk_blocks=8):
        cdef Py_ssize_t i, blocks
        cdef int chunk_shift = 31
        cdef kv_store *store
        self.num_layers = check_count(num_layers, "num_layers", 1, 1 << 16)
        self.num_kv_heads = check_count(num_kv_heads, "num_kv_heads", 1, 1 << 16)
        self.head_dim = check_count(head_dim, "head_dim", 1, KV_MAX_HEAD_DIM)
        self.block_size = block_size
        self.settings = num_layers, num_kv_heads, head_dim, block_size, k_dtypes, v_dtypes, num_blocks, interleaved, chunk_blocks
        self.grows, self.interleaved = num_blocks is None, interleaved
        self.chunk_blocks = chunk_blocks
        if self.grows:
            chunk_shift = <int>((<object>chunk_blocks).bit_length() - 1)
        else:
            self.chunk_blocks = check_count(num_blocks, "num_blocks", 1, 1 << 40)
        if self.chunk_blocks > 0x7FFFFFFF:
            raise MemoryError(f"a cache of {self.chunk_blocks:,} blocks is beyond what kvfast can count")
        self.stores = <kv_store *>calloc(self.num_layers, sizeof(kv_store))
        if self.stores == NULL:
            raise MemoryError("cannot allocate the layers of a cache")
        total = 0
        blocks = self.chunk_blocks
        for i in range(self.num_layers):
            store = self.stores + i
            store.num_kv_heads = <int>self.num_kv_heads
            store.block_shift = <int>((<object>block_size).bit_length() - 1)
            store.chunk_shift, store.chunk_mask = chunk_shift, <int32_t>((<Py_ssize_t>1 << chunk_shift) - 1)
            init_side(&store.k, parse_dtype(k_dtypes[i]), <int>self.head_dim, block_size)
            init_side(&store.v, parse_dtype(v_dtypes[i]), <int>self.head_dim, block_size)
            size = int(self.num_kv_heads) * (int(store.k.bytes) + int(store.v.bytes) + 128) * int(blocks)
            if total + size > 1 << 60:
                raise MemoryError(f"a cache of more than {total + size:,} bytes is beyond the address space")
            store.k_offset = total
            if interleaved:
                store.k_head_stride, store.v_head_stride = store.k.bytes, store.v.bytes
                store.v_offset = total + self.num_kv_heads * store.k.bytes
                store.k_block_stride = store.v_block_stride = self.num_kv_heads * (store.k.bytes + store.v.bytes)
                total += blocks * store.k_block_stride
            else:
                store.k_block_stride, store.v_block_stride = store.k.bytes, store.v.bytes
                store.k_head_stride = _stride(blocks * store.k.bytes)
                store.v_head_stride = _stride(blocks * store.v.bytes)
                store.v_offset = total + self.num_kv_heads * store.k_head_stride
                total = store.v_offset + self.num_kv_heads * store.v_head_stride
        self.chunk_bytes = total
        self.arenas = []
        self.workspace = Workspace()
        if not self.grows:
            self._add_chunk(blocks)

    def __dealloc__(self):
        free(self.stores)
        free(self.chunks)
        free(self.owners)
        free(self.free)

    cdef int enter(self) except -1:
        if self.busy:
            raise RuntimeError("this cache is in use by another thread; a cache serves one thread at a time")
        self.busy = True
        return 0

    cdef int _add_chunk(self, Py_ssize_t blocks) except -1:
        cdef Py_ssize_t i, count = len(self.arenas), total = self.num_blocks + blocks
        cdef Arena arena
        cdef void *chunks
        cdef void *owners
        cdef void *stack
        if total > 0x7FFFFFFF:
            raise MemoryError(f"a cache of {total:,} blocks is beyond what kvfast can count")
        chunks = realloc(self.chunks, (count + 1) * sizeof(Py_ssize_t))
        if chunks != NULL:
            self.chunks = <Py_ssize_t *>chunks
        owners = realloc(self.owners, total * sizeof(int32_t))
        if owners != NULL:
            self.owners = <int32_t *>owners
        stack = realloc(self.free, total * sizeof(int32_t))
        if stack != NULL:
            self.free = <int32_t *>stack
        for i in range(self.num_layers):  # realloc may have moved the table
            self.stores[i].chunks = self.chunks
        if chunks == NULL or owners == NULL or stack == NULL:
            raise MemoryError("cannot allocate the tables of a cache")
        arena = Arena(self.chunk_bytes)
        self.arenas.append(arena)
        if count == 0:
            for i in range(self.num_layers):
                self.stores[i].base = arena.data
        self.chunks[count] = <intptr_t>arena.data - <intptr_t>self.stores[0].base
        # Blocks are taken in the order of memory: the next one is the last of the stack.
        for i in range(self.num_free - 1, -1, -1):
            self.free[i + blocks] = self.free[i]
        for i in range(blocks):
            self.owners[self.num_blocks + i] = 0
            self.free[i] = <int32_t>(total - 1 - i)
        self.num_free += blocks
        self.num_blocks = total
        return 0

    cdef Py_ssize_t available(self) except -1:
        """Blocks that can be taken without growing."""
        return self.num_free + (self.index.num_idle if self.index is not None else 0)

    cdef int ensure(self, Py_ssize_t count) except -1:
        """Make sure that `count` blocks can be taken; else CacheFullError, and nothing has changed."""
        if self.grows:
            while self.num_free < count:
                self._add_chunk(self.chunk_blocks)
        elif self.available() < count:
            raise CacheFullError(f"{count} blocks of {self.block_size} tokens are needed, and "
                                 f"{self.available()} of {self.num_blocks} are free", count, self.available())
        return 0

    cdef int32_t take(self) except -1:
        """A block with one owner, after `ensure`."""
        cdef int32_t block
        if self.num_free == 0:
            block = self.index.evict()
        else:
            self.num_free -= 1
            block = self.free[self.num_free]
        self.owners[block] = 1
        return block

    cdef int retain(self, int32_t block) except -1:
        """One owner more, the first perhaps, of a block whose contents are known."""
        self.owners[block] += 1
        if self.owners[block] == 1:
            self.index.reuse(block)
        return 0

    cdef int release(self, int32_t block) except -1:
        self.owners[block] -= 1
        if self.owners[block] == 0 and (self.index is None or not self.index.keep(block)):
            self.give_back(block)
        return 0

    cdef int give_back(self, int32_t block) except -1:
        """Put a block without owners among the free ones."""
        cdef Py_ssize_t i = self.num_free
        if self.grows:  # low blocks first, so that the last chunks empty and can go
            while i > 0 and self.free[i - 1] < block:
                self.free[i] = self.free[i - 1]
                i -= 1
        self.free[i] = block
        self.num_free += 1
        return 0

    cdef bint is_frozen(self, int32_t block) except -1:
        """Whether a block must be copied before it is written."""
        return self.owners[block] > 1 or (self.index is not None and block in self.index)

    cdef void copy(self, BlockPool other, int32_t source, int32_t target) noexcept:
        """Copy a block of a pool of the same shape, this one or another."""
        cdef Py_ssize_t i, h
        cdef kv_store *store
        for i in range(self.num_layers):
            store = self.stores + i
            for h in range(self.num_kv_heads):
                memcpy(k_block_at(store, target, h), k_block_at(other.stores + i, source, h), store.k.bytes)
                memcpy(v_block_at(store, target, h), v_block_at(other.stores + i, source, h), store.v.bytes)

    cdef BlockPool clone(self):
        """An empty pool of the same shape."""
        return BlockPool(*self.settings)

    cdef int trim(self) except -1:
        """Give back the last chunks of a growing pool while no block of theirs is in use."""
        cdef Py_ssize_t i, kept, first
        while self.grows and self.num_blocks > self.chunk_blocks:
            first = self.num_blocks - self.chunk_blocks
            for i in range(first, self.num_blocks):
                if self.owners[i]:
                    return 0
            kept = 0
            for i in range(self.num_free):
                if self.free[i] < first:
                    self.free[kept] = self.free[i]
                    kept += 1
            self.num_free = kept
            self.num_blocks = first
            self.arenas.pop()
        return 0

    def dtypes(self, bint values):
        """Names of the storage dtypes of all layers."""
        cdef Py_ssize_t i
        return [dtype_name(self.stores[i].v.dtype if values else self.stores[i].k.dtype)
                for i in range(self.num_layers)]

    @property
    def nbytes(self):
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def block_bytes(self):
        """Bytes of one block over all layers."""
        cdef Py_ssize_t i, total = 0
        for i in range(self.num_layers):
            total += (self.stores[i].k.bytes + self.stores[i].v.bytes) * self.num_kv_heads
        return total
