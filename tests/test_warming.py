"""Warming: the budget is filled before the first token, at nobody's expense, and what failed is named."""

import errno
import os
import signal
import threading

import pytest
from rig import Caller, Experts, assert_identities, counted, expert_bytes, land, layers_of, run_dry, scripted, until

import fastcache
from fastcache import warming

LAYERS, EXPERTS, NBYTES, SLOT = 3, 12, 9_000, 12_288


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(LAYERS, EXPERTS, NBYTES), gap=SLOT - NBYTES)


def resident(store):
    return {tuple(key) for key in store if store.is_resident(key)}


def test_an_empty_store_is_filled_layer_by_layer_in_turn(experts, engine):
    with fastcache.open(experts.source, budget=10 * SLOT, engine=engine) as store:
        assert store.warm() == (10, 0, 0)
        assert resident(store) == {(layer, e) for e in range(3) for layer in range(3)} | {(0, 3)}
        s = store.stats()
        assert (s.prefetch_loads, s.unread_resident, s.requests, s.evictions) == (10, 10, 0, 0)
        assert store.describe()["leased_slots"] == 0
        assert store.warm() == (0, 0, 0)
        assert experts.right((2, 1), store[2, 1]) and store.stats().first_consumptions == 1
        assert_identities(store)


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_it_stands_under_its_own_name_and_is_never_declined(experts, speculation):
    with fastcache.open(experts.source, budget=10 * SLOT, speculation=speculation) as store:
        assert store.warm().loaded == 10
        store.acquire(0, 0).release()
        row = store.describe()["speculation"]["predictors"]["warm"]
        assert (row["issued"], row["used"], row["unread"], row["declined"]) == (10, 1, 9, 0)
        with pytest.raises(ValueError, match=r"warm\(\)"):
            store.prefetch(0, [11], predictor="warm")


def test_without_keys_nothing_that_is_here_goes(experts):
    with fastcache.open(experts.source, budget=6 * SLOT) as store:
        store.acquire_many(2, [7, 8, 9]).release()  # used before: a guess might take their slots
        assert store.warm() == (3, 0, 0)
        assert resident(store) == {(2, 7), (2, 8), (2, 9), (0, 0), (1, 0), (2, 0)}
        assert store.stats().evictions == 0


def test_the_hot_list_comes_first_and_the_rest_fills_up(experts):
    with fastcache.open(experts.source, budget=4 * SLOT) as store:
        store.hot_list = [(1, 11), (0, 0), (2, 5)]
        assert store.warm().loaded == 4
        assert resident(store) == {(1, 11), (0, 0), (2, 5), (1, 0)}


def test_named_experts_are_read_in_their_order_until_no_slot_may_be_taken(experts):
    with fastcache.open(experts.source, budget=6 * SLOT) as store:
        store.pin(0, [0])
        held = store[0, 1]
        store.prefetch(0, [2]).wait()
        store.acquire(0, 3).release()  # the one that may go
        warmed = store.warm([(1, e) for e in range(8)])
        assert warmed == warming.Warmed(loaded=3, resident=0, no_room=5)
        assert resident(store) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)}
        assert store.stats().wasted == 0
        held.release()
        assert_identities(store)


def test_a_member_that_is_here_makes_no_room_for_another(experts):
    with fastcache.open(experts.source, budget=3 * SLOT) as store:
        store.acquire_many(0, [5, 6, 7]).release()
        assert store.warm([(0, 1), (0, 2), (0, 5), (0, 6)]) == (1, 2, 1)
        assert {(0, 5), (0, 6)} <= resident(store)
        assert store.describe()["leased_slots"] == 0


def test_duplicates_are_one_and_what_is_on_its_way_is_joined(experts):
    with scripted(experts, slots=8) as (store, engine):
        store.prefetch(1, [4])
        [op] = engine.take()
        caller = Caller(store.warm, [(1, 4), (1, 4), fastcache.ExpertKey(1, 5)])
        ops = [op, *engine.take(wait=20)]
        assert {o.key for o in ops} == {(1, 4), (1, 5)} and ops[1].demand  # at a demand's speed
        land(engine, *[o.id for o in ops])
        assert caller.result() == (2, 0, 0)
        counted(store, prefetch_loads=2, requests=0)


def test_every_size_class_is_filled(disk):
    sizes = {(0, e): 9_000 if e % 2 else 20_000 for e in range(12)}
    with fastcache.open(Experts(disk, sizes, gap=0).source, budget="50% of experts") as store:
        slots = store.describe()["slots"]
        assert store.warm().loaded == slots == len(resident(store)) >= 4
        assert store._vacant() == [0, 0]


@pytest.mark.parametrize("budget", [0, 1])
def test_a_budget_without_a_slot_warms_nothing(experts, budget):
    with fastcache.open(experts.source, budget=budget) as store:
        assert store.warm() == (0, 0, 0)
        assert store.warm([(0, 1)]) == (0, 0, 1)
        counted(store, prefetch_issued=0, pass_throughs=0)


def test_progress_is_told_in_bytes_and_ends_at_the_total(experts, monkeypatch):
    monkeypatch.setattr(warming, "WINDOW_BYTES", 2 * NBYTES)
    with fastcache.open(experts.source, budget="all") as store:
        store.acquire(0, 0).release()
        told = []
        store.warm([(0, e) for e in range(6)], progress=lambda done, total: told.append((done, total)))
        assert {total for _, total in told} == {6 * NBYTES}
        assert [done // NBYTES for done, _ in told] == [0, 1, 3, 5, 6]


def test_a_demand_that_comes_meanwhile_waits_for_two_windows_at_most(experts, monkeypatch):
    monkeypatch.setattr(warming, "WINDOW_BYTES", 2 * NBYTES)
    with scripted(experts, slots=36, chunk=SLOT) as (store, engine):
        warm = Caller(store.warm)
        until(lambda: store.stats().prefetch_issued == 4)
        demand = Caller(store.acquire, 2, 11)
        until(lambda: store.stats().misses == 1)
        ops = engine.take()
        assert [op.key for op in ops] == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 11)]
        land(engine, ops[-1].id)
        assert experts.right((2, 11), demand.result()) and not warm.done()
        land(engine, *[op.id for op in ops[:-1]])
        while not warm.done():
            land(engine, *[op.id for op in engine.take(wait=0.05)])
        assert warm.result().loaded == 35


def test_reads_that_fail_are_named_at_the_end_and_the_rest_stays(experts, monkeypatch):
    monkeypatch.setattr(warming, "WINDOW_BYTES", 2 * NBYTES)
    with scripted(experts, slots=8, chunk=SLOT) as (store, engine):
        warm = Caller(store.warm, [(0, e) for e in range(6)])
        while not warm.done():
            for op in engine.take(wait=0.05):
                if op.key in {(0, 1), (0, 4)}:
                    engine.settle(op.id, -errno.EIO)
                else:
                    land(engine, op.id)
        error = warm.error()
        assert isinstance(error, fastcache.BatchFailed) and set(error.failed) == {(0, 1), (0, 4)}
        assert all(isinstance(each, fastcache.ReadFailed) for each in error.failed.values())
        assert resident(store) == {(0, e) for e in (0, 2, 3, 5)}
        counted(store, prefetch_failures=2, prefetch_loads=4)


def test_an_unknown_expert_is_refused_before_anything_is_read(experts):
    with fastcache.open(experts.source, budget="all") as store:
        with pytest.raises(fastcache.UnknownExpert):
            store.warm([(0, 1), (0, EXPERTS)])
        counted(store, prefetch_issued=0)


def test_ctrl_c_arrives_and_leaves_no_lease(experts, monkeypatch):
    monkeypatch.setattr(warming, "WINDOW_BYTES", 2 * NBYTES)
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has it ignored
    try:
        interrupted(experts)
    finally:
        signal.signal(signal.SIGINT, former)


def interrupted(experts):
    with scripted(experts, slots=8) as (store, engine):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            store.warm()
        counted(store, prefetch_in_flight=4)
        run_dry(engine)
        counted(store, prefetch_in_flight=0, prefetch_loads=4)
        assert sum(engine.leases()) == 0
        assert store.acquire_many(0, [0, 1]).release() is None


def test_a_python_source_is_read_by_the_caller():
    class Source:
        top_k, threads = 2, set()

        def keys(self):
            return [(0, e) for e in range(6)]

        def expert_nbytes(self, key):
            return NBYTES

        def read_expert(self, key):
            self.threads.add(threading.get_ident())
            if key.expert == 2:
                raise OSError(errno.EIO, "gone")
            return expert_bytes(*key, NBYTES)

    source = Source()
    with fastcache.open(source, budget=5 * SLOT) as store:
        with pytest.raises(fastcache.BatchFailed) as caught:
            store.warm()
        assert set(caught.value.failed) == {(0, 2)}
        assert resident(store) == {(0, e) for e in (0, 1, 3, 4)} and source.threads == {threading.get_ident()}


def test_a_closed_store_warms_nothing(experts):
    store = fastcache.open(experts.source, budget="all")
    store.close()
    with pytest.raises(fastcache.StoreClosed):
        store.warm()
    with pytest.raises(fastcache.StoreClosed):
        store.warm([(0, 0)])
