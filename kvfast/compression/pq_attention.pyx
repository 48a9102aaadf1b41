# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Codes of product quantisation: decodes them, and computes attention on them. `pq_training` has the layout of codebooks."""
import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport uint8_t, uint16_t
from libc.string cimport memcpy, memset

from kvfast.codec.blocks cimport init_side
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport (KV_FLOAT16, active, kv_ahead, kv_codes, kv_kernels, kv_prefetch, kv_score_options, kv_scratch,
                                  kv_side, kv_softmax, kv_tile)
from kvfast.core.limits cimport KV_MAX_HEAD_DIM, KV_ROWS
from kvfast.core.threads cimport DYNAMIC, for_each, gather, kv_team

cdef enum:
    # Tokens of a split, and tokens decoded at a time: 64 rows of 128 float16 elements are 16 KiB.
    SPLIT_TOKENS = 1024
    TILE_TOKENS = 64


# One side of attention, as its tasks read it.
ctypedef struct kv_pq_side:
    kv_side rows               # decoded, float16
    kv_codes codes             # of head 0, from token 0 on
    Py_ssize_t head_bytes      # bytes from the codes of a head to those of the next one
    Py_ssize_t centroids       # numbers in the codebooks of a head


cdef class PQCodes:
    """One side of attention: the codes of all heads, and their codebooks.

    Parameters
    ----------
    centroids : array of shape (heads, dims * count), float16
    bounds : array of shape (heads, subvectors + 1), int32
    codes : array of shape (heads, n, stride), uint8
        All below `count`. A byte holds one code, or two if `count` is at most 16, the first in the low nibble.
    """

    cdef readonly object centroids, bounds, codes
    cdef const uint16_t[:, ::1] _centroids
    cdef const int[:, ::1] _bounds
    cdef const uint8_t[:, :, ::1] _codes
    cdef readonly int count
    cdef kv_pq_side c

    def __init__(self, centroids, bounds, codes, int count):
        self.centroids, self.bounds, self.codes, self.count = centroids, bounds, codes, count
        self._centroids, self._bounds, self._codes = centroids.view(np.uint16), bounds, codes
        widths = np.diff(bounds, axis=1)
        cdef kv_codes *first = &self.c.codes
        first.data, first.bounds, first.centroids = &self._codes[0, 0, 0], &self._bounds[0, 0], &self._centroids[0, 0]
        first.stride, first.subvectors = codes.shape[2], widths.shape[1]
        first.count, first.packed = count, count <= 16
        first.width = widths[0, 0] if (widths == widths[0, 0]).all() else 0
        self.c.head_bytes, self.c.centroids = codes.shape[1] * codes.shape[2], centroids.shape[1]
        init_side(&self.c.rows, KV_FLOAT16, centroids.shape[1] // count, TILE_TOKENS)

    def decode(self):
        """The vectors that the codes stand for: ndarray of shape (heads, n, dims), float32."""
        rows = np.empty((*self.codes.shape[:2], self.c.rows.head_dim), np.float16)
        cdef uint16_t[:, :, ::1] view = rows.view(np.uint16)
        cdef const kv_kernels *kernels = active()
        cdef kv_codes codes
        cdef Py_ssize_t head
        for head in range(view.shape[0]):
            codes = _codes_from(&self.c, head, 0)
            kernels.decode_codes(&codes, view.shape[1], <char *>&view[head, 0, 0], 2 * view.shape[2])
        return rows.astype(np.float32)


cdef kv_codes _codes_from(const kv_pq_side *side, Py_ssize_t head, Py_ssize_t first) noexcept nogil:
    """The codes of a head from token `first` on."""
    cdef kv_codes codes = side.codes
    codes.data += head * side.head_bytes + first * codes.stride
    codes.bounds += head * (codes.subvectors + 1)
    codes.centroids += head * side.centroids
    return codes


ctypedef struct kv_pq_call:
    const kv_kernels *kernels
    const kv_pq_side *keys
    const kv_pq_side *values
    Py_ssize_t rows            # query rows of a head
    Py_ssize_t n               # tokens
    Py_ssize_t splits
    Py_ssize_t blocks          # row blocks of a head, of up to KV_ROWS rows each
    Py_ssize_t heads
    const float *queries       # (heads, rows, dims of a key)
    const Py_ssize_t *visible  # (rows,) number of first tokens that each row sees
    float *out                 # (splits, heads, rows, dims of a value): sums of weight x value
    float *m                   # (splits, heads, rows) largest score
    float *l                   # (splits, heads, rows) sum of the weights


# Working memory of a task, on its thread's stack.
ctypedef struct kv_pq_scratch:
    kv_scratch attention
    uint16_t rows[TILE_TOKENS * KV_MAX_HEAD_DIM]  # (TILE_TOKENS, padded_dim) float16


cdef void _decode_tile(const kv_pq_call *call, const kv_pq_side *side, Py_ssize_t head, Py_ssize_t first, int count,
                       uint16_t *rows, kv_tile *tile, kv_ahead *ahead) noexcept nogil:
    """Decode `count` tokens and set the rows after them to 0. Attention prefetches the codes that follow."""
    cdef kv_codes codes = _codes_from(side, head, first)
    cdef kv_prefetch *prefetch = &ahead.next
    if side.rows.padded_dim > side.rows.head_dim or count < TILE_TOKENS:
        memset(rows, 0, TILE_TOKENS * side.rows.row_stride)
    call.kernels.decode_codes(&codes, count, <char *>rows, side.rows.row_stride)
    tile.base, tile.at[0], tile.first, tile.count = <const char *>rows, 0, 0, count
    memset(ahead, 0, sizeof(kv_ahead))
    prefetch.base, prefetch.at = <const char *>codes.data + count * codes.stride, tile.at
    prefetch.bytes = prefetch.piece = TILE_TOKENS * codes.stride
    ahead.after = prefetch[0]


cdef int _attend_task(void *shared, Py_ssize_t task, int thread, kv_watch *watch) noexcept nogil:
    """One (split, head, row block). Each tile of codes is decoded to float16 rows in the processor's cache, which the kernels
    read like those of any cache."""
    cdef const kv_pq_call *call = <const kv_pq_call *>shared
    cdef kv_pq_scratch scratch
    cdef kv_scratch *own = &scratch.attention
    cdef kv_softmax *state = &own.softmax
    cdef const kv_side *k = &call.keys.rows
    cdef const kv_side *v = &call.values.rows
    cdef kv_score_options options
    cdef kv_tile tile
    cdef kv_ahead ahead
    cdef int begin[16]
    cdef int end[16]
    cdef Py_ssize_t row0 = task % call.blocks * KV_ROWS, head = task // call.blocks % call.heads
    cdef Py_ssize_t split = task // call.blocks // call.heads, t = split * SPLIT_TOKENS, at, seen = 0
    cdef Py_ssize_t last = min(t + SPLIT_TOKENS, call.n)
    cdef int rows = <int>min(<Py_ssize_t>KV_ROWS, call.rows - row0), r, count
    memset(&options, 0, sizeof(options))
    memset(own.rows, 0, rows * k.padded_dim * sizeof(float))
    memset(own.acc, 0, rows * v.padded_dim * sizeof(float))
    for r in range(rows):
        at = (head * call.rows + row0 + r) * k.head_dim
        memcpy(own.rows + r * k.padded_dim, call.queries + at, k.head_dim * sizeof(float))
        state.m[r], state.l[r], state.rescale[r], state.noise[r], begin[r] = -INFINITY, 0.0, 1.0, 0.0, 0
        seen = max(seen, call.visible[row0 + r])
    last = min(last, seen)
    call.kernels.prepare[KV_FLOAT16](k, own.rows, rows, 1.0, &own.queries)
    while t < last:
        count = <int>min(<Py_ssize_t>TILE_TOKENS, last - t)
        for r in range(rows):
            end[r] = <int>max(<Py_ssize_t>0, min(call.visible[row0 + r] - t, <Py_ssize_t>count))
        _decode_tile(call, call.keys, head, t, count, scratch.rows, &tile, &ahead)
        call.kernels.scores[KV_FLOAT16](k, &own.queries, rows, &tile, &ahead, state.weights)
        call.kernels.softmax(state, rows, count, begin, end, 0.0, &options)
        _decode_tile(call, call.values, head, t, count, scratch.rows, &tile, &ahead)
        call.kernels.accumulate[KV_FLOAT16](v, state, rows, &tile, &ahead, own.acc)
        t += count
    for r in range(rows):
        at = (split * call.heads + head) * call.rows + row0 + r
        call.m[at], call.l[at] = state.m[r], state.l[r]
        memcpy(call.out + at * v.head_dim, own.acc + r * v.padded_dim, v.head_dim * sizeof(float))
    return 0


def attend(const float[:, :, ::1] queries, PQCodes keys, PQCodes values, const Py_ssize_t[::1] visible, num_threads=None):
    """Attention on codes.

    Parameters
    ----------
    queries : array of shape (heads, rows, dims), float32
        Multiplied by the softmax scale already.
    keys, values : PQCodes
    visible : array of shape (rows,), intp
        Number of first tokens that each row sees.

    Returns
    -------
    out : ndarray of shape (heads, rows, dims), float32
    lse : ndarray of shape (heads, rows), float32
        -inf for a row that sees nothing; its output is 0.
    """
    cdef kv_pq_call call
    cdef Py_ssize_t tasks
    cdef kv_team team
    call.kernels, call.keys, call.values = active(), &keys.c, &values.c
    call.heads, call.rows, call.n = queries.shape[0], queries.shape[1], keys._codes.shape[1]
    call.splits = (call.n + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    call.blocks = (call.rows + KV_ROWS - 1) // KV_ROWS
    shape = call.splits, call.heads, call.rows
    parts = np.empty((*shape, values.c.rows.head_dim), np.float32)
    tops, sums = np.empty(shape, np.float32), np.empty(shape, np.float32)
    cdef float[:, :, :, ::1] out_view = parts
    cdef float[:, :, ::1] m_view = tops
    cdef float[:, :, ::1] l_view = sums
    call.queries, call.visible, call.out = &queries[0, 0, 0], &visible[0], &out_view[0, 0, 0, 0]
    call.m, call.l = &m_view[0, 0, 0], &l_view[0, 0, 0]
    tasks = call.splits * call.heads * call.blocks
    gather(&team, num_threads, 64.0 * tasks * min(<Py_ssize_t>SPLIT_TOKENS, call.n))
    for_each(&team, _attend_task, &call, tasks, DYNAMIC)
    top = tops.max(0)
    weights = np.exp(tops - np.where(np.isneginf(top), np.float32(0), top))
    total, out = np.zeros(shape[1:], np.float32), np.zeros(parts.shape[1:], np.float32)
    for part, weight, one in zip(parts, weights, sums):  # in order
        total += weight * one
        out += weight[..., None] * part
    out /= np.where(total > 0, total, np.float32(1))[..., None]
    with np.errstate(divide="ignore"):
        return out, top + np.log(total)
