"""A trace held to a checkpoint: its experts by the checkpoint's keys, and the slots that a store gives them.

Owns what tells one model's trace from another's. Imports assembly, errors, fingerprint, inventory, layout, sizing,
traces, NumPy and, of the compiled half, the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

import numpy as np

from fastcache.assembly import place_experts
from fastcache.errors import TraceError
from fastcache.fingerprint import fingerprint
from fastcache.inventory import inventory_of
from fastcache.layout.record import Layout
from fastcache.sizing import classes_of
from fastcache.traces.capacity import PAGE, SlotSizes
from fastcache.traces.columns import Column
from fastcache.traces.trace import BLOCK, Array, Trace
from fastcache_ext.files import FileSet


def of_model(trace: Trace, layout: Layout) -> Trace:
    """Return the trace in a checkpoint's dense keys, with its layers, sizes and top_k.

    Raises
    ------
    TraceError
        The trace asks for an expert that the checkpoint does not have, or says that the model is another: other layers,
        or other numbers of experts in layers that it asks for.
    """
    counts = trace.counts()
    edges = trace.layer_first
    guessed = _guessed(trace, counts)
    first, total = {}, 0
    for number, layer in layout.layers.items():
        first[number] = total
        total += len(layer)
    new = np.full(trace.pool, -1, np.int64)
    for i, (number, count) in enumerate(trace.layers):
        mine = layout.layers.get(number)
        here = min(count, len(mine)) if mine is not None else 0
        asked = counts[edges[i] : edges[i + 1]]
        missing = np.flatnonzero(asked[here:])
        if len(missing):
            has = (
                f"{here} experts there" if here else f"experts in layers {', '.join(map(str, layout.layers)) or 'none'}"
            )
            raise _other(trace, f"asks for layer {number}, expert {here + missing[0]}; the model has {has}")
        if asked.any() and mine is not None and count != len(mine) and not guessed:
            raise _other(trace, f"is of {count} experts in layer {number}; the model has {len(mine)} there")
        if here:
            new[edges[i] : edges[i] + here] = first[number] + np.arange(here)
    without = sorted(set(layout.layers) - {number for number, _ in trace.layers})
    if without and trace.requests:
        raise _other(trace, f"knows no layer {without[0]}, in which the model has experts")
    with Column(np.int32) as column:
        for start in range(0, trace.requests, BLOCK):
            column.append(new[trace.keys[start : start + BLOCK]])
        keys = column.finish()
    sizes = [
        np.asarray([record.nbytes for record in layer.records], np.int64)[layer.record_of]
        for layer in layout.layers.values()
    ]
    return dataclasses.replace(
        trace,
        layers=tuple((number, len(layer)) for number, layer in layout.layers.items()),
        keys=keys,
        top_k=layout.top_k or trace.top_k,
        expert_nbytes=np.concatenate(sizes) if sizes else None,
    )


def _guessed(trace: Trace, counts: Array) -> bool:
    """Whether the layers of a trace may be no more than what it asks for: its format names none, so importers count.

    Then they go from 0 to the highest that is asked for, each with as many experts as the highest expert's number says.
    """
    if "counters" in trace.run:  # a recording has its store's
        return False
    if not trace.requests:
        return True
    numbers, sizes = zip(*trace.layers, strict=True)
    if numbers != tuple(range(len(numbers))) or len(set(sizes)) > 1:
        return False
    by_layer = counts.reshape(len(numbers), sizes[0]) > 0
    return bool(by_layer[-1].any() and by_layer[:, -1].any())


def _other(trace: Trace, what: str) -> TraceError:
    return TraceError(f"{what}: is it that model's trace?", filename=trace.name)


def same_checkpoint(trace: Trace, layout: Layout) -> bool | None:
    """Return whether a trace was recorded with these very files; None where it does not say."""
    if not trace.fingerprint:
        return None
    return trace.fingerprint == fingerprint(inventory_of(layout), [os.stat(path).st_size for path in layout.files])


def slots_of(layout: Layout) -> SlotSizes:
    """Return the slots that a store opened on the checkpoint gives its experts: aligned as its files must be read.

    Raises
    ------
    OSError
        A file cannot be opened.
    """
    inventory = inventory_of(layout)
    with contextlib.closing(FileSet(inventory.paths)) as files:
        aligns = [row["align"] for row in files.describe()]
    cls, slot_bytes = classes_of(inventory, place_experts(inventory, aligns).span, max([PAGE, *aligns]))
    return SlotSizes(cls, slot_bytes, inventory.top_k or 1)
