# cython: language_level=3, boundscheck=False, cdivision=True
"""Measures the memory bandwidth and peak arithmetic of this machine, which limit the speed of attention."""
import time

import numpy as np

from kvfast.core.checks cimport check_count
from kvfast.core.interrupt cimport kv_watch
from kvfast.core.kernels cimport active, kv_kernels
from kvfast.core.threads cimport STATIC, for_each, gather, kv_team

from kvfast.core.checks import check_choice

cdef enum:
    BYTES_AT_ONCE = 1 << 20

cdef double SECONDS = 8e-3  # several time slices of the operating system's scheduler

_KINDS = ("int8", "float32")
_buffer = np.empty(0, np.int64)


ctypedef struct kv_measurement:
    const kv_kernels *kernels
    const char *data
    int kind                   # index in _KINDS
    Py_ssize_t steps
    double operations          # of one thread


cdef int _read_megabyte(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    cdef const kv_measurement *call = <const kv_measurement *>shared
    call.kernels.read_bytes(call.data + index * BYTES_AT_ONCE, BYTES_AT_ONCE)
    return 0


cdef int _multiply(void *shared, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil:
    cdef kv_measurement *call = <kv_measurement *>shared
    cdef float sink = 0
    cdef double operations = call.kernels.multiply[call.kind](call.steps, &sink)
    if index == 0:  # all threads do the same number
        call.operations = operations
    return 0


def read_bandwidth(nbytes=1 << 28, num_threads=None):
    """Measure how many bytes per second this machine reads, in one pass with the loads that the kernels use.

    Parameters
    ----------
    nbytes : int
        How much to read. Use several times the size of the last-level cache; otherwise you measure the cache.
    num_threads : int, optional
    """
    global _buffer
    cdef Py_ssize_t megabytes = max(1, check_count(nbytes, "nbytes", 0) // BYTES_AT_ONCE)
    cdef kv_measurement call
    cdef kv_team team
    gather(&team, num_threads, <double>megabytes * BYTES_AT_ONCE)
    buffer = _buffer  # keep a reference: another thread may replace it meanwhile
    if buffer.nbytes < megabytes * BYTES_AT_ONCE:
        buffer = _buffer = np.ones(megabytes * BYTES_AT_ONCE // 8, np.int64)
    call.kernels, call.data = active(), <const char *><Py_ssize_t>buffer.ctypes.data
    start = time.perf_counter()
    for_each(&team, _read_megabyte, &call, megabytes, STATIC)
    return megabytes * BYTES_AT_ONCE / (time.perf_counter() - start)


def peak_rate(kind="int8", num_threads=None):
    """Measure how many multiplications and additions per second this machine does in registers, in about 10 milliseconds.

    Parameters
    ----------
    kind : {"int8", "float32"}
        ``"int8"`` measures the instructions that the tier in use multiplies codes with.
    num_threads : int, optional

    Notes
    -----
    Kernels multiply codes by 16-bit numbers. Tiers with AVX-512 VNNI, AMX or NEON's dot products cut these into two parts of
    8 bits. There attention, which counts each product once, reaches at most half of this rate. The other tiers multiply
    16-bit numbers, and that is what this function measures there.
    """
    check_choice(kind, "kind", _KINDS, '"int8" or "float32"')
    cdef double seconds, factor
    cdef kv_measurement call
    cdef kv_team team
    gather(&team, num_threads, 1e12)
    team.watch = NULL  # the call is short, and asking for signals would be part of the measurement
    call.kernels, call.kind, call.steps = active(), _KINDS.index(kind), 1 << 12
    while True:
        start = time.perf_counter()
        for_each(&team, _multiply, &call, team.threads, STATIC)
        seconds = time.perf_counter() - start
        if seconds >= SECONDS:
            return team.threads * call.operations / seconds
        factor = min(max(1.2 * SECONDS / seconds, 2.0), 16.0)
        call.steps = <Py_ssize_t>(call.steps * factor)
