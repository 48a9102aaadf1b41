# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Product quantisation: trains codebooks, and encodes vectors with them (Jegou et al., Product quantization for nearest
neighbor search, 2011).

The vectors of a head are cut into subvectors, each with a codebook of its own. Subvector j of a head starts at element
`bounds[head, j]` of a vector; its centroids, (count, dims), start at element ``bounds[head, j] * count`` of the head's centroids.
"""
import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from kvfast.core.interrupt cimport is_stopped, kv_watch
from kvfast.core.kernels cimport active, kv_kernels, kv_pq_codebook
from kvfast.core.limits cimport KV_MAX_CENTROIDS
from kvfast.core.threads cimport DYNAMIC, for_each, gather, kv_team

cdef enum:
    # Lloyd's steps end when a step lowers the error by less than 1 / ENOUGH of it, or after MOST_STEPS.
    MOST_STEPS = 25
    ENOUGH = 500


ctypedef struct kv_training:
    const kv_kernels *kernels
    const float *points        # (heads, dims, stride)
    Py_ssize_t stride          # a multiple of KV_LANES: n points, then zeros
    Py_ssize_t n
    Py_ssize_t dims
    int subvectors
    int count                  # centroids of a codebook
    const int *bounds          # (heads, subvectors + 1)
    float *centroids           # (heads, dims * count)
    uint8_t *codes             # (heads, n, subvectors), or NULL
    uint64_t seed
    kv_watch *watch            # or NULL


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


cdef void _find(const kv_training *call, const float *points, const kv_pq_codebook *codebook, uint8_t *codes,
                float *distances) noexcept nogil:
    """Find the nearest centroids, and half the squared distances minus half the squared norms."""
    cdef float half_norms[KV_MAX_CENTROIDS]
    cdef float norm
    cdef int c, i
    for c in range(codebook.count):
        norm = 0
        for i in range(codebook.dim):
            norm += codebook.centroids[c * codebook.dim + i] * codebook.centroids[c * codebook.dim + i]
        half_norms[c] = 0.5 * norm
    call.kernels.nearest(points, call.stride, call.stride, codebook, half_norms, codes, distances)


cdef Py_ssize_t _drawn(const kv_training *call, const kv_scratch_of_training *scratch, double target) noexcept nogil:
    """The point at which the running sum of the gaps passes the target. Each distance is the sum of 16 gaps."""
    cdef Py_ssize_t t, drawn = 0, block = 0
    while block < call.stride // 16 - 1 and target >= scratch.distances[block]:
        target -= scratch.distances[block]
        block += 1
    for t in range(16 * block, call.n):
        if scratch.gaps[t] > 0:
            drawn = t
            target -= scratch.gaps[t]
            if target < 0:
                break
    return drawn


cdef void _seed(const kv_training *call, const float *points, float *centroids, int dim, kv_scratch_of_training *scratch,
                uint64_t *random) noexcept nogil:
    """k-means++ (Arthur and Vassilvitskii, 2007): each next centroid is a point, drawn in proportion to its squared distance."""
    cdef kv_pq_codebook codebook
    cdef Py_ssize_t t, drawn = <Py_ssize_t>(_uniform(random) * call.n)
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
    codebook.count, codebook.dim = 1, dim
    _take(call, points, drawn, dim, centroids)
    for c in range(1, call.count):
        if is_stopped(call.watch, 16):
            return
        codebook.centroids = centroids + (c - 1) * dim
        _find(call, points, &codebook, scratch.codes, scratch.distances)
        total = 0
        for t in range(call.stride):  # sums nothing, so that it vectorises; 0 after the last point
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
        drawn = c % call.n  # if all points are centroids already
        if total > 0:
            drawn = _drawn(call, scratch, target)
        _take(call, points, drawn, dim, centroids + c * dim)


cdef void _lloyd(const kv_training *call, const float *points, float *centroids, int dim,
                 kv_scratch_of_training *scratch) noexcept nogil:
    """Move each centroid to the mean of the points nearest to it, until the error hardly falls."""
    cdef kv_pq_codebook codebook
    cdef Py_ssize_t members[KV_MAX_CENTROIDS]
    cdef Py_ssize_t t, far
    cdef double error, before = INFINITY
    cdef int step, c, i
    codebook.centroids, codebook.count, codebook.dim = centroids, call.count, dim
    for step in range(MOST_STEPS):  # no-cython-lint
        if is_stopped(call.watch, 16):
            return
        _find(call, points, &codebook, scratch.codes, scratch.distances)
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
            far = 0  # a centroid without points moves to the point farthest from its own centroid
            for t in range(call.n):
                if scratch.distances[t] > scratch.distances[far]:
                    far = t
            _take(call, points, far, dim, centroids + c * dim)
            scratch.distances[far] = 0


cdef int _train_subvector(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    """Train the codebook of one subvector of one head, or find its codes. Returns 1 if out of memory."""
    cdef const kv_training *call = <const kv_training *>shared
    cdef Py_ssize_t head = index // call.subvectors, j = index % call.subvectors, t
    cdef const int *bounds = call.bounds + head * (call.subvectors + 1)
    cdef int dim = bounds[j + 1] - bounds[j]
    cdef const float *points = call.points + (head * call.dims + bounds[j]) * call.stride
    cdef float *centroids = call.centroids + (head * call.dims + bounds[j]) * call.count
    cdef kv_scratch_of_training scratch
    cdef kv_pq_codebook codebook
    cdef uint8_t *target
    cdef uint64_t random = call.seed + <uint64_t>index * <uint64_t>0xD1342543DE82EF95
    cdef char *memory
    memory = <char *>malloc(call.stride * 13 + call.count * dim * 8)
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
        codebook.centroids, codebook.count, codebook.dim = centroids, call.count, dim
        _find(call, points, &codebook, scratch.codes, scratch.distances)
        target = call.codes + head * call.n * call.subvectors + j
        for t in range(call.n):
            target[t * call.subvectors] = scratch.codes[t]
    free(memory)
    return 0


cdef object _run(const float[:, :, ::1] points, Py_ssize_t n, const int[:, ::1] bounds, int count, float[:, ::1] centroids,
                 uint8_t *codes, uint64_t seed, object num_threads):
    cdef kv_training call
    cdef kv_team team
    call.kernels, call.points, call.stride, call.n = active(), &points[0, 0, 0], points.shape[2], n
    call.dims, call.subvectors, call.count = points.shape[1], <int>(bounds.shape[1] - 1), count
    call.bounds, call.centroids, call.codes, call.seed = &bounds[0, 0], &centroids[0, 0], codes, seed
    gather(&team, num_threads, <double>points.shape[0] * points.shape[1] * n * count)
    call.watch = team.watch
    if for_each(&team, _train_subvector, &call, points.shape[0] * call.subvectors, DYNAMIC):
        raise MemoryError("cannot allocate the working memory of a codebook")


def train(const float[:, :, ::1] points, Py_ssize_t n, const int[:, ::1] bounds, int count, uint64_t seed,
          num_threads=None):
    """Train the codebooks of all heads and subvectors, `count` centroids each: k-means++, then Lloyd's steps.

    `points` is (heads, dims, stride). The first `n` of the last axis are vectors. The others are 0, up to a multiple of 16.
    Returns (heads, dims * count), float32, the same bits for every number of threads.
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
