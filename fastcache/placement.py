"""Where the bytes of an expert come to lie in a slot: extents, windows, shifts, size classes.

Owns the arithmetic between a layout and the reads. Knows no store and no engine. Imports numpy only.

An extent is read as its aligned superset, the window, straight into the slot. Windows follow one another and never
overlap. A tensor that would come out misaligned for its dtype is moved down inside its own window by `shift` bytes
after arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

EXTENT = np.dtype(
    [("offset", "<i8"), ("nbytes", "<i8"), ("place", "<i8"), ("file", "<i4"), ("shift", "<i4")], align=True
)
MAX_CLASSES = 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Reads and tensor positions of K experts with at most T tensors each."""

    first: Array  # int32 [K + 1]: extents of expert k are [first[k], first[k + 1])
    extents: Array  # EXTENT [X]
    span: Array  # int64 [K]: bytes of slot used, windows whole; -1: there is no such expert
    tensors: Array  # int64 [K, T]: bytes from the slot's start to each tensor


def place(file: Array, offset: Array, nbytes: Array, align: Array, file_align: Sequence[int]) -> Placement:
    """Merge adjacent tensors into extents, and give every window its place.

    Parameters
    ----------
    file, offset, nbytes, align : arrays [K, T]
        Of each tensor: file index, byte offset, bytes (0: nothing to read), alignment in bytes. -1, ., 0, . if none.
    file_align : sequence of int
        Bytes: alignment of direct reads, per file. Powers of two.
    """
    count, width = file.shape
    window = np.asarray([*file_align, 1], np.int64)
    slot_align = int(window.max())
    file_key = np.where(nbytes > 0, file, len(file_align)).astype(np.int64)  # empty tensors sort last
    order = np.lexsort((offset, file_key), axis=1) if width > 1 else np.zeros((count, 1), np.int64)
    rows = np.arange(count)
    tensors = np.zeros((count, width), np.int64)

    # State of the extent that is open in each row.
    x_file = np.full(count, -1, np.int64)
    x_offset, x_end, x_place, x_align, x_shift = (np.zeros(count, np.int64) for _ in range(5))
    x_index = np.full(count, -1, np.int64)
    span = np.zeros(count, np.int64)
    pieces: list[tuple[Array, Array, Array, Array, Array, Array]] = []  # row, number, file, offset, place, tensor end
    members = np.full((count, width), -1, np.int64)  # extent number of each tensor
    number = np.zeros(count, np.int64)
    shifts: dict[str, Array] = {"shift": np.zeros((count, width), np.int64), "end": np.zeros((count, width), np.int64)}

    for column in range(width):
        t = order[:, column]
        f, o, n = file_key[rows, t], offset[rows, t].astype(np.int64), nbytes[rows, t].astype(np.int64)
        a = align[rows, t].astype(np.int64)
        real = f < len(file_align)
        # May it join the open extent? Adjacent, and one shift must suit both, from inside the window's head.
        least = np.minimum(np.maximum(x_align, 1), a)
        head = x_offset % window[np.where(x_file < 0, len(file_align), x_file)]
        shift = np.where(a > x_align, o % a, x_shift)
        joins = real & (f == x_file) & (o == x_end) & ((x_shift - o) % least == 0) & (shift <= head)
        opens = real & ~joins
        # A new extent starts where the last window ended.
        x_place = np.where(opens, span, x_place)
        x_file, x_offset = np.where(opens, f, x_file), np.where(opens, o, x_offset)
        x_align = np.where(opens, a, np.where(joins, np.maximum(x_align, a), x_align))
        x_shift = np.where(opens, o % a, np.where(joins, shift, x_shift))
        x_end = np.where(real, o + n, x_end)
        x_index = np.where(opens, number, x_index)
        number = number + opens
        if opens.any():
            r = np.flatnonzero(opens)
            pieces.append((r, x_index[r], f[r], o[r], x_place[r], r))
        r = np.flatnonzero(real)
        members[r, t[r]] = x_index[r]
        shifts["shift"][r, x_index[r]] = x_shift[r]
        shifts["end"][r, x_index[r]] = x_end[r]
        w = window[np.where(x_file < 0, len(file_align), x_file)]
        whole = (x_end + w - 1) // w * w - x_offset // w * w
        grown = x_place + (whole + slot_align - 1) // slot_align * slot_align
        span = np.where(real, grown, span)

    first = np.zeros(count + 1, np.int32)
    np.cumsum(number, out=first[1:])
    extents = np.zeros(int(first[-1]), EXTENT)
    for r, index, f, o, at, _ in pieces:
        i = first[r] + index
        extents["file"][i], extents["offset"][i], extents["place"][i] = f, o, at
        extents["shift"][i] = shifts["shift"][r, index]
        extents["nbytes"][i] = shifts["end"][r, index] - o
    for column in range(width):
        r = np.flatnonzero(members[:, column] >= 0)
        x = extents[first[r] + members[r, column]]
        tensors[r, column] = x["place"] + x["offset"] % window[x["file"]] - x["shift"] + offset[r, column] - x["offset"]
    return Placement(first, extents, span, tensors)


def size_classes(span: Array, page: int) -> tuple[Array, list[int]]:
    """Sort experts into at most 16 classes of slot sizes.

    Returns
    -------
    cls : uint8 [K]
        Class of each expert; 255 where there is none.
    slot_bytes : list of int
        Per class, a multiple of `page`: what its largest expert needs. Sizes within 1/32 of the largest share a class,
        or within a wider range where 16 classes would not do.
    """
    sizes = (np.maximum(span, 1) + page - 1) // page * page
    distinct = np.unique(sizes[span >= 0])[::-1]
    slack = 1 / 32
    while True:
        bounds: list[int] = []
        for size in distinct.tolist():
            if not bounds or size < bounds[-1] * (1 - slack):
                bounds.append(size)
        if len(bounds) <= MAX_CLASSES:
            break
        slack = (1 + slack) / 2
    ascending = np.asarray(bounds[::-1], np.int64)
    cls = np.where(span >= 0, len(bounds) - 1 - np.searchsorted(ascending, sizes), 255).astype(np.uint8)
    return cls, bounds


def share_slots(budget: int, slot_bytes: Sequence[int], experts: Sequence[int]) -> list[int]:
    """Divide `budget` bytes into slots per class, in proportion to the bytes of each class's experts.

    Never more slots than experts, nor more bytes than the budget. What proportion leaves over goes to the classes with
    the least of their share, one slot at a time.
    """
    total = sum(size * count for size, count in zip(slot_bytes, experts, strict=True))
    if total <= budget:
        return list(experts)
    slots = [
        min(count, budget * size * count // total // size) for size, count in zip(slot_bytes, experts, strict=True)
    ]
    left = budget - sum(size * count for size, count in zip(slot_bytes, slots, strict=True))
    while True:
        open_classes = [c for c in range(len(slots)) if slots[c] < experts[c] and slot_bytes[c] <= left]
        if not open_classes:
            return slots
        c = min(open_classes, key=lambda c: (slots[c] / experts[c], slot_bytes[c]))
        slots[c] += 1
        left -= slot_bytes[c]
