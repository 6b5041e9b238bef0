# What happened, as numbers. One writer at a time (the mutex holder); read without the mutex through a sequence lock.
# The identities between them stand in docs/design.md; the names in counters.pyx, in this order.
# Everything is kept per phase and summed by the reader: a hit adds to the row of the phase that the store is in.
from libc.stdint cimport int32_t, int64_t

from fastcache_ext.atomics cimport fc_bump64, fc_fence_release, fc_peek64, fc_poke64

cdef extern from *:
    """
    #include <stdint.h>
    /* bucket i: more than 2**(i - 1) microseconds and at most 2**i; the last one has no upper edge */
    static inline int fc_wait_bucket(int64_t ns, int buckets) {
        int64_t us = (ns + 999) / 1000;
        int i = us <= 1 ? 0 : 64 - __builtin_clzll((unsigned long long)(us - 1));
        return i < buckets ? i : buckets - 1; }
    """
    int fc_wait_bucket(int64_t ns, int buckets) noexcept nogil

cdef enum:
    FC_PHASES = 3           # none, prefill, decode
    FC_ERRNOS = 134         # 0: an errno beyond

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
    C_DEMAND_WAIT_NS
    C_READS
    C_READS_IN_FLIGHT
    C_BYTES_IN_FLIGHT
    C_BYTES_SUBMITTED
    C_BYTES_DIRECT
    N_NAMED                 # from here on: families that have one name each

cdef enum:                  # errors by class: FC_FIRST_ERROR + FC_ERROR_*
    FC_ERROR_SHORT_READ = 0
    FC_ERROR_READ_FAILED
    FC_ERROR_CHANGED
    FC_ERROR_SOURCE
    FC_ERROR_OVERFLOW
    FC_ERROR_TIMEOUT
    FC_ERROR_CLOSED
    FC_ERROR_CHECKSUM
    N_ERRORS

cdef enum:
    N_WAIT_BUCKETS = 26     # up to 2**24 microseconds, and the rest
    FC_FIRST_ERROR = N_NAMED
    FC_FIRST_WAIT = N_NAMED + N_ERRORS
    N_COUNTERS = N_NAMED + N_ERRORS + N_WAIT_BUCKETS

cdef enum:                  # per layer
    L_HITS = 0
    L_JOINS
    L_MISSES
    L_DEMAND_LOADS
    L_PREFETCH_LOADS
    L_PASS_THROUGHS
    L_FIRST_CONSUMPTIONS
    L_WASTED
    L_EVICTIONS
    L_BYTES_READ
    L_DEMAND_WAIT_NS
    N_LAYER_COUNTERS

ctypedef struct fc_counters:
    int64_t seq             # odd while a writer is inside
    int32_t phase           # index of the phase that the store is in
    int32_t n_layers
    int64_t *now            # rows[phase]
    int64_t *layers_now     # the phase's part of `layers`
    int64_t *layers         # [FC_PHASES, n_layers, N_LAYER_COUNTERS]
    int64_t rows[FC_PHASES][N_COUNTERS]
    int64_t errnos[FC_PHASES][FC_ERRNOS]        # reads that failed, by errno

cdef inline void count_begin(fc_counters *c) noexcept nogil:
    fc_bump64(&c.seq, 1)
    fc_fence_release()

cdef inline void count_end(fc_counters *c) noexcept nogil:
    fc_fence_release()
    fc_bump64(&c.seq, 1)

# What a request does counts in the phase that the store is in ...
cdef inline void count(fc_counters *c, int what, int64_t by) noexcept nogil:
    fc_bump64(&c.now[what], by)

cdef inline void count_layer(fc_counters *c, int layer, int what, int64_t by) noexcept nogil:
    fc_bump64(&c.layers_now[layer * N_LAYER_COUNTERS + what], by)

# ... and what becomes of it later, in the phase of the request.
cdef inline void count_in(fc_counters *c, int phase, int what, int64_t by) noexcept nogil:
    fc_bump64(&c.rows[phase][what], by)

cdef inline void count_layer_in(fc_counters *c, int phase, int layer, int what, int64_t by) noexcept nogil:
    fc_bump64(&c.layers[(phase * c.n_layers + layer) * N_LAYER_COUNTERS + what], by)

cdef inline void count_wait(fc_counters *c, int phase, int layer, int64_t ns) noexcept nogil:
    count_in(c, phase, FC_FIRST_WAIT + fc_wait_bucket(ns, N_WAIT_BUCKETS), 1)
    count_in(c, phase, C_DEMAND_WAIT_NS, ns)
    count_layer_in(c, phase, layer, L_DEMAND_WAIT_NS, ns)

cdef int counters_init(fc_counters *c, int32_t n_layers) noexcept nogil         # 0 or -ENOMEM
cdef void counters_destroy(fc_counters *c) noexcept nogil
cdef int32_t counters_phase(fc_counters *c, int32_t phase) noexcept nogil       # returns the former; the mutex is held
# A failure that the caller of a read will see: `error` is a positive errno or FC_E*. Between count_begin and count_end.
cdef void count_error(fc_counters *c, int phase, int error) noexcept nogil
# One untorn snapshot: rows [FC_PHASES * N_COUNTERS], errnos [FC_PHASES * FC_ERRNOS], layers (or NULL) as in the struct.
# False after `tries` that a writer has spoilt each; with the mutex held one is enough.
cdef bint counters_read(const fc_counters *c, int64_t *rows, int64_t *errnos, int64_t *layers, int tries) noexcept nogil
