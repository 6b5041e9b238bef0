"""Tensors of a checkpoint by name, as its files store them: for tests of what is computed around routed experts."""

import json

import ml_dtypes
import numpy as np

from fastcache.formats import ggml
from fastcache.layout.build import build_layout
from fastcache.layout.quantization import Quantization

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def trunk_of(path):
    """Return the layout, and {name: array} of the tensors that are no routed expert's."""
    layout = build_layout(path)
    quantization = Quantization(layout.config)
    arrays = {}
    for name, info in layout.trunk.items():
        raw = np.fromfile(layout.files[info.file], np.uint8, count=info.nbytes, offset=info.offset)
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            arrays[name] = raw.view(ggml.carrier(info.dtype)).reshape(*info.shape[:-1], -1)
        else:
            arrays[name] = raw.view(quantization.carrier(info.dtype, np.dtype(dtype))).reshape(info.shape)
    return layout, arrays


def tensors_of(directory):
    """Return {name: array} of all tensors of a safetensors checkpoint, read without fastcache."""
    arrays = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        for name, info in json.loads(raw[8:end]).items():
            if name != "__metadata__":
                first, last = (end + offset for offset in info["data_offsets"])
                arrays[name] = np.frombuffer(raw[first:last], DTYPES[info["dtype"]]).reshape(info["shape"])
    return arrays


class Rows:
    """A cache of one layer: concatenates."""

    def __init__(self):
        self.kept = None

    def append(self, *rows):
        if self.kept is not None:
            rows = tuple(np.concatenate(pair) for pair in zip(self.kept, rows, strict=True))
        self.kept = rows
        return rows
