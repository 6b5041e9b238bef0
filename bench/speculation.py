"""What guesses cost a demand, and what they save: latency behind speculation, a hostile predictor, a perfect one.

    PYTHONPATH=. python bench/speculation.py DIR [--engine uring] [--rounds 5] [--part delay|hostile|perfect]

Experts of 4.5 MiB in the 3 GiB file of streaming.py, read once before. Arms of a part in turn, each in a process of its
own; rounds with more than 5 % steal do not count. Medians over the rounds that do.

delay    one demand at a time, every 10 ms or so: on an idle store; and while guesses have the device's free time.
hostile  eight experts a layer, 24 layers round and round, cache of 96: without prefetch; with guesses that are
         always wrong, of experts that nobody ever asks for.
perfect  the same beside compute, which is the longer: nothing prefetched (the sum); the next layer's experts
         prefetched. Against the longer of compute alone and reads alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ[name] = "1"

from machine import Script, Steal, facts, write_receipt  # noqa: E402
from streaming import FILE_BYTES, make_file  # noqa: E402

SIZE, STEAL = 9 << 19, 0.05
LAYERS, TOP_K, SLOTS = 24, 8, 96
PER_LAYER = FILE_BYTES // SIZE // LAYERS
PARTS = {
    "delay": ("idle", "speculating"),
    "hostile": ("without", "hostile"),
    "perfect": ("compute", "reads", "sum", "perfect"),
}


def open_store(path: Path, engine: str, **arguments: Any) -> Any:
    import fastcache

    ranges = {(n % LAYERS, n // LAYERS): (n * SIZE, SIZE) for n in range(LAYERS * PER_LAYER)}
    source = fastcache.FileRangeSource(path, ranges)
    return fastcache.open(source, SLOTS * (SIZE + 8192), engine=engine, progress=lambda *_: None, **arguments)


def delay(path: Path, engine: str, arm: str, seconds: float = 4.0) -> dict[str, Any]:
    rng, waits = random.Random(), []
    with open_store(path, engine, speculation="always") as store:
        layer, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            layer = (layer + 1) % LAYERS
            absent = [e for e in range(PER_LAYER) if not store.is_resident(layer, e)]
            rng.shuffle(absent)
            handles = []
            if arm == "speculating":  # more than the device can do in the pause; dropped after the demand
                other = (layer + LAYERS // 2) % LAYERS
                handles.append(store.prefetch(other, rng.sample(range(PER_LAYER), TOP_K)))
            time.sleep(rng.uniform(0.004, 0.008))
            start = time.perf_counter()
            store.acquire(layer, absent[0]).release()
            waits.append(time.perf_counter() - start)
            for handle in handles:
                handle.cancel()
        did = store.stats()
    waits.sort()
    return {
        "median_ms": statistics.median(waits) * 1e3,
        "p99_ms": waits[int(len(waits) * 0.99)] * 1e3,
        "demands": len(waits),
        "guesses_issued": did.prefetch_issued,
        "guesses_landed": did.prefetch_loads,
    }


def schedule(rng: random.Random, tokens: int, experts: int = PER_LAYER) -> list[tuple[int, list[int]]]:
    return [(layer, rng.sample(range(experts), TOP_K)) for _ in range(tokens) for layer in range(LAYERS)]


def hostile(path: Path, engine: str, arm: str, tokens: int = 20) -> dict[str, Any]:
    asked = PER_LAYER - TOP_K
    visits = schedule(random.Random(), tokens, asked)
    with open_store(path, engine) as store:
        store.acquire_many(0, range(TOP_K)).release()
        before, start = store.stats(), time.perf_counter()
        for i, (layer, wanted) in enumerate(visits):
            if arm == "hostile" and i + 1 < len(visits):
                store.prefetch(visits[i + 1][0], range(asked, PER_LAYER))
            store.acquire_many(layer, wanted).release()
        seconds = time.perf_counter() - start
        did = store.stats() - before
        told = store.describe()["speculation"]
    return {
        "visits_per_s": len(visits) / seconds,
        "guesses_issued": did.prefetch_issued,
        "declined": told["predictors"].get("caller", {}).get("declined", 0),
        "used": told["used"],
    }


def perfect(path: Path, engine: str, arm: str, tokens: int = 4) -> dict[str, Any]:
    import numpy as np

    visits = schedule(random.Random(), tokens)
    with open_store(path, engine) as store:
        x = np.ones((COMPUTE, SIZE // 4 // COMPUTE), np.float32)
        y = np.ones((SIZE // 4 // COMPUTE, ROWS), np.float32)
        if arm == "compute":
            lease = store.acquire(0, 0)
        elif arm != "reads":
            store.acquire(0, 0).release()
        start = time.perf_counter()
        for i, (layer, wanted) in enumerate(visits):
            leases = store.acquire_many(layer, wanted) if arm != "compute" else [lease] * TOP_K
            if arm == "perfect" and i + 1 < len(visits):
                store.prefetch(*visits[i + 1])
            for held in leases if arm != "reads" else []:
                a = np.frombuffer(held, np.float32).reshape(x.shape)
                with np.errstate(all="ignore"):  # the file's bytes are no numbers
                    np.dot(a, y, out=OUT)
            for held in leases if arm != "compute" else []:
                held.release()
        seconds = time.perf_counter() - start
        told = store.describe()["speculation"]
        did = store.stats()
    return {
        "ms_per_token": seconds / tokens * 1e3,
        "used": told["used"],
        "declined": told["predictors"].get("caller", {}).get("declined", 0),
        "first_consumptions": did.first_consumptions,
        "late_joins_ok": did.late_joins_ok,
    }


COMPUTE, ROWS = 1024, 128
OUT: Any = None


def one(path: Path, options: argparse.Namespace, part: str, arm: str) -> dict[str, Any]:
    command = [sys.executable, __file__, str(path.parent), "--engine", options.engine, "--part", part, "--arm", arm]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(path: Path, options: argparse.Namespace, part: str) -> dict[str, Any]:
    arms = PARTS[part]
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    kept: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for i in range(options.rounds):
        round_ = {}
        for arm in arms[i % len(arms) :] + arms[: i % len(arms)]:
            with Steal() as steal:
                round_[arm] = one(path, options, part, arm)
            round_[arm]["steal"] = steal.share
            runs[arm].append(round_[arm])
        if all(run["steal"] <= STEAL for run in round_.values()):
            for arm, run in round_.items():
                kept[arm].append(run)
    figures = {"delay": ("median_ms", "p99_ms"), "hostile": ("visits_per_s",), "perfect": ("ms_per_token",)}[part]
    median = {
        arm: {f: statistics.median(run[f] for run in runs_) for f in figures} for arm, runs_ in kept.items() if runs_
    }
    result: dict[str, Any] = {"rounds_kept": len(kept[arms[0]]), "median": median, "runs": runs}
    if median and part == "delay":
        result["median_of_idle"] = median["speculating"]["median_ms"] / median["idle"]["median_ms"]
        result["p99_more_ms"] = median["speculating"]["p99_ms"] - median["idle"]["p99_ms"]
        result["aim"] = "median_of_idle <= 1.3; p99_more_ms <= two guess chunks (0.9 ms at 2.4 GB/s)"
    elif median and part == "hostile":
        result["of_without"] = statistics.median(
            h["visits_per_s"] / w["visits_per_s"] for h, w in zip(kept["hostile"], kept["without"], strict=True)
        )
        result["aim"] = "of_without >= 0.97"
    elif median:
        longer = max(median["compute"]["ms_per_token"], median["reads"]["ms_per_token"])
        result["of_the_longer"] = median["perfect"]["ms_per_token"] / longer
        result["sum_of_the_longer"] = median["sum"]["ms_per_token"] / longer
        result["aim"] = "of_the_longer <= 1.15"
    print(part, json.dumps({k: v for k, v in result.items() if k != "runs"}), flush=True)
    return result


def main() -> None:
    global OUT
    parser = Script(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--engine", default="uring")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.directory / "experts.bin"
    if options.arm:
        if options.part == "perfect":
            import numpy as np

            OUT = np.zeros((COMPUTE, ROWS), np.float32)
        run = {"delay": delay, "hostile": hostile, "perfect": perfect}[options.part]
        print(json.dumps(run(path, options.engine, options.arm)))
        return
    make_file(options.directory)
    receipt_path = Path(__file__).parent / "receipts" / f"speculation-{options.engine}.json"
    receipt = json.loads(receipt_path.read_text()) if options.part and receipt_path.exists() else {}
    parts = {
        **receipt.get("parts", {}),
        **{p: measure(path, options, p) for p in ([options.part] if options.part else PARTS)},
    }
    with open_store(path, options.engine) as store:
        io = store.describe()["speculation"]["io"]
    print(
        write_receipt(
            f"speculation-{options.engine}",
            {
                "what": __doc__,
                **facts(options.directory),
                "host_cached": True,
                "engine": options.engine,
                "expert_bytes": SIZE,
                "io": io,
                "parts": parts,
            },
        )
    )


if __name__ == "__main__":
    main()
