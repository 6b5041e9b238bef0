"""Checksums of a checkpoint's experts: made, and held to the files.

Imports errors, failures, fingerprint, keys, inventory, outputs, settings, sidecar and store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fastcache.errors import BatchFailed, CheckpointMismatch, ChecksumMismatch, SidecarError
from fastcache.failures import CHECKSUM, failure
from fastcache.fingerprint import fingerprint
from fastcache.inventory import Inventory, inventory_of
from fastcache.keys import ExpertKey
from fastcache.outputs import check_output
from fastcache.settings import resolve
from fastcache.sidecar import (
    SCAN,
    Sidecar,
    changed,
    check_place,
    describe_files,
    misfit,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from fastcache.store import POLICIES, ExpertStore

Progress = Callable[[int, int], Any]
ARENA_BYTES = 512 << 20  # of a scan
READERS = 2  # threads: while one's batch runs out, the other's is full
WINDOWS = 4  # batches that the arena has room for


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify` found. True if there is nothing to complain of."""

    path: str  # of the sidecar
    experts: int
    nbytes: int  # of all experts
    bad: Mapping[ExpertKey, Exception] = field(default_factory=dict)  # ChecksumMismatch, or why it could not be read
    changed: list[str] = field(default_factory=list)  # files whose samples differ, wherever those lie

    @property
    def ok(self) -> bool:
        """Whether every byte of every expert is what it was."""
        return not self.bad and not self.changed

    def __bool__(self) -> bool:
        return self.ok


def checksum(
    path: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
    engine: str | None = None,
    progress: Progress | None = None,
) -> str:
    """Read every expert of a checkpoint once, and write the sidecar of their checksums.

    The bytes of today are taken for the right ones. Nothing is repacked.

    Parameters
    ----------
    path : path-like or ExtentSource
        As for `fastcache.open`.
    output : path-like, optional
        Where to write; None: beside the first file, as its name with ".checksums" added: there open() looks for it.
    overwrite : bool
        Replace a sidecar that is there; never a file of another kind.
    engine : {"auto", "uring", "pread"}, optional
    progress : callable, optional
        Called with (bytes read, bytes of all) from this thread.

    Returns
    -------
    str
        The sidecar's path.

    Raises
    ------
    FileExistsError, SidecarError, OSError
        Before any expert is read: there is a sidecar, or something else in its place, or none can be written there.
    BatchFailed
        Experts could not be read: `.failed` says which and why. Nothing was written.
    CheckpointError
        The checkpoint cannot be trusted.
    """
    inventory = inventory_of(path)
    beside = sidecar_path(inventory)
    target = beside if output is None else os.path.abspath(os.fsdecode(output))
    if os.path.isdir(target):
        raise SidecarError(f"{target}: a directory, which no sidecar replaces: give another place as output")
    check_place(target, overwrite=overwrite)
    check_output(target, [path for path in inventory.paths if path is not None])
    before = describe_files(inventory)
    sums, failed = _scan(path, inventory, engine, progress)
    if failed:
        raise BatchFailed(f"{len(failed)} experts could not be read; no sidecar was written", failed)
    if describe_files(inventory) != before:
        raise CheckpointMismatch("the files changed while they were checksummed; no sidecar was written")
    made = fingerprint(inventory, [file["bytes"] for file in before])
    write_sidecar(target, Sidecar(made, before, inventory.layers, sums), overwrite=overwrite)
    return target


def verify(
    path: Any,
    sidecar: str | os.PathLike[str] | None = None,
    *,
    engine: str | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Read every expert of a checkpoint once, and hold it to its checksum.

    Parameters
    ----------
    path, engine, progress
        As for `checksum`.
    sidecar : path-like, optional
        None: beside the first file.

    Raises
    ------
    SidecarNotFound, SidecarError
        There is no sidecar, or it cannot be used.
    CheckpointMismatch
        It is of other files: names, sizes or headers differ.
    """
    inventory = inventory_of(path)
    beside = sidecar_path(inventory)
    where = beside if sidecar is None else os.path.abspath(os.fsdecode(sidecar))
    known = read_sidecar(where)
    files = describe_files(inventory)
    why = misfit(known, inventory, [file["bytes"] for file in files])
    if why is not None:
        raise CheckpointMismatch(f"{where}: not of this checkpoint, or older than it: {why}")
    sums, failed = _scan(path, inventory, engine, progress)
    bad = dict(failed)
    keys = _keys(inventory)
    for k in np.flatnonzero((sums != known.sums) & inventory.exists).tolist():
        if keys[k] not in bad:
            bad[keys[k]] = _mismatch(inventory, keys[k], k, int(known.sums[k]), int(sums[k]))
    return Verified(
        where,
        int(inventory.exists.sum()),
        int(inventory.payload().sum()),
        dict(sorted(bad.items())),
        changed(known, files),
    )


def _mismatch(inventory: Inventory, key: ExpertKey, k: int, wanted: int, got: int) -> ChecksumMismatch:
    there = np.flatnonzero(inventory.nbytes[k] > 0)
    first = there[np.lexsort((inventory.offset[k, there], inventory.file[k, there]))[0]]
    error = failure(
        CHECKSUM,
        store="",
        layers=inventory.layers,
        layer=key.layer,
        expert=key.expert,
        path=inventory.paths[int(inventory.file[k, first])],
        offset=int(inventory.offset[k, first]),
        wanted=wanted,
        got=got,
        overflow_limit=0,
        holders=(),
        cause=None,
    )
    assert isinstance(error, ChecksumMismatch)
    return error


def _keys(inventory: Inventory) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for layer, count in inventory.layers for expert in range(count)]


def _scan(
    source: Any, inventory: Inventory, engine: str | None, progress: Progress | None
) -> tuple[np.ndarray[Any, np.dtype[Any]], dict[ExpertKey, Exception]]:
    """Read all experts through a store, in the order of the files; return uint32 [K], and what could not be read."""
    payload = inventory.payload()
    total, largest = int(payload.sum()), int(payload.max(initial=1))
    settings = resolve(
        budget=max(ARENA_BYTES, 2 * WINDOWS * (largest + (1 << 20))) if total > ARENA_BYTES else "all",
        policy="lru",
        engine=engine,
        mlock="off",
        policies=tuple(POLICIES),
        speculation="off",
        ghosts=False,
        verify="off",
    )
    names = _keys(inventory)
    order = [k for k in _by_place(inventory) if inventory.exists[k]]
    failed: dict[ExpertKey, Exception] = {}
    lock, done = threading.Lock(), 0
    with ExpertStore(source, replace(settings, verify=SCAN), "scan", None) as store:
        slots = max(WINDOWS, int(store.describe()["slots"]))
        step = max(1, slots // WINDOWS)
        windows = iter([order[i : i + step] for i in range(0, len(order), step)])

        def read() -> None:
            nonlocal done
            while True:
                with lock:
                    window = next(windows, None)
                if window is None:
                    return
                try:
                    for _, lease in store.as_ready([names[k] for k in window]):
                        nbytes = lease.nbytes
                        lease.release()
                        with lock:
                            done += nbytes
                except BatchFailed as error:
                    with lock:
                        failed.update(error.failed)

        with ThreadPoolExecutor(READERS, "fastcache-scan") as pool:
            running = {pool.submit(read) for _ in range(READERS)}
            try:
                while running:
                    ended, running = wait(running, 0.1, "FIRST_EXCEPTION")
                    for each in ended:
                        each.result()
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                store.close()  # the readers' calls raise
                raise
        sums = np.frombuffer(store._sums(), np.uint32).copy()
    return sums, failed


def _by_place(inventory: Inventory) -> list[int]:
    """Dense keys in the order in which their bytes lie in the files."""
    there = inventory.nbytes > 0
    file = np.where(there, inventory.file, np.iinfo(np.int32).max).min(axis=1)
    first = np.where(there & (inventory.file == file[:, None]), inventory.offset, np.iinfo(np.int64).max).min(axis=1)
    return [int(k) for k in np.lexsort((first, file))]
