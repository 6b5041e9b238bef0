"""One ghost cache: a policy, the keys it would hold, and no bytes.

A sample of the experts stands for all of them, in as many slots as the sample has of the store's. Only next_use knows of visits,
and a visit none of whose experts is sampled is one too: so it sees a mark per layer, a key behind those of the sample that is
asked for first at every visit of the layer, and never admitted. A visit is served as the store serves a batch, so that no policy
gives up a member of it.
May import libc, atomics and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free

from fastcache_ext.policy cimport FC_FOR_DEMAND, FC_NEXT_USE, fc_view, policy_init


cdef int shape_init(fc_shape *s, int32_t n_layers, const int32_t *per_layer, int32_t n_classes, const int32_t *slots,
                    const int32_t *keys, const int32_t *sampled) noexcept nogil:
    cdef int32_t l, k, c, n
    s.n_layers = n_layers
    s.n_classes = n_classes
    s.class_first[0] = 0
    s.capacity = <int32_t *>calloc(16, sizeof(int32_t))
    if s.capacity == NULL:
        return -ENOMEM
    for c in range(n_classes):
        n = 0
        if keys[c] > 0:
            n = <int32_t>((2 * <int64_t>slots[c] * sampled[c] + keys[c]) // (2 * <int64_t>keys[c]))
            if n == 0 and slots[c] > 0:
                n = 1
        s.capacity[c] = min(n, sampled[c])
        s.class_first[c + 1] = s.class_first[c] + s.capacity[c]
    s.n_slots = s.class_first[n_classes]
    s.layer_first = <int32_t *>calloc(n_layers + 1, sizeof(int32_t))
    if s.layer_first == NULL:
        return -ENOMEM
    for l in range(n_layers):
        s.layer_first[l + 1] = s.layer_first[l] + per_layer[l]
    s.n_keys = s.layer_first[n_layers]
    s.layer_of = <int32_t *>calloc(s.n_keys + n_layers + 1, sizeof(int32_t))
    s.cls_of = <uint8_t *>calloc(s.n_keys + 1, 1)
    s.cls = <uint8_t *>calloc(s.n_slots + 1, 1)
    s.unread = <uint8_t *>calloc(s.n_slots + 1, 1)
    s.leases = <int32_t *>calloc(s.n_slots + 1, sizeof(int32_t))
    s.parked = <uint8_t *>calloc(s.n_slots + 1, 1)
    s.held = <int32_t *>calloc(s.n_slots + 1, sizeof(int32_t))
    if (s.layer_of == NULL or s.cls_of == NULL or s.cls == NULL or s.unread == NULL or s.leases == NULL or s.parked == NULL
            or s.held == NULL):
        return -ENOMEM
    for l in range(n_layers):
        for k in range(s.layer_first[l], s.layer_first[l + 1]):
            s.layer_of[k] = l
        s.layer_of[s.n_keys + l] = l
    for c in range(n_classes):
        for k in range(s.class_first[c], s.class_first[c + 1]):
            s.cls[k] = <uint8_t>c
    return 0


cdef void shape_destroy(fc_shape *s) noexcept nogil:
    free(s.layer_first)
    free(s.layer_of)
    free(s.cls_of)
    free(s.cls)
    free(s.capacity)
    free(s.unread)
    free(s.leases)
    free(s.parked)
    free(s.held)


cdef int ghost_init(fc_ghost *g, const fc_shape *shape, int kind) noexcept nogil:
    cdef fc_view view
    cdef int32_t i
    g.shape = shape
    g.slot_of = <int32_t *>calloc(shape.n_keys + shape.n_layers + 1, sizeof(int32_t))
    g.key_of = <int32_t *>calloc(shape.n_slots + 1, sizeof(int32_t))
    if g.slot_of == NULL or g.key_of == NULL:
        return -ENOMEM
    for i in range(shape.n_keys + shape.n_layers):
        g.slot_of[i] = -1
    for i in range(shape.n_slots):
        g.key_of[i] = -1
    view.n_slots = shape.n_slots
    view.n_classes = shape.n_classes
    view.n_layers = shape.n_layers
    view.n_keys = shape.n_keys + (shape.n_layers if kind == FC_NEXT_USE else 0)
    view.layer_first = shape.layer_first
    view.layer_of = shape.layer_of
    view.slot_of = g.slot_of
    view.key_of = g.key_of
    view.cls = shape.cls
    view.capacity = shape.capacity
    view.unread = shape.unread
    view.leases = shape.leases
    view.parked = shape.parked
    return policy_init(&g.policy, kind, &view)


cdef void ghost_destroy(fc_ghost *g) noexcept nogil:
    if g.policy.state != NULL:
        g.policy.destroy(&g.policy)
    free(g.slot_of)
    free(g.key_of)


cdef int32_t room_for(fc_ghost *g, int32_t key) noexcept nogil:
    """A slot for `key`: a fresh one, or one given up; -1 when the visit holds them all."""
    cdef int c = g.shape.cls_of[key]
    cdef int32_t slot = g.shape.class_first[c] + g.filled[c], gone
    if slot < g.shape.class_first[c + 1]:
        g.filled[c] += 1
        return slot
    slot = g.policy.victim(&g.policy, c, FC_FOR_DEMAND)
    if slot >= 0:
        gone = g.key_of[slot]
        g.policy.forget(&g.policy, gone, slot)
        g.slot_of[gone] = -1
        g.key_of[slot] = -1
        g.evictions += 1
    return slot


cdef int ghost_visit(fc_ghost *g, int32_t layer, const int32_t *keys, int n, uint8_t *hits) noexcept nogil:
    cdef fc_policy *p = &g.policy
    cdef const fc_shape *s = g.shape
    cdef int i, n_held = 0, found = 0
    cdef int32_t slot
    if p.kind == FC_NEXT_USE:
        p.request(p, s.n_keys + layer, -1)
    for i in range(n):
        slot = g.slot_of[keys[i]]
        hits[i] = slot >= 0
        if slot >= 0:
            s.leases[slot] = 1
            s.held[n_held] = slot
            n_held += 1
            found += 1
    for i in range(n):
        slot = g.slot_of[keys[i]]
        p.request(p, keys[i], slot)
        if slot >= 0:
            continue
        slot = room_for(g, keys[i])
        if slot < 0:
            continue
        g.slot_of[keys[i]] = slot
        g.key_of[slot] = keys[i]
        s.leases[slot] = 1
        s.held[n_held] = slot
        n_held += 1
        p.admit(p, keys[i], slot)
    for i in range(n_held):
        slot = s.held[i]
        s.leases[slot] = 0
        if s.parked[slot]:
            p.released(p, slot)
    return found


cdef int ghost_check(const fc_ghost *g) noexcept nogil:
    cdef int32_t i
    for i in range(g.shape.n_keys):
        if g.slot_of[i] >= 0 and g.key_of[g.slot_of[i]] != i:
            return 1
    for i in range(g.shape.n_slots):
        if g.key_of[i] >= 0 and (g.slot_of[g.key_of[i]] != i or g.shape.cls_of[g.key_of[i]] != g.shape.cls[i]):
            return 2
        if g.shape.leases[i] != 0 or g.shape.parked[i] != 0 or g.shape.unread[i] != 0:
            return 3
    return 0
