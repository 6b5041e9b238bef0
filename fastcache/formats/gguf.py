"""GGUF: a file's header -> named tensors with type, shape and place. Never the tensors' bytes.

The gguf package's reader makes an array of every token of a vocabulary; this one steps over what is not needed and
trusts no count, no length and no offset before it was held to the size of the file. It takes what llama.cpp takes, and

* bytes between tensors and after the last one that belong to none (llama.cpp wants tensors in order, without holes);
* names of up to 65,535 bytes (llama.cpp: 63) and arrays of arrays.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Imports formats.header, formats.ggml and errors.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

import numpy as np

from fastcache.errors import CheckpointError, CheckpointHeaderError, CheckpointTruncated, UnsupportedCheckpoint
from fastcache.formats import ggml
from fastcache.formats.header import Header, identity_of

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER_BYTES: Final = 256 << 20
"""The largest vocabularies take 20 MB."""
ALIGNMENT: Final = 32  # unless general.alignment says otherwise

_WINDOW = 1 << 20
_MAX_NAME = 65_535
_MAX_STRING = 4_096  # longer values (licences, chat templates) are stepped over
_MAX_LIST = 1_024  # so are longer arrays, and those of strings: vocabularies
_MAX_DIMS = 4
_MAX_DEPTH = 8  # arrays of arrays
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_LEAST_PAIR = 8 + 4 + 1  # bytes: an empty key, its type, one byte
_LEAST_TENSOR = 8 + 4 + 4 + 8  # an empty name, no axes, type, offset


class _Cursor:
    """Reads forward through a file, a window at a time, and never past its end."""

    def __init__(self, file: BinaryIO, path: str, size: int) -> None:
        self._file, self.path, self._size = file, path, size
        self._window, self._start, self._at = b"", 0, 0  # _at counts from the window's start

    def tell(self) -> int:
        return self._start + self._at

    def check(self, nbytes: int, what: str) -> None:
        """Refuse to go `nbytes` further if the file, or a header's limit, ends before."""
        end = self.tell() + nbytes
        if end > self._size:
            raise CheckpointTruncated(
                f"{self.path}: truncated, or no GGUF header: {what} at byte {self.tell()} needs {nbytes} bytes, "
                f"{self._size - self.tell()} are left of {self._size}; download it again if it should be longer"
            )
        if end > MAX_HEADER_BYTES:
            raise CheckpointHeaderError(
                f"{self.path}: {what} at byte {self.tell()} makes the header larger than {MAX_HEADER_BYTES} bytes"
            )

    def take(self, nbytes: int, what: str) -> bytes:
        if self._at + nbytes > len(self._window):
            self.check(nbytes, what)
            self._start, self._at = self.tell(), 0
            self._file.seek(self._start)
            self._window = self._file.read(max(nbytes, _WINDOW))
            if len(self._window) < nbytes:
                raise CheckpointTruncated(f"{self.path}: it shrank while its header was read")
        self._at += nbytes
        return self._window[self._at - nbytes : self._at]

    def skip(self, nbytes: int, what: str) -> None:
        if self._at + nbytes > len(self._window):
            self.check(nbytes, what)
            self._start, self._at, self._window = self.tell() + nbytes, 0, b""
        else:
            self._at += nbytes

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings: most of the work of opening a file with a vocabulary."""
        length_of = _U64.unpack_from
        while count:
            window, at = self._window, self._at
            last = len(window) - 8
            while count and at <= last:
                at += 8 + length_of(window, at)[0]
                count -= 1
            self.skip(at - self._at, what)  # it may lie anywhere
            if count:
                self.take(8, what)
                self._at -= 8

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def text(self, what: str) -> str:
        length = self.u64(what)
        if length > _MAX_NAME:
            self.check(length, what)
            raise CheckpointHeaderError(f"{self.path}: {what} is {length} bytes long, above {_MAX_NAME}")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointHeaderError(f"{self.path}: {what} is not UTF-8: {raw[:40]!r}") from None


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of the GGUF file `path`.

    Parameters
    ----------
    path : path-like
        A regular file, little-endian, of version 2 or 3.

    Returns
    -------
    Header
        Shapes as NumPy has them (outermost first). `metadata` has the pairs of the header that are scalars, strings
        up to 4,096 bytes, or arrays of up to 1,024 numbers.

    Raises
    ------
    CheckpointTruncated
        The file ends before its header, or before a tensor.
    CheckpointHeaderError
        The header is not what the format allows, or above 256 MiB; or the file is something else.
    UnsupportedCheckpoint
        Another version, big-endian, or a tensor type that the installed gguf package does not know.
    OSError
        The file cannot be opened.

    Notes
    -----
    About 2 us per tensor and 0.1 us per token of a vocabulary. Memory in proportion to the tensors and the pairs that
    are kept.
    """
    path = os.fsdecode(path)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    with open(path, "rb") as file:
        identity = identity_of(os.fstat(file.fileno()))
        size = identity.nbytes
        cursor = _Cursor(file, path, size)
        _check_start(cursor, size)
        n_tensors, n_pairs = cursor.u64("the number of tensors"), cursor.u64("the number of metadata pairs")
        cursor.check(n_tensors * _LEAST_TENSOR + n_pairs * _LEAST_PAIR, f"{n_tensors} tensors and {n_pairs} pairs")
        metadata: dict[str, Any] = {}
        seen: set[str] = set()
        alignment = ALIGNMENT
        for number in range(n_pairs):
            key = cursor.text(f"metadata key {number}")
            if key in seen:
                raise CheckpointHeaderError(f"{path}: duplicate metadata key {key!r}")
            seen.add(key)
            kind = cursor.u32(f"the type of {key!r}")
            value = _value(cursor, kind, key, 0)
            if key == "general.alignment":
                alignment = _alignment(path, kind, value)
            if value is not None:
                metadata[key] = value
        header = _tensors(cursor, size, n_tensors, alignment, metadata)
    header.identity = identity
    return header


def _check_start(cursor: _Cursor, size: int) -> None:
    path = cursor.path
    start = cursor.take(min(size, 8), "the start")
    if start[:4] != MAGIC[: len(start)] or not start:
        hint = ": it is a Git-LFS pointer, run `git lfs pull`" if start.startswith(b"version ") else ""
        raise CheckpointHeaderError(f"{path}: not a GGUF file{hint} (it starts with {start[:4]!r}); download it again")
    if len(start) < 8:
        raise CheckpointTruncated(f"{path}: {size} bytes, and the start of a GGUF file alone takes 24")
    (version,) = _U32.unpack_from(start, 4)
    if version and not version & 0xFFFF:
        raise UnsupportedCheckpoint(f"{path}: big-endian GGUF is not supported; convert it (gguf-convert-endian)")
    if version not in VERSIONS:
        raise UnsupportedCheckpoint(f"{path}: GGUF version {version} is not supported, only 2 and 3")


def _value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    """Step over a value; return it if it is short enough to keep, else None."""
    what = f"the value of {key!r}"
    if kind in _SCALARS:
        return _SCALARS[kind].unpack(cursor.take(_SCALARS[kind].size, what))[0]
    if kind == _STRING:
        length = cursor.u64(what)
        if length > _MAX_STRING:
            cursor.skip(length, what)
            return None
        return cursor.take(length, what).decode("utf-8", "replace")
    if kind != _ARRAY:
        raise CheckpointHeaderError(f"{cursor.path}: {what} has the unknown type {kind}")
    inner, count = cursor.u32(what), cursor.u64(what)
    if inner in _SCALARS:
        scalar = _SCALARS[inner]
        if count > _MAX_LIST:
            cursor.skip(count * scalar.size, what)
            return None
        return [each for (each,) in scalar.iter_unpack(cursor.take(count * scalar.size, what))]
    if inner == _STRING:
        cursor.check(8 * count, what)
        cursor.skip_strings(count, what)
    elif inner == _ARRAY and depth < _MAX_DEPTH:
        cursor.check(12 * count, what)
        for _ in range(count):
            _value(cursor, _ARRAY, key, depth + 1)
    else:
        raise CheckpointHeaderError(f"{cursor.path}: {what} is an array of the unknown type {inner}")
    return None


def _alignment(path: str, kind: int, value: Any) -> int:
    if kind != _UINT32 or value <= 0 or value & (value - 1):
        raise CheckpointHeaderError(
            f"{path}: general.alignment is {value!r} of type {kind}, not a power of two of type {_UINT32} (uint32)"
        )
    return int(value)


def _tensors(cursor: _Cursor, size: int, count: int, alignment: int, metadata: Mapping[str, Any]) -> Header:
    path, type_names, type_blocks = cursor.path, ggml.names(), ggml.blocks()
    cursor.check(count * _LEAST_TENSOR, f"{count} tensors")
    names: list[str] = []
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    spec: list[int] = []
    begins: list[int] = []
    sizes: list[int] = []
    for number in range(count):
        name = cursor.text(f"the name of tensor {number}")
        axes = cursor.u32(f"tensor {name!r}")
        if axes > _MAX_DIMS:
            raise CheckpointHeaderError(f"{path}: tensor {name!r} has {axes} axes, above {_MAX_DIMS}")
        *dims, kind, begin = struct.unpack(f"<{axes}QIQ", cursor.take(8 * axes + 12, f"tensor {name!r}"))
        dtype = type_names.get(kind)
        if dtype is None or dtype not in type_blocks:
            raise UnsupportedCheckpoint(
                f"{path}: tensor {name!r} has ggml type {kind}, which the installed gguf package does not know: it was "
                f"removed from the format, or is newer than the package (pip install -U gguf)"
            )
        block = type_blocks[dtype]
        row = dims[0] if dims else 1
        if row % block.elements:
            raise CheckpointHeaderError(
                f"{path}: tensor {name!r}: rows of {row} elements are no whole number of {dtype}'s blocks of "
                f"{block.elements}"
            )
        names.append(name)
        spec.append(numbers.setdefault((dtype, tuple(reversed(dims))), len(numbers)))
        begins.append(begin)
        sizes.append(math.prod(dims) // block.elements * block.nbytes)
    if len(set(names)) < count:
        twice = Counter(names).most_common(1)[0][0]
        raise CheckpointHeaderError(f"{path}: duplicate tensor: {twice!r} appears more than once")
    data_start = -(-cursor.tell() // alignment) * alignment
    _check_places(path, size, data_start, alignment, names, begins, sizes)
    offset = np.array(begins, np.int64) + data_start
    nbytes = np.array(sizes, np.int64)
    _check_overlaps(path, names, offset, nbytes)
    return Header(path, size, data_start, metadata, names, list(numbers), np.array(spec, np.int32), offset, nbytes)


def _check_places(
    path: str, size: int, data_start: int, alignment: int, names: list[str], begins: list[int], sizes: list[int]
) -> None:
    """Hold each tensor to the file's end, in Python's integers: nothing wraps."""
    needed = 0
    for name, begin, nbytes in zip(names, begins, sizes, strict=True):
        if begin % alignment:
            raise CheckpointHeaderError(
                f"{path}: tensor {name!r} begins at {begin}, which is no multiple of the alignment {alignment}"
            )
        needed = max(needed, data_start + begin + nbytes)
    if needed > size:
        first = next(n for n, b, s in zip(names, begins, sizes, strict=True) if data_start + b + s > size)
        raise CheckpointTruncated(
            f"{path}: truncated: {needed} bytes needed, {size} present ({needed - size} missing; the first tensor that "
            f"is not whole is {first!r}); download it again"
        )


def _check_overlaps(path: str, names: list[str], offset: np.ndarray, nbytes: np.ndarray) -> None:
    order = np.lexsort((nbytes, offset))
    order = order[nbytes[order] > 0]
    ends = (offset + nbytes)[order]
    wrong = np.flatnonzero(ends[:-1] > offset[order][1:])
    if len(wrong):
        one, two = order[wrong[0]], order[wrong[0] + 1]
        places = ", ".join(f"{names[i]!r} [{offset[i]}, {offset[i] + nbytes[i]}]" for i in (one, two))
        raise CheckpointHeaderError(f"{path}: tensors overlap: {places}")
