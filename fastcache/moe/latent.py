"""The smaller space in which the routed experts of some models work: into it, and back.

Owns `LatentSpace`. Knows no expert. Imports errors, layout, linear, and families, norms and trunk of moe.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.layout.record import Layout
from fastcache.linear import linear
from fastcache.moe.families import Forward
from fastcache.moe.norms import RmsNorm
from fastcache.moe.trunk import layer_tensor

F32: TypeAlias = NDArray[np.float32]


class LatentSpace:
    """Projections between the hidden states [T, H] and what routed experts see [T, latent].

    Parameters
    ----------
    down : ndarray, float32, [latent, H]
    up : ndarray, float32, [H, latent]
    norm : RmsNorm, optional
        Of the experts' weighted sum, before `up`.

    Notes
    -----
    Source: moonshotai/Kimi-K3, `modeling_kimi_linear.py` (KimiSparseMoeBlock). The router and the shared expert see
    the hidden states themselves.
    """

    def __init__(self, down: F32, up: F32, norm: RmsNorm | None = None) -> None:
        self._weights, self._norm = {"down": down, "up": up}, norm
        self.width = len(down)  # what an expert takes and gives

    def enter(self, x: F32) -> F32:
        """Return what the experts are given: x [T, H] -> [T, latent]."""
        return linear(x, self._weights, "down")

    def leave(self, y: F32) -> F32:
        """Return the block's part of the hidden state: the experts' sum y [T, latent] -> [T, H]."""
        return linear(y if self._norm is None else self._norm(y), self._weights, "up")


def load_latent(layout: Layout, layer: int, row: Forward) -> LatentSpace | None:
    """Read a layer's projections; None if the family or this checkpoint has no latent space."""
    names = row.latent
    if names is None or config_value(layout.config, names.width) is None:
        return None
    norm = None
    if names.norm is not None and config_value(layout.config, names.norm_if):
        epsilon = config_value(layout.config, "rms_norm_eps")
        if epsilon is None:
            raise UnsupportedCheckpoint("config.json has no rms_norm_eps, which the norm of the latent space needs")
        norm = RmsNorm(layer_tensor(layout, layer, names.norm), float(epsilon))
    return LatentSpace(layer_tensor(layout, layer, names.down), layer_tensor(layout, layer, names.up), norm)
