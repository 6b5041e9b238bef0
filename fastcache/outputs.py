"""Whether a result can be written where it is wanted, found out before the work that it is of. Imports nothing."""

from __future__ import annotations

import os
import tempfile


def check_output(path: str | os.PathLike[str], *, beside: bool = False) -> str:
    """Return `path`, absolute, if a file can be written there; what is there stays.

    Parameters
    ----------
    beside : bool
        The file will be made beside its place and take its name when it is whole.

    Raises
    ------
    OSError
        As what the writing would have failed with in the end: FileNotFoundError, NotADirectoryError,
        IsADirectoryError, PermissionError, ...
    """
    target = os.path.abspath(os.fsdecode(path))
    if os.path.isdir(target):
        raise IsADirectoryError(f"{target}: is a directory: name a file in it")
    there = os.path.exists(target)
    if there and beside and not os.path.isfile(target):
        raise FileExistsError(f"{target}: is no ordinary file, and is not replaced by one")
    if there and not beside:
        if not os.access(target, os.W_OK):
            raise PermissionError(f"{target}: may not be written to")
        return target
    directory = os.path.dirname(target)
    if not os.path.exists(directory):
        raise FileNotFoundError(f"{directory}: there is no such directory to write {os.path.basename(target)} in")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise type(error)(f"{directory}: nothing can be written there ({error.strerror})") from None
    return target
