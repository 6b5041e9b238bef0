"""Numbers as people write them: "8GiB", "512 MB", 4096; integers, True being none. Errors say what was wrong."""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

HUGE = 2 << 20  # bytes of a huge page
_UNITS = {"": 1, "b": 1}
for _i, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_i
    _UNITS[_letter + "b"] = 1000**_i
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(value: object, what: str = "size") -> int:
    """Return `value` in bytes.

    An integer counts bytes. A string is a number and a unit: KiB, MiB, GiB, TiB (or K, M, G, T) are powers of 1024,
    kB, MB, GB, TB powers of 1000.

    Raises
    ------
    TypeError
        For a bool, a float or anything else that is neither an integer nor a string.
    ValueError
        For a negative number, an unknown unit, or text that is no size. The message starts with `what`.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{what} {value!r} is not a size: give bytes or a number with a unit, like 8GiB or 512MB")
        nbytes = int(exact(match[1]) * _UNITS[match[2].lower()])
        if nbytes >= 2**63:
            raise ValueError(f"{what} {value!r} is larger than 8 EiB")
        return nbytes
    if isinstance(value, bool):
        raise TypeError(f"{what} must be bytes as an integer, or a string like '8GiB'; got {value!r}")
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{what} must be bytes as an integer, or a string like '8GiB'; got {type(value).__name__}"
        ) from None
    if size < 0:
        raise ValueError(f"{what} must not be negative; got {size}")
    if size >= 2**63:
        raise ValueError(f"{what} {size} is larger than 8 EiB")
    return size


def exact(text: str) -> Fraction:
    """Return the number that decimal digits say, of any length: 29 % of 100 are 29, where a float makes it 28."""
    return Fraction(Decimal(text))


def whole(name: str, value: Any, more: str = "") -> int:
    """Return an integer that a caller gave; raise TypeError for anything else, True and False too."""
    try:
        if is_flag(value):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer{more and f', {more}'}; got {value!r}") from None


def is_flag(value: object) -> bool:
    """Whether it is True or False, Python's or NumPy's: 1 and 0 to float() and index(), and hardly meant so."""
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", None) == "b"


def format_bytes(size: int) -> str:
    """Return `size` in bytes as people read it: "4.5 MiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{int(value)} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def whole_huge(nbytes: int) -> int:
    """Return how many of `nbytes` whole huge pages can hold; what is left is less than one."""
    return nbytes // HUGE * HUGE
