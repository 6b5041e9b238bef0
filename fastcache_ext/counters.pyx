"""Counters that can be read at any time without the store's mutex, and are never torn.

Owns the names, and the classes of errors. May import libc, atomics, ioqueue and arena (their error codes).
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free

from fastcache_ext.arena cimport FC_EOVERFLOW
from fastcache_ext.atomics cimport fc_fence_acquire, fc_load64, fc_peek64
from fastcache_ext.ioqueue cimport (
    FC_ECANCELLED, FC_ECHANGED, FC_ECHECKSUM, FC_ECLOSED, FC_ENOROOM, FC_ESHORT, FC_ESOURCE,
)

NAMES = (
    "requests", "hits", "joins", "misses",
    "demand_loads", "demand_failures", "pass_throughs", "pass_through_failures", "demand_cancelled", "misses_in_flight",
    "joins_ok", "join_failures", "joins_in_flight", "late_joins", "late_joins_ok", "late_join_wait_ns",
    "prefetch_issued", "prefetch_loads", "prefetch_failures", "prefetch_cancelled", "prefetch_in_flight",
    "first_consumptions", "wasted", "unread_resident",
    "evictions", "resident_experts", "bytes_read", "prefetch_bytes", "pass_through_bytes", "hits_on_held",
    "demand_wait_ns", "reads", "reads_in_flight", "bytes_in_flight", "bytes_submitted", "bytes_direct",
)
ERRORS = ("short_read", "read_failed", "changed", "source", "overflow_limit", "timeout", "closed", "checksum")
LAYER_NAMES = (
    "hits", "joins", "misses", "demand_loads", "prefetch_loads", "pass_throughs", "first_consumptions", "wasted",
    "evictions", "bytes_read", "demand_wait_ns",
)
PHASES = ("none", "prefill", "decode")
WAIT_BUCKETS = N_WAIT_BUCKETS

if (len(NAMES), len(ERRORS), len(LAYER_NAMES), len(PHASES)) != (N_NAMED, N_ERRORS, N_LAYER_COUNTERS, FC_PHASES):
    raise ImportError("counters.pxd and counters.pyx disagree")


cdef int counters_init(fc_counters *c, int32_t n_layers) noexcept nogil:
    c.n_layers = n_layers
    c.layers = <int64_t *>calloc(FC_PHASES * n_layers * N_LAYER_COUNTERS + 1, sizeof(int64_t))
    if c.layers == NULL:
        return -ENOMEM
    counters_phase(c, 0)
    return 0


cdef void counters_destroy(fc_counters *c) noexcept nogil:
    free(c.layers)


cdef int32_t counters_phase(fc_counters *c, int32_t phase) noexcept nogil:
    cdef int32_t former = c.phase
    c.phase = phase
    c.now = c.rows[phase]
    c.layers_now = c.layers + phase * c.n_layers * N_LAYER_COUNTERS
    return former


cdef void count_error(fc_counters *c, int phase, int error) noexcept nogil:
    cdef int what
    if error == FC_ECANCELLED or error == FC_ENOROOM:
        return                          # somebody's wish, or a guess that was worth no eviction: no failure
    if error == FC_ESHORT:
        what = FC_ERROR_SHORT_READ
    elif error == FC_ECHANGED:
        what = FC_ERROR_CHANGED
    elif error == FC_ECHECKSUM:
        what = FC_ERROR_CHECKSUM
    elif error == FC_ECLOSED:
        what = FC_ERROR_CLOSED
    elif error == FC_ESOURCE:
        what = FC_ERROR_SOURCE
    elif error == FC_EOVERFLOW or error == ENOMEM:
        what = FC_ERROR_OVERFLOW
    else:
        what = FC_ERROR_READ_FAILED
        fc_bump64(&c.errnos[phase][error if 0 < error < FC_ERRNOS else 0], 1)
    count_in(c, phase, FC_FIRST_ERROR + what, 1)


cdef bint counters_read(const fc_counters *c, int64_t *rows, int64_t *errnos, int64_t *layers, int tries) noexcept nogil:
    cdef int64_t before, failed
    cdef int i, p
    while tries > 0:
        tries -= 1
        before = fc_load64(&c.seq)
        if before & 1:
            continue
        failed = 0
        for p in range(FC_PHASES):
            for i in range(N_COUNTERS):
                rows[p * N_COUNTERS + i] = fc_peek64(&c.rows[p][i])
            failed += rows[p * N_COUNTERS + FC_FIRST_ERROR + FC_ERROR_READ_FAILED]
        for i in range(FC_PHASES * FC_ERRNOS):
            errnos[i] = fc_peek64(&c.errnos[0][i]) if failed else 0
        if layers != NULL:
            for i in range(FC_PHASES * c.n_layers * N_LAYER_COUNTERS):
                layers[i] = fc_peek64(&c.layers[i])
        fc_fence_acquire()
        if fc_load64(&c.seq) == before:
            return True
    return False
