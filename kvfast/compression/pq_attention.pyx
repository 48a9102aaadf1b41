# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Codes of product quantisation: decodes them, and computes attention on them. `pq_training` has the layout of codebooks."""
import numpy as np

from libc.stdint cimport uint8_t, uint16_t
from libc.string cimport memset

from kvfast.attention.request cimport Request, open_request
from kvfast.attention.run cimport answer
from kvfast.attention.sight cimport kv_member
from kvfast.attention.workspace cimport Workspace
from kvfast.codec.blocks cimport init_rows, kv_layout, kv_slab
from kvfast.core.kernels cimport KV_FLOAT16, active, kv_codes, kv_kernels, kv_prefetch, kv_side


# One side, as tasks of attention decode it.
ctypedef struct kv_pq_side:
    kv_codes codes             # of head 0, from token 0 on
    Py_ssize_t head_bytes      # bytes from the codes of a head to those of the next one
    Py_ssize_t centroids       # numbers in the codebooks of a head


cdef class PQCodes:
    """One side of attention: the codes of all heads (heads, n, stride), uint8, and their codebooks (heads, dims * count), float16.

    A byte holds one code below `count`, or two if `count` is at most 16, the first in the low nibble. `bounds` is
    (heads, subvectors + 1), int32.
    """

    cdef readonly object centroids, bounds, codes
    cdef const uint16_t[:, ::1] _centroids
    cdef const int[:, ::1] _bounds
    cdef const uint8_t[:, :, ::1] _codes
    cdef readonly int count, dim
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
        self.dim = centroids.shape[1] // count

    def decode(self):
        """The vectors that the codes stand for: ndarray of shape (heads, n, dims), float32."""
        rows = np.empty((*self.codes.shape[:2], self.dim), np.float16)
        cdef uint16_t[:, :, ::1] view = rows.view(np.uint16)
        cdef const kv_kernels *kernels = active()
        cdef kv_codes codes
        cdef Py_ssize_t head
        for head in range(view.shape[0]):
            codes = _codes_from(&self.c, head, 0)
            kernels.decode_codes(&codes, view.shape[1], <char *>&view[head, 0, 0], 2 * view.shape[2])
        return rows.astype(np.float32)


cdef Py_ssize_t _NO_OFFSET = 0


cdef kv_codes _codes_from(const kv_pq_side *side, Py_ssize_t head, Py_ssize_t first) noexcept nogil:
    """The codes of a head from token `first` on."""
    cdef kv_codes codes = side.codes
    codes.data += head * side.head_bytes + first * codes.stride
    codes.bounds += head * (codes.subvectors + 1)
    codes.centroids += head * side.centroids
    return codes


cdef void _decode(const kv_kernels *kernels, const void *codes, const kv_side *side, Py_ssize_t head, Py_ssize_t first, int count,
                  uint16_t *rows, kv_prefetch *next) noexcept nogil:
    """Decode a tile of attention, see `kv_decode`."""
    cdef kv_codes of_head = _codes_from(<const kv_pq_side *>codes, head, first)
    kernels.decode_codes(&of_head, count, <char *>rows, side.row_stride)
    memset(next, 0, sizeof(kv_prefetch))
    next.base, next.at = <const char *>of_head.data + count * of_head.stride, &_NO_OFFSET
    next.bytes = next.piece = count * of_head.stride


def attend(q, const Py_ssize_t[::1] visible, PQCodes keys, PQCodes values, double scale, num_threads=None):
    """Attention of queries (num_queries, num_q_heads, dims) on codes: output and log-sum-exp, float32.

    `visible` is the number of first tokens that each query sees: at least one, and at least as many as the query before it.
    """
    cdef kv_layout layout
    cdef kv_slab slab
    cdef kv_member member
    cdef Request request
    memset(&member, 0, sizeof(member))
    init_rows(&layout, &slab, keys._codes.shape[0], KV_FLOAT16, keys.dim, KV_FLOAT16, values.dim)
    layout.decode, layout.k_codes, layout.v_codes = _decode, &keys.c, &values.c
    # Attention prefetches the block that it reads next, where other layouts have one.
    layout.base = <char *>keys.c.codes.data
    slab.k_head_stride = slab.v_head_stride = keys.c.head_bytes
    member.context.length = member.length = keys._codes.shape[1]
    member.num_queries, member.stops, member.is_foreign = visible.shape[0], &visible[0], True
    request = open_request(&layout, q, {"scale": scale, "causal": False, "return_lse": True, "num_threads": num_threads}, "the codes")
    return answer(request, &layout, Workspace(), &member, 1)
