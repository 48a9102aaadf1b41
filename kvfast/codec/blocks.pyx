# cython: language_level=3, boundscheck=False, cdivision=True
"""Storage dtypes, sizes of blocks, and the memory that holds them."""
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from kvfast.core.checks cimport check_count
from kvfast.core.kernels cimport (KV_BFLOAT16, KV_FLOAT16, KV_FLOAT32, KV_GAUSS4, KV_INT4, KV_LANES, KV_MAX_HEAD_DIM, KV_NUM_FLOATS,
                                  KV_TRELLIS4, kv_side)
from kvfast.core.wipe cimport kv_wipe_pages


cdef extern from *:
    """
    #if defined(__linux__)
    #include <sys/mman.h>
    #include <unistd.h>
    /* Where pages have 16 or 64 KiB, as on some ARM systems, a huge one has 32 or 512 MiB: too much for a first write. */
    static void kv_advise_huge(void *address, size_t bytes)
    {
        if (sysconf(_SC_PAGESIZE) == 4096) (void)madvise(address, bytes, MADV_HUGEPAGE);
    }
    #else
    static void kv_advise_huge(void *address, size_t bytes) { (void)address; (void)bytes; }
    #endif
    """
    void kv_advise_huge(void *address, size_t bytes) nogil


BLOCK_ALIGNMENT = 64  # bytes: kernels load whole cache lines

# By number; GAUSS4 and TRELLIS4 are int4 by other codebooks.
_NAMES = ("float32", "float16", "bfloat16", "int8", "int4", "int4", "int2", "int3", "int5", "int6", "int7", "int4")
_BITS = (32, 16, 16, 8, 4, 4, 2, 3, 5, 6, 7, 4)
_ALIASES = {
    "float32": ("f32", "fp32", "float", "single"),
    "float16": ("f16", "fp16", "half"),
    "bfloat16": ("bf16",),
    "int8": ("i8", "q8"),
    "int4": ("i4", "q4"),
    "int2": ("i2", "q2"),
    "int3": ("i3", "q3"),
    "int5": ("i5", "q5"),
    "int6": ("i6", "q6"),
    "int7": ("i7", "q7"),
}
_DTYPES = {alias: _NAMES.index(name) for name, aliases in _ALIASES.items() for alias in (name, *aliases)}


cdef int parse_dtype(object dtype) except -1:
    """Storage dtype of a name, alias, or NumPy (ml_dtypes) dtype."""
    name = dtype
    if not isinstance(name, str):
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    number = _DTYPES.get(name.strip().lower())
    if number is None:
        raise ValueError(f"unknown storage dtype {dtype!r}; choose one of {', '.join(_ALIASES)}")
    return number


def canonical_dtype(dtype):
    """The name of a storage dtype, of any of its names."""
    return _NAMES[parse_dtype(dtype)]


cdef str dtype_name(int dtype):
    return _NAMES[dtype]


cdef str codes_name(int dtype):
    """The same with the codebook of INT4."""
    return "gauss4" if dtype == KV_GAUSS4 else "trellis4" if dtype == KV_TRELLIS4 else _NAMES[dtype]


cdef float dtype_limit(int dtype) noexcept nogil:
    """Largest magnitude that rounds to a finite value of the dtype."""
    if dtype == KV_FLOAT16:
        return 65504.0
    if dtype == KV_BFLOAT16:
        return 3.3895314e38
    if dtype == KV_TRELLIS4:  # the largest level may stand for an element that is half of it
        return 1.6e38
    if dtype >= KV_GAUSS4:  # a bfloat16 scale times a level
        return 3.3e38
    return 3.4028235e38


cdef int init_side(kv_side *side, int dtype, int head_dim, int block_size, bint means=False, bint channels=False) except -1:
    """A side of blocks. With `means` or `channels`, a block has statistics; see ``simd/kernels.h``."""
    cdef Py_ssize_t elements, statistics
    memset(side, 0, sizeof(kv_side))
    side.dtype = dtype
    side.block_size = block_size
    side.head_dim = head_dim
    side.padded_dim = (head_dim + KV_LANES - 1) // KV_LANES * KV_LANES
    elements = <Py_ssize_t>block_size * side.padded_dim
    if dtype < KV_NUM_FLOATS:
        side.row_stride = side.padded_dim * (4 if dtype == KV_FLOAT32 else 2)
        side.bytes = block_size * side.row_stride
    else:
        side.scales = elements // 8 * <int>_BITS[dtype]
        side.scale_bytes = 0 if channels else 2 if dtype >= KV_GAUSS4 else 4
        side.bytes = _whole_lines(side.scales + block_size * side.scale_bytes)
        statistics = _whole_lines(2 * side.padded_dim)
        if means or channels:
            side.means = side.bytes
            side.bytes += statistics
        if channels:
            side.channels = side.bytes
            side.bytes += statistics
    return 0


cdef Py_ssize_t _whole_lines(Py_ssize_t nbytes) noexcept:
    return (nbytes + 63) // 64 * 64


cdef int init_sides(kv_store *store, object fmt, int head_dim, int v_head_dim, int block_size, object rope_dim) except -1:
    """Both sides of a KVFormat; with `rope_dim`, of latent rows and their rotary part, which may be empty."""
    cdef int best = {"uniform": KV_INT4, "gaussian": KV_GAUSS4, "trellis": KV_TRELLIS4}[fmt.codebook]
    cdef int k = parse_dtype(fmt.k_dtype), v = parse_dtype(fmt.v_dtype)
    if k == KV_INT4 and not fmt.per_channel:
        k = best
    if v == KV_INT4:
        v = best
    init_side(&store.k, k, head_dim, block_size, fmt.seals, fmt.per_channel)
    if rope_dim is None:
        init_side(&store.v, v, v_head_dim, block_size)
    else:  # nothing of float16 takes no bytes, neither for scales
        init_side(&store.v, v if rope_dim else KV_FLOAT16, rope_dim, block_size)
        store.latent = store.v.as_keys = True
    store.k.gaussian = store.v.gaussian = best != KV_INT4
    store.k.rotated, store.v.rotated = "k" in fmt.rotation, "v" in fmt.rotation and rope_dim != 0
    store.k.clip_search = store.v.clip_search = fmt.clip_search
    store.seals, store.float_tokens = fmt.seals, fmt.num_float_tokens
    return 0


cdef class Arena:
    """Zeroed memory for blocks, aligned to cache lines, in huge pages where that pays.

    Pages become real when they are first written. The arena lives as long as its cache or any array
    that looks into it, and is wiped then if it is `secure`.
    """

    def __cinit__(self, size, bint secure=False):
        cdef Py_ssize_t align
        if size is None:
            return
        if size > <size_t>-1 // 4:
            raise MemoryError(f"a cache of {size:,} bytes is beyond the address space")
        self.nbytes, self.secure = size, secure
        # 2 MiB is a huge page; smaller arenas would only waste memory on it.
        align = 1 << 21 if self.nbytes >= 1 << 23 else 64
        self._raw = calloc(self.nbytes + align, 1)
        if self._raw == NULL:
            raise MemoryError(f"cannot allocate {size:,} bytes for a cache")
        self.data = <char *>((<uintptr_t>self._raw + align - 1) // align * align)
        if align > 64:
            kv_advise_huge(self.data, self.nbytes)

    def __dealloc__(self):
        if self.secure and self._raw != NULL:
            kv_wipe_pages(self.data, self.nbytes)
        free(self._raw)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.nbytes, 0, flags)


cdef class ArenaView:
    """The memory of an arena, for reading: an array over it cannot be unlocked, as it can over a memoryview, whose arena
    NumPy finds."""

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.arena.data, self.arena.nbytes, 1, flags)


cdef ArenaView view_of(Arena arena):
    cdef ArenaView self = ArenaView.__new__(ArenaView)
    self.arena = arena
    return self


cdef Arena arena_over(object memory):
    """An arena that is another's writable memory, a mapped file for example."""
    cdef unsigned char[::1] view = memory
    return arena_at(view, <char *>&view[0], view.shape[0])


cdef Arena arena_at(object owner, char *data, Py_ssize_t nbytes):
    """An arena whose memory is there as long as its owner."""
    cdef Arena arena = Arena(None)
    arena._foreign, arena.data, arena.nbytes = owner, data, nbytes
    return arena


def block_nbytes(fmt, num_kv_heads, head_dim, v_head_dim, int block_size):
    """Bytes of one block of a layer: the keys and values of all heads, scales included."""
    cdef kv_store store
    cdef Py_ssize_t heads = check_count(num_kv_heads, "num_kv_heads", 1, 1 << 16)
    memset(&store, 0, sizeof(store))
    init_sides(&store, fmt, <int>check_count(head_dim, "head_dim", 1, KV_MAX_HEAD_DIM),
               <int>check_count(v_head_dim, "v_head_dim", 1, KV_MAX_HEAD_DIM), block_size, None)
    return heads * (store.k.bytes + store.v.bytes)
