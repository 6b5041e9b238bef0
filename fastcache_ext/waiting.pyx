"""Guesses that wait for their turn, which cost nothing but a place in the queue; and the moment when they get a slot.

A store has as many places for them as slots, so that a read expert is never given up for a guess that may not be read for long. Its
load moves from there into a slot's, with whoever waits for it. Knows no Python, and nothing of how reads end. May import the plain
modules below monitor, of which it knows the structs alone.
"""
from libc.stdint cimport int32_t

from fastcache_ext.atomics cimport fc_load32
from fastcache_ext.evidence cimport evidence_moved, fc_evidence
from fastcache_ext.ioqueue cimport FC_DEMAND, FC_GUESS, queue_moved
from fastcache_ext.monitor cimport FC_MODE_GUESS, FC_NODE_FLYING, fc_node, node_is
from fastcache_ext.room cimport room_for
from fastcache_ext.table cimport FC_FROM_PREFETCH, FC_INFLIGHT

cdef fc_load *flying(fc_core *c, int32_t key) noexcept nogil:
    cdef int32_t slot = c.table.slot_of[key]
    cdef fc_load *load
    if slot >= 0:
        return &c.loads[slot] if c.table.slots[slot].state == FC_INFLIGHT else NULL
    if c.place_of[key] >= 0:
        return &c.loads[c.place_of[key]]
    load = c.privates
    while load != NULL and load.key != key:
        load = load.newer
    return load


cdef fc_load *waiting_new(fc_core *c, int32_t key) noexcept nogil:
    cdef int cls = c.table.cls_of[key]
    cdef fc_load *load = c.places
    if cls >= c.arena.n_classes or load == NULL or c.guesses[cls] >= c.table.n_of[cls]:
        return NULL
    c.places = load.next
    c.place_of[key] = load.place
    load.waiting = 1
    return load


cdef void waiting_free(fc_core *c, fc_load *load) noexcept nogil:
    c.place_of[load.key] = -1
    load.waiting = 0
    load.next = c.places
    c.places = load


cdef fc_load *waiting_begin(fc_core *c, fc_load *load, int mode, int phase, bint guilty) noexcept nogil:
    cdef fc_load *moved
    cdef fc_node *node
    cdef int32_t displaced
    cdef int32_t slot = room_for(c, load.key, load.origin, mode, phase, &displaced)
    if slot < 0:
        return NULL
    c.generation += 1
    evidence_moved(&c.evidence, load.place, slot, displaced if guilty else -1)
    moved = &c.loads[slot]
    moved[0] = load[0]
    moved.waiting = 0
    moved.place = moved.slot = slot
    moved.generation = c.generation
    moved.dest = c.arena.addr[slot]
    moved.buf_index = c.arena.piece[slot]
    queue_moved(&c.queue, load, moved)
    node = <fc_node *>moved.waiters
    while node != NULL:
        node.load = moved
        node.slot = slot
        node.generation = moved.generation
        node = node.next
    c.guessed[c.table.cls_of[load.key]] += 1
    waiting_free(c, load)
    return moved


# ---- what holds whenever the mutex is free

cdef int load_check(const fc_core *c, const fc_load *load, int32_t key) noexcept nogil:
    cdef const fc_node *node = <const fc_node *>load.waiters
    cdef const fc_node *before = NULL
    cdef int32_t waits = 0, leases = 1
    if load.key != key or (load.waiting and (load.slot >= 0 or load.ops > 0 or load.error != 0 or load.landing or not load.queued
                                             or load.klass != FC_GUESS or not load.guess)):
        return 801
    while node != NULL and waits <= load.waits:
        if node.load != load or node.prev != before or node.key != key or not node_is(node, FC_NODE_FLYING):
            return 802
        if node.slot != load.slot or node.generation != load.generation:
            return 803
        if node.wait.mode != FC_MODE_GUESS and (load.klass == FC_GUESS or (load.slot < 0 and node.priv != load.priv)):
            return 804
        leases += node.wait.mode != FC_MODE_GUESS
        waits += 1
        before = node
        node = node.next
    if waits != load.waits:
        return 805
    return 806 if load.slot >= 0 and fc_load32(&c.arena.leases[load.slot]) != leases else 0


cdef int queue_check(const fc_core *c, int klass) noexcept nogil:
    cdef const fc_load *load = c.queue.head[klass]
    cdef const fc_load *before = NULL
    cdef int32_t met = 0
    while load != NULL:
        if load.prev != before or not load.queued or load.klass != klass or load.landing or load.error != 0:
            return 807
        if flying(<fc_core *>c, load.key) != load or (load.slot >= 0 and before != NULL and before.waiting):
            return 808
        met += load.waiting
        before = load
        load = load.next
    if c.queue.tail[klass] != before:
        return 809
    load = c.places
    while load != NULL and met <= c.table.n_slots:
        met += klass == FC_GUESS
        load = load.next
    return 0 if met == (c.table.n_slots if klass == FC_GUESS else 0) else 810


cdef int lists_check(const fc_core *c) noexcept nogil:
    cdef const fc_evidence *e = &c.evidence
    cdef int32_t layer, i, before, n = 0, key
    for layer in range(e.n_layers):
        i = e.head[layer]
        before = -1 - layer
        while i >= 0:
            if i >= 2 * e.n_slots or e.prev[i] != before or n > 2 * e.n_slots:
                return 811
            key = c.table.key_of[i] if i < e.n_slots else c.loads[i].key
            if key < 0 or c.table.layer_of[key] != layer or (i >= e.n_slots and not c.loads[i].waiting):
                return 812
            if i < e.n_slots and not (c.table.unread[i] and c.table.slots[i].origin == FC_FROM_PREFETCH):
                return 813
            n += 1
            before = i
            i = e.next[i]
    return 0 if n == e.watched and e.gone == 0 and e.head[e.n_layers] < 0 else 814


cdef int waiting_check(const fc_core *c) noexcept nogil:
    cdef const fc_load *load
    cdef int32_t i, s, demands = 0
    cdef int32_t guesses[256]
    cdef int32_t guessed[256]
    cdef int rc = 0
    for i in range(256):
        guesses[i] = guessed[i] = 0
    for i in range(c.table.n_keys):
        s = c.table.slot_of[i]
        if c.place_of[i] >= 0 and (s >= 0 or not c.loads[c.place_of[i]].waiting or c.loads[c.place_of[i]].place != c.place_of[i]):
            return 815
        load = flying(<fc_core *>c, i)
        if load == NULL or rc != 0:
            continue
        rc = load_check(c, load, i)
        if load.slot >= 0 and (load.waiting or load.slot != s or load.place != s):
            return 816
        guesses[c.table.cls_of[i]] += load.guess
        guessed[c.table.cls_of[i]] += load.guess - load.waiting
        demands += load.klass == FC_DEMAND
    for i in range(16):
        if guesses[i] != c.guesses[i] or guessed[i] != c.guessed[i]:
            return 817
    if rc == 0 and demands != c.evidence.waiting:
        return 818
    for i in range(2):
        rc = rc if rc != 0 else queue_check(c, i)
    return rc if rc != 0 else lists_check(c)
