"""model.safetensors.index.json and headers that agree, found out without parsing half a million names.

An index in the usual form (sorted names, files whose names are equally long) is cut into runs of tensors of one file.
What each run must look like follows from the headers, so text is compared with text. Whatever is of another form, or
does not agree, is for the caller to parse and to explain. Imports formats._columns and formats.header.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fastcache.formats._columns import PADDING, Columns
from fastcache.formats.header import Header

_KEY = b'"weight_map"'
_BLANK = re.compile(rb"[ \t\r\n]*")
_COLON, _COMMA = re.compile(rb'"[ \t\r\n]*:[ \t\r\n]*"'), re.compile(rb'"[ \t\r\n]*,[ \t\r\n]*"')


class Index:
    """The entries of a weight_map, `"name": "file"` with one form of space between; see `scan_index`.

    Attributes
    ----------
    files : list of str
        The names of the files, in order. Nothing is known of them but that they are strings of JSON.
    """

    def __init__(self, found: Columns, colon: bytes, comma: bytes) -> None:
        self._text, self._entries = found.text.data, found.quotes.reshape(-1, 4)
        self._colon, self._comma = colon.decode("ascii"), comma.decode("ascii")
        begin = self._entries[:, 2] + 1
        self._starts = np.flatnonzero(found.changes(begin, int(self._entries[0, 3] - begin[0])))
        self._file = [
            str(self._text[a + 1 : b], "ascii") for a, b in self._entries[self._starts, 2:].tolist()
        ]  # of each run
        self.files = sorted(set(self._file))

    def agrees(self, headers: Sequence[Header]) -> bool:
        """Say whether the index names exactly the tensors of `headers`, in each its own; they are in `files`' order.

        False may also mean that its names are not sorted.
        """
        count = len(self._entries)
        if sum(map(len, headers)) != count or len(set().union(*(header.names for header in headers))) != count:
            return False
        runs: dict[str, list[tuple[int, int]]] = defaultdict(list)
        starts: list[int] = self._starts.tolist()
        for run in zip(self._file, starts, [*starts[1:], count], strict=True):
            runs[run[0]].append(run[1:])
        for file, header in zip(self.files, headers, strict=True):
            names, at = sorted(header.names), 0
            behind = f"{self._colon}{file}"
            for first, last in runs[file]:
                mine = names[at : at + last - first]
                expected = f'"{(behind + self._comma).join(mine)}{behind}"'
                stands = self._text[self._entries[first, 0] : self._entries[last - 1, 3] + 1]
                if len(mine) != last - first or not expected.isascii() or bytes(stands) != expected.encode():
                    return False
                at += last - first
        return True


def scan_index(raw: bytearray) -> Index | None:
    """Return the index in `raw`, which must end in PADDING, if it is JSON of the usual form; None for any other."""
    key = raw.find(_KEY)
    opening = raw.find(b"{", key)
    closing = raw.find(b"}", opening)
    if key < 0 or opening < 0 or closing < 0 or b"\\" in raw or not raw.isascii():
        return None
    if not _is_top(raw[:opening], raw[closing + 1 : -len(PADDING)]):
        return None
    return _entries(Columns(memoryview(raw)[opening + 1 : closing + len(PADDING)]))


def _is_top(before: bytearray, behind: bytearray) -> bool:
    """Say whether an object between these two, whatever it holds, is the one "weight_map" of the JSON."""
    mark = "fastcache: the object"
    if mark.encode() in before + behind:
        return False
    text = before.decode("ascii") + json.dumps(mark) + behind.decode("ascii")
    try:
        top = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return False
    return type(top) is tuple and [value for key, value in top if key == "weight_map"] == [mark]


def _entries(found: Columns) -> Index | None:
    """Return the index, if every byte between the quotes is as JSON has it, and none in them needs unescaping."""
    count, rest = divmod(len(found.quotes), 4)
    if not count or rest:
        return None
    quote, text = found.quotes.reshape(count, 4), found.text.data
    colon = bytes(text[quote[0, 1] : quote[0, 2] + 1])
    comma = bytes(text[quote[0, 3] : quote[1, 0] + 1]) if count > 1 else b'","'
    around = bytes(text[: quote[0, 0]]), bytes(text[quote[-1, 3] + 1 :])
    if not all(map(_BLANK.fullmatch, around)) or not _COLON.fullmatch(colon) or not _COMMA.fullmatch(comma):
        return None
    if max(len(colon), len(comma)) > len(PADDING):
        return None
    if not found.has(colon, quote[:, 1]) or not found.has(comma, quote[:-1, 3]):
        return None
    between = (colon, count), (comma, count - 1), *((each, 1) for each in around)
    if found.controls() != sum(times * sum(byte < 0x20 for byte in each) for each, times in between):
        return None  # there are some in a name
    lengths = quote[:, 3] - quote[:, 2]
    return Index(found, colon, comma) if (lengths == lengths[0]).all() else None
