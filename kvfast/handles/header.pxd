"""The types of ``kvfast.h``, which documents them."""
from libc.stdint cimport int32_t, int64_t

from kvfast.attention.options cimport kvfast_options


cdef extern from "kvfast.h" nogil:
    int KVFAST_ABI, KVFAST_API
    enum:
        KVFAST_OK
        KVFAST_INVALID
        KVFAST_SHAPE
        KVFAST_NOT_FINITE
        KVFAST_FULL
        KVFAST_BUSY
        KVFAST_NO_MEMORY
        KVFAST_NO_LAYER
        KVFAST_ERROR
    enum:
        KVFAST_FLOAT32
        KVFAST_FLOAT16
        KVFAST_BFLOAT16
    ctypedef struct kvfast_cache:
        pass

    ctypedef struct kvfast_pool:
        pass

    ctypedef struct kvfast_snapshot:
        pass

    ctypedef struct kvfast_rows:
        void *data
        Py_ssize_t num_tokens
        Py_ssize_t num_heads
        Py_ssize_t dim
        Py_ssize_t token_stride
        Py_ssize_t head_stride
        int dtype

    ctypedef struct kvfast_batch:
        kvfast_cache **sequences
        Py_ssize_t num_sequences
        const Py_ssize_t *starts
        const Py_ssize_t *span_counts
        const Py_ssize_t *parent_counts
        int no_cascade
        const int32_t *block_table
        Py_ssize_t max_blocks
        const int32_t *seq_lens
        const int64_t *slots

    ctypedef struct kvfast_shape:
        int num_layers, num_kv_heads, head_dim
        int v_head_dim
        int block_size
        Py_ssize_t num_blocks
        const char *dtype

    int KVFAST_ALIGNMENT
