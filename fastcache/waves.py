"""Waves: a union of experts above the budget, parted into lists that fit, each sized when its turn comes.

Owns the order in which a layer's experts are served. Knows no slot: what fits is asked of the store. Imports nothing
of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class _Store(Protocol):
    def _fit(self, layer: Any, experts: Any) -> tuple[list[int], list[int]]: ...


class Waves(Iterator[list[int]]):
    """Lists of a layer's experts, each once. Made by `ExpertStore.waves`.

    Notes
    -----
    Not thread-safe: one iterator serves one caller. A step costs about a microsecond for each expert that is left.
    """

    def __init__(self, store: _Store, layer: int, experts: Any) -> None:
        fits, rest = store._fit(layer, experts)  # validates, now rather than at the first step
        self._store, self._layer, self._left = store, layer, fits + rest

    def __next__(self) -> list[int]:
        if not self._left:
            raise StopIteration
        return self.take() or [self._left.pop(0)]  # every slot is held, or none is large enough

    def take(self) -> list[int]:
        """Return what fits now, which may be nothing: a list to acquire while the last one is still held."""
        if not self._left:
            return []
        fits, self._left = self._store._fit(self._layer, self._left)
        return fits
