"""What a store's ghost caches say: a live miss-ratio curve, and what each policy would hit. Imports errors, units.

A sample of the experts stands for all of them; the compiled half (ghosts) feeds it with the running demand traffic.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastcache.errors import FeatureUnavailable
from fastcache.units import format_bytes

POINTS = 64  # of the curve, at most


@dataclass(frozen=True, slots=True)
class LiveCurve:
    """Hit rates that the running traffic would have at other sizes and by other policies.

    Attributes
    ----------
    slots : tuple of int
        Sizes in experts, ascending, from one sampled expert's share to the whole pool.
    nbytes : tuple of int
        The same in bytes of arena: experts times the mean slot.
    hit_rates : tuple of float
        What LRU hits at each size, of sampled requests. Every 131,072 of them, older ones come to count half.
    policies : dict of str to float
        Hit rate of each policy's ghost at the store's own size, lately. LRU's differs from the curve at that size: a
        ghost's rate is half that of its last window, the curve remembers longer.
    used : str
        The policy that runs.
    requests, sampled, lost : int
        Demands heard; those of sampled experts that the ghosts were given, each layer's turn when it has
        ended; those not looked at, because they came faster than a twentieth of one processor could serve them.
    rate : float
        Share of the experts that is sampled: 1.0 in pools of up to 1,024, else 0.125 or less.
    switches : int
        Times that `policy="auto"` changed the policy.

    Notes
    -----
    From a sample the rates are estimates: on real traces mostly within 5 points, more where the curve is a cliff. The
    method is spatially hashed sampling (SHARDS, Waldspurger et al., FAST 2015).
    """

    slots: tuple[int, ...]
    nbytes: tuple[int, ...]
    hit_rates: tuple[float, ...]
    policies: Mapping[str, float]
    used: str
    requests: int
    sampled: int
    lost: int
    rate: float
    switches: int

    def at(self, nbytes: int) -> float:
        """Return LRU's expected hit rate with an arena of `nbytes`: of the largest size that fits into it, else 0."""
        i = bisect.bisect_right(self.nbytes, nbytes)
        return self.hit_rates[i - 1] if i else 0.0

    def __str__(self) -> str:
        """For people: the policies, best first, and LRU's curve where it rises."""
        seen = f"{self.requests:,} requests, {self.sampled:,} of them sampled ({self.rate:.1%} of the experts)"
        ranked = sorted(self.policies.items(), key=lambda item: -item[1])
        lines = [seen + (f", {self.lost:,} lost" if self.lost else "")]
        figures = ", ".join(f"{name} {rate:.1%}" for name, rate in ranked)
        lines.append(f"{self.used} runs; ghosts at this size, lately: {figures or 'no sample yet'}")
        before = -1.0
        for slots, nbytes, rate in zip(self.slots, self.nbytes, self.hit_rates, strict=True):
            if rate - before >= 0.005:
                lines.append(f"lru curve {slots:>7,} experts {format_bytes(nbytes):>10}  {rate:6.1%}")
                before = rate
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers, as JSON takes them."""
        return {
            "curve": [
                {"slots": slots, "bytes": nbytes, "hit_rate": rate}
                for slots, nbytes, rate in zip(self.slots, self.nbytes, self.hit_rates, strict=True)
            ],
            "policies": dict(self.policies),
            "used": self.used,
            "requests": self.requests,
            "sampled": self.sampled,
            "lost": self.lost,
            "rate": self.rate,
            "switches": self.switches,
        }


def live_curve(report: Mapping[str, Any] | None, pool_bytes: int) -> LiveCurve:
    """Return the curve of a store's report, which has one rate per sampled expert.

    `pool_bytes`: slots for all experts that a slot could hold.

    Raises
    ------
    FeatureUnavailable
        The store has no ghosts.
    """
    if report is None:
        raise FeatureUnavailable(
            "this store has no ghost caches: open it with ghosts=True or policy='auto', or set FASTCACHE_GHOSTS=1"
        )
    tracked, pool = report["tracked"], report["pool"]
    steps = min(tracked, POINTS)
    places = sorted({-(-tracked * i // steps) for i in range(1, steps + 1)})
    slots = tuple(place * pool // tracked for place in places)
    return LiveCurve(
        slots=slots,
        nbytes=tuple(-(-number * pool_bytes // max(pool, 1)) for number in slots),
        hit_rates=tuple(report["curve"][place - 1] for place in places),
        policies=dict(report["rates"]),
        used=report["used"],
        requests=report["requests"],
        sampled=report["sampled"],
        lost=report["lost"],
        rate=tracked / pool if pool else 0.0,
        switches=report["switches"],
    )


def policy_feature(requested: str, report: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return describe()'s entry of the policy: what was asked for, what runs, and the ghosts' figures as the reason."""
    entry: dict[str, Any] = {"requested": requested, "used": requested, "reason": ""}
    if requested != "auto":
        return entry
    if report is None:
        return entry | {"used": "next_use", "reason": "there is nothing to sample", "switches": 0}
    rates = sorted(report["rates"].items(), key=lambda item: -item[1])
    figures = ", ".join(f"{name} {rate:.1%}" for name, rate in rates)
    reason = (
        f"hit rates of the ghosts after {report['sampled']} sampled requests: {figures}"
        if figures
        else "no sampled request yet"
    )
    return entry | {"used": report["used"], "reason": reason, "switches": report["switches"]}
