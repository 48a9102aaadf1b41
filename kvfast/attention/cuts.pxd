"""How work is cut: tiles, splits and blocks of query rows."""
from kvfast.attention.tasks cimport kv_call, kv_item, kv_query
from kvfast.codec.blocks cimport kv_layout
from kvfast.core.kernels cimport KV_FLOAT_ROWS, kv_kernels, kv_side


cdef inline Py_ssize_t token_bytes(const kv_side *side) noexcept nogil:
    """Bytes of one token, without scales."""
    return side.row_stride if side.family == KV_FLOAT_ROWS else side.scales // side.block_size


cdef enum:
    # Tokens of a split: each leaves a partial result, and ends and begins without a fetch (python -m kvfast bench --work decode
    # --contexts 1024,4096). Latent rows have many query heads, each with a partial result (bench/bench_mla.py).
    SPLIT_TOKENS = 1024
    LATENT_SPLIT_TOKENS = 2048


cdef inline Py_ssize_t split_tokens_of(const kv_layout *layout) noexcept nogil:
    return LATENT_SPLIT_TOKENS if layout.latent else SPLIT_TOKENS


cdef int choose_tile(const kv_layout *layout, const kv_kernels *kernels, bint few_rows) noexcept nogil
cdef Py_ssize_t work_of(const kv_layout *layout, Py_ssize_t tokens) noexcept nogil
cdef void cut_context(const kv_call *call, kv_item *item, Py_ssize_t end) noexcept nogil
cdef bint takes_whole(const kv_call *call, const kv_item *item) noexcept nogil
cdef int cut_rows(const kv_call *call, kv_item *item) noexcept nogil
cdef void deal_splits(kv_call *call, int threads) noexcept nogil
cdef bint panels_of_chosen(const kv_call *call) noexcept nogil
