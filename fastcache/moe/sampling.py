"""From logits to a token, and what may be asked of that. Knows no model. Imports units.

Sources: Fan et al. (arXiv:1805.04833) for top-k, Holtzman et al., "The Curious Case of Neural Text Degeneration"
(arXiv:1904.09751) for top-p; the order of the steps is that of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcache.units import is_flag, whole


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise TypeError or ValueError unless the three make sense."""
    _check_number("temperature", temperature, "")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0, and finite; got {temperature!r}")
    if top_k is not None and whole("top_k", top_k, "or None") < 1:
        raise ValueError(f"top_k must be at least 1, or None; got {top_k!r}")
    if top_p is not None:
        _check_number("top_p", top_p, "or None")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, or None; got {top_p!r}")


def generator(seed: int | None) -> np.random.Generator:
    """Return what random numbers come from: the same of the same seed, new ones for None."""
    if seed is not None and whole("seed", seed, "or None") < 0:
        raise ValueError(f"seed must be at least 0, or None; got {seed!r}")
    return np.random.default_rng(seed)


def stop_tokens(stop: int | Iterable[int], vocabulary: int) -> frozenset[int]:
    """Return the tokens that are to end a text.

    Parameters
    ----------
    stop : int or iterable of int
    vocabulary : int

    Raises
    ------
    TypeError
        It is text, which a model that knows ids only cannot match, or holds what is no integer.
    ValueError
        An id that is not in the vocabulary, and so would never come.
    """
    if isinstance(stop, (str, bytes, bytearray)):
        raise TypeError(f"stop takes token ids, not text; got {stop!r}: encode it, or look for it in what is decoded")
    several = isinstance(stop, Iterable) and not (isinstance(stop, np.ndarray) and stop.ndim == 0)
    each: Iterable[Any] = stop if several else [stop]  # type: ignore[assignment]
    ids = frozenset(whole("each token of stop", token) for token in each)
    check_ids("tokens of stop", np.array(sorted(ids)), vocabulary)
    return ids


def check_ids(what: str, ids: NDArray[Any], vocabulary: int) -> None:
    """Raise ValueError for ids [T] outside a vocabulary of that size, naming the first few that are."""
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if outside.size:
        wrong = list(dict.fromkeys(outside.tolist()))
        more = f" and {len(wrong) - 4} others" if len(wrong) > 4 else ""
        raise ValueError(
            f"{what} must be from 0 to {vocabulary - 1}, in a vocabulary of {vocabulary}; got "
            f"{', '.join(map(str, wrong[:4]))}{more}"
        )


def _check_number(name: str, value: Any, more: str) -> None:
    if is_flag(value) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number{more and f', {more}'}; got {value!r}")


def sample(
    logits: NDArray[np.float32],
    rng: np.random.Generator,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> int:
    """Choose a token.

    Parameters
    ----------
    logits : ndarray, float32, [vocabulary]
    rng : numpy.random.Generator
        Asked for one number; not at temperature 0.
    temperature : float
        0: the likeliest, the first of equals.
    top_k : int, optional
        Only among so many of the likeliest.
    top_p : float, optional
        Only among the fewest likeliest that together have this probability.

    Raises
    ------
    ValueError
        The largest logit is infinite, or one is no number: broken weights. What would be chosen means nothing.
    """
    likeliest = int(logits.argmax())  # the first that is no number, if there is one
    if not np.isfinite(logits[likeliest]):
        raise ValueError(f"the logits are no numbers: that of token {likeliest} is {logits[likeliest]}")
    if temperature == 0:
        return likeliest
    with np.errstate(over="ignore"):  # beside the likeliest, whose logit is 0, others are then as good as impossible
        scaled = (logits.astype(np.float64) - np.float64(logits[likeliest])) / temperature
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    chances = np.exp(scaled[order])
    chances /= chances.sum()
    if top_p is not None:
        kept = int(np.searchsorted(np.cumsum(chances), top_p)) + 1
        order, chances = order[:kept], chances[:kept]
    edges = np.cumsum(chances)
    at = int(np.searchsorted(edges, rng.random() * edges[-1], side="right"))
    return int(order[min(at, len(order) - 1)])
