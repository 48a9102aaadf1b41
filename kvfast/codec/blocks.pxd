"""The block format: where the blocks and float rows of a layer lie. ``simd/kernels.h`` describes the bytes of a block."""
from libc.stdint cimport int16_t, int32_t, uint8_t, uint16_t

from kvfast.core.kernels cimport kv_kernels, kv_prefetch, kv_side
from kvfast.core.limits cimport KV_SLAB_SHIFT, KV_PIECE


# A slab of memory with the blocks of one layer from `first` on. The keys of block b of KV head h start at the layout's
# base + k + h * k_head_stride + (b - first) * k_block_stride; the same with v for values.
#
# These are distances from one base, not addresses: loading a pointer for each block costs bandwidth, perhaps because
# prefetchers follow pointers (bench/bench_attend.py).
ctypedef struct kv_slab:
    int32_t first
    Py_ssize_t k               # this and all below in bytes
    Py_ssize_t v
    Py_ssize_t k_head_stride
    Py_ssize_t v_head_stride
    Py_ssize_t k_block_stride
    Py_ssize_t v_block_stride


# The matrices of a KV head: for keys, for queries, and from stored keys back.
cdef enum:
    KV_TO_STORED
    KV_TO_QUERIES
    KV_FROM_STORED
    KV_NUM_BASES


# Decodes `count` tokens of a KV head from `first` on to float16 rows, as `side` says, and sets `next` to the codes that follow.
ctypedef void (*kv_decode)(const kv_kernels *kernels, const void *codes, const kv_side *side, Py_ssize_t head, Py_ssize_t first,
                           int count, uint16_t *rows, kv_prefetch *next) noexcept nogil


# The blocks of one layer; block b lies in slabs[slab_of[b >> KV_SLAB_SHIFT]].
#
# Tokens may also have float rows, float16 if the side is integers. They lie in pieces of KV_PIECE tokens, which are the
# blocks of a layout of their own. The first `float_tokens` of a sequence always have float rows, and all tokens have them until
# `open_tokens` tokens follow their piece, or with `seals` their block, which has no codes before it is full. Float rows are in the
# basis of the codes. A sealed block of a layer is patched if it was cut and then got tokens that do not fit its statistics: the
# tokens before keep their codes, and the new ones keep their float rows.
ctypedef struct kv_layout:
    kv_side k
    kv_side v
    int num_kv_heads
    int block_shift            # block_size is 2^block_shift
    char *base
    kv_slab *slabs
    const uint8_t *slab_of     # NULL: all blocks are in the first slab
    bint secure                # memory is wiped before it is freed
    bint latent                # rows are keys and values at once, on the K side; their rotary part is on the V side
    bint seals                 # blocks are sealed: encoded when they are full
    Py_ssize_t open_tokens     # tokens that follow others before these are read as codes; 0: no newest tokens are floats
    Py_ssize_t border          # the newest floats begin at multiples of this: with `seals` at blocks, else at pieces
    Py_ssize_t kept_tokens     # tokens that follow others before their float rows are released; not below `open_tokens`
    bint floats_of_steps       # with `open_tokens`: queries read all tokens of their step as float rows
    int rule                   # number of `kept_tokens` and `border` among the `rules` of a pool; -1 without `open_tokens`
    int float_tokens
    const kv_layout *floats    # NULL: no token of this layer has float rows
    const int32_t *float_of    # (num_blocks, block_size / KV_PIECE) piece of each KV_PIECE tokens of a block, or -1
    const int16_t *kept_codes  # (num_blocks,) as in FloatRows, or NULL
    Py_ssize_t num_patched     # number of patched blocks, as kept_codes marks them
    kv_decode decode           # NULL: rows are read where they lie. Else there are no blocks, and attention decodes tile by tile
    const void *k_codes        # what `decode` reads
    const void *v_codes
    const float *bases         # (num_kv_heads, KV_NUM_BASES, head_dim, padded_dim) matrices of a calibration, for the keys; or NULL


# Where the tokens of one sequence lie. The positions from i * block_size on are in block table[i] for i below sink_blocks,
# and in block table[i - skipped] for i from sink_blocks + skipped on. Those between are gone.
ctypedef struct kv_context:
    const int32_t *table       # NULL: table[i] = i
    Py_ssize_t length          # tokens
    Py_ssize_t sink_blocks
    Py_ssize_t skipped
    Py_ssize_t floats_begin    # with `open_tokens`: tokens below have codes alone, tokens from here on float rows, too
    Py_ssize_t counted         # tokens before those of the step


cdef inline Py_ssize_t k_offset_of(const kv_layout *layout, int32_t block, Py_ssize_t head) noexcept nogil:
    cdef const kv_slab *slab = layout.slabs
    if layout.slab_of != NULL:
        slab += layout.slab_of[block >> KV_SLAB_SHIFT]
    return slab.k + head * slab.k_head_stride + (block - slab.first) * slab.k_block_stride


cdef inline Py_ssize_t v_offset_of(const kv_layout *layout, int32_t block, Py_ssize_t head) noexcept nogil:
    cdef const kv_slab *slab = layout.slabs
    if layout.slab_of != NULL:
        slab += layout.slab_of[block >> KV_SLAB_SHIFT]
    return slab.v + head * slab.v_head_stride + (block - slab.first) * slab.v_block_stride


cdef inline char *k_block_at(const kv_layout *layout, int32_t block, Py_ssize_t head) noexcept nogil:
    return layout.base + k_offset_of(layout, block, head)


cdef inline char *v_block_at(const kv_layout *layout, int32_t block, Py_ssize_t head) noexcept nogil:
    return layout.base + v_offset_of(layout, block, head)


cdef inline const kv_side *side_of(const kv_layout *layout, bint values) noexcept nogil:
    return &layout.v if values else &layout.k


cdef inline char *block_at(const kv_layout *layout, int32_t block, Py_ssize_t head, bint values) noexcept nogil:
    return v_block_at(layout, block, head) if values else k_block_at(layout, block, head)


cdef inline int32_t piece_of(const kv_layout *layout, int32_t block, Py_ssize_t offset) noexcept nogil:
    """The piece of the token at an offset of a block, or -1."""
    return layout.float_of[((<Py_ssize_t>block << layout.block_shift) + offset) // KV_PIECE]


cdef inline Py_ssize_t patched_from(const kv_layout *layout, int32_t block) noexcept nogil:
    """First offset of a patched block whose token keeps its float rows, or block_size if the block is not patched."""
    if layout.kept_codes == NULL or layout.kept_codes[block] >= 0:
        return layout.k.block_size
    return -layout.kept_codes[block]


cdef inline Py_ssize_t coded_at(Py_ssize_t position, Py_ssize_t num_floats, Py_ssize_t border) noexcept nogil:
    """First position that is a float where those of `num_floats` tokens before `position` are; see `border` of `kv_layout`."""
    return (position - num_floats) & -border if position > num_floats else 0


cdef inline int32_t block_of(const kv_context *context, Py_ssize_t index) noexcept nogil:
    if context.table == NULL:
        return <int32_t>index
    return context.table[index if index < context.sink_blocks else index - context.skipped]


cdef inline const kv_side *values_of(const kv_layout *layout) noexcept nogil:
    """The side that attention sums up. Its rows are as wide as those of the output."""
    return &layout.k if layout.latent else &layout.v


cdef inline bint changes_basis(const kv_layout *layout, bint values) noexcept nogil:
    """Whether the rows of a side are stored in another basis."""
    return layout.v.rotated if values else layout.k.rotated or layout.bases != NULL


cdef inline void change_key_basis(const kv_kernels *kernels, const kv_layout *layout, Py_ssize_t head, int basis, const float *rows,
                                  Py_ssize_t stride, Py_ssize_t count, float *out, Py_ssize_t out_stride) noexcept nogil:
    """Bring keys or queries of a KV head into another basis, by the matrix that the layer has for them or by the Hadamard rotation.
    The scores of queries and keys stay the same. `out` may be the rows themselves. Rows that are stored as they are stay untouched."""
    cdef Py_ssize_t dim = layout.k.head_dim
    if layout.bases != NULL:
        kernels.change_basis(rows, stride, count, dim, layout.bases + (head * KV_NUM_BASES + basis) * dim * layout.k.padded_dim,
                             out, out_stride)
    elif layout.k.rotated:
        kernels.rotate(rows, stride, count, dim, out, out_stride)


cdef class Arena:
    cdef void *_raw
    cdef Py_ssize_t _align
    cdef int _mapped          # pages of its own, and not from `calloc`
    cdef object _foreign       # whose memory it is, if it is another's
    cdef char *data
    cdef readonly Py_ssize_t nbytes
    cdef bint secure


cdef class ArenaView:
    cdef Arena arena


cdef Arena arena_over(object memory)
cdef Arena arena_at(object owner, char *data, Py_ssize_t nbytes)
cdef ArenaView view_of(Arena arena)
cdef void init_side(kv_side *side, int dtype, int head_dim, int block_size, bint means=*, bint channels=*) noexcept nogil
cdef int init_sides(kv_layout *layout, object fmt, int head_dim, int v_head_dim, int block_size, object rope_dim) except -1
cdef int init_rows(kv_layout *layout, kv_slab *slab, Py_ssize_t num_kv_heads, int k_dtype, Py_ssize_t head_dim, int v_dtype,
                   Py_ssize_t v_head_dim) except -1
cdef object set_bases(kv_layout *layout, object calibration)


cdef inline char *float_row_at(const kv_layout *layout, int32_t block, Py_ssize_t offset, Py_ssize_t head, bint values) noexcept nogil:
    """The float row of a token."""
    cdef char *rows = block_at(layout.floats, piece_of(layout, block, offset), head, values)
    return rows + offset % KV_PIECE * side_of(layout.floats, values).row_stride
