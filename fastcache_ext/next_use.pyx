"""Evict the expert whose next use is expected latest.

Expert traffic is a cycle over layers: an expert of layer l can only be used when l comes round again, and then with the chance p
that a visit of l picks it. Its next use is expected after

    (layers until l comes round) + n_layers * (1 / p - 1)      visits,

where p blends a fast and a slow moving average of its picks per visit of its layer. Both start empty, so each is divided by the
weight it has gathered so far. Decay is lazy: a request costs O(1), and a search costs one comparison per layer plus a scan of the
layers whose least likely expert is not known any more. May import libc, atomics and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint32_t
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

ctypedef struct nu_state:
    int64_t clock
    int32_t layer           # layer of the visit that is open, or -1
    uint32_t *visits        # [n_layers]
    nu_key *keys            # [n_keys]
    int64_t *stamp          # [n_slots] clock of the last request: breaks ties
    int32_t *least[2]       # [mode][n_classes * n_layers] slot, NOBODY or UNKNOWN
    double *least_p[2]      # [mode][n_classes * n_layers] its chance; a layer's chances move only with its visits
    float fast_decay[64]
    float slow_decay[1024]


cdef int next_use_init(fc_policy *p) noexcept nogil:
    cdef nu_state *u = <nu_state *>calloc(1, sizeof(nu_state))
    cdef int32_t i, n = p.v.n_classes * p.v.n_layers
    cdef double x
    if u == NULL:
        return -ENOMEM
    p.state = u
    p.destroy = destroy
    u.layer = -1
    u.visits = <uint32_t *>calloc(p.v.n_layers + 1, sizeof(uint32_t))
    u.keys = <nu_key *>calloc(p.v.n_keys + 1, sizeof(nu_key))
    u.stamp = <int64_t *>calloc(p.v.n_slots + 1, sizeof(int64_t))
    u.least[0] = <int32_t *>calloc(n + 1, sizeof(int32_t))
    u.least[1] = <int32_t *>calloc(n + 1, sizeof(int32_t))
    u.least_p[0] = <double *>calloc(n + 1, sizeof(double))
    u.least_p[1] = <double *>calloc(n + 1, sizeof(double))
    if (u.visits == NULL or u.keys == NULL or u.stamp == NULL or u.least[0] == NULL or u.least[1] == NULL
            or u.least_p[0] == NULL or u.least_p[1] == NULL):
        destroy(p)
        return -ENOMEM
    for i in range(n):
        u.least[0][i] = u.least[1][i] = NOBODY
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
    free(u.stamp)
    free(u.least[0])
    free(u.least[1])
    free(u.least_p[0])
    free(u.least_p[1])
    free(u)
    p.state = NULL


cdef inline float fast_after(nu_state *u, uint32_t visits) noexcept nogil:
    return u.fast_decay[visits] if visits < FAST_SPAN else 0


cdef inline float slow_after(nu_state *u, uint32_t visits) noexcept nogil:
    return u.slow_decay[visits] if visits < SLOW_SPAN else 0


cdef inline void weights(nu_state *u, uint32_t visits, double *fast, double *slow) noexcept nogil:
    """What one unit of each average of a layer is worth after `visits` of its visits: its share over the weight gathered."""
    fast[0] = FAST_SHARE / (1.0 - fast_after(u, visits)) if visits > 0 else 0.0
    slow[0] = (1.0 - FAST_SHARE) / (1.0 - slow_after(u, visits)) if visits > 0 else 0.0


cdef inline double chance(nu_state *u, int32_t key, uint32_t visits, double fast, double slow) noexcept nogil:
    """The chance that the next visit of the key's layer picks it."""
    cdef nu_key *k = &u.keys[key]
    cdef uint32_t since = visits - k.last
    return max(k.fast * fast_after(u, since) * fast + k.slow * slow_after(u, since) * slow, LEAST)


cdef inline void layer_changed(fc_policy *p, nu_state *u, int32_t layer) noexcept nogil:
    cdef int c
    for c in range(p.v.n_classes):
        u.least[0][c * p.v.n_layers + layer] = UNKNOWN
        u.least[1][c * p.v.n_layers + layer] = UNKNOWN


cdef void request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef nu_key *k = &u.keys[key]
    cdef int32_t layer = p.v.layer_of[key]
    cdef uint32_t since
    u.clock += 1
    if slot >= 0:
        u.stamp[slot] = u.clock
    # A visit is a run of requests to one layer; another layer or an expert seen in this run ends it.
    if layer != u.layer or (k.last == u.visits[layer] and k.last > 0):
        u.layer = layer
        u.visits[layer] += 1
        layer_changed(p, u, layer)
    since = u.visits[layer] - k.last
    k.fast = k.fast * fast_after(u, since) + <float>FAST
    k.slow = k.slow * slow_after(u, since) + <float>SLOW
    k.last = u.visits[layer]
    if slot >= 0:
        layer_changed(p, u, layer)


cdef void admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    u.clock += 1
    u.stamp[slot] = u.clock
    fc_store8(&p.v.parked[slot], 1)     # leased by its read: released() will speak of it


cdef void forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t i = p.v.cls[slot] * p.v.n_layers + p.v.layer_of[key]
    fc_store8(&p.v.parked[slot], 0)
    if u.least[0][i] == slot:
        u.least[0][i] = UNKNOWN
    if u.least[1][i] == slot:
        u.least[1][i] = UNKNOWN


cdef void released(fc_policy *p, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t key = p.v.key_of[slot], layer, i, m, now
    cdef double fast, slow, c
    if key < 0 or not p.v.parked[slot]:
        return
    fc_store8(&p.v.parked[slot], 0)
    layer = p.v.layer_of[key]
    i = p.v.cls[slot] * p.v.n_layers + layer
    weights(u, u.visits[layer], &fast, &slow)
    c = chance(u, key, u.visits[layer], fast, slow)
    for m in range(2):
        now = u.least[m][i]
        if now == UNKNOWN or (m == FC_FOR_GUESS and p.v.unread[slot]):
            continue
        if now == NOBODY or c < u.least_p[m][i] or (c == u.least_p[m][i] and u.stamp[slot] < u.stamp[now]):
            u.least[m][i] = slot
            u.least_p[m][i] = c


cdef void look_up(fc_policy *p, nu_state *u, int cls, int32_t layer) noexcept nogil:
    """Find the least likely expert of a layer, for both kinds of search."""
    cdef int32_t key, s, any_slot = NOBODY, read_slot = NOBODY
    cdef int32_t i = cls * p.v.n_layers + layer
    cdef double c, fast, slow, any_c = 2.0, read_c = 2.0
    cdef uint32_t visits = u.visits[layer]
    weights(u, visits, &fast, &slow)
    for key in range(p.v.layer_first[layer], p.v.layer_first[layer + 1]):
        s = p.v.slot_of[key]
        if s < 0 or p.v.cls[s] != cls or p.v.parked[s] or park(p, s):
            continue
        c = chance(u, key, visits, fast, slow)
        if c < any_c or (c == any_c and u.stamp[s] < u.stamp[any_slot]):
            any_c = c
            any_slot = s
        if not p.v.unread[s] and (c < read_c or (c == read_c and u.stamp[s] < u.stamp[read_slot])):
            read_c = c
            read_slot = s
    u.least[0][i] = any_slot
    u.least_p[0][i] = any_c
    u.least[1][i] = read_slot
    u.least_p[1][i] = read_c


cdef int32_t victim(fc_policy *p, int cls, int mode) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t layer, s, worst = -1, n = p.v.n_layers
    cdef int32_t *least = u.least[mode] + cls * n
    cdef double *least_p = u.least_p[mode] + cls * n
    cdef double distance, farthest = -1.0
    for layer in range(n):
        s = least[layer]
        if s >= 0 and park(p, s):
            s = UNKNOWN
        if s == UNKNOWN:
            look_up(p, u, cls, layer)
            s = least[layer]
        if s < 0:
            continue
        distance = (layer - u.layer - 1 + n) % n + 1 + n * (1.0 / least_p[layer] - 1.0)
        if distance > farthest or (distance == farthest and u.stamp[s] < u.stamp[worst]):
            farthest = distance
            worst = s
    return worst
