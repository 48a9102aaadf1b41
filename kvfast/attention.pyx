# cython: language_level=3, boundscheck=False, cdivision=True
"""Fused attention: streaming softmax straight on the stored bytes (FlashAttention, arXiv 2205.14135, and
its split form for decoding, Flash-Decoding).

The query rows of one KV head (its query heads x the query tokens, up to KV_ROWS at a time) share every
pass over a block. A task is (KV head, row block, split of the context); splits follow from the lengths
alone and merge in order, so that results are the same bits for every number of threads.
"""
import math

import numpy as np

from cython.parallel cimport prange
from libc.math cimport INFINITY, expf, logf
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kvfast._arrays cimport Rows, check_finite, kv_rows, open_rows
from kvfast._kernels cimport (KV_FLOAT32, KV_LANES, KV_NUM_FLOATS, KV_ROWS, KV_TILE, active,
                              kv_ahead, kv_kernels, kv_score_options, kv_scratch, kv_side, kv_softmax)
from kvfast._openmp cimport num_threads_for
from kvfast.blocks cimport init_side, k_block_at, kv_layer, v_block_at

from kvfast.errors import DimensionMismatchError, NonFiniteInputError

cdef extern from *:
    """
    #define kv_touch(address) __builtin_prefetch(address)
    """
    void kv_touch(const void *address) noexcept nogil

cdef enum:
    # More tasks than this do not balance better.
    ENOUGH_TASKS = 64
    # A task costs its cold start and its merge: few heads are split from 1,024 tokens on, 8 and more only
    # from 4,096 (at 4k, 8 KV heads and 2 threads 0.75 of the bandwidth for int8, 0.71 in halves).
    MIN_SPLIT_TOKENS = 1024
    MAX_SPLIT_TOKENS = 4096
    SPLIT_TOKENS_PER_UNIT = 512
    # Fewer partial results than this are merged sooner than a second team of threads starts.
    SERIAL_MERGE = 512
    # Bytes of float rows between two softmax corrections. Measured: pieces of 4 KiB stream best.
    FLOAT_TILE_BYTES = 4096


ctypedef struct kv_call:
    # What one call asks, the same for all its tasks.
    const kv_kernels *kernels
    const kv_layer *layer
    kv_rows q
    int group                  # query heads per KV head
    int tile                   # tokens between two softmax corrections
    float scale
    float softcap
    bint causal
    Py_ssize_t window          # 0: off
    const float *sinks         # (num_q_heads,) or NULL
    const float *slopes        # (num_q_heads,) or NULL
    Py_ssize_t rows            # per KV head: query tokens x group
    Py_ssize_t row_blocks
    Py_ssize_t begin           # first position that any query sees, a multiple of KV_TILE
    Py_ssize_t split_tokens    # a multiple of KV_TILE
    Py_ssize_t splits
    float *partials            # (num_kv_heads, rows, splits, padded_dim + 2) or NULL when splits == 1
    kv_rows out
    float *lse                 # (tokens, num_q_heads) or NULL


cdef class Workspace:
    def __dealloc__(self):
        free(self.data)

    cdef int reserve(self, Py_ssize_t size) except -1:
        if size > self.size:
            free(self.data)
            self.size = 0
            self.data = <float *>malloc(size * sizeof(float))
            if self.data == NULL:
                raise MemoryError(f"cannot allocate {size * sizeof(float):,} bytes for the splits of a call")
            self.size = size
        return 0


cdef inline Py_ssize_t _piece(const kv_side *side, Py_ssize_t tokens) noexcept nogil:
    """Bytes that `tokens` tokens take, without scales."""
    if side.dtype < KV_NUM_FLOATS:
        return tokens * side.row_stride
    return tokens * (side.scales // side.block_size)


cdef void _finish(const kv_call *call, int head, Py_ssize_t row, float *acc, float m, float l) noexcept nogil:
    """Write the output row, and its log-sum-exp."""
    cdef Py_ssize_t token = row // call.group
    cdef int q_head = head * call.group + <int>(row % call.group)
    cdef float scale, top = m
    cdef char *target = call.out.data + token * call.out.token_stride + q_head * call.out.head_stride
    if call.sinks != NULL:
        top = max(m, call.sinks[q_head])
        l = l * expf(m - top) + expf(call.sinks[q_head] - top)
    scale = expf(m - top) / l if l > 0 else 0.0
    call.kernels.scale_add(acc, scale, acc, 0.0, call.out.dim)
    call.kernels.from_float[call.out.dtype](acc, call.out.dim, target)
    if call.lse != NULL:
        call.lse[token * call.q.heads + q_head] = top + logf(l)


cdef void _attend_task(const kv_call *call, Py_ssize_t task) noexcept nogil:
    """One (KV head, row block, split)."""
    cdef const kv_kernels *kernels = call.kernels
    cdef const kv_layer *layer = call.layer
    cdef const kv_side *k = &layer.k
    cdef const kv_side *v = &layer.v
    cdef kv_scratch scratch
    cdef kv_softmax *state = &scratch.softmax
    cdef float *acc = scratch.acc
    cdef kv_score_options options
    cdef kv_ahead ahead
    cdef float slopes[16]
    cdef float query_at[16]
    cdef Py_ssize_t starts[16]
    cdef Py_ssize_t stops[16]
    cdef int first[16]
    cdef int last[16]
    cdef Py_ssize_t split = task % call.splits
    cdef Py_ssize_t row_block = task // call.splits % call.row_blocks
    cdef int head = <int>(task // call.splits // call.row_blocks)
    cdef Py_ssize_t row0 = row_block * KV_ROWS
    cdef int rows = <int>min(<Py_ssize_t>KV_ROWS, call.rows - row0)
    cdef Py_ssize_t padded = k.padded_dim
    cdef Py_ssize_t begin, end = 0, token, position, t, block, lead
    cdef Py_ssize_t k_bytes, v_bytes
    cdef int r, q_head, slot, next_slot, count
    cdef float *partial
    cdef const char *k_block
    cdef const char *v_block
    cdef const char *next_k_block
    cdef const char *next_v_block
    cdef const char *next_k
    cdef const char *next_v

    # Ask for the first keys before anything else; nothing was running ahead of them.
    begin = call.begin + split * call.split_tokens
    k_block = k_block_at(layer, begin // k.block_size, head)
    for t in range(0, _piece(k, call.tile), 64):
        kv_touch(k_block + t)
    begin = layer.length
    for r in range(rows):
        token = (row0 + r) // call.group
        q_head = head * call.group + <int>((row0 + r) % call.group)
        position = layer.length - call.q.tokens + token
        stops[r] = position + 1 if call.causal else layer.length
        starts[r] = max(<Py_ssize_t>0, position + 1 - call.window) if call.window else 0
        begin = min(begin, starts[r])
        end = max(end, stops[r])
        query_at[r] = <float>position
        if call.slopes != NULL:
            slopes[r] = call.slopes[q_head]
        memset(scratch.rows + r * padded + k.head_dim, 0, (padded - k.head_dim) * sizeof(float))
        kernels.to_float[call.q.dtype](
            call.q.data + token * call.q.token_stride + q_head * call.q.head_stride, k.head_dim,
            scratch.rows + r * padded)
        state.m[r] = -INFINITY
        state.l[r] = 0.0
        state.rescale[r] = 1.0
    memset(acc, 0, rows * padded * sizeof(float))
    kernels.prepare[k.dtype](k, scratch.rows, rows, call.scale, &scratch.queries)
    options.softcap = call.softcap
    options.slopes = slopes if call.slopes != NULL else NULL
    options.query_at = query_at

    begin = max(begin // call.tile * call.tile, call.begin + split * call.split_tokens)
    end = min(end, call.begin + (split + 1) * call.split_tokens)
    k_bytes = _piece(k, call.tile)
    v_bytes = _piece(v, call.tile)
    lead = max(k_bytes, v_bytes)
    block = begin // k.block_size
    slot = <int>(begin % k.block_size)
    k_block = k_block_at(layer, block, head)
    v_block = v_block_at(layer, block, head)
    t = begin
    while t < end:
        count = <int>min(<Py_ssize_t>call.tile, end - t)
        # Where the next tile lies, past the end of the split too: its neighbour starts there.
        next_k_block, next_v_block, next_slot = k_block, v_block, slot
        if t + call.tile < layer.length:
            next_slot = slot + call.tile
            if next_slot == k.block_size:
                next_slot = 0
                block += 1
                if block % layer.chunk_blocks:
                    next_k_block = k_block + k.bytes
                    next_v_block = v_block + v.bytes
                else:
                    next_k_block = k_block_at(layer, block, head)
                    next_v_block = v_block_at(layer, block, head)
        next_k = next_k_block + _piece(k, next_slot)
        next_v = next_v_block + _piece(v, next_slot)
        for r in range(rows):
            first[r] = <int>max(<Py_ssize_t>0, min(starts[r] - t, <Py_ssize_t>count))
            last[r] = <int>max(<Py_ssize_t>0, min(stops[r] - t, <Py_ssize_t>count))
        ahead.next = v_block + _piece(v, slot)
        ahead.next_bytes = v_bytes
        ahead.after = next_k
        ahead.lead = lead - k_bytes
        kernels.scores[k.dtype](k, &scratch.queries, rows, k_block, slot, count, &ahead, state.weights)
        kernels.softmax(state, rows, count, first, last, <float>t, &options)
        ahead.next = next_k
        ahead.next_bytes = k_bytes
        ahead.after = next_v
        ahead.lead = lead - v_bytes
        kernels.accumulate[v.dtype](v, state.weights, rows, v_block, slot, count, &ahead, state.rescale, acc)
        k_block, v_block, slot = next_k_block, next_v_block, next_slot
        t += call.tile

    for r in range(rows):
        if call.splits == 1:
            _finish(call, head, row0 + r, acc + r * padded, state.m[r], state.l[r])
        else:
            partial = call.partials + (((head * call.rows + row0 + r) * call.splits) + split) * (padded + 2)
            partial[0] = state.m[r]
            partial[1] = state.l[r]
            kernels.from_float[KV_FLOAT32](acc + r * padded, padded, partial + 2)


cdef void _merge_row(const kv_call *call, Py_ssize_t index) noexcept nogil:
    """Join the splits of one query row, in order."""
    cdef Py_ssize_t padded = call.layer.k.padded_dim, split
    cdef float *partial = call.partials + index * call.splits * (padded + 2)
    cdef float *part
    cdef float acc[512]
    cdef float m = -INFINITY, l = 0.0, weight
    for split in range(call.splits):
        m = max(m, partial[split * (padded + 2)])
    memset(acc, 0, padded * sizeof(float))
    for split in range(call.splits):
        part = partial + split * (padded + 2)
        if part[1] > 0:
            weight = expf(part[0] - m)
            l += part[1] * weight
            call.kernels.scale_add(acc, 1.0, part + 2, weight, padded)
    _finish(call, <int>(index // call.rows), index % call.rows, acc, m, l)


cdef void _run(const kv_call *call, int threads) noexcept nogil:
    cdef Py_ssize_t tasks = call.layer.num_kv_heads * call.row_blocks * call.splits
    cdef Py_ssize_t rows = call.layer.num_kv_heads * call.rows
    cdef Py_ssize_t i
    if threads == 1:
        for i in range(tasks):
            _attend_task(call, i)
    else:
        for i in prange(tasks, schedule="dynamic", chunksize=1, num_threads=threads):
            _attend_task(call, i)
    if call.splits == 1:
        return
    if threads == 1 or rows * call.splits < SERIAL_MERGE:
        for i in range(rows):
            _merge_row(call, i)
    else:
        for i in prange(rows, schedule="static", num_threads=threads):
            _merge_row(call, i)


cdef int _choose_tile(const kv_layer *layer) noexcept nogil:
    cdef int tile = KV_TILE, i
    cdef const kv_side *side
    while layer.k.block_size % tile:
        tile //= 2
    for i in range(2):
        side = &layer.v if i else &layer.k
        if side.dtype < KV_NUM_FLOATS:
            while tile > KV_LANES and tile * side.padded_dim * (4 if side.dtype == KV_FLOAT32 else 2) > FLOAT_TILE_BYTES:
                tile //= 2
    return tile


cdef float _number(object value, str name, bint positive) except? -1:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(f"{name} must be a {'positive ' if positive else ''}finite number, got {value!r}")
    return number


cdef Py_ssize_t _count(object value, str name, Py_ssize_t least) except -1:
    try:
        number = value.__index__()
    except AttributeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return min(number, 1 << 60)


cdef object _per_head(object values, str name, Py_ssize_t num_q_heads):
    array = np.ascontiguousarray(values, dtype=np.float32)
    if array.shape != (num_q_heads,):
        raise DimensionMismatchError(f"{name} must have shape ({num_q_heads},), one per query head, "
                                     f"got {array.shape}")
    if not np.isfinite(array).all():
        raise NonFiniteInputError(f"{name} must be finite, got {array[~np.isfinite(array)][0]}")
    return array


cdef bint _overlap(const kv_rows *a, const kv_rows *b) noexcept:
    cdef char *a_low = a.data
    cdef char *a_high = a.data
    cdef char *b_low = b.data
    cdef char *b_high = b.data
    _extent(a, &a_low, &a_high)
    _extent(b, &b_low, &b_high)
    return a_low < b_high and b_low < a_high


cdef void _extent(const kv_rows *rows, char **low, char **high) noexcept:
    cdef Py_ssize_t tokens = (rows.tokens - 1) * rows.token_stride, heads = (rows.heads - 1) * rows.head_stride
    low[0] += min(tokens, 0) + min(heads, 0)
    high[0] += max(tokens, 0) + max(heads, 0) + rows.dim * (4 if rows.dtype == KV_FLOAT32 else 2)


cdef object attend_layer(const kv_layer *layer, Workspace workspace, object q, object out, object scale,
                         bint causal, object softcap, object sliding_window, object sinks,
                         object alibi_slopes, bint return_lse, object num_splits, object num_threads):
    """Check, plan and run one call; see `kvfast.KVCache.attend` for the arguments."""
    cdef kv_call call
    cdef Rows queries = open_rows(q, "q")
    cdef Rows result
    cdef float[:, ::1] lse_view
    cdef float[::1] sinks_view, slopes_view
    cdef Py_ssize_t span, splits, work, units, least
    cdef int threads
    memset(&call, 0, sizeof(call))
    call.q = queries.rows
    if call.q.dim != layer.k.head_dim:
        raise DimensionMismatchError(f"q must have head_dim {layer.k.head_dim}, got {call.q.dim}")
    if call.q.heads % layer.num_kv_heads:
        raise DimensionMismatchError(f"the heads of q must be a multiple of the {layer.num_kv_heads} KV heads, "
                                     f"got {call.q.heads}")
    if call.q.tokens > layer.length:
        raise ValueError(f"q holds {call.q.tokens} tokens, but the layer holds only {layer.length}")
    call.group = <int>(call.q.heads // layer.num_kv_heads)
    call.scale = 1.0 / math.sqrt(call.q.dim) if scale is None else _number(scale, "scale", False)
    if softcap is not None and softcap != 0:
        call.softcap = _number(softcap, "softcap", True)
    call.causal = causal
    if sliding_window is not None:
        call.window = _count(sliding_window, "sliding_window", 1)
    if sinks is not None:
        sinks = _per_head(sinks, "sinks", call.q.heads)
        sinks_view = sinks
        call.sinks = &sinks_view[0]
    if alibi_slopes is not None:
        alibi_slopes = _per_head(alibi_slopes, "alibi_slopes", call.q.heads)
        slopes_view = alibi_slopes
        call.slopes = &slopes_view[0]
    splits = _count(num_splits, "num_splits", 0)
    check_finite(queries, "q", 3.4028235e38, "float32")

    call.kernels = active()
    call.layer = layer
    call.tile = _choose_tile(layer)
    call.rows = call.q.tokens * call.group
    call.row_blocks = (call.rows + KV_ROWS - 1) // KV_ROWS
    if call.window:
        call.begin = max(<Py_ssize_t>0, layer.length - call.q.tokens + 1 - call.window) // KV_TILE * KV_TILE
    span = layer.length - call.begin
    if splits == 0:
        units = layer.num_kv_heads * call.row_blocks
        least = min(max(units * SPLIT_TOKENS_PER_UNIT, <Py_ssize_t>MIN_SPLIT_TOKENS), <Py_ssize_t>MAX_SPLIT_TOKENS)
        splits = min(ENOUGH_TASKS // units, span // least)
    splits = max(<Py_ssize_t>1, min(splits, (span + KV_TILE - 1) // KV_TILE))
    call.split_tokens = ((span + splits - 1) // splits + KV_TILE - 1) // KV_TILE * KV_TILE
    call.splits = (span + call.split_tokens - 1) // call.split_tokens

    if out is None:
        out = np.empty((call.q.tokens, call.q.heads, call.q.dim), np.float32)
    elif not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    result = open_rows(out, "out", True)
    call.out = result.rows
    if call.out.tokens != call.q.tokens or call.out.heads != call.q.heads or call.out.dim != call.q.dim:
        raise DimensionMismatchError(
            f"out must have the shape of q, ({call.q.tokens}, {call.q.heads}, {call.q.dim}), got {out.shape}")
    if _overlap(&call.out, &call.q):
        raise ValueError("out must not share memory with q")
    lse = None
    if return_lse:
        lse = np.empty((call.q.tokens, call.q.heads), np.float32)
        lse_view = lse
        call.lse = &lse_view[0, 0]
    if call.splits > 1:
        workspace.reserve(layer.num_kv_heads * call.rows * call.splits * (layer.k.padded_dim + 2))
        call.partials = workspace.data
    work = span * layer.num_kv_heads * (_piece(&layer.k, 1) + _piece(&layer.v, 1))
    threads = num_threads_for(num_threads, <double>work * max(1.0, call.rows / 8.0))
    with nogil:
        _run(&call, threads)
    return (out, lse) if return_lse else out


cdef object _padded(object array):
    """A copy with head_dim filled up to what the kernels read at once."""
    array = np.asarray(array)
    padded = np.zeros(array.shape[:2] + (array.shape[2] + -array.shape[2] % KV_LANES,), array.dtype)
    padded[:, :, :array.shape[2]] = array
    return padded


def attention(q, k, v, *, out=None, scale=None, causal=True, softcap=None, sliding_window=None, sinks=None,
              alibi_slopes=None, return_lse=False, num_splits=0, num_threads=None):
    """Fused attention on plain arrays, without a cache.

    Parameters
    ----------
    q : array of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
        Queries of the last `num_tokens` tokens of the context.
    k, v : arrays of shape (context, num_kv_heads, head_dim), float32, float16 or bfloat16
        Keys and values; read where they lie when head_dim is a multiple of 16.
    out, scale, causal, softcap, sliding_window, sinks, alibi_slopes, return_lse, num_splits, num_threads
        As in `kvfast.KVCache.attend`.

    Returns
    -------
    ndarray of shape (num_tokens, num_q_heads, head_dim), float32
        And with `return_lse` the log-sum-exp, float32 of shape (num_tokens, num_q_heads).
    """
    cdef Rows keys = open_rows(k, "k"), values = open_rows(v, "v")
    cdef kv_layer layer
    cdef Py_ssize_t head_dim = keys.rows.dim
    if (keys.rows.tokens != values.rows.tokens or keys.rows.heads != values.rows.heads
            or keys.rows.dim != values.rows.dim):
        raise DimensionMismatchError(
            f"k and v must have one shape, got ({keys.rows.tokens}, {keys.rows.heads}, {keys.rows.dim}) and "
            f"({values.rows.tokens}, {values.rows.heads}, {values.rows.dim})")
    check_finite(keys, "k", 3.4028235e38, "float32")
    check_finite(values, "v", 3.4028235e38, "float32")
    if head_dim % KV_LANES:
        keys = open_rows(_padded(k), "k")
        values = open_rows(_padded(v), "v")
    memset(&layer, 0, sizeof(layer))
    init_side(&layer.k, keys.rows.dtype, <int>head_dim, KV_TILE)
    init_side(&layer.v, values.rows.dtype, <int>head_dim, KV_TILE)
    layer.k.row_stride = keys.rows.token_stride
    layer.v.row_stride = values.rows.token_stride
    layer.num_kv_heads = <int>keys.rows.heads
    layer.k_head_stride = keys.rows.head_stride
    layer.v_head_stride = values.rows.head_stride
    layer.length = keys.rows.tokens
    layer.chunk_blocks = (layer.length + KV_TILE - 1) // KV_TILE
    layer.k.bytes = KV_TILE * layer.k.row_stride
    layer.v.bytes = KV_TILE * layer.v.row_stride
    layer.k_chunks = <const char **>&keys.rows.data
    layer.v_chunks = <const char **>&values.rows.data
    return attend_layer(&layer, Workspace(), q, out, scale, causal, softcap, sliding_window, sinks, alibi_slopes,
                        return_lse, num_splits, num_threads)


def merge_states(out_a, lse_a, out_b, lse_b):
    """Join attention over two disjoint sets of keys (FlashInfer's recursive attention, arXiv 2501.01005).

    Parameters
    ----------
    out_a, out_b : arrays of shape (num_tokens, num_q_heads, head_dim)
        Outputs of `attend` or `attention` over each set.
    lse_a, lse_b : arrays of shape (num_tokens, num_q_heads)
        Their log-sum-exps; -inf for a set that holds no key.

    Returns
    -------
    out : ndarray of shape (num_tokens, num_q_heads, head_dim), float32
    lse : ndarray of shape (num_tokens, num_q_heads), float32
    """
    out_a, out_b = np.asarray(out_a, np.float32), np.asarray(out_b, np.float32)
    lse_a, lse_b = np.asarray(lse_a, np.float32), np.asarray(lse_b, np.float32)
    if out_a.ndim != 3 or out_a.shape != out_b.shape:
        raise DimensionMismatchError("out_a and out_b must have one shape (num_tokens, num_q_heads, head_dim), "
                                     f"got {out_a.shape} and {out_b.shape}")
    if lse_a.shape != out_a.shape[:2] or lse_b.shape != out_a.shape[:2]:
        raise DimensionMismatchError(f"lse_a and lse_b must have shape {out_a.shape[:2]}, "
                                     f"got {lse_a.shape} and {lse_b.shape}")
    top = np.maximum(lse_a, lse_b)
    base = np.where(np.isneginf(top), np.float32(0), top)
    weight_a, weight_b = np.exp(lse_a - base), np.exp(lse_b - base)
    total = weight_a + weight_b
    safe = np.where(total > 0, total, np.float32(1))
    out = out_a * (weight_a / safe)[..., None] + out_b * (weight_b / safe)[..., None]
    with np.errstate(divide="ignore"):
        return out, base + np.log(total)
