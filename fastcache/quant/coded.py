"""A weight stored as codes with their scales beside it, as float32, a block of rows at a time.

Owns which tensors make up such a weight, how its grid of scales lies over it, and the checks that it can. What codes
stand for is in codes; what GPTQ and AWQ store, in qweight. Knows no file. Imports errors, formats.scheme, codes,
floats, qweight, numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.formats.scheme import Scheme, schemes_of
from fastcache.quant import codes as read
from fastcache.quant.floats import is_plain, widen
from fastcache.quant.qweight import Arrays, Turned, turned_weight

F32: TypeAlias = NDArray[np.float32]
Pair: TypeAlias = tuple[int, int]

_SCALES: Final = ("weight_scale_inv", "weight_scale", "scale")  # of "weight" and "weight_packed"; w = code * scale
_FURTHER: Final = ("weight_global_scale", "weight_scale_2", "pre_quant_scale")
_PIECE_BYTES: Final = 256 << 10
_DENSE_BYTES: Final = 2 << 20  # of float32, that a whole weight is decoded in at a time


@dataclass(frozen=True, slots=True)
class Coded:
    """A weight W [out, in]: ``(code - zero) * scale``, and before that the scale ``/ divisor`` or ``* factor``."""

    shape: Pair  # out, in
    codes: NDArray[Any]  # [out, stored]
    widen: read.Widen
    scale: NDArray[Any]  # [ceil(out / block[0]), ceil(in / block[1])], as stored
    block: Pair  # rows, columns that share a scale
    divisor: np.float32 | None = None
    zeros: NDArray[Any] | None = None  # the grid's, as stored
    bits: int = 0  # of a zero point, packed along the rows of the grid; 0: one to an element
    factor: np.float32 | None = None

    def fill(self, first: int, out: F32) -> None:
        """Write the weight's rows from `first` on into `out`, float32 [n, in], C-contiguous.

        The same bits however the rows are cut. Beyond `out` it takes a byte per element, a row, and what a table of
        codes is looked up with, 256 KiB (or 8 bytes per code of a row that is longer than 32,768 of them).
        """
        if not out.size:
            return
        end = first + len(out)
        low, high = first // self.block[0], (end - 1) // self.block[0] + 1
        with np.errstate(all="ignore"):  # garbage is infinite or no number, as everywhere
            self.widen(self.codes[first:end], out)
            if self.zeros is not None:
                self._apply(np.subtract, self._zeros(low, high), first, out)
            self._apply(np.multiply, self._scales(low, high), first, out)

    def dense(self) -> F32:
        """Return the whole weight, float32 [out, in]."""
        out = np.empty(self.shape, np.float32)
        step = max(1, _DENSE_BYTES // max(1, 4 * self.shape[1]))
        for first in range(0, self.shape[0], step):
            self.fill(first, out[first : first + step])
        return out

    def _scales(self, low: int, high: int) -> F32:
        stored = self.scale[low:high]
        if stored.dtype in (read.E8M0, np.uint8):
            scales = read.exponents(stored)
        else:
            scales = np.empty(stored.shape, np.float32)
            (widen if is_plain(stored.dtype) else read.widen_float8)(stored, scales)
        if self.divisor is not None:
            scales /= self.divisor
        if self.factor is not None:
            scales *= self.factor
        return scales

    def _zeros(self, low: int, high: int) -> F32:
        assert self.zeros is not None
        if not self.bits:
            return self.zeros[low:high].astype(np.float32)
        rows = np.arange(low, high)
        per_word = 32 // self.bits
        shift = (self.bits * (rows % per_word)).astype(np.uint32)[:, np.newaxis]
        bits = (self.zeros.view(np.uint32)[rows // per_word] >> shift) & np.uint32((1 << self.bits) - 1)
        return bits.astype(np.float32) - np.float32(1 << (self.bits - 1))

    def _apply(self, ufunc: np.ufunc, grid: F32, first: int, out: F32) -> None:
        """Subtract from, or multiply, each element of `out` by its cell of `grid`, whose first row is that of `out`."""
        (rows, columns), n_in = self.block, out.shape[1]
        if rows == 1:
            whole = n_in // columns
            # Where rows have a rest NumPy cannot tell that input and output are one, and copies: bound what it copies.
            step = max(1, len(out) if whole == grid.shape[1] else _PIECE_BYTES // (4 * n_in))
            for at in range(0, len(out), step):
                piece, cells = out[at : at + step], grid[at : at + step]
                part = piece[:, : whole * columns].reshape(len(piece), whole, columns)  # a view: an axis is split
                ufunc(part, cells[:, :whole, np.newaxis], out=part)
                if whole < grid.shape[1]:
                    rest = piece[:, whole * columns :]
                    ufunc(rest, cells[:, whole:], out=rest)
            return
        low = first // rows
        for number, row in enumerate(grid):
            band = out[max((low + number) * rows - first, 0) : (low + number + 1) * rows - first]
            ufunc(band, row if len(row) == 1 else np.repeat(row, columns)[:n_in], out=band)


def stored_as(name: str) -> tuple[str, str, str]:
    """Return the names that a weight "X.weight" may be stored under: its own, and those of packed codes."""
    return name, f"{name}_packed", f"{name.removesuffix('weight')}qweight"


def plain_name(stored: str) -> str:
    """Return the name of the weight whose codes are stored so: "X.weight" of "X.qweight"; any other name as it is."""
    stem, dot, last = stored.rpartition(".")
    return f"{stem}{dot}weight" if last in ("weight_packed", "qweight") else stored


def coded_weight(arrays: Arrays, name: str, *, values: bool = True) -> Coded | Turned | None:
    """Return the weight of that name if `arrays` has it as codes with scales, else None.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    name : str
        "gate", or a full name with or without ".weight".
    values : bool
        Read tensors that are small integers (`weight_shape`, `g_idx`, `qzeros`). Without, arrays of the right dtypes
        and shapes are enough to know whether the weight could be decoded.

    Raises
    ------
    UnsupportedCheckpoint
        It is coded in a way that is not decoded, or which rows and columns share a scale is not known.
    MissingTensor
        The zero points or the second scale that the codes need are not there.
    CheckpointError
        Scales and codes do not fit each other.
    """
    stem = name.removesuffix(".weight")
    if f"{stem}.blocks" in arrays and f"{stem}.scales" in arrays:
        return _mxfp4_blocks(arrays, stem)
    if f"{stem}.qweight" in arrays:
        return turned_weight(arrays, stem, values=values)
    scales = [label for suffix in _SCALES if (label := f"{stem}.{suffix}") in arrays]
    for suffix in ("weight_packed", "weight"):
        if (label := f"{stem}.{suffix}") in arrays and (scales or suffix == "weight_packed"):
            codes = arrays[label]
            schemes = schemes_of(codes.dtype)
            problems = [each.problem or f"{each.packing} has a qweight" for each in schemes if not _usable(each)]
            if problems and len(problems) == len(schemes):
                raise UnsupportedCheckpoint(f"{label!r}: {problems[0]}, which this version does not decode")
            if len(scales) != 1:
                raise UnsupportedCheckpoint(f"{label!r}: {' and '.join(scales) or 'no scale'} beside it; one is wanted")
            if (order := f"{stem}.weight_g_idx") in arrays:
                raise UnsupportedCheckpoint(f"{order!r}: columns sorted into groups (actorder) are not decoded")
            if codes.ndim != 2:
                raise UnsupportedCheckpoint(f"{label!r} has shape {codes.shape}; codes of 2 axes are decoded")
            scale = arrays[scales[0]]
            second = ""
            if codes.dtype == np.uint8:  # of NVFP4, as compressed-tensors and as ModelOpt has it
                second = "weight_global_scale" if suffix == "weight_packed" else "weight_scale_2"
            for further in _FURTHER:
                if further != second and (other := f"{stem}.{further}") in arrays:
                    raise UnsupportedCheckpoint(f"{label!r}: {other!r} beside it is a factor that is not decoded")
            usable = tuple(filter(_usable, schemes))
            if codes.dtype == np.uint8 and (suffix == "weight_packed" or scale.dtype == read.E4M3):
                return _packed_e2m1(arrays, f"{stem}.{second}", label, codes, scale, usable)
            if suffix == "weight":
                return _one_to_a_code(arrays, stem, label, codes, scale, usable)
            if codes.dtype == np.int32:
                return _packed_integers(arrays, stem, label, codes, scale, usable, values)
            raise UnsupportedCheckpoint(f"{label!r} is stored as {codes.dtype.name}; uint8 and int32 are decoded")
    return None


def _usable(scheme: Scheme) -> bool:
    return not scheme.problem and not scheme.packing


def _mxfp4_blocks(arrays: Arrays, stem: str) -> Coded:
    """gpt-oss: codes [out, in / 32, 16 bytes], scales [out, in / 32]; OCP MX 1.0."""
    codes, scale = arrays[f"{stem}.blocks"], arrays[f"{stem}.scales"]
    if codes.dtype != np.uint8 or codes.ndim != 3 or codes.shape[2] != 16 or scale.shape != codes.shape[:2]:
        raise CheckpointError(f"{stem}: blocks {codes.dtype} {codes.shape} and scales {scale.shape} are not MXFP4")
    if scale.dtype not in (np.uint8, read.E8M0):
        raise UnsupportedCheckpoint(f"'{stem}.scales' is stored as {scale.dtype.name}; uint8 exponents are decoded")
    n_out, groups, _ = codes.shape
    return Coded((n_out, 32 * groups), codes.reshape(n_out, 16 * groups), read.widen_e2m1, scale, (1, 32))


def _one_to_a_code(
    arrays: Arrays, stem: str, label: str, codes: NDArray[Any], scale: NDArray[Any], schemes: tuple[Scheme, ...]
) -> Coded:
    """float8, int8, or plain floats that are multiplied by a scale all the same."""
    by_exponents = scale.dtype == read.E8M0 or (scale.dtype == np.uint8 and codes.dtype in read.FLOAT8)
    if not (is_plain(scale.dtype) or by_exponents):
        raise UnsupportedCheckpoint(f"{label!r}: its scale is stored as {scale.dtype.name}, which is not decoded")
    how: read.Widen
    if codes.dtype in read.FLOAT8:
        how = read.widen_float8
    elif codes.dtype == np.int8 and not by_exponents:  # beside exponents a byte is two codes
        how = read.widen_integers
    elif is_plain(codes.dtype):
        how = widen
    else:
        raise UnsupportedCheckpoint(
            f"{label!r} is stored as {codes.dtype.name} with scales of {scale.dtype.name}, which is not decoded"
        )
    shape = (codes.shape[0], codes.shape[1])
    grid, block = _lay(label, shape, scale, schemes)
    zeros = _zero_points(arrays, stem, grid, schemes)
    if zeros is not None and zeros.dtype != np.int8:
        raise UnsupportedCheckpoint(
            f"'{stem}.weight_zero_point' is {zeros.dtype} {zeros.shape}: of codes that are not packed, int8 is decoded"
        )
    return Coded(shape, codes, how, grid, block, None, zeros)


def _packed_e2m1(
    arrays: Arrays, second: str, label: str, codes: NDArray[Any], scale: NDArray[Any], schemes: tuple[Scheme, ...]
) -> Coded:
    """compressed-tensors' mxfp4- and nvfp4-pack-quantized, ModelOpt's NVFP4: two codes in a byte, the low one first.

    `second` is the label of NVFP4's second scale. compressed-tensors divides by it (`lifecycle/forward.py`), ModelOpt
    multiplies (`qtensor/nvfp4_tensor.py`); both make one float32 of the two scales first.
    """
    shape = (codes.shape[0], 2 * codes.shape[1])
    if scale.dtype in (np.uint8, read.E8M0):
        grid, block = _lay(label, shape, scale, schemes or (Scheme((1, 32)),))
        return Coded(shape, codes, read.widen_e2m1, grid, block)
    if scale.dtype != read.E4M3:
        raise UnsupportedCheckpoint(f"{label!r}: its scale is stored as {scale.dtype.name}; E8M0 and E4M3 are decoded")
    if second not in arrays:
        raise MissingTensor(f"{label!r} has scales of {scale.dtype.name}, which need {second!r} beside them")
    grid, block = _lay(label, shape, scale, schemes or (Scheme((1, 16)),))
    if arrays[second].size != 1:
        raise CheckpointError(f"{second!r} has shape {arrays[second].shape}; one number is wanted")
    number = np.float32(arrays[second].reshape(-1)[0])
    if second.endswith("weight_scale_2"):
        return Coded(shape, codes, read.widen_e2m1, grid, block, factor=number)
    return Coded(shape, codes, read.widen_e2m1, grid, block, divisor=number)


def _packed_integers(
    arrays: Arrays,
    stem: str,
    label: str,
    codes: NDArray[Any],
    scale: NDArray[Any],
    schemes: tuple[Scheme, ...],
    values: bool,
) -> Coded:
    """compressed-tensors' pack-quantized: integers of 4 or 8 bits in words of 32, the last word of a row padded."""
    if not is_plain(scale.dtype):
        raise UnsupportedCheckpoint(f"{label!r}: its scale is stored as {scale.dtype.name}, which is not decoded")
    where = f"{stem}.weight_shape"
    if where not in arrays:
        raise MissingTensor(f"{label!r} does not tell how long its rows are; {where!r} is not there")
    said = {scheme.bits for scheme in schemes} or {4, 8}
    n_out, words = codes.shape
    if values:
        stored = arrays[where].reshape(-1).tolist()
        n_in = stored[-1] if len(stored) == 2 and stored[0] == n_out else -1
        found = [bits for bits in sorted(said & {4, 8}) if n_in >= 0 and -(-n_in * bits // 32) == words]
    else:
        found, n_in = sorted(said & {4, 8})[:1], 0
        n_in = words * 32 // found[0] if found else 0
    if len(found) != 1:
        raise UnsupportedCheckpoint(
            f"{label!r} has {words} words in each of {n_out} rows, {where!r} says "
            f"{stored if values else 'what is not read'}, and num_bits is {sorted(said)}: 4 and 8 bits are decoded"
        )
    (bits,), shape = found, (n_out, n_in)
    fitting = tuple(scheme for scheme in schemes if scheme.bits == bits)
    if values:
        grid, block = _lay(label, shape, scale, fitting)
    else:
        grid, block = scale, (1, 1)
    zeros = _zero_points(arrays, stem, grid, fitting)
    packed = 0
    if zeros is not None and zeros.dtype == np.int32:
        packed = bits
        if zeros.shape != (-(-grid.shape[0] * bits // 32), grid.shape[1]):
            raise CheckpointError(f"{stem}: zero points {zeros.shape} do not fit scales {grid.shape} at {bits} bits")
    return Coded(shape, codes, read.widen_int4 if bits == 4 else read.widen_int8, grid, block, None, zeros, packed)


def _zero_points(arrays: Arrays, stem: str, grid: NDArray[Any], schemes: tuple[Scheme, ...]) -> NDArray[Any] | None:
    label = f"{stem}.weight_zero_point"
    if label not in arrays:
        if schemes and all(scheme.asymmetric for scheme in schemes):
            raise MissingTensor(f"{stem}: the config says that it is not symmetric, and {label!r} is not there")
        return None
    zeros = arrays[label]
    if zeros.dtype == np.int32:
        return zeros  # packed as the codes are
    zeros = _as_grid(zeros)
    if zeros.dtype != np.int8 or zeros.shape != grid.shape:
        raise CheckpointError(f"{label!r} is {zeros.dtype} {zeros.shape}; int8 {grid.shape} is wanted, like the scales")
    return zeros


def _as_grid(scale: NDArray[Any]) -> NDArray[Any]:
    """[] or [1] as one cell, [out] as a column."""
    return scale if scale.ndim >= 2 else scale.reshape(-1, 1)


def _lay(label: str, shape: Pair, scale: NDArray[Any], schemes: tuple[Scheme, ...]) -> tuple[NDArray[Any], Pair]:
    """Return the grid of scales, and how many rows and columns of a weight each covers.

    The config's block wins, and the grid must be ceil(shape / block) of it. Without one, only a grid that no two
    different blocks could give is taken: one cell, one per row or column, or the like. That a block is 128 cannot be
    told from 16 cells over 2048 rows: they may be 136 rows high.
    """
    grid = _as_grid(scale)
    if grid.ndim != 2:
        raise UnsupportedCheckpoint(f"{label!r}: scales of shape {scale.shape} are not decoded; two axes are")
    if 0 in shape:
        return grid, (1, 1)
    said = dict.fromkeys(scheme.block for scheme in schemes if scheme.block is not None)
    if said:
        laid = {(rows or shape[0], columns or shape[1]) for rows, columns in said}
        fits = [each for each in laid if grid.shape == (-(-shape[0] // each[0]), -(-shape[1] // each[1]))]
        if len(fits) == 1:
            return grid, fits[0]
        blocks = " or ".join(f"{rows} x {columns}" for rows, columns in sorted(laid))
        if fits:
            raise UnsupportedCheckpoint(f"{label!r} {list(shape)}: scales {list(grid.shape)} fit blocks of {blocks}")
        raise CheckpointError(
            f"{label!r} {list(shape)} has scales {list(grid.shape)}, which do not cover it in blocks of {blocks} as "
            f"config.json's quantization_config says"
        )
    sides = [_only_side(n, cells) for n, cells in zip(shape, grid.shape, strict=True)]
    if None in sides or not all(sides):
        raise UnsupportedCheckpoint(
            f"{label!r} {list(shape)} has scales {list(grid.shape)}, which blocks of several sizes could give: without "
            f"quantization_config.weight_block_size which rows and columns share one is not known. A hand-made mapping "
            f"says it by the dtype: codes.view(fastcache.formats.scheme.carrier(codes.dtype, (Scheme((128, 128)),)))"
        )
    return grid, (sides[0] or 1, sides[1] or 1)


def _only_side(n: int, cells: int) -> int | None:
    """The side of blocks of which `cells` cover `n`, if only one does, or all of them mean the same; else None."""
    if cells == 1:
        return n
    if not 1 < cells <= n:
        return None
    smallest, largest = math.ceil(n / cells), math.ceil(n / (cells - 1)) - 1
    return smallest if smallest == largest else None
