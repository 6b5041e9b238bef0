"""Stats: one untorn snapshot of a store's counters, frozen and subtractable. Imports errors and units."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from fastcache.errors import StatsMismatch
from fastcache.units import format_bytes

# Levels, not counts: a difference of two snapshots keeps the later one's; its `at_start` has the earlier one's.
GAUGES = (
    "misses_in_flight",
    "joins_in_flight",
    "prefetch_in_flight",
    "reads_in_flight",
    "bytes_in_flight",
    "unread_resident",
    "resident_experts",
    "leased_slots",
    "overflow_bytes",
    "overflow_peak_bytes",
)
DERIVED = ("reuses", "adjusted_hits", "hit_rate", "reuse_rate", "demand_waits")
PHASES = ("none", "prefill", "decode")  # "none": requested while the store was in no phase
ERRORS = {  # class -> meaning
    "short_read": "loads that failed because a file had ended (ShortRead)",
    "read_failed": "loads that failed with an errno of the system (ReadFailed); read_errnos tells which",
    "changed": "loads that failed because a file had changed (CheckpointChanged)",
    "source": "loads that failed because read_expert raised (ReadFailed)",
    "overflow_limit": "requests refused because pass-through buffers may hold no more (OverflowLimit)",
    "timeout": "calls that gave up waiting (ReadTimeout)",
    "closed": "loads that closing the store dropped (StoreClosed)",
    "checksum": "loads whose bytes were not those that the sidecar knows (ChecksumMismatch)",
}
# Bucket i counts waits of more than 2**(i - 1) and at most 2**i microseconds; the last one, all longer ones.
WAIT_EDGES_US = tuple(2**i for i in range(25))

K = TypeVar("K")
V = TypeVar("V")


class Counts(Mapping[K, V]):
    """A mapping that never changes."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[K, V] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: K) -> V:
        return self._values[name]

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


class Window(NamedTuple):
    """What a Stats counts: whose events, and between which two moments."""

    source: str  # one store, and within it one phase; no two stores have the same
    since: int  # ns, monotonic: opening, reset_stats(), or the earlier one of a difference
    until: int  # ns, monotonic


def _counter(meaning: str) -> Any:
    return field(default=0, metadata={"meaning": meaning})


def _mapping(meaning: str) -> Any:
    return field(default_factory=Counts, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of a store. One event is one distinct key per call. `after - before` is what happened in between.

    Both must be one store's and count from the same moment, opening or the last reset_stats(), and the later one goes
    first; else StatsMismatch, a ValueError. A difference counts from its earlier one.
    """

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
    late_joins_ok: int = _counter("prefetched loads that a join was waiting for when they landed")
    late_join_wait_ns: int = _counter("nanoseconds that late joins waited")
    prefetch_issued: int = _counter("reads that prefetches and pins started")
    prefetch_loads: int = _counter("reads of prefetches and pins that landed")
    prefetch_failures: int = _counter("reads of prefetches and pins that failed")
    prefetch_cancelled: int = _counter("reads of prefetches and pins that were cancelled")
    prefetch_in_flight: int = _counter("gauge: reads of prefetches and pins under way")
    first_consumptions: int = _counter("hits that were the first use of a prefetched load: no reuse")
    wasted: int = _counter("prefetched loads evicted unread")
    unread_resident: int = _counter("gauge: prefetched loads resident and not used yet")
    evictions: int = _counter("experts evicted")
    resident_experts: int = _counter("gauge: experts resident in slots")
    bytes_read: int = _counter("payload bytes of loads that landed")
    prefetch_bytes: int = _counter("payload bytes of prefetches and pins that landed")
    pass_through_bytes: int = _counter("payload bytes that landed in private buffers")
    hits_on_held: int = _counter("hits on an expert that somebody held already: they flatter the rate")
    demand_wait_ns: int = _counter(
        "nanoseconds that misses and joins waited, each until its landing or until its caller left"
    )
    reads: int = _counter("reads that the device, the page cache or memory has ended")
    reads_in_flight: int = _counter("gauge: reads in the hands of the engine")
    bytes_in_flight: int = _counter("gauge: bytes that the reads in flight ask for")
    bytes_submitted: int = _counter("bytes asked of the device or the page cache, padding and retries included")
    bytes_direct: int = _counter("bytes asked of the device by direct reads")
    leased_slots: int = _counter(
        "gauge: slots that somebody holds, pins and reads under way included; the whole store's"
    )
    overflow_bytes: int = _counter("gauge: bytes of pass-through buffers alive; the whole store's")
    overflow_peak_bytes: int = _counter("gauge: the most that overflow_bytes ever was; the whole store's")
    demand_wait_buckets: tuple[int, ...] = field(
        default=(0,) * (len(WAIT_EDGES_US) + 1),
        metadata={
            "meaning": "how many of these took at most 1, 2, 4, ... 2**24 microseconds, or longer; each counts once"
        },
    )
    errors: Mapping[str, int] = _mapping("events by class of error")
    read_errnos: Mapping[str, int] = _mapping("errors['read_failed'] by errno, as EIO")
    at_start: Mapping[str, int] = _mapping("gauges at the start of the window; empty since opening, when all were 0")
    layers: Mapping[int, Mapping[str, int]] = _mapping(
        "by layer, if asked for: the main counters; evictions count where the victim was"
    )
    phases: Mapping[str, Stats] = _mapping(
        "by phase of the request, if asked for: Stats each; resident_experts and unread_resident there are what the "
        "phase added less what it took away"
    )
    window: Window | None = field(
        default=None,
        compare=False,
        repr=False,
        metadata={"meaning": "which store's events are counted here, and since when; None: made by hand"},
    )

    def __post_init__(self) -> None:
        frozen = {
            "demand_wait_buckets": tuple(self.demand_wait_buckets),
            "errors": Counts(dict.fromkeys(ERRORS, 0) | dict(self.errors)),
            "read_errnos": Counts(self.read_errnos),
            "at_start": Counts(self.at_start),
            "layers": Counts({layer: Counts(counts) for layer, counts in self.layers.items()}),
            "phases": Counts(self.phases),
        }
        for name, value in frozen.items():
            object.__setattr__(self, name, value)

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

    @property
    def demand_waits(self) -> int:
        """Waits of misses and joins that have ended: sum(demand_wait_buckets)."""
        return sum(self.demand_wait_buckets)

    def wait_at_most(self, share: float) -> float:
        """Return seconds within which `share` (0 to 1) of the demand waits ended: the upper edge of a bucket.

        0.0 without waits, infinity where the last bucket is needed.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1; got {share}")
        ended, wanted = 0, share * self.demand_waits
        for edge, count in zip(WAIT_EDGES_US, self.demand_wait_buckets, strict=False):
            ended += count
            if ended >= wanted:
                return edge / 1e6 if self.demand_waits else 0.0
        return float("inf")

    def __sub__(self, before: Stats) -> Stats:
        if not isinstance(before, Stats):
            return NotImplemented
        window = _between(self.window, before.window)
        for split in ("layers", "phases"):
            if getattr(self, split) and not getattr(before, split) and before._counted():
                raise StatsMismatch(f"the earlier Stats have no {split}: take both with stats({split}=True)")
        values: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in NUMBERS}
        for name, n in values.items():
            if n < 0 and name not in GAUGES:
                then, now = getattr(before, name), getattr(self, name)
                raise StatsMismatch(f"{name} would be {n}: {then} before, {now} after; the later Stats go first")
        values |= {name: getattr(self, name) for name in GAUGES}
        buckets = zip(self.demand_wait_buckets, before.demand_wait_buckets, strict=True)
        return Stats(
            **values,
            demand_wait_buckets=tuple(now - then for now, then in buckets),
            errors=_less(self.errors, before.errors),
            read_errnos={name: n for name, n in _less(self.read_errnos, before.read_errnos).items() if n},
            at_start={name: getattr(before, name) for name in GAUGES},
            layers={layer: _less(counts, before.layers.get(layer, {})) for layer, counts in self.layers.items()},
            phases={phase: stats - before.phases.get(phase, Stats()) for phase, stats in self.phases.items()},
            window=window,
        )

    def _counted(self) -> bool:
        """Whether anything has been counted, gauges aside."""
        return any(getattr(self, name) for name in NUMBERS if name not in GAUGES)

    def to_dict(self) -> dict[str, Any]:
        """Return every counter and derived figure by name, as plain dicts, lists and numbers; `window` is left out."""
        values: dict[str, Any] = {name: getattr(self, name) for name in (*NUMBERS, *DERIVED)}
        values["demand_wait_buckets"] = list(self.demand_wait_buckets)
        for name in ("errors", "read_errnos", "at_start"):
            values[name] = dict(getattr(self, name))
        if self.layers:
            values["layers"] = {layer: dict(counts) for layer, counts in self.layers.items()}
        if self.phases:
            values["phases"] = {phase: stats.to_dict() for phase, stats in self.phases.items()}
        return values

    def to_json(self, indent: int | None = None) -> str:
        """Return to_dict() as JSON; layers are strings there."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def explain(cls) -> str:
        """Return what every counter means, one a line."""
        lines = []
        for f in fields(cls):
            lines.append(f"{f.name}: {f.metadata['meaning']}")
            if f.name == "errors":
                lines += [f"  errors[{name!r}]: {meaning}" for name, meaning in ERRORS.items()]
        for name in DERIVED:
            lines.append(f"{name}: {(getattr(cls, name).__doc__ or '').rstrip('.')}")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str]]:
        """What people want to know first: (what, figures)."""
        asked = f"; {format_bytes(self.bytes_submitted)} asked for in {self.reads:,} reads" if self.reads else ""
        direct = f", {self.bytes_direct / self.bytes_submitted:.0%} of it direct" if self.bytes_submitted else ""
        loads = self.demand_loads + self.prefetch_loads + self.pass_throughs
        rows = [
            ("requests", f"{self.requests:,}: {self.hits:,} hits, {self.joins:,} joins, {self.misses:,} misses"),
            (
                "hit rate",
                f"{self.hit_rate:.1%}; {self.reuse_rate:.1%} of the requests were reuses; {self.hits_on_held:,} hits "
                "on what was held already",
            ),
            ("read", f"{format_bytes(self.bytes_read)} in {loads:,} loads{asked}{direct}"),
            ("resident", f"{self.resident_experts:,} experts; {self.evictions:,} evictions"),
        ]
        if self.prefetch_issued or self.prefetch_loads or self.unread_resident or self.wasted:
            rows.append(
                (
                    "prefetch",
                    f"{self.prefetch_issued:,} issued: {self.first_consumptions:,} used, {self.late_joins_ok:,} late, "
                    f"{self.wasted:,} wasted, {self.unread_resident:,} unread, {self.prefetch_cancelled:,} cancelled, "
                    f"{self.prefetch_failures:,} failed",
                )
            )
        if self.demand_waits:
            half, most = (_seconds(self.wait_at_most(share)) for share in (0.5, 0.99))
            mean = _seconds(self.demand_wait_ns / self.demand_waits / 1e9)
            rows.append(("waits", f"{self.demand_waits:,}: mean {mean}, half within {half}, 99% within {most}"))
        failed = {name: n for name, n in self.errors.items() if n}
        if failed:
            rows.append(("errors", ", ".join(f"{n:,} {name}" for name, n in failed.items())))
        for phase, stats in self.phases.items():
            if stats.requests:
                text = f"{stats.requests:,} requests, {stats.hit_rate:.1%} hits, {format_bytes(stats.bytes_read)} read"
                rows.append((f"in {phase}" if phase != "none" else "in no phase", text))
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{what:12} {figures}" for what, figures in self._rows())

    def _repr_html_(self) -> str:
        cells = (f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in self._rows())
        return f"<table>{''.join(cells)}</table>"


NUMBERS = tuple(f.name for f in fields(Stats) if isinstance(f.default, int))


def _between(now: Window | None, then: Window | None) -> Window | None:
    """Return the window of a difference; None where one side was made by hand."""
    if now is None or then is None:
        return None
    if now.source != then.source:
        raise StatsMismatch("these Stats are of two stores, or of two phases: after - before is of one")
    if now.since != then.since:
        raise StatsMismatch(
            "these Stats count from different moments: reset_stats() came between them, or one is a difference. "
            "Take both after the reset, and of stats() itself"
        )
    if now.until < then.until:
        raise StatsMismatch("these Stats are the wrong way round: the later one goes first, after - before")
    return Window(now.source, then.until, now.until)


def _less(now: Mapping[str, int], then: Mapping[str, int]) -> dict[str, int]:
    return {name: n - then.get(name, 0) for name, n in now.items()}


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.0f} ns"
