# cython: language_level=3, boundscheck=False, cdivision=True
"""The machine's read bandwidth: what the speed of attention is a fraction of."""
import time

import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport uint32_t

from kvfast._kernels cimport active, kv_kernels
from kvfast._openmp cimport num_threads_for

cdef enum:
    PIECE = 1 << 20

_buffers = {}


def read_bandwidth(nbytes=1 << 28, num_threads=None):
    """Measure how fast this machine reads memory once, with the loads the kernels use.

    Parameters
    ----------
    nbytes : int
        Size of the buffer; several times the last-level cache that this machine gives one process, or
        caches are what is measured.
    num_threads : int, optional

    Returns
    -------
    float
        Bytes per second of this one pass.
    """
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t i, pieces = max(1, nbytes // PIECE)
    cdef uint32_t total = 0
    cdef int threads = num_threads_for(num_threads, <double>pieces * PIECE)
    buffer = _buffers.get(pieces)
    if buffer is None:
        _buffers.clear()
        buffer = _buffers[pieces] = np.ones(pieces * PIECE // 8, np.int64)
    cdef const char *data = <const char *><Py_ssize_t>buffer.ctypes.data
    start = time.perf_counter()
    with nogil:
        for i in prange(pieces, schedule="static", num_threads=threads):
            total += kernels.stream(data + i * PIECE, PIECE)
    return pieces * PIECE / (time.perf_counter() - start)
