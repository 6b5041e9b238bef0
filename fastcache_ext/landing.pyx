"""Landing: from a read's completion to RESIDENT, or back to EMPTY; and the port through which engines take and settle reads.

Under the mutex, which monitor.pxd declares. Knows no Python. May import the plain modules below it.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memmove

from fastcache_ext.arena cimport fc_private, private_unref
from fastcache_ext.atomics cimport fc_add32, fc_load32, fc_store32
from fastcache_ext.counters cimport *
from fastcache_ext.evidence cimport (
    evidence_dropped, evidence_landed, evidence_read_begins, evidence_read_ends, evidence_wait_ends,
)
from fastcache_ext.files cimport file_check
from fastcache_ext.ioqueue cimport (
    FC_AGAIN, FC_CANCEL_NOT, FC_DEMAND, FC_ECANCELLED, FC_ECHANGED, FC_ECHECKSUM, FC_ECLOSED, FC_FINISHED, FC_GUESS, FC_STOP,
    fc_extent, fc_load, fc_op, fc_port, op_settle, queue_empty, queue_next, queue_push,
    queue_settled, queue_unlink,
)
from fastcache_ext.monitor cimport (
    FC_MODE_DEMAND, FC_NODE_FAILED, FC_NODE_HELD, fc_core, fc_node, fc_wait, node_set,
)
from fastcache_ext.recorder cimport T_LANDED, note
from fastcache_ext.sums cimport sums_agree
from fastcache_ext.table cimport (
    FC_FROM_DEMAND, FC_FROM_PREFETCH, fc_table, table_abort, table_check, table_publish,
)
from fastcache_ext.threads cimport *

cdef extern from "errno.h" nogil:
    int ECANCELED

cdef extern from *:
    """
    #include <stdio.h>
    #include <stdlib.h>
    #ifdef FC_CHECK
    #define fc_assert_table(t) do { int _rc = table_check_hook(t); if (_rc) { \\
        fprintf(stderr, "fastcache: invariant %d broken\\n", _rc); abort(); } } while (0)
    #else
    #define fc_assert_table(t) do { (void)(t); } while (0)
    #endif
    static int (*table_check_hook)(void *) = 0;
    """
    void fc_assert_table(void *t) noexcept nogil
    int (*table_check_hook)(void *) noexcept nogil


cdef int check_hook(void *t) noexcept nogil:
    return table_check(<fc_table *>t)


table_check_hook = check_hook


cdef void node_landed(fc_node *node, int error, const fc_load *load) noexcept nogil:
    cdef fc_wait *w = node.wait
    node.load = NULL
    node.error = error
    node.landed = NULL
    if error == 0:
        node.data = load.dest
    else:
        node.slot = -1
        node.error_file = load.error_file
        node.error_offset = load.error_offset
        node.error_wanted = load.error_wanted
        node.error_got = load.error_got
    if w.landed_last != NULL:
        w.landed_last.landed = node
    else:
        w.landed_first = node
    w.landed_last = node
    node_set(node, FC_NODE_HELD if error == 0 else FC_NODE_FAILED)
    if fc_add32(&w.pending, -1) == 0 or w.each:
        fc_futex_wake(&w.pending)


cdef void count_landing(fc_core *c, fc_load *load, int error) noexcept nogil:
    cdef fc_counters *n = &c.counters
    cdef int32_t layer = c.table.layer_of[load.key], phase = load.phase, p
    cdef bint dropped = error == FC_ECLOSED or error == FC_ECANCELLED
    for p in range(FC_PHASES if load.joins > 0 else 0):
        count_in(n, p, C_JOINS_IN_FLIGHT, -load.joined[p])
        count_in(n, p, C_JOINS_OK if error == 0 else C_JOIN_FAILURES, load.joined[p])
    if error == 0:
        count_in(n, phase, C_BYTES_READ, load.payload)
        count_layer_in(n, phase, layer, L_BYTES_READ, load.payload)
        if load.slot >= 0:
            count_in(n, phase, C_RESIDENT_EXPERTS, 1)
    else:
        count_error(n, phase, error)
    if load.origin == FC_FROM_PREFETCH:
        count_in(n, phase, C_PREFETCH_IN_FLIGHT, -1)
        if error == 0:
            count_in(n, phase, C_PREFETCH_LOADS, 1)
            count_in(n, phase, C_PREFETCH_BYTES, load.payload)
            count_layer_in(n, phase, layer, L_PREFETCH_LOADS, 1)
            count_in(n, phase, C_LATE_JOINS_OK if load.joins > 0 else C_UNREAD_RESIDENT, 1)
        else:
            count_in(n, phase, C_PREFETCH_CANCELLED if dropped else C_PREFETCH_FAILURES, 1)
        return
    count_in(n, phase, C_MISSES_IN_FLIGHT, -1)
    if error == 0:
        count_in(n, phase, C_DEMAND_LOADS if load.slot >= 0 else C_PASS_THROUGHS, 1)
        count_layer_in(n, phase, layer, L_DEMAND_LOADS if load.slot >= 0 else L_PASS_THROUGHS, 1)
        if load.slot < 0:
            count_in(n, phase, C_PASS_THROUGH_BYTES, load.payload)
    elif dropped:
        count_in(n, phase, C_DEMAND_CANCELLED, 1)
    else:
        count_in(n, phase, C_DEMAND_FAILURES if load.slot >= 0 else C_PASS_THROUGH_FAILURES, 1)


cdef void finish(fc_core *c, fc_load *load, int error) noexcept nogil:
    """RESIDENT or EMPTY, and everybody who waits learns of it. The mutex is held; no read aims at the memory any more."""
    cdef fc_node *node = <fc_node *>load.waiters
    cdef fc_node *after
    cdef int64_t now = fc_now_ns(), late_ns = 0
    cdef int32_t consumers = 0
    note(c.recorder, T_LANDED, error != 0, error, load.key)
    count_begin(&c.counters)
    count_landing(c, load, error)
    while node != NULL:
        if node.wait.mode == FC_MODE_DEMAND:
            consumers += 1
            count_wait(&c.counters, node.phase, c.table.layer_of[load.key], now - node.since_ns)
            if load.origin == FC_FROM_PREFETCH:
                late_ns += now - node.since_ns
                count_in(&c.counters, node.phase, C_LATE_JOIN_WAIT_NS, now - node.since_ns)
        node = node.next
    count_end(&c.counters)
    if load.klass == FC_DEMAND:
        evidence_wait_ends(&c.evidence, now, load.payload - load.early if error == 0 else 0)
    if load.origin == FC_FROM_PREFETCH and error == 0:
        evidence_landed(&c.evidence, load.slot, load.joins > 0, load.early, late_ns)
    elif load.origin == FC_FROM_PREFETCH:
        evidence_dropped(&c.evidence, load.slot, error == FC_ECLOSED or error == FC_ECANCELLED, late_ns)
    load.landing = 0
    if load.guess:
        c.guessed[c.table.cls_of[load.key]] -= 1
    if load.slot >= 0:
        if error == 0:
            # A demand load is born consumed, unless everyone who wanted it has left.
            if load.joins > 0 or (load.origin == FC_FROM_DEMAND and consumers > 0):
                c.table.unread[load.slot] = 0
            table_publish(&c.table, load.slot)
        else:
            table_abort(&c.table, load.slot)
    node = <fc_node *>load.waiters
    load.waiters = NULL
    load.waits = 0
    while node != NULL:
        after = node.next
        if error != 0 and node.priv != NULL:
            private_unref(node.priv)
            node.priv = NULL
        node_landed(node, error, load)
        node = after
    if load.slot < 0:
        if load.older != NULL:
            load.older.newer = load.newer
        else:
            c.privates = load.newer
        if load.newer != NULL:
            load.newer.older = load.older
        private_unref(<fc_private *>load.priv)
        free(load)
    fc_assert_table(&c.table)


cdef int look_after(fc_core *c, fc_load *load) noexcept nogil:
    """Outside the mutex, when all bytes arrived: are the files still the ones that were opened? Then move what is misaligned."""
    cdef int32_t i, checked = -1
    cdef int changed, rc
    cdef const fc_extent *x
    for i in range(load.n_extents):
        x = &load.extents[i]
        if x.file != checked and c.files[x.file].memory == NULL:
            checked = x.file
            changed = 0
            rc = file_check(&c.files[x.file], &changed)
            if rc != 0 or changed:
                load.error_file = x.file
                load.error_offset = x.offset
                return FC_ECHANGED if changed else rc
    return 0


cdef void move_extents(fc_core *c, fc_load *load) noexcept nogil:
    cdef const fc_extent *x
    cdef uint8_t *at
    cdef int32_t i
    for i in range(load.n_extents):
        x = &load.extents[i]
        if x.shift > 0:
            at = load.dest + x.place + x.offset % c.files[x.file].align
            memmove(at - x.shift, at, <size_t>x.nbytes)


cdef int put_right(fc_core *c, fc_load *load) noexcept nogil:
    """Outside the mutex, when all bytes are the files': move what is misaligned, then hold them to their checksum."""
    cdef uint32_t wanted = 0, got = 0
    if load.moves:
        move_extents(c, load)
    if c.sums == NULL or load.n_extents == 0 or sums_agree(c.sums, load.key, load.dest, &wanted, &got):
        return 0
    load.error_file = load.extents[0].file
    load.error_offset = load.extents[0].offset
    load.error_wanted = wanted
    load.error_got = got
    return FC_ECHECKSUM


cdef void land(fc_core *c, fc_load *load) noexcept nogil:
    """All reads of `load` are over. The mutex is held, and left in between."""
    cdef int error = load.error
    if error != 0:
        finish(c, load, error)
        return
    load.landing = 1
    pthread_mutex_unlock(&c.mutex)
    error = look_after(c, load)
    if error == 0 and (load.moves or c.sums != NULL):
        if not c.moves_inline:
            pthread_mutex_lock(&c.mutex)
            load.next = c.to_move           # in no queue any more
            c.to_move = load
            pthread_cond_signal(&c.chores)
            return
        error = put_right(c, load)
    pthread_mutex_lock(&c.mutex)
    load.error = error
    finish(c, load, error)


cdef int move_some(fc_core *c) noexcept nogil:
    cdef fc_load *load
    cdef int error
    pthread_mutex_lock(&c.mutex)
    load = c.to_move
    if load == NULL:
        pthread_mutex_unlock(&c.mutex)
        return 0
    c.to_move = load.next
    load.next = NULL
    pthread_mutex_unlock(&c.mutex)
    error = put_right(c, load)
    pthread_mutex_lock(&c.mutex)
    load.error = error
    finish(c, load, error)
    pthread_mutex_unlock(&c.mutex)
    return 1


# ---- the port: what an engine calls; both functions take and leave the mutex

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


cdef int port_take(void *ctx, fc_op **out, int room, int may_block) noexcept nogil:
    cdef fc_core *c = <fc_core *>ctx
    cdef fc_op *op
    cdef int n = 0
    pthread_mutex_lock(&c.mutex)
    if may_block:
        c.sleeping = 0                      # it will sleep on `work`: a kick besides would end its next sleep for nothing
    while True:
        while n < room and c.free_ops != NULL and queue_next(&c.queue, c.files, c.free_ops):
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
        evidence_read_ends(&c.evidence, load.slot, load.klass == FC_DEMAND, op.begun, fc_now_ns(), op.charge)
    load.ops -= 1
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
        land(c, load)
    if c.idle > 0 and not queue_empty(&c.queue):
        pthread_cond_broadcast(&c.work)     # guesses that waited for their share
    pthread_mutex_unlock(&c.mutex)
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


cdef void landing_port(fc_core *c, fc_port *port) noexcept nogil:
    port.ctx = c
    port.patience = port_patience
    port.take = port_take
    port.settle = port_settle
