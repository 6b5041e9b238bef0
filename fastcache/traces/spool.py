"""Traces that come through a pipe: kept in an unlinked file, because they are read more than once, and mapped.

Imports errors and where temporary files go.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fastcache.errors import TraceError
from fastcache.traces.columns import scratch_directory

Path_ = str | os.PathLike[str]
_PIECE = 1 << 20  # bytes


class Spooled(os.PathLike[str]):
    """A path of what came through a pipe, for as long as its file is open. In messages it is called as the pipe was."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name, self._file = name, file

    def __fspath__(self) -> str:
        return f"/proc/self/fd/{self._file.fileno()}"

    def __str__(self) -> str:
        return self.name


def stem(path: Path_) -> str:
    """Return what a trace is called that does not say it itself."""
    return Path(path.name if isinstance(path, Spooled) else path).stem


@contextmanager
def regular(path: Path_) -> Iterator[Path_]:
    """Give a path that can be read again and mapped: a file's own; of a pipe, one to what came through it.

    Raises
    ------
    TraceError
        It is a device, or there is no room for what comes through the pipe.
    OSError
        It cannot be read.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise TraceError("is a device or a terminal: a trace is a file, or comes through a pipe", filename=path)
    if not stat.S_ISFIFO(mode):
        yield path
        return
    directory, taken = scratch_directory(), 0
    with open(path, "rb", buffering=0) as pipe:
        try:
            file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        except OSError as error:
            raise _no_room(path, directory, taken, error) from error
        with file:
            while piece := pipe.read(_PIECE):
                try:
                    file.write(piece)
                    file.flush()
                except OSError as error:
                    raise _no_room(path, directory, taken, error) from error
                taken += len(piece)
            yield Spooled(os.fspath(path), file)


def _no_room(path: Path_, directory: str, taken: int, error: OSError) -> TraceError:
    return TraceError(
        f"what comes through a pipe is kept in {directory}, which took {taken} bytes of it and no more: "
        f"{error.strerror}; set TMPDIR to a directory with room",
        filename=path,
    )
