# cython: language_level=3
"""How many threads a call uses, and the loop that they share.

The number comes from ``num_threads=`` of the call, else `set_num_threads`, else ``KVFAST_NUM_THREADS``, else
``OMP_NUM_THREADS``, a limit set through threadpoolctl, or the CPUs that this process may use (affinity and cgroup
quota). Each call asks anew. OpenMP reads ``OMP_NUM_THREADS`` when it is loaded, and so does this module.

The threads are OpenMP's. A build without it has a pool of the system's threads, `thread_pool.h`, which threadpoolctl does not know.
"""
import os

cimport cython

from kvfast.core.checks cimport check_count
from kvfast.core.interrupt cimport check_stopped, is_stopped, kv_watch, watch_of


cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #define KV_HAVE_OPENMP 1
    #define KV_HAVE_POOL 0
    typedef void (*kv_do_share)(void *work, int share);
    static int kv_usable_cpus(void) { return omp_get_max_threads(); }
    static void kv_forget_threads(void) {}
    static void kv_run_shares(int shares, kv_do_share do_share, void *work) {
        #pragma omp parallel for schedule(static, 1) num_threads(shares)
        for (int share = 0; share < shares; share++) do_share(work, share);
    }
    #else
    #include "core/thread_pool.h"
    #define KV_HAVE_OPENMP 0
    #endif

    /* Ends the threads that wait for this thread's next parallel region, which then starts new ones. 0 on success. */
    #if !defined(_OPENMP)
    static int kv_end_team(void) { return 0; } /* the child of a fork begins with a pool without threads */
    #elif defined(__GNUC__) && __GNUC__ >= 9 && !defined(__clang__)
    static int kv_end_team(void) { return omp_pause_resource_all(omp_pause_soft); }
    #else
    static int kv_end_team(void) { return -1; }
    #endif

    /* Whether the OpenMP threads of the thread that forks could not be ended. */
    static _Thread_local int kv_team_stays;
    """
    int KV_HAVE_OPENMP, KV_HAVE_POOL
    int kv_usable_cpus() noexcept nogil     # or OMP_NUM_THREADS, if OpenMP has read it
    void kv_forget_threads() noexcept nogil
    # Runs do_share(work, 0) to do_share(work, shares - 1), each once, on at most `shares` threads.
    void kv_run_shares(int shares, void (*do_share)(void *work, int share) noexcept nogil, void *work) noexcept nogil
    int kv_end_team() noexcept nogil
    int kv_team_stays

cdef extern from *:
    """
    static Py_ssize_t kv_next(Py_ssize_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }
    static void kv_join(int *flags, int more) { __atomic_or_fetch(flags, more, __ATOMIC_RELAXED); }
    """
    Py_ssize_t kv_next(Py_ssize_t *next) noexcept nogil
    void kv_join(int *flags, int more) noexcept nogil

cdef extern from "simd/float_mode.h" nogil:
    unsigned long long kv_begin_floats()
    void kv_end_floats(unsigned long long mode)


cdef struct kv_loop:
    kv_team *team
    kv_do_task do_task
    void *call
    Py_ssize_t num_tasks
    kv_schedule schedule
    Py_ssize_t next            # the next task, if the schedule is DYNAMIC
    int flags


# Bytes to stream that pay for one more thread: its work must take longer than waking it. python -m kvfast bench --work append
# --tokens 16 sets it, and --work decode --contexts 64,256,512,1024 what a byte of attention counts. Threads of the pool take longer to
# wake.
cdef double _WORK_PER_THREAD = 192 * 1024
cdef int _WORK_OF_ATTENTION = 3 if KV_HAVE_OPENMP else 1

cdef int _chosen = 0            # set_num_threads or KVFAST_NUM_THREADS, or 0
cdef int _quota = 0             # CPUs that the cgroup grants, or 0 if there is no quota or OMP_NUM_THREADS is set
cdef int _wished = 0            # OMP_NUM_THREADS if there is no OpenMP that reads it, or 0
cdef bint _pool_started = False
cdef bint _orphaned = False     # forked while OpenMP's threads waited for work: fork did not copy them


cdef int _given(object num_threads) except -1:
    """The number of threads that a caller asks for, or 0 for None."""
    return 0 if num_threads is None else <int>check_count(num_threads, "num_threads", 1, 1024)


def _cgroup_quota():
    """CPUs that the cgroup's CPU quota grants this process, or 0 (Linux, cgroup v2 and v1)."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        try:
            with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") as file:
                quota = file.read().strip()
            with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as file:
                period = file.read().strip()
        except OSError:
            return 0
    try:
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no quota
        return 0
    return min(max(1, round(cpus)), 1024) if cpus > 0 else 0


def set_num_threads(num_threads):
    """Set how many threads kvfast uses, for the whole process.

    Parameters
    ----------
    num_threads : int or None
        At least 1; None goes back to the default.
    """
    global _chosen
    _chosen = _given(num_threads)


def get_num_threads():
    """Number of threads that a large enough call uses by default.

    Returns
    -------
    int
        The number set by `set_num_threads` or ``KVFAST_NUM_THREADS``, else OpenMP's number of threads. A build without OpenMP
        takes the CPUs that this process may use. Unless ``OMP_NUM_THREADS`` is set, this is at most the CPUs that the cgroup grants.
    """
    return _default()


cdef int _default() noexcept nogil:
    cdef int wanted = _chosen  # read once: another thread may set it meanwhile
    if not (KV_HAVE_OPENMP or KV_HAVE_POOL):
        return 1
    if wanted or _wished:
        return wanted or _wished
    return min(kv_usable_cpus(), _quota) if _quota else kv_usable_cpus()


def has_openmp():
    """Whether this build has OpenMP."""
    return bool(KV_HAVE_OPENMP)


def thread_source():
    """Whose threads this build uses: "OpenMP", "kvfast" for a pool of the system's, or "none"."""
    return "OpenMP" if KV_HAVE_OPENMP else "kvfast" if KV_HAVE_POOL else "none"


cdef int gather(kv_team *team, object num_threads, double work) except -1:
    """Set up the team of a call that starts now: at most `num_threads`, fewer if its work (bytes) does not pay for them."""
    gather_unwatched(team, _given(num_threads), work)
    team.watch = watch_of(&team.memory, work)
    return 0


cdef void gather_unwatched(kv_team *team, int num_threads, double work) noexcept nogil:
    """`gather` without the GIL. `num_threads` was checked, or is 0 for the default. Ctrl-C must wait for the end of the call."""
    global _pool_started
    team.threads, team.watch = _count(num_threads, work), NULL
    if team.threads > 1:
        _pool_started = True


cdef double work_of_attention(double nbytes) noexcept nogil:
    """Bytes that take as long to stream as attention to `nbytes`."""
    return nbytes * _WORK_OF_ATTENTION


cdef int for_each(kv_team *team, kv_do_task do_task, void *call, Py_ssize_t num_tasks, kv_schedule schedule) except -1:
    """`run_each` for a caller that holds the GIL. Releases it meanwhile, and raises what a signal handler raised."""
    cdef int flags
    with nogil:
        flags = run_each(team, do_task, call, num_tasks, schedule)
    check_stopped(team.watch)
    return flags


cdef int run_each(kv_team *team, kv_do_task do_task, void *call, Py_ssize_t num_tasks, kv_schedule schedule) noexcept nogil:
    """Run all tasks, in any order if there are several threads. Skips the rest once a signal handler has raised."""
    cdef kv_loop loop
    loop.team, loop.do_task, loop.call, loop.num_tasks, loop.schedule = team, do_task, call, num_tasks, schedule
    loop.next = loop.flags = 0
    if team.threads == 1:  # without waking anybody
        _do_share(&loop, 0)
    else:
        kv_run_shares(team.threads, _do_share, &loop)
    return loop.flags


@cython.cdivision(True)
cdef void _do_share(void *memory, int thread) noexcept nogil:
    """The tasks of one thread."""
    cdef kv_loop *loop = <kv_loop *>memory
    cdef kv_watch *watch = loop.team.watch
    cdef Py_ssize_t i, threads = loop.team.threads
    cdef int flags = 0
    cdef unsigned long long mode = kv_begin_floats()
    if loop.schedule == DYNAMIC:
        i = kv_next(&loop.next)
        while i < loop.num_tasks:
            if not is_stopped(watch, 16):
                flags |= loop.do_task(loop.call, i, thread, watch)
            i = kv_next(&loop.next)
    else:
        for i in range(loop.num_tasks * thread // threads, loop.num_tasks * (thread + 1) // threads):
            if not is_stopped(watch, 1):
                flags |= loop.do_task(loop.call, i, thread, watch)
    kv_end_floats(mode)
    kv_join(&loop.flags, flags)


def lost_threads(num_threads, double work):
    """Threads that a call would use if this build had threads and the process had not been forked; 1 if neither costs any."""
    if (KV_HAVE_OPENMP or KV_HAVE_POOL) and not _orphaned or num_threads is None and work < 2 * _WORK_PER_THREAD:
        return 1
    wanted = num_threads or (get_num_threads() if KV_HAVE_OPENMP else _chosen or _quota or os.cpu_count() or 1)
    return max(1, min(wanted, int(work / _WORK_PER_THREAD)))


cdef int most_threads(int num_threads) noexcept nogil:
    """Number of threads that `gather` will choose at most. `num_threads` was checked, or is 0 for the default."""
    return _count(num_threads, 1e300)


cdef int _count(int num_threads, double work) noexcept nogil:
    if num_threads == 0:
        if work < 2 * _WORK_PER_THREAD:
            return 1
        num_threads = _default()
    if _orphaned or not (KV_HAVE_OPENMP or KV_HAVE_POOL):
        return 1
    return max(1, min(num_threads, <int>min(work / _WORK_PER_THREAD, 1024.0)))


def _before_fork():
    # Fork does not copy OpenMP's threads, and the child's next parallel region would wait for them. So end them first: parent
    # and child start new ones when they need them, which takes a moment.
    global kv_team_stays
    kv_team_stays = _pool_started and kv_end_team() != 0


def _after_fork_in_child():
    global _orphaned, _pool_started
    _orphaned = _orphaned or kv_team_stays
    _pool_started = _orphaned
    kv_forget_threads()


def _wish(str text):
    """The number that OMP_NUM_THREADS begins with, as OpenMP reads it, or 0."""
    number = text.partition(",")[0].strip()
    return min(int(number), 1024) if number.isdecimal() else 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
if "OMP_NUM_THREADS" not in os.environ:
    _quota = _cgroup_quota()
elif not KV_HAVE_OPENMP:
    _wished = _wish(os.environ["OMP_NUM_THREADS"])
if os.environ.get("KVFAST_NUM_THREADS"):
    try:
        _chosen = check_count(int(os.environ["KVFAST_NUM_THREADS"]), "KVFAST_NUM_THREADS", 1, 1024)
    except ValueError as error:
        raise ValueError(f"KVFAST_NUM_THREADS={os.environ['KVFAST_NUM_THREADS']!r}: {error}") from None
