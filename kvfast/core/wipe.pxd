"""Wipes memory that nothing else must read. All wiping goes through this file."""


cdef extern from *:
    """
    #include <string.h>
    /* A volatile pointer may change between calls. So no compiler can drop the call as a store that is never read. */
    __attribute__((unused)) static void *(*const volatile kv_fill)(void *, int, size_t) = memset;
    __attribute__((unused)) static inline void kv_wipe(void *data, size_t size) { if (size) kv_fill(data, 0, size); }
    /* The same for memory whose pages may never have been touched: reading does not allocate them, writing would. */
    __attribute__((unused)) static inline void kv_wipe_pages(char *data, size_t size)
    {
        for (size_t at = 0; at < size; at += 4096) {
            const size_t count = size - at < 4096 ? size - at : 4096;
            if (data[at] || memcmp(data + at, data + at + 1, count - 1)) kv_wipe(data + at, count);
        }
    }
    /* What functions that have returned left on the stack: copies that compilers make, too. Kernels need less than this. */
    __attribute__((noinline, unused)) static void kv_wipe_stack(void)
    {
        char below[32 << 10];
        kv_wipe(below, sizeof below);
    }
    """
    void kv_wipe_stack() noexcept nogil
    void kv_wipe(void *data, size_t size) noexcept nogil
    void kv_wipe_pages(char *data, size_t size) noexcept nogil
