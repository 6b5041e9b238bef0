"""Codes of one byte, half a byte, or packed in words, as float32: what they stand for before their scale.

Owns the arithmetic of E4M3, E5M2, E2M1 and packed integers, made fast in NumPy. Knows no scale. Imports numpy and
ml_dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
Widen: TypeAlias = Callable[[NDArray[Any], F32], None]  # rows of codes [n, stored], float32 [n, in] to fill

E4M3: Final = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2: Final = np.dtype(ml_dtypes.float8_e5m2)
E8M0: Final = np.dtype(ml_dtypes.float8_e8m0fnu)
FLOAT8: Final = (E4M3, E5M2, np.dtype(ml_dtypes.float8_e4m3fnuz), np.dtype(ml_dtypes.float8_e5m2fnuz))

_CHUNK: Final = 32 << 10  # codes at a time that a table is looked up for: NumPy widens each to an index of 8 bytes
_LOW_E4M3: Final = np.int32(0x87F00000 - (1 << 32))  # a sign-extended code, shifted: sign, and 7 bits
_LOW_E5M2: Final = np.int32(0x8FE00000 - (1 << 32))


def widen_float8(rows: NDArray[Any], out: F32) -> None:
    """Write the values of float8 codes of any of `FLOAT8` into `out`, of the same shape.

    The bits of E4M3 and E5M2 are moved to float32's places, which is the value times 2**-120 or 2**-112, subnormals
    included, and scaled back: exact, and ten times as fast as ml_dtypes' cast. Infinities and NaNs, which that makes
    numbers of, are put in afterwards.
    """
    if rows.dtype == E4M3:
        shift, mask, scale, special = 20, _LOW_E4M3, np.float32(2.0**120), 0x7F
    elif rows.dtype == E5M2:
        shift, mask, scale, special = 21, _LOW_E5M2, np.float32(2.0**112), 0x7C
    else:
        _look_up(_values(rows.dtype.name), rows.view(np.uint8), out)
        return
    bits = out.view(np.int32)
    bits[...] = rows.view(np.int8)
    np.left_shift(bits, np.int32(shift), out=bits)
    np.bitwise_and(bits, mask, out=bits)
    np.multiply(out, scale, out=out)
    codes = rows.view(np.uint8)
    magnitude = codes & 0x7F
    if rows.size and int(magnitude.max()) >= special:
        odd = magnitude >= special
        out[odd] = _values(rows.dtype.name)[codes[odd]]


def widen_integers(rows: NDArray[Any], out: F32) -> None:
    """Write int8 codes into `out`, of the same shape."""
    out[...] = rows


def widen_e2m1(rows: NDArray[np.uint8], out: F32) -> None:
    """Write E2M1 codes, two in a byte, the low one first, into `out` [n, in]; rows may be longer than half of in."""
    _widen_nibbles("e2m1", rows, out)


def widen_int4(rows: NDArray[Any], out: F32) -> None:
    """Write integers from -8 to 7, eight in an int32 word, the lowest bits first and 8 added, into `out` [n, in]."""
    _widen_nibbles("int4", _bytes(rows), out)


def widen_uint4(rows: NDArray[Any], out: F32) -> None:
    """Write integers from 0 to 15, eight in a word of 32 bits, the lowest bits first, into `out` [n, in]."""
    _widen_nibbles("uint4", _bytes(rows), out)


def widen_int8(rows: NDArray[Any], out: F32) -> None:
    """Write integers from -128 to 127, four in an int32 word, the lowest bits first and 128 added, into `out`."""
    out[...] = _bytes(rows)[:, : out.shape[1]]
    np.subtract(out, np.float32(128), out=out)


def exponents(scales: NDArray[Any]) -> F32:
    """Return E8M0 scales, 2**(code - 127) and 255 for no number, stored as such or as bytes, as float32."""
    return np.take(_values(E8M0.name), scales.view(np.uint8))


def _bytes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of little-endian words, row by row."""
    if rows.strides[-1] != rows.itemsize:
        rows = np.ascontiguousarray(rows)
    return rows.view(np.uint8)


def _widen_nibbles(kind: str, rows: NDArray[np.uint8], out: F32) -> None:
    n_in = out.shape[1]
    if n_in % 2:  # pairs would not begin at an even place in each row
        single = _nibbles(kind)
        for row, into in zip(rows, out, strict=True):
            into[::2] = single[row[: (n_in + 1) // 2] & 15]
            into[1::2] = single[row[: n_in // 2] >> 4]
    else:
        _look_up(_pairs(kind), rows[:, : n_in // 2], out.view(np.uint64))


def _look_up(table: NDArray[Any], codes: NDArray[np.uint8], out: NDArray[Any]) -> None:
    step = max(1, _CHUNK // max(1, codes.shape[-1]))
    for first in range(0, len(codes), step):
        # A mode other than "raise" writes straight into `out`; a byte is never out of the range of 256.
        np.take(table, codes[first : first + step], out=out[first : first + step], mode="clip")


@functools.cache
def _values(name: str) -> F32:
    """The 256 values of a type of ml_dtypes."""
    values: F32 = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32)
    return values


@functools.cache
def _nibbles(kind: str) -> F32:
    codes = np.arange(16, dtype=np.uint8)
    values: F32 = codes.view(ml_dtypes.float4_e2m1fn if kind == "e2m1" else np.uint8).astype(np.float32)
    return values - np.float32(8) if kind == "int4" else values


@functools.cache
def _pairs(kind: str) -> NDArray[np.uint64]:
    """The two float32 of each byte, as one element of eight bytes."""
    single, codes = _nibbles(kind), np.arange(256)
    both = np.stack([single[codes & 15], single[codes >> 4]], axis=1)
    return np.ascontiguousarray(both).view(np.uint64).reshape(-1)
