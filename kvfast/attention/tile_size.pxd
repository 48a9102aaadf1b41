"""How many tokens a tile has, and the bytes of its tokens."""
from kvfast.codec.blocks cimport kv_store
from kvfast.core.kernels cimport KV_FLOAT_ROWS, kv_kernels, kv_side


cdef inline Py_ssize_t token_bytes(const kv_side *side) noexcept nogil:
    """Bytes of one token, without scales."""
    return side.row_stride if side.family == KV_FLOAT_ROWS else side.scales // side.block_size


cdef int choose_tile(const kv_store *store, const kv_kernels *kernels, bint few_rows) noexcept nogil
cdef Py_ssize_t bytes_of(const kv_store *store, Py_ssize_t tokens) noexcept nogil
