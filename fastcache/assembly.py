"""Opening a store, step by step: files against headers, where bytes lie in a slot, memory against what is required.

Imports errors, formats.header, settings, sidecar, describe, inventory, placement, sizing, units.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fastcache import errors
from fastcache.describe import HUGE_ENOUGH
from fastcache.formats.header import identity_of
from fastcache.inventory import Inventory
from fastcache.placement import EXTENT, Placement, place
from fastcache.settings import Settings
from fastcache.sidecar import Checks, native
from fastcache.sizing import Sizing
from fastcache.units import whole_huge


def check_ends(inventory: Inventory, file_sizes: Sequence[int]) -> None:
    """Refuse an expert that ends after its file, and files that are not those whose headers were read.

    The files are open by now, and changes are noticed from here on: what lay between is looked at here.
    """
    if inventory.by_hand:
        return
    sizes = np.asarray([*file_sizes, 0], np.int64)
    over = (inventory.offset + inventory.nbytes > sizes[inventory.file]) & (inventory.nbytes > 0)
    if over.any():
        key, tensor = np.argwhere(over)[0]
        number = int(inventory.file[key, tensor])
        end = int(inventory.offset[key, tensor] + inventory.nbytes[key, tensor])
        raise errors.CheckpointTruncated(
            f"{inventory.paths[number]}: an expert ends at byte {end}, the file has {sizes[number]}"
        )
    if inventory.layout is not None:
        for path, identity in zip(inventory.layout.files, inventory.layout.identities, strict=False):
            if identity is not None and identity_of(os.stat(path)) != identity:
                raise errors.CheckpointChanged(f"{path}: the file has changed since its header was read: open it anew")


def place_experts(inventory: Inventory, file_align: Sequence[int]) -> Placement:
    """Return where every expert's bytes lie in their files and in a slot; `file_align` is bytes, per file."""
    if inventory.by_hand:
        count = len(inventory.exists)
        extents = np.zeros(count, EXTENT)
        extents["nbytes"] = span = inventory.payload()
        placement = Placement(np.arange(count + 1, dtype=np.int32), extents, span, np.zeros((count, 1), np.int64))
    else:
        placement = place(inventory.file, inventory.offset, inventory.nbytes, inventory.align, list(file_align))
    placement.span[~inventory.exists] = -1
    return placement


_PER_KEY = 32 + 16  # bytes: the compiled half's tables; sizes, classes and records in Python
_PER_TENSOR = 8 + 12  # bytes: its place in the slot; file and offset in the layout
_POLICY_PER_KEY = {"next_use": 24, "s3fifo": 9, "lfu": 8, "sieve": 1, "lru": 0, "auto": 24}


def metadata_bytes(inventory: Inventory, placement: Placement, policy: str, checks: Checks) -> int:
    """Return what a store keeps of its experts outside the budget, for as long as it is open; without ghosts."""
    count, width = placement.tensors.shape
    checked = 0 if checks.path is None else count * (6 + 8 * width)  # checksum, record, and places once more
    return int(checked + count * (_PER_KEY + width * _PER_TENSOR + _POLICY_PER_KEY[policy]) + placement.extents.nbytes)


def tensor_records(inventory: Inventory) -> list[tuple[list[tuple[Any, ...]], Mapping[str, str], list[int]]]:
    """Return what leases know of tensors, as the catalog takes it: (views, refused, bytes per tensor) a record."""
    return [
        (
            [(v.label, v.tensor, v.offset, v.dtype, v.shape, v.strides) for v in record.views],
            record.refused,
            [tensor.nbytes for tensor in record.tensors],
        )
        for record in inventory.records
    ]


def core_arguments(
    inventory: Inventory, placement: Placement, sizing: Sizing, settings: Settings, checks: Checks
) -> dict[str, Any]:
    """Return what the compiled half opens a store with, as it names it.

    Raises
    ------
    FeatureUnavailable
        engine="uring", and the bytes are in no file.
    """
    engine = settings.engine
    if inventory.by_hand or inventory.memory is not None:
        if engine == "uring":
            raise errors.FeatureUnavailable("engine='uring' was asked for, but this source's bytes are in no file")
        engine = "hand" if inventory.by_hand else "pread"
    return {
        "layers": inventory.layers,
        "cls_of": sizing.cls,
        "ext_first": placement.first,
        "extents": placement.extents,
        "span": placement.span,
        "class_bytes": sizing.slot_bytes,
        "class_slots": sizing.slabs.slots,
        "slabs": sizing.slabs.plan(),
        "policy": "next_use" if settings.policy == "auto" else settings.policy,
        "ghosts": settings.ghosts,
        "choosing": settings.policy == "auto",
        "engine": engine,
        "queue_depth": settings.queue_depth,
        "io_threads": settings.io_threads,
        "hugepages": {"off": "off", "hugetlb": "tlb"}.get(settings.hugepages, "thp"),
        "mlock": settings.mlock != "off",
        "registered": settings.mlock != "off",
        "overflow": sizing.overflow,
        "direct_required": settings.direct == "require",
        "speculation": settings.speculation,
        "sums": native(checks, inventory, placement),
    }


class Settling(Protocol):
    """What settle() asks of a store."""

    def _progress(self) -> tuple[int, bool, int]: ...
    def _memory(self) -> Mapping[str, Any]: ...
    def close(self) -> None:
        """Stop."""


def settle(store: Settling, settings: Settings, arena: int, progress: Callable[[int, int], Any] | None) -> None:
    """Wait for the arena's memory if somebody watches or requires something of it; close the store if that is missing.

    Raises
    ------
    FeatureUnavailable
        hugepages="require" or mlock="require" could not be had.
    """
    wait = "require" in (settings.hugepages, settings.mlock)
    if progress is None and not wait:
        return
    pause = threading.Event()
    while True:
        populated, settled, refused = store._progress()
        if progress is not None:
            progress(populated, arena)
        if settled or refused:
            break
        pause.wait(0.02)
    missing = _missing(settings, store._memory()) if wait else []
    if missing:
        store.close()
        raise errors.FeatureUnavailable("; ".join(missing))


def _missing(settings: Settings, memory: Mapping[str, Any]) -> list[str]:
    missing = []
    arena, locked = memory["arena_bytes"], memory["locked_bytes"] + memory["registered_bytes"]
    if settings.hugepages == "require" and memory["huge_bytes"] < HUGE_ENOUGH * whole_huge(arena):
        missing.append(f"hugepages='require': only {memory['huge_bytes']} of {arena} bytes are in huge pages")
    if settings.mlock == "require" and locked < arena:
        why = os.strerror(memory["mlock_errno"] or memory["registration_errno"])
        missing.append(
            f"mlock='require': {locked} of {arena} bytes are locked: {why}; raise RLIMIT_MEMLOCK (ulimit -l)"
        )
    return missing
