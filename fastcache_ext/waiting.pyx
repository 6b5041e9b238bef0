"""Guesses that wait for their turn, which cost nothing but a place in the queue; and the moment when they get a slot.

A store has as many places for them as slots, so that a read expert is never given up for a guess that may not be read for long. Its
load moves from there into a slot's, with whoever waits for it. Knows no Python, and nothing of how reads end. May import the plain
modules below monitor, of which it knows the structs alone.
"""
from libc.stdint cimport int32_t

from fastcache_ext.evidence cimport evidence_moved
from fastcache_ext.ioqueue cimport queue_moved
from fastcache_ext.monitor cimport fc_node
from fastcache_ext.room cimport room_for
from fastcache_ext.table cimport FC_INFLIGHT

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
