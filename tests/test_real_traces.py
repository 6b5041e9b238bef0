"""The policies on the routing of real models. The traces are not ours to hand on: beside the checkout, or a skip."""

import bisect
import csv
import heapq
from pathlib import Path

import numpy as np
import pytest

from fastcache_ext.driven import Table
from fastcache_ext.policy import NAMES

TRACES = Path(__file__).parents[2] / "shared" / "traces"
FRACTIONS = (0.03, 0.05, 0.10, 0.15, 0.20)
DEMAND = 0


def batches(records, experts):
    """Keys of what one layer asks at once: the distinct experts of contiguous records of one layer."""
    asked, before = [], None
    for layer, expert in records:
        if layer != before:
            asked.append({})
            before = layer
        asked[-1][layer * experts + expert] = True
    return [list(keys) for keys in asked]


@pytest.fixture(scope="module", params=["qwen", "kimi"])
def trace(request):
    """(layers, experts, batches)."""
    name, layers, experts = {
        "qwen": ("qwen3-30b-a3b.route.csv", 48, 128),
        "kimi": ("kimi-k3-expert-trace.bin", 93, 896),
    }[request.param]
    path = TRACES / name
    if not path.exists():
        pytest.skip("no real traces in ../shared/traces")
    if path.suffix == ".bin":
        records = np.fromfile(path, "<i4").reshape(-1, 2).tolist()
    else:
        rows = csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#"))
        records = ((int(row["layer"]), int(row["expert"])) for row in rows)
    return request.param, layers, experts, batches(records, experts)


def hits_of(policy, layers, experts, asked, capacity):
    """Serve batches as the store does: what is there is leased first, and all are let go at the end."""
    table = Table([experts] * layers, bytes(layers * experts), [capacity], policy)
    hits = 0
    for keys in asked:
        here = [slot for key in keys if (slot := table.slot_of(key)) >= 0]
        for slot in here:
            table.lease(slot)
        for key in keys:
            table.request(key)
            if table.slot_of(key) >= 0:
                hits += 1
                continue
            slot, _ = table.reserve(key, DEMAND, DEMAND)
            assert slot >= 0
            table.lease(slot)
            table.publish(slot)
            table.read(slot)
            here.append(slot)
        for slot in here:
            table.drop(slot)
    return hits


def belady(asked, capacity):
    """The hits of giving up what is asked for latest, never a member of the batch."""
    uses = {}
    for number, keys in enumerate(asked):
        for key in keys:
            uses.setdefault(key, []).append(number)
    resident, heap, hits = {}, [], 0  # key -> batch of its next use; the same as a heap, stale entries included
    for number, keys in enumerate(asked):
        here = [key for key in keys if key in resident]
        hits += len(here)
        for key in here:
            resident[key] = number  # now: no candidate
        for key in keys:
            if key not in resident and len(resident) == capacity:
                while True:
                    latest, gone = heapq.heappop(heap)
                    if resident.get(gone) == -latest:
                        break
                del resident[gone]
            resident[key] = number
        for key in keys:
            at = bisect.bisect_right(uses[key], number)
            resident[key] = uses[key][at] if at < len(uses[key]) else len(asked)
            heapq.heappush(heap, (-resident[key], key))
    return hits


def test_next_use_leads_at_every_size(trace):
    name, layers, experts, asked = trace
    total, closed = sum(map(len, asked)), {}
    for fraction in FRACTIONS:
        capacity = round(fraction * layers * experts)
        hits = {policy: hits_of(policy, layers, experts, asked, capacity) for policy in NAMES}
        best = belady(asked, capacity)
        print(name, fraction, {policy: round(100 * n / total, 2) for policy, n in hits.items()}, 100 * best / total)
        assert max(hits.values()) == hits["next_use"], (fraction, hits)
        assert hits["next_use"] <= best
        if best > hits["lru"]:
            closed[fraction] = (hits["next_use"] - hits["lru"]) / (best - hits["lru"])
    if name == "qwen":
        assert sum(closed.values()) / len(closed) >= 0.33
    else:
        assert closed[0.05] >= 0.9
