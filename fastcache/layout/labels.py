"""The tensors of one expert -> its Record: which labels a lease has, over which bytes, in which orientation.

Plain "gate", "up" [inter, hidden] and "down" [hidden, inter] exist only where the stored numbers are the weights (F32,
F16, BF16 without a scale), always as views without a copy. Encoded tensors stand under role + stored suffix, fused ones
under their own name, and the plain label is then refused with a text that says what to use. Knows no file.
Imports numpy, formats, layout.families, layout.quantization and layout.record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fastcache.errors import CheckpointError
from fastcache.formats import ggml
from fastcache.formats.dtypes import DTYPES, SELF_CONTAINED, carrier_shape
from fastcache.formats.ggml import Block
from fastcache.layout.families import UNKNOWN, Family, Fused
from fastcache.layout.quantization import Quantization
from fastcache.layout.record import Record, StoredTensor, View

ROLES = ("gate", "up", "down")


class Part(NamedTuple):
    """One tensor of an expert, or one expert's part of a fused tensor."""

    stored: str  # name after the expert's number, or of the fused tensor
    fused: bool
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    block: Block | None = None  # of a GGML type; the last axis of the array is then bytes


def make_record(
    family: Family, in_block: bool, parts: Sequence[Part], where: str, quantization: Quantization
) -> Record:
    """Return the record of an expert that consists of `parts`, in that order.

    Parameters
    ----------
    family : Family
    in_block : bool
        The tensors are where the family's row says. If not, only names that say what they are get a role.
    parts : sequence of Part
    where : str
        Names file and expert in an error.
    quantization : Quantization
        What the config says of codes, for the dtypes of their views.

    Raises
    ------
    CheckpointError
        A fused tensor has not the axes that the row says, or gate, up and down do not fit each other.
    """
    encoded = _roles_with_scales(family, in_block, parts)
    tensors: list[StoredTensor] = []
    views: list[View] = []
    refused: dict[str, str] = {}
    for part in parts:
        label = part.stored if part.fused else _label(family, in_block, part, encoded)
        dtype, shape = _carrier(part)
        align = dtype.itemsize if dtype is not None else 1
        tensors.append(StoredTensor(label, part.dtype, part.shape, part.nbytes, align))
        if dtype is None:
            refused[label] = f"{label!r} has dtype {part.dtype}, which this version does not know; its bytes are served"
            continue
        if part.block is None:
            dtype = quantization.carrier(part.dtype, dtype)
        views.append(View(label, len(tensors) - 1, 0, dtype, shape, _contiguous(shape, align)))
        how = family.fused.get(part.stored) if part.fused and in_block else None
        if how is not None and (how.encoded or part.dtype in SELF_CONTAINED or part.block):
            views.extend(_fused_views(how, part, len(tensors) - 1, dtype, shape, where))
    labels = [tensor.label for tensor in tensors]
    if len(set(labels)) != len(labels):
        raise CheckpointError(f"{where}: two tensors would have the same label, among {', '.join(labels)}")
    views.sort(key=_view_order)
    _check_fit(views, where)
    _check_blocks(views, parts, where)
    for role in ROLES:
        if all(view.label != role for view in views):
            refused[role] = _why_refused(role, family, in_block, parts, labels)
    return Record(tuple(tensors), tuple(views), refused)


def role_of(family: Family, in_block: bool, stored: str) -> tuple[str | None, str]:
    """Split the stored name of a per-expert tensor into its role, None if the name has none, and the suffix."""
    module, _, suffix = stored.partition(".")
    return (family if in_block else UNKNOWN).roles.get(module), suffix


def _roles_with_scales(family: Family, in_block: bool, parts: Iterable[Part]) -> set[str | None]:
    """Roles whose weight must be multiplied by a sibling: then even a bf16 weight is not the weight."""
    found = set()
    for part in parts:
        role, suffix = role_of(family, in_block, part.stored)
        if not part.fused and "scale" in suffix and not suffix.startswith(("input", "output")):
            found.add(role)
    return found


def _label(family: Family, in_block: bool, part: Part, encoded: set[str | None]) -> str:
    role, suffix = role_of(family, in_block, part.stored)
    if role is None or not suffix:
        return part.stored
    if suffix == "weight" and part.dtype in SELF_CONTAINED and len(part.shape) == 2 and role not in encoded:
        return role
    return f"{role}.{suffix}"


def _fused_views(
    how: Fused, part: Part, tensor: int, dtype: np.dtype[Any], shape: tuple[int, ...], where: str
) -> Iterable[View]:
    """Labelled parts of a fused tensor: transpose to [out, in], then deal its rows out. Blocks stay in their rows.

    Of encoded tensors a part is called role + the last word of the stored name: "gate.blocks", "gate.scales".
    """
    strides = _contiguous(shape, dtype.itemsize)
    for number, role in enumerate(how.roles):
        label = f"{role}.weight" if part.block and "." not in role else role
        if how.encoded:
            label = f"{role}.{part.stored.rpartition('_')[2]}"
        axes = 1 if label.endswith(".bias") else 2
        if len(shape) != axes and not (how.encoded and len(shape) > axes):
            raise CheckpointError(f"{where}: {part.stored} is {list(shape)} per expert; {axes} axes are expected")
        if how.transposed:
            turned, steps = shape[::-1], strides[::-1]
        else:
            turned, steps = shape, strides
        rows, odd = divmod(turned[0], len(how.roles))
        if odd:
            raise CheckpointError(f"{where}: {part.stored} is {list(shape)}: {turned[0]} rows are not gate and up")
        step = steps[0] * (len(how.roles) if how.interleaved else 1)
        offset = number * steps[0] * (1 if how.interleaved else rows)
        yield View(label, tensor, offset, dtype, (rows, *turned[1:]), (step, *steps[1:]))


def _carrier(part: Part) -> tuple[np.dtype[Any] | None, tuple[int, ...]]:
    """Dtype and shape of an array over the whole part; no dtype if the type is unknown."""
    if part.block is not None:
        *rows, width = part.shape or (1,)
        return ggml.carrier(part.dtype), (*rows, width // part.block.elements * part.block.nbytes)
    if part.dtype not in DTYPES:
        return None, (part.nbytes,)
    return DTYPES[part.dtype].carrier, carrier_shape(part.dtype, part.shape, part.nbytes)


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _view_order(view: View) -> int:
    """Gate first, then up, down, and what belongs to no role; sorting is stable."""
    role, _, suffix = view.label.partition(".")
    return 2 * ROLES.index(role) + bool(suffix) if role in ROLES else 2 * len(ROLES)


def _check_fit(views: Iterable[View], where: str) -> None:
    """Gate and up are [inter, hidden], down [hidden, inter]: a layout read in the wrong orientation seldom fits."""
    seen = {view.label: view.shape for view in views if view.label in ROLES}
    turned = {label: shape if label != "down" else shape[::-1] for label, shape in seen.items()}
    if len(set(turned.values())) > 1:
        shapes = ", ".join(f"{label} {list(shape)}" for label, shape in seen.items())
        raise CheckpointError(f"{where}: {shapes} do not fit each other as [inter, hidden] and [hidden, inter]")


def _check_blocks(views: Iterable[View], parts: Iterable[Part], where: str) -> None:
    """The same for arrays whose rows are blocks: by elements, not by bytes."""
    sizes = {part.dtype: part.block for part in parts if part.block is not None}
    seen: list[View] = []
    for view in views:
        role, _, suffix = view.label.partition(".")
        block = sizes.get(ggml.type_of(view.dtype) or "")
        if role in ROLES and suffix == "weight" and block is not None and len(view.shape) == 2:
            elements = view.shape[1] // block.nbytes * block.elements
            seen.append(replace(view, label=role, shape=(view.shape[0], elements)))
        elif view.label in ROLES:
            seen.append(view)
    _check_fit(seen, where)


def _why_refused(role: str, family: Family, in_block: bool, parts: Sequence[Part], labels: Sequence[str]) -> str:
    roles: tuple[str | None, ...]
    quoted = ", ".join(f'"{label}"' for label in labels)
    mine = []
    for label, part in zip(labels, parts, strict=True):
        if part.fused:
            roles = family.fused[part.stored].roles if in_block and part.stored in family.fused else ()
        else:
            roles = (role_of(family, in_block, part.stored)[0],)
        if role in roles:
            mine.append((label, part.dtype))
    if mine:
        stored = ", ".join(f'"{label}" ({dtype})' for label, dtype in mine)
        return f'"{role}" is stored encoded, as {stored}: use fastcache.linear(x, lease, "{role}")'
    return f'which tensor is the "{role}" is not known for family "{family.name}"; the labels are {quoted}'
