"""x @ W.T for a weight as an expert's lease holds it: plain, of a GGML type, or codes with scales; bounded memory.

Owns the public `linear`. Knows no model, no store; a lease is a mapping of labels to arrays. Imports errors, quant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.formats.scheme import schemes_of
from fastcache.quant.blocks import decoder_of, is_blocks, widen_blocks
from fastcache.quant.coded import Coded, coded_weight
from fastcache.quant.floats import aligned_empty, is_plain, widen
from fastcache.quant.qweight import Arrays, Turned

__all__ = ["BLOCK_BYTES", "Arrays", "linear"]

BLOCK_BYTES: Final = 2 << 20
"""Bytes of float32 that one block of a weight is converted into (more only if one stored row is longer)."""
_ROLES: Final = ("gate", "up", "down")
Fill: TypeAlias = Callable[[int, NDArray[np.float32]], None]  # first row, float32 [n, in] to write rows into


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
        An ExpertLease; a dict of resident arrays; any mapping of full tensor names, such as a model's trunk.
    name : str
        Label of a weight W [out, in] in float32, float16 or bfloat16; a transposed or interleaved view is fine. Or
        "gate", "up", "down", or a full name such as "model.layers.3.self_attn.q_proj.weight", of a weight that is
        stored otherwise:

        * of a GGML type ("gate.weight"): dequantised bit for bit as the gguf package does it, times "gate.scale"
          where the file has one;
        * float8 or int8 codes with "gate.weight_scale_inv", ".weight_scale" or ".scale": per block (DeepSeek-V3, Kimi
          K2), edges cut off as they are, per row, per group of columns, or one;
        * MXFP4 as gpt-oss ("gate.blocks", "gate.scales") or compressed-tensors ("gate.weight_packed",
          "gate.weight_scale") has it, and NVFP4 with its "gate.weight_global_scale", or as ModelOpt has it
          ("gate.weight", "gate.weight_scale", "gate.weight_scale_2");
        * integers of 4 or 8 bits packed into int32 ("gate.weight_packed", with "gate.weight_shape", and
          "gate.weight_zero_point" where it is not symmetric);
        * GPTQ's integers of 2, 4 or 8 bits ("gate.qweight", ".qzeros", ".scales", and ".g_idx" where the inputs are in
          no order), and AWQ's of 4.

        Such a weight is ``(code - zero) * scale``, every value a float32 rounded once. Which rows and columns share a
        scale is config.json's word, which a store's arrays carry in their dtype, as do copies of them; without it
        only grids that can be read in one way are, and no "qweight". Scales of activations are not used.

    Returns
    -------
    ndarray, float32, [T, out] or [out]

    Raises
    ------
    KeyError
        The lease has no such label, nor the same role encoded.
    UnsupportedCheckpoint
        The weight is encoded in a way that this version does not decode, and the message names the config's key for
        it; or of a GGML type that the gguf package cannot dequantise. It is served as bytes.
    CheckpointError
        Codes and scales do not fit each other (MissingTensor: a tensor that belongs to them is not there).
    ValueError
        The shapes do not fit; the message gives both.
    TypeError
        `lease` is an array, and not what has one under `name`.

    Notes
    -----
    No bias is added: a label such as ``"gate.bias"`` is the caller's to add.

    float32 weights that BLAS can take as they lie are multiplied without a copy. All others are converted in blocks
    of a fixed size, 2 MiB of float32 (at least one stored row), into buffers that each calling thread keeps: beyond
    the result the call holds at most 3 MiB, or 6 bytes per element of a row that is longer than a block; and for a
    weight that is stored as [in, out] the size of the result once more. GGML's blocks take 2 MiB, and what
    dequantising 16 rows takes: up to about 25 bytes per element of those. Codes with scales take 2 MiB and at most
    1 MiB to decode them with. NumPy's own bfloat16 product is more than ten times slower.

    The bits of the result depend on x, the weight's values, dtype and strides, and BLAS with its thread count; not
    on where the weight lies, nor on other threads calling this. Safe to call from any number of threads.
    """
    try:
        weight = lease[name]
    except KeyError:
        if name in _ROLES and (blocks := _blocks(lease, name)) is not None:
            return _times_blocks(x, lease, name, blocks)
        if (coded := coded_weight(lease, name)) is not None:
            return _times_codes(x, name, coded)
        encoded = [label for label in lease if not is_plain(lease[label].dtype)]
        if name not in _ROLES or not encoded:
            raise
        own = [label for label in encoded if label.startswith(f"{name}.")]
        raise _cannot_decode(lease, name, own or encoded) from None
    except IndexError:  # an array's
        raise TypeError(f"linear: wants a lease or a mapping with {name!r}; got {type(lease).__name__}") from None
    if is_blocks(weight.dtype):
        return _times_blocks(x, lease, name, weight)
    # A lease's "gate" is its weight. Of "gate.weight", even in bfloat16, the scale beside it is a part.
    if (name.endswith(".weight") or not is_plain(weight.dtype)) and (coded := coded_weight(lease, name)) is not None:
        return _times_codes(x, name, coded)
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

    def fill(first: int, out: NDArray[np.float32]) -> None:
        widen_blocks(decoder, weight[first : first + len(out)], out)

    y = _times_rows(x, name, shape, fill)
    scale = f"{name.partition('.')[0]}.scale"
    if scale in set(lease):
        y *= lease[scale].astype(np.float32)
    return y


def _times_codes(x: ArrayLike, name: str, coded: Coded | Turned) -> NDArray[np.float32]:
    """Multiply by codes: a block of rows at a time; a tile at a time of those that are stored as [in, out]."""
    if isinstance(coded, Coded):
        return _times_rows(x, name, coded.shape, coded.fill)
    x, rows = _checked(x, name, coded.shape)
    y = np.zeros((len(rows), coded.shape[0]), np.float32)
    if y.size:
        for top, left, n_in, n_out in coded.tiles(BLOCK_BYTES):
            _scratch.reserve(n_in * n_out, halves=False)
            tile = _scratch.floats[: n_in * n_out].reshape(n_in, n_out)
            coded.fill(top, left, tile)
            some, into = rows[:, top : top + n_in], y[:, left : left + n_out]
            if top:
                into += some @ tile
            else:
                np.matmul(some, tile, out=into)
    return y if x.ndim == 2 else y[0]


def _times_rows(x: ArrayLike, name: str, shape: tuple[int, ...], fill: Fill) -> NDArray[np.float32]:
    """Multiply by a weight [out, in] whose rows `fill` writes, as many at a time as a block takes."""
    x, rows = _checked(x, name, shape)
    n_out, n_in = shape
    y = np.zeros((len(rows), n_out), np.float32)
    if y.size and n_in:
        step = min(n_out, max(1, BLOCK_BYTES // (4 * n_in)))
        _scratch.reserve(step * n_in, halves=False)
        for first in range(0, n_out, step):
            count = min(step, n_out - first)
            block = _scratch.floats[: count * n_in].reshape(count, n_in)
            fill(first, block)
            np.matmul(rows, block.T, out=y[:, first : first + count])
    return y if x.ndim == 2 else y[0]


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
    problems = [each.problem for label in labels for each in schemes_of(lease[label].dtype) if each.problem]
    why = f": {problems[0]}" if problems else ""
    return UnsupportedCheckpoint(
        f"linear cannot multiply by {name!r}: stored as {stored} ({what}){why}. The lease serves the bytes; this "
        f"version decodes float32, float16, bfloat16, GGML's types, and float8, MXFP4, NVFP4 and packed integers "
        f"(compressed-tensors, GPTQ, AWQ) with their scales beside them"
    )
