"""What a store says of itself: counters, memory, holders of pass-through buffers, broken invariants.

Owns Reporter, a Core. May import core, and everything below it.
"""
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free, malloc

from fastcache_ext.arena import huge_bytes
from fastcache_ext.counters import LAYER_NAMES, NAMES

from fastcache_ext.arena cimport FC_HOLDERS, arena_ref, arena_unref, fc_arena
from fastcache_ext.atomics cimport fc_load32, fc_load64
from fastcache_ext.core cimport Core
from fastcache_ext.counters cimport N_COUNTERS, N_LAYER_COUNTERS, counters_read
from fastcache_ext.monitor cimport core_lock, core_unlock
from fastcache_ext.table cimport table_check
from fastcache_ext.uring cimport uring_flags, uring_registered


cdef class Reporter(Core):
    """A Core that can be asked what it did and what it has. Every method may be called from any thread."""

    def _counters(self, bint by_layer=False):
        """{name: int}; with `by_layer` also {layer: {name: int}}, from one untorn snapshot."""
        cdef int64_t out[N_COUNTERS]
        cdef int64_t *layers = NULL
        cdef int i, j
        if self.c == NULL or self.forked():
            self.check()
        if by_layer:
            layers = <int64_t *>malloc(self.n_layers * N_LAYER_COUNTERS * sizeof(int64_t) + 1)
            if layers == NULL:
                raise MemoryError
        counters_read(&self.c.counters, out, layers, self.n_layers)
        values = {NAMES[i]: out[i] for i in range(N_COUNTERS)}
        values["bytes_submitted"] = fc_load64(&self.c.bytes_submitted)
        values["bytes_direct"] = fc_load64(&self.c.bytes_direct)
        if not by_layer:
            return values, {}
        try:
            return values, {
                self.layer_number[i]: {LAYER_NAMES[j]: layers[i * N_LAYER_COUNTERS + j] for j in range(N_LAYER_COUNTERS)}
                for i in range(self.n_layers)
            }
        finally:
            free(layers)

    def _memory(self):
        """What the kernel really gave: bytes, and errnos where it refused. As it was at close, afterwards."""
        cdef fc_arena *a
        cdef int error = 0, pieces = 0, flags = 0
        cdef int32_t i, leased = 0
        cdef int64_t registered = 0
        if self.forked():
            self.check()
        if self.c == NULL or self.shutting or self.c.arena == NULL:
            return dict(self.last or {})
        a = self.c.arena
        if self.ring != NULL:           # before anything lets the GIL go: close() in another thread frees the ring
            flags = uring_flags(self.ring)
            pieces = uring_registered(self.ring, &error)
            for i in range(pieces):
                registered += a.piece_bytes[i]
        for i in range(a.n_slots):
            leased += fc_load32(&a.leases[i]) > 0
        arena_ref(a)
        try:
            huge = huge_bytes(<uintptr_t>a.base, a.nbytes) if a.nbytes else 0
        except OSError:                 # no /proc, or no descriptor left: not known
            huge = 0
        finally:
            arena_unref(a)
        if self.shutting:
            return dict(self.last or {})
        return {
            "arena_bytes": a.nbytes,
            "slots": a.n_slots,
            "leased_slots": leased,
            "populated_bytes": min(fc_load64(&a.populated), a.nbytes),
            "huge_bytes": huge,
            "huge_errno": a.huge_errno,
            "locked_bytes": fc_load64(&a.locked),
            "registered_bytes": registered,
            "registration_errno": error,
            "populate_errno": fc_load32(&self.worker.populate_errno),
            "mlock_errno": fc_load32(&self.worker.mlock_errno),
            "settled": bool(fc_load32(&self.worker.settled)),
            "overflow_bytes": fc_load64(&a.overflow_bytes),
            "overflow_peak": fc_load64(&a.overflow_peak),
            "ring_flags": flags,
        }

    def _progress(self):
        """(populated bytes, whether memory is settled, errno of populating): cheap enough to poll."""
        if self.c == NULL or self.c.arena == NULL:
            return 0, True, 0
        return (min(fc_load64(&self.c.arena.populated), self.c.arena.nbytes),
                bool(fc_load32(&self.worker.settled)), fc_load32(&self.worker.populate_errno))

    def _holders(self):
        """[(layer, expert, bytes)] of live pass-through buffers, largest first, as far as they can be named."""
        cdef int32_t i, key
        found = []
        if self.c != NULL and self.c.arena != NULL:
            for i in range(FC_HOLDERS):
                key = fc_load32(&self.c.arena.holders[i].key)
                if key >= 0:
                    found.append((*self._where(key), self.c.arena.holders[i].nbytes))
        return sorted(found, key=lambda holder: -holder[2])

    def _check(self):
        """0, or the number of a broken invariant. Walks every slot: for tests."""
        cdef int rc = 0
        if self.c != NULL and self.c.arena != NULL:
            core_lock(self.c)
            rc = table_check(&self.c.table)
            core_unlock(self.c)
        return rc
