/* Preloaded: memory functions that fail when they are called from kvfast's modules, for failing_allocations.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static int armed;
static long calls, failing;

/* From now on: the call after the next `skipped` ones fails, and it alone. */
void failing_malloc_arm(long skipped) { calls = 0, failing = skipped, armed = 1; }

/* Calls from kvfast since then. */
long failing_malloc_disarm(void) { armed = 0; return calls; }

static int fails(const void *caller) {
    Dl_info info;
    if (!armed || !dladdr(caller, &info) || !info.dli_fname || !strstr(info.dli_fname, "/kvfast/")) return 0;
    if (__atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED) != failing) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, size); }
void *aligned_alloc(size_t align, size_t size) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(align, size);
}
