"""The kernel table and the table of dtypes. All calls to ``simd/`` go through them. ``limits.pxd`` has the limits.

A call reads ``active()`` once, so that it runs on one tier to its end.
"""
from libc.stdint cimport int8_t, int64_t, uint8_t, uint16_t, uint32_t

from kvfast.core.limits cimport KV_LANES, KV_TILE


# Float arrays of at least STREAMED_BYTES are written past the caches, which they would not fit. This does not read the memory
# that they replace, and is twice as fast.
cdef enum:
    STREAMED_BYTES = 16 << 20


cdef extern from "simd/dtypes.h" nogil:
    enum:
        KV_FLOAT32             # what arrays of the API are; of other dtypes, only simd/ knows the numbers
        KV_FLOAT16
        KV_BFLOAT16
        KV_INT2
        KV_INT3
        KV_NUM_DTYPES
        KV_FLOAT_ROWS
        KV_PACKED_CODES

    ctypedef struct kv_dtype:
        const char *number
        const char *name
        int family
        int bits
        int scale_bytes
        int levels
        float limit
        const char *also
        const char *codebooks
        const char *options

    const kv_dtype *kv_dtypes  # (KV_NUM_DTYPES,)


cdef extern from "simd/kernels.h" nogil:
    enum:
        KV_PANELS_OF_CODES
        KV_PANELS_OF_PACKED
        KV_PANELS_OF_ROWS
        KV_PANEL_KINDS

    ctypedef struct kv_side:
        int dtype
        int family
        int block_size
        int head_dim
        int padded_dim
        int rotated
        int in_basis
        int gaussian
        int as_keys
        int clip_search
        Py_ssize_t row_stride
        Py_ssize_t scales
        int scale_bytes
        Py_ssize_t means
        Py_ssize_t channels
        Py_ssize_t bytes

    ctypedef struct kv_room:
        pass

    ctypedef struct kv_queries:
        const float *most
        unsigned whole
        kv_room *room

    ctypedef struct kv_softmax:
        float *m
        float *rest
        kv_room *room
        float *weights

    ctypedef struct kv_scratch:
        kv_queries queries
        kv_softmax softmax
        float *acc
        float *rows

    ctypedef struct kv_rope_scratch:
        kv_queries queries
        float *scores
        float *rows

    ctypedef struct kv_score_options:
        float softcap
        const float *slopes
        const int64_t *query_at
        const float *bias

    bint kv_bends(const kv_score_options *options) nogil

    ctypedef struct kv_tile:
        const char *base
        Py_ssize_t at[KV_TILE // KV_LANES]
        int first
        int count

    ctypedef struct kv_panel:
        int rows
        int *start
        int *stop
        kv_score_options options
        float *m
        float *queries
        float *acc

    ctypedef struct kv_operands:
        kv_room *room
        int tile

    ctypedef struct kv_wide_scratch:
        kv_operands operands
        kv_panel *panels
        float *rows
        float *rope_rows

    ctypedef struct kv_prefetch:
        const char *base
        const Py_ssize_t *at
        Py_ssize_t offset
        Py_ssize_t piece
        Py_ssize_t bytes
        Py_ssize_t scales
        Py_ssize_t scale_bytes

    ctypedef struct kv_ahead:
        kv_prefetch next
        kv_prefetch after
        Py_ssize_t lead

    ctypedef struct kv_transform:
        const float *norm
        float eps
        const float *cos
        const float *sin
        Py_ssize_t pairs
        int interleaved

    ctypedef struct kv_pq_codebook:
        const float *centroids
        int count
        int dim

    ctypedef struct kv_codes:
        const uint8_t *data
        Py_ssize_t stride
        int subvectors
        int count
        int packed
        int width
        const int *bounds
        const uint16_t *centroids

    ctypedef struct kv_panel_kernels:
        const char *family
        int tile
        void (*prepare)(const kv_side *side, const float *rows, const kv_side *rope, const float *rope_rows, float scale, int mixed,
                        kv_panel *panel) noexcept nogil
        void (*attend)(const kv_side *k, const kv_side *v, const kv_tile *keys, const kv_tile *values, const kv_tile *next_keys,
                       const kv_tile *next_values, int64_t position, kv_operands *operands, kv_panel *panels,
                       int num_panels) noexcept nogil

    ctypedef struct kv_kernels:
        const char *isa
        void (*to_float[KV_NUM_DTYPES])(const void *source, Py_ssize_t n, float *row) noexcept nogil
        void (*from_float[KV_NUM_DTYPES])(const float *row, Py_ssize_t n, void *target) noexcept nogil
        Py_ssize_t (*find_unstorable)(const float *row, Py_ssize_t n, float limit) noexcept nogil
        float (*quantize)(const float *row, Py_ssize_t n, int levels, int8_t *codes) noexcept nogil
        void (*dequantize)(const int8_t *codes, Py_ssize_t n, float scale, float *row) noexcept nogil
        void (*store_nontemporal)(const float *row, Py_ssize_t n, float *target) noexcept nogil
        void (*encode_k)(const kv_side *side, char *block, int slot, const float *rows, Py_ssize_t stride,
                         int count) noexcept nogil
        void (*encode_v)(const kv_side *side, char *block, int slot, const float *rows, Py_ssize_t stride,
                         int count) noexcept nogil
        void (*decode_k)(const kv_side *side, const char *block, int slot, float *row) noexcept nogil
        void (*decode_v)(const kv_side *side, const char *block, int slot, float *row) noexcept nogil
        int (*seal_k)(const kv_side *side, char *block, const float *rows, Py_ssize_t stride,
                         int kept, kv_room *room) noexcept nogil
        void (*copy_token)(const kv_side *side, const char *source, int slot, const kv_side *to, char *target,
                           int to_slot, int values) noexcept nogil
        void (*copy_run)(const kv_side *side, const char *source, int slot, const kv_side *to, char *target, int values) noexcept nogil
        void (*rotate)(const float *rows, Py_ssize_t stride, Py_ssize_t num_rows, Py_ssize_t n, float *out,
                       Py_ssize_t out_stride) noexcept nogil
        void (*change_basis)(const float *rows, Py_ssize_t stride, Py_ssize_t num_rows, Py_ssize_t n, const float *matrix,
                         float *out, Py_ssize_t out_stride) noexcept nogil
        void (*transform)(const float *rows, Py_ssize_t stride, Py_ssize_t num_rows, Py_ssize_t n,
                          const kv_transform *transform, float *out, Py_ssize_t out_stride) noexcept nogil
        void (*prepare[KV_NUM_DTYPES])(const kv_side *side, const float *rows, int num_rows, float scale,
                           kv_queries *queries) noexcept nogil
        void (*scores[KV_NUM_DTYPES])(const kv_side *side, const kv_queries *queries, int num_rows, const kv_tile *tile,
                          const kv_ahead *ahead, float *scores) noexcept nogil
        void (*softmax)(kv_softmax *state, int num_rows, int count, const int *start, const int *stop,
                        int64_t position, const kv_score_options *options) noexcept nogil
        void (*accumulate[KV_NUM_DTYPES])(const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile,
                              const kv_ahead *ahead, float *acc) noexcept nogil
        bint has_matrix
        void (*accumulate_latent[KV_NUM_DTYPES])(const kv_side *side, kv_softmax *state, int num_rows, const kv_tile *tile,
                                                 const kv_ahead *ahead, float *acc) noexcept nogil
        kv_panel_kernels panels[KV_PANEL_KINDS]
        const kv_kernels *exact
        void (*scale_add)(float *target, float target_scale, const float *source, float source_scale,
                          Py_ssize_t n) noexcept nogil
        void (*nearest)(const float *points, Py_ssize_t stride, Py_ssize_t n, const kv_pq_codebook *book, const float *half_norms,
                        uint8_t *codes, float *distances) noexcept nogil
        void (*decode_codes)(const kv_codes *codes, Py_ssize_t n, char *rows, Py_ssize_t stride) noexcept nogil
        uint32_t (*read_bytes)(const char *source, Py_ssize_t n) noexcept nogil
        double (*multiply[2])(Py_ssize_t steps, float *sink) noexcept nogil


# What a call, or else its cache, or else the process asks for.
cdef enum kv_precision:
    UNSET
    EXACT
    FAST                       # activations of one byte; see simd/vectors/activations.inc.h
    INVARIANT                  # exact, without panels: each row as if it were alone


cdef const kv_kernels *active() noexcept nogil
cdef const kv_kernels *active_for(int precision) noexcept nogil
cdef int resolved(int precision) noexcept nogil            # not UNSET
cdef int parse_precision(object name) except -1
cdef const kv_kernels *compiled(int tier, int precision) noexcept nogil  # the tiers of this build, best first; NULL after the last
