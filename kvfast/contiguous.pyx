# cython: language_level=3, boundscheck=False, cdivision=True
"""The contiguous cache's buffer: blocks one after the other, in chunks that never move.

A chunk holds the same number of blocks for every layer, side and head. A buffer with a maximum length is
one chunk; one without grows by chunks, so that nothing that is stored is ever copied.
"""
import numpy as np

from cython.parallel cimport prange
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from kvfast._arrays cimport Rows, check_finite, kv_rows, open_rows
from kvfast._kernels cimport KV_FLOAT32, KV_INT4, KV_MAX_HEAD_DIM, active, kv_kernels, kv_side
from kvfast._openmp cimport num_threads_for
from kvfast.attention cimport Workspace, attend_layer
from kvfast.blocks cimport Arena, dtype_limit, dtype_name, init_side, k_block_at, kv_layer, parse_dtype, v_block_at

from kvfast.errors import CacheFullError, DimensionMismatchError

cdef enum:
    # Tokens of a block: 4 to 16 KiB of codes a side, the pieces that stream best.
    BLOCK_SIZE = 64
    INT4_BLOCK_SIZE = 128
    GROW_TOKENS = 512  # a growing cache takes this many tokens of all layers at a time


cdef Py_ssize_t _positive(object value, str name, Py_ssize_t most) except -1:
    try:
        number = value.__index__()
    except AttributeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not 1 <= number <= most:
        raise ValueError(f"{name} must be between 1 and {most}, got {number}")
    return number


cdef Py_ssize_t _stride(Py_ssize_t nbytes) noexcept:
    """Bytes from head to head: not a multiple of a page, so that the heads' and the sides' streams do not
    fall into the same sets of the processor's caches."""
    return nbytes + 64 if nbytes % 4096 == 0 else nbytes


cdef object _per_layer(object dtype, Py_ssize_t num_layers, str name):
    """One dtype number per layer, from one dtype or a list."""
    if isinstance(dtype, (list, tuple)):
        if len(dtype) != num_layers:
            raise DimensionMismatchError(f"{name} must be one dtype or a list of {num_layers}, one per layer, "
                                         f"got {len(dtype)}")
        return [parse_dtype(one) for one in dtype]
    return [parse_dtype(dtype)] * num_layers


cdef class ContiguousBuffer:
    """Storage of a `KVCache`; see there for the meaning of the arguments."""

    def __cinit__(self, num_layers, num_kv_heads, head_dim, max_seq_len, k_dtype, v_dtype):
        cdef Py_ssize_t i
        cdef int block_size
        cdef kv_layer *layer
        self.num_layers = _positive(num_layers, "num_layers", 1 << 16)
        self.num_kv_heads = _positive(num_kv_heads, "num_kv_heads", 1 << 16)
        self.head_dim = _positive(head_dim, "head_dim", KV_MAX_HEAD_DIM)
        k_dtypes = _per_layer(k_dtype, self.num_layers, "k_dtype")
        v_dtypes = _per_layer(v_dtype, self.num_layers, "v_dtype")
        self.chunk_tokens = GROW_TOKENS
        self.max_seq_len = None
        if max_seq_len is not None:
            self.max_seq_len = _positive(max_seq_len, "max_seq_len", 1 << 40)
            self.chunk_tokens = (self.max_seq_len + INT4_BLOCK_SIZE - 1) // INT4_BLOCK_SIZE * INT4_BLOCK_SIZE
        self.layers = <kv_layer *>calloc(self.num_layers, sizeof(kv_layer))
        self.offsets = <Py_ssize_t *>calloc(2 * self.num_layers, sizeof(Py_ssize_t))
        if self.layers == NULL or self.offsets == NULL:
            raise MemoryError("cannot allocate the layers of a cache")
        total = 0
        for i in range(self.num_layers):
            layer = self.layers + i
            layer.num_kv_heads = <int>self.num_kv_heads
            block_size = INT4_BLOCK_SIZE if k_dtypes[i] == v_dtypes[i] == KV_INT4 else BLOCK_SIZE
            layer.chunk_blocks = self.chunk_tokens // block_size
            init_side(&layer.k, k_dtypes[i], <int>self.head_dim, block_size)
            init_side(&layer.v, v_dtypes[i], <int>self.head_dim, block_size)
            layer.k_head_stride = _stride(layer.chunk_blocks * layer.k.bytes)
            layer.v_head_stride = _stride(layer.chunk_blocks * layer.v.bytes)
            k_bytes = int(self.num_kv_heads) * int(layer.k_head_stride)
            v_bytes = int(self.num_kv_heads) * int(layer.v_head_stride)
            if total + k_bytes + v_bytes > 1 << 60:
                raise MemoryError(f"a cache of more than {total + k_bytes + v_bytes:,} bytes is beyond the "
                                  f"address space")
            self.offsets[2 * i] = total
            self.offsets[2 * i + 1] = total + k_bytes
            total += k_bytes + v_bytes
        self.chunk_bytes = total
        self.chunks = []
        self.workspace = Workspace()
        if self.max_seq_len is not None:
            self._reserve(self.max_seq_len)

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.layers != NULL:
            for i in range(self.num_layers):
                free(self.layers[i].k_chunks)
                free(self.layers[i].v_chunks)
        free(self.layers)
        free(self.offsets)

    cdef int _enter(self) except -1:
        if self.busy:
            raise RuntimeError("this cache is in use by another thread; a cache serves one thread at a time")
        self.busy = True
        return 0

    cdef kv_layer *_layer(self, object index) except NULL:
        try:
            number = index.__index__()
        except AttributeError:
            raise TypeError(f"layer must be an integer, got {index!r}") from None
        if not 0 <= number < self.num_layers:
            raise IndexError(f"layer must be between 0 and {self.num_layers - 1}, got {number}")
        return self.layers + <Py_ssize_t>number

    cdef int _reserve(self, Py_ssize_t tokens) except -1:
        """Make room for `tokens` tokens in every layer."""
        cdef Py_ssize_t count, i
        cdef kv_layer *layer
        cdef Arena arena
        while len(self.chunks) * self.chunk_tokens < tokens:
            count = len(self.chunks)
            arena = Arena(self.chunk_bytes)
            for i in range(self.num_layers):
                layer = self.layers + i
                layer.k_chunks = _with_one_more(layer.k_chunks, count, arena.data + self.offsets[2 * i])
                layer.v_chunks = _with_one_more(layer.v_chunks, count, arena.data + self.offsets[2 * i + 1])
            self.chunks.append(arena)
        return 0

    def append(self, index, k, v):
        cdef kv_layer *layer = self._layer(index)
        cdef Rows keys = open_rows(k, "k"), values = open_rows(v, "v")
        cdef const kv_kernels *kernels = active()
        cdef Py_ssize_t i, n = keys.rows.tokens
        cdef int threads
        self._check_shape(keys, "k")
        self._check_shape(values, "v")
        if n != values.rows.tokens:
            raise DimensionMismatchError(f"k and v must hold as many tokens as each other, got {n} and "
                                         f"{values.rows.tokens}")
        self._enter()
        try:
            if self.max_seq_len is not None and n > self.max_seq_len - layer.length:
                room = self.max_seq_len - layer.length
                raise CacheFullError(f"layer {index} has room for {room} of {self.max_seq_len} tokens, got {n}",
                                     n, room)
            check_finite(keys, "k", dtype_limit(layer.k.dtype), dtype_name(layer.k.dtype))
            check_finite(values, "v", dtype_limit(layer.v.dtype), dtype_name(layer.v.dtype))
            self._reserve(layer.length + n)
            threads = num_threads_for(None, <double>n * self.num_kv_heads * self.head_dim * 8)
            with nogil:
                if threads == 1:
                    for i in range(self.num_kv_heads):
                        _append_head(kernels, layer, <int>i, &keys.rows, &values.rows)
                else:
                    for i in prange(self.num_kv_heads, schedule="dynamic", num_threads=threads):
                        _append_head(kernels, layer, <int>i, &keys.rows, &values.rows)
            layer.length += n
        finally:
            self.busy = False

    cdef int _check_shape(self, Rows array, str name) except -1:
        if array.rows.heads != self.num_kv_heads or array.rows.dim != self.head_dim:
            raise DimensionMismatchError(
                f"{name} must have shape (num_tokens, {self.num_kv_heads}, {self.head_dim}), "
                f"got ({array.rows.tokens}, {array.rows.heads}, {array.rows.dim})")
        return 0

    def attend(self, index, q, out, scale, causal, softcap, sliding_window, sinks, alibi_slopes, return_lse,
               num_splits, num_threads):
        cdef kv_layer *layer = self._layer(index)
        self._enter()
        try:
            if layer.length == 0:
                raise ValueError(f"layer {index} holds no tokens to attend to")
            return attend_layer(layer, self.workspace, q, out, scale, causal, softcap, sliding_window, sinks,
                                alibi_slopes, return_lse, num_splits, num_threads)
        finally:
            self.busy = False

    def advance(self, n):
        cdef Py_ssize_t i, count = _positive(n, "n", 1 << 60)
        wrong = [f"layer {i} has {self.layers[i].length}" for i in range(self.num_layers)
                 if self.layers[i].length != self.length + count]
        if wrong:
            raise ValueError(f"advance({n}) needs {self.length + count} tokens in every layer, but "
                             + ", ".join(wrong[:8]) + (", ..." if len(wrong) > 8 else ""))
        self.length += count

    def layer_length(self, index):
        return self._layer(index).length

    def truncate(self, n):
        cdef Py_ssize_t i
        try:
            count = n.__index__()
        except AttributeError:
            raise TypeError(f"n must be an integer, got {n!r}") from None
        if not 0 <= count <= self.length:
            raise ValueError(f"n must be between 0 and the {self.length} tokens of the cache, got {count}")
        self._enter()
        self.length = count
        for i in range(self.num_layers):
            self.layers[i].length = min(self.layers[i].length, self.length)
        self.busy = False

    def rows(self, index, bint values):
        """Keys or values of a layer as float32: a view where they are stored so, else decoded."""
        cdef kv_layer *layer = self._layer(index)
        cdef const kv_side *side = &layer.v if values else &layer.k
        cdef Py_ssize_t head_stride = layer.v_head_stride if values else layer.k_head_stride
        cdef const kv_kernels *kernels = active()
        cdef float[:, :, ::1] out
        cdef Py_ssize_t i, n = layer.length
        cdef int threads
        shape = (n, self.num_kv_heads, self.head_dim)
        if side.dtype == KV_FLOAT32 and self.max_seq_len is not None:
            view = np.ndarray(shape, np.float32, buffer=self.chunks[0],
                              offset=self.offsets[2 * <Py_ssize_t>index + values],
                              strides=(side.row_stride, head_stride, 4))
            view.flags.writeable = False
            return view
        array = np.empty(shape, np.float32)
        if n == 0:
            return array
        out = array
        self._enter()
        try:
            threads = num_threads_for(None, <double>n * self.num_kv_heads * self.head_dim * 8)
            with nogil:
                if threads == 1:
                    for i in range(n):
                        _decode_token(kernels, layer, i, &out[i, 0, 0], values)
                else:
                    for i in prange(n, schedule="static", num_threads=threads):
                        _decode_token(kernels, layer, i, &out[i, 0, 0], values)
        finally:
            self.busy = False
        return array

    def copy(self):
        """An independent deep copy."""
        cdef ContiguousBuffer other = ContiguousBuffer(self.num_layers, self.num_kv_heads, self.head_dim,
                                                       self.max_seq_len, self.dtypes(False), self.dtypes(True))
        cdef Py_ssize_t i, b, h
        cdef kv_layer *source
        cdef kv_layer *target
        self._enter()
        try:
            other.length = self.length
            for i in range(self.num_layers):
                source, target = self.layers + i, other.layers + i
                other._reserve(source.length)
                target.length = source.length
                for b in range((source.length + source.k.block_size - 1) // source.k.block_size):
                    for h in range(self.num_kv_heads):
                        memcpy(k_block_at(target, b, h), k_block_at(source, b, h), source.k.bytes)
                        memcpy(v_block_at(target, b, h), v_block_at(source, b, h), source.v.bytes)
        finally:
            self.busy = False
        return other

    def dtypes(self, bint values):
        """Names of the storage dtypes of all layers."""
        cdef Py_ssize_t i
        return [dtype_name(self.layers[i].v.dtype if values else self.layers[i].k.dtype)
                for i in range(self.num_layers)]

    @property
    def nbytes(self):
        return sum(arena.nbytes for arena in self.chunks)

    @property
    def bytes_per_token(self):
        cdef Py_ssize_t i, total = 0
        for i in range(self.num_layers):
            total += ((self.layers[i].k.bytes + self.layers[i].v.bytes) * self.num_kv_heads
                      * (INT4_BLOCK_SIZE // self.layers[i].k.block_size))
        return total // INT4_BLOCK_SIZE


cdef void _append_head(const kv_kernels *kernels, const kv_layer *layer, int head, const kv_rows *k,
                       const kv_rows *v) noexcept nogil:
    """Write the rows of one head behind the layer's last token."""
    cdef float buffer[512]
    cdef const float *row
    cdef const char *source
    cdef Py_ssize_t token, at
    for token in range(k.tokens):
        at = layer.length + token
        source = k.data + token * k.token_stride + head * k.head_stride
        row = <const float *>source
        if k.dtype != KV_FLOAT32:
            kernels.to_float[k.dtype](source, k.dim, buffer)
            row = buffer
        kernels.encode_k(&layer.k, k_block_at(layer, at // layer.k.block_size, head), <int>(at % layer.k.block_size), row)
        source = v.data + token * v.token_stride + head * v.head_stride
        row = <const float *>source
        if v.dtype != KV_FLOAT32:
            kernels.to_float[v.dtype](source, v.dim, buffer)
            row = buffer
        kernels.encode_v(&layer.v, v_block_at(layer, at // layer.k.block_size, head), <int>(at % layer.k.block_size), row)


cdef void _decode_token(const kv_kernels *kernels, const kv_layer *layer, Py_ssize_t token, float *out,
                        bint values) noexcept nogil:
    cdef Py_ssize_t head, block = token // layer.k.block_size
    cdef int slot = <int>(token % layer.k.block_size)
    for head in range(layer.num_kv_heads):
        if values:
            kernels.decode_v(&layer.v, v_block_at(layer, block, head), slot, out)
        else:
            kernels.decode_k(&layer.k, k_block_at(layer, block, head), slot, out)
        out += layer.k.head_dim


cdef const char **_with_one_more(const char **chunks, Py_ssize_t count, const char *chunk) except NULL:
    """A table of pointers with one more; the old one stays valid if memory runs out."""
    cdef const char **table = <const char **>malloc((count + 1) * sizeof(char *))
    if table == NULL:
        raise MemoryError("cannot allocate the chunk tables of a cache")
    if count:
        memcpy(table, chunks, count * sizeof(char *))
    table[count] = chunk
    free(chunks)
    return table
