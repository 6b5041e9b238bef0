"""What budget to give a model on a trace's traffic, and what more would buy.

Owns the advice. Imports layout, memory, rawread, traces, units.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcache.errors import TraceError
from fastcache.layout.build import build_layout
from fastcache.layout.record import Layout
from fastcache.memory import available_bytes
from fastcache.rawread import RawRead, measure
from fastcache.traces.capacity import SlotSizes, cycle_bytes, of_budget, with_sizes
from fastcache.traces.model import of_model, same_checkpoint, slots_of
from fastcache.traces.mrc import Curve, grid
from fastcache.traces.replay import policies, replay
from fastcache.traces.trace import Trace
from fastcache.units import format_bytes

RESERVE = 0.15  # share of free memory that is left alone, as budget "auto" does
READ_LIMIT = 256 << 20  # bytes read to measure the device
POINTS = 40  # budgets that are replayed
NEAR = 0.03  # of requests: a budget that hits so many less than the best that fits is near enough


@dataclass(frozen=True, slots=True)
class Point:
    """What one budget gives: `experts` slots, as `fastcache.open` cuts it. A token is what asks for one token cycle."""

    budget_bytes: int
    experts: int
    hit_rate: float
    read_bytes_per_token: float
    read_seconds_per_token: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Three lines, and the figures they come from; bytes are of slots."""

    lines: tuple[str, str, str]
    budget: Point
    policy: str
    points: tuple[Point, ...]  # the curve, ascending
    cycle: Point  # a budget of one token's experts
    knee: Point
    asked_bytes: int  # every expert that the trace asks for: more buys nothing
    expert_bytes: int  # every expert of the model
    trunk_bytes: int
    free_bytes: int
    usable_bytes: int  # free, less trunk, less a reserve
    read_gb_per_s: float
    direct: bool  # whether that was measured with O_DIRECT
    complete: bool  # of the trace: see Trace
    lost: int  # likewise, records
    same_checkpoint: bool | None  # whether the trace was recorded with these files; None: it does not say

    def to_dict(self) -> dict[str, Any]:
        """Return everything by name, for JSON."""
        return dataclasses.asdict(self)


def read_rate(layout: Layout) -> RawRead:
    """Measure the device on the checkpoint's own files: some hundred MiB in random order, direct where it works.

    Raises
    ------
    OSError
    ValueError
        The files are smaller than a page.
    """
    largest = max((os.stat(path).st_size for path in layout.files), default=0)
    block = 4 << 20
    while block > 4096 and block * 16 > largest:
        block //= 2
    return measure(layout.files, block=block, limit=READ_LIMIT)


def advise(
    model: str | os.PathLike[str],
    trace: Trace,
    policy: str = "next_use",
    rate: RawRead | None = None,
    free_bytes: int | None = None,
    top_k: int | None = None,
) -> Advice:
    """Say what budget a model should get for traffic like the trace's.

    Parameters
    ----------
    model : path
        A checkpoint; its headers are read.
    rate : RawRead, optional
        What the device gives. Default: measured, on the checkpoint's own files.
    free_bytes : int, optional
        Default: what this process may still take, by the machine and its cgroups.
    top_k : int, optional
        Experts per token and layer. Default: what the model says, else the trace.

    Raises
    ------
    CheckpointError, OSError
    TraceError
        The trace asks for nothing, or for an expert that the model does not have.
    ValueError
        top_k is not known or above the experts of a layer, or there is no such policy.
    """
    if policy not in policies():
        raise ValueError(f"a store has no policy {policy!r}, only {', '.join(policies())}")
    layout = build_layout(model)
    trace = with_sizes(of_model(trace, layout), top_k=top_k)
    if not trace.requests:
        raise TraceError("a trace that asks for nothing", filename=trace.name)
    least = min(count for _, count in trace.layers)
    if trace.top_k is not None and trace.top_k > least:
        raise ValueError(f"top_k is {trace.top_k}, and a layer has {least} experts")
    sizes = slots_of(layout)
    slots, cycle = sizes.by_expert(), cycle_bytes(trace, sizes)
    if cycle is None:
        raise ValueError("neither the model nor the trace says top_k: give --top-k")
    rate = rate or read_rate(layout)
    free = available_bytes() if free_bytes is None else free_bytes
    trunk = sum(tensor.nbytes for tensor in layout.trunk.values())
    usable = max(int((free - trunk) * (1 - RESERVE)), 0)
    everything = int(slots.sum())
    there = trace.counts() > 0
    asked = int(slots[there].sum())
    marks = {round(experts * asked / int(there.sum())) for experts in grid(trace)}  # as `mrc` has them, for the knee
    # Of classes, each may keep only its own share: a budget for all that is asked may be larger than their sum.
    budgets = {round(x) for x in np.linspace(cycle // 4, everything, POINTS).tolist()} | {cycle, everything, *marks}
    points = measure_budgets(trace, sizes, policy, sorted(budgets), cycle, rate)
    full = next(point for point in points if point.hit_rate == points[-1].hit_rate)
    within = [point for point in points if point.budget_bytes <= full.budget_bytes]
    known = {point.budget_bytes: point for point in points}
    marked = [known[nbytes] for nbytes in sorted(marks)]
    misses = np.asarray([1 - point.hit_rate for point in marked])
    knee = marked[Curve(policy, np.asarray([point.budget_bytes for point in marked]), misses).knee()]
    at_cycle = known[min(cycle, everything)]
    (best,) = measure_budgets(trace, sizes, policy, [min(full.budget_bytes, usable)], cycle, rate)
    # The least budget that comes near the best that fits; never less than a token cycle, if that fits.
    enough = [point for point in within if point.hit_rate >= best.hit_rate - NEAR and point.budget_bytes >= cycle]
    budget = enough[0] if enough and enough[0].budget_bytes <= usable else best
    lines = _lines(budget, knee, at_cycle, full, usable, free, rate)
    return Advice(
        lines=lines,
        budget=budget,
        policy=policy,
        points=tuple(points),
        cycle=at_cycle,
        knee=knee,
        asked_bytes=asked,
        expert_bytes=everything,
        trunk_bytes=trunk,
        free_bytes=free,
        usable_bytes=usable,
        read_gb_per_s=rate.gb_per_s,
        direct=rate.direct,
        complete=trace.complete,
        lost=trace.lost,
        same_checkpoint=same_checkpoint(trace, layout),
    )


def measure_budgets(
    trace: Trace, sizes: SlotSizes, policy: str, budgets: list[int], cycle: int, rate: RawRead
) -> list[Point]:
    """Return what each budget gives, by replay."""
    tokens = float(trace.counts() @ sizes.by_expert()) / cycle  # token cycles that the trace asks for
    rows = replay(trace, [policy], [of_budget(trace, budget, sizes) for budget in budgets])
    points = []
    for budget, row in zip(budgets, rows, strict=True):
        nbytes = (row.bytes_missed or 0) / tokens
        seconds = nbytes / rate.gb_per_s / 1e9 if rate.gb_per_s else 0.0
        points.append(Point(budget, row.capacity, row.hit_rate, nbytes, seconds))
    return points


def _lines(
    budget: Point, knee: Point, cycle: Point, full: Point, usable: int, free: int, rate: RawRead
) -> tuple[str, str, str]:
    device = "the device" if rate.direct else "this file system, without direct reads,"
    give = (
        f"Give {format_bytes(budget.budget_bytes)} (budget={budget.budget_bytes}), {budget.experts} experts: "
        f"{budget.hit_rate:.1%} of requests hit, and a token reads "
        f"{format_bytes(round(budget.read_bytes_per_token))}, {_time(budget)} at the {rate.gb_per_s:.2f} GB/s that "
        f"{device} gives; {format_bytes(usable)} of {format_bytes(free)} free memory are usable."
    )
    if cycle.budget_bytes > usable:
        least = f"One token cycle, {format_bytes(cycle.budget_bytes)}, does not fit: expect to read most of each token."
    else:
        least = (
            f"The knee is at {format_bytes(knee.budget_bytes)} ({knee.hit_rate:.1%}, {_time(knee)} per token); below "
            f"one token cycle, {format_bytes(cycle.budget_bytes)} ({cycle.hit_rate:.1%}, {_time(cycle)}), reads rule."
        )
    gain = full.hit_rate - budget.hit_rate
    if gain <= 0.0005 or full.budget_bytes <= budget.budget_bytes:
        return give, least, "More buys nothing: what this traffic asks for again is kept."
    fits = "fits" if full.budget_bytes <= usable else "does not fit"
    more = (
        f"More buys at most {100 * gain:.1f} points, {_time(budget, full)} per token, at "
        f"{format_bytes(full.budget_bytes)}, which {fits}."
    )
    return give, least, more


def _time(point: Point, less: Point | None = None) -> str:
    seconds = point.read_seconds_per_token - (less.read_seconds_per_token if less else 0.0)
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
