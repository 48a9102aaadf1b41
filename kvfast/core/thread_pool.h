/* The threads of builds without OpenMP: a pool of the system's own, POSIX's or Windows'. Knows neither Python nor tasks.

   A call has shares 0 to n - 1, which threads take one by one, so its result never depends on how many threads come, or when:
   the caller takes what no helper has taken, and waits only for shares that somebody has begun. If the system refuses threads,
   the caller does all by itself.

   The pool serves one call at a time. A second one meanwhile, of another thread or from within a share, does not wait for the
   first: its thread does all its shares. They are the same shares, so its result has the same bits. */
#ifndef KV_THREAD_POOL_H
#define KV_THREAD_POOL_H

#include <stddef.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#define KV_HAVE_POOL 1
#elif defined(__has_include)
#if __has_include(<pthread.h>)
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#define KV_HAVE_POOL 1
#endif
#endif

typedef void (*kv_do_share)(void *work, int share);

#ifndef KV_HAVE_POOL
#define KV_HAVE_POOL 0
static int kv_usable_cpus(void) { return 1; }
static void kv_forget_threads(void) {}
static void kv_run_shares(int shares, kv_do_share do_share, void *work)
{
    for (int share = 0; share < shares; share++) do_share(work, share);
}
#else

enum {
    KV_STACK = 256 << 10, /* bytes of a helper's: a task takes 24 KiB, the rest is for sanitizers and the system */
    KV_ROUNDS = 3000,     /* that a thread waits awake, some tens of microseconds: calls that follow each other find it so */
};

/* --- what the system calls it --- */

#if defined(_WIN32)
typedef SRWLOCK kv_mutex;
typedef CONDITION_VARIABLE kv_event;
#define KV_MUTEX SRWLOCK_INIT
#define KV_EVENT CONDITION_VARIABLE_INIT
#define kv_lock AcquireSRWLockExclusive
#define kv_unlock ReleaseSRWLockExclusive
#define kv_wake_one WakeConditionVariable
static void kv_sleep(kv_event *event, kv_mutex *mutex) { SleepConditionVariableSRW(event, mutex, INFINITE, 0); }

/* CPUs that this process may use now. */
static int kv_usable_cpus(void)
{
    DWORD_PTR own, all;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &own, &all) || own == 0) return 1; /* 0: of several groups */
    return __builtin_popcountll(own);
}

static void kv_help(void);
static DWORD WINAPI kv_begin_helper(void *nothing)
{
    (void)nothing;
    kv_help();
    return 0;
}

static int kv_start_helper(void)
{
    HANDLE thread = CreateThread(NULL, KV_STACK, kv_begin_helper, NULL, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    return thread != NULL && CloseHandle(thread);
}
#else
typedef pthread_mutex_t kv_mutex;
typedef pthread_cond_t kv_event;
#define KV_MUTEX PTHREAD_MUTEX_INITIALIZER
#define KV_EVENT PTHREAD_COND_INITIALIZER
#define kv_lock pthread_mutex_lock
#define kv_unlock pthread_mutex_unlock
#define kv_wake_one pthread_cond_signal
#define kv_sleep pthread_cond_wait

/* CPUs that this process may use now. */
static int kv_usable_cpus(void)
{
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online < 1 ? 1 : online > 1024 ? 1024
                                          : (int)online;
}

static void kv_help(void);
static void *kv_begin_helper(void *nothing)
{
    kv_help();
    return nothing;
}

/* Signals are for Python's threads. Those of a helper's own faults must reach it, or nobody tells where they came from. */
static int kv_start_helper(void)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    if (pthread_attr_init(&attributes)) return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, KV_STACK);
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&thread, &attributes, kv_begin_helper, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return !failed;
}
#endif

/* --- the pool --- */

/* Helpers are detached, and sleep until the process ends. */
static struct kv_pool {
    int is_owned;  /* by a call, whose thread alone writes what follows up to `open` */
    int helpers;
    kv_do_share do_share;
    void *work;
    int open;      /* shares that nobody has taken: open, open - 1, ... 1. The caller has begun with share 0 */
    int left;      /* shares that are not done */
    int sleepers;  /* helpers that sleep, or are about to */
    int is_waiting; /* the owner sleeps, or is about to */
    kv_mutex mutex; /* for sleeping alone */
    kv_event begun, done;
} kv_pool = {.mutex = KV_MUTEX, .begun = KV_EVENT, .done = KV_EVENT};

static inline int kv_read(const int *number) { return __atomic_load_n(number, __ATOMIC_SEQ_CST); }

static inline void kv_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* takes about as long; "yield" takes no time on most */
#endif
}

/* Take a share of the call that is under way and return it, or 0 if none is open. */
static int kv_take_share(void)
{
    int open = kv_read(&kv_pool.open);
    while (open > 0 && !__atomic_compare_exchange_n(&kv_pool.open, &open, open - 1, 1, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return open;
}

/* The call's description stays until all shares that were taken are done, so whoever took one may read it. */
static void kv_finish(int share)
{
    kv_pool.do_share(kv_pool.work, share);
    if (__atomic_sub_fetch(&kv_pool.left, 1, __ATOMIC_SEQ_CST) == 0 && kv_read(&kv_pool.is_waiting)) {
        kv_lock(&kv_pool.mutex);
        kv_wake_one(&kv_pool.done);
        kv_unlock(&kv_pool.mutex);
    }
}

/* What a helper does from its beginning to the end of the process. Who goes to sleep says so before it looks a last time; who
   wakes looks for sleepers after it has changed what they look at. So one of the two sees the other. A helper that came too late,
   as its caller was faster, stays awake for the next call, too. */
static void kv_help(void)
{
    for (;;) {
        int share = 0;
        for (int round = 0; round < KV_ROUNDS && !(share = kv_take_share()); round++) kv_pause();
        if (!share) {
            kv_lock(&kv_pool.mutex);
            __atomic_add_fetch(&kv_pool.sleepers, 1, __ATOMIC_SEQ_CST);
            if (!(share = kv_take_share())) kv_sleep(&kv_pool.begun, &kv_pool.mutex);
            __atomic_sub_fetch(&kv_pool.sleepers, 1, __ATOMIC_SEQ_CST);
            kv_unlock(&kv_pool.mutex);
        }
        if (share) kv_finish(share);
    }
}

/* Wake the helpers that a call with this number of shares lacks: those who are awake come by themselves. */
static void kv_wake_helpers(int shares)
{
    const int sleepers = kv_read(&kv_pool.sleepers), lacking = shares - 1 - (kv_pool.helpers - sleepers);
    if (sleepers == 0 || lacking <= 0) return;
    kv_lock(&kv_pool.mutex); /* none of them is between its last look and its sleep */
    kv_unlock(&kv_pool.mutex);
    for (int i = 0; i < lacking; i++) kv_wake_one(&kv_pool.begun);
}

static void kv_wait_for_helpers(void)
{
    for (int round = 0; round < KV_ROUNDS && kv_read(&kv_pool.left); round++) kv_pause();
    if (kv_read(&kv_pool.left) == 0) return;
    kv_lock(&kv_pool.mutex);
    __atomic_store_n(&kv_pool.is_waiting, 1, __ATOMIC_SEQ_CST);
    while (kv_read(&kv_pool.left)) kv_sleep(&kv_pool.done, &kv_pool.mutex);
    __atomic_store_n(&kv_pool.is_waiting, 0, __ATOMIC_SEQ_CST);
    kv_unlock(&kv_pool.mutex);
}

/* Run do_share(work, 0) to do_share(work, shares - 1), each once, on up to `shares` threads. Returns when all are done. */
static void kv_run_shares(int shares, kv_do_share do_share, void *work)
{
    if (shares == 1 || __atomic_exchange_n(&kv_pool.is_owned, 1, __ATOMIC_ACQUIRE)) {
        for (int share = 0; share < shares; share++) do_share(work, share);
        return;
    }
    while (kv_pool.helpers < shares - 1 && kv_start_helper()) kv_pool.helpers++;
    kv_pool.do_share = do_share;
    kv_pool.work = work;
    __atomic_store_n(&kv_pool.left, shares, __ATOMIC_SEQ_CST);
    __atomic_store_n(&kv_pool.open, shares - 1, __ATOMIC_SEQ_CST);
    kv_wake_helpers(shares);
    for (int share = 0;;) {
        kv_finish(share);
        if (!(share = kv_take_share())) break;
    }
    kv_wait_for_helpers();
    __atomic_store_n(&kv_pool.is_owned, 0, __ATOMIC_RELEASE);
}

/* In the child of a fork, where no other thread is: its pool begins anew. */
static void kv_forget_threads(void) { kv_pool = (struct kv_pool){.mutex = KV_MUTEX, .begun = KV_EVENT, .done = KV_EVENT}; }

#endif
#endif
