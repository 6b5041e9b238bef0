"""Predictors: which experts a layer is about to need. Small objects, each with a tally of how often it was right.

Owns the guessing rules. Knows no store and no model: hidden states, routers and what a checkpoint has are handed in.
Imports errors, keys, outputs and units.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcache.errors import CheckpointMismatch, HotListError, UnknownExpert
from fastcache.keys import ExpertKey
from fastcache.outputs import check_output, is_ordinary, refuse_other_kind, whole_file
from fastcache.units import is_flag, whole

F32: TypeAlias = NDArray[np.float32]
Likely: TypeAlias = Callable[[F32, int], Sequence[int]]  # hidden [T, H], n -> n experts a token, likeliest first
_FORMAT = "fastcache hot list 1"
_HEAD = b'{"format": "fastcache hot list '  # of any version: what save() may replace


@dataclass(frozen=True, slots=True)
class Tally:
    """How often a predictor was right, over the layers for which it said something."""

    layers: int = 0  # visits of a layer that were predicted
    predicted: int = 0  # experts that it named
    routed: int = 0  # experts that the router then chose
    right: int = 0  # experts in both

    @property
    def recall(self) -> float:
        """Right / routed: the share of what was needed that it named; 0.0 before the first prediction."""
        return self.right / self.routed if self.routed else 0.0

    @property
    def precision(self) -> float:
        """Right / predicted: the share of what it named that was needed; 0.0 before the first prediction."""
        return self.right / self.predicted if self.predicted else 0.0


@runtime_checkable
class Predictor(Protocol):
    """What the blocks of a model ask of a predictor. `name` is what its guesses count as in a store's description."""

    name: str

    def observe(self, layer: int, experts: NDArray[np.int64]) -> None:
        """Learn which experts [T, k] a layer's router chose."""
        ...

    def predict(self, layer: int, hidden: F32 | None) -> Sequence[int]:
        """Return the experts that a layer will need, likeliest first; none where there is no telling.

        `hidden` [T, H] is the input of an earlier MoE block of the same tokens, or None where those have not begun.
        """
        ...

    def stats(self) -> Tally: ...


@runtime_checkable
class Checkpoint(Protocol):
    """What tells a checkpoint from others, and which experts it has; a store does."""

    fingerprint: str

    @property
    def layers(self) -> Sequence[int]: ...
    def experts(self, layer: int, /) -> range: ...


class _Counted:
    """Remembers what was said of each layer until its router has chosen."""

    name = ""

    def __init__(self) -> None:
        self._said: dict[int, Sequence[int]] = {}
        self._tally = Tally()

    def observe(self, layer: int, experts: ArrayLike) -> None:
        """Learn which experts a layer's router chose, and score what was said of it.

        Parameters
        ----------
        layer : int
        experts : integers [T, k]
            A row per token; [k] is one token's.

        Raises
        ------
        UnknownExpert
            No checkpoint has it: a number below 0. A HotList made with a store knows what that one has.
        TypeError
            They are no integers, or no rows of equal length.
        """
        layer = whole("layer", layer)
        experts = _rows(experts)
        self._look(layer, experts)
        said = set(self._said.pop(layer, ()))
        if said:
            chosen, t = set(experts.flat), self._tally
            right = len(said & chosen)
            self._tally = Tally(t.layers + 1, t.predicted + len(said), t.routed + len(chosen), t.right + right)
        self._learn(layer, experts)

    def predict(self, layer: int, hidden: F32 | None) -> Sequence[int]:
        """Return the experts that a layer will need, likeliest first."""
        said = self._said[layer] = self._guess(layer, hidden)
        return said

    def stats(self) -> Tally:
        """Return how often it was right so far."""
        return self._tally

    def _look(self, layer: int, experts: NDArray[np.int64]) -> None:
        if layer < 0:
            raise UnknownExpert(f"no layer {layer}: layers count from 0")
        if experts.size and experts.min() < 0:
            raise UnknownExpert(f"layer {layer}: no expert {experts.min()}: experts count from 0")

    def _learn(self, layer: int, experts: NDArray[np.int64]) -> None:
        pass

    def _guess(self, layer: int, hidden: F32 | None) -> Sequence[int]:
        return ()


def _rows(experts: ArrayLike) -> NDArray[np.int64]:
    """Return experts as [T, k]."""
    try:
        rows = np.atleast_2d(np.asarray(experts))
    except ValueError:  # rows of unequal length
        rows = np.zeros((0, 0, 0))
    if rows.ndim != 2 or (rows.dtype.kind not in "iu" and rows.size):
        raise TypeError(f"experts are integers, [tokens, k] or one token's [k]; got {experts!r}")
    return rows.astype(np.int64, copy=False)


def _at_least_one(n: int) -> int:
    number = whole("n", n)
    if number < 1:
        raise ValueError(f"n must be a number of experts, at least 1; got {n}")
    return number


class NullPredictor(_Counted):
    """Predicts nothing: the default, until evidence says otherwise."""

    name = "none"


class PreviousToken(_Counted):
    """What the token before used in the layer. For comparison: a third of it comes again on real models."""

    name = "previous-token"

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[int, list[int]] = {}

    def _learn(self, layer: int, experts: NDArray[np.int64]) -> None:
        if len(experts):
            self._last[layer] = experts[-1].tolist()

    def _guess(self, layer: int, hidden: F32 | None) -> Sequence[int]:
        return self._last.get(layer, ())


class RouterLookahead(_Counted):
    """What the next layer's router would choose for this layer's input: the residual stream changes little per layer.

    Parameters
    ----------
    n : int, optional
        Experts to name per layer. None: as many as the router chooses.
    """

    name = "router-lookahead"

    def __init__(self, n: int | None = None) -> None:
        super().__init__()
        self.n = None if n is None else _at_least_one(n)
        self._routers: dict[int, tuple[Likely, int]] = {}

    def add_router(self, layer: int, likely: Likely, top_k: int) -> None:
        """Take the router of a layer. `fastcache.moe` gives those of its blocks."""
        self._routers[layer] = likely, top_k

    def _guess(self, layer: int, hidden: F32 | None) -> Sequence[int]:
        if hidden is None or layer not in self._routers:
            return ()
        likely, top_k = self._routers[layer]
        return likely(hidden, self.n or top_k)


class HotList(_Counted):
    """How often each expert is used, fading: what to warm a store with, and a predictor that knows no token.

    Parameters
    ----------
    checkpoint : ExpertStore or str
        A store of the checkpoint that it speaks of: then it knows what experts there are, and `observe` refuses others.
        Or the fingerprint alone.
    half_life : float
        Tokens after which a use counts half.
    n : int
        Experts to name per layer when it is asked to predict.

    Notes
    -----
    Iterating gives ExpertKeys, hottest first: `store.warm(hot)`, or `store.hot_list = hot` and `store.warm()`.
    """

    name = "hot-list"

    def __init__(self, checkpoint: Checkpoint | str, *, half_life: float = 1000.0, n: int = 8) -> None:
        super().__init__()
        if is_flag(half_life) or not half_life > 0:
            raise ValueError(f"half_life must be tokens > 0; got {half_life!r}")
        self.fingerprint, self.half_life, self.n = _fingerprint(checkpoint), float(half_life), _at_least_one(n)
        self._counts: dict[int, int] | None = None  # experts by layer, where that is known
        if not isinstance(checkpoint, str):
            self._counts = {layer: len(checkpoint.experts(layer)) for layer in checkpoint.layers}
        self._heat: dict[int, NDArray[np.float64]] = {}  # per layer [experts seen so far], all faded to its last token

    def _look(self, layer: int, experts: NDArray[np.int64]) -> None:
        super()._look(layer, experts)
        if self._counts is None:
            return
        if layer not in self._counts:
            raise UnknownExpert(f"layer {layer} has no experts; those that have: {', '.join(map(str, self._counts))}")
        most = int(experts.max(initial=-1))
        if most >= self._counts[layer]:
            raise UnknownExpert(f"layer {layer}: no expert {most}: it has {self._counts[layer]}")

    def _learn(self, layer: int, experts: NDArray[np.int64]) -> None:
        if not experts.size:
            return
        heat = self._heat.get(layer, np.zeros(0))
        most = int(experts.max()) + 1
        if most > len(heat):
            heat = np.concatenate([heat, np.zeros(most - len(heat))])
        fade = 0.5 ** (1 / self.half_life)
        heat *= fade ** len(experts)
        age = fade ** np.arange(len(experts) - 1, -1, -1)
        np.add.at(heat, experts, age[:, np.newaxis])
        self._heat[layer] = heat

    def _guess(self, layer: int, hidden: F32 | None) -> Sequence[int]:
        heat = self._heat.get(layer, np.zeros(0))
        order = np.argsort(-heat, kind="stable")[: self.n]
        return [int(expert) for expert in order if heat[expert] > 0]

    def __iter__(self) -> Iterator[ExpertKey]:
        rows = [(-h, layer, e) for layer, heat in self._heat.items() for e, h in enumerate(heat.tolist()) if h > 0]
        return (ExpertKey(layer, expert) for _, layer, expert in sorted(rows))

    def __len__(self) -> int:
        return sum(int((heat > 0).sum()) for heat in self._heat.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON. Readers see the old file or the new one, whole.

        Raises
        ------
        FileExistsError
            There is something that is no hot list, or no ordinary file.
        OSError
            It cannot be written there.
        """
        check_output(path)
        if os.path.exists(path) and not is_ordinary(path):
            raise FileExistsError(f"{os.fspath(path)}: is no ordinary file, and no hot list is kept there")
        refuse_other_kind(path, lambda head: head.startswith(_HEAD), "hot list")
        layers = {str(layer): heat.tolist() for layer, heat in sorted(self._heat.items())}
        text = json.dumps(
            {
                "format": _FORMAT,
                "fingerprint": self.fingerprint,
                "half_life": self.half_life,
                "n": self.n,
                "heat": layers,
            }
        )
        with whole_file(path) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], checkpoint: Checkpoint | str) -> HotList:
        """Read one that `save` wrote, for a store or the fingerprint of one.

        Raises
        ------
        CheckpointMismatch
            It speaks of another checkpoint.
        HotListError
            It is no hot list. It is a ValueError.
        """
        fingerprint = _fingerprint(checkpoint)
        try:
            found: Mapping[str, Any] = json.loads(Path(path).read_text())
            if found["format"] != _FORMAT:
                raise ValueError(f"format is {found['format']!r}")
            hot = cls(found["fingerprint"], half_life=found["half_life"], n=found["n"])
            hot._heat = {int(layer): np.array(heat, np.float64) for layer, heat in found["heat"].items()}
            if any(heat.ndim != 1 or not np.isfinite(heat).all() for heat in hot._heat.values()):
                raise ValueError("heat must be lists of numbers")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise HotListError(f"{path}: no hot list, or a damaged one: {why}") from error
        if hot.fingerprint != fingerprint:
            raise CheckpointMismatch(
                f"{path}: made with another checkpoint (fingerprint {hot.fingerprint}, this one has {fingerprint}); "
                f"observe this one anew"
            )
        if not isinstance(checkpoint, str):
            hot._counts = cls(checkpoint)._counts
            try:
                for layer, heat in hot._heat.items():
                    hot._look(layer, np.array([[len(heat) - 1]]) if len(heat) else np.zeros((1, 0), np.int64))
            except UnknownExpert as error:
                raise HotListError(f"{path}: a damaged hot list: {error}") from error
        return hot


def _fingerprint(checkpoint: Checkpoint | str) -> str:
    if isinstance(checkpoint, str):
        return checkpoint
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(f"a hot list is of a store, or of the fingerprint of one; got {checkpoint!r}")
    return checkpoint.fingerprint
