"""JSON that repeats one form, read as columns: where its strings begin and end, what stands between, which numbers.

NumPy over the bytes, because a large checkpoint repeats the form half a million times. Knows no format; whoever calls
checks every byte between the strings, so that what passes is JSON of that form and nothing else. Imports numpy.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

PADDING = bytes(32)  # what must follow the text: places are looked at before it is known that they are in it
_QUOTE, _SPACE = 0x22, 0x20
_MOST_DIGITS = 18  # of a number that is sure to fit into 63 bits


def read_padded(path: str) -> bytearray:
    """Return the bytes of a file, and PADDING."""
    with open(path, "rb") as file:
        raw = bytearray(os.fstat(file.fileno()).st_size + len(PADDING))
        del raw[file.readinto(raw) :]
    raw += PADDING
    return raw


class Columns:
    """The bytes of a text, and the places of its quotes. `raw` is the text and as many bytes as PADDING has."""

    def __init__(self, raw: bytes | memoryview) -> None:
        self._bytes = np.frombuffer(raw, np.uint8)
        self._words: Array = np.ndarray(len(raw) - 7, "<u8", raw, strides=(1,))  # the eight bytes from every byte on
        self.text = self._bytes[: len(raw) - len(PADDING)]
        self.quotes = np.flatnonzero(self.text == _QUOTE)

    def controls(self) -> int:
        """Count the bytes below a space, which a JSON string must not contain."""
        return int(np.count_nonzero(self.text < _SPACE))

    def has(self, text: bytes, at: Array) -> bool:
        """Say whether `text` stands at every place of `at`."""
        for begin, piece in _pieces(len(text)):
            wanted = np.uint64(int.from_bytes(text[begin : begin + piece], "little"))
            if ((self._words[at + begin] & _mask(piece)) != wanted).any():
                return False
        return True

    def changes(self, at: Array, length: int) -> Array:
        """Say for each place of `at` whether other bytes stand there, `length` of them, than at the place before."""
        changed = np.zeros(len(at), bool)
        changed[0] = True
        for begin, piece in _pieces(length):
            found = self._words[at + begin] & _mask(piece)
            changed[1:] |= found[1:] != found[:-1]
        return changed

    def integers(self, at: Array) -> tuple[Array, Array] | None:
        """Return the numbers (uint64) that begin at `at` and the places behind them.

        None unless each is of the form `0|[1-9][0-9]*`, of at most 18 digits.
        """
        digit = self._bytes[at] - np.uint8(0x30)  # wraps: whatever is no digit becomes larger than 9
        if (digit > 9).any():
            return None
        value = digit.astype(np.uint64)
        end = at + 1
        zero = digit == 0
        for digits in range(1, _MOST_DIGITS + 2):
            digit = self._bytes[end] - np.uint8(0x30)
            more = digit <= 9
            if not more.any():
                return value, end
            if digits == _MOST_DIGITS or (more & zero).any():
                return None
            value = np.where(more, value * np.uint64(10) + digit, value)
            end = end + more
        return None


def _pieces(length: int) -> list[tuple[int, int]]:
    """Cut `length` bytes into pieces of eight, the last one overlapping: (begin, bytes)."""
    return [(begin, min(8, length)) for begin in (*range(0, length - 8, 8), max(0, length - 8))]


def _mask(count: int) -> np.uint64:
    return np.uint64(256**count - 1)
