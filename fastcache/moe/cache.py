"""What attention keeps of the tokens so far: rows of any number of arrays per layer, in memory that grows by halves.

Owns `LayerCache` and `KVCache`. Knows no attention. Imports errors, numpy and quant.floats (aligned memory).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import CheckpointMismatch
from fastcache.quant.floats import aligned_empty
from fastcache.units import whole

F32: TypeAlias = NDArray[np.float32]
Rows: TypeAlias = tuple[tuple[int, ...], ...]  # shapes of what a layer keeps of one token

_FIRST: Final = 64  # rows


class LayerCache:
    """Rows of one layer, one per token and array.

    Attributes
    ----------
    length : int
        Tokens that it has rows of.
    """

    def __init__(self) -> None:
        self.length = 0
        self._kept: tuple[F32, ...] = ()

    def append(self, *rows: F32) -> tuple[F32, ...]:
        """Keep the rows of the next T tokens, and return those of all S tokens so far.

        Parameters
        ----------
        *rows : ndarray, float32, [T, ...]
            As many arrays, of the same shapes after the first axis, as the first call had.

        Returns
        -------
        tuple of ndarray, float32, [S, ...]
            Views of the cache's memory, read-only, each contiguous: valid until the cache is truncated and appended to.

        Raises
        ------
        ValueError
            Rows of another number or shape than before.

        Notes
        -----
        Amortised: memory grows by half, so that S tokens are copied at most twice on average.
        """
        n = len(rows[0])
        if not self.length:
            self._kept = self._kept if self.shapes == tuple(each.shape[1:] for each in rows) else ()
        if any(len(each) != n for each in rows) or (
            self._kept and self.shapes != tuple(each.shape[1:] for each in rows)
        ):
            raise ValueError(
                f"rows of shapes {[each.shape for each in rows]}; this cache keeps [T, ...] of "
                f"{[each.shape[1:] for each in self._kept or rows]}"
            )
        end = self.length + n
        if not self._kept or end > len(self._kept[0]):
            room = max(_FIRST, end, self.length + self.length // 2)
            grown = tuple(_empty((room, *each.shape[1:])) for each in rows)
            for new, old in zip(grown, self._kept, strict=bool(self._kept)):
                new[: self.length] = old[: self.length]
            self._kept = grown
        seen = []
        for kept, new in zip(self._kept, rows, strict=True):
            kept[self.length : end] = new
            view = kept[:end]
            view.flags.writeable = False
            seen.append(view)
        self.length = end
        return tuple(seen)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; the memory is kept."""
        length = whole("length", length)
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cut to {length}")
        self.length = length

    @property
    def shapes(self) -> Rows:
        """The shapes of one token's rows; empty before the first came."""
        return tuple(each.shape[1:] for each in self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, of rows not yet used too."""
        return sum(each.nbytes for each in self._kept)


class KVCache:
    """A cache for each layer of a model. One sequence of tokens; not for several threads at a time.

    It belongs to the checkpoint whose tokens it keeps, until it is empty again.
    """

    def __init__(self, layers: int) -> None:
        self._layers = tuple(LayerCache() for _ in range(layers))
        self._of: tuple[Hashable, str] | None = None  # whose tokens, and its name

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[layer]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"<KVCache: {self.length} tokens, {len(self)} layers, {self.nbytes} bytes>"

    @property
    def length(self) -> int:
        """Tokens that every layer has."""
        return min((each.length for each in self._layers), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(each.nbytes for each in self._layers)

    def claim(self, rows: Sequence[Rows], checkpoint: Hashable, name: str) -> None:
        """Take a model for the cache's own, or refuse it before anything is computed.

        Parameters
        ----------
        rows : sequence of tuple
            Of each layer, the shapes of what it keeps of one token.
        checkpoint : hashable
            What tells the model's weights from others.
        name : str
            Of the checkpoint, for messages.

        Raises
        ------
        CheckpointMismatch
            The model has another number of layers, keeps other rows, or is not the one whose tokens are here.
        """
        if len(rows) != len(self):
            raise CheckpointMismatch(
                f"a cache of {len(self)} layers was given to {name}, which has {len(rows)}: model.new_cache() fits"
            )
        if any(each.length != self.length for each in self):
            lengths = sorted({each.length for each in self})
            raise CheckpointMismatch(f"layers of this cache have {lengths} tokens: truncate it to {lengths[0]} first")
        if self.length:
            for n, (kept, wanted) in enumerate(zip(self, rows, strict=True)):
                if kept.shapes != wanted:
                    raise CheckpointMismatch(
                        f"layer {n} of this cache keeps rows of {kept.shapes} of each token; those of {name} are "
                        f"{wanted}: model.new_cache() fits"
                    )
            if self._of is not None and self._of[0] != checkpoint:
                raise CheckpointMismatch(
                    f"this cache has {self.length} tokens of {self._of[1]}, and was given to {name}: keys and values "
                    f"of other weights mean nothing to it; model.new_cache() fits"
                )
        self._of = checkpoint, name

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on: to go back to a prefix, or to undo a step that failed."""
        for each in self._layers:
            each.truncate(length)


def _empty(shape: tuple[int, ...]) -> F32:
    return aligned_empty(4 * int(np.prod(shape, dtype=np.int64))).view(np.float32).reshape(shape)
