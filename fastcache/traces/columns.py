"""Arrays that grow on disk, so that reading a trace takes no memory that grows with it. Imports NumPy only."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np

from fastcache.traces.trace import Array


def scratch_directory() -> str:
    """Where temporary files go: TMPDIR if it is set, else /var/tmp, for /tmp is often memory."""
    if "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK):
        return "/var/tmp"
    return tempfile.gettempdir()


class Column:
    """A one-dimensional array that is appended to, in an unlinked temporary file."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._file = tempfile.TemporaryFile(dir=scratch_directory())  # noqa: SIM115

    def __enter__(self) -> Column:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Give the file up; what finish() returned stays."""
        self._file.close()

    def append(self, values: Any) -> None:
        """Add values at the end."""
        values = np.ascontiguousarray(values, self.dtype)
        self._file.write(values.data)
        self.length += len(values)

    def zeros(self, length: int) -> Array:
        """Return an array of that many zeros instead, to be written to in any order."""
        if length:  # room that is not there is an error here, and no signal where it is first touched
            os.posix_fallocate(self._file.fileno(), 0, length * self.dtype.itemsize)
        self.length = length
        return self.finish()

    def finish(self) -> Array:
        """Return the array, mapped; the file goes with it. Nothing can be appended any more."""
        with self._file as file:
            file.flush()
            return np.memmap(file, self.dtype, "r+") if self.length else np.zeros(0, self.dtype)


class Batches:
    """The four columns of a Trace while they grow; leaving the `with` block gives up what was not finished."""

    def __init__(self) -> None:
        self.keys, self.edges = Column(np.int32), Column(np.int64)
        self.phase, self.token = Column(np.uint8), Column(np.int64)
        self.edges.append([0])

    def __enter__(self) -> Batches:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        for column in (self.keys, self.edges, self.phase, self.token):
            column.close()

    def append(self, keys: Array, sizes: Array, phase: Array, token: Array) -> None:
        """Add whole batches: batch i has the next sizes[i] of the keys, phase[i] and token[i]."""
        first = self.keys.length
        self.keys.append(keys)
        self.edges.append(first + np.cumsum(sizes))
        self.phase.append(phase)
        self.token.append(token)

    def finish(self) -> dict[str, Any]:
        """Return the columns by their names in Trace, mapped."""
        return {
            "keys": self.keys.finish(),
            "batches": self.edges.finish(),
            "phase": self.phase.finish(),
            "token": self.token.finish(),
        }
