# POSIX threads, as far as the monitor needs them.
from libc.stdint cimport int32_t, int64_t

cdef extern from *:
    """
    #include <errno.h>
    #include <pthread.h>
    #include <signal.h>
    #include <limits.h>
    #include <linux/futex.h>
    #include <string.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>
    static inline int64_t fc_now_ns(void) {
        struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec; }
    static inline int fc_cond_init(pthread_cond_t *c) {             /* timed waits count on the monotonic clock */
        pthread_condattr_t a; int rc;
        pthread_condattr_init(&a); pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
        rc = pthread_cond_init(c, &a); pthread_condattr_destroy(&a); return rc; }
    static inline int fc_cond_until(pthread_cond_t *c, pthread_mutex_t *m, int64_t ns) {
        struct timespec t; t.tv_sec = ns / 1000000000; t.tv_nsec = ns % 1000000000;
        return pthread_cond_timedwait(c, m, &t); }
    /* Sleep while *word == value, at most ns. To wake needs no lock, and the sleeper needs none to go on: it reads the word. */
    static inline void fc_futex_wait(int32_t *word, int32_t value, int64_t ns) {
        struct timespec t; t.tv_sec = ns / 1000000000; t.tv_nsec = ns % 1000000000;
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &t, 0, 0); }
    static inline void fc_futex_wake(int32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0); }
    /* Lock what is held for moments at a time. Who sleeps for a mutex has to be woken, by a system call of whoever had it. */
    static inline void fc_lock_soon(pthread_mutex_t *m) {
        struct timespec nap = {0, 50000}; int i;
        for (i = 1; pthread_mutex_trylock(m) != 0; i++)
            if (i % 1024 == 0) nanosleep(&nap, 0); }
    /* a native thread: small stack, no signals, a name for ps and debuggers */
    static inline int fc_spawn(pthread_t *t, void *(*run)(void *), void *arg, const char *name) {
        pthread_attr_t a; sigset_t all, was; int rc;
        pthread_attr_init(&a); pthread_attr_setstacksize(&a, 256 * 1024);
        sigfillset(&all); pthread_sigmask(SIG_SETMASK, &all, &was);
        rc = pthread_create(t, &a, run, arg);
        if (rc == EINVAL) rc = pthread_create(t, 0, run, arg);      /* a process with much thread-local storage */
        pthread_sigmask(SIG_SETMASK, &was, 0); pthread_attr_destroy(&a);
        if (rc == 0) pthread_setname_np(*t, name);
        return rc; }
    /* I/O priorities: the kernel's numbers, from <linux/ioprio.h> */
    enum { FC_IOPRIO_RT = 1 << 13 | 4, FC_IOPRIO_IDLE = 3 << 13 };
    static inline int fc_set_ioprio(int value) {                    /* of the calling thread; 0 or a positive errno */
        return syscall(SYS_ioprio_set, 1, 0, value) < 0 ? errno : 0; }
    static inline int fc_get_ioprio(void) { return (int)syscall(SYS_ioprio_get, 1, 0); }
    static inline int fc_join_until(pthread_t t, int64_t timeout_ns) {      /* pthread_timedjoin_np counts on a clock that steps */
        struct timespec nap = {0, 50000}; int64_t end; int rc;
        if (timeout_ns < 0) return pthread_join(t, 0);
        for (end = fc_now_ns() + timeout_ns; (rc = pthread_tryjoin_np(t, 0)) == EBUSY; nanosleep(&nap, 0)) {
            if (fc_now_ns() >= end) return ETIMEDOUT;
            if (nap.tv_nsec < 1000000) nap.tv_nsec *= 2; }
        return rc; }
    """
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *) noexcept nogil
    int pthread_mutex_destroy(pthread_mutex_t *) noexcept nogil
    int pthread_mutex_lock(pthread_mutex_t *) noexcept nogil
    void fc_lock_soon(pthread_mutex_t *) noexcept nogil
    int pthread_mutex_unlock(pthread_mutex_t *) noexcept nogil
    int pthread_cond_destroy(pthread_cond_t *) noexcept nogil
    int pthread_cond_wait(pthread_cond_t *, pthread_mutex_t *) noexcept nogil
    int pthread_cond_signal(pthread_cond_t *) noexcept nogil
    int pthread_cond_broadcast(pthread_cond_t *) noexcept nogil
    int fc_cond_init(pthread_cond_t *) noexcept nogil
    int fc_cond_until(pthread_cond_t *, pthread_mutex_t *, int64_t monotonic_ns) noexcept nogil
    int fc_spawn(pthread_t *, void *(*run)(void *) noexcept nogil, void *arg, const char *name) noexcept nogil
    enum:
        FC_IOPRIO_RT
        FC_IOPRIO_IDLE
    int fc_set_ioprio(int value) noexcept nogil
    int fc_get_ioprio() noexcept nogil
    int fc_join_until(pthread_t, int64_t timeout_ns) noexcept nogil     # < 0: no limit; ETIMEDOUT
    void fc_futex_wait(int32_t *word, int32_t value, int64_t ns) noexcept nogil
    void fc_futex_wake(int32_t *word) noexcept nogil
    int64_t fc_now_ns() noexcept nogil
