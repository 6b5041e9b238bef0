"""Tensor names -> rows: which tensor belongs to which layer, expert and stored name. Knows no meaning of a tensor.

Imports numpy, formats and layout.families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import numpy as np

from fastcache.formats.header import Header
from fastcache.layout.families import Family

LAYER = re.compile(r"(?:(.*?)\.)?(?:layers|blocks)\.([0-9]{1,6})(?:\.(.*))?", re.DOTALL)
EXPERT_NUMBER = re.compile(r"[0-9]{1,6}")

_AT_A_TIME = 512  # names: what is made of them stays in the CPU's cache and does not wake the garbage collector
FUSED = -1  # in Rows.expert: the tensor holds a part of every expert


class Kind(NamedTuple):
    """What the tensors of a column share: all of the name but the layer and the expert."""

    prefix: str  # before "layers." (DBRX: "blocks.")
    block: str  # from the layer to the expert's number, or to the fused name
    stored: str  # the rest
    fused: bool


class Rows(NamedTuple):
    """One row per tensor that may be an expert's, in the order of the files and of their headers."""

    kinds: list[Kind]
    kind: np.ndarray  # int32 [n], index into kinds
    layer: np.ndarray  # int32 [n]
    expert: np.ndarray  # int32 [n]
    file: np.ndarray  # int32 [n]
    row: np.ndarray  # int32 [n], in that file's header

    def where(self, mask: np.ndarray) -> Rows:
        return Rows(self.kinds, *(column[mask] for column in self[1:]))


def find_rows(headers: Iterable[Header], families: Iterable[Family]) -> Rows:
    """Return a row for each tensor that is named like an expert's, by the general form or by a family's fused names.

    Rows are in the order of the files and of their headers. What stands before ".experts." and what stands behind
    repeats, so each of these texts is looked at once; the rest is columns.
    """
    fused_pattern = _fused_pattern(families)
    places, tails = _Places(), _Tails()
    columns: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int32),) * 4]  # place, tail, file, row
    for file, header in enumerate(headers):
        for first in range(0, len(header), _AT_A_TIME):
            names = header.names[first : first + _AT_A_TIME]
            heads, _, behind = zip(*map(str.partition, names, repeat(".experts.")), strict=True)
            place = np.fromiter(map(places.__getitem__, heads), np.int32, len(names))
            tail = np.fromiter(map(tails.__getitem__, behind), np.int32, len(names))
            if fused_pattern is not None:
                for at in np.flatnonzero(tail < 0).tolist():
                    match = None if ".experts." in names[at] else fused_pattern.fullmatch(names[at])
                    if match is not None:
                        place[at] = places.add(match[1] or "", int(match[2]), match[3])
                        tail[at] = tails.add(FUSED, match[4])
            row = np.flatnonzero((place >= 0) & (tail >= 0))
            columns.append((place[row], tail[row], np.full(len(row), file, np.int32), (row + first).astype(np.int32)))
    place, tail, files, row = map(np.concatenate, zip(*columns, strict=True))
    expert, stored = (np.array(column, np.int32)[tail] for column in (tails.expert, tails.stored))
    layer, block = (np.array(column, np.int32)[place] for column in (places.layer, places.block))
    kind = (block.astype(np.int64) * len(tails.names) + stored) * 2 + (expert == FUSED)
    distinct = np.unique(kind)
    blocks, stored_names = list(places.blocks), list(tails.names)
    kinds = []
    for each, fused in (divmod(code, 2) for code in distinct.tolist()):
        prefix, within = blocks[each // len(stored_names)]
        kinds.append(Kind(prefix, within, stored_names[each % len(stored_names)], bool(fused)))
    return Rows(kinds, np.searchsorted(distinct, kind).astype(np.int32), layer, expert, files, row)


class _Places(dict[str, int]):
    """What stands before ".experts." -> number of the place, -1 if that is in no layer. Other names come here too."""

    def __init__(self) -> None:
        self.layer: list[int] = []  # of each place
        self.block: list[int] = []
        self.blocks: dict[tuple[str, str], int] = {}  # prefix, path inside a layer -> number

    def __missing__(self, head: str) -> int:
        match = LAYER.fullmatch(head)
        if match is None:
            self[head] = -1
        else:
            block = f"{match[3]}.experts" if match[3] else "experts"
            self[head] = self.add(match[1] or "", int(match[2]), block)
        return self[head]

    def add(self, prefix: str, layer: int, block: str) -> int:
        self.layer.append(layer)
        self.block.append(self.blocks.setdefault((prefix, block), len(self.blocks)))
        return len(self.layer) - 1


class _Tails(dict[str, int]):
    """What stands behind ".experts." -> number of the tail, -1 if it names no tensor."""

    def __init__(self) -> None:
        self.expert: list[int] = []  # of each tail; FUSED if it does not begin with a number
        self.stored: list[int] = []
        self.names: dict[str, int] = {}  # stored name -> number

    def __missing__(self, tail: str) -> int:
        text, _, stored = tail.partition(".")
        if EXPERT_NUMBER.fullmatch(text) is None:
            self[tail] = self.add(FUSED, tail)
        else:
            self[tail] = self.add(int(text), stored)
        return self[tail]

    def add(self, expert: int, stored: str) -> int:
        if not stored:
            return -1
        self.expert.append(expert)
        self.stored.append(self.names.setdefault(stored, len(self.names)))
        return len(self.expert) - 1


def _fused_pattern(families: Iterable[Family]) -> re.Pattern[str] | None:
    """Fused names of blocks that are not called experts, which the general form cannot see."""
    rows = [family for family in families if family.fused and not family.block.endswith("experts")]
    if not rows:
        return None
    block = "|".join(re.escape(family.block) for family in rows)
    stored = "|".join(re.escape(name) for family in rows for name in family.fused)
    return re.compile(rf"(?:(.*?)\.)?layers\.([0-9]{{1,6}})\.({block})\.({stored})", re.DOTALL)
