"""Guesser: a Lender that knows predictors by name, and says what became of their guesses.

May import lender, evidence, monitor.
"""
import threading

from fastcache_ext.evidence import MOST, NAMES, RESERVED, STATES

from fastcache_ext.evidence cimport EV_PIN, EV_PREDICTORS, EV_WARM, N_EVIDENCE, fc_predictor
from fastcache_ext.lender cimport Lender
from fastcache_ext.monitor cimport core_lock, core_unlock


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
            raise ValueError(f'"{name}" is what {name}() counts as' if number != MOST
                             else f"a store tells at most {MOST} predictors apart; {name!r} would be one more")
        return number

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
        return {"predictors": told, "counts": NAMES, "ns_per_byte": rate}
