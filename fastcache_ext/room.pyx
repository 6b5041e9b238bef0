"""Room for a load: guesses that crowd, slabs that change hands, evictions, and how each is counted.

May import libc, arena, counters, evidence, monitor's structs, policy, recorder, table and trade.
"""
from libc.stdint cimport int32_t

from fastcache_ext.counters cimport *
from fastcache_ext.evidence cimport evidence_wasted
from fastcache_ext.monitor cimport FC_MODE_GUESS, FC_MODE_WARM, fc_core
from fastcache_ext.policy cimport FC_FOR_DEMAND, FC_FOR_GUESS
from fastcache_ext.recorder cimport T_EVICTED, T_TRADE, note
from fastcache_ext.table cimport FC_FROM_PREFETCH, fc_evicted, table_reserve
from fastcache_ext.trade cimport trade_for, trade_refused

cdef enum:
    CROWD = 8               # guesses evict while they hold less than one slot in so many ...
    FEW = 4                 # ... or than so many, in a small cache, if that is less than half of it


cdef bint crowded(const fc_core *c, int32_t key) noexcept nogil:
    cdef int cls = c.table.cls_of[key]
    cdef int32_t slots
    if cls >= c.arena.n_classes or c.table.free_head[cls] >= 0 or c.guessed[cls] == 0:
        return False
    slots = c.table.n_of[cls]
    return c.guessed[cls] >= min(max(slots // CROWD, <int32_t>FEW), slots // 2)


cdef void count_eviction(fc_core *c, const fc_evicted *evicted, int32_t slot, int phase) noexcept nogil:
    cdef fc_counters *n = &c.counters
    note(c.recorder, T_EVICTED, evicted.unread | evicted.origin << 1, 0, evicted.key)
    count_begin(n)
    count_in(n, phase, C_EVICTIONS, 1)
    count_in(n, phase, C_RESIDENT_EXPERTS, -1)
    count_layer_in(n, phase, c.table.layer_of[evicted.key], L_EVICTIONS, 1)
    if evicted.unread and evicted.origin == FC_FROM_PREFETCH:
        count_in(n, phase, C_WASTED, 1)
        count_layer_in(n, phase, c.table.layer_of[evicted.key], L_WASTED, 1)
        count_in(n, phase, C_UNREAD_RESIDENT, -1)
        evidence_wasted(&c.evidence, slot)
    count_end(n)


cdef void trade(fc_core *c, int32_t key, int phase) noexcept nogil:
    cdef int32_t i, gone = trade_for(&c.table, key, c.generation + 1)
    if gone >= 0:
        note(c.recorder, T_TRADE, 0, gone, key)
    for i in range(gone):
        count_eviction(c, &c.table.trading.gone[i], c.table.trading.gone_from[i], phase)


cdef int32_t room_for(fc_core *c, int32_t key, int origin, int mode, int phase, int32_t *displaced) noexcept nogil:
    cdef bint careful = mode == FC_MODE_GUESS or mode == FC_MODE_WARM
    cdef fc_evicted evicted
    cdef int32_t slot
    displaced[0] = -1
    if not careful and c.table.trading != NULL:
        trade(c, key, phase)
    slot = table_reserve(&c.table, key, origin, FC_FOR_GUESS if careful else FC_FOR_DEMAND, c.generation + 1, &evicted)
    if slot >= 0 and evicted.key >= 0:
        count_eviction(c, &evicted, slot, phase)
        displaced[0] = evicted.key
    elif slot < 0 and not careful:
        trade_refused(&c.table, key)
    return slot
