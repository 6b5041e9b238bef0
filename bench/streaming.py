"""Cold demand batches through the whole stack, against fio on the same file, interleaved.

    python bench/streaming.py DIR [--rounds 7] [--engine uring] [--only "1 MiB"]

Writes a file of random bytes to DIR once (3 GiB), and reads it once, so that every arm finds it where a guest's direct
reads find what was read before: in the host's cache. Arms, in turn, per expert size: fio with 8 reads in flight always;
fio in batches of 8 (the next batch starts when the last read of one has ended, as a forward pass does); fastcache,
`acquire_many` of 8 experts that are not resident, in a loop that does nothing else: which experts is decided
before, and the clock is read every 128 MiB. GB/s are of payload; CPU is user + system of the process, per GiB.
Rounds with more than 5 % steal do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import Script, Steal, facts, write_receipt

SIZES = {"1 MiB": 1 << 20, "4.5 MiB": 9 << 19, "16.7 MiB": 17100 << 10}
BATCH = 8
FILE_BYTES = 3 << 30
SECONDS = 2.0
STRETCH = 128 << 20
GIB = 1 << 30
STEAL = 0.05


def make_file(directory: Path) -> Path:
    path = directory / "experts.bin"
    if not path.exists() or path.stat().st_size != FILE_BYTES:
        block = os.urandom(16 << 20)
        with path.open("wb") as out:
            for i in range(FILE_BYTES // len(block)):
                out.write(i.to_bytes(8, "little") + block[8:])
            out.flush()
            os.fsync(out.fileno())
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=4M", "iflag=direct", "status=none"], check=True)
    return path


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Explicit huge pages for fio's memory, meanwhile."""
    pages = Path("/proc/sys/vm/nr_hugepages")
    had = pages.read_text()
    pages.write_text("96")
    try:
        yield
    finally:
        pages.write_text(had)


def fio(path: Path, size: int, batched: bool) -> dict[str, float]:
    """One fio run: io_uring, direct, huge-page memory."""
    batch = (
        [
            f"--iodepth_batch_submit={BATCH}",
            f"--iodepth_batch_complete_min={BATCH}",
            f"--iodepth_batch_complete_max={BATCH}",
        ]
        if batched
        else []
    )
    command = [
        "fio",
        "--name=x",
        f"--filename={path}",
        "--rw=randread",
        f"--bs={size}",
        f"--iodepth={BATCH}",
        "--ioengine=io_uring",
        "--direct=1",
        "--mem=mmaphuge",
        "--norandommap",
        "--randrepeat=0",
        "--time_based",
        f"--runtime={SECONDS}",
        "--output-format=json",
        f"--filesize={FILE_BYTES}",
        *batch,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    nbytes, seconds = job["read"]["io_bytes"], job["read"]["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return {"gb_per_s": nbytes / seconds / 1e9, "cpu_s_per_gib": cpu / (nbytes / GIB)}


def ours(path: Path, size: int, engine: str) -> dict[str, float]:
    """One run in a process of its own."""
    done = subprocess.run(
        [
            *(sys.executable, __file__, str(path.parent), "--arm", str(size), "--engine", engine),
            *("--file-bytes", str(FILE_BYTES), "--seconds", str(SECONDS)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def arm(path: Path, size: int, engine: str, file_bytes: int, run_seconds: float) -> None:
    import fastcache

    count = file_bytes // size
    source = fastcache.FileRangeSource(path, {(0, e): (e * size, size) for e in range(count)})
    rng = random.Random()
    with fastcache.open(
        source, budget=2 * BATCH * (size + 8192), engine=engine, policy="lru", progress=lambda *_: None
    ) as store:
        order = list(range(count))
        rng.shuffle(order)
        # Once around, a batch's experts were evicted long ago: there is room for two.
        batches = [order[i : i + BATCH] for i in range(0, count - BATCH + 1, BATCH)]
        stretch = max(STRETCH // (BATCH * size), 1)
        stretches = itertools.cycle(batches[i : i + stretch] for i in range(0, len(batches), stretch))
        store.acquire_many(0, batches[-1]).release()
        before, cpu = store.stats(), resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        while time.perf_counter() - start < run_seconds:
            for batch in next(stretches):
                store.acquire_many(0, batch).release()
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        did = store.stats() - before
        assert did.hits == 0
        memory = store.describe()
        used = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
        print(
            json.dumps(
                {
                    "gb_per_s": did.bytes_read / seconds / 1e9,
                    "cpu_s_per_gib": used / (did.bytes_read / GIB),
                    "engine": memory["engine"]["used"],
                    "direct": memory["direct"]["used"],
                    "huge_fraction": memory["hugepages"]["fraction"],
                    "registered_bytes": memory["registered"]["registered_bytes"],
                    "bytes_submitted_per_byte": did.bytes_submitted / did.bytes_read,
                }
            )
        )


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine", default="uring")
    parser.add_argument("--only", choices=SIZES, help="look at one size; leaves no receipt")
    parser.add_argument("--arm", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--file-bytes", type=int, default=FILE_BYTES, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        arm(options.directory / "experts.bin", options.arm, options.engine, options.file_bytes, options.seconds)
        return
    path = make_file(options.directory)
    with huge_pages():
        sizes = {name: measure(path, size, options) for name, size in SIZES.items() if options.only in (None, name)}
    if options.only:
        return
    receipt: dict[str, Any] = {
        "what": __doc__,
        **facts(options.directory),
        "host_cached": True,
        "engine": options.engine,
        "batch": BATCH,
        "seconds_per_run": SECONDS,
        "sizes": sizes,
    }
    print(write_receipt(f"streaming-{options.engine}", receipt))


def measure(path: Path, size: int, options: argparse.Namespace) -> dict[str, Any]:
    arms = {
        "fio": lambda: fio(path, size, False),
        "fio_batched": lambda: fio(path, size, True),
        "fastcache": lambda: ours(path, size, options.engine),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    kept: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for i in range(options.rounds):
        round_ = {}
        for name in list(arms)[i % 3 :] + list(arms)[: i % 3]:
            with Steal() as steal:
                round_[name] = arms[name]()
            round_[name]["steal"] = steal.share
            runs[name].append(round_[name])
        if all(run["steal"] <= STEAL for run in round_.values()):
            for name, run in round_.items():
                kept[name].append(run)
    median = {
        name: {key: statistics.median(run[key] for run in runs_) for key in ("gb_per_s", "cpu_s_per_gib")}
        for name, runs_ in kept.items()
        if runs_
    }
    result: dict[str, Any] = {"rounds_kept": len(kept["fio"]), "median": median, "runs": runs}
    if median:
        for against in ("fio", "fio_batched"):
            result[f"of_{against}"] = median["fastcache"]["gb_per_s"] / median[against]["gb_per_s"]
            result[f"cpu_of_{against}"] = median["fastcache"]["cpu_s_per_gib"] / median[against]["cpu_s_per_gib"]
    print(size, json.dumps({k: v for k, v in result.items() if k != "runs"}), flush=True)
    return result


if __name__ == "__main__":
    main()
