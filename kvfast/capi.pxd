"""The functions of ``kvfast.h`` for Cython. The header documents their arguments and results.

They need none of kvfast's own classes, so a module may run with another version of kvfast than it was compiled with.
`kvfast.core.kernels`, which has the kernels, does not promise this. Cython does not initialise the fields of a struct: set
all of a kvfast_options to 0 first.
"""

from cpython.ref cimport PyObject


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

    ctypedef struct kvfast_rows:
        void *data
        Py_ssize_t num_tokens
        Py_ssize_t num_heads
        Py_ssize_t dim
        Py_ssize_t token_stride
        Py_ssize_t head_stride
        int dtype

    ctypedef struct kvfast_options:
        float scale
        float softcap
        Py_ssize_t sliding_window
        Py_ssize_t num_sink_tokens
        const float *sinks
        const float *alibi_slopes
        float *lse
        int not_causal
        int num_splits
        int num_threads
        Py_ssize_t attention_chunk_size
        const Py_ssize_t *spans
        Py_ssize_t num_spans
        int clamp_spans
        const Py_ssize_t *parents
        Py_ssize_t num_parents

    ctypedef struct kvfast_shape:
        int num_layers, num_kv_heads, head_dim
        int v_head_dim
        int block_size
        Py_ssize_t num_blocks
        const char *dtype

    int KVFAST_ALIGNMENT


cdef kvfast_cache *open(object cache) except NULL
cdef void close(kvfast_cache *cache) noexcept with gil
cdef int append(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
cdef int attend(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options,
                const kvfast_rows *out) noexcept nogil
cdef int advance(kvfast_cache *cache, Py_ssize_t n) noexcept nogil
cdef int truncate(kvfast_cache *cache, Py_ssize_t n) noexcept nogil
cdef Py_ssize_t length(kvfast_cache *cache) noexcept nogil
cdef Py_ssize_t layer_length(kvfast_cache *cache, int layer) noexcept nogil
cdef const char *error(kvfast_cache *cache) noexcept nogil
cdef Py_ssize_t block_nbytes(const kvfast_shape *shape) except -1
cdef object open_pool(const kvfast_shape *shape, void *const *layers, Py_ssize_t block_stride, PyObject *owner)
