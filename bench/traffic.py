"""Kinds of expert traffic, made: what routing traces of two models do not show. Each has its own seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fastcache.traces import Trace

Array = np.ndarray[Any, np.dtype[Any]]


def tastes(rng: np.random.Generator, layers: int, experts: int, skew: float) -> Array:
    """Return log odds [layers, experts]: Zipf's, over experts in an order of each layer's own."""
    ranks = np.argsort(rng.random((layers, experts)), axis=1) + 1
    return -skew * np.log(ranks)


def picks(rng: np.random.Generator, odds: Array, top_k: int) -> Array:
    """Return int64 [..., top_k]: distinct experts, by log odds [..., experts]."""
    return np.argpartition(-(odds + rng.gumbel(size=odds.shape)), top_k - 1, axis=-1)[..., :top_k]


def trace(name: str, layers: int, experts: int, batches: Iterable[tuple[int, Array]]) -> Trace:
    """Return a Trace of (layer, experts) in order."""
    groups = [layer * experts + chosen for layer, chosen in batches]
    n = len(groups)
    return Trace(
        name, tuple((layer, experts) for layer in range(layers)), None,
        np.concatenate(groups).astype(np.int32), np.cumsum([0, *map(len, groups)]),
        np.zeros(n, np.uint8), np.full(n, -1),
    )  # fmt: skip


def decoding(name: str, layers: int, experts: int, chosen: Array) -> Trace:
    """Return a Trace of `chosen` [tokens, layers, top_k], token by token."""
    return trace(name, layers, experts, ((i, row) for token in chosen for i, row in enumerate(token)))


def stationary(seed: int, layers: int, experts: int, top_k: int, tokens: int, skew: float) -> Trace:
    """Tastes that never change."""
    rng = np.random.default_rng(seed)
    odds = tastes(rng, layers, experts, skew)
    return decoding("stationary", layers, experts, np.stack([picks(rng, odds, top_k) for _ in range(tokens)]))


def topics(seed: int, layers: int, experts: int, top_k: int, tokens: int, skew: float, stay: int) -> Trace:
    """Tastes that are others after about `stay` tokens."""
    rng = np.random.default_rng(seed)
    chosen, odds = [], tastes(rng, layers, experts, skew)
    for _ in range(tokens):
        if rng.random() < 1 / stay:
            odds = tastes(rng, layers, experts, skew)
        chosen.append(picks(rng, odds, top_k))
    return decoding("topics", layers, experts, np.stack(chosen))


def moody(seed: int, layers: int, experts: int, top_k: int, tokens: int, skew: float, keeps: float) -> Trace:
    """Tastes, and a mood as strong that fades by `keeps` per token."""
    rng = np.random.default_rng(seed)
    odds, mood, chosen = tastes(rng, layers, experts, skew), np.zeros((layers, experts)), []
    for _ in range(tokens):
        mood = keeps * mood + np.sqrt(1 - keeps * keeps) * rng.normal(size=mood.shape)
        chosen.append(picks(rng, odds + 1.5 * mood, top_k))
    return decoding("moody", layers, experts, np.stack(chosen))


def sticky(seed: int, layers: int, experts: int, top_k: int, tokens: int, skew: float, keep: float) -> Trace:
    """Each pick is kept for the next token by the chance `keep`."""
    rng = np.random.default_rng(seed)
    odds = tastes(rng, layers, experts, skew)
    now = picks(rng, odds, top_k)
    chosen = []
    for _ in range(tokens):
        here = np.where(rng.random(now.shape) < keep, np.inf, -np.inf)
        scores = odds + rng.gumbel(size=odds.shape)
        np.put_along_axis(scores, now, here, axis=1)
        now = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        chosen.append(now)
    return decoding("sticky", layers, experts, np.stack(chosen))


def prompts(seed: int, layers: int, experts: int, top_k: int, requests: int, prompt: int, answer: int) -> Trace:
    """Requests with tastes of their own: the union of a prompt's tokens per layer, then decoding."""
    rng = np.random.default_rng(seed)
    shared, out = tastes(rng, layers, experts, 0.7), []
    for _ in range(requests):
        odds = shared + rng.normal(size=shared.shape)
        union = picks(rng, np.broadcast_to(odds, (prompt, layers, experts)), top_k)
        out += [(layer, rng.permutation(np.unique(union[:, layer]))) for layer in range(layers)]
        out += [row for _ in range(answer) for row in enumerate(picks(rng, odds, top_k))]
    return trace("prompts", layers, experts, out)


def parts(seed: int, layers: int, experts: int, top_k: int, tokens: int, skew: float, stay: int, share: float) -> Trace:
    """Only a share of the layers runs, another one after each `stay` tokens."""
    rng = np.random.default_rng(seed)
    odds, out, on = tastes(rng, layers, experts, skew), [], np.zeros(0, int)
    for token in range(tokens):
        if token % stay == 0:
            on = np.sort(rng.permutation(layers)[: max(1, round(share * layers))])
        chosen = picks(rng, odds, top_k)
        out += [(int(layer), chosen[layer]) for layer in on]
    return trace("parts", layers, experts, out)


KINDS: dict[str, Callable[[int], Trace]] = {
    "stationary, 16 x 64, 4 picks": lambda seed: stationary(seed, 16, 64, 4, 1200, 1.0),
    "stationary, 16 x 64, 4 picks, 60 tokens": lambda seed: stationary(seed, 16, 64, 4, 60, 1.0),
    "stationary, 1 x 1024, 4 picks": lambda seed: stationary(seed, 1, 1024, 4, 20_000, 0.9),
    "stationary, 48 x 128, 1 pick": lambda seed: stationary(seed, 48, 128, 1, 1500, 0.9),
    "stationary, 30 x 384, 8 picks": lambda seed: stationary(seed, 30, 384, 8, 300, 0.8),
    "topics of 60 tokens, 16 x 64, 4 picks": lambda seed: topics(seed, 16, 64, 4, 1200, 1.2, 60),
    "topics of 150 tokens, 8 x 256, 8 picks": lambda seed: topics(seed, 8, 256, 8, 1200, 1.0, 150),
    "moods, 24 x 256, 8 picks": lambda seed: moody(seed, 24, 256, 8, 300, 0.6, 0.9),
    "sticky 0.4, 16 x 64, 4 picks": lambda seed: sticky(seed, 16, 64, 4, 1000, 1.0, 0.4),
    "sticky 0.8, 16 x 64, 4 picks": lambda seed: sticky(seed, 16, 64, 4, 1000, 1.0, 0.8),
    "prompts of 60, answers of 15, 24 x 128, 6 picks": lambda seed: prompts(seed, 24, 128, 6, 40, 60, 15),
    "half the layers for 50 tokens, 24 x 64, 4 picks": lambda seed: parts(seed, 24, 64, 4, 1500, 1.0, 50, 0.5),
    "half the layers for 2 tokens, 24 x 64, 4 picks": lambda seed: parts(seed, 24, 64, 4, 1500, 1.0, 2, 0.5),
    "a third of the layers for 400 tokens, 24 x 64": lambda seed: parts(seed, 24, 64, 4, 1600, 1.2, 400, 1 / 3),
}
