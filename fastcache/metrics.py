"""Collector: the counters of open stores, for Prometheus. Needs prometheus_client (extra `metrics`) when one is made.

Knows the names, units and labels that counters are published under. Imports describe, errors, reports, stats,
store and prometheus_client.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import metadata
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fastcache import reports
from fastcache.describe import Description
from fastcache.errors import FastcacheError
from fastcache.stats import GAUGES, NUMBERS, WAIT_EDGES_US, Stats
from fastcache.store import ExpertStore

if TYPE_CHECKING:
    from prometheus_client import Metric

MEANINGS = {f.name: str(f.metadata["meaning"]) for f in fields(Stats)} | {
    "reuses": "hits that avoided a read: hits less first consumptions",
    "demand_waits": "how long misses and joins waited, each until its landing or until its caller left",
    "budget_bytes": "bytes that the arena may take",
    "arena_bytes": "bytes that the arena takes",
    "slots": "slots of the arena",
}
COUNTERS = tuple(name for name in NUMBERS if name not in GAUGES and name != "demand_wait_ns")
LAYER_COUNTERS: tuple[str, ...] = (
    "requests", "hits", "joins", "misses", "demand_loads", "prefetch_loads", "pass_throughs", "first_consumptions",
    "wasted", "evictions", "bytes_read", "demand_wait_ns",
)  # fmt: skip
DESCRIBED_SECONDS = 60.0  # how old a description may be: making one reads what the kernel says of every page
FEATURES = ("engine", "direct", "hugepages", "mlock", "registered", "policy")


def metric_name(counter: str) -> str:
    """Return what a counter of Stats is called here, without "fastcache_" and "_total": the unit stands last."""
    if counter.endswith("_ns"):
        return counter.removesuffix("_ns") + "_seconds"
    if counter.startswith("bytes_"):
        return counter.removeprefix("bytes_") + "_bytes"
    return counter


def metric_value(counter: str, value: int) -> float:
    """Return a counter in the unit of its metric."""
    return value / 1e9 if counter.endswith("_ns") else value


class Families:
    """Every family of metrics once, without samples; `add` gives them those of a store."""

    def __init__(self, layers: bool, phases: bool) -> None:
        from prometheus_client import core

        def counter(name: str, *labels: str, scope: str = "") -> core.CounterMetricFamily:
            by = f", by {scope.rstrip('_')}" if scope else ""
            text = MEANINGS[name].removeprefix("gauge: ").replace("nanoseconds", "seconds") + by
            return core.CounterMetricFamily(f"fastcache_{scope}{metric_name(name)}", text, labels=["store", *labels])

        def gauge(name: str) -> core.GaugeMetricFamily:
            text = MEANINGS[name].removeprefix("gauge: ")
            return core.GaugeMetricFamily(f"fastcache_{metric_name(name)}", text, labels=["store"])

        def waits(*labels: str, scope: str = "") -> core.HistogramMetricFamily:
            name = f"fastcache_{scope}demand_wait_seconds"
            return core.HistogramMetricFamily(name, MEANINGS["demand_waits"], labels=["store", *labels])

        self.counters = {name: counter(name) for name in (*COUNTERS, "reuses")}
        self.gauges = {name: gauge(name) for name in (*GAUGES, "budget_bytes", "arena_bytes", "slots")}
        self.waits = waits()
        self.errors = counter("errors", "error")
        self.errnos = core.CounterMetricFamily(
            "fastcache_read_errors", "loads that failed with an errno of the system", labels=["store", "errno"]
        )
        self.info = core.InfoMetricFamily("fastcache_store", "what the store really uses", labels=["store"])
        self.by_layer = {name: counter(name, "layer", scope="layer_") for name in LAYER_COUNTERS if layers}
        self.by_phase = {name: counter(name, "phase", scope="phase_") for name in self.counters if phases}
        self.waits_by_phase = waits("phase", scope="phase_") if phases else None

    def __iter__(self) -> Iterator[Metric]:
        for some in (self.counters, self.gauges, self.by_layer, self.by_phase):
            yield from some.values()
        yield from (self.waits, self.errors, self.errnos, self.info)
        if self.waits_by_phase is not None:
            yield self.waits_by_phase

    def add(self, store: ExpertStore, described: Mapping[str, Any]) -> None:
        """Add the samples of a store and of its description; ForkedStore, before any, in a forked child."""
        s = reports.counted(store, layers=bool(self.by_layer), phases=bool(self.by_phase))
        name = store.name
        for counter, family in self.counters.items():
            family.add_metric([name], metric_value(counter, getattr(s, counter)))
        for gauge, level in self.gauges.items():
            level.add_metric([name], getattr(s, gauge) if gauge in GAUGES else described[gauge])
        _add_waits(self.waits, [name], s)
        for error, count in s.errors.items():
            self.errors.add_metric([name, error], count)
        for number, count in s.read_errnos.items():
            self.errnos.add_metric([name, number], count)
        for layer, counts in s.layers.items():
            for counter, family in self.by_layer.items():
                family.add_metric([name, str(layer)], metric_value(counter, counts[counter]))
        for phase, part in s.phases.items():
            for counter, family in self.by_phase.items():
                family.add_metric([name, phase], metric_value(counter, getattr(part, counter)))
            if self.waits_by_phase is not None:
                _add_waits(self.waits_by_phase, [name, phase], part)
        used = {feature: str(described[feature]["used"]).lower() for feature in FEATURES}
        used["liburing"] = os.path.basename(described["engine"]["liburing"] or "")  # its directory is nobody's business
        self.info.add_metric([name], used | {"family": store.family, "version": metadata.version("fastcache-moe")})


def _add_waits(family: Any, labels: list[str], s: Stats) -> None:
    edges = [*(repr(edge / 1e6) for edge in WAIT_EDGES_US), "+Inf"]
    buckets = list(zip(edges, accumulate(s.demand_wait_buckets), strict=True))
    family.add_metric(labels, buckets, s.demand_wait_ns / 1e9)


class Collector:
    """Counters of open stores as Prometheus metrics: `prometheus_client.REGISTRY.register(Collector(store))`.

    Metrics are called fastcache_* as in Stats, with the unit last: hits is `fastcache_hits_total`, bytes_read is
    `fastcache_read_bytes_total`; demand waits are the histogram `fastcache_demand_wait_seconds`; `fastcache_store_info`
    says what is really used. Every sample has the label `store`, the store's name.

    Counters count since the store was opened, whatever `reset_stats()` did. A store is held weakly: one that is closed,
    collected, or left behind by a fork gives no samples. One collector serves several stores, because a registry takes
    every family of metrics from one collector only.

    Parameters
    ----------
    *stores : ExpertStore
        Of different names; see `add`.
    layers, phases : bool
        Publish `fastcache_layer_*` with the label `layer`, and `fastcache_phase_*` with the label `phase`, too.

    Raises
    ------
    ImportError
        Without prometheus_client.

    Notes
    -----
    Thread-safe. A scrape takes a millisecond or two for each store; once a minute it asks for describe() too, which
    reads what the kernel says of every page of the process, and takes ten.
    """

    def __init__(self, *stores: ExpertStore, layers: bool = False, phases: bool = False) -> None:
        try:
            Families(layers, phases)
        except ImportError as error:
            raise ImportError(
                "fastcache.metrics needs prometheus_client: pip install 'fastcache-moe[metrics]'", name=error.name
            ) from error
        self._split = layers, phases
        self._lock = threading.Lock()
        self._stores: list[weakref.ref[ExpertStore]] = []
        self._described: weakref.WeakKeyDictionary[ExpertStore, tuple[float, Description]] = weakref.WeakKeyDictionary()
        for store in stores:
            self.add(store)

    def add(self, store: ExpertStore) -> None:
        """Publish another store too; one that is there already stays so.

        Raises
        ------
        ValueError
            If an open store of that name is there: their samples could not be told apart. Open one with name=.
        """
        if not isinstance(store, ExpertStore):
            raise TypeError(f"a Collector publishes stores; got {type(store).__name__}")
        with self._lock:
            there = self._open()
            if any(other is not store and other.name == store.name for other in there):
                raise ValueError(f"a store named {store.name!r} is published already: open this one with another name=")
            if store not in there:
                there.append(store)
            self._stores = [weakref.ref(one) for one in there]

    def _open(self) -> list[ExpertStore]:
        return [store for ref in self._stores if (store := ref()) is not None and store._is_open()]

    def _description(self, store: ExpertStore) -> Description:
        """The store's description, at most DESCRIBED_SECONDS old once its memory is settled."""
        now = time.monotonic()
        with self._lock:
            kept = self._described.get(store)
        if kept is None or now - kept[0] > DESCRIBED_SECONDS:
            kept = now, store.describe()
            if store._progress()[1]:
                with self._lock:
                    self._described[store] = kept
        return kept[1]

    def describe(self) -> Iterator[Metric]:
        """Yield the families without samples: from their names a registry knows whether two collectors clash."""
        yield from Families(*self._split)

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have samples."""
        with self._lock:
            stores = self._open()
        families = Families(*self._split)
        for store in stores:
            try:
                families.add(store, self._description(store))
            except FastcacheError:  # a fork that came in between
                continue
        yield from (family for family in families if family.samples)
