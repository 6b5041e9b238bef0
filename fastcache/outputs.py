"""Files that are written: whether one can be, found out before the work that it is of; and whole or not at all.

Owns what is never written over. Imports nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

HEAD = 256  # bytes of a file by which its kind is told


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError that names no file this one's name: a write to a full disk says only that it is full."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def check_output(path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]] = ()) -> str:
    """Return `path`, absolute, if it can be written as `whole_file` does; what is there stays.

    Parameters
    ----------
    inputs : iterable of path
        What the work reads; no output may be one of them, by whatever name.

    Raises
    ------
    OSError
        As what the writing would have failed with in the end: FileNotFoundError, NotADirectoryError,
        IsADirectoryError, PermissionError, ...
    FileExistsError
        It is one of the inputs.
    """
    target = os.path.abspath(os.fsdecode(path))
    if os.path.isdir(target):
        raise IsADirectoryError(f"{target}: is a directory: name a file in it")
    refuse_input(target, inputs)
    place = _place(target)
    if place is None:
        if not os.access(target, os.W_OK):
            raise PermissionError(f"{target}: may not be written to")
        return target
    directory = os.path.dirname(place)
    if not os.path.exists(directory):
        raise FileNotFoundError(f"{directory}: there is no such directory to write {os.path.basename(place)} in")
    if os.path.exists(place) and not os.access(place, os.W_OK):
        raise PermissionError(f"{target}: may not be written to")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise type(error)(f"{directory}: nothing can be written there ({error.strerror})") from None
    return target


def refuse_input(path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Raise FileExistsError if `path` is one of the files that are read, by this name or another."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mine = os.stat(path)
        for each in inputs:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                other = os.stat(each)
                if os.path.samestat(mine, other) and not stat.S_ISCHR(mine.st_mode):
                    raise FileExistsError(f"{os.fsdecode(path)}: is read here, and would be replaced: write elsewhere")


def is_ordinary(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file that is no device, pipe or other way out, links followed."""
    target = os.path.abspath(os.fsdecode(path))
    return os.path.isfile(target) and _place(target) is not None


def refuse_other_kind(path: str | os.PathLike[str], ours: Callable[[bytes], bool], what: str) -> None:
    """Raise FileExistsError if there is a file of another kind: `ours` says so of its first 256 bytes.

    An empty one is nobody's, and what is no ordinary file is not replaced anyhow.
    """
    if not is_ordinary(path):
        return
    with open(path, "rb", buffering=0) as file:
        head = file.read(HEAD)
    if head and not ours(head):
        raise FileExistsError(f"{os.fsdecode(path)}: is no {what}, and is not replaced: write elsewhere, or remove it")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[BinaryIO]:
    """Give a file to write that takes its name when it is whole and on the disk; after an error all is as it was.

    A link keeps its name, and what it leads to is replaced. Devices, pipes and descriptors (/dev/stdout) are written to
    as they are.

    Parameters
    ----------
    replace : bool
        Whether a file that is there by then is replaced; else FileExistsError.
    """
    target = os.path.abspath(os.fsdecode(path))
    with naming(path):
        place = _place(target)
        if place is None:
            with open(_as_it_is(target), "wb") as file:
                yield file
            return
        scratch = os.path.join(os.path.dirname(place), f".{os.path.basename(place)[:200]}.{secrets.token_hex(4)}.tmp")
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(fd, "wb") as file:
                with contextlib.suppress(FileNotFoundError):
                    os.fchmod(fd, stat.S_IMODE(os.stat(place).st_mode))
                yield file
                file.flush()
                os.fsync(fd)
            if replace:
                os.replace(scratch, place)
            else:
                os.link(scratch, place)  # fails if there is one
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch)


def _place(target: str) -> str | None:
    """Return where the file itself lies that is to be replaced; None: it is none, but a device or a way out."""
    end = _end(target)
    if not os.path.exists(end):
        return end
    return end if os.path.isfile(end) and not end.startswith("/proc/") else None


def _end(target: str) -> str:
    """Follow links to the end; not beyond /proc, where /dev/stdout and /dev/fd/N lead: they name what is open."""
    for _ in range(40):
        directory = os.path.realpath(os.path.dirname(target))
        target = os.path.join(directory, os.path.basename(target))
        if directory.startswith("/proc/") or not os.path.islink(target):
            break
        target = os.path.join(directory, os.readlink(target))
    return target


def _as_it_is(target: str) -> str | int:
    """Return what to open for writing: of a descriptor of this process a copy, which goes on where that one is."""
    end = _end(target)
    directory, name = os.path.split(end)
    mine = directory in (f"/proc/{os.getpid()}/fd", os.path.realpath("/proc/thread-self/fd"))
    return os.dup(int(name)) if mine and name.isdecimal() else target
