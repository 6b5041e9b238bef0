"""`fastcache.open`: arguments to a store. Imports settings and store."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fastcache.settings import resolve
from fastcache.store import POLICIES, ExpertStore


def open(
    path_or_source: Any,
    budget: int | str | None = None,
    *,
    policy: str | None = None,
    engine: str | None = None,
    direct: str | None = None,
    mlock: str | None = None,
    hugepages: str | None = None,
    chunk: int | str | None = None,
    queue_depth: int | None = None,
    io_threads: int | None = None,
    overflow: int | str | None = None,
    speculation: str | None = None,
    guess_bytes: int | str | None = None,
    guess_share: float | None = None,
    timeout: float | None = None,
    ghosts: bool | None = None,
    verify: str | os.PathLike[str] | None = None,
    name: str | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> ExpertStore:
    """Open a checkpoint, or any source of experts, as a store.

    For every argument None means the environment's value, else the built-in one.

    Parameters
    ----------
    path_or_source : path or ExpertSource
        A directory or file of safetensors or GGUF (any part of a split), or an object with keys(), expert_nbytes(key),
        and extents(key) or read_expert(key).
    budget : int or str, optional
        Bytes of the arena: an integer, "8GiB", "25% of experts", "50% of free", "2 cycles" (token cycles), "all", or
        "auto": all experts if they fit into free memory less the trunk less 15 %, else that much.
        FASTCACHE_EXPERT_CACHE_BYTES.
    policy : {"next_use", "lfu", "s3fifo", "sieve", "lru", "auto"}, optional
        What to evict. "auto" starts with next_use and follows the ghosts of all policies. FASTCACHE_POLICY.
    engine : {"auto", "uring", "pread"}, optional
        How to read. "auto" falls back from io_uring and says why; the others raise. FASTCACHE_ENGINE.
    direct, mlock, hugepages : {"auto", "require", "off"}, optional
        Direct I/O; page-locked memory (by registration or mlock); 2 MiB pages (also "hugetlb": explicit ones).
    chunk : int or str, optional
        Largest single read for a demand, default 4 MiB; prefetches read 1 MiB at most. FASTCACHE_CHUNK.
    queue_depth, io_threads : int, optional
        Reads in flight for io_uring (32), threads for pread (4).
    overflow : int or str, optional
        Bytes that pass-through buffers may hold alive; beyond it OverflowLimit. Default: free memory less 15 %.
        FASTCACHE_OVERFLOW.
    speculation : {"auto", "always", "off"}, optional
        Which prefetches are read: "auto" judges each predictor by what became of its guesses, and narrows, stops and,
        by small probes, restarts it; "always": all; "off": none. FASTCACHE_SPECULATION.
    guess_bytes : int or str, optional
        Bytes that prefetches may have at the device together; default: one read of theirs (1 MiB), behind which a
        demand may find itself. FASTCACHE_GUESS_BYTES.
    guess_share : float, optional
        Share of the reads in flight that may be theirs, default 0.25; one always may. FASTCACHE_GUESS_SHARE.
    timeout : float, optional
        Seconds that a wait may take before ReadTimeout; None: no limit. Calls can override it.
    ghosts : bool, optional
        Let ghost caches of all policies watch a sample of the traffic, for `mrc()`; with policy="auto" they always do.
        FASTCACHE_GHOSTS (1 or 0).
    verify : {"sidecar", "off"} or path-like, optional
        "sidecar": hold every expert to its checksum when it arrives, before anyone can see it; the sidecar lies beside
        the checkpoint, where `fastcache.integrity.checksum` puts it, or at the path given. An expert that differs
        raises ChecksumMismatch and is not kept. Default: off. FASTCACHE_VERIFY.
    name : str, optional
        For logs and metrics; the path's last part if None.
    progress : callable, optional
        Called as progress(populated_bytes, arena_bytes) from this thread until the arena is populated; without it,
        populating goes on in the background.

    Raises
    ------
    CheckpointError, SidecarNotFound, CheckpointMismatch, InvalidBudget, FeatureUnavailable, ValueError, TypeError
    """
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a callable or None; got {progress!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a string or None; got {name!r}")
    settings = resolve(
        budget=budget,
        policy=policy,
        engine=engine,
        direct=direct,
        mlock=mlock,
        hugepages=hugepages,
        chunk=chunk,
        queue_depth=queue_depth,
        io_threads=io_threads,
        overflow=overflow,
        timeout=timeout,
        speculation=speculation,
        guess_bytes=guess_bytes,
        guess_share=guess_share,
        policies=tuple(POLICIES),
        ghosts=ghosts,
        verify=verify,
    )
    return ExpertStore(path_or_source, settings, name, progress)
