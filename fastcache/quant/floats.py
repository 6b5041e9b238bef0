"""float32, float16 and bfloat16 arrays as float32, fast in NumPy.

Owns the list of dtypes that need no scales to be numbers ("plain"), and their conversion. Knows no expert, no
checkpoint. Imports numpy and ml_dtypes.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
PLAIN: Final = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

_UNSIGN: Final = np.int32(0x8FFFFFFF - (1 << 32))
_RESCALE: Final = np.float32(2.0**112)
_SUSPECT: Final = 2.0**32


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Say whether an array of `dtype` is its numbers: native float32, float16 or bfloat16."""
    return dtype in PLAIN


def aligned_empty(nbytes: int, align: int = 64) -> NDArray[np.uint8]:
    """Return `nbytes` uninitialised bytes whose address is a multiple of `align` bytes."""
    raw = np.empty(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes]


def widen(source: NDArray[Any], out: NDArray[np.float32], half: NDArray[np.uint16] | None = None) -> None:
    """Write the exact float32 values of a plain array into `out`.

    Parameters
    ----------
    source : ndarray, float32, float16 or bfloat16
        Any shape, any strides, any alignment.
    out : ndarray, float32, C-contiguous
        Of the same shape.
    half : ndarray, uint16, optional
        At least ``source.size`` elements to gather a strided bfloat16 array into; without it one is allocated.

    Notes
    -----
    bfloat16 is the upper half of a float32, and ml_dtypes' cast of contiguous rows is as fast as memory; of strided
    ones it is five times slower than gathering the bits first. float16 by NumPy's cast takes one scalar conversion
    per element. Here instead the bits are moved to float32's places (``int32(bits) << 13`` without the copies of
    the sign that widening made), which is the value times 2**-112, subnormals included, and scaled back: exact.
    Only infinities and NaNs come out wrong, as finite numbers of at least 65536; a sum of squares that could hide
    one sends the array through NumPy's cast.
    """
    if source.dtype == np.float16 and source.size:
        bits = out.view(np.int32)
        bits[...] = source.view(np.int16)
        np.left_shift(bits, np.int32(13), out=bits)
        np.bitwise_and(bits, _UNSIGN, out=bits)
        np.multiply(out, _RESCALE, out=out)
        flat = out.reshape(-1)
        if not float(np.dot(flat, flat)) < _SUSPECT:
            out[...] = source
    elif source.dtype == BFLOAT16 and source.ndim and source.strides[-1] != source.itemsize:
        gathered = (np.empty(source.size, np.uint16) if half is None else half[: source.size]).reshape(source.shape)
        gathered[...] = source.view(np.uint16)
        out[...] = gathered.view(BFLOAT16)
    else:
        out[...] = source


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return a plain array as C-contiguous float32, the array itself if it is that already.

    Parameters
    ----------
    array : ndarray, float32, float16 or bfloat16
        Any shape and strides.

    Raises
    ------
    TypeError
        The dtype is not plain: its elements mean nothing without their scales.
    """
    if not is_plain(array.dtype):
        raise TypeError(f"{array.dtype} is not float32, float16 or bfloat16")
    if array.dtype == np.float32 and array.flags.c_contiguous and array.flags.aligned:
        return array
    out = np.empty(array.shape, np.float32)
    widen(array, out)
    return out
