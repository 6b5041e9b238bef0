"""What `verify="sidecar"` costs: cold batches and hits, with and without it, in one process, interleaved; and a scan.

    python bench/verify_cost.py DIR [--rounds 5]

Writes a file of 1 GiB of random bytes to DIR, as 4.5 MiB experts, and its sidecar. Cold: `acquire_many` of 8 experts
that are not resident, in random order. CPU is user + system of the process, per GiB of payload. Hits: the least ns per
`acquire` and release over many short chunks that alternate between the two stores.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from machine import Script, Steal, facts, write_receipt

import fastcache
from fastcache.integrity import checksum, verify
from fastcache_ext.crc import HOW, crc32c, crc32c_by_table

SIZE, BATCH, GIB = 9 << 19, 8, 1 << 30
COUNT = GIB // SIZE


def cold(store: fastcache.ExpertStore, seconds: float) -> dict[str, float]:
    order = random.sample(range(COUNT), COUNT)
    at = 0
    before, cpu, start = store.stats(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    while time.perf_counter() - start < seconds:
        store.acquire_many(0, order[at : at + BATCH]).release()
        at = (at + BATCH) % (COUNT - 2 * BATCH)
    took, after, did = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF), store.stats() - before
    used = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    return {"gb_per_s": did.bytes_read / took / 1e9, "cpu_s_per_gib": used / (did.bytes_read / GIB)}


def hits(stores: dict[str, fastcache.ExpertStore]) -> dict[str, float]:
    best = dict.fromkeys(stores, float("inf"))
    for store in stores.values():
        store.acquire(0, 0).release()
    for _ in range(300):
        for name, store in stores.items():
            acquire = store.acquire
            start = time.perf_counter_ns()
            for _ in range(2000):
                acquire(0, 0).release()
            best[name] = min(best[name], (time.perf_counter_ns() - start) / 2000)
    return {name: round(ns, 1) for name, ns in best.items()}


def crc_speed() -> dict[str, float]:
    data, speed = os.urandom(64 << 20), {}
    for name, of in ((HOW, crc32c), ("table", crc32c_by_table)):
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            of(data)
            best = min(best, time.perf_counter() - start)
        speed[name] = len(data) / best / 1e9
    return speed


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    path = options.directory / "verified.bin"
    path.write_bytes(b"".join(os.urandom(SIZE) for _ in range(COUNT)))
    source = fastcache.FileRangeSource(path, {(0, e): (e * SIZE, SIZE) for e in range(COUNT)})
    receipt: dict[str, Any] = {"what": __doc__, **facts(options.directory), "crc_gb_per_s": crc_speed()}
    with Steal() as steal:
        checksum(source, overwrite=True)
        start = time.perf_counter()
        assert verify(source)
        receipt["scan_gb_per_s"] = COUNT * SIZE / (time.perf_counter() - start) / 1e9
        for engine in ("uring", "pread"):
            budget = 2 * BATCH * (SIZE + 8192)
            common: dict[str, Any] = {"budget": budget, "engine": engine, "policy": "lru", "progress": lambda *_: None}
            with (
                fastcache.open(source, **common) as plain,
                fastcache.open(source, **common, verify="sidecar") as checked,
            ):
                stores = {"off": plain, "sidecar": checked}
                runs: dict[str, list[dict[str, float]]] = {name: [] for name in stores}
                for i in range(options.rounds):
                    for name in list(stores)[:: 1 if i % 2 else -1]:
                        runs[name].append(cold(stores[name], options.seconds))
                median = {
                    name: {key: statistics.median(run[key] for run in mine) for key in mine[0]}
                    for name, mine in runs.items()
                }
                receipt[engine] = {"cold_median": median, "cold_runs": runs, "hit_ns": hits(stores)}
                assert not checked.stats().errors["checksum"]
    receipt["steal"] = steal.share
    os.unlink(path)
    os.unlink(f"{path}.checksums")
    for engine in ("uring", "pread"):
        print(engine, receipt[engine]["cold_median"], receipt[engine]["hit_ns"])
    print(receipt["crc_gb_per_s"], receipt["scan_gb_per_s"], receipt["steal"], write_receipt("verify", receipt))


if __name__ == "__main__":
    main()
