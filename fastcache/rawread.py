"""What the device gives without us: O_DIRECT `preadv` from a few threads into huge-page memory. The demo's ceiling.

Deliberately independent of the store: no queue, no slot, no compiled code. Imports NumPy only.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

HUGE = 2 << 20


@dataclass(frozen=True, slots=True)
class RawRead:
    """One measurement of the raw ceiling."""

    nbytes: int
    seconds: float
    threads: int
    block: int  # bytes per read
    direct: bool  # False where the file system refused O_DIRECT: then this is the page cache's speed

    @property
    def gb_per_s(self) -> float:
        """10**9 bytes per second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


def measure(
    paths: Iterable[str | os.PathLike[str]],
    *,
    threads: int = 4,
    block: int = 4 << 20,
    limit: int = 1 << 30,
    seed: int = 0,
) -> RawRead:
    """Read the whole aligned blocks of `paths` in random order, at most `limit` bytes, and return how fast it went.

    `threads` reads are in flight at any time, each of `block` bytes (a multiple of 4,096) into its own piece of a
    private anonymous mapping of huge pages, populated before the clock starts.

    Raises
    ------
    OSError
        When a file cannot be opened or read.
    ValueError
        When no file holds a whole block.
    """
    files = [_open(path) for path in paths]
    try:
        work = [(fd, at) for fd, _ in files for at in range(0, os.fstat(fd).st_size - block + 1, block)]
        if not work:
            raise ValueError(f"no file holds one block of {block} bytes")
        random.Random(seed).shuffle(work)
        work = work[: max(1, limit // block)]
        nbytes = len(work) * block
        memory = _huge(threads * block)
        pieces = [memory[i * block : (i + 1) * block] for i in range(threads)]
        failures: list[OSError] = []

        def reader(piece: np.ndarray) -> None:
            try:
                while True:
                    fd, at = work.pop()  # atomic
                    got = os.preadv(fd, [piece.data], at)
                    if got != block:
                        raise OSError(f"read {got} of {block} bytes at {at}: the file was cut")
            except IndexError:
                return
            except OSError as error:
                failures.append(error)

        started = time.perf_counter()
        running = [threading.Thread(target=reader, args=(piece,)) for piece in pieces]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        seconds = time.perf_counter() - started
    finally:
        for fd, _ in files:
            os.close(fd)
    if failures:
        raise failures[0]
    return RawRead(nbytes, seconds, threads, block, all(direct for _, direct in files))


def _open(path: str | os.PathLike[str]) -> tuple[int, bool]:
    """Open for direct reads where the file system takes them, else buffered with nothing of the file cached."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return fd, False
    return fd, True


def _huge(nbytes: int) -> np.ndarray:
    """Return populated uint8 memory that starts on a huge page. `mmap(-1, n)` alone would be shared, in small pages."""
    mapping = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % HUGE
    memory = memory[start : start + nbytes]
    memory[:: mmap.PAGESIZE] = 0
    return memory
