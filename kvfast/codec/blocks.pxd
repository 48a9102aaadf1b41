"""The block format, and who owns its memory.

See ``simd/kernels.h`` for what the bytes of a block are.
"""
from libc.stdint cimport int16_t, int32_t, uint8_t

from kvfast.core.kernels cimport kv_side
from kvfast.core.limits cimport KV_CHUNK_SHIFT, KV_PIECE


# A piece of memory with the blocks of one layer from `first` on. Block b of KV head h starts at the store's
# base + k + h * k_head_stride + (b - first) * the side's bytes, and so for v.
#
# Distances from one base, not addresses: loading a pointer for each block costs up to a quarter of the
# bandwidth, measured on a Xeon with AVX-512, perhaps because its prefetcher follows them.
ctypedef struct kv_chunk:
    int32_t first
    Py_ssize_t k               # bytes, all of them
    Py_ssize_t v
    Py_ssize_t k_head_stride
    Py_ssize_t v_head_stride


# The blocks of one layer; block b lies in chunks[chunk_of[b >> KV_CHUNK_SHIFT]].
#
# Tokens may also have float rows, float16 where the side is integers: in pieces of KV_PIECE tokens, blocks of a store of
# their own. The first `float_tokens` of a sequence always; with `seals` all tokens until their block is encoded, and a
# little longer. Rows and codes of a side that is rotated are both so. A finished block that was cut, and to which tokens
# were added that its statistics do not fit, is patched: the tokens before have their codes, and these float rows for good.
ctypedef struct kv_store:
    kv_side k
    kv_side v
    int num_kv_heads
    int block_shift            # block_size is 2^block_shift
    char *base
    kv_chunk *chunks
    const uint8_t *chunk_of    # NULL: all in the first
    bint secure                # memory is wiped before it is given back
    bint latent                # rows are keys and values at once, on the K side; on the V side is their rotary part
    bint seals                 # blocks are encoded as a whole
    int float_tokens
    const kv_store *floats     # NULL: no token of this layer has float rows
    const int32_t *float_of    # (num_blocks, block_size / KV_PIECE) piece of KV_PIECE places of a block, or -1
    const int16_t *kept_codes  # (num_blocks,) as in FloatRows, or NULL
    const Py_ssize_t *num_patched  # blocks that kept tells have float rows for good


# Where the tokens of one sequence lie: positions i * block_size ... are block table[i] for i below
# sink_blocks, block table[i - skipped] for i from sink_blocks + skipped on, and gone between.
ctypedef struct kv_context:
    const int32_t *table       # NULL: table[i] = i
    Py_ssize_t length          # tokens
    Py_ssize_t sink_blocks
    Py_ssize_t skipped
    Py_ssize_t floats_begin    # of a store that finishes: all tokens below have codes alone,
    Py_ssize_t codes_end       # all below codes, and all from `floats_begin` on float rows


cdef inline Py_ssize_t k_offset_of(const kv_store *store, int32_t block, Py_ssize_t head) noexcept nogil:
    cdef const kv_chunk *chunk = store.chunks
    if store.chunk_of != NULL:
        chunk += store.chunk_of[block >> KV_CHUNK_SHIFT]
    return chunk.k + head * chunk.k_head_stride + (block - chunk.first) * store.k.bytes


cdef inline Py_ssize_t v_offset_of(const kv_store *store, int32_t block, Py_ssize_t head) noexcept nogil:
    cdef const kv_chunk *chunk = store.chunks
    if store.chunk_of != NULL:
        chunk += store.chunk_of[block >> KV_CHUNK_SHIFT]
    return chunk.v + head * chunk.v_head_stride + (block - chunk.first) * store.v.bytes


cdef inline char *k_block_at(const kv_store *store, int32_t block, Py_ssize_t head) noexcept nogil:
    return store.base + k_offset_of(store, block, head)


cdef inline char *v_block_at(const kv_store *store, int32_t block, Py_ssize_t head) noexcept nogil:
    return store.base + v_offset_of(store, block, head)


cdef inline int32_t piece_of(const kv_store *store, int32_t block, Py_ssize_t offset) noexcept nogil:
    """The piece of a place in a block, or -1."""
    return store.float_of[((<Py_ssize_t>block << store.block_shift) + offset) // KV_PIECE]


cdef inline Py_ssize_t patched_from(const kv_store *store, int32_t block) noexcept nogil:
    """First place of a block that has float rows for good, or block_size."""
    if store.kept_codes == NULL or store.kept_codes[block] >= 0:
        return store.k.block_size
    return -store.kept_codes[block]


cdef inline int32_t block_of(const kv_context *context, Py_ssize_t index) noexcept nogil:
    if context.table == NULL:
        return <int32_t>index
    return context.table[index if index < context.sink_blocks else index - context.skipped]


cdef inline const kv_side *values_of(const kv_store *store) noexcept nogil:
    """The side that attention sums up: its rows are as wide as the output's."""
    return &store.k if store.latent else &store.v


cdef class Arena:
    cdef void *_raw
    cdef unsigned char[::1] _foreign
    cdef char *data
    cdef readonly Py_ssize_t nbytes
    cdef bint secure


cdef class ArenaView:
    cdef Arena arena


cdef Arena arena_over(object memory)
cdef ArenaView view_of(Arena arena)
cdef int init_side(kv_side *side, int dtype, int head_dim, int block_size, bint means=*, bint channels=*) except -1
cdef int init_sides(kv_store *store, object fmt, int head_dim, int v_head_dim, int block_size, object rope_dim) except -1


cdef inline char *float_row_at(const kv_store *store, int32_t block, Py_ssize_t offset, Py_ssize_t head, bint values) noexcept nogil:
    """The float row of a token."""
    cdef int32_t piece = piece_of(store, block, offset)
    if values:
        return v_block_at(store.floats, piece, head) + offset % KV_PIECE * store.floats.v.row_stride
    return k_block_at(store.floats, piece, head) + offset % KV_PIECE * store.floats.k.row_stride


cdef inline int float_dtype_of(const kv_store *store, bint values) noexcept nogil:
    """Of the float rows."""
    return store.floats.v.dtype if values else store.floats.k.dtype
