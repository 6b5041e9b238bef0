"""Evict the expert whose next use is expected latest.

Expert traffic is a cycle over layers: an expert of layer l can only be used when l comes round again, and then with the chance p
that a visit of l picks it. Its next use is expected after

    (layers until l comes round) + n_layers * (1 / p - 1)      visits,

where p blends three moving averages of its picks per visit of its layer: over about one visit, eleven and ninety (rates 1/2, 1/16,
1/128). All start empty, so each is divided by the weight it has gathered so far. How they are blended is learnt from the traffic:
each is a guess at who is picked next, and each pick moves the weights towards those that had expected it, in steps that shrink (the
expectation-maximisation of a mixture, one pick at a time; the equal weights at the start stand for PRIOR picks). A visit fixes the
weights that its layer's chances are made of, so those move only with its visits.
Nothing decays: a pick is written down larger the later it comes, in units that a layer's whole row shares and that are taken down
every RESCALE visits. So a request costs O(1), and a search the layers' greatest distance plus, for layers whose least likely expert
is not known any more, a scan of the layer's row. May import libc, atomics, rows and policy.
"""
from libc.errno cimport ENOMEM
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fastcache_ext.atomics cimport fc_store8
from fastcache_ext.policy cimport FC_FOR_GUESS, fc_policy, park
from fastcache_ext.rows cimport FC_BLOCKS, FC_ROW, fc_chance, fc_greatest, fc_row_least, fc_row_scale

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t nbytes)

cdef enum:
    UNKNOWN = -2            # a layer's least likely expert has to be looked up
    NOBODY = -1             # it has none that can go
    AVERAGES = 3
    RESCALE = 48            # visits between two rewritings of a layer's row
    PRIOR = 2048            # picks that the weights at the start stand for
    LONGEST = 16384         # picks that the weights remember
    TRIES = 4               # least chances of a row that are looked at before its experts are, one by one

cdef double RATE[3]
RATE[:] = [1.0 / 2, 1.0 / 16, 1.0 / 128]
cdef float BARRED = 8.0     # above every chance
cdef double LEAST = 1e-9    # chance of an expert never picked: finite, so that the layer distance still decides
cdef double GATHERED = 1e-12        # missing weight that counts as none

ctypedef struct nu_layer:
    uint32_t visits
    uint32_t base           # visit at which a pick is written down at its rate
    float *row              # [blocks * FC_ROW] see rows.pxd; picks in units of `base`
    int32_t blocks
    float mult[3]           # what the averages in the row are multiplied by: weight and decay over what is gathered
    double missing[3]       # 1 - the weight that each average has gathered

ctypedef struct nu_seen:
    uint32_t last           # visit of the last pick
    uint32_t stamp          # clock of the last request: breaks ties, and only those

ctypedef struct nu_least:
    int32_t key             # the layer's least likely expert that may go; NOBODY or UNKNOWN
    uint32_t stamp
    float p                 # its chance

ctypedef struct nu_state:
    uint32_t clock
    uint32_t rated          # clock at which `visits` was added up
    double visits           # of all layers
    int32_t layer           # layer of the visit that is open, or -1
    int32_t n_experts       # a key behind all layers' own stands for a visit of its layer, and for no expert
    double weight[3]        # of the averages; sum 1
    double expected[3]      # what the open layer's averages were multiplied by before the visit, weight aside; 0: unknown
    int32_t learnt          # picks that the weights have seen, with PRIOR; LONGEST at the most
    double step             # 1 / learnt
    nu_layer *layers        # [n_layers]
    float *rows             # what they point into
    nu_seen *seen           # [n_keys]
    nu_least *least         # [mode][class][layer]
    double *due             # [mode][class][layer] n_layers * (1 / p - 1) + layer of that least; -inf: none
    int32_t *unknown        # [mode][class][at most n_layers] layers whose least is UNKNOWN, each once
    int32_t *n_unknown      # [mode][class]
    int32_t *at             # [longest row] for searches
    float decay[3][49]      # [average][visits]
    float per[3][49]        # [average][visits] what a pick adds


cdef int next_use_init(fc_policy *p) noexcept nogil:
    cdef nu_state *u = <nu_state *>calloc(1, sizeof(nu_state))
    cdef int32_t i, j, b, n = p.v.n_layers, sets = 2 * p.v.n_classes, longest = 0, total = 0, size
    cdef double x
    if u == NULL:
        return -ENOMEM
    p.state = u
    p.destroy = destroy
    u.layer = -1
    u.n_experts = p.v.layer_first[n]
    u.learnt = PRIOR
    u.layers = <nu_layer *>calloc(n + 1, sizeof(nu_layer))
    u.seen = <nu_seen *>calloc(p.v.n_keys + 1, sizeof(nu_seen))
    u.least = <nu_least *>calloc(sets * n + 1, sizeof(nu_least))
    u.due = <double *>calloc(sets * n + 1, sizeof(double))
    u.unknown = <int32_t *>calloc(sets * n + 1, sizeof(int32_t))
    u.n_unknown = <int32_t *>calloc(sets + 1, sizeof(int32_t))
    if (u.layers == NULL or u.seen == NULL or u.least == NULL or u.due == NULL or u.unknown == NULL
            or u.n_unknown == NULL):
        destroy(p)
        return -ENOMEM
    for i in range(n):
        size = p.v.layer_first[i + 1] - p.v.layer_first[i]
        u.layers[i].blocks = (size + 4 * FC_BLOCKS - 1) // (4 * FC_BLOCKS) * FC_BLOCKS
        total += u.layers[i].blocks
        longest = max(longest, 4 * u.layers[i].blocks)
        for j in range(AVERAGES):
            u.layers[i].missing[j] = 1.0
    u.at = <int32_t *>calloc(longest + 1, sizeof(int32_t))
    if u.at == NULL or posix_memalign(<void **>&u.rows, 64, (<size_t>total + 1) * FC_ROW * sizeof(float)) != 0:
        u.rows = NULL
        destroy(p)
        return -ENOMEM
    memset(u.rows, 0, <size_t>total * FC_ROW * sizeof(float))
    for b in range(total):
        for j in range(4):
            u.rows[b * FC_ROW + 12 + j] = BARRED
    total = 0
    for i in range(n):
        u.layers[i].row = u.rows + total * FC_ROW
        total += u.layers[i].blocks
    for i in range(sets * n):
        u.least[i].key = NOBODY
        u.due[i] = -INFINITY
    for j in range(AVERAGES):
        u.weight[j] = 1.0 / AVERAGES
        x = 1.0
        for i in range(RESCALE + 1):
            u.decay[j][i] = <float>x
            u.per[j][i] = <float>(RATE[j] / x)
            x *= 1.0 - RATE[j]
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
    """Where a key's first average is; the others and its bar follow every fourth float."""
    cdef int32_t layer = p.v.layer_of[key], at = key - p.v.layer_first[layer]
    return u.layers[layer].row + (at >> 2) * FC_ROW + (at & 3)


cdef inline void bar(const fc_policy *p, nu_state *u, int32_t key, float by) noexcept nogil:
    """By BARRED an expert is no candidate, by 0 it is one: it is resident, and not parked."""
    place_of(p, u, key)[12] = by


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
    bar(p, u, key, BARRED)
    for mode in range(2):
        i = mode * p.v.n_classes + p.v.cls[slot]
        if u.least[i * p.v.n_layers + p.v.layer_of[key]].key == key:
            now_unknown(p, u, i, p.v.layer_of[key])


cdef inline void name(fc_policy *p, nu_state *u, int set_, int32_t layer, int32_t key, float c) noexcept nogil:
    cdef nu_least *least = &u.least[set_ * p.v.n_layers + layer]
    least.key = key
    least.stamp = u.seen[key].stamp
    least.p = c
    u.due[set_ * p.v.n_layers + layer] = p.v.n_layers * (1.0 / max(<double>c, LEAST) - 1.0) + layer


cdef void open_visit(nu_state *u, int32_t number) noexcept nogil:
    cdef nu_layer *l = &u.layers[number]
    cdef float factor[3]
    cdef uint32_t since
    cdef int j
    u.layer = number
    l.visits += 1
    since = l.visits - l.base
    if since >= RESCALE:        # before the units grow out of a float
        for j in range(AVERAGES):
            factor[j] = u.decay[j][since]
        fc_row_scale(l.row, l.blocks, factor)
        l.base = l.visits
        since = 0
    for j in range(AVERAGES):
        u.expected[j] = u.decay[j][since] / ((1.0 - RATE[j]) * (1.0 - l.missing[j])) if l.visits > 1 else 0.0
        l.missing[j] *= 1.0 - RATE[j]
        if l.missing[j] < GATHERED:
            l.missing[j] = 0
        l.mult[j] = <float>(u.weight[j] * u.decay[j][since] / (1.0 - l.missing[j]))


cdef void request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t layer = p.v.layer_of[key]
    cdef nu_layer *l = &u.layers[layer]
    cdef float *x
    cdef double a, b, c, total, share, keep
    cdef uint32_t since
    u.clock += 1
    u.seen[key].stamp = u.clock
    # A visit is a run of requests to one layer; another layer or an expert seen in this run ends it.
    if layer != u.layer or (u.seen[key].last == l.visits and l.visits > 0):
        open_visit(u, layer)
        layer_changed(p, u, layer)
    elif slot >= 0:
        layer_changed(p, u, layer)
    u.seen[key].last = l.visits
    if key >= u.n_experts:
        return
    x = place_of(p, u, key)
    a = u.weight[0] * u.expected[0] * x[0]
    b = u.weight[1] * u.expected[1] * x[4]
    c = u.weight[2] * u.expected[2] * x[8]
    total = a + b + c
    if total > 0:
        if u.learnt < LONGEST:
            u.learnt += 1
            u.step = 1.0 / u.learnt
        share = u.step / total
        keep = 1.0 - u.step
        u.weight[0] = u.weight[0] * keep + a * share
        u.weight[1] = u.weight[1] * keep + b * share
        u.weight[2] = u.weight[2] * keep + c * share
    since = l.visits - l.base
    x[0] += u.per[0][since]
    x[4] += u.per[1][since]
    x[8] += u.per[2][since]


cdef void admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    u.clock += 1
    u.seen[key].stamp = u.clock
    bar(p, u, key, BARRED)
    fc_store8(&p.v.parked[slot], 1)     # leased by its read: released() will speak of it


cdef double rate(fc_policy *p, int32_t slot) noexcept nogil:
    """Over the expected distance of its next use, or over the visits since its last one where those are more: a layer may have
    stopped coming round."""
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t key = p.v.key_of[slot], layer = p.v.layer_of[key], i
    cdef double c = fc_chance(place_of(p, u, key), u.layers[layer].mult), far, since
    if u.rated != u.clock:
        u.rated = u.clock
        u.visits = 0
        for i in range(p.v.n_layers):
            u.visits += u.layers[i].visits
    if c >= BARRED:
        c -= BARRED
    far = p.v.n_layers * (1.0 / max(c, LEAST) - 1.0) + layer - u.layer + (p.v.n_layers if layer <= u.layer else 0)
    since = <uint32_t>(u.clock - u.seen[key].stamp) * u.visits / max(<double>u.clock, 1.0)
    return 1.0 / max(far, since, 1.0)


cdef void forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    fc_store8(&p.v.parked[slot], 0)
    close_key(p, <nu_state *>p.state, key, slot)


cdef void released(fc_policy *p, int32_t slot) noexcept nogil:
    cdef nu_state *u = <nu_state *>p.state
    cdef int32_t key = p.v.key_of[slot], layer
    cdef nu_least *least
    cdef float c
    cdef int mode, i
    if key < 0 or not p.v.parked[slot]:
        return
    fc_store8(&p.v.parked[slot], 0)
    bar(p, u, key, 0)
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
    cdef nu_layer *l = &u.layers[layer]
    cdef int set_ = mode * p.v.n_classes + cls, _tries
    cdef int32_t first = p.v.layer_first[layer], key, best = -1, i, n
    cdef float above = -1.0, least = BARRED, c
    u.least[set_ * p.v.n_layers + layer].key = NOBODY
    u.due[set_ * p.v.n_layers + layer] = -INFINITY
    for _tries in range(TRIES):
        n = fc_row_least(l.row, l.blocks, l.mult, above, BARRED, &least, u.at)
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
    least = BARRED
    for key in range(first, p.v.layer_first[layer + 1]):
        c = fc_chance(place_of(p, u, key), l.mult)
        if c > least or c >= BARRED or (c == least and u.seen[key].stamp > u.seen[best].stamp):
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
    cdef double passed, ahead, most
    while True:
        while u.n_unknown[set_] > 0:
            u.n_unknown[set_] -= 1
            look_up(p, u, mode, cls, u.unknown[set_ * n + u.n_unknown[set_]])
        # Layers up to the open one come round after the others: a whole round is added to them.
        passed = fc_greatest(due, u.layer + 1)
        ahead = fc_greatest(due + u.layer + 1, n - u.layer - 1)
        most = max(passed + n, ahead)
        at = -1
        if passed + n == most:
            for layer in range(0, u.layer + 1):
                if due[layer] == passed and least[layer].key >= 0 and (at < 0 or least[layer].stamp < least[at].stamp):
                    at = layer
        if ahead == most:
            for layer in range(u.layer + 1, n):
                if due[layer] == ahead and least[layer].key >= 0 and (at < 0 or least[layer].stamp < least[at].stamp):
                    at = layer
        if at < 0:
            return -1
        slot = p.v.slot_of[least[at].key]
        if not park(p, slot):
            return slot
        close_key(p, u, least[at].key, slot)        # leased since it was looked up
