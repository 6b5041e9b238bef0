"""One io_uring: its set-up, its submission and completion, and the registration of memory.

Owns the ring's kernel objects and what "the ring is broken" means. Knows no read, file or port. The only module that
calls liburing's functions. May import liburing, atomics and libc.
"""

from libc.errno cimport EAGAIN, EBUSY, EINTR, EINVAL, EIO, ENOMEM, ENOSPC, ENOSYS
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from fastcache_ext.atomics cimport fc_load32, fc_store32
from fastcache_ext.liburing cimport (
    FC_SETUP_COOP_TASKRUN,
    FC_SETUP_DEFER_TASKRUN,
    FC_SETUP_SINGLE_ISSUER,
    fc_cqe,
    fc_liburing_table,
    fc_ring_params,
    fc_ring_taken,
    fc_sqe,
)

cdef extern from "unistd.h" nogil:
    int usleep(unsigned us)

cdef enum:
    MIN_ENTRIES = 4
    PATIENCE = 5                # tries at the smallest size
    MAX_REFUSALS = 5000         # naps in a row before the ring counts as broken


cdef int ring_make(fc_ring *r, const fc_liburing_table *lib, int wanted) noexcept nogil:
    cdef uint32_t[4] flags = [
        FC_SETUP_SINGLE_ISSUER | FC_SETUP_DEFER_TASKRUN | FC_SETUP_COOP_TASKRUN,
        FC_SETUP_SINGLE_ISSUER | FC_SETUP_COOP_TASKRUN,
        FC_SETUP_COOP_TASKRUN,
        0,
    ]
    cdef fc_ring_params params
    cdef unsigned entries = MIN_ENTRIES
    cdef int level = 0, patience = PATIENCE, rc
    while entries < <unsigned>min(wanted, <int>RING_MAX_ENTRIES):
        entries *= 2
    while True:
        memset(&params, 0, sizeof(params))
        params.flags = flags[level]
        rc = lib.queue_init_params(entries, &r.io, &params)
        if rc == -EINVAL and level < 3:         # an older kernel
            level += 1
        elif rc == -ENOMEM and entries > MIN_ENTRIES:
            entries //= 2
        elif rc == -ENOMEM and patience > 0:    # a ring closed just now gives its locked memory back a moment later
            patience -= 1
            usleep(20 * RING_NAP_US)
        elif rc != -EINTR:
            break
    if rc < 0:
        return -rc
    r.lib = lib
    r.flags = <int32_t>flags[level]
    r.entries = <int>params.sq_entries
    return 0


cdef void ring_drop(fc_ring *r) noexcept nogil:
    r.lib.queue_exit(&r.io)


cdef fc_sqe *ring_sqe(fc_ring *r, int opcode, int fd, void *dest, int64_t nbytes, uint64_t user_data) noexcept nogil:
    cdef fc_sqe *sqe = r.lib.get_sqe(&r.io)
    if sqe == NULL:
        return NULL
    r.turn += 1
    memset(sqe, 0, sizeof(fc_sqe))
    sqe.opcode = <uint8_t>opcode
    sqe.fd = fd
    sqe.addr = <uint64_t><uintptr_t>dest
    sqe.len = <uint32_t>min(nbytes, <int64_t>RING_MAX_READ)
    sqe.user_data = user_data
    return sqe


cdef void ring_push(fc_ring *r, unsigned wait) noexcept nogil:
    cdef int rc
    if r.broken != 0:
        return
    rc = r.lib.submit_and_wait(&r.io, wait)
    if rc >= 0:
        r.refusals = 0
    elif rc == -EAGAIN or rc == -EBUSY:         # no memory, or completions to reap first: the queue keeps its entries
        r.refusals += 1
        if r.refusals > MAX_REFUSALS:
            r.broken = -rc
        usleep(RING_NAP_US)
    elif rc != -EINTR:
        r.broken = -rc


cdef int ring_reap(fc_ring *r, fc_cqe *out) noexcept nogil:
    cdef fc_cqe *seen[RING_BATCH]
    cdef unsigned n = r.lib.peek_batch_cqe(&r.io, seen, RING_BATCH)
    cdef unsigned i
    for i in range(n):
        out[i] = seen[i][0]
    if n > 0:
        r.lib.cq_advance(&r.io, n)
        r.refusals = 0
    return <int>n


cdef bint ring_took(fc_ring *r, uint32_t turn) noexcept nogil:
    return <int32_t>(turn - fc_ring_taken(&r.io)) < 0


cdef int ring_offer(fc_ring *r, int index, void *base, int64_t nbytes) noexcept nogil:
    if index != fc_load32(&r.offered) or nbytes <= 0 or nbytes > RING_MAX_READ:
        return -EINVAL
    if index >= RING_MAX_PIECES:
        return -ENOSPC
    r.pieces[index].iov_base = base
    r.pieces[index].iov_len = <size_t>nbytes
    fc_store32(&r.offered, index + 1)
    return 0


cdef bint ring_offer_waits(fc_ring *r) noexcept nogil:
    return r.registered < fc_load32(&r.offered) and r.register_error == 0 and r.broken == 0


cdef void ring_register(fc_ring *r) noexcept nogil:
    cdef int rc = 0
    if r.lib.register_buffers_sparse == NULL or r.lib.register_buffers_update_tag == NULL:
        rc = -ENOSYS
    elif not r.sparse:
        rc = r.lib.register_buffers_sparse(&r.io, RING_MAX_PIECES)
        r.sparse = rc >= 0
    if rc >= 0:
        # an update does not wait for the reads in flight, where registering anew would
        rc = r.lib.register_buffers_update_tag(&r.io, <unsigned>r.registered, &r.pieces[r.registered], NULL, 1)
    if rc > 0:
        fc_store32(&r.registered, r.registered + 1)
    elif rc != -EINTR:
        fc_store32(&r.register_error, -rc if rc < 0 else EIO)      # plain reads from here on
