"""Root-mean-square normalisation, as decoders have it. Owns `RmsNorm`. Imports numpy only.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]


class RmsNorm:
    """x / sqrt(mean(x ** 2) + epsilon) * weight over the last axis.

    Parameters
    ----------
    weight : ndarray, float32, [width]
    epsilon : float
    """

    def __init__(self, weight: F32, epsilon: float) -> None:
        self.weight, self.epsilon = weight, np.float32(epsilon)

    def __call__(self, x: F32) -> F32:
        """Return x [..., width] normed, float32, new memory."""
        mean: F32 = np.square(x).mean(axis=-1, keepdims=True)
        result: F32 = x * (np.float32(1) / np.sqrt(mean + self.epsilon))
        result *= self.weight
        return result
