"""Evict the expert whose next use is expected latest.

Expert traffic is a cycle over layers: an expert of layer l can only be used when l comes round again, and then with the chance p
that a visit of l picks it. Its next use is expected after

    (visits until l is expected) + (mean gap of l) * (1 / p - 1)        visits of any layer;

the first two are from rounds.pyx, and p from blend.pyx. A request costs O(1), and a search the layers' greatest distance plus, for
layers whose least likely expert is not known any more, a scan of the layer's row. May import libc, atomics, blend, rounds, rows and
policy.
"""
from libc.errno cimport ENOMEM
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fastcache_ext.atomics cimport fc_store8
from fastcache_ext.blend cimport blend_init, blend_pick, blend_visit, fc_blend, fc_visit
from fastcache_ext.policy cimport FC_FOR_GUESS, fc_policy, park
from fastcache_ext.rounds cimport fc_round, fc_rounds, rounds_free, rounds_init, rounds_look, rounds_visit
from fastcache_ext.rows cimport FC_BARRED, FC_BLOCKS, FC_ROW, fc_bar, fc_chance, fc_greatest, fc_row_least

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t nbytes)

cdef enum:
    UNKNOWN = -2            # a layer's least likely expert has to be looked up
    NOBODY = -1             # it has none that can go
    TRIES = 4               # least chances of a row that are looked at before its experts are, one by one
    EVICTIONS = 256         # that `usual` is the mean of

cdef double LEAST = 1e-9    # chance of an expert never picked: finite, so that the layer distance still decides

ctypedef struct nu_seen:
    uint32_t last           # visit of the last pick
    uint32_t stamp          # clock of the last request: breaks ties, and only those

ctypedef struct nu_least:
    int32_t key             # the layer's least likely expert that may go; NOBODY or UNKNOWN
    uint32_t stamp
    float p                 # its chance

ctypedef struct nu_state:
    uint32_t clock
    int32_t layer           # layer of the visit that is open, or -1
    int32_t n_experts       # a key behind all layers' own stands for a visit of its layer, and for no expert
    float usual             # mean chance of the last experts that went
    fc_visit open
    fc_rounds rounds
    fc_blend *layers        # [n_layers]
    float *rows             # what they point into
    nu_seen *seen           # [n_keys]
    nu_least *least         # [mode][class][layer]
    double *due             # [mode][class][layer] visit at which that least is expected; -inf: none
    int32_t *unknown        # [mode][class][at most n_layers] layers whose least is UNKNOWN, each once
    int32_t *n_unknown      # [mode][class]
    int32_t *at             # [longest row] for searches


cdef inline int32_t blocks_of(int32_t experts) noexcept nogil:
    """Of the row of a layer with so many."""
    return (experts + 4 * FC_BLOCKS - 1) // (4 * FC_BLOCKS) * FC_BLOCKS


cdef int next_use_init(fc_policy *p) noexcept nogil:
    cdef nu_state *u = <nu_state *>calloc(1, sizeof(nu_state))
    cdef int32_t i, j, n = p.v.n_layers, sets = 2 * p.v.n_classes, longest = 0, total = 0, size
    if u == NULL:
        return -ENOMEM
    p.state = u
    p.destroy = destroy
    u.layer = -1
    u.n_experts = p.v.layer_first[n]
    u.usual = 0.1
    u.layers = <fc_blend *>calloc(n + 1, sizeof(fc_blend))
    u.seen = <nu_seen *>calloc(p.v.n_keys + 1, sizeof(nu_seen))
    u.least = <nu_least *>calloc(sets * n + 1, sizeof(nu_least))
    u.due = <double *>calloc(sets * n + 1, sizeof(double))
    u.unknown = <int32_t *>calloc(sets * n + 1, sizeof(int32_t))
    u.n_unknown = <int32_t *>calloc(sets + 1, sizeof(int32_t))
    if (u.layers == NULL or u.seen == NULL or u.least == NULL or u.due == NULL or u.unknown == NULL
            or u.n_unknown == NULL or rounds_init(&u.rounds, n) != 0):
        destroy(p)
        return -ENOMEM
    for i in range(n):
        size = blocks_of(p.v.layer_first[i + 1] - p.v.layer_first[i])
        total += size
        longest = max(longest, 4 * size)
    u.at = <int32_t *>calloc(longest + 1, sizeof(int32_t))
    if u.at == NULL or posix_memalign(<void **>&u.rows, 64, (<size_t>total + 1) * FC_ROW * sizeof(float)) != 0:
        u.rows = NULL
        destroy(p)
        return -ENOMEM
    memset(u.rows, 0, <size_t>total * FC_ROW * sizeof(float))
    for i in range(total):
        for j in range(4):
            fc_bar(u.rows + i * FC_ROW + j, True)
    total = 0
    for i in range(n):
        size = p.v.layer_first[i + 1] - p.v.layer_first[i]
        blend_init(&u.layers[i], u.rows + total * FC_ROW, blocks_of(size), size)
        total += u.layers[i].blocks
    for i in range(sets * n):
        u.least[i].key = NOBODY
        u.due[i] = -INFINITY
    p.request = request
    p.admit = admit
    p.victim = victim
    p.forget = forget
    p.released = released
    p.rate = rate
    return 0


cdef void destroy(fc_policy *p) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    if u == NULL:
        return
    rounds_free(&u.rounds)
    free(u.layers)
    free(u.rows)
    free(u.seen)
    free(u.least)
    free(u.due)
    free(u.unknown)
    free(u.n_unknown)
    free(u.at)
    free(u)
    p.state = NULL


cdef inline float *place_of(const fc_policy *p, const nu_state *u, int32_t key) noexcept nogil:
    """Where a key's first average is; the others follow every fourth float."""
    cdef int32_t layer = p.v.layer_of[key], at = key - p.v.layer_first[layer]
    return u.layers[layer].row + (at >> 2) * FC_ROW + (at & 3)


cdef inline float chance_of(const fc_policy *p, const nu_state *u, int32_t key) noexcept nogil:
    """Whether it can go or not."""
    cdef float c = fc_chance(place_of(p, u, key), u.layers[p.v.layer_of[key]].mult)
    return c - FC_BARRED if c >= FC_BARRED else c


cdef inline void now_unknown(fc_policy *p, nu_state *u, int set_, int32_t layer) noexcept nogil:
    """`set_` = mode * n_classes + class."""
    cdef nu_least *least = &u.least[set_ * p.v.n_layers + layer]
    if least.key != UNKNOWN:
        least.key = UNKNOWN
        u.unknown[set_ * p.v.n_layers + u.n_unknown[set_]] = layer
        u.n_unknown[set_] += 1


cdef inline void layer_changed(fc_policy *p, nu_state *u, int32_t layer) noexcept nogil:
    cdef int i
    for i in range(2 * p.v.n_classes):
        now_unknown(p, u, i, layer)


cdef inline void close_key(fc_policy *p, nu_state *u, int32_t key, int32_t slot) noexcept nogil:
    """`key` cannot go now: no search may name it."""
    cdef int mode, i
    fc_bar(place_of(p, u, key), True)
    for mode in range(2):
        i = mode * p.v.n_classes + p.v.cls[slot]
        if u.least[i * p.v.n_layers + p.v.layer_of[key]].key == key:
            now_unknown(p, u, i, p.v.layer_of[key])


cdef inline double expected_at(const nu_state *u, int32_t layer, double c) noexcept nogil:
    """The visit at which an expert of chance `c` is expected."""
    cdef const fc_round *r = &u.rounds.layers[layer]
    return r.back + r.gap * (1.0 / max(c, LEAST) - 1.0)


cdef inline void name(fc_policy *p, nu_state *u, int set_, int32_t layer, int32_t key, float c) noexcept nogil:
    cdef nu_least *least = &u.least[set_ * p.v.n_layers + layer]
    least.key = key
    least.stamp = u.seen[key].stamp
    least.p = c
    u.due[set_ * p.v.n_layers + layer] = expected_at(u, layer, c)


cdef inline void expected_anew(fc_policy *p, nu_state *u, int32_t layer) noexcept nogil:
    """The layer is expected at another visit than before, and so are its experts."""
    cdef int32_t _i, at = layer
    for _i in range(2 * p.v.n_classes):
        if u.least[at].key >= 0:
            u.due[at] = expected_at(u, layer, u.least[at].p)
        at += p.v.n_layers


cdef void begin_visit(fc_policy *p, nu_state *u, int32_t layer) noexcept nogil:
    cdef int32_t left = u.layer, i
    u.layer = layer
    rounds_visit(&u.rounds, layer)
    blend_visit(&u.layers[layer], &u.open)
    layer_changed(p, u, layer)
    if rounds_look(&u.rounds):
        for i in range(p.v.n_layers):
            expected_anew(p, u, i)
    elif left >= 0:
        expected_anew(p, u, left)


cdef void request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t layer = p.v.layer_of[key]
    cdef fc_blend *l = &u.layers[layer]
    u.clock += 1
    u.seen[key].stamp = u.clock
    # A visit is a run of requests to one layer; another layer or an expert seen in this run ends it.
    if layer != u.layer or (u.seen[key].last == l.visits and l.visits > 0):
        begin_visit(p, u, layer)
    elif slot >= 0:
        layer_changed(p, u, layer)
    u.seen[key].last = l.visits
    if key >= u.n_experts:
        return
    blend_pick(l, &u.open, place_of(p, u, key), u.usual)


cdef void admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    u.clock += 1
    u.seen[key].stamp = u.clock
    fc_bar(place_of(p, u, key), True)
    fc_store8(&p.v.parked[slot], 1)     # leased by its read: released() will speak of it


cdef double rate(fc_policy *p, int32_t slot) noexcept nogil:
    """Over the expected distance of its next use."""
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t key = p.v.key_of[slot]
    return 1.0 / max(expected_at(u, p.v.layer_of[key], chance_of(p, u, key)) - u.rounds.now, 1.0)


cdef void forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    u.usual += (chance_of(p, u, key) - u.usual) / EVICTIONS
    fc_store8(&p.v.parked[slot], 0)
    close_key(p, u, key, slot)


cdef void released(fc_policy *p, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t key = p.v.key_of[slot], layer
    cdef nu_least *least
    cdef float c
    cdef int mode, i
    if key < 0 or not p.v.parked[slot]:
        return
    fc_store8(&p.v.parked[slot], 0)
    fc_bar(place_of(p, u, key), False)
    layer = p.v.layer_of[key]
    c = fc_chance(place_of(p, u, key), u.layers[layer].mult)
    for mode in range(2):
        i = mode * p.v.n_classes + p.v.cls[slot]
        least = &u.least[i * p.v.n_layers + layer]
        if least.key == UNKNOWN or (mode == FC_FOR_GUESS and p.v.unread[slot]):
            continue
        if least.key == NOBODY or c < least.p or (c == least.p and u.seen[key].stamp < least.stamp):
            name(p, u, i, layer, key, c)


cdef inline bint may_go(fc_policy *p, nu_state *u, int mode, int cls, int32_t key) noexcept nogil:
    cdef int32_t slot = p.v.slot_of[key]
    if p.v.cls[slot] != cls:
        return False
    if park(p, slot):
        close_key(p, u, key, slot)
        return False
    return mode != FC_FOR_GUESS or not p.v.unread[slot]


cdef void look_up(fc_policy *p, nu_state *u, int mode, int cls, int32_t layer) noexcept nogil:
    """Find the least likely expert of a layer that may go; of equal ones the one asked for longest ago."""
    cdef fc_blend *l = &u.layers[layer]
    cdef int set_ = mode * p.v.n_classes + cls, _tries
    cdef int32_t first = p.v.layer_first[layer], key, best = -1, i, n
    cdef float above = -1.0, least = FC_BARRED, c
    u.least[set_ * p.v.n_layers + layer].key = NOBODY
    u.due[set_ * p.v.n_layers + layer] = -INFINITY
    for _tries in range(TRIES):
        n = fc_row_least(l.row, l.blocks, l.mult, above, FC_BARRED, &least, u.at)
        if n == 0:
            return
        for i in range(n):
            key = first + u.at[i]
            if (best < 0 or u.seen[key].stamp < u.seen[best].stamp) and may_go(p, u, mode, cls, key):
                best = key
        if best >= 0:
            name(p, u, set_, layer, best, least)
            return
        above = least
    # Many that may not go for this search alone (unread, or of another class): one by one.
    least = FC_BARRED
    for key in range(first, p.v.layer_first[layer + 1]):
        c = fc_chance(place_of(p, u, key), l.mult)
        if c > least or c >= FC_BARRED or (c == least and u.seen[key].stamp > u.seen[best].stamp):
            continue
        if may_go(p, u, mode, cls, key):
            best = key
            least = c
    if best >= 0:
        name(p, u, set_, layer, best, least)


cdef int32_t victim(fc_policy *p, int cls, int mode) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int set_ = mode * p.v.n_classes + cls
    cdef int32_t n = p.v.n_layers, layer, slot, at
    cdef nu_least *least = u.least + set_ * n
    cdef const double *due = u.due + set_ * n
    cdef double most
    while True:
        while u.n_unknown[set_] > 0:
            u.n_unknown[set_] -= 1
            look_up(p, u, mode, cls, u.unknown[set_ * n + u.n_unknown[set_]])
        most = fc_greatest(due, n)
        at = -1
        for layer in range(n):
            if due[layer] == most and least[layer].key >= 0 and (at < 0 or least[layer].stamp < least[at].stamp):
                at = layer
        if at < 0:
            return -1
        slot = p.v.slot_of[least[at].key]
        if not park(p, slot):
            return slot
        close_key(p, u, least[at].key, slot)        # leased since it was looked up
