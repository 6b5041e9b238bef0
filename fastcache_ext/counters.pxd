# What happened, as numbers. One writer at a time (the mutex holder); read without the mutex through a sequence lock.
# The identities between them stand in docs/design.md; the names in counters.pyx, in this order.
from libc.stdint cimport int64_t

from fastcache_ext.atomics cimport fc_bump64, fc_fence_release, fc_peek64, fc_poke64

cdef enum:
    C_REQUESTS = 0
    C_HITS
    C_JOINS
    C_MISSES
    C_DEMAND_LOADS
    C_DEMAND_FAILURES
    C_PASS_THROUGHS
    C_PASS_THROUGH_FAILURES
    C_DEMAND_CANCELLED
    C_MISSES_IN_FLIGHT
    C_JOINS_OK
    C_JOIN_FAILURES
    C_JOINS_IN_FLIGHT
    C_LATE_JOINS
    C_LATE_JOINS_OK
    C_LATE_JOIN_WAIT_NS
    C_PREFETCH_ISSUED
    C_PREFETCH_LOADS
    C_PREFETCH_FAILURES
    C_PREFETCH_CANCELLED
    C_PREFETCH_IN_FLIGHT
    C_FIRST_CONSUMPTIONS
    C_WASTED
    C_UNREAD_RESIDENT
    C_EVICTIONS
    C_RESIDENT_EXPERTS
    C_BYTES_READ
    C_PREFETCH_BYTES
    C_PASS_THROUGH_BYTES
    C_HITS_ON_HELD
    N_COUNTERS

cdef enum:                  # per layer
    L_HITS = 0
    L_JOINS
    L_MISSES
    L_LOADS
    L_BYTES_READ
    N_LAYER_COUNTERS

ctypedef struct fc_counters:
    int64_t seq             # odd while a writer is inside
    int64_t n[32]
    int64_t *layers         # [n_layers * N_LAYER_COUNTERS]

cdef inline void count_begin(fc_counters *c) noexcept nogil:
    fc_bump64(&c.seq, 1)
    fc_fence_release()

cdef inline void count_end(fc_counters *c) noexcept nogil:
    fc_fence_release()
    fc_bump64(&c.seq, 1)

cdef inline void count(fc_counters *c, int what, int64_t by) noexcept nogil:
    fc_bump64(&c.n[what], by)

cdef inline void count_layer(fc_counters *c, int layer, int what, int64_t by) noexcept nogil:
    fc_bump64(&c.layers[layer * N_LAYER_COUNTERS + what], by)

cdef void counters_read(const fc_counters *c, int64_t *out, int64_t *layers, int n_layers) noexcept nogil
