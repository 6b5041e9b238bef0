"""Miss-ratio curves: how many requests would be read from disk at each capacity, and the marks that matter on them.

Owns the curve and its marks, as numbers; plot.py draws it. Imports traces, NumPy and the compiled simulator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcache.traces.capacity import cycle_experts, of_slots
from fastcache.traces.replay import BELADY, policies, replay, served
from fastcache.traces.trace import Array, Trace
from fastcache_ext.distances import Distances

EXACT_POINTS = 512  # of the lru curve, at most
POINTS = 24  # capacities that are simulated


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Miss ratios of one policy at ascending capacities."""

    policy: str
    experts: Array  # int64 [P]: capacities, in experts or in bytes
    miss_ratio: Array  # float64 [P]: misses / requests

    def knee(self) -> int:
        """Return the index of the point farthest below a chord; 0 where no capacity saves anything.

        The chord begins at no cache, which misses all, and ends at the least capacity as good as the last.
        """
        saved = 1 - self.miss_ratio
        end = int(np.argmax(saved >= saved[-1] - 1e-12))
        if self.experts[end] <= 0 or saved[end] <= 0:
            return 0
        return int(np.argmax((saved / saved[end] - self.experts / self.experts[end])[: end + 1]))


@dataclass(frozen=True, slots=True, eq=False)
class Mrc:
    """The curves of a trace, and what to look for on them.

    Attributes
    ----------
    curves : dict of str to Curve
    floor : float
        Miss ratio that no cache passes under: distinct experts / requests.
    cycle : int or None
        Experts that one token touches; None where top_k is not known.
    knee : int
        Capacity, in experts, beyond which more buys little: of `next_use`, else of the first curve.
    exact_from : int
        The lru curve is exact from this capacity on, the largest batch; below it is simulated.
    expert_bytes : float or None
        Mean size of an expert.
    """

    trace: Trace
    curves: dict[str, Curve]
    distinct: int
    floor: float
    cycle: int | None
    knee: int
    exact_from: int
    expert_bytes: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything by name, for JSON."""
        return {
            "model": self.trace.name,
            "requests": self.trace.requests,
            "distinct": self.distinct,
            "pool": self.trace.pool,
            "top_k": self.trace.top_k,
            "complete": self.trace.complete,
            "lost": self.trace.lost,
            "expert_bytes": self.expert_bytes,
            "compulsory_floor": self.floor,
            "token_cycle": self._mark(self.cycle),
            "knee": self._mark(self.knee),
            "exact_from": self.exact_from,
            "curves": {
                name: {"experts": curve.experts.tolist(), "miss_ratio": curve.miss_ratio.tolist()}
                for name, curve in self.curves.items()
            },
        }

    def _mark(self, experts: int | None) -> dict[str, Any] | None:
        if experts is None:
            return None
        nbytes = None if self.expert_bytes is None else round(experts * self.expert_bytes)
        ratios = {
            name: float(np.interp(experts, curve.experts, curve.miss_ratio)) for name, curve in self.curves.items()
        }
        return {"experts": experts, "bytes": nbytes, "miss_ratio": ratios}


def grid(trace: Trace, points: int = POINTS) -> list[int]:
    """Return about `points` capacities, in a geometric row up to all that is asked for, and the token cycle."""
    distinct = int((trace.counts() > 0).sum())
    if distinct == 0:
        return [0]
    low = min(max(trace.top_k or 1, distinct // 100), distinct)
    marks = {round(x) for x in np.geomspace(low, distinct, max(points, 2)).tolist()}
    cycle = cycle_experts(trace)
    return sorted(marks | ({cycle} if cycle and low < cycle < distinct else set()))


def lru_hits(trace: Trace) -> tuple[Array, int]:
    """Return (hits of lru by capacity, int64 [pool + 1]; the largest batch): exact where every batch fits."""
    distances = Distances(trace.pool)
    for keys, sizes, _ in served(trace):
        distances.run(keys, sizes)
    counts = np.frombuffer(distances.counts_by_distance(), np.int64)
    return np.concatenate([[0], np.cumsum(counts)]), distances.largest


def mrc(trace: Trace, names: Iterable[str] | None = None, points: int = POINTS) -> Mrc:
    """Compute miss-ratio curves: of lru by stack distances, of the others by simulation at about `points` capacities.

    Parameters
    ----------
    names : iterable of str, optional
        Of `policies()` and BELADY; default: all policies, and "belady".

    Raises
    ------
    ValueError
        There is no such policy.
    """
    names = [*policies(), BELADY[0]] if names is None else list(names)
    hits, largest = lru_hits(trace)
    counts = trace.counts()
    distinct = int((counts > 0).sum())
    capacities = grid(trace, points)
    rows = replay(trace, names, [of_slots(trace, slots) for slots in capacities])
    requests = max(trace.requests, 1)
    curves, knees = {}, {}
    for i, name in enumerate(names):
        mine = rows[i :: len(names)]
        where = np.asarray([row.capacity for row in mine], np.int64)
        ratio = np.asarray([row.misses / requests for row in mine])
        knees[name] = int(where[Curve(name, where, ratio).knee()])  # of what is simulated, as `advise` has it
        if name == "lru" and distinct > largest:
            exact = np.unique(
                np.linspace(largest, distinct, min(EXACT_POINTS, distinct - largest + 1)).astype(np.int64)
            )
            exact = np.union1d(exact, where[where >= largest])
            below = where < largest
            where = np.concatenate([where[below], exact])
            ratio = np.concatenate([ratio[below], 1 - hits[exact] / requests])
        curves[name] = Curve(name, where, ratio)
    sizes = trace.sizes()
    return Mrc(
        trace=trace,
        curves=curves,
        distinct=distinct,
        floor=distinct / requests,
        cycle=cycle_experts(trace),
        knee=knees.get("next_use", next(iter(knees.values()), 0)),
        exact_from=largest,
        expert_bytes=None if sizes is None or not trace.pool else float(sizes.mean()),
    )
