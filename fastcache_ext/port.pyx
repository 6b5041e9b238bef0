"""The port: how engines take reads from the queue, and settle them. What a last read brings about is landing's.

Under the mutex, which each function takes and leaves. Knows no Python. May import the plain modules below it.
"""
from libc.stdint cimport int32_t, int64_t

from fastcache_ext.atomics cimport fc_load32, fc_store32
from fastcache_ext.counters cimport *
from fastcache_ext.evidence cimport evidence_read_begins, evidence_read_ends
from fastcache_ext.ioqueue cimport (
    FC_AGAIN, FC_CANCEL_NOT, FC_DEMAND, FC_ECANCELLED, FC_ECLOSED, FC_FINISHED, FC_GUESS, FC_STOP, fc_load, fc_op, op_settle,
    queue_due, queue_empty, queue_next, queue_push, queue_settled, queue_unlink,
)
from fastcache_ext.landing cimport fc_wakes, guess_begin, land, wake_all
from fastcache_ext.monitor cimport fc_node, fc_wait
from fastcache_ext.room cimport crowded
from fastcache_ext.threads cimport *

cdef extern from "errno.h" nogil:
    int ECANCELED


cdef void count_taken(fc_counters *n, fc_op **ops, int n_ops) noexcept nogil:
    cdef int i
    count_begin(n)
    for i in range(n_ops):
        count_in(n, ops[i].load.phase, C_READS_IN_FLIGHT, 1)
        count_in(n, ops[i].load.phase, C_BYTES_IN_FLIGHT, ops[i].asked)
    count_end(n)


cdef void count_settled(fc_counters *n, const fc_op *op) noexcept nogil:
    count_begin(n)
    count_in(n, op.load.phase, C_READS, 1)
    count_in(n, op.load.phase, C_READS_IN_FLIGHT, -1)
    count_in(n, op.load.phase, C_BYTES_IN_FLIGHT, -op.asked)
    count_in(n, op.load.phase, C_BYTES_SUBMITTED, op.submitted)
    if op.direct:
        count_in(n, op.load.phase, C_BYTES_DIRECT, op.submitted)
    count_end(n)


cdef inline bint may_cut(fc_core *c) noexcept nogil:
    """Whether there is something to cut; a guess whose turn it is gets its slot for that."""
    cdef fc_load *load = queue_due(&c.queue)
    while load != NULL and load.waiting:
        if crowded(c, load.key):
            return False
        guess_begin(c, load)
        load = queue_due(&c.queue)
    return load != NULL


cdef int port_take(void *ctx, fc_op **out, int room, int may_block) noexcept nogil:
    cdef fc_core *c = <fc_core *>ctx
    cdef fc_op *op
    cdef int n = 0
    pthread_mutex_lock(&c.mutex)
    if may_block:
        c.sleeping = 0                      # it will sleep on `work`: a kick besides would end its next sleep for nothing
    while True:
        while n < room and c.free_ops != NULL and may_cut(c) and queue_next(&c.queue, c.files, c.free_ops):
            op = c.free_ops
            c.free_ops = op.next
            op.next = NULL
            op.asked = op.nbytes
            if op.klass == FC_GUESS:
                op.begun = evidence_read_begins(&c.evidence, fc_now_ns())
            out[n] = op
            n += 1
        if n > 0:
            count_taken(&c.counters, out, n)
            break
        if c.closing and queue_empty(&c.queue):
            n = FC_STOP
            break
        if not may_block or c.poke:
            c.poke = 0                  # an engine that gets nothing looks at its own chores, and asks again
            break
        c.idle += 1
        pthread_cond_wait(&c.work, &c.mutex)
        c.idle -= 1
    c.sleeping = not may_block and n >= 0 and n < room
    pthread_mutex_unlock(&c.mutex)
    return n


cdef int port_settle(void *ctx, fc_op *op, int64_t res) noexcept nogil:
    cdef fc_core *c = <fc_core *>ctx
    cdef fc_load *load = op.load
    cdef int32_t ioprio = op.ioprio
    cdef int verdict = op_settle(op, res, c.direct_required)
    cdef fc_wakes later
    later.n = 0
    if op.ioprio != ioprio:
        fc_store32(&c.queue.ioprio[FC_DEMAND], 0)
        fc_store32(&c.queue.ioprio[FC_GUESS], 0)
    if verdict == FC_AGAIN and fc_load32(&op.cancel) == FC_CANCEL_NOT:
        return FC_AGAIN
    pthread_mutex_lock(&c.mutex)
    if fc_load32(&op.cancel) != FC_CANCEL_NOT and (verdict == FC_AGAIN or verdict == -ECANCELED):
        c.reads_stopped += verdict == -ECANCELED
        if load.error == 0:             # wanted again, meanwhile
            fc_store32(&op.cancel, FC_CANCEL_NOT)
            if verdict == -ECANCELED:
                op.submitted += op.nbytes
            pthread_mutex_unlock(&c.mutex)
            return FC_AGAIN
        verdict = FC_FINISHED
        load.torn = 1
    count_settled(&c.counters, op)
    queue_settled(&c.queue, op)
    if op.klass == FC_GUESS:
        evidence_read_ends(&c.evidence, load.place, load.klass == FC_DEMAND, op.begun, fc_now_ns(), op.charge)
    load.ops -= 1
    load.back_ns = max(load.back_ns, op.back_ns if op.back_ns > 0 else fc_now_ns())
    if verdict < 0 and (load.error == 0 or load.error == FC_ECANCELLED):
        load.error = -verdict
        load.error_file = <int32_t>(op.file - c.files)
        load.error_offset = op.offset
        load.error_wanted = op.expected
        load.error_got = max(res, 0)
        queue_unlink(&c.queue, load)        # what is not cut yet is not worth reading
    op.load = NULL
    op.next = c.free_ops
    c.free_ops = op
    if load.ops == 0 and not load.queued and load.torn and load.error == 0 and not c.closing:
        load.torn = load.extent = 0     # stopped, and wanted again before the last of its reads was over
        load.cut = 0
        queue_push(&c.queue, load)
    elif load.ops == 0 and not load.queued:
        if load.torn and load.error == 0:
            load.error = FC_ECLOSED
        land(c, load, &later)
    if c.idle > 0 and not queue_empty(&c.queue):
        pthread_cond_broadcast(&c.work)     # guesses that waited for their share
    pthread_mutex_unlock(&c.mutex)
    wake_all(&later)
    return FC_FINISHED


cdef int port_patience(void *ctx, fc_op **ops, int n) noexcept nogil:
    cdef fc_core *c = <fc_core *>ctx
    cdef fc_node *node
    cdef fc_wait *alone = NULL
    cdef int i
    cdef int32_t calm = n - 1           # all but the last: what there is to do then is done while that one is read
    pthread_mutex_lock(&c.mutex)
    if not c.sleeping:                  # kicked, or so full that it would not be
        calm = 1
    for i in range(n if calm > 1 else 0):
        node = <fc_node *>ops[i].load.waiters
        if node == NULL or node.next != NULL or node.wait.each or (alone != NULL and node.wait != alone):
            calm = 1
            break
        alone = node.wait
    pthread_mutex_unlock(&c.mutex)
    return max(calm, 1)


cdef void core_port(fc_core *c, fc_port *port) noexcept nogil:
    port.ctx = c
    port.patience = port_patience
    port.take = port_take
    port.settle = port_settle
