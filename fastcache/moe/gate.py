"""The router of one layer: from a hidden state to the experts that serve it.

Owns the router's weights. Knows no expert. Imports linear, families, routers.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.linear import linear
from fastcache.moe.families import Router
from fastcache.moe.routers import Routing, top_k_stable

F32: TypeAlias = NDArray[np.float32]


class Gate:
    """A router: weight [E, H], of a plain dtype, float32 bias [E] or None, and the family's rule."""

    def __init__(self, weight: NDArray[Any], bias: F32 | None, rule: Router) -> None:
        self._trunk, self._bias, self._rule = {"router": weight}, bias, rule
        self.n_experts, self.hidden = weight.shape

    def logits(self, x: F32) -> F32:
        """Return the raw logits, the router's own bias included: x [T, H] -> [T, E] float32."""
        logits = linear(x, self._trunk, "router")
        if self._bias is not None:
            logits += self._bias
        return logits

    def route(self, x: F32) -> Routing:
        """Return which experts serve each token: x [T, H] -> experts [T, k] int64, weights [T, k] float32."""
        return self._rule(self.logits(x))

    def likely(self, x: F32, n: int) -> list[int]:
        """Return the `n` likeliest experts of each token [T, H], each once: the router's choice, then by logits."""
        logits = self.logits(x)
        chosen = self._rule(logits)[0]
        if n > chosen.shape[1]:
            rest = top_k_stable(logits, self.n_experts)
            new = (rest[:, :, np.newaxis] != chosen[:, np.newaxis]).all(-1)
            chosen = np.concatenate([chosen, rest[new].reshape(len(x), -1)], axis=1)
        return list(dict.fromkeys(chosen[:, :n].T.ravel().tolist()))  # every token's first choice, then the second ones
