"""Flags that threads set without a lock and without the GIL, to enter alone or to share."""

cdef extern from *:
    """
    #ifndef KV_FLAGS
    #define KV_FLAGS
    /* Sets a flag that is 0 to `value` and returns 0; else returns what the flag is. */
    __attribute__((unused)) static inline int kv_take(int *flag, int value) {
        int found = 0;
        __atomic_compare_exchange_n(flag, &found, value, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
        return found;
    }
    __attribute__((unused)) static inline void kv_drop(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }

    /* Counts one more sharer and returns 0; if a thread has the flag alone, returns its value, which is below 0. */
    __attribute__((unused)) static inline int kv_share(int *flag) {
        int found = __atomic_load_n(flag, __ATOMIC_RELAXED);
        while (found >= 0 && !__atomic_compare_exchange_n(flag, &found, found + 1, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {}
        return found < 0 ? found : 0;
    }
    __attribute__((unused)) static inline void kv_unshare(int *flag) { __atomic_sub_fetch(flag, 1, __ATOMIC_RELEASE); }
    #endif
    """
    int kv_take(int *flag, int value) noexcept nogil
    void kv_drop(int *flag) noexcept nogil
    int kv_share(int *flag) noexcept nogil
    void kv_unshare(int *flag) noexcept nogil
