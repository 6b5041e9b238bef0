"""safetensors: a file's header -> named tensors with dtype, shape and place. Never the tensors' bytes.

The checks are those of the reference implementation (safetensors 0.8.0, `Metadata::validate`): a header that it refuses
is refused here, and the other way round, except that

* a key that appears twice is refused even if both entries agree (the reference keeps the last);
* a dtype that the table lacks is listed, and refused when it is used (the reference refuses the file);
* a tensor written as an array `["F32", [2], [0, 8]]`, or its dtype as `{"F32": null}`, is refused (the reference takes
  both; no writer makes them).

Format: https://github.com/huggingface/safetensors#format. Imports formats.header, formats.dtypes and errors.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import Any, NoReturn

import numpy as np

from fastcache.errors import CheckpointError, CheckpointHeaderError, CheckpointTruncated, UnsupportedCheckpoint
from fastcache.formats import _header_json
from fastcache.formats.header import Header, identity_of

MAX_HEADER_BYTES = 100_000_000  # the reference's limit

_MAGIC = (
    (b"version https://git-lfs", "it is a Git-LFS pointer, not the file itself: run `git lfs pull`"),
    (b"\x1f\x8b", "it is gzip-compressed: unpack it"),
    (b"PK\x03\x04", "it is a zip archive (PyTorch's .bin and .pt are): convert it to safetensors"),
    (b"\x80\x02}", "it looks like a Python pickle: convert it to safetensors"),
    (b"\x80\x02c", "it looks like a Python pickle: convert it to safetensors"),
    (b"\x80\x04\x95", "it looks like a Python pickle: convert it to safetensors"),
    (b"\x80\x05\x95", "it looks like a Python pickle: convert it to safetensors"),
    (b"<", "it looks like a web page saved in place of the file: download it again"),
    (b"{", "it starts like JSON without the 8-byte length (an error message saved as a file?): download it again"),
)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of the safetensors file `path`.

    Parameters
    ----------
    path : path-like
        A regular file. Only its first bytes are read, its size is taken from the file system.

    Raises
    ------
    CheckpointTruncated
        The file ends before its header, or before its last tensor.
    CheckpointHeaderError
        The header is not what the format allows; or the file is something else, which the message names.
    UnsupportedCheckpoint
        The file is GGUF, whatever its name says.
    OSError
        The file cannot be opened.

    Notes
    -----
    Takes about 2 us per tensor, and memory in proportion to the header, never to a length that the file claims.
    """
    path = os.fsdecode(path)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    with open(path, "rb") as file:
        identity = identity_of(os.fstat(file.fileno()))
        size = identity.nbytes
        start = file.read(64)
        if len(start) < 8:
            raise CheckpointTruncated(
                f"{path}: {size} bytes, and the length of a safetensors header alone takes 8; download it again"
            )
        (length,) = struct.unpack_from("<Q", start)
        if length > MAX_HEADER_BYTES:
            _not_safetensors(
                path,
                start,
                f"its first 8 bytes claim a header of {length} bytes, above the format's {MAX_HEADER_BYTES}",
            )
        if 8 + length > size:
            text = f"truncated, or no safetensors file: 8 + {length} bytes of header needed, {size} present"
            _not_safetensors(path, start, text, CheckpointTruncated)
        file.seek(8)
        raw = file.read(length)
    if len(raw) < length:
        raise CheckpointTruncated(f"{path}: it shrank while its header was read: {length} bytes wanted, {len(raw)} got")
    try:
        parsed = _header_json.parse(raw)
    except _header_json.Refused as error:
        if raw.lstrip(b" \t\r\n")[:1] != b"{":
            _not_safetensors(path, start, str(error))
        raise CheckpointHeaderError(f"{path}: {error}") from None
    del raw
    header = _validated(path, size, 8 + length, parsed)
    header.identity = identity
    return header


def _not_safetensors(
    path: str, start: bytes, text: str, kind: type[CheckpointError] = CheckpointHeaderError
) -> NoReturn:
    if start.startswith(b"GGUF"):
        raise UnsupportedCheckpoint(f"{path}: a GGUF file under another name; rename it to .gguf")
    for magic, meaning in _MAGIC:
        if start.lstrip().startswith(magic):
            raise CheckpointHeaderError(f"{path}: not a safetensors file: {meaning} ({text})")
    raise kind(f"{path}: {text}; download it again if it should be longer")


def _validated(path: str, size: int, data_start: int, parsed: _header_json.Parsed) -> Header:
    names, begin, end = parsed.names, parsed.begin, parsed.end
    order = np.lexsort((end, begin))
    first, last = begin[order], end[order]
    expected = np.zeros_like(first)
    expected[1:] = last[:-1]
    wrong = np.flatnonzero((first != expected) | (last < first))
    if len(wrong):
        at = int(wrong[0])
        before = None if at == 0 else int(order[at - 1])
        raise CheckpointHeaderError(f"{path}: {_offsets_text(parsed, before, int(order[at]))}")
    claimed = parsed.spec_nbytes[parsed.spec]
    wrong = np.flatnonzero((claimed >= 0) & (claimed != (end - begin).astype(np.int64)))
    if len(wrong):
        row = int(wrong[0])
        dtype, shape = parsed.specs[parsed.spec[row]]
        raise CheckpointHeaderError(
            f"{path}: tensor {names[row]!r} is {dtype} {list(shape)} = {claimed[row]} bytes, but data_offsets "
            f"[{begin[row]}, {end[row]}] give it {int(end[row]) - int(begin[row])}"
        )
    data_end = data_start + (int(last[-1]) if len(last) else 0)
    if data_end > size:
        name = names[int(order[np.searchsorted(last, size - data_start, side="right")])]
        raise CheckpointTruncated(
            f"{path}: truncated: {data_end} bytes needed, {size} present ({data_end - size} missing; the first tensor "
            f"that is not whole is {name!r}); download it again"
        )
    if data_end < size:
        raise CheckpointHeaderError(
            f"{path}: {size - data_end} bytes after the last tensor: {data_end} bytes expected, {size} present"
        )
    offset = begin.astype(np.int64) + data_start
    nbytes = (end - begin).astype(np.int64)
    return Header(path, size, data_start, parsed.metadata, names, parsed.specs, parsed.spec, offset, nbytes)


def _offsets_text(parsed: _header_json.Parsed, before: int | None, row: int) -> str:
    def place(at: int) -> str:
        return f"{parsed.names[at]!r} [{parsed.begin[at]}, {parsed.end[at]}]"

    begin, end = int(parsed.begin[row]), int(parsed.end[row])
    if end < begin:
        return f"tensor {place(row)} ends before it begins"
    reached: Any = 0 if before is None else int(parsed.end[before])
    if begin > reached:
        after = "the start of the data" if before is None else f"tensor {place(before)}"
        return f"{begin - reached} bytes belong to no tensor, between {after} and tensor {place(row)}"
    other = place(row) if before is None else place(before)
    return f"tensors overlap: {other} and {place(row)}"
