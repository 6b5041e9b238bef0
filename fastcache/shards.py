"""Which tensor goes where when a checkpoint is packed: files whose experts are each one aligned piece.

safetensors allows no byte between tensors, so an expert is brought to its boundary by a tensor of padding before it
(`fastcache.pad.N`, U8), and the first of a file by spaces at the end of the header, which the format allows.
Reads no tensor and writes nothing. Imports errors, formats, inventory and layout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcache.errors import UnsupportedCheckpoint
from fastcache.formats.checkpoint import Checkpoint
from fastcache.inventory import Inventory
from fastcache.layout.build import PAD_PREFIX


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: int  # of the source; -1: padding
    offset: int


@dataclass(slots=True)
class Shard:
    """A file that is to be written: its tensors in order, without a hole."""

    name: str
    entries: list[Entry]
    header: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    @property
    def spaces(self) -> int:
        """Bytes of spaces at the end of its header."""
        return len(self.header) - len(self.header.rstrip(b" "))


def plan_shards(source: Checkpoint, inventory: Inventory, align: int, shard_bytes: int) -> list[Shard]:
    """All files, the trunk's first, then the experts' in order of their keys. The same for the same arguments."""
    rows = _rows_of_experts(source, inventory)
    taken = [set[int]() for _ in source.headers]
    experts: list[list[Entry]] = []
    for k in range(len(rows)):
        members = [t for t in range(rows.shape[1]) if rows[k, t] >= 0]
        offsets = np.cumsum([0, *inventory.nbytes[k, members].tolist()])[:-1]
        if (offsets % inventory.align[k, members]).any():  # widest types first: each ends where the next may begin
            members.sort(key=lambda t: -int(inventory.align[k, t]))
        experts.append([_entry(source, int(inventory.file[k, t]), int(rows[k, t])) for t in members])
        for t in members:
            taken[int(inventory.file[k, t])].add(int(rows[k, t]))
    groups: list[list[Entry]] = []
    trunk = [
        _entry(source, file, row)
        for file, header in enumerate(source.headers)
        for row in np.argsort(header.offset, kind="stable").tolist()
        if row not in taken[file] and not header.names[row].startswith(PAD_PREFIX)
    ]
    room = 0
    for entry in trunk:
        if not groups or entry.nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(entry)
        room -= entry.nbytes
    for group in groups:
        group.sort(key=lambda entry: -(entry.nbytes // max(1, int(np.prod(entry.shape, dtype=object)))))
    room = pads = 0
    for entries in experts:
        nbytes = sum(entry.nbytes for entry in entries)
        size = -(-nbytes // align) * align
        if size > room:
            groups.append([])
            room = max(shard_bytes, size)
        elif pad := -sum(entry.nbytes for entry in groups[-1]) % align:
            groups[-1].append(Entry(f"{PAD_PREFIX}{pads}", "U8", (pad,), pad, -1, 0))
            pads += 1
        groups[-1] += entries
        room -= size
    shards = [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group) for number, group in enumerate(groups, 1)
    ]
    meta = {**source.headers[0].metadata, "fastcache.align": str(align)}
    for shard in shards:
        shard.header = _header(shard.entries, meta, align)
    return shards


def _rows_of_experts(source: Checkpoint, inventory: Inventory) -> np.ndarray[Any, np.dtype[Any]]:
    """Row of each expert's tensor in its file's header: int64 [K, T]; -1: none, or one of no bytes.

    Raises UnsupportedCheckpoint where an expert's tensor is a part of a stored one, or two experts share one.
    """
    rows = np.full(inventory.file.shape, -1, np.int64)
    for file, header in enumerate(source.headers):
        real = np.flatnonzero(header.nbytes > 0)
        order = real[np.argsort(header.offset[real])]
        mine = (inventory.file == file) & (inventory.nbytes > 0)
        if not mine.any():
            continue
        at = np.minimum(np.searchsorted(header.offset[order], inventory.offset[mine]), len(order) - 1)
        found = order[at]
        whole = (header.offset[found] == inventory.offset[mine]) & (header.nbytes[found] == inventory.nbytes[mine])
        if not whole.all() or len(np.unique(found)) < len(found):
            first = inventory.offset[mine][~whole][:1] if not whole.all() else header.offset[found[:1]]
            name = header.names[order[np.searchsorted(header.offset[order], first, "right")[0] - 1]]
            raise UnsupportedCheckpoint(
                f"{source.path}: its experts are slices of tensors that hold several of them ({name!r}): to bring the "
                "parts of one expert together would take other names, under which other tools could not load them"
            )
        rows[mine] = found
    return rows


def _entry(source: Checkpoint, file: int, row: int) -> Entry:
    header = source.headers[file]
    tensor = header.at(row)
    return Entry(header.names[row], tensor.dtype, tuple(tensor.shape), tensor.nbytes, file, tensor.offset)


def _header(entries: Sequence[Entry], meta: dict[str, Any], align: int) -> bytes:
    found: dict[str, Any] = {"__metadata__": meta}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.nbytes
        found[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text
