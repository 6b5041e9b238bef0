"""Traces for tests: made ones, and the real ones where they lie beside the checkout."""

from pathlib import Path

import numpy as np
import pytest

from fastcache.traces import Trace

SHARED = Path(__file__).parents[2] / "shared" / "traces"
REAL = {"kimi": "kimi-k3-expert-trace.bin", "qwen": "qwen3-30b-a3b.route.csv"}


def real(name):
    """Return the path of a real trace; they are not ours to redistribute."""
    path = SHARED / REAL[name]
    if not path.exists():
        pytest.skip(f"no {path}")
    return path


def trace_of(groups, layers, top_k=None, **fields):
    """Return a Trace of lists of dense keys."""
    n = len(groups)
    keys = np.concatenate([np.asarray(group, np.int32) for group in groups]) if n else np.zeros(0, np.int32)
    edges = np.cumsum([0, *map(len, groups)])
    about = {"phase": np.zeros(n, np.uint8), "token": np.full(n, -1)}
    return Trace("made", tuple((i, n) for i, n in enumerate(layers)), top_k, keys, edges, **(about | fields))


def tokens(layers=6, experts=20, top_k=3, count=200, seed=0, together=1):
    """Return what a decoder asks for: layer after layer, some experts far more popular; `together` tokens at once."""
    random = np.random.default_rng(seed)
    odds = 1 / np.arange(1, experts + 1) ** 1.1
    favourites = [random.permutation(experts) for _ in range(layers)]
    groups = []
    for _ in range(count):
        for layer in range(layers):
            picks = [random.choice(experts, top_k, replace=False, p=odds / odds.sum()) for _ in range(together)]
            chosen = dict.fromkeys(favourites[layer][np.concatenate(picks)].tolist())
            groups.append([layer * experts + expert for expert in chosen])
    return trace_of(groups, [experts] * layers, top_k)


def groups_of(trace):
    return [trace.keys[a:b].tolist() for a, b in zip(trace.batches[:-1], trace.batches[1:], strict=True)]
