"""Evict the expert whose next use is expected latest.

Expert traffic is a cycle over layers: an expert of layer l can only be used when l comes round again, and then with the chance p
that a visit of l picks it. Its next use is expected after

    (layers until l comes round) + n_layers * (1 / p - 1)      visits,

where p blends a fast and a slow moving average of its picks per visit of its layer. Both start empty, so each is divided by the
weight it has gathered so far. Decay is lazy: a request costs O(1), and a search costs one comparison per layer plus a scan of the
layers whose least likely expert is not known any more. The scan reads two arrays in order, and looks at a slot only when its expert
would be the new least. May import libc, atomics and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free

from fastcache_ext.atomics cimport fc_store8
from fastcache_ext.policy cimport FC_FOR_GUESS, fc_policy, park

cdef enum:
    UNKNOWN = -2            # a layer's least likely expert has to be looked up
    NOBODY = -1             # it has none that can go
    FAST_SPAN = 64          # visits after which a pick's weight in an average counts as nothing
    SLOW_SPAN = 1024

cdef double FAST = 0.4
cdef double SLOW = 0.02
cdef double FAST_SHARE = 0.25
cdef double LEAST = 1e-9    # chance of an expert never picked: finite, so that the layer distance still decides

ctypedef struct nu_key:
    float fast              # picks, decayed to visit `last` of the layer
    float slow
    uint32_t last
    uint32_t stamp          # clock of the last request: breaks ties, and only those

ctypedef struct nu_least:
    int32_t key             # the layer's least likely expert that may go; NOBODY or UNKNOWN
    uint32_t stamp
    double p                # its chance; the chances of a layer move only with its visits

ctypedef struct nu_state:
    uint32_t clock
    int32_t layer           # layer of the visit that is open, or -1
    uint32_t *visits        # [n_layers]
    nu_key *keys            # [n_keys]
    uint8_t *open           # [n_keys] 1 + size class of the slot while it is resident and not parked, else 0
    nu_least *least         # [mode][class][layer]
    float fast_decay[64]
    float slow_decay[1024]


cdef int next_use_init(fc_policy *p) noexcept nogil:
    cdef nu_state *u = <nu_state *>calloc(1, sizeof(nu_state))
    cdef int32_t i, n = 2 * p.v.n_classes * p.v.n_layers
    cdef double x
    if u == NULL:
        return -ENOMEM
    p.state = u
    p.destroy = destroy
    u.layer = -1
    u.visits = <uint32_t *>calloc(p.v.n_layers + 1, sizeof(uint32_t))
    u.keys = <nu_key *>calloc(p.v.n_keys + 1, sizeof(nu_key))
    u.open = <uint8_t *>calloc(p.v.n_keys + 1, 1)
    u.least = <nu_least *>calloc(n + 1, sizeof(nu_least))
    if u.visits == NULL or u.keys == NULL or u.open == NULL or u.least == NULL:
        destroy(p)
        return -ENOMEM
    for i in range(n):
        u.least[i].key = NOBODY
    x = 1.0
    for i in range(FAST_SPAN):
        u.fast_decay[i] = <float>x
        x *= 1.0 - FAST
    x = 1.0
    for i in range(SLOW_SPAN):
        u.slow_decay[i] = <float>x
        x *= 1.0 - SLOW
    p.request = request
    p.admit = admit
    p.victim = victim
    p.forget = forget
    p.released = released
    return 0


cdef void destroy(fc_policy *p) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    if u == NULL:
        return
    free(u.visits)
    free(u.keys)
    free(u.open)
    free(u.least)
    free(u)
    p.state = NULL


cdef inline float fast_after(const nu_state *u, uint32_t visits) noexcept nogil:
    return u.fast_decay[visits] if visits < FAST_SPAN else 0


cdef inline float slow_after(const nu_state *u, uint32_t visits) noexcept nogil:
    return u.slow_decay[visits] if visits < SLOW_SPAN else 0


cdef inline void weights(const nu_state *u, uint32_t visits, double *fast, double *slow) noexcept nogil:
    """What one unit of each average of a layer is worth after `visits` of its visits: its share over the weight gathered."""
    fast[0] = FAST_SHARE / (1.0 - fast_after(u, visits)) if visits > 0 else 0.0
    slow[0] = (1.0 - FAST_SHARE) / (1.0 - slow_after(u, visits)) if visits > 0 else 0.0


cdef inline double chance(const nu_state *u, const nu_key *k, uint32_t visits, double fast, double slow) noexcept nogil:
    """The chance that the next visit of the key's layer picks it."""
    cdef uint32_t since = visits - k.last
    return max(k.fast * fast_after(u, since) * fast + k.slow * slow_after(u, since) * slow, LEAST)


cdef inline nu_least *least_of(fc_policy *p, nu_state *u, int mode, int cls, int32_t layer) noexcept nogil:
    return &u.least[(mode * p.v.n_classes + cls) * p.v.n_layers + layer]


cdef inline void layer_changed(fc_policy *p, nu_state *u, int32_t layer) noexcept nogil:
    cdef int c
    for c in range(p.v.n_classes):
        least_of(p, u, 0, c, layer).key = UNKNOWN
        least_of(p, u, 1, c, layer).key = UNKNOWN


cdef inline void close_key(fc_policy *p, nu_state *u, int32_t key, int32_t slot) noexcept nogil:
    """`key` cannot go now: no search may name it."""
    cdef int cls = p.v.cls[slot], m
    u.open[key] = 0
    for m in range(2):
        if least_of(p, u, m, cls, p.v.layer_of[key]).key == key:
            least_of(p, u, m, cls, p.v.layer_of[key]).key = UNKNOWN


cdef void request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef nu_key *k = &u.keys[key]
    cdef int32_t layer = p.v.layer_of[key]
    cdef uint32_t since
    u.clock += 1
    k.stamp = u.clock
    # A visit is a run of requests to one layer; another layer or an expert seen in this run ends it.
    if layer != u.layer or (k.last == u.visits[layer] and k.last > 0):
        u.layer = layer
        u.visits[layer] += 1
        layer_changed(p, u, layer)
    elif slot >= 0:
        layer_changed(p, u, layer)
    since = u.visits[layer] - k.last
    k.fast = k.fast * fast_after(u, since) + <float>FAST
    k.slow = k.slow * slow_after(u, since) + <float>SLOW
    k.last = u.visits[layer]


cdef void admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    u.clock += 1
    u.keys[key].stamp = u.clock
    u.open[key] = 0
    fc_store8(&p.v.parked[slot], 1)     # leased by its read: released() will speak of it


cdef void forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    fc_store8(&p.v.parked[slot], 0)
    close_key(p, <nu_state *>p.state, key, slot)


cdef void released(fc_policy *p, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t key = p.v.key_of[slot], layer
    cdef double fast, slow, c
    cdef nu_least *least
    cdef int m
    if key < 0 or not p.v.parked[slot]:
        return
    fc_store8(&p.v.parked[slot], 0)
    u.open[key] = p.v.cls[slot] + 1
    layer = p.v.layer_of[key]
    weights(u, u.visits[layer], &fast, &slow)
    c = chance(u, &u.keys[key], u.visits[layer], fast, slow)
    for m in range(2):
        least = least_of(p, u, m, p.v.cls[slot], layer)
        if least.key == UNKNOWN or (m == FC_FOR_GUESS and p.v.unread[slot]):
            continue
        if least.key == NOBODY or c < least.p or (c == least.p and u.keys[key].stamp < least.stamp):
            least.key = key
            least.stamp = u.keys[key].stamp
            least.p = c


cdef void look_up(fc_policy *p, nu_state *u, int mode, int cls, int32_t layer) noexcept nogil:
    """Find the least likely expert of a layer that may go."""
    cdef nu_least *least = least_of(p, u, mode, cls, layer)
    cdef uint32_t visits = u.visits[layer]
    cdef int32_t key, slot
    cdef double c, fast, slow, best = 2.0
    cdef uint32_t stamp = 0
    least.key = NOBODY
    weights(u, visits, &fast, &slow)
    for key in range(p.v.layer_first[layer], p.v.layer_first[layer + 1]):
        if u.open[key] != cls + 1:
            continue
        c = chance(u, &u.keys[key], visits, fast, slow)
        if c > best or (c == best and u.keys[key].stamp >= stamp):
            continue
        slot = p.v.slot_of[key]
        if park(p, slot):
            close_key(p, u, key, slot)
            continue
        if mode == FC_FOR_GUESS and p.v.unread[slot]:
            continue
        best = c
        stamp = u.keys[key].stamp
        least.key = key
        least.stamp = stamp
        least.p = c


cdef int32_t victim(fc_policy *p, int cls, int mode) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t layer, worst = -1, n = p.v.n_layers
    cdef nu_least *least
    cdef uint32_t stamp = 0
    cdef double distance, farthest = -1.0
    for layer in range(n):
        least = least_of(p, u, mode, cls, layer)
        if least.key >= 0 and park(p, p.v.slot_of[least.key]):
            close_key(p, u, least.key, p.v.slot_of[least.key])
        if least.key == UNKNOWN:
            look_up(p, u, mode, cls, layer)
        if least.key < 0:
            continue
        distance = (layer - u.layer - 1 + n) % n + 1 + n * (1.0 / least.p - 1.0)
        if distance > farthest or (distance == farthest and least.stamp < stamp):
            farthest = distance
            stamp = least.stamp
            worst = p.v.slot_of[least.key]
    return worst
