"""FileRangeSource: experts at known places in any files. Opens nothing. Imports keys, errors and sources.base."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from fastcache.errors import CheckpointError, CheckpointNotFound, CheckpointTruncated, InvalidRange
from fastcache.keys import ExpertKey
from fastcache.sources.base import Extent, as_key, mapping
from fastcache.units import whole

PathLike = str | os.PathLike[str]


class FileRangeSource:
    """Experts as byte ranges of files, whatever their format.

    Parameters
    ----------
    paths : path-like, or sequence of them
        The file, or the files.
    ranges : mapping of (layer, expert) to range
        A range is `(offset, nbytes)` in the only file; `(path, offset, nbytes)` in one of the files; or a sequence of
        such ranges, which are joined in their order. Ranges of different experts may overlap.
    top_k : int, optional
        Experts that a token uses in a layer.

    Raises
    ------
    CheckpointNotFound
        A file is not there.
    CheckpointTruncated
        A range ends after the end of its file.
    InvalidRange
        A negative offset, a size below one byte, or a path that is not among `paths`. Also a ValueError.
    TypeError
        A key or a range is not made as said above.

    Examples
    --------
    >>> source = FileRangeSource("experts.bin", {(0, 0): (0, 4096), (0, 1): (4096, 4096)})  # doctest: +SKIP

    Notes
    -----
    Sizes are taken from the file system once, when the source is made. Immutable, so any thread may use it.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        ranges: Mapping[Any, Sequence[Any]],
        *,
        top_k: int | None = None,
    ) -> None:
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self._sizes = {os.path.abspath(os.fsdecode(path)): _file_size(os.fsdecode(path)) for path in given}
        self.top_k = top_k
        self._extents = {as_key(key): self._checked(key, each) for key, each in mapping(ranges, "ranges").items()}

    def keys(self) -> Sequence[ExpertKey]:
        """Return every expert's key, in the order of `ranges`."""
        return tuple(self._extents)

    def expert_nbytes(self, key: ExpertKey, /) -> int:
        """Return the size of an expert in bytes."""
        return sum(extent.nbytes for extent in self._extents[key])

    def extents(self, key: ExpertKey, /) -> Sequence[Extent]:
        """Return where an expert's bytes lie, in order."""
        return self._extents[key]

    def __repr__(self) -> str:
        return f"<FileRangeSource: {len(self._extents)} experts in {len(self._sizes)} files>"

    def _checked(self, key: Any, ranges: Sequence[Any]) -> tuple[Extent, ...]:
        try:
            several = bool(ranges) and not isinstance(ranges[0], str) and isinstance(ranges[0], Sequence)
            extents = tuple(self._extent(key, each) for each in (ranges if several else (ranges,)))
        except (TypeError, KeyError, IndexError) as error:
            raise TypeError(
                f"expert {tuple(key)}: a range must be (offset, nbytes) or (path, offset, nbytes); got {ranges!r}"
            ) from error
        return extents

    def _extent(self, key: Any, each: Sequence[Any]) -> Extent:
        if len(each) == 2:
            if len(self._sizes) != 1:
                raise TypeError("with several files, each range must name its own")
            path, (offset, nbytes) = next(iter(self._sizes)), each
        elif len(each) == 3:
            path, offset, nbytes = each
            path = os.path.abspath(os.fsdecode(path))
        else:
            raise TypeError("not two or three values")
        offset, nbytes = whole("offset", offset), whole("nbytes", nbytes)
        where = f"expert {tuple(key)}: {path} [{offset}, +{nbytes}]"
        if path not in self._sizes:
            raise InvalidRange(f"{where}: this file is not among the paths of the source")
        if offset < 0 or nbytes < 1:
            raise InvalidRange(f"{where}: the offset must not be negative, and the size at least one byte")
        if offset + nbytes > self._sizes[path]:
            raise CheckpointTruncated(f"{where}: {offset + nbytes} bytes needed, {self._sizes[path]} present")
        return Extent(path, offset, nbytes)


def _file_size(path: str) -> int:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path}: no such file") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return status.st_size
