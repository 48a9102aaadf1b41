# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Product quantisation: codebooks of the subvectors of many vectors, and attention on their codes (Jegou et al., Product
quantization for nearest neighbor search, 2011).

Vectors of a head are cut into subvectors, each with a codebook of its own. `bounds[head, j]` is where subvector j of a head
starts; its centroids, (count, dims), start at element ``bounds[head, j] * count`` of the head's.
"""
import numpy as np

from cython.parallel cimport prange, threadid
from libc.math cimport INFINITY
from libc.stdint cimport uint8_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kvfast._kernels cimport (KV_FLOAT16, KV_ROWS, active, kv_book, kv_codes, kv_kernels)
from kvfast._openmp cimport num_threads_for

cdef enum:
    # Lloyd's steps end when one improves the error by less than 1 / ENOUGH of it, or after so many.
    MOST_STEPS = 25
    ENOUGH = 500
    # Tokens of a task of attention: its table and its last step cost as much as some hundred tokens.
    SPLIT_TOKENS = 2048


ctypedef struct kv_training:
    const kv_kernels *kernels
    const float *points        # (heads, dims, stride)
    Py_ssize_t stride          # of which n are points, the others 0: a multiple of KV_LANES
    Py_ssize_t n
    Py_ssize_t dims
    int subvectors
    int count                  # centroids of a codebook
    const int *bounds          # (heads, subvectors + 1)
    float *centroids           # (heads, dims * count)
    uint8_t *codes             # (heads, n, subvectors), or NULL
    uint64_t seed


ctypedef struct kv_scratch_of_training:
    float *distances           # (stride,)
    float *squares             # (stride,) squared norms
    float *gaps                # (stride,) squared distances to the nearest centroid so far
    double *sums               # (count, dims of the subvector)
    uint8_t *codes             # (stride,)


cdef double _uniform(uint64_t *state) noexcept nogil:
    """The next number of a splitmix64 generator, in [0, 1)."""
    cdef uint64_t x
    state[0] += <uint64_t>0x9E3779B97F4A7C15
    x = state[0]
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    x ^= x >> 31
    return <double>(x >> 11) * (1.0 / 9007199254740992.0)


cdef void _take(const kv_training *call, const float *points, Py_ssize_t t, int dim, float *centroid) noexcept nogil:
    cdef int i
    for i in range(dim):
        centroid[i] = points[i * call.stride + t]


cdef void _find(const kv_training *call, const float *points, const kv_book *book, uint8_t *codes,
                float *distances) noexcept nogil:
    """Nearest centroids, and half squared distances less half squared norms."""
    cdef float half_norms[256]
    cdef float norm
    cdef int c, i
    for c in range(book.count):
        norm = 0
        for i in range(book.dim):
            norm += book.centroids[c * book.dim + i] * book.centroids[c * book.dim + i]
        half_norms[c] = 0.5 * norm
    call.kernels.nearest(points, call.stride, call.stride, book, half_norms, codes, distances)


cdef Py_ssize_t _drawn(const kv_training *call, const kv_scratch_of_training *scratch, double target) noexcept nogil:
    """The point at which the running sum of the gaps passes the target; the distances are sums of 16 gaps."""
    cdef Py_ssize_t t, chosen = 0, block = 0
    while block < call.stride // 16 - 1 and target >= scratch.distances[block]:
        target -= scratch.distances[block]
        block += 1
    for t in range(16 * block, call.n):
        if scratch.gaps[t] > 0:
            chosen = t
            target -= scratch.gaps[t]
            if target < 0:
                break
    return chosen


cdef void _seed(const kv_training *call, const float *points, float *centroids, int dim, kv_scratch_of_training *scratch,
                uint64_t *random) noexcept nogil:
    """k-means++ (Arthur and Vassilvitskii, 2007): each next centroid is a point, drawn by its squared distance."""
    cdef kv_book book
    cdef Py_ssize_t t, chosen = <Py_ssize_t>(_uniform(random) * call.n)
    cdef double total, target
    cdef float gap
    cdef float part
    cdef int c, i
    memset(scratch.squares, 0, call.stride * sizeof(float))
    for i in range(dim):
        for t in range(call.n):
            scratch.squares[t] += points[i * call.stride + t] * points[i * call.stride + t]
    for t in range(call.stride):
        scratch.gaps[t] = INFINITY if t < call.n else 0
    book.count, book.dim = 1, dim
    _take(call, points, chosen, dim, centroids)
    for c in range(1, call.count):
        book.centroids = centroids + (c - 1) * dim
        _find(call, points, &book, scratch.codes, scratch.distances)
        total = 0
        for t in range(call.stride):  # without sums: whole vectors; 0 behind the last point
            gap = 2 * scratch.distances[t] + scratch.squares[t]
            gap = gap if gap > 0 else 0
            scratch.gaps[t] = gap if gap < scratch.gaps[t] else scratch.gaps[t]
        for t in range(0, call.stride, 16):
            part = 0
            for i in range(16):
                part += scratch.gaps[t + i]
            scratch.distances[t // 16] = part
            total += part
        target = _uniform(random) * total
        chosen = c % call.n  # where all points are centroids already
        if total > 0:
            chosen = _drawn(call, scratch, target)
        _take(call, points, chosen, dim, centroids + c * dim)


cdef void _lloyd(const kv_training *call, const float *points, float *centroids, int dim,
                 kv_scratch_of_training *scratch) noexcept nogil:
    """Move each centroid to the mean of the points that are nearest to it, as long as that pays."""
    cdef kv_book book
    cdef Py_ssize_t members[256]
    cdef Py_ssize_t t, far
    cdef double error, before = INFINITY
    cdef int step, c, i
    book.centroids, book.count, book.dim = centroids, call.count, dim
    for step in range(MOST_STEPS):  # no-cython-lint
        _find(call, points, &book, scratch.codes, scratch.distances)
        error = 0
        memset(members, 0, sizeof(members))
        memset(scratch.sums, 0, call.count * dim * sizeof(double))
        for t in range(call.n):
            scratch.distances[t] = max(2 * scratch.distances[t] + scratch.squares[t], <float>0)
            error += scratch.distances[t]
            members[scratch.codes[t]] += 1
        if before - error <= error / ENOUGH:
            return
        before = error
        for i in range(dim):
            for t in range(call.n):
                scratch.sums[scratch.codes[t] * dim + i] += points[i * call.stride + t]
        for c in range(call.count):
            if members[c]:
                for i in range(dim):
                    centroids[c * dim + i] = <float>(scratch.sums[c * dim + i] / members[c])
                continue
            far = 0  # a centroid without points takes the one that is farthest from its own
            for t in range(call.n):
                if scratch.distances[t] > scratch.distances[far]:
                    far = t
            _take(call, points, far, dim, centroids + c * dim)
            scratch.distances[far] = 0


cdef int _train_task(const kv_training *call, Py_ssize_t task) noexcept nogil:
    """The codebook of one subvector, of one head; or its codes. Returns 1 if there is no memory."""
    cdef Py_ssize_t head = task // call.subvectors, j = task % call.subvectors, t
    cdef const int *bounds = call.bounds + head * (call.subvectors + 1)
    cdef int dim = bounds[j + 1] - bounds[j]
    cdef const float *points = call.points + (head * call.dims + bounds[j]) * call.stride
    cdef float *centroids = call.centroids + (head * call.dims + bounds[j]) * call.count
    cdef kv_scratch_of_training scratch
    cdef kv_book book
    cdef uint8_t *target
    cdef uint64_t random = call.seed + <uint64_t>task * <uint64_t>0xD1342543DE82EF95
    cdef char *memory = <char *>malloc(call.stride * 13 + call.count * dim * 8)
    if memory == NULL:
        return 1
    scratch.sums = <double *>memory
    scratch.distances = <float *>(memory + call.count * dim * 8)
    scratch.squares = scratch.distances + call.stride
    scratch.gaps = scratch.squares + call.stride
    scratch.codes = <uint8_t *>(scratch.gaps + call.stride)
    if call.codes == NULL:
        _seed(call, points, centroids, dim, &scratch, &random)
        _lloyd(call, points, centroids, dim, &scratch)
    else:
        book.centroids, book.count, book.dim = centroids, call.count, dim
        _find(call, points, &book, scratch.codes, scratch.distances)
        target = call.codes + head * call.n * call.subvectors + j
        for t in range(call.n):
            target[t * call.subvectors] = scratch.codes[t]
    free(memory)
    return 0


cdef object _run(const float[:, :, ::1] points, Py_ssize_t n, const int[:, ::1] bounds, int count, float[:, ::1] centroids,
                 uint8_t *codes, uint64_t seed, object num_threads):
    cdef kv_training call
    cdef Py_ssize_t task, tasks = points.shape[0] * (bounds.shape[1] - 1)
    cdef int threads, failed = 0
    call.kernels, call.points, call.stride, call.n = active(), &points[0, 0, 0], points.shape[2], n
    call.dims, call.subvectors, call.count = points.shape[1], <int>(bounds.shape[1] - 1), count
    call.bounds, call.centroids, call.codes, call.seed = &bounds[0, 0], &centroids[0, 0], codes, seed
    threads = num_threads_for(num_threads, <double>points.shape[0] * points.shape[1] * n * count)
    with nogil:
        for task in prange(tasks, schedule="dynamic", chunksize=1, num_threads=threads):
            failed |= _train_task(&call, task)
    if failed:
        raise MemoryError("cannot allocate the scratch memory of a codebook")


def train(const float[:, :, ::1] points, Py_ssize_t n, const int[:, ::1] bounds, int count, uint64_t seed,
          num_threads=None):
    """Codebooks of all heads and subvectors: k-means++, then Lloyd's steps.

    Parameters
    ----------
    points : array of shape (heads, dims, stride), float32
        Of which the first `n` of the last axis are vectors and the others 0, to a multiple of 16.
    n : int
    bounds : array of shape (heads, subvectors + 1), int32
    count : int
        Centroids of a codebook, at most 256 and at most n.
    seed : int

    Returns
    -------
    ndarray of shape (heads, dims * count), float32
        The same bits for every number of threads.
    """
    centroids = np.empty((points.shape[0], points.shape[1] * count), np.float32)
    _run(points, n, bounds, count, centroids, NULL, seed, num_threads)
    return centroids


def encode(const float[:, :, ::1] points, Py_ssize_t n, const int[:, ::1] bounds, int count, float[:, ::1] centroids,
           num_threads=None):
    """Index of the nearest centroid for each subvector: uint8 of shape (heads, n, subvectors)."""
    codes = np.empty((points.shape[0], n, bounds.shape[1] - 1), np.uint8)
    cdef uint8_t[:, :, ::1] view = codes
    _run(points, n, bounds, count, centroids, &view[0, 0, 0], 0, num_threads)
    return codes


cdef class Books:
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
    cdef int dims, subvectors, widest

    def __init__(self, centroids, bounds, codes, int count):
        self.centroids, self.bounds, self.codes, self.count = centroids, bounds, codes, count
        self._centroids, self._bounds, self._codes = centroids.view(np.uint16), bounds, codes
        self.dims, self.subvectors = centroids.shape[1] // count, bounds.shape[1] - 1
        self.widest = np.diff(bounds, axis=1).max()

    cdef kv_codes of(self, Py_ssize_t head, Py_ssize_t first) noexcept nogil:
        cdef kv_codes codes
        codes.data = &self._codes[head, first, 0]
        codes.stride, codes.subvectors = self._codes.shape[2], self.subvectors
        codes.count, codes.packed = self.count, self.count <= 16
        return codes

    cdef Py_ssize_t centroid_floats(self) noexcept nogil:
        """Of the widest codebook, in whole cache lines."""
        return (<Py_ssize_t>self.count * self.widest + 15) // 16 * 16

    cdef Py_ssize_t scratch_floats(self) noexcept nogil:
        return self.centroid_floats() + (<Py_ssize_t>self.count * self.subvectors + self.dims) * KV_ROWS


ctypedef struct kv_lookup_call:
    const kv_kernels *kernels
    Py_ssize_t rows            # of a head
    Py_ssize_t n               # tokens
    Py_ssize_t splits
    Py_ssize_t blocks          # of up to KV_ROWS rows
    Py_ssize_t heads
    const float *queries       # (heads, rows, dims of a key)
    const Py_ssize_t *visible  # (rows,) tokens that each row sees
    float *out                 # (splits, heads, rows, dims of a value): sums of weight x value
    float *m                   # (splits, heads, rows) largest score
    float *l                   # (splits, heads, rows) sum of the weights
    float *scratch             # of each thread
    Py_ssize_t scratch_floats


cdef kv_book _book(const kv_kernels *kernels, Books side, Py_ssize_t head, int j, float *centroids) noexcept nogil:
    """Codebook j of a head as floats, in `centroids`."""
    cdef kv_book book
    cdef int first = side._bounds[head, j]
    book.centroids, book.count, book.dim = centroids, side.count, side._bounds[head, j + 1] - first
    kernels.to_float[KV_FLOAT16](&side._centroids[head, <Py_ssize_t>first * side.count], book.count * book.dim, centroids)
    return book


cdef void _lookup_task(const kv_lookup_call *call, Books keys, Books values, Py_ssize_t task, int thread) noexcept nogil:
    """One (split, head, block of rows)."""
    cdef Py_ssize_t row0 = task % call.blocks * KV_ROWS, head = task // call.blocks % call.heads
    cdef Py_ssize_t split = task // call.blocks // call.heads, first = split * SPLIT_TOKENS, t, r, at
    cdef Py_ssize_t n = min(<Py_ssize_t>SPLIT_TOKENS, call.n - first)
    cdef int rows = <int>min(<Py_ssize_t>KV_ROWS, call.rows - row0), width = call.kernels.width, i, j
    cdef int lanes = (rows + width - 1) // width * width
    cdef float *scores = call.scratch + thread * call.scratch_floats
    cdef float *centroids = scores + n * lanes
    cdef float *table
    cdef float *turned
    cdef kv_codes codes
    cdef kv_book book
    cdef float m[16]
    cdef float l[16]
    turned = centroids + keys.centroid_floats()  # (dims, lanes)
    table = turned + keys.dims * lanes
    memset(turned, 0, keys.dims * lanes * sizeof(float))
    for r in range(rows):
        for i in range(keys.dims):
            turned[i * lanes + r] = call.queries[(head * call.rows + row0 + r) * keys.dims + i]
    for j in range(keys.subvectors):
        book = _book(call.kernels, keys, head, j, centroids)
        call.kernels.tabulate(&book, turned + keys._bounds[head, j] * lanes, lanes,
                              table + <Py_ssize_t>j * keys.count * lanes)
    codes = keys.of(head, first)
    call.kernels.lookup(&codes, n, table, lanes, scores)
    for r in range(rows):
        for t in range(max(call.visible[row0 + r] - first, <Py_ssize_t>0), n):
            scores[t * lanes + r] = -INFINITY
    call.kernels.weigh(scores, n, lanes, m, l)

    turned = centroids + values.centroid_floats()
    table = turned + values.dims * lanes
    memset(table, 0, <Py_ssize_t>values.subvectors * values.count * lanes * sizeof(float))
    codes = values.of(head, first)
    call.kernels.scatter(&codes, n, scores, lanes, table)
    for j in range(values.subvectors):
        book = _book(call.kernels, values, head, j, centroids)
        call.kernels.combine(&book, table + <Py_ssize_t>j * values.count * lanes, lanes,
                             turned + values._bounds[head, j] * lanes)
    for r in range(rows):
        at = (split * call.heads + head) * call.rows + row0 + r
        call.m[at], call.l[at] = m[r], l[r]
        for i in range(values.dims):
            call.out[at * values.dims + i] = turned[i * lanes + r]


def attend(const float[:, :, ::1] queries, Books keys, Books values, const Py_ssize_t[::1] visible, num_threads=None):
    """Attention on codes: scores are sums of table entries, and values are weighted once per centroid.

    Parameters
    ----------
    queries : array of shape (heads, rows, dims), float32
        Times the softmax scale.
    keys, values : Books
    visible : array of shape (rows,), intp
        How many of the first tokens each row sees.

    Returns
    -------
    out : ndarray of shape (heads, rows, dims), float32
    lse : ndarray of shape (heads, rows), float32
        -inf, and an output of 0, for a row that sees nothing.
    """
    cdef kv_lookup_call call
    cdef Py_ssize_t task, tasks
    cdef int threads
    call.kernels = active()
    call.heads, call.rows, call.n = queries.shape[0], queries.shape[1], keys._codes.shape[1]
    call.splits = (call.n + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    call.blocks = (call.rows + KV_ROWS - 1) // KV_ROWS
    shape = call.splits, call.heads, call.rows
    parts, tops, sums = np.empty((*shape, values.dims), np.float32), np.empty(shape, np.float32), np.empty(shape, np.float32)
    cdef float[:, :, :, ::1] out_view = parts
    cdef float[:, :, ::1] m_view = tops
    cdef float[:, :, ::1] l_view = sums
    call.queries, call.visible, call.out = &queries[0, 0, 0], &visible[0], &out_view[0, 0, 0, 0]
    call.m, call.l = &m_view[0, 0, 0], &l_view[0, 0, 0]
    tasks = call.splits * call.heads * call.blocks
    threads = num_threads_for(num_threads, 64.0 * tasks * min(<Py_ssize_t>SPLIT_TOKENS, call.n))
    call.scratch_floats = min(call.n, <Py_ssize_t>SPLIT_TOKENS) * KV_ROWS
    call.scratch_floats += max(keys.scratch_floats(), values.scratch_floats())
    memory = np.empty(threads * call.scratch_floats + 16, np.float32)
    call.scratch = <float *>((<Py_ssize_t>memory.ctypes.data + 63) // 64 * 64)
    with nogil:
        for task in prange(tasks, schedule="dynamic", chunksize=1, num_threads=threads):
            _lookup_task(&call, keys, values, task, threadid())
    top = tops.max(0)
    weights = np.exp(tops - np.where(np.isneginf(top), np.float32(0), top))
    total, out = np.zeros(shape[1:], np.float32), np.zeros(parts.shape[1:], np.float32)
    for part, weight, one in zip(parts, weights, sums):  # in order
        total += weight * one
        out += weight[..., None] * part
    out /= np.where(total > 0, total, np.float32(1))[..., None]
    with np.errstate(divide="ignore"):
        return out, top + np.log(total)
