"""What the core's tests share: files of patterned experts, stores whose engine is a script, identities of counters."""

import contextlib
import functools
import itertools
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from fastcache import ExpertStore, FileRangeSource
from fastcache.settings import resolve
from fastcache.stats import GAUGES, NUMBERS
from fastcache_ext.counters import LAYER_NAMES
from fastcache_ext.policy import NAMES as POLICIES
from fastcache_ext.scripted import Scripted

PATIENCE = 20.0  # seconds after which a test that waits for something gives up
_numbers = itertools.count()


@functools.cache
def expert_bytes(layer, expert, nbytes):
    """Return the bytes of an expert: a pattern of (layer, expert, i), without a period that a window could hide in."""
    i = np.arange(nbytes, dtype=np.uint64)
    salt = np.uint64(((layer * 65537 + expert) * 0x9E3779B97F4A7C15 + 1) % 2**64)
    mixed = (i + salt) * np.uint64(0xD1342543DE82EF95)
    return ((mixed >> np.uint64(29)) ^ (mixed >> np.uint64(53))).astype(np.uint8).tobytes()


class Experts:
    """A file of experts at odd places: `nbytes` by key, cut into `parts` extents, in the order given.

    `gap` bytes of poison before each part; `tail` bytes after the last.
    """

    def __init__(self, directory, nbytes, parts=1, gap=7, tail=0, top_k=None):
        self.path = directory / f"experts-{next(_numbers)}.bin"
        self.nbytes = dict(nbytes)
        self.ranges, body = {}, bytearray()
        for (layer, expert), size in self.nbytes.items():
            data, mine = expert_bytes(layer, expert, size), []
            for part in range(parts):
                piece = data[size * part // parts : size * (part + 1) // parts]
                body += b"\x5a" * gap
                mine.append((len(body), len(piece)))
                body += piece
            self.ranges[layer, expert] = mine
        self.path.write_bytes(bytes(body) + b"\x5a" * tail)
        self.source = FileRangeSource(self.path, self.ranges, top_k=top_k)

    def right(self, key, lease):
        """Whether a lease, or an array or memoryview of its own buffer, shows the bytes of `key`."""
        layer, expert = key
        return bytes(lease) == expert_bytes(layer, expert, self.nbytes[layer, expert])


def layers_of(layers, experts, nbytes):
    return {(layer, expert): nbytes for layer in range(layers) for expert in range(experts)}


class ScriptedStore(ExpertStore):
    """An ExpertStore whose reads a Scripted engine takes. Joining that engine's threads means: its hand is empty."""

    def _open(self, **arguments):
        super()._open(**(arguments | {"engine": "scripted"}))

    def _shut(self, timeout_ns):
        engine = getattr(self, "engine", lambda: None)()
        if engine is not None and not engine.drained(timeout_ns):
            return False
        return super()._shut(timeout_ns)


def settings(**arguments):
    """Return checked settings, as `fastcache.open` makes them."""
    return resolve(**arguments, policies=tuple(POLICIES))


@contextlib.contextmanager
def scripted(experts, slots=None, **arguments):
    """Give (store, engine); at the end every read in hand is failed, and the counters must add up."""
    source = experts.source if isinstance(experts, Experts) else experts
    probe = {"mlock": "off", "hugepages": "off", "overflow": 1 << 30} | arguments
    if slots is not None:
        with ExpertStore(source, settings(**probe, budget="all"), None, None) as every:
            probe["budget"] = slots * max(row["slot_bytes"] for row in every.describe()["slot_classes"])
    store = ScriptedStore(source, settings(**probe), "scripted", None)
    engine = Scripted(store)
    store.engine = weakref.ref(engine)
    try:
        engine.poison()
        yield store, engine
        assert store._check() == 0
        if not engine.in_hand:
            assert_identities(store)
    finally:
        for op in [*engine.in_hand]:
            engine.settle(op, -5)
        store.close()
        assert_identities(store)


def run_dry(engine):
    """Serve everything that is asked for, oldest first, until nothing is left."""
    while True:
        engine.take()
        if not engine.in_hand:
            return
        for op in engine.in_hand:
            while not engine.fill(op):
                pass


class TooSlow(AssertionError):
    """A clock ran over: the one failure that gets another try (tests/conftest.py), in tests that run alone."""


def in_time(start, seconds):
    """Hold what began at `start` (time.monotonic()) to `seconds`."""
    if (took := time.monotonic() - start) >= seconds:
        raise TooSlow(f"took {took:.2f} s of {seconds}")


class Caller:
    """A thread for a call that blocks. `result()` waits for it with patience."""

    def __init__(self, call, *args, **kwargs):
        self._pool = ThreadPoolExecutor(1)
        self._future: Future = self._pool.submit(call, *args, **kwargs)
        self._pool.shutdown(wait=False)

    def result(self):
        return self._future.result(PATIENCE)

    def error(self):
        return self._future.exception(PATIENCE)

    def done(self):
        return self._future.done()


def until(condition, what="the condition"):
    """Poll until `condition()` is true. For what another thread brings about and nothing signals."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError(f"{what} did not come about in {PATIENCE} s")


def held(store):
    """Return how many slots are leased, as describe() says, but without its look at the page tables."""
    return sum(count > 0 for count in Scripted(store).leases())


def assert_flows(s):
    """Hold Stats of any window, of a store or of one phase of it, to the identities between counters."""
    begun = {name: s.at_start.get(name, 0) for name in GAUGES}
    assert s.requests == s.hits + s.joins + s.misses, s
    assert s.misses + begun["misses_in_flight"] == (
        s.demand_loads
        + s.demand_failures
        + s.pass_throughs
        + s.pass_through_failures
        + s.demand_cancelled
        + s.misses_in_flight
    ), s
    assert s.joins + begun["joins_in_flight"] == s.joins_ok + s.join_failures + s.joins_in_flight, s
    assert s.late_joins <= s.joins, s
    assert s.prefetch_issued + begun["prefetch_in_flight"] == (
        s.prefetch_loads + s.prefetch_failures + s.prefetch_cancelled + s.prefetch_in_flight
    ), s
    assert s.prefetch_loads + begun["unread_resident"] == (
        s.first_consumptions + s.late_joins_ok + s.wasted + s.unread_resident
    ), s
    assert s.reuses == s.hits - s.first_consumptions, s
    assert s.demand_loads + s.prefetch_loads - s.evictions + begun["resident_experts"] == s.resident_experts, s
    failed = s.demand_failures + s.pass_through_failures + s.prefetch_failures
    classes = ("short_read", "read_failed", "changed", "source", "overflow_limit", "checksum")
    assert failed == sum(s.errors[name] for name in classes), s
    assert sum(s.read_errnos.values()) == s.errors["read_failed"], s
    assert s.errors["closed"] <= s.demand_cancelled + s.prefetch_cancelled, s
    assert s.prefetch_bytes + s.pass_through_bytes <= s.bytes_read, s
    assert s.bytes_direct <= s.bytes_submitted, s
    assert s.demand_waits == sum(s.demand_wait_buckets), s
    for name, total in {name: getattr(s, name) for name in LAYER_NAMES}.items():
        assert sum(counts[name] for counts in s.layers.values()) == (total if s.layers else 0), (name, s)


def assert_identities(store, quiet=True):
    """Hold the counters to the identities between them; `quiet`: nothing is in flight."""
    s = store.stats(layers=True, phases=True)
    assert s.layers.keys() == set(store.layers) and all(
        part.layers.keys() == s.layers.keys() for part in s.phases.values()
    )
    for part in (s, *s.phases.values()):
        assert_flows(part)
    whole = {"leased_slots", "overflow_bytes", "overflow_peak_bytes"}
    for name in set(NUMBERS) - whole:
        assert sum(getattr(part, name) for part in s.phases.values()) == getattr(s, name), (name, s)
    parts = [part.demand_wait_buckets for part in s.phases.values()]
    assert tuple(map(sum, zip(*parts, strict=True))) == s.demand_wait_buckets, s
    for name, total in s.errors.items():
        assert sum(part.errors[name] for part in s.phases.values()) == total, (name, s)
    assert all(getattr(s, name) >= 0 for name in NUMBERS), s
    if quiet:
        assert s.misses_in_flight == s.joins_in_flight == s.prefetch_in_flight == 0, s
        assert s.reads_in_flight == s.bytes_in_flight == 0, s
        refused = s.errors["overflow_limit"]
        begun = s.at_start.get("misses_in_flight", 0) + s.at_start.get("joins_in_flight", 0)
        if not begun:  # else a wait may lie in both windows
            assert s.misses + s.joins - refused <= s.demand_waits <= s.misses + s.joins, s
        assert_evidence(store)


def assert_evidence(store):
    """Hold what predictors are credited with to the store's own counters."""
    everything = store._counters()[0]
    rows = list(store._speculation()["predictors"].values())
    for row in rows:
        ends = ("used", "late", "wasted", "cancelled", "failed", "unread", "in_flight")
        assert row["issued"] == sum(row[end] for end in ends), row
        assert all(value >= 0 for value in row.values() if not isinstance(value, str)), row
    for ours, theirs in {
        "issued": "prefetch_issued",
        "used": "first_consumptions",
        "late": "late_joins_ok",
        "wasted": "wasted",
        "cancelled": "prefetch_cancelled",
        "failed": "prefetch_failures",
        "unread": "unread_resident",
        "in_flight": "prefetch_in_flight",
        "bytes": "prefetch_bytes",
        "late_wait_ns": "late_join_wait_ns",
    }.items():
        assert sum(row[ours] for row in rows) == everything[theirs], (ours, rows, everything)


def counted(store, **expected):
    now = store.stats()
    assert {name: getattr(now, name) for name in expected} == expected
    assert_identities(store, quiet=False)


def land(engine, *ids):
    for id in ids:
        while not engine.fill(id):
            pass
