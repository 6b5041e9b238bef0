"""What a store says of itself: counters, memory, holders of pass-through buffers, broken invariants.

Owns Reporter, a Core. May import core, and everything below it.
"""
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from fastcache_ext.arena import huge_bytes
from fastcache_ext.counters import ERRORS, LAYER_NAMES, NAMES, PHASES

from fastcache_ext.arena cimport FC_HOLDERS, arena_ref, arena_unref, fc_arena
from fastcache_ext.atomics cimport fc_load32, fc_load64
from fastcache_ext.core cimport Core
from fastcache_ext.counters cimport (
    FC_ERRNOS, FC_ERROR_READ_FAILED, FC_FIRST_ERROR, FC_FIRST_WAIT, FC_PHASES, L_HITS, L_JOINS, L_MISSES, N_COUNTERS, N_ERRORS,
    N_LAYER_COUNTERS, N_NAMED, N_WAIT_BUCKETS, counters_phase, counters_read,
)
from fastcache_ext.monitor cimport core_lock, core_unlock
from fastcache_ext.recorder cimport T_PHASE, note
from fastcache_ext.table cimport fc_table, table_check, table_here
from fastcache_ext.uring cimport uring_flags, uring_registered
from fastcache_ext.waiting cimport waiting_check


cdef dict counters_of(const int64_t *rows, const int64_t *errnos, int first, int end):
    """Phases [first, end) in one dict: {name: int}, "errors" {class: int}, "read_errnos" {errno: int}, "demand_wait_buckets"."""
    cdef int64_t total[N_COUNTERS]
    cdef int64_t failed
    cdef int i, p
    for i in range(N_COUNTERS):
        total[i] = 0
        for p in range(first, end):
            total[i] += rows[p * N_COUNTERS + i]
    values = {NAMES[i]: total[i] for i in range(N_NAMED)}
    values["errors"] = {ERRORS[i]: total[FC_FIRST_ERROR + i] for i in range(N_ERRORS)}
    values["read_errnos"] = by_errno = {}
    for i in range(FC_ERRNOS if total[FC_FIRST_ERROR + FC_ERROR_READ_FAILED] else 0):
        failed = 0
        for p in range(first, end):
            failed += errnos[p * FC_ERRNOS + i]
        if failed:
            by_errno[i] = failed
    values["demand_wait_buckets"] = tuple([total[FC_FIRST_WAIT + i] for i in range(N_WAIT_BUCKETS)])
    return values


cdef class Reporter(Core):
    """A Core that can be asked what it did and what it has. Every method may be called from any thread."""

    def _counters(self, bint by_layer=False, bint by_phase=False, int tries=1000):
        """(counters, by layer, by phase), from one untorn snapshot; see `counters_of` for one such dict.

        by layer: {layer: {name: int}}; by phase: {phase: (counters, by layer)}. Empty where not asked for.
        Takes the mutex only after `tries` snapshots that a writer has spoilt.
        """
        cdef int64_t rows[FC_PHASES * N_COUNTERS]
        cdef int64_t errnos[FC_PHASES * FC_ERRNOS]
        cdef int64_t *layers = NULL
        cdef int p, span = self.n_layers * N_LAYER_COUNTERS
        if self.c == NULL or self.forked():
            self.check()
        if by_layer:
            layers = <int64_t *>malloc(FC_PHASES * span * sizeof(int64_t) + 1)
            if layers == NULL:
                raise MemoryError
        try:
            if not counters_read(&self.c.counters, rows, errnos, layers, tries):
                core_lock(self.c)       # writers come thick and fast: ask them to wait
                counters_read(&self.c.counters, rows, errnos, layers, 1)
                core_unlock(self.c)
            every = counters_of(rows, errnos, 0, FC_PHASES)
            phases = {PHASES[p]: (counters_of(rows, errnos, p, p + 1), self.layers_of(layers, p, p + 1))
                      for p in range(FC_PHASES if by_phase else 0)}
            return every, self.layers_of(layers, 0, FC_PHASES), phases
        finally:
            free(layers)

    cdef dict layers_of(self, const int64_t *layers, int first, int end):
        cdef int64_t total[N_LAYER_COUNTERS]
        cdef int i, j, p
        out = {}
        for i in range(self.n_layers if layers != NULL else 0):
            for j in range(N_LAYER_COUNTERS):
                total[j] = 0
                for p in range(first, end):
                    total[j] += layers[(p * self.n_layers + i) * N_LAYER_COUNTERS + j]
            counts = {"requests": total[L_HITS] + total[L_JOINS] + total[L_MISSES]}
            for j in range(N_LAYER_COUNTERS):
                counts[LAYER_NAMES[j]] = total[j]
            out[self.layer_number[i]] = counts
        return out

    def _gauges(self):
        """What is held now, outside the counters: leased slots, and bytes of pass-through buffers. As it was at close, later."""
        cdef fc_arena *a
        cdef int32_t i, leased = 0
        if self.c == NULL or self.forked() or self.shutting or self.c.arena == NULL:
            last = self.last or {}
            return {"leased_slots": last.get("leased_slots", 0), "overflow_bytes": last.get("overflow_bytes", 0),
                    "overflow_peak_bytes": last.get("overflow_peak", 0)}
        a = self.c.arena
        for i in range(a.n_slots):
            leased += fc_load32(&a.leases[i]) > 0
        return {"leased_slots": leased, "overflow_bytes": fc_load64(&a.overflow_bytes),
                "overflow_peak_bytes": fc_load64(&a.overflow_peak)}

    def _set_phase(self, int32_t phase):
        """Count what is requested from now on in another phase. Returns the former."""
        cdef int32_t former
        if not 0 <= phase < FC_PHASES:
            raise ValueError(phase)
        if self.c == NULL or self.forked():
            self.check()
        core_lock(self.c)
        note(self.c.recorder, T_PHASE, 0, phase, 0)
        former = counters_phase(&self.c.counters, phase)
        core_unlock(self.c)
        return former

    def _is_open(self):
        """Whether calls would be served: not closed, and not a forked child's."""
        return self.c != NULL and not self.forked() and not fc_load32(&self.c.closing)

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
        trading = self._trading()
        return {
            "arena_bytes": a.nbytes,
            "class_slots": trading[0],
            "slab_bytes": a.slabs.nbytes,
            "slabs": a.slabs.n,
            "trades": trading[1],
            "traded_out": trading[2],
            "slots": sum(trading[0]),
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

    def _trading(self):
        """([slots that each class has now], slabs that have changed hands, residents evicted for that)."""
        cdef fc_table *t
        cdef int64_t trades = 0, gone = 0
        cdef int32_t n[16]
        cdef int c
        if self.c == NULL or self.c.arena == NULL:
            return [], 0, 0
        t = &self.c.table
        core_lock(self.c)
        memcpy(n, t.n_of, sizeof(n))
        if t.trading != NULL:
            trades, gone = t.trading.trades, t.trading.given_up
        core_unlock(self.c)
        return [n[c] for c in range(self.c.arena.n_classes)], trades, gone

    def _vacant(self):
        """[slots that hold nothing] per class. Walks the slots."""
        cdef int32_t s
        cdef int c
        cdef int n[16]
        self.check()
        for c in range(16):
            n[c] = 0
        core_lock(self.c)
        for s in range(self.c.table.n_slots):
            n[self.c.arena.cls[s]] += self.c.table.key_of[s] < 0 and table_here(&self.c.table, s)
        core_unlock(self.c)
        return [n[c] for c in range(self.c.arena.n_classes)]

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
            rc = rc if rc != 0 else waiting_check(self.c)
            core_unlock(self.c)
        return rc
