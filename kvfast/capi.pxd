"""The functions of ``kvfast.h`` for Cython. The header documents their arguments and results.

They need none of kvfast's own classes, so a module may run with another version of kvfast than it was compiled with.
`kvfast.core.kernels`, which has the kernels, does not promise this. Cython does not initialise the fields of a struct: set
all of a kvfast_options or a kvfast_batch to 0 first.
"""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t

from kvfast.handles.header cimport *  # its types and numbers, as names of this module

cdef kvfast_cache *open(object cache) except NULL
cdef void close(kvfast_cache *cache) noexcept with gil
cdef int append(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil
cdef int attend(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options,
                const kvfast_rows *out) noexcept nogil
cdef int advance(kvfast_cache *cache, Py_ssize_t n) noexcept nogil
cdef int truncate(kvfast_cache *cache, Py_ssize_t n) noexcept with gil
cdef Py_ssize_t length(kvfast_cache *cache) noexcept nogil
cdef Py_ssize_t layer_length(kvfast_cache *cache, int layer) noexcept nogil
cdef const char *error(kvfast_cache *cache) noexcept nogil
cdef Py_ssize_t block_nbytes(const kvfast_shape *shape) except -1
cdef object open_pool(const kvfast_shape *shape, void *const *layers, Py_ssize_t block_stride, PyObject *owner)

cdef int keep_branch(kvfast_cache *cache, Py_ssize_t n, const Py_ssize_t *keep, Py_ssize_t num_kept) noexcept with gil
cdef int fork(kvfast_cache *cache, kvfast_cache **other) noexcept with gil
cdef int snapshot(kvfast_cache *cache, kvfast_snapshot **taken) noexcept with gil
cdef int restore(kvfast_cache *cache, kvfast_snapshot *taken) noexcept with gil
cdef void close_snapshot(kvfast_snapshot *taken) noexcept with gil
cdef int save(kvfast_cache *cache, const char *path) noexcept with gil
cdef int load(kvfast_cache *cache, const char *path) noexcept with gil

cdef kvfast_pool *open_batches(object pool) except NULL
cdef void close_batches(kvfast_pool *pool) noexcept with gil
cdef int new_sequence(kvfast_pool *pool, kvfast_cache **sequence) noexcept with gil
cdef int free_sequence(kvfast_cache *sequence) noexcept with gil
cdef Py_ssize_t num_free_blocks(kvfast_pool *pool) noexcept with gil
cdef int append_batch(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *k,
                      const kvfast_rows *v) noexcept nogil
cdef int attend_batch(kvfast_pool *pool, int layer, const kvfast_batch *batch, const kvfast_rows *q, const kvfast_options *options,
                      const kvfast_rows *out) noexcept nogil
cdef const char *pool_error(kvfast_pool *pool) noexcept nogil
cdef int advance_ids(kvfast_cache *sequence, const int64_t *token_ids, Py_ssize_t n) noexcept with gil
cdef int match_prefix(kvfast_pool *pool, const int64_t *token_ids, Py_ssize_t n, const void *salt, Py_ssize_t salt_nbytes,
                      kvfast_cache **sequence) noexcept with gil
cdef int advance_batch(kvfast_pool *pool, const kvfast_batch *batch, const int64_t *token_ids) noexcept nogil
