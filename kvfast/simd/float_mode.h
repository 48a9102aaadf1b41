/* How a thread rounds, and whether it takes denormals for zero. A program may have changed that, also for threads that begin
   later (torch.set_flush_denormal). Kernels run in the mode that the language promises, so that their bits depend on neither. */
#ifndef KVFAST_FLOAT_MODE_H
#define KVFAST_FLOAT_MODE_H

#include <stdint.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
enum { KV_DEFAULT_FLOATS = 0x1F80, KV_FLOAT_FLAGS = 0x3F }; /* of MXCSR: flags tell what has happened, and set no mode */
static inline uint64_t kv_float_mode(void) { return _mm_getcsr() & ~(unsigned)KV_FLOAT_FLAGS; }
static inline void kv_set_float_mode(uint64_t mode) { _mm_setcsr((unsigned)mode); }
#elif defined(__aarch64__)
enum { KV_DEFAULT_FLOATS = 0 };
static inline uint64_t kv_float_mode(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void kv_set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
enum { KV_DEFAULT_FLOATS = 0 };
static inline uint64_t kv_float_mode(void) { return KV_DEFAULT_FLOATS; }
static inline void kv_set_float_mode(uint64_t mode) { (void)mode; }
#endif

/* Sets that mode; returns the one before, for kv_end_floats. */
static inline uint64_t kv_begin_floats(void)
{
    const uint64_t mode = kv_float_mode();
    if (mode != KV_DEFAULT_FLOATS) kv_set_float_mode(KV_DEFAULT_FLOATS);
    return mode;
}

static inline void kv_end_floats(uint64_t mode)
{
    if (mode != KV_DEFAULT_FLOATS) kv_set_float_mode(mode);
}

#endif
