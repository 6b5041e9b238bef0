# Ghost caches of every policy, and LRU's stack distances, over a fixed sample of the experts and the running demand traffic.
# Two sides: what is heard, under the store's mutex (a tag, and for sampled experts one entry of a ring), and what is made of it,
# elsewhere and later, under `busy`.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t

from fastcache_ext.atomics cimport fc_acquire32, fc_release32
from fastcache_ext.ghost cimport fc_ghost, fc_shape
from fastcache_ext.stack cimport fc_stack
from fastcache_ext.threads cimport pthread_cond_signal, pthread_cond_t, pthread_mutex_t

cdef enum:
    MAX_GHOSTS = 8
    GHOSTS_PIECE = 1024     # entries that are digested between two looks at anything else
    VISIT = 0x8000          # in an entry: a visit of this layer begins

ctypedef struct fc_tag:
    uint16_t run            # the visit in which the expert was last asked for, modulo 65,536
    uint16_t rank           # 1 + its number in the sample; 0: not sampled

ctypedef struct fc_ghosts:
    # heard; under the store's mutex
    fc_tag *tags            # [n_keys]
    int32_t layer           # of the open visit, or -1
    uint16_t run            # its number, modulo 65,536
    uint8_t told            # 1: its beginning stands in the ring
    uint16_t *ring          # [room] a sampled expert's number, or VISIT | layer
    uint32_t room           # a power of two
    uint32_t head           # entries put, modulo 2^32; who takes them reads it without the mutex
    uint32_t tail           # entries taken; written by who takes them, under busy
    int64_t heard           # requests
    int64_t lost            # of those, what the ghosts should have known and found the ring full
    uint8_t asleep          # 1: who takes entries waits at `wake`, and does not look by itself
    pthread_cond_t *wake
    # digested; under busy
    pthread_mutex_t busy
    int32_t every           # one expert in so many is sampled
    int32_t pool            # experts that a slot could hold
    int32_t tracked         # of them sampled
    int64_t slots           # of the store
    fc_shape shape
    int32_t n_ghosts
    int32_t kinds[MAX_GHOSTS]
    fc_ghost ghost[MAX_GHOSTS]
    fc_stack stack
    int32_t open_layer      # of the visit that is being read out of the ring, or -1
    int32_t n_open
    int32_t *open_keys      # [most sampled experts of a layer]
    uint8_t *open_hits
    int64_t sampled         # requests fed to the ghosts
    int64_t hits[MAX_GHOSTS]            # of those
    int64_t until_halved    # sampled requests until the stack's older ones count half
    int32_t window          # sampled requests per window
    int32_t window_sampled
    int32_t window_hits[MAX_GHOSTS]
    int64_t windows         # closed ones
    double rates[MAX_GHOSTS]            # hit rates: half the last window, half what was before
    # the choice; under busy
    int32_t choosing        # 1: policy="auto"
    int32_t used            # index of the policy in use
    int32_t leader          # index of the best one at the last window
    int32_t leads           # windows in a row that it was ahead by the margin
    int64_t settled         # windows until which no switch comes
    int64_t switches

# `span[k]` < 0: no such expert. `slots`: of the store, [n_classes]. NULL without memory, or when nothing could be sampled.
cdef fc_ghosts *ghosts_new(int32_t n_layers, const int32_t *layer_first, const uint8_t *cls_of, const int64_t *span,
                           int32_t n_classes, const int32_t *slots, const int32_t *kinds, int32_t n_kinds,
                           int32_t every) noexcept nogil
cdef void ghosts_free(fc_ghosts *g) noexcept nogil
# Take up to `room` entries out of the ring; `busy` is held, the store's mutex need not be.
cdef int ghosts_take(fc_ghosts *g, uint16_t *out, int room) noexcept nogil
# Serve them; `busy` is held, the store's mutex is not. Returns the policy to change to, or -1.
cdef int ghosts_digest(fc_ghosts *g, const uint16_t *entries, int n) noexcept nogil
# The store now runs `kind`.
cdef void ghosts_used(fc_ghosts *g, int kind) noexcept nogil
cdef int ghosts_check(fc_ghosts *g) noexcept nogil

cdef inline uint32_t ghosts_waiting(const fc_ghosts *g) noexcept nogil:
    """How many entries are in the ring."""
    return fc_acquire32(&g.head) - fc_acquire32(&g.tail)

# Put into the ring what the ghosts have to know of a request: that a visit begins, and a sampled expert's rank - 1.
cdef inline void ghosts_tell(fc_ghosts *g, int32_t layer, uint16_t rank) noexcept nogil:
    cdef uint32_t head = g.head
    if head - fc_acquire32(&g.tail) > g.room - 2:       # no room for a visit and an expert
        g.lost += 1
        g.told = 0                      # what comes next is a visit of its own
        return
    if not g.told:
        g.told = 1
        g.ring[head & (g.room - 1)] = <uint16_t>(VISIT | layer)
        head += 1
    if rank > 0:
        g.ring[head & (g.room - 1)] = <uint16_t>(rank - 1)
        head += 1
    fc_release32(&g.head, head)
    # Seldom, for to wake a thread costs as much as a hundred hits: at the first of all, and where half a ring is passed.
    if g.asleep or head - fc_acquire32(&g.tail) - g.room // 2 < 2:
        g.asleep = 0
        pthread_cond_signal(g.wake)

# A demand for `key`, in request order; the store's mutex is held. The tags depend on nothing but the requests so far.
cdef inline void ghosts_hear(fc_ghosts *g, int32_t key, int32_t layer) noexcept nogil:
    cdef fc_tag *tag = &g.tags[key]
    g.heard += 1
    if layer != g.layer or tag.run == g.run:
        g.layer = layer
        g.run += 1
        g.told = 0
    tag.run = g.run
    if tag.rank > 0 or not g.told:
        ghosts_tell(g, layer, tag.rank)
