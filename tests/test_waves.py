"""Waves: a union above the budget comes in lists that fit, and a block that is served in them computes the same."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from rig import Caller, Experts, assert_identities, land, layers_of, run_dry, scripted

import fastcache
from fastcache.fixture import DemoShape, write_demo_checkpoint
from fastcache.layout.build import build_layout
from fastcache.moe import load_block

EXPERTS, NBYTES, SLOT = 24, 9_000, 12_288
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, EXPERTS, NBYTES), gap=SLOT - NBYTES, top_k=4)


def serve(store, layer, wanted):
    """Acquire each wave and let go of it before the next. Returns the waves."""
    seen = []
    for wave in store.waves(layer, wanted):
        store.acquire_many(layer, wave).release()
        seen.append(wave)
    return seen


def test_each_expert_comes_once_and_every_wave_fits(experts, engine):
    with fastcache.open(experts.source, budget=5 * SLOT, engine=engine) as store:
        waves = serve(store, 0, range(EXPERTS))
        assert sorted(itertools.chain.from_iterable(waves)) == list(range(EXPERTS))
        assert [len(wave) for wave in waves] == [5, 5, 5, 5, 4]
        s = store.stats()
        assert (s.misses, s.demand_loads, s.hits, s.pass_throughs) == (EXPERTS, EXPERTS, 0, 0)
        assert s.bytes_read == EXPERTS * NBYTES


def test_hits_come_first_and_are_not_read_again(experts):
    with fastcache.open(experts.source, budget=6 * SLOT) as store:
        store.acquire_many(1, [20, 3, 11]).release()
        store.acquire_many(0, [7, 8]).release()
        before = store.stats()
        waves = serve(store, 1, range(EXPERTS))
        assert waves[0][:3] == [3, 11, 20] and len(waves[0]) == 6
        s = store.stats() - before
        assert (s.hits, s.misses, s.pass_throughs) == (3, EXPERTS - 3, 0)


def test_a_wave_leaves_room_for_what_is_leased_and_pinned_by_others(experts):
    with fastcache.open(experts.source, budget=8 * SLOT) as store:
        store.pin(1, [0, 1])
        held = store[1, 2]
        waves = serve(store, 0, range(10))
        assert [len(wave) for wave in waves] == [5, 5]
        held.release()
        mine = store.acquire_many(0, waves[1][:2])  # members that are held already need no other slot
        assert sorted(next(store.waves(0, waves[1]))) == sorted(waves[1])
        assert [len(wave) for wave in serve(store, 0, range(10, 20))] == [4, 4, 2]
        mine.release()
        assert store.stats().pass_throughs == 0 and store.is_resident(1, 0) and store.is_resident(1, 1)


def test_each_wave_is_sized_when_its_turn_comes(experts):
    with fastcache.open(experts.source, budget=6 * SLOT) as store:
        waves = store.waves(0, range(EXPERTS))
        assert len(next(waves)) == 6
        held = store.acquire_many(0, range(4))
        assert len(next(waves)) == 2
        held.release()
        assert len(next(waves)) == 6
        store.acquire_many(0, [22, 23]).release()
        assert next(waves)[:2] == [22, 23]


def test_what_is_on_its_way_comes_after_hits_and_takes_no_second_slot(experts):
    with scripted(experts, slots=4) as (store, engine):
        caller = Caller(store.acquire, 0, 3)
        land(engine, *[op.id for op in engine.take(wait=20)])
        caller.result().release()
        guess = store.prefetch(0, [9])
        ops = engine.take()
        assert next(store.waves(0, range(12))) == [3, 9, 0, 1]
        land(engine, *[op.id for op in ops])
        assert guess.wait(0)
        assert next(store.waves(0, range(12))) == [3, 9, 0, 1]
        run_dry(engine)


@pytest.mark.parametrize("budget", [0, 1, SLOT - 1])
def test_a_budget_without_a_slot_gives_one_expert_at_a_time(experts, budget):
    with fastcache.open(experts.source, budget=budget) as store:
        waves = store.waves(0, [4, 2, 4, 9])
        assert waves.take() == []
        assert list(waves) == [[4], [2], [9]]
        assert serve(store, 0, range(6)) == [[e] for e in range(6)]
        assert store.stats().pass_throughs == 6


def test_when_every_slot_is_held_a_wave_still_has_one_expert(experts):
    with fastcache.open(experts.source, budget=3 * SLOT) as store:
        held = store.acquire_many(1, range(3))
        waves = store.waves(0, range(3))
        assert waves.take() == [] and next(waves) == [0]
        held.release()
        assert waves.take() == [1, 2] and waves.take() == []
        assert next(waves, None) is None


def test_classes_of_slots_do_not_lend_each_other_room(disk):
    sizes = {(0, e): 9_000 if e % 2 else 20_000 for e in range(12)}
    with fastcache.open(Experts(disk, sizes, gap=0).source, budget="50% of experts") as store:
        slots = {row["slot_bytes"]: row["slots"] for row in store.describe()["slot_classes"]}
        assert len(slots) == 2 and min(slots.values()) >= 2
        wave = next(store.waves(0, range(12)))
        assert sorted(e % 2 for e in wave) == sorted([0] * slots[max(slots)] + [1] * slots[min(slots)])
        serve(store, 0, range(12))
        assert store.stats().misses == 12 and store.stats().pass_throughs == 0


def test_the_call_itself_says_what_is_wrong(experts):
    with fastcache.open(experts.source, budget=4 * SLOT) as store:
        with pytest.raises(fastcache.UnknownExpert):
            store.waves(0, [1, EXPERTS])
        with pytest.raises(fastcache.UnknownExpert):
            store.waves(5, [1])
        with pytest.raises(TypeError, match="one-dimensional"):
            store.waves(0, np.zeros((2, 2), int))
        assert list(store.waves(0, [])) == []
        assert list(store.waves(0, np.array([3, 1, 3]))) == [[3, 1]]
        waves = store.waves(0, range(4))
    with pytest.raises(fastcache.StoreClosed):
        next(waves)


def test_random_unions_between_held_experts_are_read_once_each(experts, engine):
    rng = random.Random(5)
    with fastcache.open(experts.source, budget=7 * SLOT, engine=engine) as store:
        held = {}
        for _ in range(60):
            layer = rng.randrange(2)
            wanted = rng.sample(range(EXPERTS), rng.randrange(1, EXPERTS))
            here = sum(store.is_resident(layer, e) for e in wanted)
            before = store.stats()
            waves = serve(store, layer, wanted)
            assert sorted(itertools.chain.from_iterable(waves)) == sorted(wanted)
            s = store.stats() - before
            assert (s.hits, s.misses, s.pass_throughs) == (here, len(wanted) - here, 0)
            if held and rng.random() < 0.5:
                held.popitem()[1].release()
            elif len(held) < 5:
                key = rng.randrange(2), rng.randrange(EXPERTS)
                held.setdefault(key, store[key])
        del held
        assert_identities(store)


# --- blocks


SHAPE = DemoShape(layers=2, experts=20, hidden=64, intermediate=32, top_k=4)


@pytest.fixture(scope="module")
def model(disk):
    write_demo_checkpoint(disk / "waves-model", shape=SHAPE)
    return disk / "waves-model"


def open_with(directory, slots, **arguments):
    """Open a checkpoint with exactly so many slots, all of one class."""
    with fastcache.open(directory, budget="all") as every:
        [row] = every.describe()["slot_classes"]
    store = fastcache.open(directory, budget=slots * row["slot_bytes"], **arguments)
    assert store.describe()["slots"] == slots
    return store


def prompt(hidden, count=200):
    return np.random.default_rng(1).standard_normal((count, hidden), dtype=np.float32)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 19])
def test_a_prefill_reads_each_expert_of_a_layer_once_whatever_the_budget(model, slots, engine):
    x = prompt(SHAPE.hidden)
    with open_with(model, slots, engine=engine) as store:
        for layer in range(SHAPE.layers):
            wanted = load_block(model, layer, experts="resident")
            union = len(np.unique(wanted.route(x)[0]))
            assert union == SHAPE.experts
            before = store.stats()
            assert load_block(model, layer, experts=store)(x).tobytes() == wanted(x).tobytes()
            s = store.stats() - before
            assert (s.misses, s.demand_loads, s.hits, s.joins, s.pass_throughs) == (union, union, 0, 0, 0)
            assert s.bytes_read == union * SHAPE.expert_nbytes
        assert_identities(store)


@pytest.mark.parametrize("budget", [0, 1])
def test_a_prefill_without_a_slot_reads_each_expert_once_too(model, budget):
    x = prompt(SHAPE.hidden)
    with fastcache.open(model, budget=budget) as store:
        wanted = load_block(model, 0, experts="resident")(x)
        assert load_block(model, 0, experts=store)(x).tobytes() == wanted.tobytes()
        s = store.stats()
        assert s.misses == s.pass_throughs == SHAPE.experts and s.bytes_read == SHAPE.experts * SHAPE.expert_nbytes


def test_a_second_prefill_begins_with_what_the_first_left(model):
    x = prompt(SHAPE.hidden)
    with open_with(model, 6) as store:
        block = load_block(model, 0, experts=store)
        first = block(x)
        here = sum(store.is_resident(0, e) for e in range(SHAPE.experts))
        before = store.stats()
        assert block(x).tobytes() == first.tobytes()
        s = store.stats() - before
        assert here == 6 and (s.hits, s.misses, s.pass_throughs) == (here, SHAPE.experts - here, 0)


def test_a_prefill_beside_held_experts_still_finds_slots(model):
    x = prompt(SHAPE.hidden)
    with open_with(model, 6) as store:
        held = store.acquire_many(1, range(5))  # one slot is left
        before = store.stats()
        load_block(model, 0, experts=store)(x)
        s = store.stats() - before
        assert (s.misses, s.pass_throughs) == (SHAPE.experts, 0)
        held.release()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
@pytest.mark.parametrize("slots", ["one", "k - 1", "k"])
def test_every_family_gives_the_same_bits_in_waves(family, slots):
    layout = build_layout(DATA / family / "bf16")
    layer = max(layout.layers)
    resident = load_block(layout, layer, experts="resident")
    x = prompt(resident.hidden, 12)
    wanted = {"one": 1, "k - 1": resident.top_k - 1, "k": resident.top_k}[slots]
    with open_with(DATA / family / "bf16", wanted) as store:
        block = load_block(layout, layer, experts=store)
        assert block(x).tobytes() == resident(x).tobytes()
        s = store.stats()
        assert s.misses == len(np.unique(block.route(x)[0])) and s.pass_throughs == 0


def test_a_failed_expert_names_itself_and_lets_every_slot_go(model):
    class Failing:
        def __init__(self, store):
            self.store, self.waves = store, store.waves

        def as_ready(self, layer, wave):
            for expert, lease in self.store.as_ready(layer, wave):
                if expert == 11:
                    raise fastcache.ReadFailed("the disk is gone")
                yield expert, lease

    x = prompt(SHAPE.hidden)
    with open_with(model, 6) as store:
        with pytest.raises(fastcache.ReadFailed, match="disk is gone"):
            load_block(model, 0, experts=Failing(store))(x)
        assert store._memory()["leased_slots"] == 0
