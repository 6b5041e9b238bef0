"""CheckpointSource: the experts of a checkpoint's layout as a plain source. Imports keys and sources.base.

A source is below the layout, so this one is handed a layout and knows of it only what the protocols here say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fastcache.keys import ExpertKey
from fastcache.sources.base import Extent


class _Tensor(Protocol):
    @property
    def nbytes(self) -> int: ...


class _Record(Protocol):
    @property
    def nbytes(self) -> int: ...
    @property
    def tensors(self) -> Sequence[_Tensor]: ...


class _LayerExperts(Protocol):
    def __len__(self) -> int: ...
    @property
    def records(self) -> Sequence[_Record]: ...
    @property
    def record_of(self) -> np.ndarray[Any, Any]: ...
    @property
    def file(self) -> np.ndarray[Any, Any]: ...
    @property
    def offset(self) -> np.ndarray[Any, Any]: ...


class _Layout(Protocol):
    @property
    def top_k(self) -> int | None: ...
    @property
    def files(self) -> Sequence[str]: ...
    @property
    def layers(self) -> Mapping[int, _LayerExperts]: ...


class CheckpointSource:
    """The routed experts of a checkpoint.

    Parameters
    ----------
    layout : Layout
        From `fastcache.layout.build.build_layout(path)`.

    Attributes
    ----------
    top_k : int or None
        From the config.

    Notes
    -----
    Immutable, so any thread may use it.
    """

    def __init__(self, layout: _Layout) -> None:
        self.layout = layout
        self.top_k = layout.top_k

    def keys(self) -> Sequence[ExpertKey]:
        """Return every expert's key, ascending."""
        layers = self.layout.layers.items()
        return [ExpertKey(layer, expert) for layer, experts in layers for expert in range(len(experts))]

    def expert_nbytes(self, key: ExpertKey, /) -> int:
        """Return the size of an expert in bytes."""
        return self._record(key).nbytes

    def extents(self, key: ExpertKey, /) -> Sequence[Extent]:
        """Return where an expert's bytes lie, in the order of its record; neighbours in a file are one extent."""
        layer, expert = key
        record = self._record(key)
        experts = self.layout.layers[layer]
        found: list[Extent] = []
        for number, tensor in enumerate(record.tensors):
            if not tensor.nbytes:
                continue
            path = self.layout.files[experts.file[expert, number]]
            offset = int(experts.offset[expert, number])
            if found and found[-1].path == path and found[-1].offset + found[-1].nbytes == offset:
                found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + tensor.nbytes)
            else:
                found.append(Extent(path, offset, tensor.nbytes))
        return found

    def _record(self, key: ExpertKey) -> _Record:
        layer, expert = key
        experts = self.layout.layers[layer]
        if not 0 <= expert < len(experts):
            raise KeyError(key)
        return experts.records[int(experts.record_of[expert])]

    def __repr__(self) -> str:
        return f"<CheckpointSource: {len(self.keys())} experts in {len(self.layout.files)} files>"
