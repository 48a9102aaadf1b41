# cython: language_level=3, freethreading_compatible=True
"""A runtime in Cython: a step of decoding without the GIL, and a kernel of kvfast by itself."""
from libc.stdint cimport int64_t
from libc.string cimport memset

from kvfast cimport capi
from kvfast.core.kernels cimport active, kv_kernels


cdef class Layer:
    """One layer of a cache."""
    cdef capi.kvfast_cache *cache
    cdef int index

    def __cinit__(self, cache, int index):
        self.cache, self.index = capi.open(cache), index

    def __dealloc__(self):
        capi.close(self.cache)

    def step(self, float[:, :, :] k, float[:, :, :] v, float[:, :, :] q, float[:, :, :] out, float softcap=0, lse=None):
        """Append, attend; any strides of tokens and heads."""
        cdef capi.kvfast_rows keys = _rows(k), values = _rows(v), queries = _rows(q), target = _rows(out)
        cdef capi.kvfast_options options
        cdef float[:, ::1] sums
        cdef int code
        memset(&options, 0, sizeof(options))  # all of it, the defaults
        options.softcap = softcap
        if lse is not None:
            sums = lse
            options.lse = &sums[0, 0]
        with nogil:
            code = capi.append(self.cache, self.index, &keys, &values)
            if code == capi.KVFAST_OK:
                code = capi.attend(self.cache, self.index, &queries, &options, &target)
        if code:
            raise ValueError(f"{code}: {capi.error(self.cache).decode()}")

    def attend(self, float[:, :, :] q, float[:, :, :] out, Py_ssize_t chunk=0, Py_ssize_t[:, ::1] spans=None, Py_ssize_t num_spans=0,
               bint clamp=False, bint not_causal=False, Py_ssize_t[::1] tree_parents=None, Py_ssize_t num_parents=0,
               const int64_t[:, :, ::1] indices=None, Py_ssize_t num_indices=0, int run=0, int precision=0):
        """The queries of tokens that are there; `num_spans`, `num_parents` and `num_indices` may be wrong."""
        cdef capi.kvfast_rows queries = _rows(q), target = _rows(out)
        cdef capi.kvfast_options options
        cdef int code
        memset(&options, 0, sizeof(options))
        options.attention_chunk_size, options.num_spans, options.clamp_spans = chunk, num_spans, clamp
        options.not_causal, options.num_parents = not_causal, num_parents
        if tree_parents is not None:
            options.tree_parents, options.num_parents = &tree_parents[0], tree_parents.shape[0]
        options.num_indices, options.index_block, options.precision = num_indices, run, precision
        if indices is not None:
            options.indices, options.index_heads, options.num_indices = &indices[0, 0, 0], indices.shape[1], indices.shape[2]
        if spans is not None:
            options.spans, options.num_spans = &spans[0, 0], spans.shape[0]
        with nogil:
            code = capi.attend(self.cache, self.index, &queries, &options, &target)
        if code:
            raise ValueError(f"{code}: {capi.error(self.cache).decode()}")

    def __len__(self):
        return capi.layer_length(self.cache, self.index)


cdef capi.kvfast_rows _rows(float[:, :, :] array) noexcept:
    return capi.kvfast_rows(data=&array[0, 0, 0], num_tokens=array.shape[0], num_heads=array.shape[1], dim=array.shape[2],
                            token_stride=array.strides[0], head_stride=array.strides[1], dtype=capi.KVFAST_FLOAT32)


def rotated(float[:, ::1] rows):
    """kv_kernels.rotate, in place."""
    cdef const kv_kernels *kernels = active()
    kernels.rotate(&rows[0, 0], rows.shape[1], rows.shape[0], rows.shape[1], &rows[0, 0], rows.shape[1])
