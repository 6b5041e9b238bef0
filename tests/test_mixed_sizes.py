"""Experts of several sizes in one budget: all of it holds experts, slabs go where the traffic is, no byte changes."""

import contextlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rig import Experts, assert_identities

import fastcache
from fastcache import FileRangeSource
from fastcache.slabs import plan_slabs
from fastcache.traces import replay_exact
from fastcache_ext.policy import NAMES as POLICIES
from fastcache_ext.simulate import Simulator

KiB, PAGE = 1 << 10, 4096
MIXES = {  # layer -> bytes of an expert, by the number of the layer
    "2 to 3": lambda layer: (768 * KiB, 512 * KiB)[layer % 2],
    "Q4_K_M": lambda layer: (996 * KiB, 864 * KiB)[layer % 2],
    "1 to 2": lambda layer: (512 * KiB, 1024 * KiB)[layer % 2],
    "three sizes": lambda layer: (1024 * KiB, 768 * KiB, 512 * KiB)[layer % 3],
    "nearly equal": lambda layer: (1024 * KiB, 1004 * KiB)[layer % 2],
    "a rare tiny one": lambda layer: (1024 * KiB, 640 * KiB, 1024 * KiB, 640 * KiB, 1024 * KiB, 16 * KiB)[layer],
}


def sparse(path, size_of, layers=6, experts=64, top_k=2):
    """A file of holes, which cost nothing to read, with experts at odd places."""
    ranges, at = {}, 513
    for layer, expert in itertools.product(range(layers), range(experts if layers else 0)):
        ranges[layer, expert] = [(at, size_of(layer))]
        at += size_of(layer) + 13
    with open(path, "wb") as file:
        file.truncate(at)
    return FileRangeSource(path, ranges, top_k=top_k), {key: size for key, [(_, size)] in ranges.items()}


@pytest.mark.parametrize("budget", ["3 cycles", "20% of experts", "50% of experts"])
@pytest.mark.parametrize("mix", MIXES)
def test_nearly_all_of_a_budget_is_payload_at_steady_state(disk, mix, budget):
    source, nbytes = sparse(disk / "holes", MIXES[mix])
    rng = random.Random(3)
    with fastcache.open(source, budget, engine="pread", mlock="off", policy="lru") as store:
        for layer in [*range(6)] * 36:
            store.acquire_many(layer, rng.sample(range(64), 2)).release()
        payload = sum(size for key, size in nbytes.items() if store.is_resident(*key))
        told = store.describe()
        assert told["arena_bytes"] <= told["budget_bytes"] and store._check() == 0
        share = payload / told["budget_bytes"]
        if told["budget_bytes"] >= 64 * max(row["slot_bytes"] for row in told["slot_classes"]):
            assert share >= 0.93, (share, told["slot_classes"], told["slabs"])
        else:  # 36 slots
            assert share >= 0.85, (share, told["slot_classes"], told["slabs"])
    assert_identities(store)


@pytest.fixture(scope="module")
def mixed(disk):
    """Layers in three and in two pages an expert."""
    sizes = {(layer, e): (11_000, 7_000)[layer % 2] for layer in range(4) for e in range(24)}
    return Experts(disk, sizes, parts=2, gap=17, top_k=4)


def shifting(rng, turns):
    """Yield (layer, experts): all layers, then those of one size alone, then those of the other."""
    for turn in range(turns):
        kind = (None, 0, 1)[turn * 6 // turns % 3]
        layer = turn % 4 if kind is None else 2 * (turn % 2) + kind
        yield layer, rng.sample(range(24), rng.choice((1, 4)))


def room(pages):
    return pages * PAGE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pages", [13, 15, 24, 30, 61, 120])
def test_every_byte_is_right_while_slabs_change_hands(mixed, engine, policy, pages):
    """From top_k + 1 slots of the smaller size on."""
    rng, kept = random.Random(pages), []
    with fastcache.open(mixed.source, room(pages), engine=engine, policy=policy) as store:
        for turn, (layer, experts) in enumerate(shifting(rng, 420)):
            if turn % 5 == 0:
                store.prefetch(layer, experts)
            for lease in store.acquire_many(layer, experts):
                assert mixed.right(lease.key, lease)
                if turn % 7 == 0:
                    kept = [*kept[-2:], (lease.key, lease)]
            assert all(mixed.right(key, lease) for key, lease in kept)
            if turn % 20 == 0:
                assert store._check() == 0
        lease = None
        kept.clear()
        told = store.describe()
        assert told["arena_bytes"] <= told["budget_bytes"] and told["leased_slots"] == 0 and store._check() == 0
        # With fewer pages each size just keeps its batch; with more there is room for all that is hot.
        assert told["slabs"]["trades"] > 0 or pages != 61
        assert told["slots"] == sum(row["slots"] for row in told["slot_classes"])
    assert_identities(store)


def test_traffic_that_moves_takes_the_slabs_with_it(mixed):
    rng = random.Random(1)
    with fastcache.open(mixed.source, room(60), policy="lru", engine="pread") as store:
        slots = []
        for kind in (0, 1, 0):
            for turn in range(400):
                store.acquire_many(2 * (turn % 2) + kind, rng.sample(range(24), 4)).release()
            slots.append([row["slots"] for row in store.describe()["slot_classes"]])
        assert slots == [[16, 6], [6, 21], [16, 6]]  # the idle size keeps a batch and one more
        assert store._check() == 0 and store.stats().pass_throughs == 0


def test_a_pinned_expert_keeps_its_slab_and_its_class_one_slot_more(mixed):
    with fastcache.open(mixed.source, room(60), policy="lru", engine="pread") as store:
        store.pin(1, [3, 4])
        address = store[1, 3]["data.0"].ctypes.data
        rng = random.Random(2)
        for turn in range(600):
            store.acquire_many(2 * (turn % 2), rng.sample(range(24), 4)).release()
        told = store.describe()
        assert told["slabs"]["trades"] > 0 and told["slot_classes"][1]["slots"] >= 5
        assert store.is_resident(1, 3) and store.is_resident(1, 4)
        assert store[1, 3]["data.0"].ctypes.data == address and mixed.right((1, 3), store[1, 3])
        store.acquire(1, 9).release()
        assert store.stats().pass_throughs == 0 and store._check() == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_run_with_trades_replays_to_the_digit(mixed, engine, policy, tmp_path):
    def act(store, seed):
        rng, kept = random.Random(seed), []
        for turn, (layer, experts) in enumerate(shifting(rng, 240)):
            if turn % 6 == 0:
                store.prefetch(layer, experts[:2])
            if turn % 11 == 0:
                with contextlib.suppress(fastcache.BudgetTooSmall, fastcache.BatchFailed):
                    store.pin(layer, experts[0])
                    store.unpin(layer, range(24))
            for lease in store.acquire_many(layer, experts):
                assert mixed.right(lease.key, lease)
                kept.append(lease)
            while len(kept) > rng.randrange(4):
                kept.pop(rng.randrange(len(kept)))

    with fastcache.open(mixed.source, room(48), engine=engine, policy=policy) as store:
        with store.record(tmp_path / "trace") as rec, ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(act, store, seed) for seed in range(3)]:
                done.result()
        assert rec.exact and store._check() == 0
        again = replay_exact(tmp_path / "trace")
        assert again.same, again
        assert store.describe()["slabs"]["trades"] > 0
    assert_identities(store)


# ---- by the simulator


def simulate(batches, pages, policy):
    cls = np.repeat([0, 1] * 4, 32).astype(np.uint8)
    nbytes = np.asarray([3 * PAGE, 2 * PAGE], np.int64)[cls]
    plan = plan_slabs(pages * PAGE, [3 * PAGE, 2 * PAGE], [128, 128], 4)
    first = np.arange(0, 257, 32, dtype=np.int32)
    sims = [
        Simulator(first, cls, nbytes, plan.slots, policy, plan.plan()),
        Simulator(first, cls, nbytes, plan.begins_with, policy),
    ]
    keys, sizes = np.concatenate(batches).astype(np.int32), np.asarray([len(b) for b in batches], np.int64)
    for sim in sims:
        sim.run(keys, sizes)
        assert sim.check() == 0
    return plan, *sims


@pytest.mark.parametrize("every", [1, 3, 10, 40, 200])
@pytest.mark.parametrize("policy", POLICIES)
def test_traffic_against_trades_makes_them_a_bounded_number(policy, every):
    """Classes in turn, each for as long as a trade takes: what trades give up stays a part of what is read anyway."""
    rng = np.random.default_rng(every)
    batches = []
    for turn in range(6_000):
        layer = 2 * (turn % 4) + turn // (4 * every) % 2
        batches.append(32 * layer + rng.choice(32, 4, replace=False))
    plan, trading, shares = simulate(batches, 180, policy)
    _, trades, gone = trading.trading()
    assert 4 * trades * plan.slab_bytes <= trading.bytes_missed and trading.pass_throughs == 0
    assert gone <= trades * max(plan.per)
    assert trading.bytes_missed <= 1.25 * shares.bytes_missed


@pytest.mark.parametrize("policy", POLICIES)
def test_traffic_that_is_alike_everywhere_makes_next_to_no_trades(policy):
    rng = np.random.default_rng(5)
    weight = 1 / np.arange(1, 33) ** 0.9
    batches = [32 * (turn % 8) + rng.choice(32, 4, replace=False, p=weight / weight.sum()) for turn in range(8_000)]
    plan, trading, shares = simulate(batches, 240, policy)
    _, trades, gone = trading.trading()
    assert gone <= 0.06 * trading.misses and trading.hits >= 0.99 * shares.hits
    if policy == "next_use":
        assert trades <= plan.count // 4
    assert trading.bytes_resident() >= 0.96 * 240 * PAGE


def test_an_idle_class_gives_its_slabs_up_and_hits_rise(mixed):
    rng = np.random.default_rng(6)
    batches = [32 * (2 * (turn % 4) + (turn > 3_000)) + rng.choice(32, 4, replace=False) for turn in range(6_000)]
    for policy in POLICIES:
        _, trading, shares = simulate(batches, 240, policy)
        assert trading.hits > 1.2 * shares.hits, policy
        assert trading.bytes_resident() >= 0.93 * 240 * PAGE
