# cython: language_level=3, boundscheck=False, cdivision=True
"""Sizes of blocks, and the memory that holds them."""
import numpy as np

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from kvfast.codec.dtypes cimport parse_dtype
from kvfast.core.checks cimport check_count
from kvfast.core.kernels cimport KV_FLOAT16, KV_FLOAT_ROWS, active, kv_dtype, kv_dtypes, kv_kernels, kv_side
from kvfast.core.limits cimport KV_LANES, KV_MAX_HEAD_DIM, KV_MAX_KV_HEADS, KV_TILE
from kvfast.core.numa cimport spread
from kvfast.core.wipe cimport kv_wipe_pages


cdef extern from *:
    """
    #include <stdlib.h>
    #if defined(__linux__)
    #include <sys/mman.h>
    #include <unistd.h>
    /* Pages of their own, for much and for little memory: `calloc` zeroes memory that was used before at once, and so takes it, and
       what is freed goes back to the system only where no other memory lies after it. Between the two it does go back, and to take
       pages anew for each prompt would cost more than to zero them. A process has 65,530 mappings by default, so not more than half. */
    enum { KV_LITTLE = 1 << 17, KV_MUCH = 1 << 23, KV_MOST_MAPPED = 1 << 15 };
    static long kv_mapped;
    static void *kv_new_pages(size_t bytes, int *mapped)
    {
        void *pages = MAP_FAILED;
        const long count = __atomic_add_fetch(&kv_mapped, 1, __ATOMIC_RELAXED);
        if (bytes >= KV_MUCH || (bytes < KV_LITTLE && count <= KV_MOST_MAPPED))
            pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        *mapped = pages != MAP_FAILED;
        if (*mapped) return pages;
        (void)__atomic_sub_fetch(&kv_mapped, 1, __ATOMIC_RELAXED);
        return calloc(bytes, 1);
    }
    static void kv_free_pages(void *pages, size_t bytes, int mapped)
    {
        if (!mapped) free(pages);
        else if (munmap(pages, bytes) == 0) (void)__atomic_sub_fetch(&kv_mapped, 1, __ATOMIC_RELAXED);
    }
    /* With pages of 16 or 64 KiB, as on some ARM systems, a huge page has 32 or 512 MiB: too much for a first write. */
    static void kv_advise_huge(void *address, size_t bytes)
    {
        if (sysconf(_SC_PAGESIZE) == 4096) (void)madvise(address, bytes, MADV_HUGEPAGE);
    }
    #else
    static void *kv_new_pages(size_t bytes, int *mapped) { *mapped = 0; return calloc(bytes, 1); }
    static void kv_free_pages(void *pages, size_t bytes, int mapped) { (void)bytes, (void)mapped; free(pages); }
    static void kv_advise_huge(void *address, size_t bytes) { (void)address; (void)bytes; }
    #endif
    """
    void *kv_new_pages(size_t bytes, int *mapped) nogil
    void kv_free_pages(void *pages, size_t bytes, int mapped) nogil
    void kv_advise_huge(void *address, size_t bytes) nogil


cdef int _TILE_SHIFT = <int>((<object>KV_TILE).bit_length() - 1)

BLOCK_ALIGNMENT = 64  # bytes: kernels load whole cache lines


cdef void init_side(kv_side *side, int dtype, int head_dim, int block_size, bint means=False, bint channels=False) noexcept nogil:
    """A side of blocks. With `means` or `channels`, a block has statistics; see ``simd/kernels.h``."""
    cdef Py_ssize_t elements, statistics
    cdef const kv_dtype *known = kv_dtypes + dtype
    memset(side, 0, sizeof(kv_side))
    side.dtype, side.family = dtype, known.family
    side.block_size = block_size
    side.head_dim = head_dim
    side.padded_dim = (head_dim + KV_LANES - 1) // KV_LANES * KV_LANES
    elements = <Py_ssize_t>block_size * side.padded_dim
    if side.family == KV_FLOAT_ROWS:
        side.row_stride = side.padded_dim * known.bits // 8
        side.bytes = block_size * side.row_stride
    else:
        side.scales = elements // 8 * known.bits
        side.scale_bytes = 0 if channels else known.scale_bytes
        side.bytes = _whole_lines(side.scales + block_size * side.scale_bytes)
        statistics = _whole_lines(2 * side.padded_dim)
        if means or channels:
            side.means = side.bytes
            side.bytes += statistics
        if channels:
            side.channels = side.bytes
            side.bytes += statistics


cdef Py_ssize_t _whole_lines(Py_ssize_t nbytes) noexcept nogil:
    return (nbytes + 63) // 64 * 64


cdef int init_sides(kv_layout *layout, object fmt, int head_dim, int v_head_dim, int block_size, object rope_dim) except -1:
    """Set up both sides for a KVFormat; with `rope_dim`, for latent rows and their rotary part, which may be empty."""
    # Channel scales need evenly spaced levels.
    cdef int k = parse_dtype(fmt.k_dtype, "uniform" if fmt.per_channel else fmt.codebook)
    cdef int v = parse_dtype(fmt.v_dtype, fmt.codebook)
    init_side(&layout.k, k, head_dim, block_size, fmt.centring or fmt.per_channel, fmt.per_channel)
    if rope_dim is None:
        init_side(&layout.v, v, v_head_dim, block_size)
    else:  # an empty rotary part is float16, which has no scales and so takes no bytes
        init_side(&layout.v, v if rope_dim else KV_FLOAT16, rope_dim, block_size)
        layout.latent = layout.v.as_keys = True
    layout.v.gaussian = fmt.codebook != "uniform"
    layout.k.gaussian = layout.v.gaussian and not fmt.per_channel
    layout.k.rotated, layout.v.rotated = "k" in fmt.rotation, "v" in fmt.rotation and rope_dim != 0
    layout.k.clip_search = layout.v.clip_search = fmt.clip_search
    layout.seals, layout.open_tokens, layout.float_tokens = fmt.seals, fmt.open_tokens, fmt.num_first_float_tokens
    layout.floats_of_steps, layout.kept_tokens = fmt.floats_of_steps, fmt.kept_tokens
    layout.border = block_size if fmt.seals else KV_PIECE
    return 0


cdef int init_rows(kv_layout *layout, kv_slab *slab, Py_ssize_t num_kv_heads, int k_dtype, Py_ssize_t head_dim, int v_dtype,
                   Py_ssize_t v_head_dim) except -1:
    """A layout of float rows that lie in no cache: blocks of KV_TILE tokens in one slab. Where they lie the caller sets."""
    memset(layout, 0, sizeof(kv_layout))
    memset(slab, 0, sizeof(kv_slab))
    init_side(&layout.k, k_dtype, <int>head_dim, KV_TILE)
    init_side(&layout.v, v_dtype, <int>v_head_dim, KV_TILE)
    layout.num_kv_heads, layout.block_shift, layout.slabs = <int>num_kv_heads, _TILE_SHIFT, slab
    return 0


cdef object set_bases(kv_layout *layout, object calibration):
    """Let keys be stored in the basis of a layer's calibration. Returns what has to live as long as the layout."""
    cdef Py_ssize_t heads = layout.num_kv_heads, dim = layout.k.head_dim, padded = layout.k.padded_dim, head, i, j
    cdef const float[:, :, :, ::1] given = calibration.matrices(layout.k.channels > 0, heads, dim)
    cdef const kv_kernels *kernels = active()
    cdef float[:, :, :, ::1] bases = np.zeros((heads, <int>KV_NUM_BASES, dim, padded), np.float32)
    # Channels with scales of their own differ in their bits. Codes of rotated rows are as fine in each element, so that all should
    # matter the same.
    cdef bint mixed = layout.k.channels == 0
    for head in range(heads):
        for i in range(dim):
            for j in range(dim):
                bases[head, KV_TO_STORED, i, j] = given[head, 0, i, j]
                bases[head, KV_TO_QUERIES, i, j] = given[head, 1, i, j]
        for i in range(2 if mixed else 0):
            kernels.rotate(&bases[head, i, 0, 0], padded, dim, dim, &bases[head, i, 0, 0], padded)
        for i in range(dim):
            for j in range(dim):
                bases[head, KV_FROM_STORED, i, j] = bases[head, KV_TO_QUERIES, j, i]
    layout.bases, layout.k.in_basis = &bases[0, 0, 0, 0], True
    return bases


cdef class Arena:
    """Zeroed memory for blocks, aligned to cache lines, in huge pages and spread over the nodes of memory where that pays.

    The system allocates pages when they are first written. The arena lives as long as its cache or any array over it. If it
    is `secure`, it is wiped at its end.
    """

    def __cinit__(self, size, bint secure=False):
        if size is None:
            return
        if size > <size_t>-1 // 4:
            raise MemoryError(f"a cache of {size:,} bytes is beyond the address space")
        self.nbytes, self.secure = size, secure
        # 2 MiB is a huge page; smaller arenas would only waste memory on it.
        self._align = 1 << 21 if self.nbytes >= 1 << 23 else 64
        self._raw = kv_new_pages(self.nbytes + self._align, &self._mapped)
        if self._raw == NULL:
            raise MemoryError(f"cannot allocate {size:,} bytes for a cache")
        self.data = <char *>((<uintptr_t>self._raw + self._align - 1) // self._align * self._align)
        if self._align > 64:
            kv_advise_huge(self.data, self.nbytes)
            if self._mapped:
                spread(self.data, self.nbytes)

    def __dealloc__(self):
        if self.secure and self._raw != NULL:
            kv_wipe_pages(self.data, self.nbytes)
        if self._raw != NULL:
            kv_free_pages(self._raw, self.nbytes + self._align, self._mapped)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.nbytes, 0, flags)


cdef class ArenaView:
    """The memory of an arena, for reading. An array over it cannot be made writable; over a memoryview it could, as NumPy
    would find the arena under it."""

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.arena.data, self.arena.nbytes, 1, flags)


cdef ArenaView view_of(Arena arena):
    cdef ArenaView self = ArenaView.__new__(ArenaView)
    self.arena = arena
    return self


cdef Arena arena_over(object memory):
    """An arena over writable memory of another object, for example a mapped file."""
    cdef unsigned char[::1] view = memory
    return arena_at(view, <char *>&view[0], view.shape[0])


cdef Arena arena_at(object owner, char *data, Py_ssize_t nbytes):
    """An arena over memory that is there as long as its owner."""
    cdef Arena arena = Arena(None)
    arena._foreign, arena.data, arena.nbytes = owner, data, nbytes
    return arena


def block_nbytes(fmt, num_kv_heads, head_dim, v_head_dim, int block_size, rope_dim=None):
    """Bytes of one block of a layer: the keys and values of all heads, scales included; with `rope_dim`, as in `init_sides`."""
    cdef kv_layout layout
    cdef Py_ssize_t heads = check_count(num_kv_heads, "num_kv_heads", 1, KV_MAX_KV_HEADS)
    memset(&layout, 0, sizeof(layout))
    init_sides(&layout, fmt, <int>check_count(head_dim, "head_dim", 1, KV_MAX_HEAD_DIM),
               <int>check_count(v_head_dim, "v_head_dim", 1, KV_MAX_HEAD_DIM), block_size, rope_dim)
    return heads * (layout.k.bytes + layout.v.bytes)
