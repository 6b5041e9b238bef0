"""Tensors that belong to no routed expert, read from the checkpoint as float32.

Owns reading one trunk tensor by layer and name. Knows no family. Imports errors, formats, layout, quant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import CheckpointTruncated, MissingTensor, UnsupportedCheckpoint
from fastcache.formats import ggml
from fastcache.formats.dtypes import DTYPES, carrier_shape
from fastcache.layout.quantization import Quantization
from fastcache.layout.record import Layout, TensorInfo
from fastcache.quant.blocks import self_told
from fastcache.quant.coded import coded_weight, plain_name, stored_as


def layer_tensor(layout: Layout, layer: int, name: str) -> NDArray[np.float32]:
    """Read the trunk tensor `name` of a layer as float32.

    Parameters
    ----------
    layout : Layout
    layer : int
    name : str
        On-disk name after "model.layers.L.", or after "blk.L." in GGUF; a longer prefix, as multimodal checkpoints
        have, is found too.

    Returns
    -------
    ndarray, float32, C-contiguous, read-only
        Of the stored shape. Converted once: twice the bytes of a stored bfloat16 or float16 tensor, two to sixteen
        times those of GGML's types, four to eight times those of codes with scales. See `fastcache.linear` for what is
        decoded; of such a weight "X.weight" may be stored as "X.weight_packed" or "X.qweight".

    Raises
    ------
    MissingTensor
        No tensor of that name, or several.
    UnsupportedCheckpoint
        It is stored in a way that is not decoded.
    CheckpointTruncated
        The file ends before the tensor does.
    """
    at = weight_name(layout, layer, name)
    tensors = _Tensors(layout)
    coded = coded_weight(tensors, at)
    if coded is not None:
        array = coded.dense()
    else:
        numbers = self_told(tensors[at])
        if numbers is None:
            raise UnsupportedCheckpoint(
                f"{at!r} is stored as {layout.trunk[at].dtype} without the scales that would make numbers of it"
            )
        array = numbers
    array.flags.writeable = False
    return array


def weight_name(layout: Layout, layer: int, name: str) -> str:
    """Return the on-disk name of a layer's tensor, see `layer_tensor`; "X.weight" of one that is stored packed.

    Raises
    ------
    MissingTensor
        No tensor of that name, or several.
    """
    full = f"blk.{layer}.{name}" if layout.format == "gguf" else f"model.layers.{layer}.{name}"
    for each in stored_as(full):
        at = _find(layout, each)
        if at is not None:
            return plain_name(at)
    raise MissingTensor(f"the checkpoint has no tensor {full!r}; its layer cannot be computed without it")


def _find(layout: Layout, full: str) -> str | None:
    """Return the on-disk name of a tensor, which may have a longer prefix; None if there is none."""
    if full in layout.trunk:
        return full
    found = [other for other in layout.trunk if other.endswith(f".{full}")]
    if (
        not found and (within := full.removeprefix("model.")) != full
    ):  # "backbone.layers.", DBRX's "transformer.blocks."
        ways = (within, within.replace("layers.", "blocks.", 1))
        found = [other for other in layout.trunk if any(other == way or other.endswith(f".{way}") for way in ways)]
    if len(found) > 1:
        raise MissingTensor(f"the checkpoint has more than one tensor {full!r}: {', '.join(sorted(found))}")
    return found[0] if found else None


class _Tensors:
    """The trunk's tensors by their on-disk names, each read when it is asked for."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._quantization = layout, Quantization(layout.config)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.trunk)

    def __contains__(self, name: object) -> bool:
        return name in self._layout.trunk

    def __getitem__(self, name: str, /) -> NDArray[Any]:
        info: TensorInfo = self._layout.trunk[name]
        if self._layout.format == "gguf" and info.dtype not in DTYPES:
            dtype, shape = ggml.carrier(info.dtype), (*info.shape[:-1], -1)
        elif info.dtype in DTYPES:
            dtype = self._quantization.carrier(info.dtype, DTYPES[info.dtype].carrier)
            shape = carrier_shape(info.dtype, info.shape, info.nbytes)
        else:
            raise UnsupportedCheckpoint(f"{name!r} is stored as {info.dtype}, which this version does not know")
        path = self._layout.files[info.file]
        raw = np.fromfile(path, np.uint8, count=info.nbytes, offset=info.offset)
        if raw.nbytes != info.nbytes:
            raise CheckpointTruncated(f"{path}: {name!r} needs {info.nbytes} bytes at {info.offset}, got {raw.nbytes}")
        return raw.view(dtype).reshape(shape)
