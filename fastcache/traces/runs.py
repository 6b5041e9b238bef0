"""From single requests in order to batches: what importers of formats without batches share.

A batch is what one layer asks for at once: the distinct experts of a run of requests to one layer, in the order in
which they first appear. Imports errors and NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastcache.errors import TraceError
from fastcache.traces.columns import Batches
from fastcache.traces.trace import BLOCK, Array, Trace

MAX_LAYERS, MAX_EXPERTS = 1024, 1 << 16  # a layer's number and an expert's are below these
_SHIFT = 16  # bits of an expert's number in a packed request


class Runs:
    """Cuts requests into batches as they come. Use as a context manager; finish() gives the Trace.

    Parameters
    ----------
    filename : object
        For errors.
    unit : str
        What a request's number counts in errors: "record", "line", ...
    layers : mapping of int to int, optional
        Experts of each layer that there is. Default: layers 0 to the highest that is asked for, each with as many
        experts as the highest expert's number of all says.
    """

    def __init__(self, filename: object, unit: str = "record", layers: Mapping[int, int] | None = None) -> None:
        self.filename, self.unit, self.layers = filename, unit, layers
        self._out = Batches()  # its keys are packed until finish()
        self._rest: list[Array] = [np.zeros(0, np.int64) for _ in range(4)]  # the open batch: packed, phase, token, cut
        self._cut = 0  # how many cuts there were so far
        self._highest = [-1, -1]  # layer, expert

    def __enter__(self) -> Runs:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give up the temporary files that are not part of a Trace."""
        self._out.__exit__()

    def refuse(self, number: int, message: str) -> TraceError:
        """Return the error for a bad request."""
        return TraceError(message, filename=self.filename, record=number, unit=self.unit)

    def cut(self) -> None:
        """End the open batch, whatever comes next."""
        self._cut += 1

    def add(self, layer: Any, expert: Any, numbers: Any, *, phase: Any = 0, token: Any = -1) -> None:
        """Add requests, each with its number in the file; arrays of one length, or scalars for all.

        Raises
        ------
        TraceError
            A layer or an expert that the model does not have, or no model could.
        """
        layer, expert, numbers, phase, token = np.broadcast_arrays(
            *(np.asarray(value, np.int64) for value in (layer, expert, numbers, phase, token))
        )
        self._check(layer, expert, numbers)
        if not len(layer):
            return
        self._highest = [max(self._highest[0], int(layer.max())), max(self._highest[1], int(expert.max()))]
        packed = layer << _SHIFT | expert
        cuts = np.full(len(packed), self._cut)
        self._take([np.concatenate(pair) for pair in zip(self._rest, (packed, phase, token, cuts), strict=True)])

    def _check(self, layer: Array, expert: Array, numbers: Array) -> None:
        wrong = (layer < 0) | (layer >= MAX_LAYERS) | (expert < 0) | (expert >= MAX_EXPERTS)
        if self.layers is not None:
            counts = np.zeros(MAX_LAYERS, np.int64)
            counts[list(self.layers)] = list(self.layers.values())
            wrong |= expert >= counts[np.clip(layer, 0, MAX_LAYERS - 1)]
        if wrong.any():
            i = int(np.argmax(wrong))
            where = f"layer {layer[i]}, expert {expert[i]}"
            if self.layers is None or not 0 <= layer[i] < MAX_LAYERS:
                raise self.refuse(int(numbers[i]), f"{where}: no model has one")
            known = self.layers.get(int(layer[i]), 0)
            raise self.refuse(int(numbers[i]), f"{where}: the file's header gives that layer {known} experts")

    def _take(self, rows: list[Array], end: bool = False) -> None:
        """Write down every batch of the rows but the last, which may go on; that too at the end."""
        packed, phase, token, cuts = rows
        opens = np.ones(len(packed), bool)
        opens[1:] = (np.diff(packed >> _SHIFT) != 0) | (np.diff(cuts) != 0)
        run = np.cumsum(opens) - 1
        # Of each expert in a run, the first.
        _, first = np.unique(run << 32 | packed, return_index=True)
        first.sort()
        packed, phase, token, cuts, run = packed[first], phase[first], token[first], cuts[first], run[first]
        whole = len(packed) if end else int(np.searchsorted(run, run[-1]))
        self._rest = [part[whole:] for part in (packed, phase, token, cuts)]
        starts = np.flatnonzero(np.diff(run[:whole], prepend=-1))
        sizes = np.diff(starts, append=whole)
        self._out.append(packed[:whole], sizes, phase[starts], token[starts])

    def finish(
        self, name: str, top_k: int | None, expert_nbytes: Sequence[int] | int | None = None, **fields: Any
    ) -> Trace:
        """Return the trace; the rest of the fields are those of Trace. A top_k above every layer's experts is none."""
        if len(self._rest[0]):
            self._take(self._rest, end=True)
        layer, expert = self._highest
        layers = self.layers if self.layers is not None else dict.fromkeys(range(layer + 1), expert + 1)
        if top_k is not None and layers and top_k > max(layers.values()):
            top_k = None
        first = np.zeros(MAX_LAYERS, np.int64)
        total = 0
        for number, count in sorted(layers.items()):
            first[number] = total
            total += count
        columns = self._out.finish()
        keys = columns["keys"]
        for start in range(0, len(keys), BLOCK):
            packed = np.asarray(keys[start : start + BLOCK], np.int64)
            keys[start : start + BLOCK] = first[packed >> _SHIFT] + (packed & (1 << _SHIFT) - 1)
        nbytes = expert_nbytes if expert_nbytes is None or isinstance(expert_nbytes, int) else np.asarray(expert_nbytes)
        return Trace(
            name=name, layers=tuple(sorted(layers.items())), top_k=top_k, expert_nbytes=nbytes, **columns, **fields
        )


def short(line: bytes) -> str:
    """Return a line of a file as an error shows it."""
    text = line.strip().decode("utf-8", "replace")
    return repr(text if len(text) <= 60 else text[:57] + "...")
