"""Stats: one untorn snapshot of a store's counters, frozen and subtractable. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# Levels, not counts: a difference of two snapshots keeps the later one's.
GAUGES = frozenset({"misses_in_flight", "joins_in_flight", "prefetch_in_flight", "unread_resident", "resident_experts"})


def _counter(meaning: str) -> Any:
    return field(default=0, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of a store. One event is one distinct key per call. `after - before` is what happened in between."""

    requests: int = _counter("demand requests: hits + joins + misses")
    hits: int = _counter("requests for a resident expert")
    joins: int = _counter("requests for an expert whose read was under way; they wait for it")
    misses: int = _counter("requests that started a read")
    demand_loads: int = _counter("reads for a request that landed in a slot")
    demand_failures: int = _counter("reads for a request into a slot that failed")
    pass_throughs: int = _counter("reads for a request that landed in a private buffer, because no slot was free")
    pass_through_failures: int = _counter("pass-through reads that failed, or were refused by the overflow limit")
    demand_cancelled: int = _counter("reads for a request that closing the store dropped")
    misses_in_flight: int = _counter("gauge: reads for a request under way")
    joins_ok: int = _counter("joins whose read landed")
    join_failures: int = _counter("joins whose read failed")
    joins_in_flight: int = _counter("gauge: joins still waiting")
    late_joins: int = _counter("joins of a read that a prefetch had started")
    late_joins_ok: int = _counter("prefetched loads that a join consumed before they had landed")
    late_join_wait_ns: int = _counter("nanoseconds that late joins waited")
    prefetch_issued: int = _counter("reads that prefetches and pins started")
    prefetch_loads: int = _counter("of those, landed")
    prefetch_failures: int = _counter("of those, failed")
    prefetch_cancelled: int = _counter("of those, cancelled")
    prefetch_in_flight: int = _counter("gauge: of those, under way")
    first_consumptions: int = _counter("hits that were the first use of a prefetched load: no reuse")
    wasted: int = _counter("prefetched loads evicted unread")
    unread_resident: int = _counter("gauge: prefetched loads resident and not used yet")
    evictions: int = _counter("experts evicted")
    resident_experts: int = _counter("gauge: experts resident in slots")
    bytes_read: int = _counter("payload bytes of loads that landed")
    prefetch_bytes: int = _counter("of those, by prefetches")
    pass_through_bytes: int = _counter("of those, into private buffers")
    hits_on_held: int = _counter("hits on an expert that somebody held already: they flatter the rate")
    bytes_submitted: int = _counter("bytes asked of the device or the page cache, padding and retries included")
    bytes_direct: int = _counter("of those, by direct reads")
    layers: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    @property
    def reuses(self) -> int:
        """Hits that avoided a read: hits - first_consumptions."""
        return self.hits - self.first_consumptions

    @property
    def adjusted_hits(self) -> int:
        """max(hits - prefetch_loads, 0), for comparison with caches that report it; `reuses` is exact."""
        return max(self.hits - self.prefetch_loads, 0)

    @property
    def hit_rate(self) -> float:
        """Hits / requests, or 0.0. Prefetched experts count as hits here: see reuse_rate."""
        return self.hits / self.requests if self.requests else 0.0

    @property
    def reuse_rate(self) -> float:
        """Reuses / requests, or 0.0."""
        return self.reuses / self.requests if self.requests else 0.0

    def __sub__(self, before: Stats) -> Stats:
        if not isinstance(before, Stats):
            return NotImplemented
        values: dict[str, Any] = {}
        for f in fields(self):
            if f.name != "layers":
                now = getattr(self, f.name)
                values[f.name] = now if f.name in GAUGES else now - getattr(before, f.name)
        values["layers"] = {
            layer: {name: n - before.layers.get(layer, {}).get(name, 0) for name, n in counts.items()}
            for layer, counts in self.layers.items()
        }
        return Stats(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return every counter and derived figure by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layers"}
        values |= {name: getattr(self, name) for name in ("reuses", "adjusted_hits", "hit_rate", "reuse_rate")}
        if self.layers:
            values["layers"] = {layer: dict(counts) for layer, counts in self.layers.items()}
        return values

    @classmethod
    def explain(cls) -> str:
        """Return what every counter means, one a line."""
        lines = [f"{f.name}: {f.metadata['meaning']}" for f in fields(cls) if f.name != "layers"]
        for name in ("reuses", "adjusted_hits", "hit_rate", "reuse_rate"):
            lines.append(f"{name}: {(getattr(cls, name).__doc__ or '').rstrip('.')}")
        return "\n".join(lines)
