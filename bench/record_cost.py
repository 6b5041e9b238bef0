"""What recording costs a hit: two stores in one process, one of them recorded, in chunks that alternate: a receipt.

    python bench/record_cost.py [DIR]

`plain` and `recorded` are the same workload on two stores of the same experts, all resident. Chunks alternate, so that
a busy moment of the machine meets both; the figure is the ratio of the least ns per operation over all chunks,
and beside it that of the medians. Which store is recorded is swapped half-way in each run, so that where their memory
lies favours neither; and each run is a process of its own, since where code and memory lie weighs as much as recording
does: the figure to quote is the median of the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import Script, Steal, facts, processes, write_receipt
from workloads import Workload, full_store, workloads

import fastcache

CHUNKS, OPERATIONS, RUNS = 400, 2000, 21
ARMS = ("acquire_release", "acquire_three_arrays_release", "acquire_many_8")


def interleaved(arms: dict[str, Workload], operations: int) -> dict[str, list[float]]:
    """Return ns per operation of every chunk, by arm."""
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(CHUNKS):
        for name, work in arms.items():
            start = time.perf_counter_ns()
            work(operations)
            spent[name].append((time.perf_counter_ns() - start) / operations)
    return spent


def measure(pair: tuple[fastcache.ExpertStore, fastcache.ExpertStore], path: Path, arm: str) -> dict[str, Any]:
    """Return plain and recorded ns of one workload, each store recorded once."""
    spent: dict[str, list[float]] = {"plain": [], "recorded": []}
    lost = records = 0
    for plain, recorded in (pair, pair[::-1]):
        arms = {"plain": workloads(plain)[arm], "recorded": workloads(recorded)[arm]}
        with recorded.record(path, max_bytes="4GiB") as recording:
            for name, chunks in interleaved(arms, OPERATIONS if "many" not in arm else OPERATIONS // 8).items():
                spent[name] += chunks
        lost, records = lost + recording.dropped, records + recording.records
        path.unlink()
    least = {name: min(chunks) for name, chunks in spent.items()}
    median = {name: statistics.median(chunks) for name, chunks in spent.items()}
    return {
        "least_ns": {name: round(ns, 1) for name, ns in least.items()},
        "median_ns": {name: round(ns, 1) for name, ns in median.items()},
        "least_ratio": round(least["recorded"] / least["plain"], 4),
        "median_ratio": round(median["recorded"] / median["plain"], 4),
        "records": records,
        "lost": lost,
    }


def run(directory: Path) -> dict[str, Any]:
    """Return what `measure` finds of every arm, and the steal meanwhile."""
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(full_store(directory / f"hits-{i}.bin")) for i in range(2))
        with Steal() as steal:
            found: dict[str, Any] = {arm: measure((a, b), directory / "hits.fctrace", arm) for arm in ARMS}
    return found | {"steal": steal.share}


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(dir="/var/tmp"))
    if options.one:
        print(json.dumps(run(directory)))
        return
    runs = processes(__file__, RUNS, str(directory))
    figures = {
        f"{name}_of_{what}s": {arm: round(of([run[arm][f"{what}_ratio"] for run in runs]), 4) for arm in ARMS}
        for what in ("least", "median")
        for name, of in (("best", min), ("median", statistics.median), ("worst", max))
    }
    for name, figure in figures.items():
        print(name, figure)
    print(write_receipt("record", {"what": __doc__, **facts(directory), **figures, "runs": runs}))


if __name__ == "__main__":
    main()
