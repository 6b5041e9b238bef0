"""A prefill whose union of experts is far above the budget, served in waves and not.

    python bench/prefill.py DIR [--rounds 3]

Writes a checkpoint of Qwen3-30B-A3B's expert shapes to DIR once (two layers of 64 experts of 9 MiB), and gives one
prompt to both layers' MoE blocks. Arms, in turn: "at once" asks `as_ready` for the whole union of a layer, "list by
list" takes one list of `store.waves` after another, "waves" is what `MoEBlock` does: it asks for whatever fits as soon
as it fits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import statistics
import time

import numpy as np
from machine import Script, Steal, facts, write_receipt

import fastcache
from fastcache.fixture import DemoShape, write_demo_checkpoint
from fastcache.moe import MoEBlock, load_block

SHAPE = DemoShape(layers=2, experts=64)
TOKENS = (32, 256)
SLOTS = (4, 8, 32)


class AtOnce:
    """A store without its waves."""

    def __init__(self, store: fastcache.ExpertStore) -> None:
        self.as_ready = store.as_ready


class ListByList(AtOnce):
    """A store whose next list is not known before the last one was let go."""

    def __init__(self, store: fastcache.ExpertStore) -> None:
        super().__init__(store)
        self._store = store

    def waves(self, layer: int, experts: Any) -> Any:
        lists = self._store.waves(layer, experts)

        class Lists:
            def __next__(self) -> list[int]:
                return next(lists)

            def take(self) -> list[int]:
                return []

        return Lists()


ARMS: dict[str, Any] = {"at once": AtOnce, "list by list": ListByList, "waves": lambda store: store}


def run(directory: Path, blocks: list[MoEBlock], arm: str, x: np.ndarray, slots: int) -> dict[str, Any]:
    """Prefill once through a cold store, and return what it took."""
    budget = slots * (SHAPE.expert_nbytes + 8192)
    with fastcache.open(directory, budget=budget, overflow="1GiB", progress=lambda *_: None) as store:
        for block in blocks:
            block.experts = ARMS[arm](store)
        with Steal() as steal:
            start = time.perf_counter()
            for block in blocks:
                block(x)
            seconds = time.perf_counter() - start
        stats = store.stats()
        return {
            "seconds": seconds,
            "steal": steal.share,
            "distinct": sum(len(np.unique(block.route(x)[0])) for block in blocks),
            "misses": stats.misses,
            "pass_throughs": stats.pass_throughs,
            "bytes_read": stats.bytes_read,
            "overflow_peak_bytes": store.describe()["overflow_peak_bytes"],
        }


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    directory = options.directory / "prefill"
    if not (directory / "config.json").exists():
        write_demo_checkpoint(directory, shape=SHAPE)
    blocks = [load_block(directory, layer, experts="resident") for layer in range(SHAPE.layers)]
    rows = []
    for tokens in TOKENS:
        x = np.random.default_rng(0).standard_normal((tokens, SHAPE.hidden), dtype=np.float32)
        for slots in SLOTS:
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
            for _ in range(options.rounds):
                for arm in ARMS:
                    runs[arm].append(run(directory, blocks, arm, x, slots))
            median = {arm: statistics.median(each["seconds"] for each in runs[arm]) for arm in ARMS}
            rows.append({"tokens": tokens, "slots": slots, "median_seconds": median, "runs": runs})
            passed = {arm: max(each["pass_throughs"] for each in runs[arm]) for arm in ARMS}
            print(
                tokens, slots, {arm: f"{s:.2f} s, {passed[arm]} pass-throughs" for arm, s in median.items()}, flush=True
            )
    print(write_receipt("prefill", {"what": __doc__, **facts(directory), "rows": rows}))


if __name__ == "__main__":
    main()
