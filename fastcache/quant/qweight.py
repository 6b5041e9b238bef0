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
_PIECE_BYTES: Final = 256 << 10
_DENSE_BYTES: Final = 2 << 20
_WIDE: Final = 512  # outputs of a tile, at most: rows of whole 4 KiB get in each other's way in the CPU's cache
_GROUPED: Final = 32 << 10  # groups of outputs of a tile, at most, where inputs are of any group


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

    def tiles(self, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Give (top, left, n_in, n_out) of pieces of the stored weight that take `nbytes` as float32, or a word more.

        As wide as the groups allow: a few columns of a large weight are slow to read.
        """
        fields, (n_out, n_in) = 32 // self.bits, self.shape
        most = _WIDE if isinstance(self.group, int) else min(_WIDE, _GROUPED // max(1, len(self.scale)))
        width = min(n_out, max(1, most // fields) * fields)
        height = max(1, nbytes // (4 * max(1, width)) // fields) * fields
        for left in range(0, n_out, width):
            for top in range(0, n_in, height):
                yield top, left, min(height, n_in - top), min(width, n_out - left)

    def fill(self, top: int, left: int, out: F32) -> None:
        """Write a tile, the inputs from `top` on of the outputs from `left` on, into `out`, float32 [inputs, outputs].

        The same bits however it is cut. Beyond `out` it takes four float32 for each group of an output, and 512 KiB.
        """
        bottom, right = top + len(out), left + out.shape[1]
        if isinstance(self.group, int):
            low, high = top // self.group, -(-bottom // self.group)
        else:
            low, high = 0, len(self.scale)
        scales = np.empty((high - low, right - left), np.float32)
        widen(self.scale[low:high, left:right], scales)
        zeros = self._zeros(low, high, left, right)
        fields = 32 // self.bits
        step = max(1, _PIECE_BYTES // (4 * out.shape[1] * fields)) * fields  # all steps of a piece in the CPU's cache
        with np.errstate(all="ignore"):  # garbage is infinite or no number, as everywhere
            for at in range(0, len(out), step):
                inputs = out[at : at + step]
                (self._awq_codes if self.awq else self._codes)(top + at, left, inputs)
                if isinstance(self.group, int):
                    first, end = top + at, top + at + len(inputs)
                    for group in range(first // self.group, -(-end // self.group)):
                        some = inputs[max(group * self.group - first, 0) : (group + 1) * self.group - first]
                        np.subtract(some, zeros[group - low], out=some)
                        np.multiply(some, scales[group - low], out=some)
                else:
                    groups = self.group[top + at : top + at + len(inputs)]
                    np.subtract(inputs, zeros[groups], out=inputs)
                    np.multiply(inputs, scales[groups], out=inputs)

    def dense(self) -> F32:
        """Return the whole weight, float32 [out, in]."""
        out = np.empty(self.shape, np.float32)
        for top, left, n_in, n_out in self.tiles(_DENSE_BYTES):
            tile = np.empty((n_in, n_out), np.float32)
            self.fill(top, left, tile)
            out[left : left + n_out, top : top + n_in] = tile.T
        return out

    def _codes(self, top: int, left: int, out: F32) -> None:
        fields = 32 // self.bits
        words = self.words[top // fields : (top + len(out)) // fields, left : left + out.shape[1]]
        by_word, field = out.reshape(len(words), fields, -1), np.empty(words.shape, np.uint32)
        for i in range(fields):
            np.right_shift(words, np.uint32(i * self.bits), out=field)
            np.bitwise_and(field, np.uint32((1 << self.bits) - 1), out=field)
            by_word[:, i] = field.view(np.int32)

    def _awq_codes(self, top: int, left: int, out: F32) -> None:
        words = self.words[top : top + len(out), left // 8 : (left + out.shape[1]) // 8]
        widen_uint4(_in_order(words), out)

    def _zeros(self, low: int, high: int, left: int, right: int) -> F32:
        """Zero points of some outputs in some groups."""
        fields = 32 // self.bits
        words = self.zeros[low:high, left // fields : right // fields]
        if self.awq:
            words = _in_order(words)
        if self.less_one:
            words = words + _ones(self.bits)
        zeros = np.empty((*words.shape, fields), np.float32)
        for i in range(fields):
            zeros[:, :, i] = (words >> np.uint32(i * self.bits)) & np.uint32((1 << self.bits) - 1)
        return zeros.reshape(high - low, -1)


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
