"""What a file of tensors says of itself, whatever the format: names, types, shapes, places. Never the tensors' bytes.

Imports numpy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


class Identity(NamedTuple):
    """What tells a file from another at its path, and from itself before it was written to. A limit, not a proof."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int


def identity_of(status: os.stat_result) -> Identity:
    """Return the identity of a file, by its status."""
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class HeaderTensor(NamedTuple):
    """One tensor of a file."""

    dtype: str  # the format's own name
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class Header(Mapping[str, HeaderTensor]):
    """What one file holds: a read-only mapping of name to HeaderTensor, in header order.

    The columns behind it are public, because a large checkpoint has half a million tensors.

    Attributes
    ----------
    path : str
    file_size, data_start : int
        Bytes.
    metadata : mapping of str to object
        Strings, of safetensors (its `__metadata__`); scalars, strings and short lists, of GGUF.
    names : list of str
    specs : list of (dtype, shape)
        The distinct kinds of tensor in this file.
    spec : ndarray of int32
        Per tensor, its index in `specs`.
    offset, nbytes : ndarray of int64
        Per tensor; `offset` counts from the start of the file.
    identity : Identity or None
        Of the file that was read; None if nobody said.
    """

    __slots__ = (
        *("_row", "data_start", "file_size", "identity", "metadata", "names", "nbytes", "offset", "path", "spec"),
        "specs",
    )

    def __init__(
        self,
        path: str,
        file_size: int,
        data_start: int,
        metadata: Mapping[str, Any],
        names: list[str],
        specs: list[tuple[str, tuple[int, ...]]],
        spec: np.ndarray,
        offset: np.ndarray,
        nbytes: np.ndarray,
        identity: Identity | None = None,
    ) -> None:
        self.path, self.file_size, self.data_start, self.metadata = path, file_size, data_start, metadata
        self.names, self.specs, self.spec, self.offset, self.nbytes = names, specs, spec, offset, nbytes
        self.identity = identity
        self._row: dict[str, int] | None = None

    def at(self, row: int) -> HeaderTensor:
        """Return the tensor in `row` of the columns."""
        dtype, shape = self.specs[self.spec[row]]
        return HeaderTensor(dtype, shape, int(self.offset[row]), int(self.nbytes[row]))

    def __getitem__(self, name: str) -> HeaderTensor:
        if self._row is None:
            self._row = {each: row for row, each in enumerate(self.names)}
        return self.at(self._row[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"<Header of {self.path!r}: {len(self.names)} tensors, {self.file_size} bytes>"
