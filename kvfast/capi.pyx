# cython: language_level=3, boundscheck=False, cdivision=True
"""The caches for C and Cython; see ``kvfast.h``.

Every call first tries a fast path without the interpreter, which needs blocks and working memory to be allocated already.
Anything else, errors included, takes the same path as a call from Python.
"""
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.math cimport pow, sqrt
from libc.stdint cimport int64_t, intptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from kvfast.attention.options cimport Options
from kvfast.attention.plan cimport Plan
from kvfast.attention.request cimport FITS, has_finite_queries, kv_request, misfit
from kvfast.attention.run cimport LOGS, run_tasks
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport kv_context, kv_layout
from kvfast.codec.encode cimport WRITTEN, encode_rows, work_of
from kvfast.core.arrays cimport Rows, kv_rows
from kvfast.core.flags cimport kv_drop, kv_take
from kvfast.core.kernels cimport KV_BFLOAT16, KV_FLOAT32, active
from kvfast.core.limits cimport KV_MAX_HEAD_DIM, KV_MAX_Q_HEADS, KV_MAX_TOKENS
from kvfast.core.threads cimport gather_unwatched, kv_team, most_threads
from kvfast.storage.sequences.sequence cimport SequenceStorage
from kvfast.storage.tables.block_table cimport BlockTable

from kvfast.errors import CacheFullError, DimensionMismatchError, NonFiniteInputError

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

cdef extern from "Python.h" nogil:
    Py_ssize_t PyList_GET_SIZE(void *list)

cdef enum:
    QUICK_TOKENS = 64      # the most tokens that are appended without the interpreter
    MOST_TEXT = 512        # bytes of an error text

_CODES = (
    (CacheFullError, KVFAST_FULL),
    (DimensionMismatchError, KVFAST_SHAPE),
    (NonFiniteInputError, KVFAST_NOT_FINITE),
    (MemoryError, KVFAST_NO_MEMORY),
    (IndexError, KVFAST_NO_LAYER),
    ((ValueError, TypeError), KVFAST_INVALID),
)


cdef class Handle:
    """The object that a kvfast_cache points to."""
    cdef object cache
    cdef SequenceStorage storage
    cdef Plan plan             # used by one thread at a time, in `quick_attend`
    cdef int busy              # whether a thread is in `quick_attend`
    cdef void **tables         # (num_layers,) BlockTable of each layer, owned by the storage
    cdef Py_ssize_t *layers    # (num_layers,) number of the layer in its table
    cdef bint is_paged         # a Sequence, which knows more about its tokens than the storage does
    cdef bint latent
    cdef char text[MOST_TEXT]

    def __cinit__(self, cache):
        from kvfast.caches.stored_sequence import StoredSequence, storage_in

        cdef Py_ssize_t i
        if not isinstance(cache, StoredSequence):
            raise TypeError(f"cache must be a KVCache, RingKVCache, MLAKVCache or Sequence, got {type(cache).__name__}")
        if getattr(cache, "_rope", None) is not None:
            raise ValueError("the C interface needs rope=None, got a ring with a rope, which rotates queries and keys itself")
        self.cache, self.storage, self.is_paged = cache, storage_in(cache), cache.is_paged
        self.tables = <void **>calloc(self.storage.num_layers, sizeof(void *))
        self.layers = <Py_ssize_t *>calloc(self.storage.num_layers, sizeof(Py_ssize_t))
        if self.tables == NULL or self.layers == NULL:
            raise MemoryError("cannot allocate the layers of a cache")
        for i, (table, layer) in enumerate(self.storage.layer_tables):
            self.tables[i], self.layers[i] = <void *>table, layer
        self.plan = Plan.__new__(Plan)
        self.plan.workspace = Workspace()
        self.plan.workspace.secure = self.storage.secure
        self.latent = (<BlockTable>self.tables[0]).pool.layouts.latent

    def __dealloc__(self):
        free(self.tables)
        free(self.layers)

    cdef bint try_enter(self) noexcept nogil:
        """Enter alone, if no other thread is in the cache and no released blocks wait to be returned; else False. `leave`
        is the inverse."""
        if not (<BlockTable>self.tables[0]).pool.try_enter():
            return False
        if self.is_tidy():
            return True
        self.leave()
        return False

    cdef bint is_tidy(self) noexcept nogil:
        return (not (<BlockTable>self.tables[0]).closed and self.storage.segments is None
                and PyList_GET_SIZE(<void *>(<BlockTable>self.tables[0]).pool.to_release) == 0)

    cdef void leave(self) noexcept nogil:
        (<BlockTable>self.tables[0]).pool.leave()

    cdef bint try_enter_reading(self) noexcept nogil:
        """Enter a call that only reads, if no other thread works in this handle's memory; else False."""
        if kv_take(&self.busy, 1):
            return False
        if (<BlockTable>self.tables[0]).pool.try_enter_reading():
            if self.is_tidy():
                return True
            (<BlockTable>self.tables[0]).pool.leave_reading()
        kv_drop(&self.busy)
        return False

    cdef void leave_reading(self) noexcept nogil:
        (<BlockTable>self.tables[0]).pool.leave_reading()
        kv_drop(&self.busy)

    cdef bint split(self, const kvfast_rows *given, kv_rows *rows, kv_rows *rope) noexcept nogil:
        """Convert the rows, and split latent rows from their rotary part; False if the arguments are invalid."""
        cdef Py_ssize_t latent_dim = (<BlockTable>self.tables[0]).pool.head_dim
        if not _convert(given, rows):
            return False
        memset(rope, 0, sizeof(kv_rows))
        if self.latent:
            if given.dim != latent_dim + (<BlockTable>self.tables[0]).pool.layouts.v.head_dim:
                return False
            rope[0] = rows[0]
            rows.dim = latent_dim
            rope.dim = given.dim - latent_dim
            rope.data += latent_dim * _itemsize(rows.dtype)
        return True

    cdef bint quick_append(self, BlockTable table, Py_ssize_t layer, const kv_rows *k, const kv_rows *v) noexcept nogil:
        cdef int64_t slots[QUICK_TOKENS]
        cdef const kv_layout *layout = table.pool.layouts + layer
        cdef Py_ssize_t first = table.lengths[layer], n = k.tokens, i
        cdef kv_team team
        if (n > QUICK_TOKENS or self.storage.most >= 0 and first + n > self.storage.most or v.tokens != n
                or k.heads != layout.num_kv_heads or k.dim != layout.k.head_dim
                or v.heads != layout.num_kv_heads or v.dim != layout.v.head_dim or not table.is_writable(first, first + n)):
            return False
        for i in range(n):
            slots[i] = table.map.slot(first + i)
        # If a value cannot be stored, the rows written so far follow the last token, where they are never read.
        gather_unwatched(&team, 0, work_of(k))
        if encode_rows(layout, k, v, NULL, slots, True, &team) != WRITTEN:
            return False
        table.lengths[layer] += n
        return True

    cdef bint quick_attend(self, BlockTable table, Py_ssize_t layer, const kv_rows *q, const kv_rows *rope_q,
                           const kvfast_options *options, const kv_rows *out) noexcept nogil:
        cdef const kv_layout *layout = table.pool.layouts + layer
        cdef kv_context context
        cdef kv_request request
        cdef kv_team team
        table.context(layer, &context)
        if options.num_spans or options.num_parents or LOGS:
            return False
        if q.tokens > context.length or not _request_of(options, q, rope_q, out, &request):
            return False
        if misfit(&request, layout) != FITS or not has_finite_queries(&request):
            return False
        if not table.limit(&request.window, &request.num_sink_tokens) or not self.plan.begin(&request, layout, 1):
            return False
        self.plan.ask(&context, 0, q.tokens)
        if not table.holds(self.plan.call.queries[0].start):
            return False
        self.plan.add(&context, 0, q.tokens, 0, 0)
        if self.plan.wide and not layout.latent:  # the workspace does not keep the matrix unit's memory
            return False
        gather_unwatched(&team, options.num_threads, <double>self.plan.work)
        if not self.plan.prepare(self.plan.workspace, team.threads):
            return False
        return run_tasks(&self.plan.call, &team) and not self.plan.bad

    cdef bint quick_advance(self, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i, length = (<BlockTable>self.tables[0]).length
        if n < 1 or self.is_paged:
            return False
        for i in range(self.storage.num_layers):
            if (<BlockTable>self.tables[i]).lengths[self.layers[i]] != length + n or not (<BlockTable>self.tables[i]).just_counts(n):
                return False
        for i in range(self.storage.num_layers):
            if (<BlockTable>self.tables[i]).length == length:  # not yet, for another layer of the table
                (<BlockTable>self.tables[i]).count_tokens(n)
        return True

    cdef int python_append(self, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept with gil:
        cdef Rows keys, values
        try:
            if (v == NULL) != self.latent:
                raise ValueError("v must be NULL for latent rows" if self.latent else "v must not be NULL")
            keys, values = self.open(k, "latent" if self.latent else "k")
            if not self.latent:
                values, _ = self.open(v, "v")
            self.storage.append(layer, keys, values)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int python_attend(self, int layer, const kvfast_rows *q, const kvfast_options *options,
                           const kvfast_rows *out) noexcept with gil:
        cdef Rows queries, rope
        cdef Rows target = Rows.__new__(Rows)
        cdef float[:, ::1] lse
        cdef Py_ssize_t sinks = options.num_sink_tokens
        try:
            queries, rope = self.open(q, "q")
            if not _convert(out, &target.rows):
                raise _unfit(out, "out")
            settings = Options(
                out=target, scale=<float>_scale(options, &queries.rows, &rope.rows), causal=not options.not_causal,
                softcap=options.softcap, sliding_window=options.sliding_window or None,
                num_sink_tokens=None if sinks == 0 else 0 if sinks == -1 else sinks,
                sinks=_per_head(options.sinks, q.num_heads), alibi_slopes=_per_head(options.alibi_slopes, q.num_heads),
                return_lse=options.lse != NULL, num_splits=options.num_splits, num_threads=options.num_threads or None,
                attention_chunk_size=options.attention_chunk_size or None,
                spans=_integers(options.spans, options.num_spans, 2, "spans"), clamp_spans=options.clamp_spans,
                parents=_integers(options.parents, options.num_parents, 1, "parents"))
            if self.latent and (options.attention_chunk_size or options.num_spans or options.num_parents):
                raise ValueError("attention_chunk_size, spans and parents must be 0 and NULL for latent rows")
            result = self.storage.attend(layer, queries, None, settings, rope if rope.rows.dim else None)
            if options.lse != NULL:
                lse = result[1]
                memcpy(options.lse, &lse[0, 0], lse.shape[0] * lse.shape[1] * sizeof(float))
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef Py_ssize_t python_layer_length(self, int layer) noexcept with gil:
        try:
            return self.storage.layer_length(layer)
        except BaseException as error:
            return self.failed(error)

    cdef int python_method(self, str name, Py_ssize_t n) noexcept:
        try:
            getattr(self.cache, name)(n)
            return KVFAST_OK
        except BaseException as error:
            return self.failed(error)

    cdef int python_advance(self, Py_ssize_t n) noexcept with gil:
        return self.python_method("advance", n)

    cdef int python_truncate(self, Py_ssize_t n) noexcept with gil:
        return self.python_method("truncate", n)

    cdef tuple open(self, const kvfast_rows *given, str name):
        """`split` for the path of Python: the Rows, and the rotary part of latent rows."""
        cdef Rows rows = Rows.__new__(Rows), rope = Rows.__new__(Rows)
        if not self.split(given, &rows.rows, &rope.rows):
            raise _unfit(given, name)
        return rows, rope

    cdef int failed(self, error) noexcept:
        cdef bytes text
        try:  # some errors of Python's own, as of Ctrl-C, have no text
            text = (str(error) or type(error).__name__).encode(errors="replace")[:MOST_TEXT - 1]
        except BaseException:
            text = b"out of memory"
        memcpy(self.text, <const char *>text, len(text) + 1)
        for kind, code in _CODES:
            if isinstance(error, kind):
                return code
        return KVFAST_BUSY if isinstance(error, RuntimeError) else KVFAST_ERROR


cdef object _unfit(const kvfast_rows *given, str name):
    """The error for rows that `Handle.split` or `_convert` refused."""
    if given == NULL or given.data == NULL:
        return ValueError(f"{name} must not be NULL")
    if not KV_FLOAT32 <= given.dtype <= KV_BFLOAT16:
        return TypeError(f"{name} must be KVFAST_FLOAT32, KVFAST_FLOAT16 or KVFAST_BFLOAT16, got dtype {given.dtype}")
    shape = given.num_tokens, given.num_heads, given.dim
    size = _itemsize(given.dtype)
    if <intptr_t>given.data % size or given.token_stride % size or given.head_stride % size:
        return ValueError(f"{name} must be aligned to its elements of {size} bytes, got strides {given.token_stride} and "
                          f"{given.head_stride} at address {<intptr_t>given.data:#x}")
    return DimensionMismatchError(f"{name} must have a shape (num_tokens, num_heads, dim) that fits the cache, got {shape}")


cdef object _per_head(const float *values, Py_ssize_t heads):
    return None if values == NULL else [values[i] for i in range(heads)]


cdef list _integers(const Py_ssize_t *given, Py_ssize_t count, int width, str name):
    """An array of an option, as Python has it: `count` rows of `width` numbers, or None."""
    if count < 0 or (given == NULL and count > 0):
        raise ValueError(f"{name} must point to num_{name} of them, got {count} and {'NULL' if given == NULL else 'an address'}")
    if width == 1:
        return [given[i] for i in range(count)] or None
    return [[given[width * i + j] for j in range(width)] for i in range(count)] or None


cdef inline Py_ssize_t _itemsize(int dtype) noexcept nogil:
    return 4 if dtype == KV_FLOAT32 else 2


cdef bint _convert(const kvfast_rows *given, kv_rows *rows) noexcept nogil:
    """Convert a caller's rows to kv_rows; False if they are invalid."""
    cdef Py_ssize_t itemsize
    if given == NULL or given.data == NULL or not KV_FLOAT32 <= given.dtype <= KV_BFLOAT16:
        return False
    itemsize = _itemsize(given.dtype)
    if (given.num_tokens < 1 or given.num_heads < 1 or given.dim < 1 or given.dim > 2 * KV_MAX_HEAD_DIM
            or given.num_tokens > KV_MAX_TOKENS or given.num_heads > KV_MAX_Q_HEADS
            or <intptr_t>given.data % itemsize or given.token_stride % itemsize or given.head_stride % itemsize):
        return False
    rows.data, rows.dtype = <char *>given.data, given.dtype
    rows.tokens, rows.heads, rows.dim = given.num_tokens, given.num_heads, given.dim
    rows.head_stride = given.head_stride or given.dim * itemsize
    rows.token_stride = given.token_stride or given.num_heads * rows.head_stride
    return True


cdef float _scale(const kvfast_options *options, const kv_rows *q, const kv_rows *rope_q) noexcept nogil:
    """The scale of the options, or the default of the caches."""
    if options.scale != 0:
        return options.scale
    if rope_q.data != NULL:
        return <float>pow(<double>(q.dim + rope_q.dim), -0.5)
    return <float>(1.0 / sqrt(<double>q.dim))


cdef bint _request_of(const kvfast_options *options, const kv_rows *q, const kv_rows *rope_q, const kv_rows *out,
                      kv_request *request) noexcept nogil:
    """Convert the arguments of a call without spans and parents; False if they are invalid."""
    memset(request, 0, sizeof(kv_request))
    request.q, request.out, request.lse = q[0], out[0], options.lse
    if rope_q.dim:
        request.rope_q = rope_q[0]
    request.scale, request.softcap = _scale(options, q, rope_q), options.softcap
    request.sinks, request.slopes = options.sinks, options.alibi_slopes
    request.window, request.num_splits, request.causal = options.sliding_window, options.num_splits, not options.not_causal
    request.num_sink_tokens = -1 if options.num_sink_tokens == 0 else max(options.num_sink_tokens, 0)
    request.threads, request.chunk = most_threads(options.num_threads), options.attention_chunk_size
    return 0 <= options.num_threads <= 1024 and (request.chunk == 0 or (request.chunk > 0 and request.causal and not rope_q.dim))


cdef kvfast_cache *open(object cache) except NULL:
    handle = Handle(cache)
    Py_INCREF(handle)
    return <kvfast_cache *>handle


cdef void close(kvfast_cache *cache) noexcept with gil:
    if cache != NULL:
        Py_DECREF(<object>cache)


cdef int append(kvfast_cache *cache, int layer, const kvfast_rows *k, const kvfast_rows *v) noexcept nogil:
    cdef kv_rows keys, values, rope
    cdef bint done = False
    if cache == NULL:
        return KVFAST_INVALID
    if (0 <= layer < (<Handle>cache).storage.num_layers and (v == NULL) == (<Handle>cache).latent
            and (<Handle>cache).split(k, &keys, &rope) and (v == NULL or _convert(v, &values)) and (<Handle>cache).try_enter()):
        done = (<Handle>cache).quick_append(<BlockTable>(<Handle>cache).tables[layer], (<Handle>cache).layers[layer], &keys,
                                            &rope if v == NULL else &values)
        (<Handle>cache).leave()
    return KVFAST_OK if done else (<Handle>cache).python_append(layer, k, v)


cdef int attend(kvfast_cache *cache, int layer, const kvfast_rows *q, const kvfast_options *options,
                const kvfast_rows *out) noexcept nogil:
    cdef kv_rows queries, rope, target
    cdef kvfast_options defaults
    cdef bint done = False
    if cache == NULL:
        return KVFAST_INVALID
    if options == NULL:
        memset(&defaults, 0, sizeof(defaults))
        options = &defaults
    if (0 <= layer < (<Handle>cache).storage.num_layers and (<Handle>cache).split(q, &queries, &rope)
            and _convert(out, &target) and (<Handle>cache).try_enter_reading()):
        done = (<Handle>cache).quick_attend(<BlockTable>(<Handle>cache).tables[layer], (<Handle>cache).layers[layer], &queries,
                                            &rope, options, &target)
        (<Handle>cache).leave_reading()
    return KVFAST_OK if done else (<Handle>cache).python_attend(layer, q, options, out)


cdef int advance(kvfast_cache *cache, Py_ssize_t n) noexcept nogil:
    cdef bint done = False
    if cache == NULL:
        return KVFAST_INVALID
    if (<Handle>cache).try_enter():
        done = (<Handle>cache).quick_advance(n)
        (<Handle>cache).leave()
    return KVFAST_OK if done else (<Handle>cache).python_advance(n)


cdef int truncate(kvfast_cache *cache, Py_ssize_t n) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<Handle>cache).python_truncate(n)


cdef Py_ssize_t length(kvfast_cache *cache) noexcept nogil:
    return KVFAST_INVALID if cache == NULL else (<BlockTable>(<Handle>cache).tables[0]).length + (<Handle>cache).storage.base


cdef Py_ssize_t layer_length(kvfast_cache *cache, int layer) noexcept nogil:
    if cache == NULL:
        return KVFAST_INVALID
    if not 0 <= layer < (<Handle>cache).storage.num_layers:
        return (<Handle>cache).python_layer_length(layer)
    return (<BlockTable>(<Handle>cache).tables[layer]).lengths[(<Handle>cache).layers[layer]] + (<Handle>cache).storage.base


cdef const char *error(kvfast_cache *cache) noexcept nogil:
    if cache == NULL:
        return "the cache is NULL"
    return &(<Handle>cache).text[0]


cdef const void *kernels() noexcept nogil:
    return active()


cdef dict _arguments(const kvfast_shape *shape):
    """Those of `PagedKVCache`."""
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


cdef kvfast_api _api
_api.abi, _api.api = KVFAST_ABI, KVFAST_API
_api.open, _api.close, _api.append, _api.attend = open, close, append, attend
_api.advance, _api.truncate, _api.length, _api.layer_length = advance, truncate, length, layer_length
_api.error, _api.kernels, _api.block_nbytes, _api.open_pool = error, kernels, block_nbytes, open_pool
C_API = PyCapsule_New(&_api, "kvfast.capi.C_API", NULL)
