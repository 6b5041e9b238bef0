"""Pack: a checkpoint written anew, each expert in one aligned piece, as safetensors that every other tool reads.

Owns the writing of files and taking it up again. Imports errors, formats, inventory, inspection, layout, outputs,
shards, sidecar and the CRC of the compiled half.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastcache.errors import CheckpointError, UnsupportedCheckpoint
from fastcache.formats.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint
from fastcache.inspection import inspect_checkpoint
from fastcache.inventory import Inventory, inventory_of
from fastcache.layout.build import layout_of
from fastcache.outputs import naming
from fastcache.shards import Shard, plan_shards
from fastcache.sidecar import SUFFIX, describe_files
from fastcache.units import whole
from fastcache_ext.crc import crc32c

Progress = Callable[[int, int], Any]
ALIGN = 4096
SHARD_BYTES = 5 << 30
JOURNAL = ".fastcache-pack.json"  # there from the first byte until the last check
PIECE = 8 << 20  # bytes per read
_TENSORS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".part", SUFFIX)


@dataclass(frozen=True, slots=True)
class Packed:
    """What `pack` wrote; sizes in bytes."""

    path: str
    files: list[str]  # of tensors
    nbytes: int  # of these files
    padding: int  # of that, padding between experts
    spaces: int  # of that, spaces at the end of headers: what follows is aligned
    experts: int
    copied: list[str]  # other files
    resumed: int  # files of tensors that an earlier run had finished


def pack(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    align: int = ALIGN,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Packed:
    """Write the safetensors checkpoint at `path` anew into the directory `out`, each expert in one aligned piece.

    Every tensor keeps its name, type, shape and bytes. Each file is read again after it was written, and compared.
    Config, tokenizer and other small files are copied. A run that was interrupted is taken up by the same call.

    Parameters
    ----------
    path : path-like
        As for `fastcache.open`; safetensors whose experts are tensors of their own.
    out : path-like
        A directory: one that is not there, an empty one, or one that an interrupted run of the same began.
    align : int
        Bytes: a power of two from 512 to 2 MiB; every expert begins at a multiple of it.
    shard_bytes : int
        Bytes: a file ends before the expert that would take it beyond.
    progress : callable, optional
        Called with (bytes written and bytes read again, both of all).

    Raises
    ------
    UnsupportedCheckpoint
        GGUF; or experts that are slices of fused tensors, which no order of tensors brings together.
    FileExistsError
        There is something in `out` that is not the beginning of this.
    CheckpointError
        The checkpoint cannot be trusted; or what was read again is not what was written.
    OSError
        ENOSPC before anything is written: there is not room enough. Or a write failed.
    ValueError
    """
    align, shard_bytes = whole("align", align), whole("shard_bytes", shard_bytes)
    if align not in {1 << bit for bit in range(9, 22)}:
        raise ValueError(f"align must be a power of two from 512 to 2097152 bytes; got {align}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be at least 1; got {shard_bytes}")
    source = open_checkpoint(path)
    if source.format != "safetensors":
        raise UnsupportedCheckpoint(f"{source.path}: only safetensors can be packed, and this is {source.format}")
    inventory = inventory_of(layout_of(source))
    shards = plan_shards(source, inventory, align, shard_bytes)
    target = os.path.abspath(os.fsdecode(out))
    others = _others(source)
    done = _begin(target, _identity(source, inventory, shards), shards)
    todo = [shard for shard in shards if shard.name not in done]
    _check_room(target, sum(shard.nbytes for shard in todo) + sum(map(os.path.getsize, others)))
    total = 2 * sum(shard.nbytes for shard in shards)
    count = _Count(progress, total, total - 2 * sum(shard.nbytes for shard in todo))
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(file, "rb", buffering=0)).fileno() for file in source.files]
        for shard in todo:
            _write_shard(files, source.files, shard, target, count)
    for other in others:
        _write_whole(os.path.join(target, os.path.basename(other)), partial(shutil.copyfile, other))
    index = {
        "metadata": {"total_size": sum(entry.nbytes for shard in shards for entry in shard.entries)},
        "weight_map": {entry.name: shard.name for shard in shards for entry in shard.entries},
    }
    _write_whole(os.path.join(target, INDEX_NAME), lambda part: _write_json(part, index))
    _check_result(target, inventory)
    os.unlink(os.path.join(target, JOURNAL))
    _sync(target)
    return Packed(
        target,
        [os.path.join(target, shard.name) for shard in shards],
        sum(shard.nbytes for shard in shards),
        sum(entry.nbytes for shard in shards for entry in shard.entries if entry.file < 0),
        sum(shard.spaces for shard in shards),
        int(inventory.exists.sum()),
        [os.path.join(target, os.path.basename(other)) for other in others],
        len(done),
    )


def _identity(source: Checkpoint, inventory: Inventory, shards: Sequence[Shard]) -> str:
    """What tells this run from any other: the source's files, and every header that is to be written."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([source.path, describe_files(inventory)]).encode())
    for shard in shards:
        digest.update(shard.name.encode() + shard.header)
    return digest.hexdigest()


def _others(source: Checkpoint) -> list[str]:
    """Config, tokenizer and the like: files beside the tensors that hold none."""
    root = os.path.dirname(source.files[0])
    names = sorted(
        name
        for name in os.listdir(root)
        if not name.startswith(".") and not name.endswith((*_TENSORS, ".safetensors.index.json"))
    )
    return [path for name in names if os.path.isfile(path := os.path.join(root, name))]


# ---- the target


def _begin(target: str, identity: str, shards: Sequence[Shard]) -> set[str]:
    """Make the directory or take up what an earlier run left there; return the names of files that are finished."""
    journal = os.path.join(target, JOURNAL)
    try:
        os.mkdir(target)
    except FileExistsError:
        if not os.path.isdir(target):
            raise FileExistsError(f"{target}: not a directory; nothing is overwritten") from None
        present = os.listdir(target)
        if present and JOURNAL not in present:
            raise FileExistsError(f"{target}: not empty ({present[0]}); nothing is overwritten") from None
        if present:
            with open(journal, "rb") as file:
                said = file.read()
            if said != _journal(identity):
                raise FileExistsError(
                    f"{target}: what was begun there is another run (of other files, or with other arguments): finish "
                    "it, or remove it"
                ) from None
    for name in os.listdir(target):
        if name.endswith(".part"):
            os.unlink(os.path.join(target, name))
    _write_whole(journal, lambda part: _write_bytes(part, _journal(identity)))
    return {shard.name for shard in shards if _finished(os.path.join(target, shard.name), shard)}


def _journal(identity: str) -> bytes:
    return json.dumps({"format": "fastcache.pack", "version": 1, "run": identity}).encode() + b"\n"


def _finished(path: str, shard: Shard) -> bool:
    """Whether an earlier run wrote this file. It took its name after it was compared, so that says that it is whole."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size == shard.nbytes and file.read(len(shard.header)) == shard.header
    except FileNotFoundError:
        return False


def _check_room(target: str, nbytes: int) -> None:
    free = shutil.disk_usage(target).free
    if nbytes > free:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are to be written, and {free} are free", target)


class _Count:
    def __init__(self, progress: Progress | None, total: int, done: int) -> None:
        self.progress, self.total, self.done = progress, total, done
        self.add(0)

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _write_shard(files: Sequence[int], names: Sequence[str], shard: Shard, target: str, count: _Count) -> None:
    """Write a file under another name, read it again, compare, and only then give it its own."""

    def write(part: str) -> None:
        crc = 0
        with open(part, "wb", buffering=0) as file:
            for piece in _pieces(files, names, shard):
                crc = crc32c(piece, crc)
                _write_all(file.fileno(), piece)
                count.add(len(piece))
            os.fsync(file.fileno())
        if _read_again(part, count) != (shard.nbytes, crc):
            raise CheckpointError(f"{part}: what was read again is not what was written: look after the disk")

    _write_whole(os.path.join(target, shard.name), write)


def _pieces(files: Sequence[int], names: Sequence[str], shard: Shard) -> Iterator[bytes | memoryview]:
    yield shard.header
    buffer = memoryview(bytearray(PIECE))
    for entry in shard.entries:
        if entry.file < 0:
            yield bytes(entry.nbytes)
            continue
        at, end = entry.offset, entry.offset + entry.nbytes
        while at < end:
            got = os.preadv(files[entry.file], [buffer[: min(PIECE, end - at)]], at)
            if got == 0:
                raise CheckpointError(f"{names[entry.file]}: cut meanwhile: it ends inside of {entry.name!r}")
            yield buffer[:got]
            os.posix_fadvise(files[entry.file], at, got, os.POSIX_FADV_DONTNEED)
            at += got


def _write_all(fd: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _read_again(path: str, count: _Count) -> tuple[int, int]:
    """Return bytes and CRC-32C of a file as the disk has it, as far as the kernel lets its memory of it go."""
    crc = size = 0
    buffer = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while got := file.readinto(buffer):
            crc = crc32c(buffer[:got], crc)
            size += got
            count.add(got)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return size, crc


def _write_whole(path: str, write: Callable[[str], Any]) -> None:
    """Have `write` make a file under another name, and give it its own when it is on the disk."""
    part = path + ".part"
    with naming(part):
        write(part)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
    os.replace(part, path)
    _sync(os.path.dirname(path))


def _write_json(path: str, value: Any) -> None:
    _write_bytes(path, json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")


def _write_bytes(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _sync(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_result(target: str, inventory: Inventory) -> None:
    """Hold the whole to what was promised, from its headers."""
    figures = inspect_checkpoint(target)
    same = figures["expert_bytes"]["total"] == int(inventory.payload().sum())
    if figures["extents_per_expert"]["max"] > 1 or figures["misaligned_fraction"] > 0 or not same:
        pieces = figures["extents_per_expert"]["max"]
        raise CheckpointError(f"{target}: not as it should be: up to {pieces} pieces per expert, or misaligned tensors")
