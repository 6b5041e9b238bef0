"""Guesses that wait for their turn, which cost nothing but a place in the queue; and the moment when they get a slot.

A store has as many places for them as slots, so that a read expert is never given up for a guess that may not be read for long. Its
load moves from there into a slot's, with whoever waits for it. Knows no Python, and nothing of how reads end. May import the plain
modules below monitor, of which it knows the structs alone.
"""
from libc.stdint cimport int32_t

from fastcache_ext.counters cimport *
from fastcache_ext.evidence cimport evidence_moved, evidence_wasted
from fastcache_ext.ioqueue cimport queue_moved
from fastcache_ext.monitor cimport fc_node
from fastcache_ext.recorder cimport T_EVICTED, note
from fastcache_ext.table cimport FC_FROM_PREFETCH, FC_INFLIGHT, table_reserve

cdef enum:
    CROWD = 8               # guesses evict while they hold less than one slot in so many ...
    FEW = 4                 # ... or than so many, in a small cache, if that is less than half of it


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
    if cls >= c.arena.n_classes or c.guesses[cls] >= c.arena.class_first[cls + 1] - c.arena.class_first[cls]:
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
    cdef fc_evicted evicted
    cdef fc_load *moved
    cdef fc_node *node
    cdef int32_t slot = table_reserve(&c.table, load.key, load.origin, mode, c.generation + 1, &evicted)
    if slot < 0:
        return NULL
    c.generation += 1
    count_begin(&c.counters)
    made_room(c, slot, &evicted, phase)
    count_end(&c.counters)
    evidence_moved(&c.evidence, load.place, slot, evicted.key if guilty else -1)
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


cdef bint crowded(const fc_core *c, int32_t key) noexcept nogil:
    cdef int cls = c.table.cls_of[key]
    cdef int32_t slots = c.arena.class_first[cls + 1] - c.arena.class_first[cls]
    if c.table.free_head[cls] >= 0 or c.guessed[cls] == 0:
        return False
    return c.guessed[cls] >= min(max(slots // CROWD, <int32_t>FEW), slots // 2)


cdef void made_room(fc_core *c, int32_t slot, const fc_evicted *evicted, int phase) noexcept nogil:
    cdef fc_counters *n = &c.counters
    cdef int32_t layer
    if evicted.key < 0:
        return
    layer = c.table.layer_of[evicted.key]
    note(c.recorder, T_EVICTED, evicted.unread | evicted.origin << 1, 0, evicted.key)
    count_in(n, phase, C_EVICTIONS, 1)
    count_in(n, phase, C_RESIDENT_EXPERTS, -1)
    count_layer_in(n, phase, layer, L_EVICTIONS, 1)
    if evicted.unread and evicted.origin == FC_FROM_PREFETCH:
        count_in(n, phase, C_WASTED, 1)
        count_layer_in(n, phase, layer, L_WASTED, 1)
        count_in(n, phase, C_UNREAD_RESIDENT, -1)
        evidence_wasted(&c.evidence, slot)
