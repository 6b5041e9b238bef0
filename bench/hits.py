"""The hit path beside what people use instead, in one process, interleaved: a receipt.

    python bench/hits.py [DIR]

Nanoseconds per operation, the least over many short chunks that alternate between all arms, so that a busy moment of
the machine meets all of them. Two threads: wall time per operation of each, when both run the same workload on the same
store.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from machine import Script, Steal, facts, write_receipt
from workloads import Workload, evictions, full_store, workloads

from fastcache_ext.policy import NAMES

CHUNKS, OPERATIONS = 300, 2000


def least(arms: dict[str, Workload], operations: int = OPERATIONS, chunks: int = CHUNKS) -> dict[str, float]:
    """Return the least ns per operation of each arm, chunks interleaved."""
    best = dict.fromkeys(arms, float("inf"))
    for _ in range(chunks):
        for name, work in arms.items():
            start = time.perf_counter_ns()
            work(operations)
            best[name] = min(best[name], (time.perf_counter_ns() - start) / operations)
    return {name: round(ns, 1) for name, ns in best.items()}


def two_threads(work: Workload, operations: int = 100_000) -> float:
    """Return wall ns per operation of each of two threads."""
    gate = threading.Barrier(3)

    def run() -> None:
        gate.wait()
        work(operations)
        gate.wait()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter_ns()
    gate.wait()
    elapsed = time.perf_counter_ns() - start
    for thread in threads:
        thread.join()
    return elapsed / operations


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR")
    directory = parser.parse_args().directory or Path(tempfile.mkdtemp())
    runs: list[dict[str, Any]] = []
    with full_store(directory / "hits.bin") as store:
        arms = workloads(store)
        for _ in range(3):
            with Steal() as steal:
                one = least(arms)
                names = ("empty_method", "ordered_dict_lru", "cachetools_lru", "acquire_release")
                two = {name: min(two_threads(arms[name]) for _ in range(7)) for name in names}
            runs.append({"ns": one, "two_threads_ns": two, "steal": steal.share})
    best = {name: min(run["ns"][name] for run in runs) for name in runs[0]["ns"]}
    two = {name: min(run["two_threads_ns"][name] for run in runs) for name in runs[0]["two_threads_ns"]}
    base = best["ordered_dict_lru"]
    eviction = {}
    for slots in (1024, 16384):
        for policy in NAMES:
            for leased, by_layer in ((0.0, True), (0.5, True), (0.0, False)):
                evict = evictions(policy, slots, leased, by_layer)
                name = f"{policy}, {slots} slots, {leased:.0%} leased, {'by layer' if by_layer else 'at random'}"
                eviction[name] = round(min(evict(2000) for _ in range(50)), 1)
    receipt = {
        "what": __doc__, **facts(directory), "best_ns": best,
        "of_ordered_dict_lru": {name: round(best[name] / base, 2) for name in best},
        "two_threads_ns": two,
        "two_threads_slowdown": {name: round(two[name] / best[name], 2) for name in two},
        "eviction_ns": eviction, "runs": runs,
    }  # fmt: skip
    for key in ("best_ns", "of_ordered_dict_lru", "two_threads_ns", "two_threads_slowdown", "eviction_ns"):
        print(key, receipt[key])
    print(write_receipt("hits", receipt))


if __name__ == "__main__":
    main()
