# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Codes of product quantisation: the vectors that they stand for, and attention on them. Codebooks lie as in `codebook`."""
import numpy as np

from cython.parallel cimport prange
from libc.math cimport INFINITY
from libc.stdint cimport uint8_t, uint16_t
from libc.string cimport memcpy, memset

from kvfast.core.interrupt cimport check_stopped, is_stopped, kv_watch, watch_of
from kvfast.core.kernels cimport (KV_FLOAT16, KV_LANES, KV_ROWS, active, kv_ahead, kv_codes, kv_kernels, kv_prefetch,
                                  kv_score_options, kv_scratch, kv_side, kv_softmax, kv_tile)
from kvfast.core.threads cimport num_threads_for

cdef enum:
    # Tokens of a task of attention, and those that are rows of floats at a time: 16 KiB of 128 elements.
    SPLIT_TOKENS = 1024
    TILE_TOKENS = 64


cdef class PQCodes:
    """One side of attention: the codes of all heads, and their codebooks.

    Parameters
    ----------
    centroids : array of shape (heads, dims * count), float16
    bounds : array of shape (heads, subvectors + 1), int32
    codes : array of shape (heads, n, stride), uint8
        All below `count`: one a byte, or two if `count` is at most 16, the first in the low nibble.
    """

    cdef readonly object centroids, bounds, codes
    cdef const uint16_t[:, ::1] _centroids
    cdef const int[:, ::1] _bounds
    cdef const uint8_t[:, :, ::1] _codes
    cdef readonly int count
    cdef kv_side side          # its rows, decoded
    cdef kv_codes _all

    def __init__(self, centroids, bounds, codes, int count):
        self.centroids, self.bounds, self.codes, self.count = centroids, bounds, codes, count
        self._centroids, self._bounds, self._codes = centroids.view(np.uint16), bounds, codes
        widths = np.diff(bounds, axis=1)
        self._all.stride, self._all.subvectors = codes.shape[2], widths.shape[1]
        self._all.count, self._all.packed = count, count <= 16
        self._all.width = widths[0, 0] if (widths == widths[0, 0]).all() else 0
        memset(&self.side, 0, sizeof(kv_side))
        self.side.dtype, self.side.block_size, self.side.head_dim = KV_FLOAT16, TILE_TOKENS, centroids.shape[1] // count
        self.side.padded_dim = (self.side.head_dim + KV_LANES - 1) // KV_LANES * KV_LANES
        self.side.row_stride = 2 * self.side.padded_dim

    cdef kv_codes of(self, Py_ssize_t head, Py_ssize_t first) noexcept nogil:
        cdef kv_codes codes = self._all
        codes.data, codes.bounds = &self._codes[head, first, 0], &self._bounds[head, 0]
        codes.centroids = &self._centroids[head, 0]
        return codes

    def decode(self):
        """What the codes stand for: ndarray of shape (heads, n, dims), float32."""
        rows = np.empty((*self.codes.shape[:2], self.side.head_dim), np.float16)
        cdef uint16_t[:, :, ::1] view = rows.view(np.uint16)
        cdef const kv_kernels *kernels = active()
        cdef kv_codes codes
        cdef Py_ssize_t head
        for head in range(view.shape[0]):
            codes = self.of(head, 0)
            kernels.decode_codes(&codes, view.shape[1], <char *>&view[head, 0, 0], 2 * view.shape[2])
        return rows.astype(np.float32)


ctypedef struct kv_pq_call:
    const kv_kernels *kernels
    Py_ssize_t rows            # of a head
    Py_ssize_t n               # tokens
    Py_ssize_t splits
    Py_ssize_t blocks          # of up to KV_ROWS rows
    Py_ssize_t heads
    const float *queries       # (heads, rows, dims of a key)
    const Py_ssize_t *visible  # (rows,) tokens that each row sees
    kv_watch *watch            # or NULL
    float *out                 # (splits, heads, rows, dims of a value): sums of weight x value
    float *m                   # (splits, heads, rows) largest score
    float *l                   # (splits, heads, rows) sum of the weights


# What a task works in, on its thread's stack.
ctypedef struct kv_pq_scratch:
    kv_scratch attention
    uint16_t rows[64 * 512]    # (TILE_TOKENS, padded_dim) float16 of at most KV_MAX_HEAD_DIM


cdef void _decode_tile(const kv_pq_call *call, PQCodes codes_of_side, Py_ssize_t head, Py_ssize_t first, int count,
                       uint16_t *rows, kv_tile *tile, kv_ahead *ahead) noexcept nogil:
    """Rows of some tokens, and behind the last whole lines of zeros; attention prefetches the codes that follow them."""
    cdef kv_codes codes = codes_of_side.of(head, first)
    cdef kv_prefetch *prefetch = &ahead.next
    if codes_of_side.side.padded_dim > codes_of_side.side.head_dim or count < TILE_TOKENS:
        memset(rows, 0, TILE_TOKENS * codes_of_side.side.row_stride)
    call.kernels.decode_codes(&codes, count, <char *>rows, codes_of_side.side.row_stride)
    tile.base, tile.at[0], tile.first, tile.count = <const char *>rows, 0, 0, count
    memset(ahead, 0, sizeof(kv_ahead))
    prefetch.base, prefetch.at = <const char *>codes.data + count * codes.stride, tile.at
    prefetch.bytes = prefetch.piece = TILE_TOKENS * codes.stride
    ahead.after = prefetch[0]


cdef void _attend_task(const kv_pq_call *call, PQCodes keys, PQCodes values, Py_ssize_t task) noexcept nogil:
    """One (split, head, block of rows): tile by tile, codes become float16 rows in the processor's cache, and these are read
    as those of any cache."""
    cdef kv_pq_scratch scratch
    cdef kv_scratch *own = &scratch.attention
    cdef kv_softmax *state = &own.softmax
    cdef const kv_side *k = &keys.side
    cdef const kv_side *v = &values.side
    cdef kv_score_options options
    cdef kv_tile tile
    cdef kv_ahead ahead
    cdef int begin[16]
    cdef int end[16]
    cdef Py_ssize_t row0 = task % call.blocks * KV_ROWS, head = task // call.blocks % call.heads
    cdef Py_ssize_t split = task // call.blocks // call.heads, t = split * SPLIT_TOKENS, at, seen = 0
    cdef Py_ssize_t last = min(t + SPLIT_TOKENS, call.n)
    cdef int rows = <int>min(<Py_ssize_t>KV_ROWS, call.rows - row0), r, count
    if is_stopped(call.watch, 16):
        return
    memset(&options, 0, sizeof(options))
    memset(own.rows, 0, rows * k.padded_dim * sizeof(float))
    memset(own.acc, 0, rows * v.padded_dim * sizeof(float))
    for r in range(rows):
        at = (head * call.rows + row0 + r) * k.head_dim
        memcpy(own.rows + r * k.padded_dim, call.queries + at, k.head_dim * sizeof(float))
        state.m[r], state.l[r], state.rescale[r], begin[r] = -INFINITY, 0.0, 1.0, 0
        seen = max(seen, call.visible[row0 + r])
    last = min(last, seen)
    call.kernels.prepare[KV_FLOAT16](k, own.rows, rows, 1.0, &own.queries)
    while t < last:
        count = <int>min(<Py_ssize_t>TILE_TOKENS, last - t)
        for r in range(rows):
            end[r] = <int>max(<Py_ssize_t>0, min(call.visible[row0 + r] - t, <Py_ssize_t>count))
        _decode_tile(call, keys, head, t, count, scratch.rows, &tile, &ahead)
        call.kernels.scores[KV_FLOAT16](k, &own.queries, rows, &tile, &ahead, state.weights)
        call.kernels.softmax(state, rows, count, begin, end, 0.0, &options)
        _decode_tile(call, values, head, t, count, scratch.rows, &tile, &ahead)
        call.kernels.accumulate[KV_FLOAT16](v, state.weights, rows, &tile, &ahead, state.rescale, own.acc)
        t += count
    for r in range(rows):
        at = (split * call.heads + head) * call.rows + row0 + r
        call.m[at], call.l[at] = state.m[r], state.l[r]
        memcpy(call.out + at * v.head_dim, own.acc + r * v.padded_dim, v.head_dim * sizeof(float))


def attend(const float[:, :, ::1] queries, PQCodes keys, PQCodes values, const Py_ssize_t[::1] visible, num_threads=None):
    """Attention on codes.

    Parameters
    ----------
    queries : array of shape (heads, rows, dims), float32
        Times the softmax scale.
    keys, values : PQCodes
    visible : array of shape (rows,), intp
        How many of the first tokens each row sees.

    Returns
    -------
    out : ndarray of shape (heads, rows, dims), float32
    lse : ndarray of shape (heads, rows), float32
        -inf, and an output of 0, for a row that sees nothing.
    """
    cdef kv_pq_call call
    cdef Py_ssize_t task, tasks
    cdef int threads
    cdef double work
    cdef kv_watch watch
    call.kernels = active()
    call.heads, call.rows, call.n = queries.shape[0], queries.shape[1], keys._codes.shape[1]
    call.splits = (call.n + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    call.blocks = (call.rows + KV_ROWS - 1) // KV_ROWS
    shape = call.splits, call.heads, call.rows
    parts = np.empty((*shape, values.side.head_dim), np.float32)
    tops, sums = np.empty(shape, np.float32), np.empty(shape, np.float32)
    cdef float[:, :, :, ::1] out_view = parts
    cdef float[:, :, ::1] m_view = tops
    cdef float[:, :, ::1] l_view = sums
    call.queries, call.visible, call.out = &queries[0, 0, 0], &visible[0], &out_view[0, 0, 0, 0]
    call.m, call.l = &m_view[0, 0, 0], &l_view[0, 0, 0]
    tasks = call.splits * call.heads * call.blocks
    work = 64.0 * tasks * min(<Py_ssize_t>SPLIT_TOKENS, call.n)
    threads = num_threads_for(num_threads, work)
    call.watch = watch_of(&watch, work)
    with nogil:
        for task in prange(tasks, schedule="dynamic", chunksize=1, num_threads=threads):
            _attend_task(&call, keys, values, task)
    check_stopped(call.watch)
    top = tops.max(0)
    weights = np.exp(tops - np.where(np.isneginf(top), np.float32(0), top))
    total, out = np.zeros(shape[1:], np.float32), np.zeros(parts.shape[1:], np.float32)
    for part, weight, one in zip(parts, weights, sums):  # in order
        total += weight * one
        out += weight[..., None] * part
    out /= np.where(total > 0, total, np.float32(1))[..., None]
    with np.errstate(divide="ignore"):
        return out, top + np.log(total)
