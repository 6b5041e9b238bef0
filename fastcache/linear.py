"""x @ W.T for a weight as an expert's lease holds it: any plain dtype, any GGML type, any strides, bounded memory.

Owns the public `linear`. Knows no model, no store; a lease is a mapping of labels to arrays. Imports errors, quant.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.quant.blocks import Decoder, decoder_of, is_blocks, widen_blocks
from fastcache.quant.floats import aligned_empty, is_plain, widen

BLOCK_BYTES: Final = 2 << 20
"""Bytes of float32 that one block of a weight is converted into (more only if one stored row is longer)."""
_ROLES: Final = ("gate", "up", "down")


class Arrays(Protocol):
    """Labels to arrays: an ExpertLease, or a dict of resident arrays."""

    def __getitem__(self, label: str, /) -> NDArray[Any]: ...

    def __iter__(self) -> Iterator[str]: ...


class _Scratch(threading.local):
    """Two buffers per thread, kept between calls: fresh ones cost a page fault per 4 KiB, each time."""

    def __init__(self) -> None:
        self.floats: NDArray[np.float32] = np.empty(0, np.float32)
        self.halves: NDArray[np.uint16] = np.empty(0, np.uint16)

    def reserve(self, n: int, *, halves: bool) -> None:
        if self.floats.size < n:
            self.floats = aligned_empty(4 * n).view(np.float32)
        if halves and self.halves.size < n:
            self.halves = aligned_empty(2 * n).view(np.uint16)


_scratch = _Scratch()


def linear(x: ArrayLike, lease: Arrays, name: str) -> NDArray[np.float32]:
    """Multiply by an expert's weight: ``x @ lease[name].T`` in float32, whatever the weight is stored as.

    Parameters
    ----------
    x : array_like, float32, [T, in] or [in]
        Activations of T tokens.
    lease : mapping of str to ndarray
        An ExpertLease, or a dict of resident arrays.
    name : str
        Label of a weight W [out, in] in float32, float16 or bfloat16; a transposed or interleaved view is fine. Or
        "gate", "up" or "down" of an expert from a GGUF file, whatever type its "gate.weight" has: a dequantised weight
        is bit for bit what the gguf package gives, times "gate.scale" where the file has one.

    Returns
    -------
    ndarray, float32, [T, out] or [out]

    Raises
    ------
    KeyError
        The lease has no such label, nor the same role encoded.
    UnsupportedCheckpoint
        The weight is encoded (float8, packed integers, ...) and not of GGML's types, or of one that the gguf package
        cannot dequantise: served as bytes, not decoded by this version.
    ValueError
        The shapes do not fit; the message gives both.

    Notes
    -----
    No bias is added: a label such as ``"gate.bias"`` is the caller's to add.

    float32 weights that BLAS can take as they lie are multiplied without a copy. All others are converted in blocks
    of a fixed size, 2 MiB of float32 (at least one stored row), into buffers that each calling thread keeps: beyond
    the result the call holds at most 3 MiB, or 6 bytes per element of a row that is longer than a block; and for a
    weight that is stored as [in, out] the size of the result once more. GGML's blocks take 2 MiB, and what
    dequantising 16 rows takes: up to about 25 bytes per element of those. NumPy's own bfloat16 product is more than
    ten times slower.

    The bits of the result depend on x, the weight's values, dtype and strides, and BLAS with its thread count; not
    on where the weight lies, nor on other threads calling this. Safe to call from any number of threads.
    """
    try:
        weight = lease[name]
    except KeyError:
        if name in _ROLES and (blocks := _blocks(lease, name)) is not None:
            return _times_blocks(x, lease, name, blocks)
        encoded = [label for label in lease if not is_plain(lease[label].dtype)]
        if name not in _ROLES or not encoded:
            raise
        own = [label for label in encoded if label.startswith(f"{name}.")]
        raise _cannot_decode(lease, name, own or encoded) from None
    if is_blocks(weight.dtype):
        return _times_blocks(x, lease, name, weight)
    if not is_plain(weight.dtype):
        raise _cannot_decode(lease, name, [name])
    x, rows = _checked(x, name, weight.shape)
    y = np.matmul(rows, weight.T) if _blas_takes(weight) else _blockwise(rows, weight)
    return y if x.ndim == 2 else y[0]


def _checked(x: ArrayLike, name: str, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return x, and x as [T, in], both float32."""
    x = np.ascontiguousarray(x, np.float32) if np.ndim(x) else np.asarray(x, np.float32)
    if len(shape) != 2 or x.ndim not in (1, 2) or x.shape[-1] != shape[1]:
        raise ValueError(
            f"linear: x has shape {x.shape} and {name!r} has shape {shape}; wanted [T, in] or [in] and [out, in]"
        )
    return x, x if x.ndim == 2 else x[np.newaxis]


def _blocks(lease: Arrays, name: str) -> NDArray[Any] | None:
    """Return the array of GGML blocks of a role, None if the role is not stored so."""
    try:
        weight = lease[f"{name}.weight"]
    except KeyError:
        return None
    return weight if is_blocks(weight.dtype) else None


def _times_blocks(x: ArrayLike, lease: Arrays, name: str, weight: NDArray[Any]) -> NDArray[np.float32]:
    """Multiply by a weight of GGML blocks, uint8 [out, row bytes], a block of rows at a time."""
    decoder = decoder_of(weight.dtype)
    shape = (*weight.shape[:-1], decoder.width(weight.shape[-1]))
    x, rows = _checked(x, name, shape)
    y = _by_rows(rows, weight, decoder, shape)
    scale = f"{name.partition('.')[0]}.scale"
    if scale in set(lease):
        y *= lease[scale].astype(np.float32)
    return y if x.ndim == 2 else y[0]


def _by_rows(
    x: NDArray[np.float32], weight: NDArray[Any], decoder: Decoder, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    n_out, n_in = shape
    y = np.zeros((len(x), n_out), np.float32)
    if not y.size or not n_in:
        return y
    step = min(n_out, max(1, BLOCK_BYTES // (4 * n_in)))
    _scratch.reserve(step * n_in, halves=False)
    for first in range(0, n_out, step):
        stored = weight[first : first + step]
        block = _scratch.floats[: len(stored) * n_in].reshape(len(stored), n_in)
        widen_blocks(decoder, stored, block)
        np.matmul(x, block.T, out=y[:, first : first + len(stored)])
    return y


def _blas_takes(weight: NDArray[Any]) -> bool:
    """Say whether BLAS can read a matrix where it lies: float32, one unit stride, the other a leading dimension."""
    if weight.dtype != np.float32 or not weight.flags.aligned:
        return False
    if weight.flags.c_contiguous or weight.flags.f_contiguous:
        return True
    near = 1 if weight.strides[1] == 4 else 0
    far = weight.strides[1 - near]
    return weight.strides[near] == 4 and far % 4 == 0 and far >= 4 * weight.shape[near]


def _blockwise(x: NDArray[np.float32], weight: NDArray[Any]) -> NDArray[np.float32]:
    """Convert W [out, in] a block at a time, in the order in which it lies in memory: x [T, in] -> y [T, out].

    A weight stored as [out, in] goes by output rows: each block gives some columns of y. One stored as [in, out] goes
    by inputs: each block adds to all of y. Cut the other way, every block would touch every page of the weight.
    """
    n_out, n_in = weight.shape
    y = np.zeros((len(x), n_out), np.float32)
    if not y.size or not n_in:
        return y
    by_input = abs(weight.strides[0]) < abs(weight.strides[1])
    stored = weight.T if by_input else weight
    length, width = stored.shape
    step = min(length, max(1, BLOCK_BYTES // (4 * width)))
    gather = weight.itemsize == 2 and abs(stored.strides[1]) != 2
    _scratch.reserve(step * width, halves=gather)
    floats, halves = _scratch.floats, _scratch.halves if gather else None
    for first in range(0, length, step):
        rows = stored[first : first + step]
        end = first + len(rows)
        block = floats[: rows.size].reshape(rows.shape)
        widen(rows, block, halves)
        if not by_input:
            np.matmul(x, block.T, out=y[:, first:end])
        elif not first:
            np.matmul(x[:, first:end], block, out=y)
        else:
            y += x[:, first:end] @ block
    return y


def _cannot_decode(lease: Arrays, name: str, labels: list[str]) -> UnsupportedCheckpoint:
    stored = ", ".join(f"{label!r} {lease[label].dtype.name}" for label in labels)
    meaning = {
        "float8": "8-bit floats whose scales are stored apart",
        "float4": "4-bit floats whose scales are stored apart",
        "uint8": "packed codes whose scales are stored apart",
        "int8": "integer codes whose scales are stored apart",
        "int32": "packed codes whose scales are stored apart",
    }
    dtype = lease[labels[0]].dtype.name
    what = next((text for start, text in meaning.items() if dtype.startswith(start)), "not a float of 16 or 32 bits")
    return UnsupportedCheckpoint(
        f"linear cannot multiply by {name!r}: stored as {stored} ({what}). The lease serves the bytes; "
        f"this version decodes float32, float16, bfloat16 and GGML's types only"
    )
