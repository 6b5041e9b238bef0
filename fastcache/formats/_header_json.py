"""The JSON of a safetensors header -> checked columns. Knows no file; offsets are as the header writes them.

Two ways. The fast one is for headers as the common writers make them, and looks at columns of bytes; it answers only
if it has accounted for every byte. Whatever looks different goes through the slow one, which parses JSON, checks every
value's type and says what is wrong with it. JSON is read as the reference's parser (serde_json) reads it, where
Python's would be more liberal: NaN, lone surrogates, -0, 1e400.
Imports numpy, formats.dtypes and formats._columns.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fastcache.formats._columns import PADDING, Columns
from fastcache.formats.dtypes import DTYPES

_MAX_DEPTH = 127  # of arrays and objects, the reference parser's limit
_UINT64 = 2**64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_FIELDS = ("dtype", "shape", "data_offsets")

_METADATA = re.compile(r'\{"__metadata__": ?')


class Refused(Exception):
    """Why this is no header."""


class Parsed(NamedTuple):
    """Columns of a header: one row per tensor, in header order."""

    names: list[str]
    specs: list[tuple[str, tuple[int, ...]]]  # distinct (dtype, shape)
    spec_nbytes: np.ndarray  # int64 [len(specs)], -1 for a dtype that the table lacks
    spec: np.ndarray  # int32 [n]
    begin: np.ndarray  # uint64 [n]
    end: np.ndarray  # uint64 [n]
    metadata: dict[str, str]


class _Specs(dict[tuple[str, tuple[int, ...]], int]):
    """(dtype, shape) -> number, checked and sized when first met."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def __missing__(self, spec: tuple[str, tuple[int, ...]]) -> int:
        dtype, shape = spec
        if type(dtype) is not str or not all(type(dim) is int and 0 <= dim < _UINT64 for dim in shape):
            raise TypeError("not a dtype and a shape")
        self.nbytes.append(_spec_nbytes(dtype, shape))
        self[spec] = number = len(self)
        return number


def _spec_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, or -1 for an unknown dtype. Refuses what would overflow the reference's 64 bits."""
    count = 1
    for dim in shape:
        count *= dim
        if count >= _UINT64:
            raise Refused(f"shape {list(shape)} overflows: it has more than 2**64 elements")
    if dtype not in DTYPES:
        return -1
    bits = count * DTYPES[dtype].bits
    if bits >= _UINT64:
        raise Refused(f"{dtype} {list(shape)} overflows: its size in bits is above 2**64")
    if bits % 8:
        raise Refused(f"{dtype} {list(shape)} takes {bits} bits, which is no whole number of bytes")
    return bits // 8


def parse(raw: bytes) -> Parsed:
    """Return the columns of the header `raw` (without its 8 length bytes), or raise Refused."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            f"the header is not UTF-8 (byte {8 + error.start} of the file is {raw[error.start]:#04x})"
        ) from None
    return _fast(text) or _slow(text)


def _columns(
    names: list[str], specs: _Specs, spec: list[int], begin: Any, end: Any, metadata: dict[str, str]
) -> Parsed:
    return Parsed(
        names,
        list(specs),
        np.array(specs.nbytes, np.int64),
        np.array(spec, np.int32),
        np.frombuffer(begin, np.uint64) if len(begin) else np.empty(0, np.uint64),
        np.frombuffer(end, np.uint64) if len(end) else np.empty(0, np.uint64),
        metadata,
    )


def _fast(text: str) -> Parsed | None:
    """Columns of a header in one of the usual forms, compact (serde_json) or spaced (json.dumps); else None."""
    start, metadata = 1, {}
    try:
        match = _METADATA.match(text)
        if match is not None:
            pairs, start = _decoder("-0").raw_decode(text, match.end())
            metadata = _metadata(pairs)
            if _SURROGATE.search(text, 0, start):
                return None
            if text[start : start + 1] != ",":
                return None
            start += 2 if text.startswith(", ", start) else 1
        end = len(text.rstrip(" \t\r\n")) - 1
        if not text.startswith("{") or not text.startswith("}}", end - 1):
            return None
        return _entries(text[start:end], metadata)
    except (TypeError, ValueError, OverflowError, RecursionError, Refused):
        return None


def _entries(text: str, metadata: dict[str, str]) -> Parsed | None:
    """The same of `"name":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}`, again and again between commas."""
    if not text.isascii() or "\\" in text:
        return None
    space = " " if text.startswith('": {"dtype"', text.find('"', 1)) else ""
    before, between = f'":{space}{{"dtype":{space}"', f',{space}"data_offsets":{space}['
    # Each entry takes what separates it from the next along; so the last one is given that, and a next one.
    found = Columns(f'{text},{space}"'.encode() + PADDING)
    count, rest = divmod(len(found.quotes), 10)
    if not count or rest != 1 or found.quotes[0] or found.controls():
        return None
    # The quotes around name, "dtype", its value, "shape" and "data_offsets". From the value to the end of the shape is
    # the tensor's kind, of which there are few: those are looked at one by one.
    quote = found.quotes[:-1].reshape(count, 10)
    kind_end = quote[:, 8] - len(f",{space}")
    begin = found.integers(kind_end + len(between))
    if begin is None or not found.has(before.encode(), quote[:, 1]) or not found.has(between.encode(), kind_end):
        return None
    end = found.integers(begin[1] + len(f",{space}"))
    if end is None or not found.has(f",{space}".encode(), begin[1]) or not found.has(f"]}},{space}".encode(), end[1]):
        return None
    if (end[1] + len(f"]}},{space}") != found.quotes[10::10]).any():
        return None
    names = [text[a:b] for a, b in zip((quote[:, 0] + 1).tolist(), quote[:, 1].tolist(), strict=True)]
    distinct = set(names)
    if len(distinct) != len(names) or "__metadata__" in distinct:
        return None
    kinds = [text[a:b] for a, b in zip(quote[:, 4].tolist(), kind_end.tolist(), strict=True)]
    specs = _Specs()
    form = re.compile(rf'"([A-Z0-9_]+)",{space}"shape":{space}(\[[0-9, ]*\])')
    of_kind: dict[str, int] = {}
    for kind in dict.fromkeys(kinds):
        match = form.fullmatch(kind)
        if match is None:
            return None
        of_kind[kind] = specs[match[1], tuple(json.loads(match[2]))]
    return _columns(names, specs, list(map(of_kind.__getitem__, kinds)), begin[0], end[0], metadata)


def _slow(text: str) -> Parsed:
    """The same columns by way of JSON, with every type checked."""
    pairs = _load(text)
    if type(pairs) is not tuple:
        raise Refused("the header is JSON, but not an object")
    if _SURROGATE.search(text):
        _check_surrogates(pairs)
    twice, times = Counter(name for name, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if times > 1:
        raise Refused(f"duplicate key: {twice!r} appears {times} times in the header")
    metadata: dict[str, str] = {}
    specs = _Specs()
    names, spec, begins, ends = [], [], array("Q"), array("Q")
    for name, fields in pairs:
        if name == "__metadata__":
            metadata = _metadata(fields)
            continue
        try:
            dtype, shape, (begin, end) = _fields(fields)
            spec.append(specs[dtype, tuple(shape)])
        except Refused as error:
            raise Refused(f"tensor {name!r}: {error}") from None
        names.append(name)
        begins.append(begin)
        ends.append(end)
    return _columns(names, specs, spec, begins, ends, metadata)


def _decoder(text: str) -> json.JSONDecoder:
    """JSON with objects as tuples of pairs and arrays as lists: no callback per object, and duplicates survive."""

    def parse_float(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise ValueError(f"number out of range: {digits[:40]}")
        return value

    def parse_int(digits: str) -> int | float:
        return -0.0 if digits == "-0" else int(digits)

    def parse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    return json.JSONDecoder(
        object_pairs_hook=tuple,
        parse_float=parse_float,
        parse_int=parse_int if "-0" in text else None,
        parse_constant=parse_constant,
    )


def _load(text: str) -> Any:
    try:
        return _decoder(text).decode(text)
    except RecursionError:
        raise Refused("the header is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"the header is not JSON: {error}") from None


def _fields(fields: Any) -> tuple[str, list[int], list[int]]:
    if type(fields) is not tuple:
        raise Refused(f"its entry is {_shown(fields)}, not an object")
    known: dict[str, Any] = {}
    for key, value in fields:
        if key in _FIELDS:
            if key in known:
                raise Refused(f"duplicate key: {key!r} appears twice in its entry")
            known[key] = value
        else:
            _check_ignored(value)
    for key in _FIELDS:
        if key not in known:
            raise Refused(f"its entry has no {key!r}")
    if type(known["dtype"]) is not str:
        raise Refused(f"dtype is {_shown(known['dtype'])}, not a string")
    for key in ("shape", "data_offsets"):
        value = known[key]
        if type(value) is not list or not all(type(each) is int and 0 <= each < _UINT64 for each in value):
            raise Refused(f"{key} is {_shown(value)}, not an array of integers from 0 to 2**64 - 1")
    if len(known["data_offsets"]) != 2:
        raise Refused(f"data_offsets has {len(known['data_offsets'])} numbers, not two")
    return known["dtype"], known["shape"], known["data_offsets"]


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is not tuple:
        raise Refused(f"__metadata__ is {_shown(value)}, not an object")
    for key, text in value:
        if type(text) is not str:
            raise Refused(f"__metadata__[{key!r}] is {_shown(text)}, not a string")
    return dict(value)


def _check_ignored(value: Any) -> None:
    """Refuse what the reference's parser refuses even in fields that nobody reads: deep nesting and huge numbers."""
    todo = [(value, 2)]
    while todo:
        each, depth = todo.pop()
        if type(each) is list or type(each) is tuple:
            if depth + 1 > _MAX_DEPTH:
                raise Refused("the header is nested too deeply")
            inner = each if type(each) is list else [item for _, item in each]
            todo.extend((item, depth + 1) for item in inner)
        elif type(each) is int and abs(each) >= _UINT64:
            try:
                float(each)
            except OverflowError:
                raise Refused("the header is not JSON: number out of range") from None


def _check_surrogates(value: Any) -> None:
    todo = [value]
    while todo:
        each = todo.pop()
        if type(each) is list or type(each) is tuple:
            todo.extend(each)
        elif type(each) is str:
            try:
                each.encode("utf-8")
            except UnicodeEncodeError:
                raise Refused(f"the header is not JSON: {each!r} has half a surrogate pair") from None


def _shown(value: Any) -> str:
    if type(value) is tuple:
        return "an object"
    text = json.dumps(value) if not isinstance(value, list) or not any(type(v) is tuple for v in value) else "an array"
    return text if len(text) <= 60 else text[:57] + "..."
