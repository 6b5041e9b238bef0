"""What the blocks of one model share to read ahead: a predictor, and the order of the layers.

Owns when a guess is made. Knows no store but its `prefetch`, and no rule of guessing. Imports predictors, gate.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fastcache.moe.gate import Gate
from fastcache.predictors import NullPredictor, Predictor, Tally
from fastcache.units import whole

F32: TypeAlias = NDArray[np.float32]


@runtime_checkable
class Prefetching(Protocol):
    """Experts that can be read ahead, as a store's."""

    def prefetch(self, layer: int, experts: Sequence[int], /, *, predictor: str) -> Any: ...


class Speculator:
    """Reads the next layers' experts ahead while a block computes. Give the same one to every `load_block` of a model.

    Parameters
    ----------
    predictor : Predictor, optional
        Default: NullPredictor.
    depth : int
        Layers ahead.
    most_tokens : int
        Tokens of a call above which nothing is guessed: a prefill's union is nearly the whole layer.

    Notes
    -----
    Never waits, and never changes an output: a guess is a read that somebody may or may not use. For one sequence of
    tokens at a time; calls from several threads spoil the tally and nothing else.
    """

    def __init__(self, predictor: Predictor | None = None, *, depth: int = 1, most_tokens: int = 1) -> None:
        depth, most_tokens = whole("depth", depth), whole("most_tokens", most_tokens)
        if depth < 1:
            raise ValueError(f"depth must be at least one layer; got {depth}")
        if predictor is not None and not isinstance(predictor, Predictor):
            raise TypeError(f"a predictor has name, observe, predict and stats; got {predictor!r}")
        self.predictor: Predictor = NullPredictor() if predictor is None else predictor
        self.depth, self.most_tokens = depth, most_tokens
        self._layers: list[int] = []

    def stats(self) -> Tally:
        """Return how often the predictor was right."""
        return self.predictor.stats()

    def add(self, layer: int, gate: Gate, top_k: int) -> None:
        """Take a layer into the order; a predictor that asks for routers (`add_router`) gets this one."""
        if layer not in self._layers:
            insort(self._layers, layer)
        take = getattr(self.predictor, "add_router", None)
        if take is not None:
            take(layer, gate.likely, top_k)

    def routed(self, layer: int, x: F32, experts: NDArray[np.int64], store: object) -> None:
        """Tell the predictor what a layer chose for x [T, H], and have what it says of the next layers read.

        After the last layer the first ones of the next token follow, of which there is no hidden state yet.
        """
        self.predictor.observe(layer, experts)
        if not 0 < len(x) <= self.most_tokens or not isinstance(store, Prefetching):
            return
        at = bisect_right(self._layers, layer)
        for ahead in range(min(self.depth, len(self._layers) - 1)):
            wraps, index = divmod(at + ahead, len(self._layers))
            following = self._layers[index]
            guess = self.predictor.predict(following, None if wraps else x)
            if len(guess):
                store.prefetch(following, guess, predictor=self.predictor.name)
