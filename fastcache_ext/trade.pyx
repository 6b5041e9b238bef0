"""Which class gives a slab to which, and when.

A class asks for a slab when it misses: by reads of experts that it has evicted, so lately that the slots which others have
would have kept them. After a slab's worth of those it takes a slab that holds nothing, after PATIENCE times as much one whose
experts are used less, on the mean, than the one that it would evict itself, by what the policy knows; each read that found no
slot at all counts PATIENCE times. Either way it starts counting again, and so does the class that lost: what trades evict is
at most a part in PATIENCE of what is read anyway. They cannot go back and forth at one moment: the mean of a slab is no less
than its class's least.
Bounded: a look is at LOOK slots at most, from where the last one stopped, and comes once in a slab's worth of misses. Nothing here
depends on addresses, bytes or time, so a replay decides the same. May import libc, arena, policy and table.
"""
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint32_t

from fastcache_ext.arena cimport FC_MAX_PER_SLAB, fc_slabs, slab_first
from fastcache_ext.atomics cimport fc_store8
from fastcache_ext.policy cimport FC_FOR_DEMAND, is_leased
from fastcache_ext.table cimport (
    FC_EMPTY, FC_INFLIGHT, fc_table, fc_trading, table_drain, table_evict, table_list, table_unlist,
)

cdef enum:
    PATIENCE = 4
    LOOK = 2 * FC_MAX_PER_SLAB      # slots that one search looks at

cdef double MARGIN = 1.25           # how much more often the taker's expert must be used


cdef double use_of(fc_table *t, int32_t slab, int64_t generation, double under) noexcept nogil:
    """How often the slots of a slab are used, on the mean; INFINITY: it cannot go, or not `under` that."""
    cdef int c = t.trading.owner[slab]
    cdef int32_t per = t.arena.slabs.per[c], first = slab_first(t.arena, c, slab), s
    cdef double total = 0
    if t.trading.used[slab] == 0:
        return 0
    for s in range(first, first + per):
        if t.slots[s].state == FC_EMPTY:
            continue
        # What was read for nobody yet stays for as many loads as its class has slots.
        if (t.slots[s].state == FC_INFLIGHT or (t.unread[s] and generation - t.slots[s].generation < t.n_of[c])
                or is_leased(&t.policy, s)):
            return INFINITY
        total += t.policy.rate(&t.policy, s)
        if total >= under * per:
            return INFINITY
    return total / per


cdef int32_t find(fc_table *t, int c, int64_t generation, double under) noexcept nogil:
    """The slab that is used least, of those looked at and used less than `under`, or -1. 0: only one that holds nothing."""
    cdef fc_trading *d = t.trading
    cdef const fc_slabs *k = &t.arena.slabs
    cdef int32_t best = -1, slab, looked = 0, _i
    cdef int owner
    cdef double use
    for _i in range(min(k.n, <int32_t>LOOK)):
        if looked >= LOOK:
            break
        slab = d.hand
        d.hand = slab + 1 if slab + 1 < k.n else 0
        owner = d.owner[slab]
        if (owner == c or slab_first(t.arena, c, slab) < 0
                or t.n_of[owner] - k.per[owner] < max(k.least[owner], t.n_pinned[owner] + 1)
                or (under == 0 and d.used[slab] > 0)):
            continue
        looked += k.per[owner]
        use = use_of(t, slab, generation, under)
        if use == 0:
            return slab
        if use < under:
            under = use
            best = slab
    return best


cdef int take(fc_table *t, int32_t slab, int c) noexcept nogil:
    """Have class `c` own the slab, all of whose slots become EMPTY: how many residents went."""
    cdef fc_trading *d = t.trading
    cdef const fc_slabs *k = &t.arena.slabs
    cdef int was = d.owner[slab], gone = 0
    cdef int32_t first = slab_first(t.arena, was, slab), s, i
    for s in range(first, first + k.per[was]):
        if t.slots[s].state != FC_EMPTY:
            d.gone_from[gone] = s
            table_evict(t, s, &d.gone[gone])
            gone += 1
        table_unlist(t, s)
    fc_store8(&d.owner[slab], <unsigned char>c)
    first = slab_first(t.arena, c, slab)
    for i in range(k.per[c] - 1, -1, -1):
        table_list(t, first + i)
    t.n_of[was] -= k.per[was]
    t.n_of[c] += k.per[c]
    d.missed[was] = d.missed[c] = 0
    d.ask_at[was] = k.per[was]
    d.ask_at[c] = k.per[c]
    d.trades += 1
    d.given_up += gone
    return gone


cdef int trade_for(fc_table *t, int32_t key, int64_t generation) noexcept nogil:
    cdef fc_trading *d = t.trading
    cdef int c = t.cls_of[key]
    cdef const fc_slabs *k
    cdef int32_t more, slab, s
    cdef double under = 0
    if d == NULL or c >= t.arena.n_classes or t.free_head[c] >= 0:
        return -1
    d.searched = 0
    k = &t.arena.slabs
    more = k.most[c] * k.per[c] - (t.n_of[c] - t.arena.fixed[c])        # slots that it could have besides
    if more <= 0:
        return -1
    if d.left[key] != 0 and d.evictions[c] - d.left[key] < <uint32_t>more:
        d.missed[c] += 1
    if d.missed[c] < d.ask_at[c]:
        return -1
    d.ask_at[c] = d.missed[c] + k.per[c]
    table_drain(t)
    if d.missed[c] >= PATIENCE * k.per[c]:
        d.searched = 1
        s = t.policy.victim(&t.policy, c, FC_FOR_DEMAND)
        under = t.policy.rate(&t.policy, s) / MARGIN if s >= 0 else INFINITY
    slab = find(t, c, generation, under)
    return take(t, slab, c) if slab >= 0 else -1


cdef void trade_refused(fc_table *t, int32_t key) noexcept nogil:
    cdef int c = t.cls_of[key]
    if t.trading != NULL and c < t.arena.n_classes and t.arena.slabs.most[c] > 0:
        t.trading.missed[c] += PATIENCE
