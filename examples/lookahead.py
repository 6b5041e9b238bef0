"""Decode through a store smaller than its model, with the next layer's experts read ahead, and say what that was worth.

    python examples/lookahead.py CHECKPOINT [--budget "50% of experts"] [--tokens 32]

The hidden states are made up (there is no attention here): each block is given what the ones before it made of noise.
"""

import argparse
import sys
import time

import numpy as np

import fastcache
from fastcache.layout.build import build_layout
from fastcache.moe import Speculator, load_block
from fastcache.predictors import NullPredictor, RouterLookahead


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))


def decode(path: str, budget: str, tokens: int, speculator: Speculator) -> tuple[list[bytes], float]:
    """Return every block's output as bytes, and the seconds that all took."""
    layout = build_layout(path)
    outputs = []
    with fastcache.open(path, budget=budget) as store:
        blocks = [load_block(layout, layer, experts=store, speculator=speculator) for layer in store.layers]
        store.warm()  # fill what the budget allows before the clock starts
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
        s, tally = store.stats(), speculator.stats()
        print(f"{speculator.predictor.name}: {tokens / seconds:.2f} tokens/s, {s.bytes_read / 1e6:.0f} MB read")
        print(f"  {s.first_consumptions} guesses used, {s.late_joins_ok} came late, {s.wasted} were wasted")
        print(f"  recall {tally.recall:.2f}, precision {tally.precision:.2f}")
        print(f"  speculation: {store.describe()['speculation']['used']}")
    return outputs, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--budget", default="50% of experts")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens must be at least 1; got {options.tokens}")
    try:
        compare(options)
    except fastcache.FastcacheError as error:  # a path that is no checkpoint, a budget that is none, a read that fails
        sys.exit(f"Error: {type(error).__name__}: {error}")
    except OSError as error:
        sys.exit(f"Error: {error}")


def compare(options: argparse.Namespace) -> None:
    plain, before = decode(options.checkpoint, options.budget, options.tokens, Speculator(NullPredictor()))
    ahead, after = decode(options.checkpoint, options.budget, options.tokens, Speculator(RouterLookahead()))
    print(f"bit-identical: {'yes' if plain == ahead else 'NO'}; {before / after:.2f} times as fast with look-ahead")


if __name__ == "__main__":
    main()
