"""Ctrl-C in the middle of a long call.

A long call has a `kv_watch`. The loop of core/threads asks `is_stopped` before each task, and long tasks ask in
between. Ten times a second the thread that made the call then lets Python's signal handlers run. If one of them raises, all
threads skip the rest of the work, and `check_stopped` passes the exception on. The watch is NULL for short calls, and for those
of `capi` that run without the interpreter.
"""
from libc.stdint cimport int64_t

from kvfast.core.system cimport kv_nanoseconds


cdef extern from *:
    """
    typedef struct {
        unsigned long thread;  /* the thread that made the call; only it asks Python */
        int64_t next;          /* time in nanoseconds at which it asks again */
        int weight;            /* of its work since it last read the clock */
        int is_stopped;        /* read by all threads; if set, that thread has an exception */
    } kv_watch;

    static inline void kv_ask(kv_watch *watch) {
        watch->weight = 0;
        if (kv_nanoseconds() >= watch->next) {
            PyGILState_STATE state = PyGILState_Ensure();
            if (!watch->is_stopped && PyErr_CheckSignals() < 0)
                __atomic_store_n(&watch->is_stopped, 1, __ATOMIC_RELAXED);
            PyGILState_Release(state);
            watch->next = kv_nanoseconds() + 100000000;
        }
    }

    static inline int kv_is_stopped(kv_watch *watch, int weight) {
        if (watch->thread == PyThread_get_thread_ident() && (watch->weight += weight) >= 16)
            kv_ask(watch);
        return __atomic_load_n(&watch->is_stopped, __ATOMIC_RELAXED);
    }
    """
    ctypedef struct kv_watch:
        unsigned long thread
        int64_t next
        int weight
        int is_stopped

    int kv_is_stopped(kv_watch *watch, int weight) noexcept nogil
    unsigned long PyThread_get_thread_ident() noexcept nogil


cdef enum:
    LEAST_WORK = 32 << 20      # bytes streamed, or as much work: less takes milliseconds even on the scalar tier


cdef inline kv_watch *watch_of(kv_watch *memory, double work) noexcept nogil:
    """The watch of a call that starts now, in `memory`; NULL if the work is too short for one."""
    if work < LEAST_WORK:
        return NULL
    memory.thread, memory.weight, memory.is_stopped = PyThread_get_thread_ident(), 0, 0
    memory.next = kv_nanoseconds() + 20000000
    return memory


cdef inline bint is_stopped(kv_watch *watch, int weight=1) noexcept nogil:
    """Whether to skip the rest of the work. Ask before each part of it that takes 100 nanoseconds or more. With a weight of
    16, for parts of microseconds or more, each call reads the clock."""
    return watch != NULL and kv_is_stopped(watch, weight)


cdef inline int check_stopped(const kv_watch *watch) except -1:
    """Pass on an exception that a signal handler raised."""
    return -1 if watch != NULL and watch.is_stopped else 0
