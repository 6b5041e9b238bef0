# Atomics: the GCC builtins by name, and nothing else. Used by every module that shares memory with a native thread.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

cdef extern from *:
    """
    #include <stdint.h>
    static inline int32_t fc_load32(const int32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void fc_store32(int32_t *p, int32_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    static inline int32_t fc_add32(int32_t *p, int32_t v) { return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST); }
    static inline int32_t fc_swap32(int32_t *p, int32_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
    static inline int fc_cas32(int32_t *p, int32_t was, int32_t v) {
        return __atomic_compare_exchange_n(p, &was, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }
    static inline int64_t fc_load64(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void fc_store64(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    static inline int64_t fc_add64(int64_t *p, int64_t v) { return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST); }
    static inline int fc_cas64(int64_t *p, int64_t was, int64_t v) {
        return __atomic_compare_exchange_n(p, &was, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }
    static inline uint8_t fc_load8(const uint8_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void fc_store8(uint8_t *p, uint8_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    static inline uint8_t fc_swap8(uint8_t *p, uint8_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
    /* one writer at a time (the mutex holder), any reader: plain moves on x86, and no torn value anywhere */
    static inline void fc_bump64(int64_t *p, int64_t v) {
        __atomic_store_n(p, __atomic_load_n(p, __ATOMIC_RELAXED) + v, __ATOMIC_RELAXED); }
    static inline int64_t fc_peek64(const int64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline void fc_poke64(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    /* of a queue with one writer at a time and one reader at a time: what was written before the store is seen after the load */
    static inline uint32_t fc_acquire32(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void fc_release32(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void fc_fence_release(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }
    static inline void fc_fence_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    """
    int32_t fc_load32(const int32_t *p) noexcept nogil
    void fc_store32(int32_t *p, int32_t v) noexcept nogil
    int32_t fc_add32(int32_t *p, int32_t v) noexcept nogil       # returns the new value
    int32_t fc_swap32(int32_t *p, int32_t v) noexcept nogil      # returns the old value
    int fc_cas32(int32_t *p, int32_t was, int32_t v) noexcept nogil
    int64_t fc_load64(const int64_t *p) noexcept nogil
    void fc_store64(int64_t *p, int64_t v) noexcept nogil
    int64_t fc_add64(int64_t *p, int64_t v) noexcept nogil       # returns the new value
    int fc_cas64(int64_t *p, int64_t was, int64_t v) noexcept nogil
    uint8_t fc_load8(const uint8_t *p) noexcept nogil
    void fc_store8(uint8_t *p, uint8_t v) noexcept nogil
    uint8_t fc_swap8(uint8_t *p, uint8_t v) noexcept nogil       # returns the old value
    void fc_bump64(int64_t *p, int64_t v) noexcept nogil
    int64_t fc_peek64(const int64_t *p) noexcept nogil
    void fc_poke64(int64_t *p, int64_t v) noexcept nogil
    uint32_t fc_acquire32(const uint32_t *p) noexcept nogil
    void fc_release32(uint32_t *p, uint32_t v) noexcept nogil
    void fc_fence_release() noexcept nogil
    void fc_fence_acquire() noexcept nogil
