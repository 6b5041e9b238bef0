"""Evict the expert whose next use is expected latest.

Expert traffic is a cycle over layers: an expert of layer l can only be used when l comes round again, and then with the chance p
that a visit of l picks it. Its next use is expected after

    (layers until l comes round) + n_layers * (1 / p - 1)      visits,

where p blends a fast and a slow moving average of its picks per visit of its layer. Both start empty, so each is divided by the
weight it has gathered so far.
Nothing decays: a pick is written down larger the later it comes, in units that a layer's whole row shares and that are taken down
every RESCALE visits. So a request costs O(1), and a search one comparison per layer plus, for layers whose least likely expert is
not known any more, a scan of the layer's rows; a slot is looked at only when its expert would be the new least.
May import libc, atomics and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint32_t
from libc.stdlib cimport calloc, free

from fastcache_ext.atomics cimport fc_store8
from fastcache_ext.policy cimport FC_FOR_GUESS, fc_policy, park

cdef enum:
    UNKNOWN = -2            # a layer's least likely expert has to be looked up
    NOBODY = -1             # it has none that can go
    FAST_SPAN = 64          # visits after which an average has gathered all its weight
    SLOW_SPAN = 1024
    RESCALE = 48            # visits between two rewritings of a layer's row

cdef double FAST = 0.4
cdef double SLOW = 0.02
cdef double FAST_SHARE = 0.25
cdef float BARRED = 8.0     # above every chance
cdef double LEAST = 1e-9    # chance of an expert never picked: finite, so that the layer distance still decides

ctypedef struct nu_least:
    int32_t key             # the layer's least likely expert that may go; NOBODY or UNKNOWN
    uint32_t stamp
    float p                 # its chance; the chances of a layer move only with its visits
    double rounds           # 1 / p - 1: rounds of its layer that it is expected to sit out

ctypedef struct nu_state:
    uint32_t clock
    int32_t layer           # layer of the visit that is open, or -1
    uint32_t *visits        # [n_layers]
    uint32_t *base          # [n_layers] visit at which a pick is written down at its rate
    float *fast             # [n_keys] picks, in units of the layer's base
    float *slow             # [n_keys]
    uint32_t *last          # [n_keys] visit of the last pick
    uint32_t *stamp         # [n_keys] clock of the last request: breaks ties, and only those
    float *bar              # [n_keys] added to the chance: 0 while the expert is resident and not parked, else BARRED
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
    u.base = <uint32_t *>calloc(p.v.n_layers + 1, sizeof(uint32_t))
    u.fast = <float *>calloc(p.v.n_keys + 1, sizeof(float))
    u.slow = <float *>calloc(p.v.n_keys + 1, sizeof(float))
    u.last = <uint32_t *>calloc(p.v.n_keys + 1, sizeof(uint32_t))
    u.stamp = <uint32_t *>calloc(p.v.n_keys + 1, sizeof(uint32_t))
    u.bar = <float *>calloc(p.v.n_keys + 1, sizeof(float))
    u.least = <nu_least *>calloc(n + 1, sizeof(nu_least))
    if (u.visits == NULL or u.base == NULL or u.fast == NULL or u.slow == NULL or u.last == NULL or u.stamp == NULL
            or u.bar == NULL or u.least == NULL):
        destroy(p)
        return -ENOMEM
    for i in range(n):
        u.least[i].key = NOBODY
    for i in range(p.v.n_keys):
        u.bar[i] = BARRED
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
    free(u.base)
    free(u.fast)
    free(u.slow)
    free(u.last)
    free(u.stamp)
    free(u.bar)
    free(u.least)
    free(u)
    p.state = NULL


cdef inline float fast_after(const nu_state *u, uint32_t visits) noexcept nogil:
    return u.fast_decay[visits] if visits < FAST_SPAN else 0


cdef inline float slow_after(const nu_state *u, uint32_t visits) noexcept nogil:
    return u.slow_decay[visits] if visits < SLOW_SPAN else 0


cdef inline void units(const nu_state *u, int32_t layer, float *fast, float *slow) noexcept nogil:
    """What a layer's rows are to be multiplied by: the chance of its expert k is fast * u.fast[k] + slow * u.slow[k]."""
    cdef uint32_t visits = u.visits[layer], since = visits - u.base[layer]
    fast[0] = slow[0] = 0
    if visits > 0:
        fast[0] = <float>(FAST_SHARE * u.fast_decay[since] / (1.0 - fast_after(u, visits)))
        slow[0] = <float>((1.0 - FAST_SHARE) * u.slow_decay[since] / (1.0 - slow_after(u, visits)))


cdef void rescale(fc_policy *p, nu_state *u, int32_t layer) noexcept nogil:
    """Take a layer's rows down to its present visit, before their units grow out of a float."""
    cdef uint32_t since = u.visits[layer] - u.base[layer]
    cdef int32_t key
    for key in range(p.v.layer_first[layer], p.v.layer_first[layer + 1]):
        u.fast[key] *= u.fast_decay[since]
        u.slow[key] *= u.slow_decay[since]
        if u.fast[key] < 1e-30:         # no denormals
            u.fast[key] = 0
        if u.slow[key] < 1e-30:
            u.slow[key] = 0
    u.base[layer] = u.visits[layer]


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
    u.bar[key] = BARRED
    for m in range(2):
        if least_of(p, u, m, cls, p.v.layer_of[key]).key == key:
            least_of(p, u, m, cls, p.v.layer_of[key]).key = UNKNOWN


cdef void request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t layer = p.v.layer_of[key]
    cdef uint32_t since
    u.clock += 1
    u.stamp[key] = u.clock
    # A visit is a run of requests to one layer; another layer or an expert seen in this run ends it.
    if layer != u.layer or (u.last[key] == u.visits[layer] and u.last[key] > 0):
        u.layer = layer
        u.visits[layer] += 1
        if u.visits[layer] - u.base[layer] >= RESCALE:
            rescale(p, u, layer)
        layer_changed(p, u, layer)
    elif slot >= 0:
        layer_changed(p, u, layer)
    since = u.visits[layer] - u.base[layer]
    u.fast[key] += <float>FAST / u.fast_decay[since]
    u.slow[key] += <float>SLOW / u.slow_decay[since]
    u.last[key] = u.visits[layer]


cdef void admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    u.clock += 1
    u.stamp[key] = u.clock
    u.bar[key] = BARRED
    fc_store8(&p.v.parked[slot], 1)     # leased by its read: released() will speak of it


cdef void forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    fc_store8(&p.v.parked[slot], 0)
    close_key(p, <nu_state *>p.state, key, slot)


cdef void released(fc_policy *p, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t key = p.v.key_of[slot], layer
    cdef float fast, slow, c
    cdef nu_least *least
    cdef int m
    if key < 0 or not p.v.parked[slot]:
        return
    fc_store8(&p.v.parked[slot], 0)
    u.bar[key] = 0
    layer = p.v.layer_of[key]
    units(u, layer, &fast, &slow)
    c = fast * u.fast[key] + slow * u.slow[key]
    for m in range(2):
        least = least_of(p, u, m, p.v.cls[slot], layer)
        if least.key == UNKNOWN or (m == FC_FOR_GUESS and p.v.unread[slot]):
            continue
        if least.key == NOBODY or c < least.p or (c == least.p and u.stamp[key] < least.stamp):
            least.key = key
            least.stamp = u.stamp[key]
            least.p = c
            least.rounds = 1.0 / max(<double>c, LEAST) - 1.0


cdef void look_up(fc_policy *p, nu_state *u, int mode, int cls, int32_t layer) noexcept nogil:
    """Find the least likely expert of a layer that may go."""
    cdef nu_least *least = least_of(p, u, mode, cls, layer)
    cdef const float *fasts = u.fast
    cdef const float *slows = u.slow
    cdef const float *bars = u.bar
    cdef int32_t key, slot
    cdef float c, fast, slow, best = 2.0
    cdef uint32_t stamp = 0
    least.key = NOBODY
    units(u, layer, &fast, &slow)
    for key in range(p.v.layer_first[layer], p.v.layer_first[layer + 1]):
        c = fast * fasts[key] + slow * slows[key] + bars[key]
        if c > best or (c == best and u.stamp[key] >= stamp):
            continue                    # nearly always; and what is barred is never less
        slot = p.v.slot_of[key]
        if p.v.cls[slot] != cls:
            continue
        if park(p, slot):
            close_key(p, u, key, slot)
            continue
        if mode == FC_FOR_GUESS and p.v.unread[slot]:
            continue
        best = c
        stamp = u.stamp[key]
        least.key = key
        least.stamp = stamp
        least.p = c
        least.rounds = 1.0 / max(<double>c, LEAST) - 1.0


cdef int32_t victim(fc_policy *p, int cls, int mode) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t layer, n = p.v.n_layers, slot
    cdef nu_least *row = least_of(p, u, mode, cls, 0)
    cdef nu_least *worst
    cdef double distance, farthest
    while True:
        worst = NULL
        farthest = -1.0
        for layer in range(n):
            if row[layer].key == UNKNOWN:
                look_up(p, u, mode, cls, layer)
            if row[layer].key < 0:
                continue
            distance = layer - u.layer + (n if layer <= u.layer else 0) + n * row[layer].rounds
            if distance > farthest or (distance == farthest and row[layer].stamp < worst.stamp):
                farthest = distance
                worst = &row[layer]
        if worst == NULL:
            return -1
        slot = p.v.slot_of[worst.key]
        if not park(p, slot):
            return slot
        close_key(p, u, worst.key, slot)        # leased since it was looked up
