"""The io_uring engine: one native thread makes the ring, fills it, waits in it and takes it down.

Owns the table of reads in flight. Knows no queue, slot or lock: only the port's two functions. May import ioqueue,
ring, liburing (whether one is there), atomics, threads and libc.

Only this thread ever calls into the ring, so it may be single-issuer, and no read depends on the life of a caller's
thread. Others reach it through an eventfd, on which polls stay armed in the ring while the thread waits there: as many as the
completions that it waits for, so that one write ends any sleep. While nothing is in flight it sleeps in the port instead, so an
idle store is neither busy nor in I/O wait.

After fork the child shares the ring's memory with the parent and has no such thread: it must not call anything here,
nor free what it inherited. The core checks the process id.
"""

from libc.errno cimport EAGAIN, EINTR, EINVAL, ENOMEM, ENOSYS, errno
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.stdlib cimport posix_memalign
from posix.unistd cimport close, read, usleep, write

from fastcache_ext.atomics cimport fc_add32, fc_load32, fc_store32, fc_swap32
from fastcache_ext.ioqueue cimport FC_AGAIN, FC_CANCEL_ASKED, FC_CANCEL_WANTED, FC_STOP, fc_op, fc_port
from fastcache_ext.liburing cimport (
    FC_OP_ASYNC_CANCEL, FC_OP_POLL_ADD, FC_OP_READ, FC_OP_READ_FIXED, fc_cqe, fc_sqe, liburing_table,
)
from fastcache_ext.ring cimport (
    RING_BATCH, RING_MAX_ENTRIES, RING_NAP_US, fc_ring, ring_drop, ring_make, ring_offer, ring_offer_waits, ring_push, ring_reap,
    ring_register, ring_sqe, ring_took,
)
from fastcache_ext.threads cimport *

cdef extern from "poll.h" nogil:
    int POLLIN

cdef extern from "sys/eventfd.h" nogil:
    int EFD_CLOEXEC
    int EFD_NONBLOCK
    int eventfd(unsigned initial, int flags)

cdef enum:
    INDEX_BITS = 16             # of user_data: which flight; above them the number of the submission
    CALM = 8                    # completions that a sleep waits for at most

cdef uint64_t WAKE = <uint64_t>-1       # user_data of the eventfd's polls
cdef uint64_t PROBE = <uint64_t>-2      # of the first read
cdef uint64_t STOP = <uint64_t>-3       # of a try to stop a read

ctypedef struct fc_flight:      # one read in the kernel's hands
    fc_op *op
    uint64_t number             # of this submission, never reused; 0 while free. A stale completion carries another one
    uint32_t turn               # its SQE's, see ring_took
    int32_t next                # neighbour in the free list, or -1

ctypedef struct fc_uring_state:
    fc_ring ring                # first: it has the alignment
    fc_port port
    pthread_t thread
    pthread_mutex_t mutex       # guards the next two, during uring_start only
    pthread_cond_t began
    int start_error             # -1 until the thread knows, then 0 or a positive errno
    int slots                   # reads in flight at most; the ring has one entry more, for the eventfd
    int in_hand                 # ops between take() and the end of their settle()
    int stopped                 # take() said FC_STOP
    int armed                   # polls of the eventfd in the ring
    int probing                 # 1 until the first read has come back
    int leak                    # 1: the kernel may still write `probed`, so this struct is never freed
    int event_fd
    int32_t kicked              # atomic: 1 from a kick to the wake-up it causes
    int32_t stop                # atomic: 1 while there may be ops to stop
    int32_t stops               # atomic: reads that the kernel was asked to stop
    int64_t reaped_ns           # monotonic: when the completions that are being looked at had come
    uint64_t probed             # destination of the first read
    uint64_t number             # of the latest submission
    int32_t first_free          # head of the free flights, or -1
    fc_flight *flights          # [slots]
    fc_op **batch               # [slots] what take() fills
    fc_op *later                # ops in hand that found the submission queue full, linked by `next`


# ---- called by the ring's thread only ----

cdef void op_fail(fc_uring_state *u, fc_op *op) noexcept nogil:
    """End an op that the kernel does not have, now that the ring is broken."""
    while u.port.settle(u.port.ctx, op, -u.ring.broken) == FC_AGAIN:
        pass                    # settle() bounds the tries without progress
    u.in_hand -= 1


cdef void op_copy(fc_uring_state *u, fc_op *op) noexcept nogil:
    """Serve an op on a memory file, which has no descriptor."""
    cdef int64_t n
    while True:
        n = max(min(op.nbytes, op.file.size - op.offset), <int64_t>0)
        if n > 0:
            memcpy(op.dest, op.file.memory + op.offset, <size_t>n)
        if u.port.settle(u.port.ctx, op, n) != FC_AGAIN:
            break
    u.in_hand -= 1


cdef void op_start(fc_uring_state *u, fc_op *op) noexcept nogil:
    """Put an op in hand into the submission queue, or aside when that is full."""
    cdef int32_t i = u.first_free               # in_hand <= slots: there is one
    cdef bint fixed = 0 <= op.buf_index < u.ring.registered
    cdef fc_flight *flight
    cdef fc_sqe *sqe
    if u.ring.broken != 0:
        op_fail(u, op)
        return
    if op.file.memory != NULL:
        op_copy(u, op)
        return
    sqe = ring_sqe(&u.ring, FC_OP_READ_FIXED if fixed else FC_OP_READ, op.fd, op.dest, op.nbytes,
                   ((u.number + 1) << INDEX_BITS) | <uint64_t>i)
    if sqe == NULL:
        op.next = u.later
        u.later = op
        return
    sqe.off = <uint64_t>op.offset
    sqe.ioprio = <uint16_t>op.ioprio
    if fixed:
        sqe.buf_index = <uint16_t>op.buf_index
    u.number += 1
    flight = &u.flights[i]
    u.first_free = flight.next
    flight.op = op
    flight.number = u.number
    flight.turn = u.ring.turn - 1


cdef void start_later(fc_uring_state *u) noexcept nogil:
    cdef fc_op *op = u.later
    cdef fc_op *after
    u.later = NULL
    while op != NULL:
        after = op.next
        op_start(u, op)
        op = after


cdef fc_op *flight_end(fc_uring_state *u, int32_t i) noexcept nogil:
    u.flights[i].number = 0
    u.flights[i].next = u.first_free
    u.first_free = i
    return u.flights[i].op


cdef void complete(fc_uring_state *u, uint64_t user_data, int32_t res) noexcept nogil:
    cdef uint64_t i = user_data & ((1 << INDEX_BITS) - 1)
    cdef uint64_t kicks
    cdef fc_op *op
    if user_data == PROBE:
        u.probing = 0
        if res < 0:
            u.ring.broken = -res
        return
    if user_data == WAKE:
        u.armed -= 1
        read(u.event_fd, &kicks, sizeof(kicks))
        fc_store32(&u.kicked, 0)                # before the next take(): a kick from here on writes again
        if res < 0 and res != -EINTR and res != -EAGAIN:
            u.ring.broken = -res                # nobody could wake this thread any more
        return
    if i >= <uint64_t>u.slots or u.flights[i].number != user_data >> INDEX_BITS:
        return                                  # not a read in flight: credited to nobody
    op = flight_end(u, <int32_t>i)
    op.back_ns = u.reaped_ns
    if u.port.settle(u.port.ctx, op, res) == FC_AGAIN:
        op_start(u, op)
    else:
        u.in_hand -= 1


cdef void reap(fc_uring_state *u) noexcept nogil:
    cdef fc_cqe taken[RING_BATCH]
    cdef int i, n = RING_BATCH
    while n == RING_BATCH:
        n = ring_reap(&u.ring, taken)
        u.reaped_ns = fc_now_ns()
        for i in range(n):
            complete(u, taken[i].user_data, taken[i].res)


cdef void fail_unsent(fc_uring_state *u) noexcept nogil:
    """After the ring broke: end the ops whose SQE the kernel never took, and never will.

    The others stay in flight until their own completion comes. If none ever does, nor do they: the kernel may still write there.
    """
    cdef int32_t i
    for i in range(u.slots):
        if u.flights[i].number != 0 and not ring_took(&u.ring, u.flights[i].turn):
            op_fail(u, flight_end(u, i))


cdef void stop_some(fc_uring_state *u) noexcept nogil:
    """Ask the kernel to stop the reads that nobody wants any more. Each still has its own completion."""
    cdef fc_flight *flight
    cdef fc_sqe *sqe
    cdef uint64_t number
    cdef int32_t i
    if u.ring.broken != 0 or fc_swap32(&u.stop, 0) == 0:
        return
    ring_push(&u.ring, 0)                       # room for as many again
    for i in range(u.slots):
        flight = &u.flights[i]
        if flight.number == 0 or fc_load32(&flight.op.cancel) != FC_CANCEL_WANTED:
            continue
        number = (flight.number << INDEX_BITS) | <uint64_t>i
        sqe = ring_sqe(&u.ring, FC_OP_ASYNC_CANCEL, -1, <void *><uintptr_t>number, 0, STOP)
        if sqe == NULL:
            fc_store32(&u.stop, 1)
            return
        fc_store32(&flight.op.cancel, FC_CANCEL_ASKED)
        fc_add32(&u.stops, 1)


cdef void arm(fc_uring_state *u, int wanted) noexcept nogil:
    cdef fc_sqe *sqe
    while u.armed < wanted and u.ring.broken == 0:
        sqe = ring_sqe(&u.ring, FC_OP_POLL_ADD, u.event_fd, NULL, 0, WAKE)
        if sqe == NULL:
            break
        sqe.rw_flags = POLLIN
        u.armed += 1


cdef int patience(fc_uring_state *u) noexcept nogil:
    """How many completions to sleep for: a kick brings as many as there are polls."""
    cdef int i, n = 0
    arm(u, 1)
    if u.in_hand <= 2 or u.later != NULL:
        return 1
    for i in range(u.slots):
        if u.flights[i].number != 0:
            u.batch[n] = u.flights[i].op
            n += 1
    n = min(u.port.patience(u.port.ctx, u.batch, n), <int>CALM)
    arm(u, n)
    return min(n, u.armed)


cdef int begin(fc_uring_state *u) noexcept nogil:
    """Make the ring, be woken in it and read once; return 0 or a positive errno.

    A filter may allow the set-up and refuse the rest, and before Linux 5.6 there is no plain read.
    """
    cdef int32_t i
    cdef uint32_t turn
    cdef uint64_t one = 1
    cdef int rc = ring_make(&u.ring, liburing_table(), u.slots + 1)
    if rc != 0:
        return rc
    u.slots = min(u.slots, u.ring.entries - 1)
    for i in range(u.slots):
        u.flights[i].next = i + 1 if i + 1 < u.slots else -1
    arm(u, 1)                                   # first: the read empties the eventfd
    turn = u.ring.turn
    u.probing = ring_sqe(&u.ring, FC_OP_READ, u.event_fd, &u.probed, sizeof(u.probed), PROBE) != NULL
    if write(u.event_fd, &one, sizeof(one)) < 0:
        u.ring.broken = errno
    while (u.probing or u.armed > 0) and u.ring.broken == 0:
        ring_push(&u.ring, 1)
        reap(u)
    if u.ring.broken != 0:
        u.leak = u.probing and ring_took(&u.ring, turn)
        ring_drop(&u.ring)
    return u.ring.broken


cdef void *run(void *arg) noexcept nogil:
    cdef fc_uring_state *u = <fc_uring_state *>arg
    cdef bint may_block
    cdef int n, i, error = begin(u)
    pthread_mutex_lock(&u.mutex)
    u.start_error = error
    pthread_cond_broadcast(&u.began)
    pthread_mutex_unlock(&u.mutex)
    if error != 0:
        return NULL
    while u.in_hand > 0 or not u.stopped:
        start_later(u)
        may_block = True
        # The take() before a sleep in the kernel is one that may not block: the port must know to kick.
        while may_block and not u.stopped and u.in_hand < u.slots:
            may_block = u.in_hand == 0 and not ring_offer_waits(&u.ring)
            n = u.port.take(u.port.ctx, u.batch, u.slots - u.in_hand, may_block)
            u.stopped = n == FC_STOP
            u.in_hand += max(n, 0)
            for i in range(n):
                op_start(u, u.batch[i])
            if n == 0:
                break
        if ring_offer_waits(&u.ring):
            if u.in_hand > 0:
                ring_push(&u.ring, 0)           # the device works while the memory is pinned
            ring_register(&u.ring)
        if u.in_hand > 0:
            stop_some(u)
            if u.ring.broken == 0:
                ring_push(&u.ring, patience(u))
            else:
                usleep(RING_NAP_US)             # nothing can wait in this ring: look again in a moment
            reap(u)
            if u.ring.broken != 0:
                fail_unsent(u)
    ring_drop(&u.ring)
    return NULL


# ---- called by the core ----

cdef void state_free(fc_uring_state *u) noexcept nogil:
    if u.event_fd >= 0:
        close(u.event_fd)
    free(u.flights)
    free(u.batch)
    pthread_cond_destroy(&u.began)
    pthread_mutex_destroy(&u.mutex)
    if not u.leak:
        free(u)


cdef fc_uring *uring_start(const fc_port *port, int depth, int *error) noexcept nogil:
    cdef fc_uring_state *u
    cdef void *memory = NULL
    error[0] = ENOSYS
    if liburing_table() == NULL:
        return NULL
    error[0] = EINVAL
    if depth < 1:
        return NULL
    error[0] = posix_memalign(&memory, 64, sizeof(fc_uring_state))
    if error[0] != 0:
        return NULL
    memset(memory, 0, sizeof(fc_uring_state))
    u = <fc_uring_state *>memory
    u.port = port[0]
    pthread_mutex_init(&u.mutex, NULL)
    fc_cond_init(&u.began)
    u.slots = min(depth, <int>RING_MAX_ENTRIES - 1)
    u.flights = <fc_flight *>calloc(<size_t>u.slots, sizeof(fc_flight))
    u.batch = <fc_op **>calloc(<size_t>u.slots, sizeof(fc_op *))
    u.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    if u.event_fd < 0:
        error[0] = errno
    elif u.flights == NULL or u.batch == NULL:
        error[0] = ENOMEM
    else:
        u.start_error = -1
        error[0] = fc_spawn(&u.thread, run, u, "fastcache-ring")
    if error[0] == 0:
        pthread_mutex_lock(&u.mutex)
        while u.start_error < 0:
            pthread_cond_wait(&u.began, &u.mutex)
        error[0] = u.start_error
        pthread_mutex_unlock(&u.mutex)
        if error[0] == 0:
            return <fc_uring *>u
        fc_join_until(u.thread, -1)
    state_free(u)
    return NULL


cdef void uring_kick(fc_uring *ring) noexcept nogil:
    cdef fc_uring_state *u = <fc_uring_state *>ring
    cdef uint64_t one = 1
    if fc_swap32(&u.kicked, 1) == 0 and write(u.event_fd, &one, sizeof(one)) < 0:
        fc_store32(&u.kicked, 0)                # the next kick tries again


cdef void uring_stop_reads(fc_uring *ring) noexcept nogil:
    fc_store32(&(<fc_uring_state *>ring).stop, 1)
    uring_kick(ring)


cdef int uring_offer(fc_uring *ring, int index, void *base, int64_t nbytes) noexcept nogil:
    return ring_offer(&(<fc_uring_state *>ring).ring, index, base, nbytes)


cdef int uring_registered(fc_uring *ring, int *error) noexcept nogil:
    cdef fc_uring_state *u = <fc_uring_state *>ring
    error[0] = fc_load32(&u.ring.register_error)
    return fc_load32(&u.ring.registered)


cdef int uring_join(fc_uring *ring, int64_t timeout_ns) noexcept nogil:
    cdef fc_uring_state *u = <fc_uring_state *>ring
    cdef int late = fc_join_until(u.thread, timeout_ns)
    if late == 0:
        state_free(u)
    return late


cdef int32_t uring_stops(fc_uring *ring) noexcept nogil:
    return fc_load32(&(<fc_uring_state *>ring).stops)


cdef int32_t uring_flags(const fc_uring *ring) noexcept nogil:
    return (<const fc_uring_state *>ring).ring.flags
