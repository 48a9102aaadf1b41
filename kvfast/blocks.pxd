"""The block format, and who owns its memory.

See ``simd/kernels.h`` for what the bytes of a block are.
"""
from kvfast._kernels cimport kv_side


# One layer of a cache as attention sees it: blocks in the order of their tokens, in chunks of memory.
# Block i of KV head h starts at k_chunks[i // chunk_blocks] + h * k_head_stride + i % chunk_blocks *
# k.bytes, and so for v. (A pointer per block costs a quarter of the bandwidth, measured on a Xeon with
# AVX-512: hardware that follows tables of pointers disturbs the streams.)
ctypedef struct kv_layer:
    kv_side k
    kv_side v
    int num_kv_heads
    Py_ssize_t k_head_stride   # bytes
    Py_ssize_t v_head_stride
    Py_ssize_t length          # tokens
    Py_ssize_t chunk_blocks
    const char **k_chunks
    const char **v_chunks


cdef inline char *k_block_at(const kv_layer *layer, Py_ssize_t block, Py_ssize_t head) noexcept nogil:
    return (<char *>layer.k_chunks[block // layer.chunk_blocks] + head * layer.k_head_stride
            + block % layer.chunk_blocks * layer.k.bytes)


cdef inline char *v_block_at(const kv_layer *layer, Py_ssize_t block, Py_ssize_t head) noexcept nogil:
    return (<char *>layer.v_chunks[block // layer.chunk_blocks] + head * layer.v_head_stride
            + block % layer.chunk_blocks * layer.v.bytes)


cdef class Arena:
    cdef void *_raw
    cdef char *data
    cdef readonly Py_ssize_t nbytes


cdef int init_side(kv_side *side, int dtype, int head_dim, int block_size) except -1
cdef int parse_dtype(object dtype) except -1
cdef str dtype_name(int dtype)
cdef float dtype_limit(int dtype) noexcept nogil
