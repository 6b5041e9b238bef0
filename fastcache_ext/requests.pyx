"""Requests: hits, joins, misses; phases 1 and 2 of a batch. What follows a miss is in landing.pyx.

Every function takes and leaves the mutex, which monitor.pxd declares. Knows no Python. May import the plain modules below it.
"""
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc

from fastcache_ext.arena cimport fc_private, lease_take, private_ref, private_unref
from fastcache_ext.atomics cimport fc_add32, fc_load32
from fastcache_ext.counters cimport *
from fastcache_ext.evidence cimport (
    evidence_absent, evidence_admit, evidence_demand, evidence_issued, evidence_joined, evidence_used, evidence_wait_begins,
)
from fastcache_ext.ghosts cimport ghosts_hear
from fastcache_ext.ioqueue cimport (
    FC_DEMAND, FC_ECANCELLED, FC_ECLOSED, FC_ENOROOM, FC_GUESS, fc_load, load_cut, queue_promote, queue_push, queue_unlink,
)
from fastcache_ext.landing cimport finish, guesses_gone
from fastcache_ext.monitor cimport (
    FC_MODE_DEMAND, FC_MODE_GUESS, FC_NODE_DECLINED, FC_NODE_FAILED, FC_NODE_FLYING, FC_NODE_HELD,
    FC_NODE_NO_ROOM, fc_core, fc_node, fc_wait, node_is, node_set,
)
from fastcache_ext.recorder cimport (
    FC_AS_DECLINED, FC_AS_HIT, FC_AS_JOIN, FC_AS_MISS, FC_AS_NO_ROOM, T_REFUSED, T_REQUEST, T_RETRY, T_SERVED, note,
    note_batch, note_hits, note_request, note_single, record,
)
from fastcache_ext.room cimport room_for
from fastcache_ext.table cimport FC_FROM_DEMAND, FC_FROM_PREFETCH, FC_RESIDENT
from fastcache_ext.threads cimport *
from fastcache_ext.waiting cimport flying, waiting_begin, waiting_new


cdef void leave(fc_core *c) noexcept nogil:
    """Give the mutex up, and have the engine look at the queue."""
    cdef bint idle = c.idle > 0
    if c.sleeping and c.kick != NULL:
        c.sleeping = 0
        c.kick(c.engine)                    # close() frees the engine: while it cannot
    pthread_mutex_unlock(&c.mutex)
    if idle:
        pthread_cond_broadcast(&c.work)     # whom it wakes finds the mutex free


cdef inline void hear(fc_core *c, int32_t key, int32_t slot, int32_t layer) noexcept nogil:
    """A demand, in request order: the policy learns of it, and so do predictors and ghosts."""
    c.table.policy.request(&c.table.policy, key, slot)
    evidence_demand(&c.evidence, key, layer)
    if c.ghosts != NULL:
        ghosts_hear(c.ghosts, key, layer)


cdef inline bint on_held(const fc_core *c, int32_t slot, int32_t leases) noexcept nogil:
    """Whether the last of `leases` leases is on what somebody held already; a pin is nobody."""
    return leases > 1 + c.table.slots[slot].pinned


cdef inline void hit(fc_core *c, int32_t key, int32_t slot, bint held, bint asked) noexcept nogil:
    """Count a demand for a resident expert that was just leased for it; `asked`: the policy has heard of it."""
    cdef fc_counters *n = &c.counters
    cdef int32_t layer = c.table.layer_of[key]
    if not asked:
        hear(c, key, slot, layer)
    count_begin(n)
    count(n, C_REQUESTS, 1)
    count(n, C_HITS, 1)
    count_layer(n, layer, L_HITS, 1)
    if held:
        count(n, C_HITS_ON_HELD, 1)
    if c.table.unread[slot]:
        c.table.unread[slot] = 0
        if c.table.slots[slot].origin == FC_FROM_PREFETCH:
            count(n, C_FIRST_CONSUMPTIONS, 1)
            count_layer(n, layer, L_FIRST_CONSUMPTIONS, 1)
            count(n, C_UNREAD_RESIDENT, -1)
            evidence_used(&c.evidence, slot)
    count_end(n)


cdef int32_t core_hit(fc_core *c, int32_t key) noexcept nogil:
    cdef int32_t slot
    pthread_mutex_lock(&c.mutex)
    slot = c.table.slot_of[key]
    if slot >= 0 and c.table.slots[slot].state == FC_RESIDENT and not c.closing:
        hit(c, key, slot, note_single(c.recorder, key, on_held(c, slot, lease_take(c.arena, slot))), False)
        if c.evidence.gone > 0:
            guesses_gone(c)
    else:
        slot = -1
    pthread_mutex_unlock(&c.mutex)
    return slot


cdef bint core_hit_many(fc_core *c, const int32_t *keys, int n, int32_t *slots) noexcept nogil:
    cdef int i, j
    cdef bint all_here, held
    cdef uint64_t *records
    pthread_mutex_lock(&c.mutex)
    all_here = not c.closing
    for i in range(n):
        slots[i] = c.table.slot_of[keys[i]]
        if not all_here or slots[i] < 0 or c.table.slots[slots[i]].state != FC_RESIDENT:
            all_here = False
            break
        for j in range(i):
            if keys[j] == keys[i]:          # duplicates are one request: the slow path's
                all_here = False
    if all_here:
        records = note_hits(c.recorder, n)
        for i in range(n):
            held = on_held(c, slots[i], lease_take(c.arena, slots[i]))
            if records != NULL:
                records[i] = record(T_REQUEST, FC_AS_HIT, held, keys[i])
            else:
                held = note_request(c.recorder, FC_AS_HIT, keys[i], held)
            hit(c, keys[i], slots[i], held, False)
        if c.evidence.gone > 0:
            guesses_gone(c)
    pthread_mutex_unlock(&c.mutex)
    return all_here


cdef void attach(fc_wait *w, fc_node *node, fc_load *load) noexcept nogil:
    node.load = load
    node_set(node, FC_NODE_FLYING)
    node.slot = load.slot
    node.generation = load.generation
    node.prev = NULL
    node.next = <fc_node *>load.waiters
    if node.next != NULL:
        node.next.prev = node
    load.waiters = node
    load.waits += 1
    fc_add32(&w.pending, 1)
    if w.mode != FC_MODE_GUESS:
        if load.slot >= 0:
            lease_take(w.arena, load.slot)
        else:
            node.priv = <fc_private *>load.priv
            private_ref(node.priv)


cdef void hold_resident(fc_core *c, fc_wait *w, fc_node *node, int32_t slot) noexcept nogil:
    node.was_resident = 1
    node.slot = slot
    node_set(node, FC_NODE_HELD)
    node.data = c.arena.addr[slot]
    node.generation = c.table.slots[slot].generation
    if w.mode != FC_MODE_GUESS:
        lease_take(c.arena, slot)


cdef void join(fc_core *c, fc_wait *w, fc_node *node, fc_load *load) noexcept nogil:
    cdef fc_counters *n = &c.counters
    cdef fc_node *other
    if w.mode == FC_MODE_DEMAND:
        if not node.asked:
            hear(c, node.key, load.slot, c.table.layer_of[node.key])
            node.asked = 1
        count_begin(n)
        count(n, C_REQUESTS, 1)
        count(n, C_JOINS, 1)
        count(n, C_JOINS_IN_FLIGHT, 1)
        count_layer(n, c.table.layer_of[node.key], L_JOINS, 1)
        if load.origin == FC_FROM_PREFETCH:
            count(n, C_LATE_JOINS, 1)
            evidence_joined(&c.evidence, load.place)
        count_end(n)
        if load.joins == 0:
            load.early = 0 if load.torn else load_cut(load)
        load.joins += 1
        load.joined[n.phase] += 1
        other = <fc_node *>load.waiters
        while other != NULL:                # few: the handles that watch this load
            if other.wait.mode == FC_MODE_GUESS:
                other.late = 1
            other = other.next
    if load.error == FC_ECANCELLED:
        load.error = 0                      # cancelled but not gone: wanted after all
        if load.extent < load.n_extents and not load.torn:     # else it is read anew, once its reads are over
            queue_push(&c.queue, load)
    node.since_ns = fc_now_ns()
    node.phase = n.phase
    if w.mode != FC_MODE_GUESS:
        if load.klass == FC_GUESS:
            evidence_wait_begins(&c.evidence, node.since_ns)
        queue_promote(&c.queue, load)
    attach(w, node, load)


cdef fc_load *under_way(fc_core *c, fc_wait *w, fc_node *node) noexcept nogil:
    """The load to join, or NULL. A guess that waits gets its slot now if this is none; if it can have none, it is over, and the
    node's status says so."""
    cdef fc_load *load = flying(c, node.key)
    cdef fc_load *begun
    if load == NULL or not load.waiting or w.mode == FC_MODE_GUESS:
        return load
    if w.mode == FC_MODE_DEMAND and not node.asked:
        hear(c, node.key, -1, c.table.layer_of[node.key])               # first, as at a miss
        node.asked = 1
    begun = waiting_begin(c, load, w.mode, c.counters.phase, False)
    if begun == NULL:
        finish(c, load, FC_ENOROOM)
        node_set(node, FC_NODE_NO_ROOM)
    elif c.by_hand:
        queue_unlink(&c.queue, begun)
    return begun


cdef bint start(fc_core *c, fc_wait *w, fc_node *node, fc_private *priv) noexcept nogil:
    """Begin the load of a key that is neither resident nor on its way. False: no room, and no private buffer given."""
    cdef fc_counters *n = &c.counters
    cdef int32_t key = node.key, slot = -1, i, displaced = -1
    cdef bint demand = w.mode == FC_MODE_DEMAND
    cdef int origin = FC_FROM_DEMAND if demand else FC_FROM_PREFETCH
    cdef fc_load *load = NULL
    if demand and not node.asked:
        hear(c, key, -1, c.table.layer_of[key])
        node.asked = 1
    if w.mode == FC_MODE_GUESS and c.ext_first[key + 1] > c.ext_first[key]:
        load = waiting_new(c, key)
    else:
        slot = room_for(c, key, origin, w.mode, c.counters.phase, &displaced)
    if slot >= 0:
        load = &c.loads[slot]
        load.place = slot
        load.waiting = 0
    elif priv != NULL:
        load = <fc_load *>calloc(1, sizeof(fc_load))
        if load != NULL:
            load.place = -1
    if load == NULL:
        node_set(node, FC_NODE_NO_ROOM)
        return False
    c.generation += not load.waiting        # it gets its own when it gets a slot: trades tell by these how long ago a load was
    count_begin(n)
    if demand:
        count(n, C_REQUESTS, 1)
        count(n, C_MISSES, 1)
        count(n, C_MISSES_IN_FLIGHT, 1)
        count_layer(n, c.table.layer_of[key], L_MISSES, 1)
    else:
        count(n, C_PREFETCH_ISSUED, 1)
        count(n, C_PREFETCH_IN_FLIGHT, 1)
    count_end(n)
    load.key = key
    load.slot = slot
    load.priv = NULL
    load.extents = c.extents + c.ext_first[key]
    load.n_extents = c.ext_first[key + 1] - c.ext_first[key]
    load.klass = FC_GUESS if w.mode == FC_MODE_GUESS else FC_DEMAND
    load.guess = w.mode == FC_MODE_GUESS
    if load.guess:
        c.guesses[c.table.cls_of[key]] += 1
        c.guessed[c.table.cls_of[key]] += not load.waiting
    load.origin = origin
    load.generation = 0 if load.waiting else c.generation
    load.queued = load.landing = load.moves = load.ops = load.torn = load.extent = load.error = load.joins = load.waits = 0
    load.joined[0] = load.joined[1] = load.joined[2] = 0
    load.phase = node.phase = n.phase
    load.cut = load.payload = load.early = load.back_ns = 0
    load.waiters = NULL
    load.prev = load.next = load.older = load.newer = NULL
    for i in range(load.n_extents):
        load.payload += load.extents[i].nbytes
        load.moves |= load.extents[i].shift > 0
    if slot >= 0:
        load.dest = c.arena.addr[slot]
        load.buf_index = c.arena.piece[slot]
    elif load.waiting:
        load.dest = NULL
        load.buf_index = -1
    else:
        load.priv = priv
        private_ref(priv)                   # the load's own, besides the caller's
        load.dest = priv.data
        load.buf_index = -1
        load.newer = c.privates
        if c.privates != NULL:
            c.privates.older = load
        c.privates = load
    node.issued = 1
    node.since_ns = fc_now_ns()
    if load.klass == FC_DEMAND:
        evidence_wait_begins(&c.evidence, node.since_ns)
    if demand:
        evidence_absent(&c.evidence, key, load.payload)
    else:
        evidence_issued(&c.evidence, w.predictor, load.place, c.table.layer_of[key], key, load.payload, displaced)
    attach(w, node, load)
    if load.waiting or (load.n_extents > 0 and not c.by_hand):
        queue_push(&c.queue, load)
    elif not c.by_hand:                     # else a caller that waits will claim it
        finish(c, load, 0)
    return True


cdef int core_begin(fc_core *c, fc_wait *w) noexcept nogil:
    cdef fc_node *node
    cdef fc_load *load
    cdef int32_t slot, i, guesses = 0
    cdef bint started, admitted, held
    pthread_mutex_lock(&c.mutex)
    if c.closing:
        pthread_mutex_unlock(&c.mutex)
        return -FC_ECLOSED
    c.used = 1
    if w.n > 0:
        note_batch(c.recorder, w.mode, w.predictor if w.mode == FC_MODE_GUESS else 0, w.n)
    # Phase 1: what is here is leased before anything is evicted, so no batch gives up its own members.
    for i in range(w.n):
        node = &w.nodes[i]
        node.phase = c.counters.phase
        slot = c.table.slot_of[node.key]
        if slot >= 0 and c.table.slots[slot].state == FC_RESIDENT:
            hold_resident(c, w, node, slot)
    # Phase 2, in the order of the request: count, join, reserve, queue.
    for i in range(w.n):
        node = &w.nodes[i]
        if node_is(node, FC_NODE_HELD):
            if w.mode == FC_MODE_DEMAND:
                held = on_held(c, node.slot, fc_load32(&c.arena.leases[node.slot]))
                hit(c, node.key, node.slot, note_request(c.recorder, FC_AS_HIT, node.key, held), False)
                node.asked = 1
            else:
                note_request(c.recorder, FC_AS_HIT, node.key, 0)
            continue
        load = under_way(c, w, node)
        if load != NULL:
            note_request(c.recorder, FC_AS_JOIN, node.key, 0)
            join(c, w, node, load)
            continue
        guesses += 1
        admitted = w.mode != FC_MODE_GUESS or evidence_admit(&c.evidence, w.predictor, guesses - 1, w.n)
        if c.recorder != NULL and c.recorder.admitted != NULL:
            admitted = c.recorder.admitted(c.recorder)
        if admitted:
            started = not node_is(node, FC_NODE_NO_ROOM) and start(c, w, node, NULL)    # one search and one refusal per request
            note_request(c.recorder, FC_AS_MISS if started else FC_AS_NO_ROOM, node.key, 0)
        else:
            node_set(node, FC_NODE_DECLINED)
            note_request(c.recorder, FC_AS_DECLINED, node.key, 0)
    if c.evidence.gone > 0:
        guesses_gone(c)
    leave(c)
    return 0


cdef int core_retry(fc_core *c, fc_wait *w, fc_node *node, fc_private *priv) noexcept nogil:
    cdef int32_t slot
    cdef fc_load *load
    cdef bint started, held
    cdef int rc = 0
    pthread_mutex_lock(&c.mutex)
    slot = c.table.slot_of[node.key]
    if not c.closing:
        note(c.recorder, T_RETRY, 0, priv != NULL, node.key)
    if c.closing:
        rc = -FC_ECLOSED
    elif slot >= 0 and c.table.slots[slot].state == FC_RESIDENT:
        hold_resident(c, w, node, slot)
        held = on_held(c, slot, fc_load32(&c.arena.leases[slot]))
        hit(c, node.key, slot, note(c.recorder, T_SERVED, FC_AS_HIT, held, node.key), True)     # asked when it found no room
    else:
        load = under_way(c, w, node)
        if load != NULL:
            note(c.recorder, T_SERVED, FC_AS_JOIN, 0, node.key)
            join(c, w, node, load)
        else:
            started = start(c, w, node, priv)
            note(c.recorder, T_SERVED, FC_AS_MISS if started else FC_AS_NO_ROOM, 0, node.key)
    leave(c)
    if priv != NULL:
        private_unref(priv)
    return rc


cdef void core_refuse(fc_core *c, fc_wait *w, fc_node *node, int error) noexcept nogil:
    pthread_mutex_lock(&c.mutex)
    node_set(node, FC_NODE_FAILED)
    node.error = error
    note(c.recorder, T_REFUSED, 0, error, node.key)
    count_begin(&c.counters)
    count(&c.counters, C_REQUESTS, 1)
    count(&c.counters, C_MISSES, 1)
    count(&c.counters, C_PASS_THROUGH_FAILURES, 1)
    count_error(&c.counters, c.counters.phase, error)
    count_layer(&c.counters, c.table.layer_of[node.key], L_MISSES, 1)
    count_end(&c.counters)
    pthread_mutex_unlock(&c.mutex)
