"""Guesses that wait for their turn: they hold no slot until their first read begins, and may end without one."""

import random
from collections import Counter

import pytest
from rig import Caller, Experts, assert_identities, counted, land, layers_of, run_dry, scripted, settings, until

from fastcache.errors import TraceError
from fastcache.store import ExpertStore
from fastcache.traces import replay_exact
from fastcache.traces.format import open_records, pack_header


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(3, 24, 10_000), top_k=4)


def acquire(store, engine, layer, some):
    caller = Caller(store.acquire_many, layer, some)
    while not caller.done():
        run_dry(engine)
    caller.result().release()


def same(store, path):
    """The replay of `path` decides what `store` did."""
    again = replay_exact(path)
    assert again.same, again
    assert again.counters["prefetch_cancelled"] == store.stats().prefetch_cancelled
    return again


def test_a_guess_that_waits_holds_no_slot_and_evicts_nothing(experts, tmp_path):
    with scripted(experts, slots=8) as (store, engine):
        recording = store.record(tmp_path / "trace")
        acquire(store, engine, 0, range(8))
        reading = Caller(store.acquire, 0, 8)
        [op] = engine.take(1, wait=20)  # while this is read, no guess is
        handle = store.prefetch(1, range(8))
        counted(store, prefetch_issued=8, prefetch_in_flight=8, evictions=1)
        assert not engine.take() and sum(engine.leases()) == 2  # of the demand: its read's and its caller's
        hits = [e for e in range(8) if store.is_resident(0, e)]
        assert len(hits) == 7
        store.acquire_many(0, hits).release()
        counted(store, hits=7, evictions=1)
        land(engine, op.id)
        reading.result().release()
        run_dry(engine)
        assert set(handle.result().values()) == {"loaded"}
        counted(store, evictions=9, prefetch_loads=8, pass_throughs=0)
        recording.stop()
        assert same(store, tmp_path / "trace").counters["evictions"] == 9
        assert Counter(open_records(tmp_path / "trace")[1]["kind"].tolist())[35] == 8


def test_a_guess_whose_layer_was_visited_without_it_is_never_read(experts, tmp_path):
    with scripted(experts, slots=12) as (store, engine):
        recording = store.record(tmp_path / "trace")
        reading = Caller(store.acquire, 2, 0)
        [op] = engine.take(1, wait=20)
        acquire_two = Caller(store.acquire_many, 0, [0, 1])
        until(lambda: store.stats().requests == 3, "a visit of layer 0")
        handle = store.prefetch(1, [5, 6], predictor="wrong")
        other = store.prefetch(2, [7], predictor="wrong")
        visiting = Caller(store.acquire, 1, 9)
        until(lambda: store.stats().requests == 4, "a visit of layer 1")
        assert not handle.done()
        leaving = Caller(store.acquire, 0, 2)
        until(lambda: store.stats().requests == 5, "the end of that visit")
        assert handle.result() == {(1, 5): "cancelled", (1, 6): "cancelled"} and not other.done()
        row = store.describe()["speculation"]["predictors"]["wrong"]
        assert (row["missed"], row["cancelled"], row["in_flight"]) == (2, 2, 1)
        land(engine, op.id)
        run_dry(engine)
        for caller in (reading, acquire_two, visiting, leaving):
            caller.result().release()
        assert other.result() == {(2, 7): "loaded"}
        counted(store, prefetch_issued=3, prefetch_cancelled=2, prefetch_loads=1, evictions=0)
        recording.stop()
        same(store, tmp_path / "trace")


def test_a_demand_for_a_guess_that_waits_takes_a_slot_as_a_demand_does_and_joins(experts, tmp_path):
    with scripted(experts, slots=4) as (store, engine):
        recording = store.record(tmp_path / "trace")
        store.prefetch(0, range(4))
        run_dry(engine)  # four unread guesses: no other guess may evict them
        handle = store.prefetch(1, [0])
        caller = Caller(store.acquire, 1, 0)
        until(lambda: store.stats().joins == 1, "the join")
        counted(store, joins=1, late_joins=1, misses=0, evictions=1, wasted=1)
        run_dry(engine)
        assert experts.right((1, 0), caller.result()) and handle.result() == {(1, 0): "late"}
        counted(store, late_joins_ok=1, prefetch_loads=5)
        recording.stop()
        same(store, tmp_path / "trace")


def test_a_demand_for_a_guess_that_waits_passes_through_where_everything_is_leased(experts, tmp_path):
    with scripted(experts, slots=2) as (store, engine):
        recording = store.record(tmp_path / "trace")
        both = Caller(store.acquire_many, 0, [0, 1])
        until(lambda: store.stats().misses == 2, "two misses")
        run_dry(engine)
        held = both.result()
        handle = store.prefetch(1, [0, 1])
        caller = Caller(store.acquire, 1, 0)
        until(lambda: store.stats().misses == 3, "the miss")
        run_dry(engine)
        assert experts.right((1, 0), caller.result())
        assert set(handle.result().values()) == {"no_room"}
        counted(store, joins=0, pass_throughs=1, prefetch_issued=2, prefetch_cancelled=2, evictions=0)
        recording.stop()
        same(store, tmp_path / "trace")
        held.release()


def test_when_a_guess_finds_no_slot_those_behind_it_find_none(experts):
    with scripted(experts, slots=3) as (store, engine):
        three = Caller(store.acquire_many, 0, [0, 1, 2])
        until(lambda: store.stats().misses == 3, "three misses")
        run_dry(engine)
        *held, free = three.result()
        handle = store.prefetch(1, [0, 1, 2])
        free.release()
        [op] = engine.take()
        land(engine, op.id)
        assert not engine.take()  # the other slots are leased
        for lease in held:
            lease.release()
        assert not engine.take()
        assert handle.result(0) == {(1, 0): "loaded", (1, 1): "no_room", (1, 2): "no_room"}
        for expert in range(3):
            acquire(store, engine, 1, [expert])
        counted(store, wasted=0, bytes_read=6 * 10_000)


def test_a_guess_counts_as_a_load_when_it_gets_a_slot_and_not_before(experts):
    with scripted(experts, slots=4) as (store, engine):
        first = Caller(store.acquire, 0, 0)
        [op] = engine.take(1, wait=20)
        cancelled, read = store.prefetch(1, [0, 1, 2]), store.prefetch(2, [3])
        assert cancelled.cancel()
        land(engine, op.id)
        [guess] = engine.take()
        land(engine, guess.id)
        with first.result() as lease, store.acquire(2, 3) as other:
            assert (lease.generation, other.generation) == (1, 2) and read.result() == {(2, 3): "loaded"}


def test_no_more_guesses_wait_than_there_are_slots(experts):
    with scripted(experts, slots=3) as (store, engine):
        handle = store.prefetch(0, range(8))
        counted(store, prefetch_issued=3, prefetch_in_flight=3)
        run_dry(engine)
        assert Counter(handle.result().values()) == {"loaded": 3, "no_room": 5}


@pytest.mark.parametrize("slots", [3, 5, 9])
def test_storms_of_guesses_cancels_and_demands_replay_to_the_digit(experts, slots, tmp_path):
    cancelled = begun = 0
    for seed in range(8):
        rng, path = random.Random(seed), tmp_path / f"trace-{seed}"
        limits = {"guess_bytes": 8 * 4096, "guess_share": 0.5}
        with scripted(experts, slots=slots, chunk=4096, **limits) as (store, engine):
            recording = store.record(path)
            handles, callers = [], []
            for _ in range(120):
                act = rng.randrange(5)
                if act <= 1:
                    handles.append(store.prefetch(rng.randrange(3), rng.sample(range(24), rng.randrange(1, 6))))
                elif act == 2 and handles:
                    handles.pop(rng.randrange(len(handles))).cancel()
                elif len(callers) < 3:
                    before = store.stats().requests
                    key = rng.randrange(3), rng.randrange(24)
                    callers.append((key, Caller(store.acquire, *key)))
                    until(lambda store=store, before=before: store.stats().requests > before)
                engine.take(rng.randrange(4))
                for id in rng.sample(engine.in_hand, rng.randrange(len(engine.in_hand) + 1)):
                    engine.settle(id, -5) if rng.random() < 0.05 else engine.fill(id)
                for key, caller in [(key, caller) for key, caller in callers if caller.done()]:
                    assert caller.error() or experts.right(key, caller.result())
                callers = [(key, caller) for key, caller in callers if not caller.done()]
                assert store._check() == 0
                assert_identities(store, quiet=False)
            run_dry(engine)
            for _, caller in callers:
                caller.error()
            assert all(handle.done() for handle in handles)
            recording.stop()
            cancelled += same(store, path).counters["prefetch_cancelled"]
            begun += Counter(open_records(path)[1]["kind"].tolist())[35]
    assert cancelled > 20 and begun > 20


class Memory:
    """A Python source."""

    def keys(self):
        return [(0, e) for e in range(8)]

    def expert_nbytes(self, key):
        return 3000

    def read_expert(self, key):
        return bytes([key[1]]) * 3000


def test_a_python_source_takes_slots_in_turn_too(tmp_path):
    with ExpertStore(Memory(), settings(budget=3 * 4096), "python", None) as store:
        recording = store.record(tmp_path / "trace")
        held = [store[0, e] for e in range(2)]
        told = store.prefetch(0, range(4, 8)).result(20)
        assert Counter(told.values()) == {"loaded": 1, "no_room": 3}
        held.clear()
        assert set(store.prefetch(0, [6]).result(20).values()) == {"loaded"}
        assert bytes(store[0, 6]) == bytes([6]) * 3000
        recording.stop()
        same(store, tmp_path / "trace")


def test_a_recording_of_guesses_that_took_their_slots_at_once_is_refused(experts, tmp_path):
    path = tmp_path / "trace"
    with scripted(experts, slots=4) as (store, engine):
        recording = store.record(path)
        store.prefetch(0, [0])
        run_dry(engine)
        recording.stop()
    header, records = open_records(path)
    body = records.tobytes()
    del header.run["guesses"]
    path.write_bytes(pack_header(header) + body)
    with pytest.raises(TraceError, match="earlier version"):
        replay_exact(path)
