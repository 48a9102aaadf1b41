"""How many threads a call uses, and the loop that they share. Only this module uses OpenMP, or the pool of a build without it."""
from kvfast.core.interrupt cimport kv_watch

# One task of a call. All tasks share `call`; threads are numbered from 0. The flags that tasks return are joined by "or".
ctypedef int (*kv_do_task)(void *call, Py_ssize_t index, int thread, kv_watch *watch) noexcept nogil

cdef enum kv_schedule:
    STATIC                     # equal tasks of 100 nanoseconds or more: each thread takes a fixed share of them
    DYNAMIC                    # tasks of microseconds or more: a thread takes the next one when it is free

cdef struct kv_team:
    int threads
    kv_watch *watch            # NULL: the call is short, or Ctrl-C must wait for its end
    kv_watch memory

cdef int gather(kv_team *team, object num_threads, double work) except -1
cdef void gather_unwatched(kv_team *team, int num_threads, double work) noexcept nogil
cdef int for_each(kv_team *team, kv_do_task do_task, void *call, Py_ssize_t num_tasks, kv_schedule schedule) except -1
cdef int run_each(kv_team *team, kv_do_task do_task, void *call, Py_ssize_t num_tasks, kv_schedule schedule) noexcept nogil
cdef double work_of_attention(double nbytes) noexcept nogil
cdef int most_threads(int num_threads) noexcept nogil
