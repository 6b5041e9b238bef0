"""Everything that can go wrong, by name. Each error is also the builtin that people catch in its place.

Messages say what, where, and what to do; the numbers are attributes too. Imports keys only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastcache.keys import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class FastcacheError(Exception):
    """Base of every error that fastcache raises on purpose."""


class UnknownExpert(FastcacheError, KeyError):
    """The checkpoint has no such expert: a dense layer, or an index out of range."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class ReadFailed(FastcacheError, OSError):
    """A read failed; `errno` and `filename` are the system's, the rest says which expert wanted which bytes.

    Attributes
    ----------
    key : ExpertKey
    offset : int
        Byte offset in the file.
    wanted, got : int
        Bytes.
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        filename: str | None = None,
        key: ExpertKey | None = None,
        offset: int = 0,
        wanted: int = 0,
        got: int = 0,
    ) -> None:
        super().__init__(message)
        self.errno = errno
        self.filename = filename
        self.strerror = message
        self.key, self.offset, self.wanted, self.got = key, offset, wanted, got

    def __str__(self) -> str:
        return str(self.args[0])


class ShortRead(ReadFailed):
    """The file ended before the expert did: it was truncated after it was opened."""


class ReadTimeout(FastcacheError, TimeoutError):
    """A wait passed its timeout. The read goes on; a later acquire may find it landed."""


class CheckpointError(FastcacheError):
    """The checkpoint cannot be trusted: broken header, missing shard, overlapping or truncated tensors."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is nothing at the path."""


class CheckpointTruncated(CheckpointError):
    """A file is shorter than its header says."""


class CheckpointHeaderError(CheckpointError):
    """A header is not what the format allows."""


class CheckpointIndexError(CheckpointError):
    """model.safetensors.index.json and the shards disagree."""


class MissingShard(CheckpointIndexError):
    """The index names a shard that is not there."""


class WrongShard(CheckpointIndexError):
    """The index sends a tensor to a file that lacks it, and another file has it."""


class MissingTensor(CheckpointError):
    """A tensor is nowhere: the index names it and no file has it, or an expert lacks what its siblings have."""


class UnsupportedCheckpoint(CheckpointError):
    """A valid checkpoint that this version cannot serve; the message says what is known of it."""


class CheckpointMismatch(CheckpointError):
    """What was kept for one checkpoint was used with another."""


class CheckpointChanged(CheckpointError):
    """A file changed after it was opened: size, modification time or identity."""


class ChecksumMismatch(ReadFailed, CheckpointError):
    """An expert's bytes are not those that its checksum was made of: they were damaged on disk, or on their way.

    Never shown, never kept: an expert that fails is read anew when it is wanted again.

    Attributes
    ----------
    key : ExpertKey
    filename : str
    offset : int
        Where the first of the expert's bytes lies in the file.
    wanted, got : int
        Checksums.
    """


class SidecarError(CheckpointError):
    """A sidecar of checksums is damaged, of another version, or cannot serve this source."""


class SidecarNotFound(SidecarError, FileNotFoundError):
    """There is no sidecar of checksums where it was looked for."""


class InvalidRange(CheckpointError, ValueError):
    """A byte range that was given for an expert cannot be one."""


class InvalidSource(CheckpointError, ValueError):
    """A source of experts says what cannot be: a key or a size out of range, extents that do not add up."""


class TraceError(FastcacheError, ValueError):
    """A routing trace is not what its format allows. The message names the file, the record and what was wrong.

    Attributes
    ----------
    filename : str
    record : int or None
        Number of the record, from 0, or of the line, from 1, in formats of lines; None: not one record's fault.
    """

    def __init__(self, message: str, *, filename: object = "", record: int | None = None, unit: str = "record") -> None:
        where = f"{filename}, {unit} {record}" if record is not None else str(filename)
        super().__init__(f"{where}: {message}")
        self.filename, self.record = str(filename), record


class HotListError(FastcacheError, ValueError):
    """A file that is to be a hot list is none, or a damaged one."""


class StatsMismatch(FastcacheError, ValueError):
    """Stats do not belong together: of two stores, on two sides of a reset_stats(), or the wrong way round."""


class RecordingError(FastcacheError, RuntimeError):
    """The store is being recorded already."""


class BudgetTooSmall(FastcacheError, ValueError):
    """Pins would leave less than one slot, or found none that could be freed for them."""


class InvalidBudget(BudgetTooSmall):
    """A budget is none: it cannot be read, is negative, is more than all, or counts what is not known here.

    For programs that catch one error for all budgets it is a BudgetTooSmall too.
    """


class OverflowLimit(FastcacheError, MemoryError):
    """Pass-through reads may hold no more memory. The message names the largest holders.

    Attributes
    ----------
    holders : list of (ExpertKey, int)
        Experts whose pass-through buffers are alive, and their bytes, largest first.
    """

    holders: Sequence[tuple[ExpertKey, int]] = ()


class FeatureUnavailable(FastcacheError, OSError):
    """Something that was asked for explicitly (engine, direct, mlock, hugepages) cannot be had here."""


class LeaseReleased(FastcacheError, RuntimeError):
    """The lease was released: it gives no new views. Arrays made from it before stay valid."""


class StoreClosed(FastcacheError, RuntimeError):
    """The store is closed."""


class ForkedStore(FastcacheError, RuntimeError):
    """The store belongs to the parent process; reopen() it in this one."""


class BatchFailed(FastcacheError, ExceptionGroup):
    """Some experts of a batch failed; the others stay resident.

    Attributes
    ----------
    failed : dict of ExpertKey to FastcacheError
    """

    failed: Mapping[ExpertKey, Exception]

    def __new__(cls, message: str, failed: Mapping[ExpertKey, Exception]) -> BatchFailed:
        self = super().__new__(cls, message, list(failed.values()))
        self.failed = dict(failed)
        return self

    def __init__(self, message: str, failed: Mapping[ExpertKey, Exception]) -> None:
        super().__init__(message, list(failed.values()))

    def derive(self, excs: Sequence[Exception]) -> ExceptionGroup:  # type: ignore[override]
        left = {key: error for key, error in self.failed.items() if error in excs}
        return type(self)(self.message, left)


class PinsDoNotFit(BatchFailed, BudgetTooSmall):
    """No slot could be freed for some pins, because all else is leased or pinned; the call's other pins stay.

    So `except BudgetTooSmall` is for every pin that finds no room, and BatchFailed alone for reads that failed.
    """
