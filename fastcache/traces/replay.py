"""A trace through the store's own policies, and through Belady's. Imports traces, NumPy and the compiled simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcache.traces.capacity import Capacity
from fastcache.traces.columns import Column
from fastcache.traces.trace import Array, Trace
from fastcache_ext.belady import Belady, NextUses
from fastcache_ext.policy import NAMES
from fastcache_ext.simulate import Simulator

BELADY = ("belady", "belady_bypass")  # every miss takes a slot, as in the store; or nothing need be kept
PIECE = 1 << 18  # requests served between two looks at signals, well under a second


def policies() -> tuple[str, ...]:
    """Return the names of the store's eviction policies, in the order of their numbers."""
    return tuple(sorted((name for name in NAMES if name != "auto"), key=NAMES.__getitem__))


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy made of a trace at one capacity. requests = hits + misses."""

    policy: str
    capacity: int  # experts
    fraction: float  # of the pool
    hits: int
    hit_rate: float  # hits / requests, of distinct experts per batch
    misses: int
    evictions: int
    pass_throughs: int  # misses that got no slot
    budget_bytes: int | None  # where the capacity was a budget
    bytes_missed: int | None  # payload of the misses; None where the trace does not know sizes

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def replay(trace: Trace, names: Iterable[str], capacities: Iterable[Capacity]) -> list[Row]:
    """Replay a trace from an empty store, once per policy and capacity.

    Each batch is served as the store serves `acquire_many` from one caller: members that are resident are leased
    first, then each member is a hit or a miss in order, a miss takes a slot if anything but members of the batch can
    go, and all leases end with the batch.

    Parameters
    ----------
    names : iterable of str
        Of `policies()`, or of BELADY.

    Returns
    -------
    list of Row
        Capacity by capacity, each in the order of `names`.

    Raises
    ------
    ValueError
        There is no such policy.
    """
    names = list(names)
    unknown = [name for name in names if name not in (*policies(), *BELADY)]
    if unknown:
        raise ValueError(f"no policy {unknown[0]!r}; there are {', '.join((*policies(), *BELADY))}")
    future = next_uses(trace) if any(name in BELADY for name in names) else None
    return [_serve(trace, name, capacity, future) for capacity in capacities for name in names]


def pieces(trace: Trace) -> list[tuple[int, int]]:
    """Return ranges of whole batches with about PIECE requests each."""
    edges = np.searchsorted(trace.batches, np.arange(PIECE, max(trace.requests, 1), PIECE))
    cuts = np.unique(np.concatenate([[0], edges, [len(trace.batches) - 1]])).tolist()
    return list(itertools.pairwise(cuts))


def cut(trace: Trace, first: int, last: int) -> tuple[Array, Array, slice]:
    """Return (keys int32, sizes int64, where the keys stand) of batches [first, last)."""
    edges = np.asarray(trace.batches[first : last + 1], np.int64)
    where = slice(int(edges[0]), int(edges[-1]))
    return np.ascontiguousarray(trace.keys[where], np.int32), np.diff(edges), where


def next_uses(trace: Trace) -> Array:
    """Return the batch in which each request's expert is asked for next; 2**31 - 1: never. int32 [R], mapped."""
    with Column(np.int32) as column:
        out = column.zeros(trace.requests)
    backward = NextUses(trace.pool)
    for first, last in reversed(pieces(trace)):
        keys, sizes, where = cut(trace, first, last)
        backward.fill(keys, sizes, first, out[where])
    return out


def _serve(trace: Trace, name: str, capacity: Capacity, future: Array | None) -> Row:
    sizes_known = trace.sizes()
    nbytes = np.zeros(trace.pool, np.int64) if sizes_known is None else np.ascontiguousarray(sizes_known, np.int64)
    store: Simulator | Belady
    if future is not None and name in BELADY:
        store = belady = Belady(capacity.cls, nbytes, capacity.slots, name == "belady_bypass")
        for keys, sizes, where in served(trace):
            belady.run(keys, sizes, np.ascontiguousarray(future[where]))
    else:
        first = trace.layer_first.astype(np.int32)
        slots, slabs = capacity.slots, None
        if capacity.slabs is not None:
            slots, slabs = tuple(capacity.slabs.slots), capacity.slabs.plan()
        store = simulator = Simulator(first, capacity.cls, nbytes, slots, name, slabs)
        for keys, sizes, _ in served(trace):
            simulator.run(keys, sizes)
    return Row(
        policy=name,
        capacity=capacity.experts,
        fraction=capacity.fraction,
        hits=store.hits,
        hit_rate=store.hits / trace.requests if trace.requests else 0.0,
        misses=store.misses,
        evictions=store.evictions,
        pass_throughs=store.pass_throughs,
        budget_bytes=capacity.budget_bytes,
        bytes_missed=None if sizes_known is None else store.bytes_missed,
    )


def served(trace: Trace) -> Iterator[tuple[Array, Array, slice]]:
    """Yield the whole trace in pieces, as cut() gives them."""
    for first, last in pieces(trace):
        yield cut(trace, first, last)
