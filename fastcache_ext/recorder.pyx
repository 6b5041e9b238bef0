"""The recorder: records of what happens under the mutex, from a bounded ring to a file, by one native thread.

Whoever records never waits for the file: where the ring is full, records are lost, counted and marked by a GAP. Batches are lost
whole, so that what the file says is always well formed. Ends are found at a moment when the mutex is free, so that the counters at
the end of the file belong to exactly the records before them. Knows no table, no read, no Python. May import libc, posix, atomics,
counters, policy and threads.
"""
from libc.errno cimport EBUSY, EFBIG, EINTR, EIO, ENOMEM, ETIMEDOUT, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.unistd cimport close, ftruncate, pwrite, write

from fastcache_ext.atomics cimport fc_load64, fc_store64, fc_swap32
from fastcache_ext.counters cimport FC_PHASES, N_COUNTERS, fc_counters
from fastcache_ext.threads cimport *

cdef extern from *:
    """
    #include <stdlib.h>
    #include <sys/mman.h>
    static inline void fc_hugepages(void *p, size_t n) { (void)madvise(p, n, MADV_HUGEPAGE); }
    """
    int posix_memalign(void **memory, size_t alignment, size_t nbytes) noexcept nogil
    void fc_hugepages(void *p, size_t n) noexcept nogil

cdef enum:
    HUGE = 1 << 21              # bytes
    SEGMENT = 1 << 15           # records for which there is room at once, in a ring that is large enough

cdef int64_t MOST = 0x7FFFFFFF          # of a record's value
cdef int64_t LOOK_NS = 20000000         # between two looks of the thread; what a process that dies loses at most


# ---- under the mutex

cdef inline int64_t free_records(const fc_recorder *r) noexcept nogil:
    """Records that can be put now."""
    cdef int64_t head = recorder_head(r)
    return min(r.capacity - (head - fc_load64(&r.drained)), r.limit - head)


cdef inline int64_t reserve(const fc_recorder *r) noexcept nogil:
    """Records of the file's end that are for what happens until the thread has seen how full it is, and ends the recording."""
    return min(r.limit // 4, <int64_t>SEGMENT)


cdef inline void ring(fc_recorder *r) noexcept nogil:
    if fc_swap32(&r.bell, 1) == 0:
        fc_futex_wake(&r.bell)


cdef void grant(fc_recorder *r) noexcept nogil:
    """Room for some more records in a row; there is at least one."""
    cdef int64_t head = r.granted, n
    cdef int64_t soft = r.limit - reserve(r)
    n = min(min(<int64_t>SEGMENT, max(r.capacity // 8, <int64_t>1)), free_records(r))
    n = min(n, r.capacity - head % r.capacity)
    if head < soft:
        n = min(n, soft - head)
    r.at = r.ring + head % r.capacity
    r.end = r.at + n
    r.granted += n
    if head >= soft or r.granted - fc_load64(&r.drained) > r.capacity // 2:
        ring(r)                         # else it looks by itself: to wake it costs as much as a hundred hits


cdef inline void push(fc_recorder *r, uint64_t rec) noexcept nogil:
    if r.at == r.end:
        grant(r)
    r.at[0] = rec
    r.at += 1


cdef inline void lose(fc_recorder *r) noexcept nogil:
    r.granted -= r.end - r.at       # the next record comes by slow(), which puts the GAP before it
    r.end = r.at
    r.gap += 1
    r.dropped += 1


cdef uint64_t slow(fc_recorder *r, uint64_t rec) noexcept nogil:
    """What the inline paths leave: the end of the room, and records for which there may be none."""
    cdef int kind = rec & 255
    cdef int64_t wanted = 1, left = free_records(r)
    if kind == T_REQUEST:
        if r.skip > 0:
            r.skip -= 1
            lose(r)
        else:
            r.owed -= 1         # its room was kept for it
            push(r, rec)
        return rec
    if kind == T_BATCH:
        wanted += <int64_t>(rec >> 32)
    if r.gap > 0:
        wanted += 1
    if left < r.owed + wanted:
        lose(r)
        if kind == T_BATCH:
            r.skip = <int64_t>(rec >> 32)
        return rec
    if r.gap > 0:
        push(r, record(T_GAP, 0, 0, <int32_t>min(r.gap, MOST)))
        r.gap = 0
    push(r, rec)
    if kind == T_BATCH:
        r.owed = <int64_t>(rec >> 32)
    return rec


cdef bint leased(void *ctx, int32_t slot, bint answer) noexcept nogil:
    note(<fc_recorder *>ctx, T_LEASED, answer, 0, slot)
    return answer


cdef void released(void *ctx, int32_t slot) noexcept nogil:
    note(<fc_recorder *>ctx, T_RELEASED, 0, 0, slot)


cdef void recorder_end(fc_recorder *r, int why) noexcept nogil:
    if r.ended != FC_ENDED_NOT:
        return
    r.ended = why
    memcpy(r.final, r.counters.rows, sizeof(r.final))
    r.place[0] = NULL
    r.witness_place[0] = NULL
    ring(r)


# ---- the thread

cdef int write_all(int fd, const uint8_t *at, int64_t nbytes) noexcept nogil:
    cdef ssize_t n
    while nbytes > 0:
        n = write(fd, at, <size_t>nbytes)
        if n < 0 and errno == EINTR:
            continue
        if n <= 0:
            return errno if n < 0 else EIO
        at += n
        nbytes -= n
    return 0


cdef int write_trailer(fc_recorder *r) noexcept nogil:
    """What stands at the end: what was lost just before it, the counters, why it ended."""
    cdef uint64_t out[TRAILER]
    cdef int32_t i, p, n = 0
    cdef int64_t value
    if r.gap > 0:
        out[n] = record(T_GAP, 0, 0, <int32_t>min(r.gap, MOST))
        n += 1
    for p in range(FC_PHASES):
        for i in range(N_COUNTERS):
            value = r.final[p][i]
            if value != 0:
                out[n] = record(T_COUNTER, 2 * p, i, <int32_t>value)
                out[n + 1] = record(T_COUNTER, 2 * p + 1, i, <int32_t>(value >> 32))
                n += 2
    out[n] = record(T_END, r.ended, 0, <int32_t>min(r.dropped, MOST))
    return write_all(r.fd, <const uint8_t *>out, (n + 1) * <int64_t>8)


cdef int drain(fc_recorder *r, int64_t head) noexcept nogil:
    """Write the records before `head`. 0 or a positive errno."""
    cdef int64_t at = fc_load64(&r.drained), to
    cdef int rc = 0
    while at < head and rc == 0:
        to = min(head, at - at % r.capacity + r.capacity)
        rc = write_all(r.fd, <const uint8_t *>(r.ring + at % r.capacity), (to - at) * 8)
        if rc == 0:
            at = to
            fc_store64(&r.drained, at)
    return rc


cdef void *run(void *arg) noexcept nogil:
    cdef fc_recorder *r = <fc_recorder *>arg
    cdef int64_t head = 0, whole = 0
    cdef int rc = 0
    cdef bint over = False, ended = False
    while rc == 0 and not over:
        if fc_swap32(&r.bell, 0) == 0 and not ended:
            fc_futex_wait(&r.bell, 0, LOOK_NS)
        fc_lock_soon(r.mutex)
        if r.limit - recorder_head(r) <= reserve(r):
            recorder_end(r, FC_ENDED_FULL)
        whole, head = r.drained, recorder_head(r)       # the mutex was free: nothing is half recorded
        ended = r.ended != FC_ENDED_NOT
        over = ended and head == whole
        pthread_mutex_unlock(r.mutex)
        rc = drain(r, head)
    if rc != 0:
        pthread_mutex_lock(r.mutex)
        recorder_end(r, FC_ENDED_ERROR)
        pthread_mutex_unlock(r.mutex)
    # From here on nobody else looks at what the thread reads.
    if rc == 0:
        whole = head
        rc = write_trailer(r)
    if rc != 0:                         # whole batches, or a reader refuses the file
        r.exact = 0
        r.dropped += head - whole
        ftruncate(r.fd, r.start + whole * 8)
    if r.dropped > 0 or not r.exact:
        r.exact = 0
        pwrite(r.fd, b"false", 5, r.exact_at)
    close(r.fd)
    pthread_mutex_lock(r.mutex)
    r.error = rc
    r.over = 1
    pthread_cond_broadcast(&r.done)
    pthread_mutex_unlock(r.mutex)
    return NULL


# ---- its life

cdef fc_recorder *recorder_new(int fd, int64_t start, int64_t exact_at, int64_t limit_bytes, int64_t ring_records,
                               int *error) noexcept nogil:
    cdef fc_recorder *r
    cdef int64_t limit = (limit_bytes - start) // 8 - TRAILER
    error[0] = EFBIG
    if limit < RECORDER_LEAST - TRAILER:
        return NULL
    error[0] = ENOMEM
    r = <fc_recorder *>calloc(1, sizeof(fc_recorder))
    if r == NULL:
        return NULL
    if posix_memalign(<void **>&r.ring, HUGE, <size_t>ring_records * 8) != 0:
        free(r)
        return NULL
    fc_hugepages(r.ring, <size_t>ring_records * 8)
    memset(r.ring, 255, <size_t>ring_records * 8)       # page faults now, not under the mutex: zeros a compiler leaves to calloc
    r.capacity = ring_records
    r.limit = limit
    r.fd = fd
    r.start = start
    r.exact_at = exact_at
    r.slow = slow
    r.witness.ctx = r
    r.witness.leased = leased
    r.witness.released = released
    r.joined = 1
    fc_cond_init(&r.done)
    error[0] = 0
    return r


cdef int recorder_start(fc_recorder *r, pthread_mutex_t *mutex, fc_recorder **place, fc_witness **witness_place,
                        fc_counters *counters, const int32_t *used) noexcept nogil:
    cdef int rc = 0
    r.mutex = mutex
    r.place = place
    r.witness_place = witness_place
    r.counters = counters
    pthread_mutex_lock(mutex)
    if place[0] != NULL:
        rc = EBUSY
    else:
        r.exact = used[0] == 0
        place[0] = r
        witness_place[0] = &r.witness
        if counters.phase != 0:
            note(r, T_PHASE, 0, counters.phase, 0)
    pthread_mutex_unlock(mutex)
    if rc != 0:
        return rc
    rc = fc_spawn(&r.thread, run, r, b"fastcache-trace")
    if rc == 0:
        r.joined = 0
        return 0
    pthread_mutex_lock(mutex)
    recorder_end(r, FC_ENDED_ERROR)
    r.over = 1
    pthread_mutex_unlock(mutex)
    return rc


cdef int recorder_join(fc_recorder *r, int64_t timeout_ns) noexcept nogil:
    cdef int64_t until = fc_now_ns() + timeout_ns
    cdef bint mine
    pthread_mutex_lock(r.mutex)
    while not r.over and (timeout_ns < 0 or fc_now_ns() < until):
        if timeout_ns < 0:
            pthread_cond_wait(&r.done, r.mutex)
        else:
            fc_cond_until(&r.done, r.mutex, until)
    mine = r.over and not r.joined
    if mine:
        r.joined = 1
    pthread_mutex_unlock(r.mutex)
    if mine:
        fc_join_until(r.thread, -1)
    return 0 if r.over else ETIMEDOUT


cdef void recorder_free(fc_recorder *r) noexcept nogil:
    pthread_cond_destroy(&r.done)
    free(r.ring)
    free(r)
