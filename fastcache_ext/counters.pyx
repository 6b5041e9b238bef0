"""Counters that can be read at any time without the store's mutex, and are never torn.

May import libc and atomics.
"""
from libc.stdint cimport int64_t

from fastcache_ext.atomics cimport fc_fence_acquire, fc_load64, fc_peek64

NAMES = (
    "requests", "hits", "joins", "misses",
    "demand_loads", "demand_failures", "pass_throughs", "pass_through_failures", "demand_cancelled", "misses_in_flight",
    "joins_ok", "join_failures", "joins_in_flight", "late_joins", "late_joins_ok", "late_join_wait_ns",
    "prefetch_issued", "prefetch_loads", "prefetch_failures", "prefetch_cancelled", "prefetch_in_flight",
    "first_consumptions", "wasted", "unread_resident",
    "evictions", "resident_experts", "bytes_read", "prefetch_bytes", "pass_through_bytes", "hits_on_held",
)
LAYER_NAMES = ("hits", "joins", "misses", "loads", "bytes_read")

if len(NAMES) != N_COUNTERS or len(LAYER_NAMES) != N_LAYER_COUNTERS:
    raise ImportError("counters.pxd and counters.pyx disagree")


cdef void counters_read(const fc_counters *c, int64_t *out, int64_t *layers, int n_layers) noexcept nogil:
    cdef int64_t before
    cdef int i
    while True:
        before = fc_load64(&c.seq)
        if before & 1:
            continue
        for i in range(N_COUNTERS):
            out[i] = fc_peek64(&c.n[i])
        if layers != NULL:
            for i in range(n_layers * N_LAYER_COUNTERS):
                layers[i] = fc_peek64(&c.layers[i])
        fc_fence_acquire()
        if fc_load64(&c.seq) == before:
            return
