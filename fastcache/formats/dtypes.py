"""Element types as checkpoints name them: how many bits, and which NumPy dtype carries them.

Owns the table. Knows no file and no tensor. Imports numpy, ml_dtypes and errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fastcache.errors import UnsupportedCheckpoint


class Dtype(NamedTuple):
    """One element type."""

    bits: int  # per element in the file
    carrier: np.dtype[Any]  # of a view; uint8 where elements share bytes


_PACKED = np.dtype(np.uint8)

# The names and sizes of safetensors 0.8.0. NumPy has no bfloat16, float8 or scale type: ml_dtypes has.
DTYPES: dict[str, Dtype] = {
    "BOOL": Dtype(8, np.dtype(np.bool_)),
    "F4": Dtype(4, _PACKED),
    "F6_E2M3": Dtype(6, _PACKED),
    "F6_E3M2": Dtype(6, _PACKED),
    "U8": Dtype(8, np.dtype(np.uint8)),
    "I8": Dtype(8, np.dtype(np.int8)),
    "F8_E5M2": Dtype(8, np.dtype(ml_dtypes.float8_e5m2)),
    "F8_E4M3": Dtype(8, np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E8M0": Dtype(8, np.dtype(ml_dtypes.float8_e8m0fnu)),
    "F8_E4M3FNUZ": Dtype(8, np.dtype(ml_dtypes.float8_e4m3fnuz)),
    "F8_E5M2FNUZ": Dtype(8, np.dtype(ml_dtypes.float8_e5m2fnuz)),
    "I16": Dtype(16, np.dtype("<i2")),
    "U16": Dtype(16, np.dtype("<u2")),
    "F16": Dtype(16, np.dtype("<f2")),
    "BF16": Dtype(16, np.dtype(ml_dtypes.bfloat16)),
    "I32": Dtype(32, np.dtype("<i4")),
    "U32": Dtype(32, np.dtype("<u4")),
    "F32": Dtype(32, np.dtype("<f4")),
    "C64": Dtype(64, np.dtype("<c8")),
    "F64": Dtype(64, np.dtype("<f8")),
    "I64": Dtype(64, np.dtype("<i8")),
    "U64": Dtype(64, np.dtype("<u8")),
}

#: Types whose values mean what they say: no scale, no block, no packing.
SELF_CONTAINED = frozenset({"F32", "F16", "BF16"})


def carrier(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a view over elements of type `dtype`.

    Raises
    ------
    UnsupportedCheckpoint
        For a name that the table lacks.
    """
    try:
        return DTYPES[dtype].carrier
    except KeyError:
        raise UnsupportedCheckpoint(
            f"dtype {dtype!r} is not known to this version; known are {', '.join(DTYPES)}"
        ) from None


def carrier_shape(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    """Return the shape of a view of `nbytes` bytes that hold `shape` elements of type `dtype`.

    Where elements share bytes (F4, F6) the last axis counts bytes; if a row does not end on a byte, the view is flat.
    """
    bits = DTYPES[dtype].bits
    if bits % 8 == 0:
        return shape
    if shape and shape[-1] * bits % 8 == 0:
        return (*shape[:-1], shape[-1] * bits // 8)
    return (nbytes,)
