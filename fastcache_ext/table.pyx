"""Key <-> slot, slot states, provenance: DESIGN section 3 as data.

    EMPTY --reserve--> INFLIGHT --publish--> RESIDENT --evict (inside reserve)--> EMPTY
                          `------abort-----> EMPTY

Owns the invariants I1, I2, I3 and their check(). Knows no read, no lock and no thread. May import libc, arena and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free

from fastcache_ext.arena cimport FC_MAX_PER_SLAB, arena_take_told, lease_drop, lease_take, slab_first, slab_of
from fastcache_ext.atomics cimport fc_load32, fc_load8, fc_store32, fc_store8
from fastcache_ext.policy cimport fc_policy, fc_view, fc_witness, is_leased, policy_init


cdef int trading_init(fc_table *t) noexcept nogil:
    cdef fc_trading *d = <fc_trading *>calloc(1, sizeof(fc_trading))
    cdef int32_t c, _i, slab = 0
    t.trading = d
    if d == NULL:
        return -ENOMEM
    d.owner = <uint8_t *>calloc(t.arena.slabs.n, 1)
    d.used = <int32_t *>calloc(t.arena.slabs.n, sizeof(int32_t))
    d.prev_free = <int32_t *>calloc(t.n_slots + 1, sizeof(int32_t))
    d.left = <uint32_t *>calloc(t.n_keys + 1, sizeof(uint32_t))
    d.gone = <fc_evicted *>calloc(FC_MAX_PER_SLAB, sizeof(fc_evicted))
    d.gone_from = <int32_t *>calloc(FC_MAX_PER_SLAB, sizeof(int32_t))
    if (d.owner == NULL or d.used == NULL or d.prev_free == NULL or d.left == NULL or d.gone == NULL
            or d.gone_from == NULL):
        return -ENOMEM
    for c in range(t.arena.n_classes):
        d.ask_at[c] = t.arena.slabs.per[c]
        for _i in range(t.arena.slabs.own[c]):
            d.owner[slab] = <uint8_t>c
            slab += 1
    return 0


cdef bint table_here(const fc_table *t, int32_t slot) noexcept nogil:
    cdef int32_t slab = slab_of(t.arena, slot)
    return slab < 0 or fc_load8(&t.trading.owner[slab]) == t.arena.cls[slot]


cdef int table_init(fc_table *t, fc_arena *arena, int32_t n_layers, const int32_t *layer_first, const uint8_t *cls_of,
                    int policy) noexcept nogil:
    cdef fc_view view
    cdef int32_t l, k, s, c
    t.arena = arena
    t.n_layers = n_layers
    t.n_slots = arena.n_slots
    t.n_resident = t.n_inflight = 0
    t.trading = NULL
    t.n_keys = layer_first[n_layers]
    t.layer_first = <int32_t *>calloc(n_layers + 1, sizeof(int32_t))
    t.layer_of = <int32_t *>calloc(t.n_keys + 1, sizeof(int32_t))
    t.cls_of = <uint8_t *>calloc(t.n_keys + 1, 1)
    t.slot_of = <int32_t *>calloc(t.n_keys + 1, sizeof(int32_t))
    t.key_of = <int32_t *>calloc(t.n_slots + 1, sizeof(int32_t))
    t.unread = <uint8_t *>calloc(t.n_slots + 1, 1)
    t.slots = <fc_slot *>calloc(t.n_slots + 1, sizeof(fc_slot))
    t.next_free = <int32_t *>calloc(t.n_slots + 1, sizeof(int32_t))
    if (t.layer_first == NULL or t.layer_of == NULL or t.cls_of == NULL or t.slot_of == NULL or t.key_of == NULL
            or t.unread == NULL or t.slots == NULL or t.next_free == NULL
            or (arena.slabs.n > 0 and trading_init(t) != 0)):
        table_destroy(t)
        return -ENOMEM
    for l in range(n_layers):
        t.layer_first[l + 1] = layer_first[l + 1]
        for k in range(layer_first[l], layer_first[l + 1]):
            t.layer_of[k] = l
            t.cls_of[k] = cls_of[k]
            t.slot_of[k] = -1
    for c in range(16):
        t.free_head[c] = -1
        t.n_pinned[c] = 0
        t.n_of[c] = arena.fixed[c] + arena.slabs.own[c] * arena.slabs.per[c]
    for s in range(t.n_slots - 1, -1, -1):      # low addresses first: those are populated first
        t.key_of[s] = -1
        if table_here(t, s):
            table_list(t, s)
    view.n_slots = t.n_slots
    view.n_classes = arena.n_classes
    view.n_layers = n_layers
    view.n_keys = t.n_keys
    view.layer_first = t.layer_first
    view.layer_of = t.layer_of
    view.slot_of = t.slot_of
    view.key_of = t.key_of
    view.cls = arena.cls
    view.capacity = t.n_of
    view.unread = t.unread
    view.leases = arena.leases
    view.parked = arena.parked
    if policy_init(&t.policy, policy, &view) != 0:
        table_destroy(t)
        return -ENOMEM
    return 0


cdef void table_destroy(fc_table *t) noexcept nogil:
    if t.policy.state != NULL:
        t.policy.destroy(&t.policy)
    free(t.layer_first)
    free(t.layer_of)
    free(t.cls_of)
    free(t.slot_of)
    free(t.key_of)
    free(t.unread)
    free(t.slots)
    free(t.next_free)
    if t.trading != NULL:
        free(t.trading.owner)
        free(t.trading.used)
        free(t.trading.prev_free)
        free(t.trading.left)
        free(t.trading.gone)
        free(t.trading.gone_from)
        free(t.trading)
        t.trading = NULL
    t.layer_first = t.layer_of = t.slot_of = t.key_of = t.next_free = NULL
    t.cls_of = t.unread = NULL
    t.slots = NULL


cdef void table_drain(fc_table *t) noexcept nogil:
    cdef fc_arena *a = t.arena
    cdef fc_witness *w = t.policy.witness
    cdef int32_t s, after
    if w != NULL and w.told != NULL:
        s = w.told(w.ctx)
        while s >= 0:
            t.policy.released(&t.policy, s)
            s = w.told(w.ctx)
        return
    s = arena_take_told(a)
    while s >= 0:
        after = a.next_told[s]
        fc_store8(&a.told[s], 0)        # before the count is read: a later last release tells again
        if fc_load32(&a.leases[s]) == 0 and fc_load8(&a.parked[s]):
            if w != NULL:
                w.released(w.ctx, s)
            t.policy.released(&t.policy, s)
        s = after


cdef void table_list(fc_table *t, int32_t slot) noexcept nogil:
    cdef int32_t c = t.arena.cls[slot], after = t.free_head[c]
    t.next_free[slot] = after
    t.free_head[c] = slot
    if t.trading != NULL:
        t.trading.prev_free[slot] = -1
        if after >= 0:
            t.trading.prev_free[after] = slot


cdef void table_unlist(fc_table *t, int32_t slot) noexcept nogil:
    cdef int32_t before = t.trading.prev_free[slot], after = t.next_free[slot]
    if before >= 0:
        t.next_free[before] = after
    else:
        t.free_head[t.arena.cls[slot]] = after
    if after >= 0:
        t.trading.prev_free[after] = before


cdef inline void use(fc_table *t, int32_t slot, int32_t by) noexcept nogil:
    cdef int32_t slab
    if t.trading != NULL:
        slab = slab_of(t.arena, slot)
        if slab >= 0:
            t.trading.used[slab] += by


cdef void drop_slot(fc_table *t, int32_t slot) noexcept nogil:
    """-> EMPTY, back to the free slots."""
    cdef int32_t key = t.key_of[slot]
    t.policy.forget(&t.policy, key, slot)
    t.slot_of[key] = -1
    t.key_of[slot] = -1
    t.unread[slot] = 0
    t.slots[slot].state = FC_EMPTY
    table_list(t, slot)
    use(t, slot, -1)


cdef void table_evict(fc_table *t, int32_t slot, fc_evicted *evicted) noexcept nogil:
    cdef int c = t.arena.cls[slot]
    evicted.key = t.key_of[slot]
    evicted.origin = t.slots[slot].origin
    evicted.unread = t.unread[slot]
    drop_slot(t, slot)
    t.n_resident -= 1
    if t.trading != NULL:
        t.trading.evictions[c] += 1
        t.trading.left[evicted.key] = t.trading.evictions[c]


cdef int32_t table_reserve(fc_table *t, int32_t key, int origin, int mode, int64_t generation, fc_evicted *evicted) noexcept nogil:
    cdef int c = t.cls_of[key]
    cdef int32_t s
    evicted.key = -1
    if c >= t.arena.n_classes:
        return -1
    if t.free_head[c] < 0:
        table_drain(t)
        s = t.policy.victim(&t.policy, c, mode)
        if s < 0:
            return -1
        table_evict(t, s, evicted)
    s = t.free_head[c]
    t.free_head[c] = t.next_free[s]
    if t.trading != NULL and t.free_head[c] >= 0:
        t.trading.prev_free[t.free_head[c]] = -1
    use(t, s, 1)
    t.slot_of[key] = s
    t.key_of[s] = key
    t.unread[s] = 1
    t.slots[s].state = FC_INFLIGHT
    t.slots[s].origin = <uint8_t>origin
    t.slots[s].pinned = 0
    t.slots[s].generation = generation
    t.n_inflight += 1
    lease_take(t.arena, s)              # the read's own
    t.policy.admit(&t.policy, key, s)
    return s


cdef void table_publish(fc_table *t, int32_t slot) noexcept nogil:
    t.slots[slot].state = FC_RESIDENT
    t.n_inflight -= 1
    t.n_resident += 1
    lease_drop(t.arena, slot)


cdef void table_abort(fc_table *t, int32_t slot) noexcept nogil:
    # Nothing but waiters and the read itself can hold an INFLIGHT slot, and all of them learn of the failure.
    fc_store32(&t.arena.leases[slot], 0)
    t.n_inflight -= 1
    drop_slot(t, slot)


cdef void table_switch(fc_table *t, fc_policy *fresh, const int32_t *order, int32_t n) noexcept nogil:
    cdef fc_policy was = t.policy
    cdef int32_t i, s
    table_drain(t)
    fresh.witness = was.witness
    for i in range(n):
        s = order[i]
        fc_store8(&t.arena.parked[s], 0)    # what the old policy waited for is nothing to the new one
        if t.slots[s].origin == FC_FROM_DEMAND or not t.unread[s]:
            fresh.request(fresh, t.key_of[s], -1)
        fresh.admit(fresh, t.key_of[s], s)
        # Dekker with lease_drop, as in park(): a release before the mark is seen here, one after it is told.
        if fc_load8(&t.arena.parked[s]) and not is_leased(&was, s):
            fresh.released(fresh, s)
    t.policy = fresh[0]
    fresh[0] = was


cdef bint table_resident(const fc_table *t, int32_t key) noexcept nogil:
    cdef int32_t slot = t.slot_of[key]
    return slot >= 0 and t.slots[slot].state == FC_RESIDENT


cdef int trading_check(const fc_table *t) noexcept nogil:
    """I7 by slabs: each belongs to one class, which is counted its slots, and no two slots that can hold anything overlap."""
    cdef const fc_trading *d = t.trading
    cdef int32_t c, i, slab, first, used
    cdef int32_t have[16]
    for c in range(16):
        have[c] = t.arena.fixed[c]
    for slab in range(t.arena.slabs.n):
        c = d.owner[slab]
        first = slab_first(t.arena, c, slab) if c < t.arena.n_classes else -1
        if first < 0:
            return 701
        used = 0
        for i in range(t.arena.slabs.per[c]):
            if slab_of(t.arena, first + i) != slab:
                return 702
            used += t.slots[first + i].state != FC_EMPTY
        if used != d.used[slab]:
            return 703
        have[c] += t.arena.slabs.per[c]
    for c in range(t.arena.n_classes):
        if have[c] != t.n_of[c]:
            return 704
    return 0


cdef int table_check(fc_table *t) noexcept nogil:
    cdef int32_t k, s, c, free_slots = 0, inflight = 0, resident = 0, all_slots = 0
    for k in range(t.n_keys):
        s = t.slot_of[k]
        if s < -1 or s >= t.n_slots or (s >= 0 and t.key_of[s] != k):
            return 101
    for s in range(t.n_slots):
        k = t.key_of[s]
        if t.slots[s].state == FC_EMPTY:
            if k != -1 or t.arena.leases[s] != 0 or t.arena.parked[s] != 0:
                return 102
            continue
        if k < 0 or k >= t.n_keys or t.slot_of[k] != s:
            return 103
        if t.cls_of[k] != t.arena.cls[s]:
            return 104
        if not table_here(t, s):
            return 105
        if fc_load32(&t.arena.leases[s]) < 0:
            return 201
        if t.slots[s].state == FC_INFLIGHT:
            inflight += 1
            if fc_load32(&t.arena.leases[s]) < 1:
                return 202
        else:
            resident += 1
        if t.slots[s].pinned and fc_load32(&t.arena.leases[s]) < 1:
            return 203
    for c in range(t.arena.n_classes):
        all_slots += t.n_of[c]
        s = t.free_head[c]
        while s >= 0:
            if t.slots[s].state != FC_EMPTY or t.arena.cls[s] != c or not table_here(t, s):
                return 301
            free_slots += 1
            if free_slots > t.n_slots:
                return 302
            s = t.next_free[s]
    if inflight != t.n_inflight or resident != t.n_resident or free_slots + inflight + resident != all_slots:
        return 303
    return trading_check(t) if t.trading != NULL else 0
