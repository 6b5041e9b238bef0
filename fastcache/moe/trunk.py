"""Tensors that belong to no routed expert, read from the checkpoint as float32.

Owns reading one trunk tensor by layer and name. Knows no family. Imports errors, formats.ggml, layout.record, quant.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import CheckpointTruncated, MissingTensor, UnsupportedCheckpoint
from fastcache.formats import ggml
from fastcache.layout.record import Layout, TensorInfo
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.floats import BFLOAT16, to_float32

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
}


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
        times those of GGML's types.

    Raises
    ------
    MissingTensor
        No tensor of that name, or several.
    UnsupportedCheckpoint
        It is stored encoded.
    CheckpointTruncated
        The file ends before the tensor does.
    """
    full = f"blk.{layer}.{name}" if layout.format == "gguf" else f"model.layers.{layer}.{name}"
    info = layout.trunk.get(full)
    if info is None:
        found = [other for other in layout.trunk if other.endswith(f".{full}")]
        if len(found) != 1:
            raise MissingTensor(
                f"the checkpoint has {'no' if not found else 'more than one'} tensor {full!r}"
                + (f": {', '.join(sorted(found))}" if found else "; its layer cannot be computed without it")
            )
        info = layout.trunk[found[0]]
    return _read(layout, info)


def _read(layout: Layout, info: TensorInfo) -> NDArray[np.float32]:
    dtype = _DTYPES.get(info.dtype)
    if dtype is None and layout.format == "gguf":
        dtype = ggml.carrier(info.dtype)
    if dtype is None:
        raise UnsupportedCheckpoint(
            f"{info.name!r} is stored as {info.dtype}; this version computes with F32, F16, BF16 and GGML's types only"
        )
    path = layout.files[info.file]
    raw = np.fromfile(path, np.uint8, count=info.nbytes, offset=info.offset)
    if raw.nbytes != info.nbytes:
        raise CheckpointTruncated(f"{path}: {info.name!r} needs {info.nbytes} bytes at {info.offset}, got {raw.nbytes}")
    if is_blocks(dtype):
        array = blocks_to_float32(raw.view(dtype).reshape(*info.shape[:-1], -1))
    else:
        array = to_float32(raw.view(dtype).reshape(info.shape))
    array.flags.writeable = False
    return array
