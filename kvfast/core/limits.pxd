"""The sizes and limits of ``simd/limits.h``; Python has them in ``kvfast.core.limits``."""


cdef extern from "simd/limits.h" nogil:
    enum:
        KV_LANES
        KV_TILE
        KV_MATRIX_TILE
        KV_WORD_GROUP
        KV_ROWS
        KV_MAX_PANELS
        KV_MATRIX_PANELS
        KV_TASK_ROWS
        KV_MAX_HEAD_DIM
        KV_MAX_ROPE_DIM
        KV_MAX_CENTROIDS
        KV_MIN_BLOCK_SIZE
        KV_MAX_BLOCK_SIZE
        KV_PIECE
        KV_OPEN_TOKENS
        KV_MAX_RECENT_TOKENS
        KV_FEW_QUERIES
        KV_MAX_FLOAT_TOKENS
        KV_SLAB_SHIFT
        KV_SLAB_BLOCKS
        KV_MAX_LAYERS
        KV_MAX_KV_HEADS
        KV_MAX_Q_HEADS

    const Py_ssize_t KV_MAX_TOKENS
    const Py_ssize_t KV_UNLIMITED
    const float KV_MAX_FLOAT32
    const float KV_MAX_FLOAT16
    const float KV_MAX_ROTATED
