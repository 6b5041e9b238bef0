"""The tensors of a checkpoint that are no routed expert's, by name, as the file stores them."""

import ml_dtypes
import numpy as np

from fastcache.formats import ggml
from fastcache.layout.build import build_layout

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def trunk_of(path):
    """Return layout, {name: array}."""
    layout = build_layout(path)
    arrays = {}
    for name, info in layout.trunk.items():
        raw = np.fromfile(layout.files[info.file], np.uint8, count=info.nbytes, offset=info.offset)
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            arrays[name] = raw.view(ggml.carrier(info.dtype)).reshape(*info.shape[:-1], -1)
        else:
            arrays[name] = raw.view(dtype).reshape(info.shape)
    return layout, arrays


class Rows:
    """A cache of one layer: concatenates."""

    def __init__(self):
        self.kept = None

    def append(self, *rows):
        self.kept = (
            rows if self.kept is None else tuple(np.concatenate(pair) for pair in zip(self.kept, rows, strict=True))
        )
        return self.kept
