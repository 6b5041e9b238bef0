"""Guesser: a Lender that knows predictors by name, and says what became of their guesses.

May import lender, evidence, ioqueue, monitor, the engines, threads.
"""
import threading

from fastcache_ext.evidence import MOST, NAMES, RESERVED, STATES

from libc.stdint cimport int64_t

from fastcache_ext.atomics cimport fc_load32, fc_store32
from fastcache_ext.evidence cimport EV_PIN, EV_PREDICTORS, EV_WARM, N_EVIDENCE, fc_predictor
from fastcache_ext.ioqueue cimport FC_DEMAND, FC_GUESS, fc_queue
from fastcache_ext.lender cimport Lender
from fastcache_ext.monitor cimport core_lock, core_unlock
from fastcache_ext.threads cimport FC_IOPRIO_IDLE, FC_IOPRIO_RT, fc_get_ioprio, fc_set_ioprio
from fastcache_ext.uring cimport uring_stops

cdef int ORDINARY = 2 << 13 | 4         # what the kernel tells of a thread without a priority


cdef class Guesser(Lender):
    """A Lender with predictors. Their names are a store's own; the compiled half counts by number."""

    def __cinit__(self, *args, **kwargs):
        self.names = dict(RESERVED)
        self.naming = threading.Lock()

    cdef int predictor(self, object name) except -1:
        """The number of a predictor, given at its first use; None is "caller"."""
        if name is None:
            return 0
        if not isinstance(name, str) or not name:
            raise TypeError(f"predictor must be a name, a non-empty str; got {name!r}")
        with self.naming:
            number = self.names.setdefault(str(name), len(self.names)) if name in self.names or len(self.names) < MOST else MOST
        if number == MOST or number == EV_PIN or number == EV_WARM:
            raise ValueError(f'"{name}" is what {name}() counts as' if number != MOST else
                             f'a store tells {MOST - len(RESERVED)} predictors apart, beside "caller", pins and warm(); '
                             f"{name!r} would be one more")
        return number

    def _limit_guesses(self, int64_t nbytes, int reads, int64_t align, bint heeded):
        """Bound the guess reads at the device: `nbytes` together (0: one read), in at most so many `reads`; one may always be.

        `heeded`: the device's scheduler heeds I/O priorities. Demands then get the real-time class, where this process may
        give it, and guesses the idle one.
        """
        cdef fc_queue *q
        cdef int was = fc_get_ioprio(), demand = 0
        self.check()
        q = &self.c.queue
        heeded = heeded and (self.ring != NULL or self.pread != NULL)
        if heeded and fc_set_ioprio(FC_IOPRIO_RT) == 0:
            demand = FC_IOPRIO_RT
            fc_set_ioprio(0 if was == ORDINARY else was)
        core_lock(self.c)
        if nbytes > 0:
            q.guess_chunk = min(q.guess_chunk, max(nbytes // align * align, align))
        elif demand:                    # two reads, behind every demand: the device does not rest between them
            nbytes = 2 * q.guess_chunk
        q.guess_limit = max(nbytes, q.guess_chunk)
        q.guess_ops_limit = max(reads, 1)
        if heeded:
            fc_store32(&q.ioprio[FC_DEMAND], demand)
            fc_store32(&q.ioprio[FC_GUESS], FC_IOPRIO_IDLE)
        self.c.evidence.held_back = heeded
        core_unlock(self.c)

    def _speculation(self):
        """{"predictors": {name: {count: int, "state": str, "remembered", "hits": float, "gain_ns", "cost_ns": float}}, ...}."""
        cdef fc_predictor copies[EV_PREDICTORS]
        cdef int i, k
        if self.c == NULL or self.forked():
            self.check()
        core_lock(self.c)
        for i in range(EV_PREDICTORS):
            copies[i] = self.c.evidence.predictors[i]
        rate = self.c.evidence.ns_per_byte
        io = {
            "guess_bytes": self.c.queue.guess_limit,
            "guess_reads": self.c.queue.guess_ops_limit,
            "guess_chunk_bytes": self.c.queue.guess_chunk,
            "reads_stopped": self.c.reads_stopped,
        }
        demand, guess = fc_load32(&self.c.queue.ioprio[FC_DEMAND]), fc_load32(&self.c.queue.ioprio[FC_GUESS])
        if self.ring != NULL and not self.shutting:     # close() frees it, without the GIL
            self.stops = uring_stops(self.ring)
        core_unlock(self.c)
        told = {}
        for name, number in list(self.names.items()):
            i = number
            told[name] = {NAMES[k]: copies[i].count[k] for k in range(N_EVIDENCE)} | {
                "state": STATES[copies[i].state],
                "remembered": copies[i].n,
                "hits": copies[i].hits,
                "gain_ns": copies[i].gain_ns,
                "cost_ns": copies[i].waste_ns + (1.0 - (min(copies[i].hits / copies[i].n, 1.0) if copies[i].n > 0 else 1.0))
                * copies[i].loss_ns,
            }
        return {"predictors": told, "counts": NAMES, "ns_per_byte": rate, "io": io | {
            "stops_asked": self.stops,
            "priority": "none" if guess == 0 else "real-time over idle" if demand else "best-effort over idle",
        }}
