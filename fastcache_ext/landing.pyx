"""Landing: from a load's last completion to RESIDENT, or back to EMPTY; and the end of guesses that are not read at all.

Under the mutex, which monitor.pxd declares. Knows no Python. May import the plain modules below it.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memmove

from fastcache_ext.arena cimport fc_private, private_unref
from fastcache_ext.atomics cimport fc_add32, fc_load64, fc_store64
from fastcache_ext.counters cimport *
from fastcache_ext.evidence cimport evidence_dropped, evidence_gone, evidence_landed, evidence_wait_ends
from fastcache_ext.files cimport file_check
from fastcache_ext.ioqueue cimport (
    FC_DEMAND, FC_ECANCELLED, FC_ECHANGED, FC_ECHECKSUM, FC_ECLOSED, FC_ENOROOM, FC_GUESS, fc_extent, fc_file, fc_load,
    queue_unlink,
)
from fastcache_ext.monitor cimport (
    FC_MODE_DEMAND, FC_MODE_GUESS, FC_NODE_FAILED, FC_NODE_HELD, fc_core, fc_node, fc_wait, node_set,
)
from fastcache_ext.recorder cimport T_BEGUN, T_LANDED, note
from fastcache_ext.sums cimport sums_agree
from fastcache_ext.table cimport (
    FC_FROM_DEMAND, FC_FROM_PREFETCH, fc_table, table_abort, table_check, table_publish,
)
from fastcache_ext.threads cimport *
from fastcache_ext.waiting cimport waiting_begin, waiting_free

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


cdef void node_landed(fc_node *node, int error, const fc_load *load, fc_wakes *later) noexcept nogil:
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
    if fc_add32(&w.pending, -1) > 0 and not w.each:
        return
    if later != NULL and later.n < FC_WAKES:
        later.words[later.n] = &w.pending
        later.n += 1
    else:
        fc_futex_wake(&w.pending)


cdef void wake_all(fc_wakes *later) noexcept nogil:
    cdef int i
    for i in range(later.n):
        fc_futex_wake(later.words[i])       # reads nothing there: at worst it wakes a sleeper who looks and sleeps on


cdef inline bint was_dropped(int error) noexcept nogil:
    return error == FC_ECLOSED or error == FC_ECANCELLED or error == FC_ENOROOM


cdef void count_landing(fc_core *c, fc_load *load, int error) noexcept nogil:
    cdef fc_counters *n = &c.counters
    cdef int32_t layer = c.table.layer_of[load.key], phase = load.phase, p
    cdef bint dropped = was_dropped(error)
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
    finish_quietly(c, load, error, NULL)


cdef void finish_quietly(fc_core *c, fc_load *load, int error, fc_wakes *later) noexcept nogil:
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
        evidence_landed(&c.evidence, load.place, load.joins > 0, load.early, late_ns)
    elif load.origin == FC_FROM_PREFETCH:
        evidence_dropped(&c.evidence, load.place, was_dropped(error), late_ns)
    load.landing = 0
    if load.guess:
        c.guesses[c.table.cls_of[load.key]] -= 1
        c.guessed[c.table.cls_of[load.key]] -= not load.waiting
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
        node_landed(node, error, load, later)
        node = after
    if load.waiting:
        queue_unlink(&c.queue, load)
        waiting_free(c, load)
    elif load.slot < 0:
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
    """Outside the mutex, when all bytes arrived: are the files still the ones that were opened?

    A look that began after the last byte had come will do, whichever load it was for: of loads that come together, one looks.
    """
    cdef int32_t i, checked = -1
    cdef int changed, rc
    cdef int64_t now
    cdef fc_file *file
    cdef const fc_extent *x
    for i in range(load.n_extents):
        x = &load.extents[i]
        file = &c.files[x.file]
        if x.file != checked and file.memory == NULL and fc_load64(&file.looked_ns) <= load.back_ns:
            checked = x.file
            changed = 0
            now = fc_now_ns()
            rc = file_check(file, &changed)
            if rc != 0 or changed:
                load.error_file = x.file
                load.error_offset = x.offset
                return FC_ECHANGED if changed else rc
            fc_store64(&file.looked_ns, now)
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


cdef void land(fc_core *c, fc_load *load, fc_wakes *later) noexcept nogil:
    cdef int error = load.error
    if error != 0:
        finish_quietly(c, load, error, later)
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
    finish_quietly(c, load, error, later)


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
    if c.queue.head[FC_GUESS] != NULL:      # which may wait for those that hold slots to land
        if c.sleeping and c.kick != NULL:
            c.sleeping = 0
            c.kick(c.engine)
        pthread_cond_broadcast(&c.work)
    pthread_mutex_unlock(&c.mutex)
    return 1


# ---- guesses that wait

cdef bint guess_begin(fc_core *c, fc_load *load) noexcept nogil:
    cdef int cls = c.table.cls_of[load.key]
    cdef fc_load *after
    note(c.recorder, T_BEGUN, 0, 0, load.key)
    after = waiting_begin(c, load, FC_MODE_GUESS, load.phase, True)
    if after != NULL:
        if c.by_hand:
            queue_unlink(&c.queue, after)
        return True
    # If a later one found a slot after all, a demand for this one might evict it unread.
    while load != NULL:
        after = load.next
        if load.waiting and c.table.cls_of[load.key] == cls:
            finish(c, load, FC_ENOROOM)
        load = after
    return False


cdef void guesses_gone(fc_core *c) noexcept nogil:
    cdef int32_t place = evidence_gone(&c.evidence)
    while place >= 0:
        finish(c, &c.loads[place], FC_ECANCELLED)
        place = evidence_gone(&c.evidence)
