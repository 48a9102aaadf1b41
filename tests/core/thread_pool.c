/* The pool of threads alone, POSIX's or Windows'. Prints what failed, or nothing. Tries calls that follow each other, calls that need
   more threads than the last one, calls within calls, callers that meet, and forks. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include "core/thread_pool.h"

#if defined(_WIN32)
static void pause_for(int milliseconds) { Sleep(milliseconds); }
typedef HANDLE caller;
static DWORD WINAPI call_repeatedly(void *failures);
static caller start(void *failures) { return CreateThread(NULL, 0, call_repeatedly, failures, 0, NULL); }
static void join(caller thread) { WaitForSingleObject(thread, INFINITE); }
#define RESULT DWORD WINAPI
#define NOTHING 0
#else
#include <sys/wait.h>
#include <time.h>
static void pause_for(int milliseconds) { nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000L}, NULL); }
typedef pthread_t caller;
static void *call_repeatedly(void *failures);
static caller start(void *failures)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, call_repeatedly, failures)) abort();
    return thread;
}
static void join(caller thread) { pthread_join(thread, NULL); }
#define RESULT static void *
#define NOTHING NULL
#endif

#define MOST 16 /* shares of a call */
#define CALLS 2000
#define CALLERS 4
#ifndef PATIENCE
#define PATIENCE 20000 /* milliseconds until threads must have met */
#endif

static int failed;
static void check(int is_good, const char *what)
{
    if (!is_good) {
        fprintf(stderr, "failed: %s\n", what);
        __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    }
}

/* Counts how often each share was run. The counters are plain: the pool alone orders the caller after its helpers. */
static void count(void *counts, int share) { ((int *)counts)[share]++; }

static int each_runs_once(int shares)
{
    int counts[MOST + 1] = {0};
    kv_run_shares(shares, count, counts);
    for (int i = 0; i < MOST; i++)
        if (counts[i] != (i < shares)) return 0;
    return 1;
}

struct meeting {
    int wanted, arrived, nested, bad;
};

/* Returns when all shares are under way, which takes as many threads. */
static void meet(void *memory, int share)
{
    struct meeting *meeting = memory;
    __atomic_add_fetch(&meeting->arrived, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < PATIENCE && __atomic_load_n(&meeting->arrived, __ATOMIC_RELAXED) < meeting->wanted; i++) pause_for(1);
    if (__atomic_load_n(&meeting->arrived, __ATOMIC_RELAXED) < meeting->wanted || (meeting->nested && !each_runs_once(1 + share)))
        __atomic_store_n(&meeting->bad, 1, __ATOMIC_RELAXED);
}

static int threads_meet(int shares, int nested)
{
    struct meeting meeting = {.wanted = shares, .nested = nested};
    kv_run_shares(shares, meet, &meeting);
    return meeting.arrived == shares && !meeting.bad;
}

RESULT call_repeatedly(void *failures)
{
    for (int i = 0; i < CALLS; i++) {
        if (!each_runs_once(1 + i % MOST)) __atomic_add_fetch((int *)failures, 1, __ATOMIC_RELAXED);
        if (i % 500 == 0) pause_for(2); /* until helpers sleep */
    }
    return NOTHING;
}

static void check_meetings(const char *where)
{
    for (int shares = 2; shares <= MOST; shares *= 2) check(threads_meet(shares, 0), where);
    pause_for(20);
    for (int shares = MOST; shares > 1; shares--) check(threads_meet(shares, 0), where);
}

int main(void)
{
    int failures = 0;
    check(kv_usable_cpus() >= 1, "a number of CPUs");
    check_meetings("a call has as many threads as shares, also after a pause");
    check(threads_meet(5, 1), "a call within a share runs alone");
    call_repeatedly(&failures);
    check(failures == 0, "calls that follow each other");
    caller callers[CALLERS];
    for (int i = 0; i < CALLERS; i++) callers[i] = start(&failures);
    for (int i = 0; i < CALLERS; i++) join(callers[i]);
    check(failures == 0, "callers that meet");
#if defined(_WIN32)
    (void)kv_forget_threads; /* nothing forks there */
#else
    for (int i = 0; i < 3; i++) {
        const pid_t child = fork();
        if (child == 0) {
            kv_forget_threads();
            check_meetings("the child of a fork has threads");
            _exit(failed);
        }
        int status = -1;
        check_meetings("who forks keeps its threads");
        check(waitpid(child, &status, 0) == child && status == 0, "the child of a fork");
    }
#endif
    return failed; /* while helpers sleep, or look for work */
}
