"""Ghost caches and stack distances: the whole pool's are a full simulation to the digit, a sample's are near it."""

import csv
import ctypes
import os
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from fastcache_ext.driven import Table
from fastcache_ext.policy import NAMES
from fastcache_ext.watch import Watch

TRACES = Path(__file__).parents[2] / "shared" / "traces"
DEMAND = 0


def tokens(layers, experts, top_k, count, seed, stay=0.9):
    """Return int32 keys as a decoder asks for them: favourites per layer, and a mood that lasts for some tokens."""
    rng = np.random.default_rng(seed)
    taste, mood, asked = rng.normal(0, 1.5, (layers, experts)), rng.normal(0, 1, (layers, experts)), []
    for _ in range(count):
        mood = mood * stay + rng.normal(0, np.sqrt(1 - stay * stay), mood.shape)
        score = taste + 1.5 * mood
        for layer in range(layers):
            asked.append(layer * experts + np.argpartition(-score[layer], top_k)[:top_k])
    return np.concatenate(asked).astype(np.int32)


def visits(keys, experts):
    """Cut keys into visits: runs of one layer that repeat no expert."""
    now, layer = [], None
    for key in keys.tolist():
        if key // experts != layer or key in now:
            if now:
                yield now
            now, layer = [], key // experts
        now.append(key)
    yield now


def simulate(keys, layers, experts, slots, policy):
    """Return the hits of the store's own table when each visit is a batch."""
    table, hits = Table([experts] * layers, bytes(layers * experts), [slots], policy), 0
    for visit in visits(keys, experts):
        held = [table.slot_of(key) for key in visit if table.slot_of(key) >= 0]
        hits += len(held)
        for slot in held:
            table.lease(slot)
        for key in visit:
            slot = table.slot_of(key)
            table.request(key)
            if slot < 0:
                slot, _ = table.reserve(key, DEMAND, DEMAND)
                if slot >= 0:
                    table.lease(slot)
                    table.publish(slot)
                    table.read(slot)
                    held.append(slot)
        for slot in held:
            table.drop(slot)
    assert table.check() == 0
    return hits


def lru_curve(keys, sizes):
    """Return LRU's exact hit rate at each size."""
    rates = []
    for size in sizes:
        kept, hits = OrderedDict(), 0
        for key in keys.tolist():
            if key in kept:
                hits += 1
                kept.move_to_end(key)
            else:
                kept[key] = True
                if len(kept) > size:
                    kept.popitem(last=False)
        rates.append(hits / len(keys))
    return rates


def watched(keys, layers, experts, slots, every=0, **more):
    watch = Watch([experts] * layers, bytes(layers * experts), [slots], every=every, **more)
    watch.hear(keys)
    assert watch.check() == 0
    return watch


@pytest.mark.parametrize("slots", [3, 17, 40, 200])
def test_a_whole_sample_is_a_full_simulation_to_the_digit(slots):
    layers, experts = 6, 32
    keys = tokens(layers, experts, 3, 300, seed=slots)
    end = np.int32([0, 31])  # the visit before this one is complete
    report = watched(np.concatenate([keys, end[:1]]), layers, experts, slots).report()
    assert report["every"] == 1 and report["tracked"] == report["pool"] == layers * experts
    assert report["sampled"] == len(keys) and report["lost"] == 0
    for policy in NAMES:
        assert report["hits"][policy] == simulate(keys, layers, experts, slots, policy), policy


def test_a_visit_without_a_sampled_expert_is_a_visit_too():
    """Chances are per visit of a layer: with most visits unseen, a sample would take its experts for favourites."""
    layers, experts, slots = 4, 64, 48
    rng = random.Random(5)
    # In layers 0 and 1 an expert is asked for seldom but in runs; in 2 and 3 now and then.
    keys = np.int32(
        [
            layer * experts + rng.choice([rng.randrange(experts), t // 40 % experts])
            for t in range(4000)
            for layer in range(4)
        ]
    )
    exact = simulate(keys, layers, experts, slots, "next_use") / len(keys)
    report = watched(keys, layers, experts, slots, every=4).report()
    assert report["every"] == 4 and report["tracked"] == layers * experts / 4
    assert report["hits"]["next_use"] / report["sampled"] == pytest.approx(exact, abs=0.04)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.4])
def test_a_sample_of_a_large_pool_tells_what_every_policy_would_hit(share):
    layers, experts = 40, 128
    keys, slots = tokens(layers, experts, 4, 400, seed=2), int(layers * experts * share)
    report = watched(keys, layers, experts, slots).report(curve=True)
    assert report["every"] == (8 if share < 0.4 else 16)
    assert report["tracked"] == layers * experts // report["every"]
    for policy in NAMES:  # a sample has no cliff where a token no longer fits, and sieve settles at one of two rates
        exact = simulate(keys, layers, experts, slots, policy) / len(keys)
        error = 0.25 if policy == "sieve" else 0.03
        assert report["hits"][policy] / report["sampled"] == pytest.approx(exact, abs=error), policy


def test_every_layer_gives_the_same_share_of_its_experts():
    layers, experts = 92, 896
    watch = Watch([experts] * layers, bytes(layers * experts), [4000])
    report = watch.report()
    assert (report["every"], report["pool"]) == (32, layers * experts)
    assert report["tracked"] == layers * experts // 32
    watch.hear(np.arange(layers * experts, dtype=np.int32))
    watch.hear(np.int32([0]))  # the last visit is complete
    assert watch.report()["sampled"] == report["tracked"]
    for layer in range(layers):
        one = Watch([experts] * layers, bytes(layers * experts), [4000])
        one.hear(np.arange(layer * experts, (layer + 1) * experts, dtype=np.int32))
        one.hear(np.int32([0 if layer else experts]))
        assert one.report()["sampled"] == experts // 32


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "share"), [(26, 64, 6, 0.2), (24, 60, 4, 0.4), (32, 33, 2, 0.2), (16, 65, 8, 0.2)]
)
def test_the_small_sample_of_a_small_pool_chooses_no_policy_that_costs_a_point(layers, experts, top_k, share):
    slots = int(layers * experts * share)
    for seed in range(3):
        keys = tokens(layers, experts, top_k, 500, seed)
        exact = {policy: simulate(keys, layers, experts, slots, policy) / len(keys) for policy in NAMES}
        report = watched(keys, layers, experts, slots).report()
        assert report["every"] in (8, 16)
        best = max(report["hits"], key=report["hits"].__getitem__)
        assert exact[best] > max(exact.values()) - 0.01, (seed, best, exact)


def test_size_classes_keep_their_share_of_the_slots():
    cls = bytes([0] * 2048 + [1] * 2048 + [255] * 64)
    report = Watch([64] * 65, cls, [400, 80], every=4).report()
    assert report["every"] == 4 and report["pool"] == 4096  # what fits no slot is none of the pool
    assert report["ghost_slots"] == 100 + 20
    few = Watch([64] * 64, bytes(4096), [1]).report()
    assert few["ghost_slots"] == 1


def test_stack_distances_are_those_of_lru_at_every_size():
    layers, experts = 4, 24
    keys = tokens(layers, experts, 3, 700, seed=8)  # far more requests than the line of times has places
    curve = watched(np.concatenate([keys, np.int32([0])]), layers, experts, 10).report(curve=True)["curve"]
    assert len(curve) == layers * experts
    assert curve == pytest.approx(lru_curve(keys, range(1, layers * experts + 1)), abs=1e-12)


def test_the_sampled_curve_is_near_the_exact_one():
    layers, experts = 40, 64
    keys = tokens(layers, experts, 4, 400, seed=3)
    report = watched(keys, layers, experts, 100).report(curve=True)
    sizes = [int(layers * experts * share) for share in (0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8)]
    sampled = [report["curve"][size * report["tracked"] // report["pool"] - 1] for size in sizes]
    assert sampled == pytest.approx(lru_curve(keys, sizes), abs=0.02)


def test_a_full_ring_loses_requests_counts_them_and_the_next_one_begins_a_visit():
    layers, experts = 4, 32
    keys = tokens(layers, experts, 3, 2000, seed=1)
    watch = Watch([experts] * layers, bytes(layers * experts), [30])
    watch.hear(keys, digest=False)
    lost = watch.report()["lost"]
    assert lost > 0 and watch.report()["requests"] == len(keys) and watch.report()["sampled"] == 0
    watch.hear(keys)
    report = watch.report()
    assert report["lost"] == lost and watch.check() == 0
    assert report["sampled"] == pytest.approx(2 * len(keys) - lost, abs=4)  # but for the visits at the edges


def test_old_traffic_counts_less_and_less_in_the_curve():
    layers, experts = 2, 16
    watch = Watch([experts] * layers, bytes(layers * experts), [8])
    near = np.tile(np.int32([0, 16]), 150_000)  # two experts
    watch.hear(near)
    assert watch.report(curve=True)["curve"][1] > 0.99
    far = np.tile(np.arange(32, dtype=np.int32), 20_000)  # and then all of them in turn: only 32 slots hit
    watch.hear(far)
    curve = watch.report(curve=True)["curve"]
    assert curve[30] < 0.1 and curve[31] > 0.99


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uord ford keep".split()
    ]


@pytest.mark.parametrize("share", [0.03, 0.2, 0.4, 1])
@pytest.mark.parametrize(
    ("layers", "experts"), [(92, 896), (60, 384), (48, 128), (16, 128), (26, 64), (64, 26), (24, 60), (16, 65)]
)
def test_ghosts_of_all_policies_take_less_than_32_bytes_per_expert(layers, experts, share):
    """Of a pool of up to 4,096 one in sixteen is sampled at least: with many layers or slots that may be more."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2") or os.environ.get("FASTCACHE_SANITIZED"):
        pytest.skip("the C library does not say what it has allocated")
    libc.mallinfo2.restype = Mallinfo

    def used():
        info = libc.mallinfo2()
        return info.uord + info.hblkhd

    pool = layers * experts
    classes, sizes = bytes(pool), [experts] * layers
    before = used()
    watch = Watch(sizes, classes, [int(pool * share)])
    taken = used() - before - 4 * pool  # a Watch looks layers up by expert; a store has that anyway
    assert watch.report()["pool"] == pool
    odd = pool < 2048 and (share == 1 or layers > 26 or pool < 1280)
    assert 4 * pool < taken < (48 if odd else 32) * pool, taken / pool


def kimi():
    pairs = np.fromfile(TRACES / "kimi-k3-expert-trace.bin", "<i4").reshape(-1, 2)
    _, layer = np.unique(pairs[:, 0], return_inverse=True)
    return 92, 896, (layer * 896 + pairs[:, 1]).astype(np.int32)


def qwen():
    with open(TRACES / "qwen3-30b-a3b.route.csv") as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        pairs = np.array([(int(row["layer"]), int(row["expert"])) for row in rows])
    _, layer = np.unique(pairs[:, 0], return_inverse=True)
    return 48, 128, (layer * 128 + pairs[:, 1]).astype(np.int32)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("trace", [kimi, qwen])
def test_the_ghosts_of_a_real_trace_name_its_best_policy(trace, share):
    if not TRACES.exists():
        pytest.skip("no ../shared/traces")
    layers, experts, keys = trace()
    slots = int(layers * experts * share)
    exact = {policy: simulate(keys, layers, experts, slots, policy) / len(keys) for policy in NAMES}
    report = watched(keys, layers, experts, slots).report()
    ghosts = {policy: hits / report["sampled"] for policy, hits in report["hits"].items()}
    best = max(ghosts, key=ghosts.__getitem__)
    assert exact[best] > max(exact.values()) - 0.01, (ghosts, exact)
    assert ghosts["next_use"] == pytest.approx(exact["next_use"], abs=0.04)
