"""The sample, and what its ghosts make of the traffic.

Which experts are sampled is fixed at open: of every layer the same share, chosen by a hash, so that no layer counts more than it
should; a pool of up to WHOLE experts whole, of larger ones as many as BYTES per expert of the pool pay for. Nothing here grows with
the traffic: while the ring is full requests are lost, and counted, and the next one begins a new visit.
The choice: a window of sampled requests gives every ghost a hit rate, halved into what was before. The policy in use is replaced
when another is ahead of it by the margin in LEADS windows in a row, and not within REST windows of the last switch.
May import libc, atomics, ghost, stack and threads.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, qsort
from libc.string cimport memcpy

from fastcache_ext.atomics cimport fc_release32
from fastcache_ext.ghost cimport GHOST_CLASSES, ghost_check, ghost_destroy, ghost_init, ghost_visit, shape_destroy, shape_init
from fastcache_ext.stack cimport STACK_MAX_KEYS, stack_ask, stack_destroy, stack_halve, stack_init
from fastcache_ext.threads cimport pthread_mutex_destroy, pthread_mutex_init

cdef enum:
    WHOLE = 1024            # a pool that is sampled whole; of larger ones an eighth is, or less:
    TRACKED = 4096          # experts that are sampled at most
    BYTES = 32              # per expert of the pool, for all of this; but one in SPARSE of a MIDDLING pool is sampled at the least
    SPARSE = 16
    PER_KEY = 76            # bytes that five ghosts and the stack take per sampled expert,
    PER_SLOT = 205          # per slot for it,
    PER_LAYER = 400         # per layer,
    FIXED = 11000           # and besides
    MIDDLING = 4096         # a pool for whose sample the shorter ring is long enough
    RING = 8192
    SHORT_RING = 2048
    WHOLE_RING = 4096
    HALVING = 1 << 17       # sampled requests after which older ones count half in the stack distances
    WINDOW = 1024           # sampled requests per window at least
    LEADS = 3
    REST = 6

cdef double FEWER_MISSES = 0.05     # a better policy saves at least this share of the misses
cdef double MORE_HITS = 0.005       # and at least this share of the requests


cdef inline uint64_t mixed(uint64_t x) noexcept nogil:
    """splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    x += <uint64_t>0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


cdef int ascending(const void *a, const void *b) noexcept nogil:
    cdef uint64_t x = (<const uint64_t *>a)[0], y = (<const uint64_t *>b)[0]
    return (x > y) - (x < y)


cdef uint32_t ring_of(int32_t pool) noexcept nogil:
    """A ring is to stay in the processor's first cache, and to hold a prefill's unions."""
    return WHOLE_RING if pool <= WHOLE else SHORT_RING if pool <= MIDDLING else RING


cdef bint cacheable(int32_t key, const uint8_t *cls_of, const int64_t *span, int32_t n_classes) noexcept nogil:
    return cls_of[key] < n_classes and (span == NULL or span[key] >= 0)


cdef int32_t one_in(int32_t pool, int32_t slots, int32_t n_layers) noexcept nogil:
    """Of how many experts one is sampled."""
    cdef int32_t every = 8
    cdef int64_t beside = sizeof(fc_tag) * <int64_t>pool + PER_LAYER * <int64_t>n_layers + 2 * ring_of(pool) + FIXED
    if pool <= WHOLE:
        return 1
    while (pool // every > TRACKED or (pool > MIDDLING or every < SPARSE)
           and beside + (PER_KEY * <int64_t>pool + PER_SLOT * <int64_t>slots) // every > BYTES * <int64_t>pool):
        every *= 2
    return every


cdef int sample(fc_ghosts *g, int32_t n_layers, const int32_t *layer_first, const uint8_t *cls_of, const int64_t *span,
                int32_t n_classes, const int32_t *slots) noexcept nogil:
    """Fill tags and shape: of each layer the experts with the least hashes, as many as its share."""
    cdef int32_t l, k, i, n, most = 0, taken = 0, last = 0
    cdef int32_t keys[GHOST_CLASSES]
    cdef int32_t sampled[GHOST_CLASSES]
    cdef int64_t seen = 0
    cdef uint64_t *order
    cdef int32_t *per_layer = <int32_t *>calloc(n_layers + 1, sizeof(int32_t))
    for l in range(n_layers):
        most = max(most, layer_first[l + 1] - layer_first[l])
    order = <uint64_t *>calloc(most + 1, sizeof(uint64_t))
    if per_layer == NULL or order == NULL:
        free(per_layer)
        free(order)
        return -1
    for i in range(GHOST_CLASSES):
        keys[i] = sampled[i] = 0
    for l in range(n_layers):
        n = 0
        for k in range(layer_first[l], layer_first[l + 1]):
            if cacheable(k, cls_of, span, n_classes):
                order[n] = (mixed(<uint64_t>k) & ~<uint64_t>0xFFFFFF) | <uint64_t>(k - layer_first[l])
                n += 1
                keys[cls_of[k]] += 1
        qsort(order, <size_t>n, sizeof(uint64_t), ascending)
        seen += n
        per_layer[l] = <int32_t>(seen // g.every) - taken
        for i in range(per_layer[l]):
            k = layer_first[l] + <int32_t>(order[i] & 0xFFFFFF)
            g.tags[k].rank = 1
            sampled[cls_of[k]] += 1
        taken += per_layer[l]
        last = max(last, per_layer[l])
    free(order)
    g.pool = <int32_t>seen
    g.tracked = taken
    i = shape_init(&g.shape, n_layers, per_layer, n_classes, slots, keys, sampled)
    free(per_layer)
    g.open_keys = <int32_t *>calloc(last + 1, sizeof(int32_t))
    g.open_hits = <uint8_t *>calloc(last + 1, 1)
    if i != 0 or g.open_keys == NULL or g.open_hits == NULL:
        return -1
    n = 0
    for l in range(n_layers):
        for k in range(layer_first[l], layer_first[l + 1]):
            if g.tags[k].rank > 0:
                g.shape.cls_of[n] = cls_of[k]
                n += 1
                g.tags[k].rank = <uint16_t>n
    return 0


cdef fc_ghosts *ghosts_new(int32_t n_layers, const int32_t *layer_first, const uint8_t *cls_of, const int64_t *span,
                           int32_t n_classes, const int32_t *slots, const int32_t *kinds, int32_t n_kinds,
                           int32_t every) noexcept nogil:
    cdef fc_ghosts *g = <fc_ghosts *>calloc(1, sizeof(fc_ghosts))
    cdef int32_t k, i, pool = 0, n_keys = layer_first[n_layers]
    if g == NULL:
        return NULL
    pthread_mutex_init(&g.busy, NULL)
    for k in range(n_keys):
        pool += cacheable(k, cls_of, span, n_classes)
    for i in range(n_classes):
        g.slots += slots[i]
    g.every = every if every > 0 else one_in(pool, <int32_t>min(g.slots, <int64_t>pool), n_layers)
    g.room = ring_of(pool)
    g.layer = g.open_layer = -1
    g.asleep = 1
    g.until_halved = HALVING
    g.tags = <fc_tag *>calloc(n_keys + 1, sizeof(fc_tag))
    g.ring = <uint16_t *>calloc(g.room, sizeof(uint16_t))
    if (g.tags == NULL or g.ring == NULL or pool == 0 or pool // g.every + n_layers >= STACK_MAX_KEYS
            or n_layers >= VISIT or n_kinds > MAX_GHOSTS
            or sample(g, n_layers, layer_first, cls_of, span, n_classes, slots) != 0
            or stack_init(&g.stack, g.shape.n_keys) != 0):
        ghosts_free(g)
        return NULL
    for i in range(n_kinds):
        g.kinds[i] = kinds[i]
        g.n_ghosts += 1
        if ghost_init(&g.ghost[i], &g.shape, kinds[i]) != 0:
            ghosts_free(g)
            return NULL
    g.window = max(<int32_t>WINDOW, 4 * g.shape.n_slots)
    return g


cdef void ghosts_free(fc_ghosts *g) noexcept nogil:
    cdef int32_t i
    if g == NULL:
        return
    for i in range(g.n_ghosts):
        ghost_destroy(&g.ghost[i])
    stack_destroy(&g.stack)
    shape_destroy(&g.shape)
    free(g.open_keys)
    free(g.open_hits)
    free(g.tags)
    free(g.ring)
    pthread_mutex_destroy(&g.busy)
    free(g)


cdef int ghosts_take(fc_ghosts *g, uint16_t *out, int room) noexcept nogil:
    cdef uint32_t at = g.tail & (g.room - 1)
    cdef uint32_t n = min(ghosts_waiting(g), <uint32_t>room)
    cdef uint32_t straight = min(n, g.room - at)
    memcpy(out, &g.ring[at], straight * sizeof(uint16_t))
    memcpy(out + straight, g.ring, (n - straight) * sizeof(uint16_t))
    fc_release32(&g.tail, g.tail + n)
    return <int>n


cdef void serve(fc_ghosts *g) noexcept nogil:
    """The visit that was read is complete: all ghosts and the stack have it."""
    cdef int32_t i, found
    for i in range(g.n_ghosts):
        found = ghost_visit(&g.ghost[i], g.open_layer, g.open_keys, g.n_open, g.open_hits)
        g.hits[i] += found
        g.window_hits[i] += found
    for i in range(g.n_open):
        stack_ask(&g.stack, g.open_keys[i])
    g.sampled += g.n_open
    g.window_sampled += g.n_open
    g.until_halved -= g.n_open
    if g.until_halved <= 0:
        stack_halve(&g.stack)
        g.until_halved = HALVING


cdef int choose(fc_ghosts *g) noexcept nogil:
    """A window has closed. Returns the policy to change to, or -1."""
    cdef int32_t i, best = g.used
    cdef double rate, gain
    g.windows += 1
    for i in range(g.n_ghosts):
        rate = g.window_hits[i] / <double>g.window_sampled
        g.rates[i] = rate if g.windows == 1 else 0.5 * (g.rates[i] + rate)
        g.window_hits[i] = 0
        if g.rates[i] > g.rates[best]:
            best = i
    g.window_sampled = 0
    gain = g.rates[best] - g.rates[g.used]
    if best == g.used or gain < MORE_HITS or gain < FEWER_MISSES * (1.0 - g.rates[g.used]):
        g.leads = 0
        return -1
    g.leads = g.leads + 1 if g.leads > 0 and best == g.leader else 1
    g.leader = best
    return g.kinds[best] if g.choosing and g.leads >= LEADS and g.windows >= g.settled else -1


cdef int ghosts_digest(fc_ghosts *g, const uint16_t *entries, int n) noexcept nogil:
    cdef int i, wanted = -1
    for i in range(n):
        if not entries[i] & VISIT:
            g.open_keys[g.n_open] = entries[i]
            g.n_open += 1
            continue
        if g.open_layer >= 0:
            serve(g)
        g.open_layer = entries[i] & ~VISIT
        g.n_open = 0
        if g.window_sampled >= g.window:
            wanted = choose(g)
    return wanted


cdef void ghosts_used(fc_ghosts *g, int kind) noexcept nogil:
    cdef int32_t i
    for i in range(g.n_ghosts):
        if g.kinds[i] == kind:
            g.used = i
    g.leads = 0
    g.settled = g.windows + REST


cdef int ghosts_check(fc_ghosts *g) noexcept nogil:
    cdef int32_t i
    cdef int rc
    for i in range(g.n_ghosts):
        rc = ghost_check(&g.ghost[i])
        if rc != 0:
            return 10 * i + rc
    return 0
