"""All experts of one layer in ordinary memory, behind the interface by which a store gives them.

Owns the resident arm of a comparison: same dtypes, strides and alignment as a store's arrays, no eviction. Knows no
store. Imports errors, layout.record, quant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from io import FileIO
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import CheckpointTruncated, UnknownExpert
from fastcache.layout.record import LayerExperts, Layout, Record
from fastcache.quant.floats import aligned_empty

_ALIGN = 64  # bytes; what any dtype and any vector load asks for


class ResidentExperts:
    """The experts of one layer, read once and kept.

    Parameters
    ----------
    layout : Layout
    layer : int
        A MoE layer of it.

    Raises
    ------
    UnknownExpert
        The layer has no routed experts.
    CheckpointTruncated
        A file ends before an expert does.

    Notes
    -----
    Holds every byte of the layer's experts until it dies. Safe to read from any number of threads.
    """

    def __init__(self, layout: Layout, layer: int) -> None:
        experts = layer_experts(layout, layer)
        self.layer = layer
        with ExitStack() as stack:
            files: dict[int, FileIO] = {}
            for index in sorted({int(i) for i in experts.file.flat}):
                if 0 <= index < len(layout.files):  # rows of shorter records are padded
                    files[index] = stack.enter_context(FileIO(layout.files[index]))
            self._experts = [_load(experts, e, files, layout.files) for e in range(len(experts))]

    def __len__(self) -> int:
        return len(self._experts)

    def acquire(self, layer: int, expert: int) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of an expert by label, read-only.

        Raises
        ------
        UnknownExpert
            Another layer, or no such expert.
        """
        if layer != self.layer or not 0 <= expert < len(self._experts):
            raise UnknownExpert(
                f"no expert ({layer}, {expert}) here: layer {self.layer} is resident, experts 0 to {len(self) - 1}"
            )
        return self._experts[expert]

    def as_ready(self, layer: int, experts: Iterable[int]) -> Iterator[tuple[int, Mapping[str, NDArray[Any]]]]:
        """Give (expert, arrays) of each distinct expert, in the order given: all are ready."""
        return iter([(int(e), self.acquire(layer, int(e))) for e in dict.fromkeys(experts)])


def layer_experts(layout: Layout, layer: int) -> LayerExperts:
    """Return where the experts of a layer lie, or raise UnknownExpert with the layers that have some."""
    try:
        return layout.layers[layer]
    except KeyError:
        raise UnknownExpert(
            f"layer {layer} has no routed experts; MoE layers are {', '.join(map(str, layout.layers))}"
        ) from None


def _load(
    experts: LayerExperts, expert: int, files: Mapping[int, FileIO], paths: tuple[str, ...]
) -> Mapping[str, NDArray[Any]]:
    record: Record = experts.records[int(experts.record_of[expert])]
    starts = []
    nbytes = 0
    for tensor in record.tensors:
        starts.append(nbytes)
        nbytes += -(-tensor.nbytes // _ALIGN) * _ALIGN
    memory = aligned_empty(nbytes, _ALIGN)
    for column, (tensor, start) in enumerate(zip(record.tensors, starts, strict=True)):
        if not tensor.nbytes:
            continue
        index, offset = int(experts.file[expert, column]), int(experts.offset[expert, column])
        file = files[index]
        file.seek(offset)
        target = memory[start : start + tensor.nbytes].data
        got = 0
        while got < tensor.nbytes:
            n = file.readinto(target[got:])
            if not n:
                raise CheckpointTruncated(
                    f"{paths[index]}: expert ({experts.layer}, {expert}) needs {tensor.nbytes} bytes of "
                    f"{tensor.label!r} at {offset}, got {got}"
                )
            got += n
    arrays: dict[str, NDArray[Any]] = {}
    for view in record.views:
        array: NDArray[Any] = np.ndarray(
            view.shape, view.dtype, buffer=memory, offset=starts[view.tensor] + view.offset, strides=view.strides
        )
        array.flags.writeable = False
        arrays[view.label] = array
    return MappingProxyType(arrays)
