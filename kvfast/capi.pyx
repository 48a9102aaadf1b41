# cython: language_level=3, boundscheck=False, cdivision=True
"""The functions of ``kvfast.h``, for C and Cython.

Those of a step need no interpreter but for blocks and for errors; see `kvfast.handles`.
"""
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t, intptr_t
from libc.string cimport memset

from kvfast.core.kernels cimport active
from kvfast.handles.cache_handle cimport CacheHandle, pointer_to
from kvfast.handles.header cimport (KVFAST_ABI, KVFAST_API, KVFAST_INVALID, kvfast_batch, kvfast_cache, kvfast_options, kvfast_pool,
                                    kvfast_rows, kvfast_shape, kvfast_snapshot)
from kvfast.handles.pool_handle cimport PoolHandle

cdef extern from "kvfast.h":
    ctypedef struct kvfast_api:
        int abi, api
        kvfast_cache *(*open)(object cache) except NULL
        void (*close)(kvfast_cache *cache) noexcept with gil
        int (*append)(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
        int (*attend)(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options,
                      const kvfast_rows *out) noexcept nogil
        int (*advance)(kvfast_cache *cache, Py_ssize_t n) noexcept nogil
        int (*truncate)(kvfast_cache *cache, Py_ssize_t n) noexcept nogil
        Py_ssize_t (*length)(kvfast_cache *cache) noexcept nogil
        Py_ssize_t (*layer_length)(kvfast_cache *cache, int layer) noexcept nogil
        const char *(*error)(kvfast_cache *cache) noexcept nogil
        const void *(*kernels)() noexcept nogil
        Py_ssize_t (*block_nbytes)(const kvfast_shape *shape) except -1
        object (*open_pool)(const kvfast_shape *shape, void *const *layers, Py_ssize_t block_stride, PyObject *owner)
        int (*keep_branch)(kvfast_cache *cache, Py_ssize_t n, const Py_ssize_t *keep, Py_ssize_t num_kept) noexcept nogil
        int (*fork)(kvfast_cache *cache, kvfast_cache **other) noexcept nogil
        int (*snapshot)(kvfast_cache *cache, kvfast_snapshot **taken) noexcept nogil
        int (*restore)(kvfast_cache *cache, kvfast_snapshot *taken) noexcept nogil
        void (*close_snapshot)(kvfast_snapshot *taken) noexcept with gil
        int (*save)(kvfast_cache *cache, const char *path) noexcept nogil
        int (*load)(kvfast_cache *cache, const char *path) noexcept nogil
        kvfast_pool *(*open_batches)(object pool) except NULL
        void (*close_batches)(kvfast_pool *pool) noexcept with gil
        int (*new_sequence)(kvfast_pool *pool, kvfast_cache **sequence) noexcept nogil
        int (*free_sequence)(kvfast_cache *sequence) noexcept nogil
        Py_ssize_t (*num_free_blocks)(kvfast_pool *pool) noexcept nogil
        int (*append_batch)(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *k,
                            const kvfast_rows *v) noexcept nogil
        int (*attend_batch)(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *q,
                            const kvfast_options *options, const kvfast_rows *out) noexcept nogil
        const char *(*pool_error)(kvfast_pool *pool) noexcept nogil
        int (*advance_ids)(kvfast_cache *sequence, const int64_t *token_ids, Py_ssize_t n) noexcept nogil
        int (*match_prefix)(kvfast_pool *pool, const int64_t *token_ids, Py_ssize_t n, const void *salt, Py_ssize_t salt_nbytes,
                            kvfast_cache **sequence) noexcept nogil
        int (*advance_batch)(kvfast_pool *pool, const kvfast_batch *batch, const int64_t *token_ids) noexcept nogil


cdef kvfast_cache *open(object cache) except NULL:
    return pointer_to(cache)


cdef void close(kvfast_cache *cache) noexcept with gil:
    if cache != NULL:
        Py_DECREF(<object>cache)


cdef int append(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).append(layer, k, v)


cdef int attend(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options,
                const kvfast_rows *out) noexcept nogil:
    cdef kvfast_options defaults
    if options == NULL:
        memset(&defaults, 0, sizeof(defaults))
        options = &defaults
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).attend(layer, q, options, out)


cdef int advance(kvfast_cache *cache, Py_ssize_t n) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).advance(n)


cdef int truncate(kvfast_cache *cache, Py_ssize_t n) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).truncate(n)


cdef int keep_branch(kvfast_cache *cache, Py_ssize_t n, const Py_ssize_t *keep, Py_ssize_t num_kept) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).keep_branch(n, keep, num_kept)


cdef Py_ssize_t length(kvfast_cache *cache) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).length()


cdef Py_ssize_t layer_length(kvfast_cache *cache, int layer) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).layer_length(layer)


cdef const char *error(kvfast_cache *cache) noexcept nogil:
    if cache == NULL:
        return "the cache is NULL"
    return &(<CacheHandle>cache).text[0]


cdef int fork(kvfast_cache *cache, kvfast_cache **other) noexcept nogil:
    if other != NULL:
        other[0] = NULL
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).fork(other)


cdef int snapshot(kvfast_cache *cache, kvfast_snapshot **taken) noexcept nogil:
    if taken != NULL:
        taken[0] = NULL
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).snapshot(taken)


cdef int restore(kvfast_cache *cache, kvfast_snapshot *taken) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).restore(taken)


cdef void close_snapshot(kvfast_snapshot *taken) noexcept with gil:
    if taken != NULL:
        Py_DECREF(<object>taken)


cdef int save(kvfast_cache *cache, const char *path) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).save(path)


cdef int load(kvfast_cache *cache, const char *path) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).load(path)


cdef const void *kernels() noexcept nogil:
    return active()


cdef dict _arguments(const kvfast_shape *shape):
    """The arguments of `PagedKVCache` for a shape."""
    if shape == NULL or shape.dtype == NULL:
        raise ValueError("a shape and its dtype are needed, got NULL")
    return {
        "num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "num_blocks": shape.num_blocks, "block_size": shape.block_size or None, "dtype": shape.dtype.decode(),
        "v_head_dim": shape.v_head_dim or None,
    }


cdef Py_ssize_t block_nbytes(const kvfast_shape *shape) except -1:
    from kvfast.caches.buffer_layout import buffer_layout

    return buffer_layout(**_arguments(shape)).block_nbytes[0]


cdef object open_pool(const kvfast_shape *shape, void *const *layers, Py_ssize_t block_stride, PyObject *owner):
    from kvfast.caches.foreign_memory import pool_over

    arguments = _arguments(shape)  # which checks it
    addresses = [<intptr_t>layers[i] for i in range(shape.num_layers if layers != NULL else 0)]
    return pool_over(addresses, block_stride, None if owner == NULL else <object>owner, **arguments)


cdef kvfast_pool *open_batches(object pool) except NULL:
    handle = PoolHandle(pool)
    Py_INCREF(handle)
    return <kvfast_pool *>handle


cdef void close_batches(kvfast_pool *pool) noexcept with gil:
    if pool != NULL:
        Py_DECREF(<object>pool)


cdef int new_sequence(kvfast_pool *pool, kvfast_cache **sequence) noexcept nogil:
    if sequence != NULL:
        sequence[0] = NULL
    return KVFAST_INVALID if pool == NULL else (<PoolHandle>pool).new_sequence(sequence)


cdef int free_sequence(kvfast_cache *sequence) noexcept nogil:
    return KVFAST_INVALID if sequence == NULL else (<CacheHandle>sequence).free_sequence()


cdef Py_ssize_t num_free_blocks(kvfast_pool *pool) noexcept nogil:
    return KVFAST_INVALID if pool == NULL else (<PoolHandle>pool).num_free_blocks()


cdef int append_batch(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *k,
                      const kvfast_rows *v) noexcept nogil:
    return KVFAST_INVALID if pool == NULL else (<PoolHandle>pool).append(layer, batch, k, v)


cdef int attend_batch(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                      const kvfast_rows *out) noexcept nogil:
    cdef kvfast_options defaults
    if options == NULL:
        memset(&defaults, 0, sizeof(defaults))
        options = &defaults
    return KVFAST_INVALID if pool == NULL else (<PoolHandle>pool).attend(layer, batch, q, options, out)


cdef const char *pool_error(kvfast_pool *pool) noexcept nogil:
    if pool == NULL:
        return "the pool is NULL"
    return &(<PoolHandle>pool).text[0]


cdef int advance_ids(kvfast_cache *sequence, const int64_t *token_ids, Py_ssize_t n) noexcept nogil:
    return KVFAST_INVALID if sequence == NULL else (<CacheHandle>sequence).advance_ids(token_ids, n)


cdef int match_prefix(kvfast_pool *pool, const int64_t *token_ids, Py_ssize_t n, const void *salt, Py_ssize_t salt_nbytes,
                      kvfast_cache **sequence) noexcept nogil:
    if sequence != NULL:
        sequence[0] = NULL
    return KVFAST_INVALID if pool == NULL else (<PoolHandle>pool).match_prefix(token_ids, n, salt, salt_nbytes, sequence)


cdef int advance_batch(kvfast_pool *pool, const kvfast_batch *batch, const int64_t *token_ids) noexcept nogil:
    return KVFAST_INVALID if pool == NULL else (<PoolHandle>pool).advance(batch, token_ids)


cdef kvfast_api _api
_api.abi, _api.api = KVFAST_ABI, KVFAST_API
_api.open, _api.close, _api.append, _api.attend = open, close, append, attend
_api.advance, _api.truncate, _api.length, _api.layer_length = advance, truncate, length, layer_length
_api.error, _api.kernels, _api.block_nbytes, _api.open_pool = error, kernels, block_nbytes, open_pool
_api.keep_branch, _api.fork = keep_branch, fork
_api.snapshot, _api.restore, _api.close_snapshot, _api.save, _api.load = snapshot, restore, close_snapshot, save, load
_api.open_batches, _api.close_batches, _api.pool_error = open_batches, close_batches, pool_error
_api.new_sequence, _api.free_sequence, _api.num_free_blocks = new_sequence, free_sequence, num_free_blocks
_api.append_batch, _api.attend_batch = append_batch, attend_batch
_api.advance_ids, _api.match_prefix, _api.advance_batch = advance_ids, match_prefix, advance_batch
C_API = PyCapsule_New(&_api, "kvfast.capi.C_API", NULL)
