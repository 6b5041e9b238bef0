"""How many slots of which sizes a budget buys, and what to tell the user about it.

Owns the step from spans and a budget to slots per size class. Imports inventory, placement, budget, memory, settings.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcache.budget import Facts, parse_budget
from fastcache.inventory import Inventory
from fastcache.memory import available_bytes
from fastcache.placement import size_classes
from fastcache.settings import Settings
from fastcache.slabs import Slabs, plan_slabs
from fastcache.units import format_bytes, whole_huge

log = logging.getLogger("fastcache")
RESERVE = 0.15  # share of free memory that pass-through leaves alone by default
LEAST_OVERFLOW_SLOTS = 16  # pass-through may always hold this many of the largest experts


@dataclass(frozen=True, slots=True)
class Sizing:
    """Sizes in bytes, padding included."""

    cls: np.ndarray[Any, np.dtype[Any]]  # uint8 [K]: size class of each expert; 255: no such expert
    slot_bytes: list[int]  # per class
    slabs: Slabs  # and slots that classes keep
    budget: int
    arena: int
    experts: int  # slots for all experts
    cycle: int | None  # one token's experts
    overflow: int


def size_store(inventory: Inventory, span: np.ndarray[Any, Any], align: int, settings: Settings, name: str) -> Sizing:
    """Return the sizing of a store, and log it: INFO for the budget, WARNING where it will hurt.

    Parameters
    ----------
    span : int64 array [K]
        Bytes of a slot that each expert uses; -1: there is no such expert.
    align : int
        Bytes: what every slot is aligned to.

    Raises
    ------
    InvalidBudget, TypeError
        The budget cannot be parsed.
    """
    cls, slot_bytes = classes_of(inventory, span, align)
    counts = [int((cls == c).sum()) for c in range(len(slot_bytes))]
    free = available_bytes()
    experts = _total(slot_bytes, counts)
    cycle = _cycle(inventory, np.asarray([*slot_bytes, 0])[np.minimum(cls, len(slot_bytes))])
    budget, how = parse_budget(
        settings.budget, Facts(experts, cycle, inventory.trunk_bytes, free), settings.budget_name
    )
    whole = whole_huge(budget) if settings.hugepages == "hugetlb" else budget  # such a mapping comes in whole pages
    slabs = plan_slabs(whole, slot_bytes, counts, inventory.top_k or 1)
    arena = slabs.arena_bytes(slot_bytes)
    largest = max(slot_bytes, default=0)
    overflow = settings.overflow
    if overflow is None:
        overflow = max(int((free - arena) * (1 - RESERVE)), LEAST_OVERFLOW_SLOTS * largest)
    log.info("%s: budget %s; %d of %d experts in slots", name, how, sum(slabs.begins_with), sum(counts))
    if arena > free:
        log.warning("%s: the arena takes %s, but only %s is free", name, format_bytes(arena), format_bytes(free))
    batch = (inventory.top_k or 1) * largest
    if arena < experts and arena < max(batch, cycle or 0):
        need, what = (batch, f"one batch of {inventory.top_k or 1}") if arena < batch else (cycle, "one token cycle")
        log.warning(
            "%s: a budget of %s is below %s: give at least %s (%d bytes), or most requests read from disk",
            *(name, format_bytes(budget), what, format_bytes(need or 0), need),
        )
    return Sizing(cls, slot_bytes, slabs, budget, arena, experts, cycle, overflow)


def classes_of(
    inventory: Inventory, span: np.ndarray[Any, Any], align: int
) -> tuple[np.ndarray[Any, np.dtype[Any]], list[int]]:
    """Return the size class of each expert and the bytes of a slot of each, as `placement.size_classes` does."""
    return size_classes(_alike(span, inventory.payload()), align)


def _alike(span: np.ndarray[Any, Any], payload: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Give experts of the same size the same span, the largest: where they lie in their files makes no size class."""
    _, kind = np.unique(np.where(span < 0, -1, payload), return_inverse=True)
    most = np.full(int(kind.max(initial=-1)) + 1, -1, np.int64)
    np.maximum.at(most, kind, span)
    return most[kind]


def _total(sizes: list[int], counts: list[int]) -> int:
    return sum(size * count for size, count in zip(sizes, counts, strict=True))


def _cycle(inventory: Inventory, sizes: np.ndarray[Any, Any]) -> int | None:
    """Bytes of slots that one token touches: in each layer the top_k largest experts."""
    if not inventory.top_k:
        return None
    total, first = 0, 0
    for _, count in inventory.layers:
        total += int(np.sort(sizes[first : first + count])[-inventory.top_k :].sum())
        first += count
    return total
