"""From logits to a token. Owns `sample`. Knows no model. Imports numpy only.

Sources: Fan et al. (arXiv:1805.04833) for top-k, Holtzman et al., "The Curious Case of Neural Text Degeneration"
(arXiv:1904.09751) for top-p; the order of the steps is that of transformers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError unless the three make sense."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0, and finite; got {temperature!r}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None; got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, or None; got {top_p!r}")


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
