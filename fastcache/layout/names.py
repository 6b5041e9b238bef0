"""Tensor names -> rows: which tensor belongs to which layer, expert and stored name. Knows no meaning of a tensor.

Imports numpy, formats and layout.families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fastcache.formats.header import Header
from fastcache.layout.families import Family

LAYER = re.compile(r"(?:(.*?)\.)?layers\.([0-9]{1,6})(?:\.(.*))?", re.DOTALL)
EXPERT_NUMBER = re.compile(r"[0-9]{1,6}")
_Tables = dict[tuple[str, str, bool], dict[str, int]]  # prefix, block, fused -> stored name -> kind

FUSED = -1  # in Rows.expert: the tensor holds a part of every expert


class Kind(NamedTuple):
    """What the tensors of a column share: all of the name but the layer and the expert."""

    prefix: str  # before "layers."
    block: str  # from the layer to the expert's number, or to the fused name
    stored: str  # the rest
    fused: bool


class Rows(NamedTuple):
    """One row per tensor that may be an expert's."""

    kinds: list[Kind]
    kind: np.ndarray  # int32 [n], index into kinds
    layer: np.ndarray  # int32 [n]
    expert: np.ndarray  # int32 [n]
    file: np.ndarray  # int32 [n]
    row: np.ndarray  # int32 [n], in that file's header

    def where(self, mask: np.ndarray) -> Rows:
        return Rows(self.kinds, *(column[mask] for column in self[1:]))


def find_rows(headers: Iterable[Header], families: Iterable[Family]) -> Rows:
    """Return a row for each tensor that is named like an expert's, by the general form or by a family's fused names."""
    fused_pattern = _fused_pattern(families)
    kinds: list[Kind] = []
    tables: _Tables = {}
    places: dict[str, _Place | None] = {}  # by all that stands before ".experts."
    numbers: dict[str, int] = {}  # text of an expert's number -> the number, FUSED if it is none
    layer: list[int] = []
    expert: list[int] = []
    kind: list[int] = []
    row: list[int] = []
    file: list[np.ndarray] = []
    for file_number, header in enumerate(headers):
        before = len(row)
        for at, name in enumerate(header.names):
            head, found, tail = name.partition(".experts.")
            if found:
                try:
                    place = places[head]
                except KeyError:
                    place = places[head] = _place(head, tables)
                text, _, stored = tail.partition(".")
                try:
                    number = numbers[text]
                except KeyError:
                    number = numbers[text] = int(text) if EXPERT_NUMBER.fullmatch(text) else FUSED
                if number == FUSED:
                    stored = tail
            elif fused_pattern is not None and (match := fused_pattern.fullmatch(name)) is not None:
                place, number, stored = _made_place(match[1] or "", int(match[2]), match[3], tables), FUSED, match[4]
            else:
                continue
            if place is None or not stored:
                continue
            table = place.fused if number == FUSED else place.split
            known = table.get(stored)
            if known is None:
                known = table[stored] = len(kinds)
                kinds.append(Kind(place.prefix, place.block, stored, number == FUSED))
            layer.append(place.layer)
            expert.append(number)
            kind.append(known)
            row.append(at)
        file.append(np.full(len(row) - before, file_number, np.int32))
    return Rows(
        kinds,
        np.array(kind, np.int32),
        np.array(layer, np.int32),
        np.array(expert, np.int32),
        np.concatenate(file) if file else np.empty(0, np.int32),
        np.array(row, np.int32),
    )


class _Place(NamedTuple):
    prefix: str
    layer: int
    block: str
    split: dict[str, int]  # stored name of a tensor per expert -> kind
    fused: dict[str, int]  # the same of fused tensors


def _place(head: str, tables: _Tables) -> _Place | None:
    """Split what stands before ".experts." into prefix, layer and block; None if it is in no layer."""
    match = LAYER.fullmatch(head)
    if match is None:
        return None
    return _made_place(match[1] or "", int(match[2]), f"{match[3]}.experts" if match[3] else "experts", tables)


def _made_place(prefix: str, layer: int, block: str, tables: _Tables) -> _Place:
    split, fused = (tables.setdefault((prefix, block, fused), {}) for fused in (False, True))
    return _Place(prefix, layer, block, split, fused)


def _fused_pattern(families: Iterable[Family]) -> re.Pattern[str] | None:
    """Fused names of blocks that are not called experts, which the general form cannot see."""
    rows = [family for family in families if family.fused and not family.block.endswith("experts")]
    if not rows:
        return None
    block = "|".join(re.escape(family.block) for family in rows)
    stored = "|".join(re.escape(name) for family in rows for name in family.fused)
    return re.compile(rf"(?:(.*?)\.)?layers\.([0-9]{{1,6}})\.({block})\.({stored})", re.DOTALL)
