"""Decoding with the next layer's experts read ahead, against decoding without.

    python bench/lookahead.py DIR [--rounds 3]

Writes a checkpoint of Qwen3-30B-A3B's expert shapes to DIR once (12 layers of 32 experts), and decodes 24 tokens
of a made-up stream at half of the experts' bytes, as examples/lookahead.py does, with each predictor in turn.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from lookahead import decode
from machine import Script, Steal, facts, write_receipt

from fastcache.fixture import DemoShape, write_demo_checkpoint
from fastcache.moe import Speculator
from fastcache.predictors import HotList, NullPredictor, PreviousToken, RouterLookahead

PREDICTORS: dict[str, Any] = {
    "none": NullPredictor,
    "router-lookahead": RouterLookahead,
    "previous-token": PreviousToken,
    "hot-list": lambda: HotList(""),
}
TOKENS = 24


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    path = options.directory / "ahead"
    if not (path / "config.json").exists():
        write_demo_checkpoint(path, shape=DemoShape(layers=12, experts=32))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in PREDICTORS}
    outputs = set()
    for _ in range(options.rounds):
        for name, make in PREDICTORS.items():
            speculator = Speculator(make())
            with Steal() as steal:
                output, seconds = decode(str(path), "50% of experts", TOKENS, speculator)
            outputs.add(b"".join(output))
            tally = speculator.stats()
            runs[name].append(
                {
                    "tokens_per_s": TOKENS / seconds,
                    "steal": steal.share,
                    "recall": tally.recall,
                    "precision": tally.precision,
                }
            )
    median = {name: statistics.median(run["tokens_per_s"] for run in each) for name, each in runs.items()}
    receipt = {"median_tokens_per_s": median, "bit_identical": len(outputs) == 1, "runs": runs}
    print(write_receipt("lookahead", {"what": __doc__, **facts(path), **receipt}), median)


if __name__ == "__main__":
    main()
