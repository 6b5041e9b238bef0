"""What a replay has room for: slots per size class, from a share, a number of slots or a budget.

Imports budget, placement, units, errors, NumPy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fastcache.budget import Facts, parse_budget
from fastcache.errors import InvalidBudget
from fastcache.placement import size_classes
from fastcache.slabs import Slabs, plan_slabs
from fastcache.traces.trace import Array, Trace
from fastcache.units import parse_bytes, whole

PAGE = 4096  # bytes: a slot is whole pages


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """Slots of a simulated store."""

    slots: tuple[int, ...]  # per size class
    cls: Array  # uint8 [pool]: size class of each expert
    fraction: float  # of the pool: as asked for, else slots / pool
    budget_bytes: int | None = None  # where it was a budget
    slabs: Slabs | None = None  # where classes trade them; `slots` is then what they begin with

    @property
    def experts(self) -> int:
        """Return how many experts fit."""
        return sum(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class SlotSizes:
    """The slots that experts take."""

    cls: Array  # uint8 [pool]: size class of each expert
    slot_bytes: list[int]  # per class
    batch: int  # experts that are asked for at a time

    def by_expert(self) -> Array:
        """Return the bytes of the slot that each expert takes, int64 [pool]."""
        return np.asarray(self.slot_bytes, np.int64)[self.cls]


def of_slots(trace: Trace, slots: int) -> Capacity:
    """Return room for `slots` experts of whatever size, at most the pool."""
    slots = min(whole("slots", slots), trace.pool)
    return Capacity((slots,), np.zeros(trace.pool, np.uint8), slots / trace.pool if trace.pool else 0.0)


def of_fraction(trace: Trace, fraction: float | str | Fraction) -> Capacity:
    """Return room for that share of the pool, rounded down to whole experts: 0.05 or "0.05" of 83,328 are 4,166.

    Raises
    ------
    ValueError
        It is not between 0 and 1.
    """
    try:
        share = Fraction(str(fraction))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"a fraction of {fraction!r}: give a number between 0 and 1") from None
    if not 0 <= share <= 1:
        raise ValueError(f"a fraction of {fraction}: give one between 0 and 1")
    return dataclasses.replace(of_slots(trace, int(trace.pool * share)), fraction=float(share))


def of_budget(trace: Trace, budget: int | str, sizes: SlotSizes | None = None) -> Capacity:
    """Return the slots that a store would make of a budget.

    Parameters
    ----------
    sizes : SlotSizes, optional
        Of the checkpoint. Default: the trace's own, each expert in whole pages; a live store's slots are up to a sector
        per extent larger, and where an expert lies in its file is not in a trace.

    Raises
    ------
    InvalidBudget
        It cannot be parsed, or the trace does not know the sizes, or top_k where the budget counts cycles.
    """
    sizes = sizes or _of_trace(trace)
    if sizes is None:
        raise InvalidBudget(f"budget {budget!r}: the trace does not say how large an expert is; give --expert-bytes")
    cls, slot_bytes = sizes.cls, sizes.slot_bytes
    counts = np.bincount(cls, minlength=len(slot_bytes)).tolist()
    facts = Facts(
        expert_bytes=sum(size * count for size, count in zip(slot_bytes, counts, strict=True)),
        cycle_bytes=cycle_bytes(trace, sizes),
        trunk_bytes=0,
        free_bytes=0,
    )
    text = str(budget).strip().lower()
    if text == "auto" or text.endswith("free"):
        raise InvalidBudget(
            f"budget {budget!r}: a trace knows no free memory; give bytes, 'P% of experts' or 'N cycles'"
        )
    if trace.top_k is None and "cycle" in text:
        raise InvalidBudget(
            f"budget {budget!r}: the token cycle is not known, because the trace gives no top_k; give --top-k"
        )
    nbytes, _ = parse_budget(budget, facts)
    slabs = plan_slabs(nbytes, slot_bytes, counts, sizes.batch)
    slots = slabs.begins_with
    share = sum(slots) / trace.pool if trace.pool else 0.0
    return Capacity(tuple(slots), cls, share, nbytes, slabs if slabs.count else None)


def cycle_experts(trace: Trace) -> int | None:
    """Return how many experts one token touches: top_k in each layer that was asked; None where top_k is not known."""
    if trace.top_k is None:
        return None
    counts = trace.counts()
    first = trace.layer_first
    return sum(min(trace.top_k, n) for i, (_, n) in enumerate(trace.layers) if counts[first[i] : first[i + 1]].any())


def _of_trace(trace: Trace) -> SlotSizes | None:
    sizes = trace.sizes()
    return None if sizes is None else SlotSizes(*size_classes(sizes, PAGE), trace.top_k or 1)


def cycle_bytes(trace: Trace, sizes: SlotSizes | None = None) -> int | None:
    """Return the bytes of slots that one token touches, the largest experts of each layer; None where not known."""
    sizes = sizes or _of_trace(trace)
    if trace.top_k is None or sizes is None:
        return None
    slots = sizes.by_expert()
    counts, first, total = trace.counts(), trace.layer_first, 0
    for i in range(len(trace.layers)):
        mine = slice(int(first[i]), int(first[i + 1]))
        if counts[mine].any():
            total += int(np.sort(slots[mine])[-trace.top_k :].sum())
    return total


def with_sizes(trace: Trace, expert_bytes: int | str | None = None, top_k: int | None = None) -> Trace:
    """Return the trace with what a format did not say: bytes of every expert, experts per token and layer."""
    if expert_bytes is not None:
        nbytes = parse_bytes(expert_bytes, "expert bytes")
        if nbytes < 1:
            raise ValueError("expert bytes must be at least 1; got 0")
        trace = dataclasses.replace(trace, expert_nbytes=nbytes)
    return trace if top_k is None else dataclasses.replace(trace, top_k=whole("top_k", top_k, "or None"))
