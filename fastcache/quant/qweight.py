"""GPTQ's and AWQ's weights as float32: integers packed in `qweight` [in, out], with `qzeros`, `scales` and `g_idx`.

Owns how these four lie, and the checks that they fit. Knows no file. Imports errors, formats.scheme, codes, floats,
numpy.

What is relied on; G groups of inputs, b bits, words of 32 bits, filled from the lowest. Sources: AutoGPTQ
`qlinear_cuda.py`; GPTQModel `nn_modules/qlinear/__init__.py` and `utils/model.py`; AutoAWQ `modules/linear/gemm.py` and
`utils/packing_utils.py`; vLLM's pull requests 26092 and 38966; text-generation-inference `utils/weights.py`.

* GPTQ: qweight int32 [in * b / 32, out], the inputs of an output in order; qzeros int32 [G, out * b / 32], outputs in
  order; scales [G, out]; g_idx int32 [in], the group of each input. G is ceil(in / group_size), group_size -1 is one
  group. w[o, i] = (q[i, o] - zero[g_idx[i], o]) * scales[g_idx[i], o]. b is 2, 4 or 8; 3 is packed across words.
* Its checkpoint_format "gptq" (the default) has zero points less one in qzeros, "gptq_v2" has them as they are.
  GPTQModel makes one of the other on whole words, so that a zero point of 0 borrows from its neighbour; AutoGPTQ's
  kernels add one to each field, and its packing of a 0 overwrote the fields above. So the largest field, a zero point
  of 0, is only taken from GPTQModel's files, where adding on words undoes it.
* Symmetric is zero point 2**(b - 1) everywhere. Files that say "gptq" and store just that exist (Qwen3.5's).
* A g_idx of zeros with several groups was never set: inputs are in order, as without act-order.
* AWQ, version "gemm": 4 bits, qweight int32 [in, out / 8], qzeros int32 [G, out / 8] as they are, scales [G, out];
  the fields of a word are its outputs 0, 2, 4, 6, 1, 3, 5, 7. Inputs are in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.formats.scheme import Scheme, schemes_of
from fastcache.quant.codes import F32, widen_uint4
from fastcache.quant.floats import is_plain, widen

U32: TypeAlias = NDArray[np.uint32]

_BITS: Final = (2, 4, 8)
_PIECE_BYTES: Final = 128 << 10
_DENSE_BYTES: Final = 2 << 20


class Arrays(Protocol):
    """Labels to arrays."""

    def __getitem__(self, label: str, /) -> NDArray[Any]: ...

    def __iter__(self) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True)
class Turned:
    """A weight W [out, in] whose codes are stored as [in, out]: ``(code - zero) * scale``, a float32 rounded once."""

    shape: tuple[int, int]  # out, in
    bits: int
    awq: bool
    words: U32  # [in * bits / 32, out]; AWQ's: [in, out / 8]
    scale: NDArray[Any]  # [groups, out], as stored
    zeros: U32  # [groups, out * bits / 32], as stored
    less_one: bool  # zero points are stored so
    group: int | NDArray[np.integer[Any]]  # inputs that share a scale, in order; or the group of each

    @property
    def step(self) -> int:
        """Outputs in a word of zero points: blocks begin at multiples of it."""
        return 32 // self.bits

    def fill(self, first: int, out: F32) -> None:
        """Write the weight's rows from `first` on into the columns of `out`, float32 [in, n], C-contiguous.

        `first` and n are multiples of `step`. The same bits however the rows are cut. Beyond `out` it takes two
        float32 for each group of a row, and 512 KiB.
        """
        if not out.size:
            return
        end = first + out.shape[1]
        scales = np.empty((len(self.scale), out.shape[1]), np.float32)
        widen(self.scale[:, first:end], scales)
        zeros = self._zeros(first // self.step, end // self.step)
        (self._awq_codes if self.awq else self._codes)(first, out)
        with np.errstate(all="ignore"):  # garbage is infinite or no number, as everywhere
            if isinstance(self.group, int):
                whole = len(out) // self.group
                part = out[: whole * self.group].reshape(whole, self.group, -1)  # a view: an axis is split
                for inputs, zero, scale in zip(part, zeros, scales, strict=False):
                    np.subtract(inputs, zero, out=inputs)
                    np.multiply(inputs, scale, out=inputs)
                rest = out[whole * self.group :]
                if len(rest):
                    np.subtract(rest, zeros[whole], out=rest)
                    np.multiply(rest, scales[whole], out=rest)
            else:
                step = max(1, _PIECE_BYTES // (4 * out.shape[1]))
                for at in range(0, len(out), step):
                    inputs, group = out[at : at + step], self.group[at : at + step]
                    np.subtract(inputs, zeros[group], out=inputs)
                    np.multiply(inputs, scales[group], out=inputs)

    def dense(self) -> F32:
        """Return the whole weight, float32 [out, in]."""
        n_out, n_in = self.shape
        out = np.empty(self.shape, np.float32)
        step = max(1, _DENSE_BYTES // max(1, 4 * n_in) // self.step) * self.step
        for first in range(0, n_out, step):
            block = np.empty((n_in, min(step, n_out - first)), np.float32)
            self.fill(first, block)
            out[first : first + step] = block.T
        return out

    def _codes(self, first: int, out: F32) -> None:
        words, fields = self.words[:, first : first + out.shape[1]], self.step
        by_word = out.reshape(len(words), fields, -1)
        step = max(1, _PIECE_BYTES // (4 * out.shape[1]))
        field = np.empty((min(step, len(words)), out.shape[1]), np.uint32)
        for at in range(0, len(words), step):
            piece = np.ascontiguousarray(words[at : at + step])
            into = field[: len(piece)]
            for i in range(fields):
                np.right_shift(piece, np.uint32(i * self.bits), out=into)
                np.bitwise_and(into, np.uint32((1 << self.bits) - 1), out=into)
                by_word[at : at + step, i] = into.view(np.int32)

    def _awq_codes(self, first: int, out: F32) -> None:
        words = self.words[:, first // 8 : (first + out.shape[1]) // 8]
        step = max(1, _PIECE_BYTES // max(1, 4 * words.shape[1]))
        for at in range(0, len(words), step):
            widen_uint4(_in_order(words[at : at + step]), out[at : at + step])

    def _zeros(self, low: int, high: int) -> F32:
        """Zero points of the outputs in words `low` to `high` of each group."""
        words = self.zeros[:, low:high]
        if self.awq:
            words = _in_order(words)
        if self.less_one:
            words = words + _ones(self.bits)
        shifts = np.arange(0, 32, self.bits, dtype=np.uint32)
        fields = (words[:, :, np.newaxis] >> shifts) & np.uint32((1 << self.bits) - 1)
        return fields.reshape(len(words), -1).astype(np.float32)


def _in_order(words: U32) -> U32:
    """AWQ's words with their eight fields in the order of the outputs: those of the two halves in turn."""
    halves = []
    for half in (words & np.uint32(0xFFFF), words >> np.uint32(16)):
        apart = (half | half << np.uint32(8)) & np.uint32(0x00FF00FF)  # a field into every other
        halves.append((apart | apart << np.uint32(4)) & np.uint32(0x0F0F0F0F))
    ordered: U32 = halves[0] | halves[1] << np.uint32(4)
    return ordered


def _ones(bits: int) -> np.uint32:
    """A word whose fields are all 1."""
    return np.uint32(0xFFFFFFFF // ((1 << bits) - 1))


def turned_weight(arrays: Arrays, stem: str, *, values: bool) -> Turned:
    """Return the weight `stem`, of which `arrays` has the qweight.

    Parameters
    ----------
    arrays : mapping of str to ndarray
    stem : str
        "gate", or a full name without ".weight".
    values : bool
        Read g_idx and qzeros, as far as it takes to know how they are meant.

    Raises
    ------
    UnsupportedCheckpoint
        The config does not say how it is packed, or in a way that is not decoded.
    MissingTensor
        A tensor that belongs to it is not there.
    CheckpointError
        The tensors do not fit each other, or the config.
    """
    label = f"{stem}.qweight"
    words = arrays[label]
    schemes = schemes_of(words.dtype)
    problems = [scheme.problem for scheme in schemes if scheme.problem]
    if problems:
        raise UnsupportedCheckpoint(f"{label!r}: {problems[0]}, which this version does not decode")
    if len(schemes) != 1 or not schemes[0].packing:
        raise UnsupportedCheckpoint(
            f"{label!r}: without quantization_config.quant_method how it is packed is not known. A hand-made mapping "
            f"says it by the dtype: words.view(fastcache.formats.scheme.carrier(words.dtype, "
            f'(Scheme((1, 128), 4, packing="gptq"),)))'
        )
    scheme = schemes[0]
    for wanted in ("scales", "qzeros", *(["g_idx"] if scheme.ordered else [])):
        if f"{stem}.{wanted}" not in arrays:
            raise MissingTensor(f"{label!r} cannot be read without '{stem}.{wanted}', which is not there")
    scale, zeros = arrays[f"{stem}.scales"], arrays[f"{stem}.qzeros"]
    if words.dtype != np.int32 or zeros.dtype != np.int32 or not is_plain(scale.dtype):
        raise UnsupportedCheckpoint(
            f"{label!r} is stored as {words.dtype.name} with qzeros {zeros.dtype.name} and scales {scale.dtype.name}; "
            f"int32, int32 and floats are decoded"
        )
    awq = scheme.packing == "awq"
    bits, n_in = _sizes(stem, scheme, words, zeros, scale)
    groups, n_out = scale.shape
    if awq or f"{stem}.g_idx" not in arrays:
        group: int | NDArray[Any] = _size(stem, scheme, n_in, groups)
    else:
        order = arrays[f"{stem}.g_idx"]
        if order.shape != (n_in,) or order.dtype.kind not in "iu":
            raise CheckpointError(f"'{stem}.g_idx' is {order.dtype.name} {order.shape}; integers ({n_in},) are wanted")
        group = _groups(stem, scheme, order, groups) if values else 1
    stored, less_one = zeros.view(np.uint32), scheme.packing == "gptq"
    if values and less_one and stored.size:
        if not scheme.asymmetric and (stored == _ones(bits) << np.uint32(bits - 1)).all():
            less_one = False
        elif not scheme.carries and _has_largest(stored, bits):
            raise UnsupportedCheckpoint(
                f"'{stem}.qzeros' has {(1 << bits) - 1} where zero points are stored less one: a 0 that may have "
                f'changed its neighbours; of checkpoint_format "gptq" such files are read from GPTQModel only, which '
                f'quantization_config.meta must name, and of "gptq_v2" from all'
            )
    return Turned((n_out, n_in), bits, awq, words.view(np.uint32), scale, stored, less_one, group)


def _sizes(stem: str, scheme: Scheme, words: NDArray[Any], zeros: NDArray[Any], scale: NDArray[Any]) -> tuple[int, int]:
    """Return the bits of a code and the number of inputs, which the shapes say."""
    shapes = f"{stem}: qweight {words.shape}, qzeros {zeros.shape} and scales {scale.shape}"
    if not words.ndim == zeros.ndim == scale.ndim == 2 or len(zeros) != len(scale):
        raise CheckpointError(f"{shapes} do not fit each other as [in, out], [groups, out] and [groups, out], packed")
    groups, n_out = scale.shape
    bits, odd = divmod(32 * zeros.shape[1], max(1, n_out))
    if odd or bits not in _BITS or n_out % (32 // bits):
        raise CheckpointError(f"{shapes}: zero points of 2, 4 or 8 bits for each of {n_out} outputs are wanted")
    if scheme.bits not in (0, bits):
        raise CheckpointError(f"{shapes} are of {bits} bits, and config.json says {scheme.bits}")
    awq = scheme.packing == "awq"
    if words.shape[1] != (zeros.shape[1] if awq else n_out):
        raise CheckpointError(f"{shapes} do not fit each other as {scheme.packing.upper()} packs them")
    n_in = len(words) if awq else len(words) * (32 // bits)
    if groups > n_in:
        raise CheckpointError(f"{shapes}: {groups} groups of {n_in} inputs")
    return bits, n_in


def _size(stem: str, scheme: Scheme, n_in: int, groups: int) -> int:
    """Return how many inputs in order share a scale, as the config says."""
    if groups == 1 or not n_in:
        return max(1, n_in)
    if scheme.block is None:
        raise UnsupportedCheckpoint(f"{stem}: which of {n_in} inputs is of which of {groups} groups is not known")
    size = scheme.block[1] or n_in
    if -(-n_in // size) != groups:
        raise CheckpointError(f"{stem}: {groups} groups for {n_in} inputs, and config.json says group_size {size}")
    return size


def _groups(stem: str, scheme: Scheme, order: NDArray[Any], groups: int) -> int | NDArray[np.integer[Any]]:
    """Return how many inputs in order share a scale, or the group of each."""
    if not order.any():
        return _size(stem, scheme, len(order), groups)
    if order.min() < 0 or order.max() >= groups:
        raise CheckpointError(f"'{stem}.g_idx' has groups from {order.min()} to {order.max()}; there are {groups}")
    size = int(np.argmax(order != 0))  # of the first group, if they are in order
    if size and (order == np.arange(len(order)) // size).all():
        return size
    return order


def _has_largest(words: U32, bits: int) -> bool:
    """Whether any field of any word has all its bits set."""
    step = max(1, _PIECE_BYTES // (4 * words.shape[1]))
    for at in range(0, len(words), step):
        piece = words[at : at + step]
        both = piece.copy()
        for place in range(1, bits):
            both &= piece >> np.uint32(place)
        if (both & _ones(bits)).any():
            return True
    return False
