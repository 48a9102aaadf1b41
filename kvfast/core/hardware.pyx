# cython: language_level=3, boundscheck=False, cdivision=True
"""What this machine can do: what the speed of attention is a fraction of."""
import time

import numpy as np

from cython.parallel cimport prange
from libc.stdint cimport uint32_t

from kvfast.core.kernels cimport active, kv_kernels
from kvfast.core.threads cimport num_threads_for

cdef enum:
    BYTES_AT_ONCE = 1 << 20

cdef double SECONDS = 8e-3  # some of the turns that processes take on a processor

_KINDS = ("int8", "float32")
_buffer = np.empty(0, np.int64)


def read_bandwidth(nbytes=1 << 28, num_threads=None):
    """Measure how fast this machine reads memory once, with the loads the kernels use.

    Parameters
    ----------
    nbytes : int
        How much to read; several times the last-level cache that this machine gives one process, or
        caches are what is measured.
    num_threads : int, optional

    Returns
    -------
    float
        Bytes per second of this one pass.
    """
    global _buffer
    cdef const kv_kernels *kernels = active()
    cdef Py_ssize_t i, pieces = max(1, nbytes // BYTES_AT_ONCE)
    cdef uint32_t total = 0
    cdef int threads = num_threads_for(num_threads, <double>pieces * BYTES_AT_ONCE)
    buffer = _buffer  # held: another thread may put a larger one there meanwhile
    if buffer.nbytes < pieces * BYTES_AT_ONCE:
        buffer = _buffer = np.ones(pieces * BYTES_AT_ONCE // 8, np.int64)
    cdef const char *data = <const char *><Py_ssize_t>buffer.ctypes.data
    start = time.perf_counter()
    with nogil:
        for i in prange(pieces, schedule="static", num_threads=threads):
            total += kernels.read_bytes(data + i * BYTES_AT_ONCE, BYTES_AT_ONCE)
    return pieces * BYTES_AT_ONCE / (time.perf_counter() - start)


def peak_rate(kind="int8", num_threads=None):
    """Measure how fast this machine multiplies and adds numbers in registers, with the instructions the kernels use.

    Parameters
    ----------
    kind : {"int8", "float32"}
        ``"int8"``: what the tier in use multiplies codes with; see Notes.
    num_threads : int, optional

    Returns
    -------
    float
        Multiplications and additions per second of this one pass, which takes about 10 milliseconds.

    Notes
    -----
    Kernels multiply codes by 16-bit numbers. Tiers with AVX-512 VNNI, AMX or NEON's dot products cut those into two parts of
    8 bits, so that attention, of which a product counts once, gets to half of this rate at most; the others multiply 16 bits,
    and that is what is measured there.
    """
    if kind not in _KINDS:
        raise ValueError(f'kind must be "int8" or "float32", got {kind!r}')
    cdef const kv_kernels *kernels = active()
    cdef int which = _KINDS.index(kind), i, threads = num_threads_for(num_threads, 1e12)
    cdef Py_ssize_t steps = 1 << 12
    cdef double operations, seconds, factor
    cdef float sink
    while True:
        operations = 0
        start = time.perf_counter()
        with nogil:
            for i in prange(threads, schedule="static", num_threads=threads):  # no-cython-lint
                sink = 0
                operations += kernels.multiply[which](steps, &sink)
        seconds = time.perf_counter() - start
        if seconds >= SECONDS:
            return operations / seconds
        factor = min(max(1.2 * SECONDS / seconds, 2.0), 16.0)
        steps = <Py_ssize_t>(steps * factor)
