# cython: language_level=3, boundscheck=False, cdivision=True
"""The functions of ``kvfast.h``, for C and Cython.

Those of a step need no interpreter but for blocks and for errors; see `kvfast.handles`. Those that always need it stand here.
"""
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int64_t, intptr_t

from kvfast.core.kernels cimport active
from kvfast.handles.arguments cimport ids_of
from kvfast.handles.cache_handle cimport CacheHandle, pointer_to
from kvfast.handles.handle cimport Handle
from kvfast.handles.header cimport (KVFAST_ABI, KVFAST_API, KVFAST_INVALID, KVFAST_OK, kvfast_batch, kvfast_cache, kvfast_options,
                                    kvfast_pool, kvfast_rows, kvfast_shape, kvfast_snapshot)
from kvfast.handles.pool_handle cimport PoolHandle

from kvfast.caches.snapshot import Snapshot

cdef extern from "kvfast.h":
    ctypedef struct kvfast_api:
        int abi, api
        kvfast_cache *(*open)(object cache) except NULL
        void (*close)(kvfast_cache *cache) noexcept with gil
        int (*append)(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
        int (*attend)(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options,
                      const kvfast_rows *out) noexcept nogil
        int (*advance)(kvfast_cache *cache, Py_ssize_t n) noexcept nogil
        int (*truncate)(kvfast_cache *cache, Py_ssize_t n) noexcept with gil
        Py_ssize_t (*length)(kvfast_cache *cache) noexcept nogil
        Py_ssize_t (*layer_length)(kvfast_cache *cache, int layer) noexcept nogil
        const char *(*error)(kvfast_cache *cache) noexcept nogil
        const void *(*kernels)() noexcept nogil
        Py_ssize_t (*block_nbytes)(const kvfast_shape *shape) except -1
        object (*open_pool)(const kvfast_shape *shape, void *const *layers, Py_ssize_t block_stride, PyObject *owner)
        int (*keep_branch)(kvfast_cache *cache, Py_ssize_t n, const Py_ssize_t *keep, Py_ssize_t num_kept) noexcept with gil
        int (*fork)(kvfast_cache *cache, kvfast_cache **other) noexcept with gil
        int (*snapshot)(kvfast_cache *cache, kvfast_snapshot **taken) noexcept with gil
        int (*restore)(kvfast_cache *cache, kvfast_snapshot *taken) noexcept with gil
        void (*close_snapshot)(kvfast_snapshot *taken) noexcept with gil
        int (*save)(kvfast_cache *cache, const char *path) noexcept with gil
        int (*load)(kvfast_cache *cache, const char *path) noexcept with gil
        kvfast_pool *(*open_batches)(object pool) except NULL
        void (*close_batches)(kvfast_pool *pool) noexcept with gil
        int (*new_sequence)(kvfast_pool *pool, kvfast_cache **sequence) noexcept with gil
        int (*free_sequence)(kvfast_cache *sequence) noexcept with gil
        Py_ssize_t (*num_free_blocks)(kvfast_pool *pool) noexcept with gil
        int (*append_batch)(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *k,
                            const kvfast_rows *v) noexcept nogil
        int (*attend_batch)(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *q,
                            const kvfast_options *options, const kvfast_rows *out) noexcept nogil
        const char *(*pool_error)(kvfast_pool *pool) noexcept nogil
        int (*advance_ids)(kvfast_cache *sequence, const int64_t *token_ids, Py_ssize_t n) noexcept with gil
        int (*match_prefix)(kvfast_pool *pool, const int64_t *token_ids, Py_ssize_t n, const void *salt, Py_ssize_t salt_nbytes,
                            kvfast_cache **sequence) noexcept with gil
        int (*advance_batch)(kvfast_pool *pool, const kvfast_batch *batch, const int64_t *token_ids) noexcept nogil


cdef kvfast_options _DEFAULTS  # all are 0


cdef object _cache_of(void *handle):
    """The cache or pool of a handle. What holds the GIL here ends with `_failed` after an error."""
    if handle == NULL:
        raise ValueError("a handle is needed, got NULL")
    return (<Handle>handle).cache


cdef int _failed(void *handle, object error) noexcept:
    """Keep the text of an error, where there is a handle, and return its code."""
    return KVFAST_INVALID if handle == NULL else (<Handle>handle).failed(error)


cdef int _clear(void **to, str name, str what) except -1:
    """Check where a result goes, and set it to NULL."""
    if to == NULL:
        raise ValueError(f"{name} must point to where the {what} goes, got NULL")
    to[0] = NULL
    return 0


cdef kvfast_cache *open(object cache) except NULL:
    return pointer_to(cache)


cdef void close(kvfast_cache *cache) noexcept with gil:
    if cache != NULL:
        Py_DECREF(<object>cache)


cdef int append(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).append(layer, k, v)


cdef int attend(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options,
                const kvfast_rows *out) noexcept nogil:
    if options == NULL:
        options = &_DEFAULTS
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).attend(layer, q, options, out)


cdef int advance(kvfast_cache *cache, Py_ssize_t n) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).advance(n)


cdef int truncate(kvfast_cache *cache, Py_ssize_t n) noexcept with gil:
    try:
        _cache_of(cache).truncate(n)
        return KVFAST_OK
    except BaseException as error:
        return _failed(cache, error)


cdef int keep_branch(kvfast_cache *cache, Py_ssize_t n, const Py_ssize_t *keep, Py_ssize_t num_kept) noexcept with gil:
    try:
        if num_kept < 0 or (keep == NULL and num_kept > 0):
            raise ValueError(f"keep must point to num_kept numbers, got {num_kept} and {'NULL' if keep == NULL else 'an address'}")
        _cache_of(cache).truncate(n, [keep[i] for i in range(num_kept)])
        return KVFAST_OK
    except BaseException as error:
        return _failed(cache, error)


cdef Py_ssize_t length(kvfast_cache *cache) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).length()


cdef Py_ssize_t layer_length(kvfast_cache *cache, int layer) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<CacheHandle>cache).layer_length(layer)


cdef const char *error(kvfast_cache *cache) noexcept nogil:
    if cache == NULL:
        return "the cache is NULL"
    return &(<CacheHandle>cache).text[0]


cdef int fork(kvfast_cache *cache, kvfast_cache **other) noexcept with gil:
    try:
        _clear(<void **>other, "other", "fork")
        other[0] = pointer_to(_cache_of(cache).fork())
        return KVFAST_OK
    except BaseException as error:
        return _failed(cache, error)


cdef int snapshot(kvfast_cache *cache, kvfast_snapshot **taken) noexcept with gil:
    try:
        _clear(<void **>taken, "snapshot", "snapshot")
        held = _cache_of(cache).snapshot()
        Py_INCREF(held)
        taken[0] = <kvfast_snapshot *>held
        return KVFAST_OK
    except BaseException as error:
        return _failed(cache, error)


cdef int restore(kvfast_cache *cache, kvfast_snapshot *taken) noexcept with gil:
    try:
        if taken == NULL:
            raise ValueError("snapshot must be one that snapshot() has made, got NULL")
        _cache_of(cache).restore(<object>taken)
        return KVFAST_OK
    except BaseException as error:
        return _failed(cache, error)


cdef void close_snapshot(kvfast_snapshot *taken) noexcept with gil:
    if taken != NULL:
        Py_DECREF(<object>taken)


cdef int save(kvfast_cache *cache, const char *path) noexcept with gil:
    try:
        _cache_of(cache).save(_path_of(path))
        return KVFAST_OK
    except BaseException as error:
        return _failed(cache, error)


cdef bytes _path_of(const char *path):
    if path == NULL:
        raise ValueError("path must be the name of a file, got NULL")
    return <bytes>path


cdef int load(kvfast_cache *cache, const char *path) noexcept with gil:
    try:
        _cache_of(cache).restore(Snapshot.load(_path_of(path)))
        return KVFAST_OK
    except BaseException as error:
        return _failed(cache, error)


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


cdef int new_sequence(kvfast_pool *pool, kvfast_cache **sequence) noexcept with gil:
    try:
        _clear(<void **>sequence, "sequence", "new sequence")
        sequence[0] = pointer_to(_cache_of(pool).new_sequence())
        return KVFAST_OK
    except BaseException as error:
        return _failed(pool, error)


cdef int free_sequence(kvfast_cache *sequence) noexcept with gil:
    try:
        if not _cache_of(sequence).is_paged:
            raise ValueError(f"free_sequence needs a sequence of a pool, got a {type(_cache_of(sequence)).__name__}: call "
                             f"truncate(cache, 0) to drop its tokens, or close(cache)")
        _cache_of(sequence).free()
        return KVFAST_OK
    except BaseException as error:
        return _failed(sequence, error)


cdef Py_ssize_t num_free_blocks(kvfast_pool *pool) noexcept with gil:
    try:
        return _cache_of(pool).num_free_blocks
    except BaseException as error:
        return _failed(pool, error)


cdef int append_batch(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *k,
                      const kvfast_rows *v) noexcept nogil:
    return KVFAST_INVALID if pool == NULL else (<PoolHandle>pool).append(layer, batch, k, v)


cdef int attend_batch(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                      const kvfast_rows *out) noexcept nogil:
    if options == NULL:
        options = &_DEFAULTS
    return KVFAST_INVALID if pool == NULL else (<PoolHandle>pool).attend(layer, batch, q, options, out)


cdef const char *pool_error(kvfast_pool *pool) noexcept nogil:
    if pool == NULL:
        return "the pool is NULL"
    return &(<PoolHandle>pool).text[0]


cdef int advance_ids(kvfast_cache *sequence, const int64_t *token_ids, Py_ssize_t n) noexcept with gil:
    try:
        if not _cache_of(sequence).is_paged:
            raise ValueError(f"advance_ids needs a sequence of a pool, got a {type(_cache_of(sequence)).__name__}: call advance")
        _cache_of(sequence).advance(n, ids_of(token_ids, n))
        return KVFAST_OK
    except BaseException as error:
        return _failed(sequence, error)


cdef int match_prefix(kvfast_pool *pool, const int64_t *token_ids, Py_ssize_t n, const void *salt, Py_ssize_t salt_nbytes,
                      kvfast_cache **sequence) noexcept with gil:
    try:
        _clear(<void **>sequence, "sequence", "new sequence")
        if salt_nbytes < 0 or (salt == NULL and salt_nbytes > 0):
            raise ValueError(f"salt must point to salt_nbytes bytes, got {salt_nbytes} and "
                             + ("NULL" if salt == NULL else "an address"))
        given = (<const char *>salt)[:salt_nbytes] if salt_nbytes else b""
        sequence[0] = pointer_to(_cache_of(pool).match_prefix(ids_of(token_ids, n), given))
        return KVFAST_OK
    except BaseException as error:
        return _failed(pool, error)


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
