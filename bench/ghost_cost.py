"""What ghost caches cost, and how far off they are: a receipt.

    python bench/ghost_cost.py [DIR] [TRACES]

A hit is `acquire` and release, of a store with ghosts and of one without, in chunks that alternate; the least of many,
as in hits.py, and of that the median of several processes, each with one such pair: where code and memory lie weighs
more than ghosts do. The pairs hold the same 16 x 128 experts, all resident; of a pool of that size one in 16 is sampled
when all of it has a slot. "whole": 8 x 128, which are sampled whole. "tokens": requests as a decoder makes them, eight
experts of a layer, layer after layer. "one layer": 64 experts in turn. The ghosts are up to date before every chunk, so
that all of it is heard; but "flooded": hits come faster than the ghosts' share of a processor allows, and most are lost
to them. Bytes are what the C library says that the ghosts of all policies took. Errors: hit rates of ghosts against
full simulations by the same code, on the real traces where TRACES has them.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hits import least
from machine import Script, Steal, facts, processes, write_receipt
from workloads import full_store

import fastcache
from fastcache_ext.driven import Table
from fastcache_ext.policy import NAMES
from fastcache_ext.watch import Watch, report, switch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
Work = Callable[[int], None]
STORES: dict[str, dict[str, Any]] = {"sampled": {}, "auto": {"policy": "auto"}, "whole": {"n_layers": 8}}
RUNS = 7
POOLS = ((92, 896), (60, 384), (48, 128), (26, 64), (24, 60), (16, 65), (16, 64))


def tokens_of(store: fastcache.ExpertStore) -> Work:
    """Return f(n): n acquires in a decoder's order."""
    rng = np.random.default_rng(2)
    layers = [*store.layers] * (768 // len(store.layers))
    keys = itertools.cycle([(layer, int(e)) for layer in layers for e in rng.permutation(store.experts(layer))[:8]])

    def work(n: int) -> None:
        acquire = store.acquire
        for layer, expert in itertools.islice(keys, n):
            acquire(layer, expert)

    return work


def one_layer(store: fastcache.ExpertStore) -> Work:
    """Return f(n): n acquires of 64 experts in turn."""

    def work(n: int) -> None:
        acquire = store.acquire
        for i in range(n):
            acquire(3, i & 63)

    return work


KINDS = {"one layer": one_layer, "tokens": tokens_of}


def caught_up(arms: dict[str, tuple[fastcache.ExpertStore, Work]], chunks: int = 150) -> dict[str, float]:
    """Return the least ns per request of each arm, the ghosts up to date before each chunk."""
    best = dict.fromkeys(arms, float("inf"))
    for _ in range(chunks):
        for name, (store, work) in arms.items():
            time.sleep(0.01)
            while (heard := report(store)) and heard["waiting"]:
                time.sleep(0.001)
            work(300)  # the processor has slept too
            start = time.perf_counter_ns()
            work(1200)
            best[name] = min(best[name], (time.perf_counter_ns() - start) / 1200)
    return {name: round(ns, 1) for name, ns in best.items()}


def spent() -> float:
    """Return CPU seconds of the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def worker_ns(
    store: fastcache.ExpertStore, work: Callable[[int], None], requests: int = 20_000_000
) -> dict[str, float]:
    """Return the process's CPU time beside the calling thread's, per request and as a share of the elapsed time."""
    store.mrc()
    own, all_, wall = time.thread_time(), spent(), time.perf_counter()
    for _ in range(requests // 2000):
        work(2000)
    own, all_, wall = time.thread_time() - own, spent() - all_, time.perf_counter() - wall
    return {"ns_per_request": round((all_ - own) / requests * 1e9, 1), "share_of_time": round((all_ - own) / wall, 4)}


def digest_ns(layers: int, experts: int, share: float) -> float:
    """Return ns per request of everything, ghosts served by the caller: a decoder's traffic, misses included."""
    pool = layers * experts
    rng = np.random.default_rng(3)
    taste = rng.normal(0, 1.5, (layers, experts))
    keys = np.concatenate(
        [layer * experts + np.argpartition(-(taste[layer] + rng.normal(0, 1, experts)), 8)[:8]
         for _ in range(60) for layer in range(layers)]
    ).astype(np.int32)  # fmt: skip
    watch = Watch([experts] * layers, bytes(pool), [int(pool * share)])
    watch.hear(keys)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter_ns()
        watch.hear(keys)
        best = min(best, (time.perf_counter_ns() - start) / len(keys))
    return round(best, 1)


def switch_ms(slots: int) -> dict[str, float]:
    """Return the least ms that a full table takes to change to each policy: the time that the mutex is held."""
    layers = slots // 128
    found = {}
    for policy in NAMES:
        table = Table([256] * layers, bytes(layers * 256), [slots], "lru")
        for key in range(slots):
            table.request(key)
            table.publish(table.reserve(key, 0, 0)[0])
        order = list(range(slots))
        best = float("inf")
        for _ in range(9):
            best = min(best, table.switch(policy, order))
        found[policy] = round(best / 1e6, 3)
    return found


class Mallinfo(ctypes.Structure):
    """The C library's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uord ford keep".split()
    ]


def taken(layers: int, experts: int, share: float) -> dict[str, float]:
    """Return the bytes that the ghosts of a pool take."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    sizes, classes = [experts] * layers, bytes(layers * experts)
    before = libc.mallinfo2()
    watch = Watch(sizes, classes, [int(layers * experts * share)])
    after = libc.mallinfo2()
    nbytes = after.uord + after.hblkhd - before.uord - before.hblkhd - 4 * layers * experts  # of the Watch itself
    report = watch.report()
    return {
        "bytes": nbytes,
        "per_expert": round(nbytes / report["pool"], 1),
        "one_in": report["every"],
        "per_sampled_expert": round(nbytes / report["tracked"], 1),
    }


def errors(traces: Path) -> dict[str, Any]:
    """Return hit rates of ghosts and of full simulations, on the real traces and on generated traffic."""
    import test_ghost

    test_ghost.TRACES = traces
    cases = {"generated, 40 x 256, top 8": (40, 256, test_ghost.tokens(40, 256, 8, 400, 0))}
    if traces.exists():
        cases = {"kimi-k3": test_ghost.kimi(), "qwen3-30b-a3b": test_ghost.qwen(), **cases}
    found: dict[str, Any] = {}
    for name, (layers, experts, keys) in cases.items():
        for share in (0.03, 0.05, 0.1, 0.2):
            slots = int(layers * experts * share)
            report = test_ghost.watched(keys, layers, experts, slots).report(curve=True)
            rows = {
                policy: [round(report["hits"][policy] / report["sampled"], 4),
                         round(test_ghost.simulate(keys, layers, experts, slots, policy) / len(keys), 4)]
                for policy in NAMES
            }  # fmt: skip
            found[f"{name}, {share:.0%}"] = {
                "sampled": report["sampled"],
                "requests": len(keys),
                "ghost_and_full": rows,
            }
    return found


def costs(directory: Path, name: str) -> dict[str, Any]:
    """Return the least ns of a hit of such a store and of one without ghosts, in this process, and the steal."""
    how = STORES[name]
    plain = {key: value for key, value in how.items() if key == "n_layers"}
    found: dict[str, Any] = {}
    with (
        full_store(directory / "off.bin", **plain) as off,
        full_store(directory / "on.bin", ghosts=True, **how) as on,
        Steal() as steal,
    ):
        for kind, make in KINDS.items():
            arms = {"without": (off, make(off)), "with": (on, make(on))}
            works = {arm: work for arm, (_, work) in arms.items()}
            found[kind] = {"ns": caught_up(arms), "flooded_ns": least(works)}
    return found | {"steal": steal.share}


def over(runs: dict[str, list[dict[str, Any]]], what: str) -> dict[str, list[float]]:
    """Return by how much more than without ghosts a hit takes: the least, the median and the most of the runs."""
    found = {}
    for kind in KINDS:
        for name in STORES:
            more = [run[kind][what]["with"] / run[kind][what]["without"] - 1 for run in runs[name]]
            found[f"{name}, {kind}"] = [round(of(more), 4) for of in (min, statistics.median, max)]
    return found


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR")
    parser.add_argument("traces", type=Path, nargs="?", default=Path(__file__).parents[2] / "shared" / "traces")
    parser.add_argument("--one", choices=STORES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    directory, traces = options.directory or Path(tempfile.mkdtemp()), options.traces
    if options.one:
        print(json.dumps(costs(directory, options.one)))
        return
    runs = {name: processes(__file__, RUNS, str(directory), one=name) for name in STORES}
    with full_store(directory / "on.bin", ghosts=True) as on:
        worker = {kind: worker_ns(on, make(on)) for kind, make in KINDS.items()}
        start = time.perf_counter_ns()
        for policy in ("lru", "next_use") * 10:
            switch(on, policy)
        live_switch = (time.perf_counter_ns() - start) / 20 / 1e6
        curve = on.mrc()
    receipt = {
        "what": __doc__,
        **facts(directory),
        "policies": sorted(NAMES),
        "more_than_without": over(runs, "ns"),
        "flooded_more_than_without": over(runs, "flooded_ns"),
        "flooded_worker": worker,
        "sampled_share": curve.rate,
        "lost_requests": curve.lost,
        "serving_ns_per_request": {f"{layers} x {each}, 10%": digest_ns(layers, each, 0.1) for layers, each in POOLS},
        "switch_ms_at_16384_slots": switch_ms(16384),
        "switch_ms_of_a_live_store_of_2048": round(live_switch, 3),
        "bytes": {
            f"{layers} x {each}, {share:.0%}": taken(layers, each, share)
            for layers, each in POOLS
            for share in (0.05, 0.2, 0.4, 1)
        },
        "errors": errors(traces),
        "runs": runs,
    }
    for key in receipt.keys() - {"what", "runs", "errors"}:
        print(key, receipt[key])
    print(write_receipt("ghosts", receipt))


if __name__ == "__main__":
    main()
