"""policy="auto": takes the heard traffic to the ghosts, and changes the store's policy when they say so.

Knows no Python. May import libc, arena, ioqueue, policy, table, monitor, ghosts and threads.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint16_t
from libc.stdlib cimport calloc, free

from fastcache_ext.arena cimport arena_ref, arena_unref, fc_arena
from fastcache_ext.ghosts cimport GHOSTS_PIECE, fc_ghosts, ghosts_digest, ghosts_take, ghosts_used
from fastcache_ext.ioqueue cimport FC_ECLOSED
from fastcache_ext.monitor cimport fc_core
from fastcache_ext.policy cimport fc_policy, policy_init
from fastcache_ext.recorder cimport T_MOVED, T_SWITCH, note
from fastcache_ext.table cimport fc_table, table_switch
from fastcache_ext.threads cimport pthread_mutex_lock, pthread_mutex_unlock

cdef enum:
    AGES = 1 << 16          # visits that an expert's tag can tell apart


cdef void ghosts_work(fc_core *c, bint everything) noexcept nogil:
    cdef fc_ghosts *g = c.ghosts
    cdef uint16_t entries[GHOSTS_PIECE]
    cdef int n, wanted
    pthread_mutex_lock(&g.busy)
    while True:
        n = ghosts_take(g, entries, GHOSTS_PIECE)
        wanted = ghosts_digest(g, entries, n)
        if wanted >= 0 and core_switch(c, wanted) == 0:
            g.switches += 1
            ghosts_used(g, wanted)
        if n < GHOSTS_PIECE or not everything:
            break
    pthread_mutex_unlock(&g.busy)


cdef int32_t by_last_request(const fc_table *t, const fc_ghosts *g, int32_t *first, int32_t *order) noexcept nogil:
    """Write the slots that hold anything, oldest visit first; without ghosts in order of slots. `first`: [AGES], zero."""
    cdef int32_t s, n = 0, age, at = 0
    for s in range(t.n_slots):
        if t.key_of[s] >= 0:
            first[<uint16_t>(g.run - g.tags[t.key_of[s]].run) if g != NULL else 0] += 1
            n += 1
    for age in range(AGES - 1, -1, -1):
        at += first[age]
        first[age] = at - first[age]
    for s in range(t.n_slots):
        if t.key_of[s] >= 0:
            age = <uint16_t>(g.run - g.tags[t.key_of[s]].run) if g != NULL else 0
            order[first[age]] = s
            first[age] += 1
    return n


cdef void note_switch(fc_core *c, int kind, const int32_t *order, int32_t n) noexcept nogil:
    """The one place where a store's policy changes. The order comes from the ghosts, of which a replay knows nothing."""
    cdef int32_t i
    note(c.recorder, T_SWITCH, 0, kind, n)
    for i in range(n if c.recorder != NULL else 0):
        note(c.recorder, T_MOVED, 0, 0, order[i])


cdef int core_switch(fc_core *c, int kind) noexcept nogil:
    cdef fc_policy fresh
    cdef fc_arena *arena = NULL
    cdef int32_t *first
    cdef int32_t *order
    cdef int32_t n
    cdef int rc
    pthread_mutex_lock(&c.mutex)
    if not c.closing:
        arena = c.arena
        arena_ref(arena)                # the view points into it, and close() gives the store's reference up
    pthread_mutex_unlock(&c.mutex)
    if arena == NULL:
        return -FC_ECLOSED
    first = <int32_t *>calloc(AGES, sizeof(int32_t))
    order = <int32_t *>calloc(c.table.n_slots + 1, sizeof(int32_t))
    rc = policy_init(&fresh, kind, &c.table.policy.v)           # the view never changes
    if rc == 0 and (first == NULL or order == NULL):
        rc = -ENOMEM
    if rc == 0:
        pthread_mutex_lock(&c.mutex)
        if c.closing:
            rc = -FC_ECLOSED
        else:
            n = by_last_request(&c.table, c.ghosts, first, order)
            note_switch(c, kind, order, n)
            table_switch(&c.table, &fresh, order, n)
        pthread_mutex_unlock(&c.mutex)
    if fresh.state != NULL:
        fresh.destroy(&fresh)           # what was in use, or what never came to be
    free(first)
    free(order)
    arena_unref(arena)
    return rc
