"""Scenarios whose counters are known: an earlier cache, the seed, was tested with them. Its figures beside ours.

Owns the scenarios and what they must give. Imports the public API and fixture.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fastcache
from fastcache import fixture

SLOTS = 8
TRUNCATED_AT = 53_248  # bytes: expert 20's first
_ROLES = ("gate", "down", "up")  # the roles of w1, w2, w3
_ALL = range(fixture.SEED_EXPERTS)


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario: what the seed gave, and what ours gave."""

    check: str
    seed: dict[str, Any]
    got: dict[str, Any]
    beyond: dict[str, Any] = field(default_factory=dict)  # what ours must tell and the seed could not

    @property
    def ok(self) -> bool:
        return self.seed | self.beyond == self.got

    def to_dict(self) -> dict[str, Any]:
        return {"check": self.check, "seed": self.seed, "beyond": self.beyond, "got": self.got, "ok": self.ok}


def run(directory: str | os.PathLike[str], *, engine: str | None = None, chunk: int | None = None) -> list[Row]:
    """Write the seed's shard into `directory`, run every scenario on it, and return the seed's table with ours.

    The cache is the seed's: `lru` and eight slots. A row whose `ok` is False is a mistake of ours.
    """
    path = fixture.write_seed_shard(directory)
    replay = _Replay(path, engine, chunk)
    return [
        replay.serial(),
        replay.batches(),
        replay.mixed("mixed", chunk),
        replay.mixed("mixed, chunks of 4,096 bytes", 4096),
        *replay.prefetch_then_consume(),
        replay.skewed(),
        replay.truncated(),
    ]


def exact(lease: fastcache.ExpertLease, expert: int) -> bool:
    """Whether all six tensors of a lease hold the bytes that the generator wrote."""
    return all(
        np.array_equal(lease[f"{_ROLES[w]}.{suffix}"], fixture.seed_tensor(expert, w, suffix == "weight_packed"))
        for w in range(3)
        for suffix in ("weight_packed", "weight_scale")
    )


class _Replay:
    def __init__(self, path: Path, engine: str | None, chunk: int | None) -> None:
        self.path, self.engine, self.chunk = path, engine, chunk
        with fastcache.open(path, budget="all", engine=engine, verify="off") as store:
            self.slot_bytes = int(store.describe()["slot_bytes"])

    def open(self, path: Path | None = None, chunk: int | None = None) -> fastcache.ExpertStore:
        return fastcache.open(
            path or self.path,
            budget=SLOTS * self.slot_bytes,
            policy="lru",
            engine=self.engine,
            chunk=chunk or self.chunk,
            speculation="auto",  # the figures are those of these settings, whatever the environment says
            verify="off",
        )

    def serial(self) -> Row:
        with self.open() as store:
            good = sum(exact(store[0, e], e) for _ in range(3) for e in _ALL)
            stats, described = store.stats(), store.describe()
            got = {
                "byte-exact": good,
                "reads": stats.demand_loads,
                "slots": described["arena_bytes"] // described["slot_bytes"],
                "evictions": stats.evictions,
            }
        return Row("serial reads: 3 passes of 24", {"byte-exact": 72, "reads": 72, "slots": 8, "evictions": 64}, got)

    def batches(self) -> Row:
        good = 0
        with self.open() as store:
            for first in range(0, len(_ALL), 4):
                batch = range(first, first + 4)
                store.prefetch(0, batch).wait()
                good += sum(exact(store[0, e], e) for e in batch)
            got = {"byte-exact": good} | _pick(store, "requests", "hits", "prefetch_loads")
        expected = {"byte-exact": 24, "requests": 24, "hits": 24, "prefetch_loads": 24}
        return Row("batches: 6 of 4, each consumed", expected, got)

    def mixed(self, check: str, chunk: int | None) -> Row:
        good = 0
        with self.open(chunk=chunk) as store:
            for e in _ALL:
                if e % 2 == 0:
                    store.prefetch(0, [(e + i) % len(_ALL) for i in range(4)]).wait()
                good += exact(store[0, e], e)
            got = {"byte-exact": good} | _pick(store, "requests")
        return Row(check, {"byte-exact": 24, "requests": 24}, got)

    def prefetch_then_consume(self) -> list[Row]:
        rows = []
        counted = ("requests", "hits", "prefetch_loads", "adjusted_hits", "bytes_read")
        payload = 4 * fixture.SEED_EXPERT_NBYTES
        with self.open() as store:
            store.prefetch(0, range(4)).wait()
            cold = _pick(store, "requests", "prefetch_loads", "bytes_read")
            leases = [store[0, e] for e in range(4)]
            addresses = {lease["gate.weight_packed"].ctypes.data for lease in leases}
            del leases
            expected = {"requests": 0, "prefetch_loads": 4, "bytes_read": payload, "distinct slots": 4}
            rows.append(Row("prefetch four cold", expected, cold | {"distinct slots": len(addresses)}))

            expected = dict(zip(counted, (4, 4, 4, 0, payload), strict=True))
            rows.append(Row("consume each once", expected, _pick(store, *counted)))

            good = sum(exact(store[0, e], e) for e in range(4))
            expected = dict(zip(counted, (8, 8, 4, 4, payload), strict=True)) | {"byte-exact": 4}
            rows.append(Row("consume each again", expected, _pick(store, *counted) | {"byte-exact": good}))

            store.reset_stats()
            kept = sum(store.is_resident(0, e) for e in range(4))
            good = sum(exact(store[0, e], e) for e in range(4))
            expected = dict(zip(counted, (4, 4, 0, 4, 0), strict=True)) | {"resident": 4, "byte-exact": 4}
            got = _pick(store, *counted) | {"resident": kept, "byte-exact": good}
            rows.append(Row("reset, consume the resident four", expected, got))
        return rows

    def skewed(self) -> Row:
        with self.open() as store:
            store.prefetch(0, range(4)).wait()
            for _ in range(4):
                store.acquire(0, 0).release()
            seed = {"hits": 4, "prefetch_loads": 4, "adjusted_hits": 0}
            beyond = {"reuses": 3, "first_consumptions": 1, "unread_resident": 3}
            got = _pick(store, *seed, *beyond)
        return Row("prefetch four, get one four times", seed, got, beyond)

    def truncated(self) -> Row:
        copy = self.path.with_name("truncated.safetensors")
        shutil.copyfile(self.path, copy)
        try:
            with self.open(copy) as store:
                store.acquire(0, 0).release()
                before = store.stats()
                os.truncate(copy, TRUNCATED_AT)
                store.prefetch(0, range(20, 24)).wait()
                published = sum(store.is_resident(0, e) for e in range(20, 24))
                try:
                    store.acquire(0, 23)
                except fastcache.FastcacheError:
                    failed = True
                else:
                    failed = False
                after = store.stats() - before
                got = {
                    "published": published,
                    "in flight": store.stats().prefetch_in_flight + store.stats().misses_in_flight,
                    "get(23) fails": failed,
                    "misses": after.misses,
                    "bytes_read": after.bytes_read,
                    "expert 0 resident": store.is_resident(0, 0),
                    "expert 0 byte-exact": exact(store[0, 0], 0),
                }
        finally:
            copy.unlink()
        expected = {
            "published": 0,
            "in flight": 0,
            "get(23) fails": True,
            "misses": 1,
            "bytes_read": 0,
            "expert 0 resident": True,
            "expert 0 byte-exact": True,
        }
        return Row("truncated under an open store; batch 20..23", expected, got)


def _pick(store: fastcache.ExpertStore, *names: str) -> dict[str, int]:
    stats = store.stats()
    return {name: getattr(stats, name) for name in names}
