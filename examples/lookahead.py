"""Decode through a store smaller than its model, with the next layer's experts read ahead, and say what that was worth.

    python examples/lookahead.py CHECKPOINT [--budget "50% of experts"] [--tokens 32] [--rounds 5]

The two ways take turns, because a machine is not equally fast all the time. Of guesses, the last round is told.
The hidden states are made up (there is no attention here): each block is given what the ones before it made of noise.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

import fastcache
from fastcache.layout.build import build_layout
from fastcache.moe import Speculator, load_block
from fastcache.predictors import NullPredictor, Predictor, RouterLookahead


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))


@dataclass(frozen=True)
class Run:
    """One decode: every block's output as bytes, the seconds that all took, and what is to be said of it."""

    outputs: list[bytes]
    seconds: float
    told: str


def decode(path: str, budget: str, tokens: int, predictor: Predictor) -> Run:
    """Decode through a store of its own."""
    layout = build_layout(path)
    speculator = Speculator(predictor)
    outputs = []
    with fastcache.open(path, budget=budget) as store:
        blocks = [load_block(layout, layer, experts=store, speculator=speculator) for layer in store.layers]
        warmed = store.warm()  # fill what the budget allows before the clock starts
        store.reset_stats()
        rng = np.random.default_rng(0)
        x = np.zeros((1, blocks[0].hidden), np.float32)
        start = time.perf_counter()
        for _ in range(tokens):
            x = norm(norm(x) + rng.standard_normal(x.shape, dtype=np.float32))
            for block in blocks:
                y = block(norm(x))  # prefetches the next layer's likely experts, then computes this one
                outputs.append(y.tobytes())
                x = x + y
        seconds = time.perf_counter() - start
        s, speculation = store.stats(), store.describe()["speculation"]
    lines = [
        f"  {s.bytes_read / 1e6:.0f} MB read while decoding; {warmed.loaded} experts were read by warm() before it"
    ]
    guesses = speculation["predictors"].get(predictor.name)  # warm() has a row of its own: its reads are no guesses
    if guesses is None:
        lines.append("  no guess was made")
    else:
        lines.append(
            f"  {guesses['issued']} guesses read: {guesses['used']} used, {guesses['late']} came late, "
            f"{guesses['wasted']} wasted, {guesses['cancelled']} cancelled, {guesses['unread']} not used yet; "
            f"{guesses['declined']} declined"
        )
        tally = speculator.stats()
        lines.append(f"  recall {tally.recall:.2f}, precision {tally.precision:.2f}")
        lines.append(f"  speculation: {speculation['used']}: {speculation['reason']}")
    return Run(outputs, seconds, "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--budget", default="50% of experts")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for option in ("tokens", "rounds"):
        if (number := getattr(options, option)) < 1:
            parser.error(f"--{option} must be at least 1; got {number}")
    try:
        compare(options)
    except fastcache.FastcacheError as error:  # a path that is no checkpoint, a budget that is none, a read that fails
        sys.exit(f"Error: {type(error).__name__}: {error}")
    except OSError as error:
        sys.exit(f"Error: {error}")


def compare(options: argparse.Namespace) -> None:
    """Decode without and with look-ahead in turns; say what that was worth in the median, and how far rounds differ."""
    kinds = NullPredictor, RouterLookahead
    rounds = [
        [decode(options.checkpoint, options.budget, options.tokens, kind()) for kind in kinds]
        for _ in range(options.rounds)
    ]
    for kind, runs in zip(kinds, zip(*rounds, strict=True), strict=True):
        print(f"{kind.name}: {spread([options.tokens / run.seconds for run in runs])} tokens/s")
        print(runs[-1].told)
    same = all(run.outputs == rounds[0][0].outputs for runs in rounds for run in runs)
    ratios = [plain.seconds / ahead.seconds for plain, ahead in rounds]
    print(f"bit-identical: {'yes' if same else 'NO'}")
    print(f"times as fast with look-ahead: {spread(ratios)}")
    if min(ratios) < 1 < max(ratios):
        print("  rounds disagree which is faster: noise, or a tie; decode more --tokens, on a quiet machine")


def spread(figures: list[float]) -> str:
    """Return the median, and between what it lies."""
    return f"{statistics.median(figures):.2f} (median of {len(figures)}: {min(figures):.2f} to {max(figures):.2f})"


if __name__ == "__main__":
    main()
