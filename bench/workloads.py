"""What the hit benchmarks do, as functions of a repeat count; shared by hits.py (receipts) and bench_hits.py."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cachetools
import numpy as np

import fastcache
from fastcache.inventory import Layout
from fastcache.layout.record import LayerExperts, Record, StoredTensor, View
from fastcache_ext.driven import Table

LAYERS, EXPERTS, BATCH = 16, 128, 8
ROWS, COLUMNS = 8, 64
Workload = Callable[[int], None]


class Empty:
    """A method that does nothing, for scale."""

    def method(self, layer: int, expert: int) -> None:
        """Nothing."""


@contextmanager
def full_store(path: Any, n_layers: int = LAYERS, **more: Any) -> Iterator[fastcache.ExpertStore]:
    """A store with every one of its `n_layers` x 128 small experts (three float32 tensors) resident."""
    nbytes = ROWS * COLUMNS * 4
    with open(path, "wb") as out:
        out.write(np.arange(n_layers * EXPERTS * 3 * ROWS * COLUMNS, dtype=np.float32).tobytes())
    f32 = np.dtype(np.float32)
    labels = ("gate", "up", "down")
    record = Record(
        tensors=tuple(StoredTensor(label, "F32", (ROWS, COLUMNS), nbytes, 4) for label in labels),
        views=tuple(View(label, i, 0, f32, (ROWS, COLUMNS), (COLUMNS * 4, 4)) for i, label in enumerate(labels)),
    )
    layers = {}
    for layer in range(n_layers):
        at = (layer * EXPERTS + np.arange(EXPERTS))[:, None] * 3 * nbytes + np.arange(3)[None] * nbytes
        layers[layer] = LayerExperts(
            layer, (record,), np.zeros(EXPERTS, np.uint16), np.zeros((EXPERTS, 3), np.int32), at.astype(np.int64)
        )
    layout = Layout("unknown", BATCH, (str(path),), layers, {}, {})
    with fastcache.open(layout, **({"budget": "all", "name": "hits", "policy": "next_use"} | more)) as store:
        for layer in store.layers:
            store.acquire_many(layer, store.experts(layer)).release()
        yield store


def workloads(store: fastcache.ExpertStore) -> dict[str, Workload]:
    """Return name -> f(n): n operations each."""
    ordered: OrderedDict[tuple[int, int], int] = OrderedDict(
        ((layer, expert), 1) for layer in range(LAYERS) for expert in range(EXPERTS)
    )
    plain = dict(ordered)
    lru: cachetools.LRUCache[tuple[int, int], int] = cachetools.LRUCache(len(plain))
    lru.update(plain)
    memo = functools.lru_cache(None)(lambda layer, expert: 1)
    empty = Empty()
    batch = list(range(0, 2 * BATCH, 2))

    def loop(n: int) -> None:
        for _ in range(n):
            pass

    def empty_method(n: int) -> None:
        method = empty.method
        for i in range(n):
            method(3, i & 63)

    def dict_get(n: int) -> None:
        for i in range(n):
            plain[3, i & 63]

    def lru_cache(n: int) -> None:
        for i in range(n):
            memo(3, i & 63)

    def ordered_dict_lru(n: int) -> None:
        move = ordered.move_to_end
        for i in range(n):
            key = (3, i & 63)
            ordered[key]
            move(key)

    def cachetools_lru(n: int) -> None:
        for i in range(n):
            lru[3, i & 63]

    def acquire_release(n: int) -> None:
        acquire = store.acquire
        for i in range(n):
            acquire(3, i & 63)

    def subscript_release(n: int) -> None:
        for i in range(n):
            store[3, i & 63]

    def acquire_three_arrays_release(n: int) -> None:
        acquire = store.acquire
        for i in range(n):
            lease = acquire(3, i & 63)
            lease["gate"], lease["up"], lease["down"]

    def subscript_three_arrays_release(n: int) -> None:
        for i in range(n):
            lease = store[3, i & 63]
            lease["gate"], lease["up"], lease["down"]

    def acquire_many_8(n: int) -> None:
        many = store.acquire_many
        for _ in range(n):
            many(3, batch)

    return {f.__name__: f for f in (
        loop, empty_method, dict_get, lru_cache, ordered_dict_lru, cachetools_lru, acquire_release, subscript_release,
        acquire_three_arrays_release, subscript_three_arrays_release, acquire_many_8,
    )}  # fmt: skip


def evictions(policy: str, slots: int, leased: float = 0.0, by_layer: bool = True) -> Callable[[int], float]:
    """Return f(n) -> ns each: n misses in a full table over twice as many experts: request, reserve (evicts), publish.

    Timed inside, without Python; two readings of the clock are part of each. A share of `leased` slots is held. Keys
    come as tokens bring them, eight of a layer, layer after layer, or (not `by_layer`) each of another layer.
    """
    experts = 256
    layers = 2 * slots // experts
    table = Table([experts] * layers, bytes(layers * experts), [slots], policy)
    rng = np.random.default_rng(1)
    order = rng.permutation(layers * experts).astype(np.int32)
    if by_layer:
        rows = np.stack([rng.permutation(experts) + layer * experts for layer in range(layers)])
        order = np.concatenate([rows[:, at : at + 8].reshape(-1) for at in range(0, experts, 8)]).astype(np.int32)
    table.churn(order, slots)
    for slot in range(int(slots * leased)):
        table.lease(slot)
    return functools.partial(table.churn, order)
