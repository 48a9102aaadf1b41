"""The block format, and who owns its memory.

See ``simd/kernels.h`` for what the bytes of a block are.
"""
from kvfast._kernels cimport kv_side


# One layer of a cache as attention sees it: blocks in the order of their tokens, wherever they lie.
# Block i of KV head h starts at k_blocks[i] + h * k_head_stride, and so for v.
ctypedef struct kv_layer:
    kv_side k
    kv_side v
    int num_kv_heads
    Py_ssize_t k_head_stride   # bytes
    Py_ssize_t v_head_stride
    Py_ssize_t length          # tokens
    const char **k_blocks
    const char **v_blocks


cdef class Arena:
    cdef void *_raw
    cdef char *data
    cdef readonly Py_ssize_t nbytes


cdef int init_side(kv_side *side, int dtype, int head_dim, int block_size) except -1
cdef int parse_dtype(object dtype) except -1
cdef str dtype_name(int dtype)
cdef float dtype_limit(int dtype) noexcept nogil
