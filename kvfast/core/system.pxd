"""What operating systems have under other names: memory that begins a cache line, a clock, and a pause of a thread."""
from libc.stdint cimport int64_t


cdef extern from *:
    """
    #ifndef KV_SYSTEM
    #define KV_SYSTEM
    #include <stdint.h>
    #include <stdlib.h>
    #if defined(_WIN32)
    #include <malloc.h>
    /* Not <windows.h>, which gives common words another meaning. */
    __declspec(dllimport) unsigned long long __stdcall GetTickCount64(void);
    __declspec(dllimport) int __stdcall SwitchToThread(void);
    __attribute__((unused)) static inline void *kv_take_lines(size_t bytes) { return _aligned_malloc((bytes + 63) / 64 * 64, 64); }
    __attribute__((unused)) static inline void kv_free_lines(void *lines) { _aligned_free(lines); }
    /* In steps of about 16 milliseconds. */
    __attribute__((unused)) static inline int64_t kv_nanoseconds(void) { return (int64_t)GetTickCount64() * 1000000; }
    __attribute__((unused)) static inline void kv_yield(void) { (void)SwitchToThread(); }
    #else
    #include <sched.h>
    #include <time.h>
    __attribute__((unused)) static inline void *kv_take_lines(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }
    __attribute__((unused)) static inline void kv_free_lines(void *lines) { free(lines); }
    __attribute__((unused)) static inline int64_t kv_nanoseconds(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    __attribute__((unused)) static inline void kv_yield(void) { (void)sched_yield(); }
    #endif
    #endif
    """
    void *kv_take_lines(size_t nbytes) noexcept nogil  # not zeroed
    void kv_free_lines(void *lines) noexcept nogil     # or NULL; no other memory
    int64_t kv_nanoseconds() noexcept nogil
    void kv_yield() noexcept nogil
