"""All experts of a checkpoint or source as columns: where their bytes are, and what their labels show.

Owns the step from meaning (Layout, ExpertSource) to the arrays a store is made of. Imports layout, sources, errors.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastcache.errors import CheckpointError, InvalidSource
from fastcache.keys import ExpertKey
from fastcache.layout.build import build_layout
from fastcache.layout.record import Layout, Record, bytes_record
from fastcache.sources.base import MAX_NUMBER, ExpertSource, ExtentSource, ReadSource, as_key
from fastcache.sources.memory import MemorySource
from fastcache.units import whole

Array = np.ndarray[Any, np.dtype[Any]]
MAX_EXPERTS = 1 << 24  # rows of a store's tables: experts, and the gaps that a source leaves between their numbers
MAX_EXPERT_BYTES = 1 << 40


@dataclass(slots=True)
class Inventory:
    """K experts (dense keys, layer by layer), T tensors each at most."""

    layers: list[tuple[int, int]]  # (layer number, experts), ascending
    exists: Array  # bool [K]: a source may leave gaps
    file: Array  # int32 [K, T]; -1: no such tensor
    offset: Array  # int64 [K, T]
    nbytes: Array  # int64 [K, T]
    align: Array  # int64 [K, T]
    records: list[Record]
    record_of: Array  # uint16 [K]
    paths: list[str | None]
    memory: list[Any] | None = None  # a buffer per file of a MemorySource
    by_hand: bool = False  # read_expert produces the bytes
    family: str = "unknown"
    top_k: int | None = None
    trunk_bytes: int = 0
    layout: Layout | None = None
    not_indexed: Sequence[str] = field(default_factory=tuple)

    def payload(self) -> Array:
        """Return the bytes of each expert, without padding: int64 [K]."""
        if self.by_hand:
            return self.nbytes[:, 0].copy()
        return np.asarray(np.where(self.file >= 0, self.nbytes, 0).sum(axis=1))


def inventory_of(path_or_source: object) -> Inventory:
    """Return the inventory of a checkpoint path or an ExpertSource.

    Raises
    ------
    CheckpointError
        And its subclasses: the checkpoint cannot be trusted or served.
    TypeError
        It is neither a path nor an ExpertSource.
    """
    if isinstance(path_or_source, (str, os.PathLike)):
        return _of_layout(build_layout(path_or_source))
    if isinstance(path_or_source, Layout):
        return _of_layout(path_or_source)
    if isinstance(path_or_source, (ExtentSource, ReadSource)):
        return _of_source(path_or_source)
    if isinstance(path_or_source, ExpertSource):
        raise TypeError(f"{type(path_or_source).__name__} has neither extents(key) nor read_expert(key)")
    raise TypeError(
        f"fastcache.open takes a path or an ExpertSource (keys, expert_nbytes, extents or read_expert); "
        f"got {type(path_or_source).__name__}"
    )


def _of_layout(layout: Layout) -> Inventory:
    width = max((layer.file.shape[1] for layer in layout.layers.values()), default=1)
    records: list[Record] = []
    numbers: dict[int, int] = {}
    columns: dict[str, list[Array]] = defaultdict(list)
    for layer in layout.layers.values():
        mine = []
        for record in layer.records:
            if id(record) not in numbers:
                numbers[id(record)] = len(records)
                records.append(record)
            mine.append(numbers[id(record)])
        count, used = layer.file.shape
        record_of = np.asarray(mine, np.int64)[layer.record_of]
        sizes = np.zeros((len(mine), used), np.int64)
        aligns = np.ones((len(mine), used), np.int64)
        there = np.zeros((len(mine), used), bool)
        for i, record in enumerate(layer.records):
            for t, tensor in enumerate(record.tensors):
                sizes[i, t], aligns[i, t], there[i, t] = tensor.nbytes, tensor.align, True
        pad = ((0, 0), (0, width - used))
        columns["file"].append(np.pad(np.where(there[layer.record_of], layer.file, -1), pad, constant_values=-1))
        columns["offset"].append(np.pad(layer.offset, pad))
        columns["nbytes"].append(np.pad(sizes[layer.record_of], pad))
        columns["align"].append(np.pad(aligns[layer.record_of], pad, constant_values=1))
        columns["record_of"].append(record_of)
        columns["exists"].append(np.ones(count, bool))
    if len(records) > 65535:
        raise CheckpointError("experts are stored in more than 65,535 different shapes")
    return Inventory(
        layers=[(number, len(layer)) for number, layer in layout.layers.items()],
        exists=_join(columns["exists"], bool),
        file=_join(columns["file"], np.int32, width),
        offset=_join(columns["offset"], np.int64, width),
        nbytes=_join(columns["nbytes"], np.int64, width),
        align=_join(columns["align"], np.int64, width),
        records=records,
        record_of=_join(columns["record_of"], np.uint16),
        paths=list(layout.files),
        family=layout.family,
        top_k=layout.top_k,
        trunk_bytes=sum(tensor.nbytes for tensor in layout.trunk.values()),
        layout=layout,
        not_indexed=layout.not_indexed,
    )


def _join(parts: list[Array], dtype: Any, width: int | None = None) -> Array:
    if not parts:
        return np.zeros((0,) if width is None else (0, width), dtype)
    return np.concatenate(parts).astype(dtype, copy=False)


def _nbytes(source: ExtentSource | ReadSource, key: ExpertKey) -> int:
    """Return an expert's size as the source says it."""
    size = whole(f"{type(source).__name__}.expert_nbytes({tuple(key)})", source.expert_nbytes(key))
    if not 0 <= size <= MAX_EXPERT_BYTES:
        raise InvalidSource(
            f"{type(source).__name__}.expert_nbytes({tuple(key)}) must be from 0 to {MAX_EXPERT_BYTES:,}; got {size}"
        )
    return size


def _top_k(source: object) -> int | None:
    """Return how many experts a token uses in a layer, as the source says it."""
    said = getattr(source, "top_k", None)
    number = None if said is None else whole(f"{type(source).__name__}.top_k", said, "or None")
    if number is not None and not 0 < number <= MAX_NUMBER:
        raise InvalidSource(f"{type(source).__name__}.top_k must be from 1 to {MAX_NUMBER:,}; got {number}")
    return number


def _of_source(source: ExtentSource | ReadSource) -> Inventory:
    keys = sorted({as_key(key) for key in iter(source.keys())})
    counts: dict[int, int] = {}
    for layer, expert in keys:
        counts[layer] = max(counts.get(layer, 0), expert + 1)
    layers = sorted(counts.items())
    first, total = {}, 0
    for layer, count in layers:
        first[layer] = total
        total += count
    if total > MAX_EXPERTS:
        layer, count = max(layers, key=lambda each: each[1])
        raise InvalidSource(
            f"a store keeps a row for each number up to a layer's highest, {MAX_EXPERTS:,} at most, and here are "
            f"{total:,}: the highest is {(layer, count - 1)}; number experts from 0 in each layer"
        )
    paths: list[str | None] = []
    memory: list[Any] | None = None
    parts: dict[int, list[tuple[int, int, int]]] = {}
    if isinstance(source, MemorySource):
        memory = []
        for key in keys:
            parts[first[key.layer] + key.expert] = [(len(memory), 0, source.expert_nbytes(key))]
            memory.append(source.read_expert(key))
            paths.append(None)
    elif isinstance(source, ExtentSource):
        number: dict[str, int] = {}
        for key in keys:
            mine = []
            for extent in source.extents(key):
                mine.append((number.setdefault(extent.path, len(number)), extent.offset, extent.nbytes))
            if sum(part[2] for part in mine) != _nbytes(source, key):
                raise InvalidSource(
                    f"{key}: its extents add up to {sum(part[2] for part in mine)} bytes, "
                    f"expert_nbytes says {_nbytes(source, key)}"
                )
            parts[first[key.layer] + key.expert] = mine
        paths = list(number)
    else:
        for key in keys:
            parts[first[key.layer] + key.expert] = [(0, 0, _nbytes(source, key))]
    width = max((len(mine) for mine in parts.values()), default=1) or 1
    file = np.full((total, width), -1, np.int32)
    offset, nbytes = np.zeros((total, width), np.int64), np.zeros((total, width), np.int64)
    record_of, exists = np.zeros(total, np.uint16), np.zeros(total, bool)
    records: dict[tuple[int, ...], int] = {}
    for k, mine in parts.items():
        exists[k] = True
        for t, part in enumerate(mine):
            file[k, t], offset[k, t], nbytes[k, t] = part
        record_of[k] = records.setdefault(tuple(part[2] for part in mine), len(records))
    if len(records) > 65535:
        raise CheckpointError("experts come in more than 65,535 different sizes")
    return Inventory(
        layers=layers,
        exists=exists,
        file=file,
        offset=offset,
        nbytes=nbytes,
        align=np.ones((total, width), np.int64),
        records=[bytes_record(*sizes) for sizes in records],
        record_of=record_of,
        paths=paths,
        memory=memory,
        by_hand=not paths and memory is None,
        top_k=_top_k(source),
    )
