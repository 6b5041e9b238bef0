"""What a model's router asked for, in order: the noun that importers make and that replay reads. Imports NumPy only."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
UNKNOWN, PREFILL, DECODE = 0, 1, 2  # values of `phase`
PHASES = ("unknown", "prefill", "decode")
BLOCK = 1 << 16  # requests or records looked at together, where a trace is read from end to end


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The demand requests of one run, as batches: what one layer asked for at once.

    Arrays may be memory maps; nothing here is copied. A dense key counts through `layers`: layer i's experts have the
    keys from layer_first[i] to layer_first[i + 1].

    Attributes
    ----------
    name : str
        The model, or the file where the format names none.
    layers : tuple of (layer number, experts)
        Ascending. What the model has, not only what was asked for.
    top_k : int or None
        Experts per token and layer.
    keys : int32 array [R]
        Dense keys in request order, distinct inside a batch.
    batches : int64 array [N + 1]
        Batch i is keys[batches[i] : batches[i + 1]].
    phase : uint8 array [N]
        0 unknown, 1 prefill, 2 decode.
    token : int64 array [N]
        Index of the token or forward step that the batch belongs to; -1: not known.
    fingerprint : str
        Of the checkpoint, or "".
    expert_nbytes : int, int64 array [len(layers)] or [pool], or None
        Bytes of an expert; None: not known.
    run : mapping
        What the recorder wrote down about the run; free. `complete` and `lost` are taken from it.
    """

    name: str
    layers: tuple[tuple[int, int], ...]
    top_k: int | None
    keys: Array
    batches: Array
    phase: Array
    token: Array
    fingerprint: str = ""
    expert_nbytes: int | Array | None = None
    run: Mapping[str, Any] = field(default_factory=lambda: types.MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit together. What they hold was checked by whoever read it."""
        n = len(self.batches) - 1
        if n < 0 or len(self.phase) != n or len(self.token) != n:
            raise ValueError(f"{len(self.batches)} batch edges, {len(self.phase)} phases, {len(self.token)} tokens")
        if self.batches[0] != 0 or self.batches[-1] != len(self.keys):
            raise ValueError(f"batches span {self.batches[0]} to {self.batches[-1]}, keys are {len(self.keys)}")

    @property
    def complete(self) -> bool:
        """Whether it is all that happened. A recording that lost records, or that never ended, is a part of a run."""
        return self.run.get("complete") is not False

    @property
    def lost(self) -> int:
        """How many records of a recording are known to be lost; what came after it broke off is not counted."""
        lost = self.run.get("lost")
        return lost if isinstance(lost, int) else 0

    @property
    def pool(self) -> int:
        """How many experts the model has; dense keys are below it."""
        return sum(count for _, count in self.layers)

    @property
    def requests(self) -> int:
        """Distinct experts per batch, summed over the batches: what hit rates are shares of."""
        return len(self.keys)

    @property
    def layer_first(self) -> Array:
        """First dense key of each layer, and the pool: int64 [len(layers) + 1]."""
        return np.concatenate(([0], np.cumsum([count for _, count in self.layers], dtype=np.int64)))

    def counts(self) -> Array:
        """Return how often each expert was asked for: int64 [pool]. One pass over the trace."""
        counts = np.zeros(self.pool, np.int64)
        for start in range(0, len(self.keys), BLOCK):
            counts += np.bincount(self.keys[start : start + BLOCK], minlength=len(counts))
        return counts

    def sizes(self) -> Array | None:
        """Return the bytes of each expert, int64 [pool], or None where the trace does not say."""
        if self.expert_nbytes is None:
            return None
        nbytes = np.asarray(self.expert_nbytes, np.int64)
        if nbytes.ndim == 0:
            return np.full(self.pool, nbytes)
        if len(nbytes) == self.pool:
            return nbytes
        return np.repeat(nbytes, [count for _, count in self.layers])
