# cython: language_level=3, boundscheck=False, cdivision=True
"""How many tokens a tile has: those between two softmax corrections."""
from kvfast.codec.blocks cimport kv_store, values_of
from kvfast.core.kernels cimport KV_FLOAT_ROWS, KV_INT2, KV_INT3, KV_PACKED_CODES, kv_dtypes, kv_kernels, kv_side
from kvfast.core.limits cimport KV_LANES, KV_MATRIX_TILE, KV_TILE

cdef extern from "simd/platform.h" nogil:
    enum: KV_X86

cdef enum:
    # Most bytes of float rows in a tile. Larger tiles have fewer softmax corrections and fewer turns between keys and values.
    # python -m kvfast bench --work decode,cached --formats all sets this and the sizes below.
    FLOAT_TILE_BYTES = 32768
    # The same of float rows next to codes, which are few, and of processors other than x86, where more was not measured.
    FEW_ROWS_BYTES = 4096
    # The same of codes. Between the passes of a tile nothing is fetched, and rows wait for their maxima.
    CODE_TILE_BYTES = 32768
    # Most tokens of a tile where a side is expanded before it is read (more was not measured), and where values are not rotated: the
    # weights of a tile are rounded to a unit that the largest of them sets, and unrotated values may show it.
    SHORT_TILE = 128
    # Tokens of a tile where one side has 8 bits, on a matrix unit and on processors other than x86.
    INTEGER_TILE = 64


cdef Py_ssize_t bytes_of(const kv_store *store, Py_ssize_t tokens) noexcept nogil:
    """Bytes that attention reads of `tokens` tokens, in all heads."""
    return store.num_kv_heads * tokens * (token_bytes(&store.k) + token_bytes(&store.v))


cdef int _limit_tile(int tile, const kv_side *side, Py_ssize_t most_bytes) noexcept nogil:
    """`most_bytes` of float rows."""
    if side.family == KV_PACKED_CODES and side.dtype != KV_INT2 and side.dtype != KV_INT3:
        return min(tile, SHORT_TILE)
    if side.family != KV_FLOAT_ROWS:
        most_bytes = CODE_TILE_BYTES
    while tile > KV_LANES and tile * side.padded_dim * kv_dtypes[side.dtype].bits // 8 > most_bytes:
        tile //= 2
    return tile


cdef int choose_tile(const kv_store *store, const kv_kernels *kernels, bint few_rows) noexcept nogil:
    """Tokens of a tile; `few_rows` of the float rows next to codes. It does not depend on the block size, so that every cache gives
    the same bits."""
    cdef bint wide = KV_X86 and not kernels.has_matrix
    cdef bint unrotated = values_of(store).family != KV_FLOAT_ROWS and not values_of(store).rotated
    cdef int tile = SHORT_TILE if unrotated else KV_TILE if wide else KV_MATRIX_TILE
    cdef Py_ssize_t most_bytes = FLOAT_TILE_BYTES if KV_X86 and not few_rows else FEW_ROWS_BYTES
    if not wide and (store.k.family != KV_FLOAT_ROWS or store.v.family != KV_FLOAT_ROWS) and (
            kv_dtypes[store.k.dtype].bits >= 8 or kv_dtypes[store.v.dtype].bits >= 8):
        tile = INTEGER_TILE
    return _limit_tile(_limit_tile(tile, &store.k, most_bytes), &store.v, most_bytes)
