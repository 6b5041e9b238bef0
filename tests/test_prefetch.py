"""Guesses: what goes before them, what they may displace, cancel, promotion, pins; and how they are counted."""

import errno

import pytest
from rig import Caller, Experts, counted, land, layers_of, run_dry, scripted, until


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 12, 10_000))


def test_a_demand_is_served_before_every_guess_that_is_queued(experts):
    with scripted(experts, slots=12, chunk=4096) as (store, engine):
        store.prefetch(0, range(8))
        first = engine.take()
        assert not any(op.demand for op in first) and sum(op.nbytes for op in first) <= 4 * 4096
        caller = Caller(store.acquire, 1, 0)
        ops = engine.take(wait=20)
        assert all(op.demand and op.key == (1, 0) for op in ops) and len(ops) >= 3
        assert not engine.take()  # guesses wait for their share of the bytes in flight
        land(engine, *[op.id for op in ops])
        assert experts.right((1, 0), caller.result())
        run_dry(engine)
        counted(store, prefetch_loads=8, demand_loads=1)


def test_a_demand_promotes_the_guess_that_it_joins(experts):
    with scripted(experts, slots=12, chunk=4096) as (store, engine):
        handle = store.prefetch(0, range(8))
        engine.take()
        caller = Caller(store.acquire, 0, 6)
        ops = engine.take(wait=20)
        assert {op.key for op in ops} == {(0, 6)} and all(op.demand for op in ops)
        land(engine, *[op.id for op in ops])
        assert experts.right((0, 6), caller.result()) and not handle.done()
        counted(store, late_joins=1, late_joins_ok=1, joins_ok=1, misses=0, prefetch_loads=1, demand_loads=0)
        assert store.stats().late_join_wait_ns > 0
        run_dry(engine)
        told = handle.result()
        assert told[0, 6] == "late" and {told[0, e] for e in range(8) if e != 6} == {"loaded"}
        store.acquire(0, 6).release()
        counted(store, hits=1, reuses=1, first_consumptions=0)


def test_cancel_drops_what_is_queued_and_waits_for_what_the_device_has(experts):
    with scripted(experts, slots=12, chunk=4096) as (store, engine):
        handle = store.prefetch(0, range(8))
        [op] = engine.take(1)
        assert handle.cancel() and not handle.done()
        counted(store, prefetch_issued=8, prefetch_cancelled=7, prefetch_in_flight=1)
        assert sum(engine.leases()) == 1 and not engine.take()
        engine.fill(op.id)
        assert handle.done() and set(handle.result().values()) == {"cancelled"}
        assert sum(engine.leases()) == 0 and not store.is_resident(*op.key)
        assert not handle.cancel()
        counted(store, prefetch_cancelled=8, bytes_read=0)


@pytest.mark.parametrize("again", ["demand", "prefetch", "pin"])
def test_a_cancelled_guess_that_is_wanted_again_before_it_is_gone_is_read_on(experts, again):
    with scripted(experts, slots=4, chunk=4096) as (store, engine):
        first = store.prefetch(0, 3)
        [op] = engine.take(1)
        assert first.cancel()
        if again == "prefetch":
            second = store.prefetch(0, 3)
        else:
            caller = Caller(store.acquire if again == "demand" else store.pin, 0, 3)
            until(lambda: sum(engine.leases()) == 2, "the second one's hold")
        land(engine, op.id)
        run_dry(engine)
        if again == "prefetch":
            assert second.result() == {(0, 3): "loaded"}
        else:
            caller.result()
        assert store.is_resident(0, 3)
        lease = Caller(store.acquire, 0, 3)
        run_dry(engine)
        assert experts.right((0, 3), lease.result())
        counted(store, prefetch_issued=1, prefetch_loads=1, prefetch_cancelled=0)


def test_cancel_leaves_alone_what_somebody_else_waits_for(experts):
    with scripted(experts, slots=4) as (store, engine):
        handle = store.prefetch(0, [0, 1])
        caller = Caller(store.acquire, 0, 1)
        until(lambda: store.stats().joins == 1)
        watcher = store.prefetch(0, [0])
        assert not handle.cancel() and not watcher.cancel()
        run_dry(engine)
        assert experts.right((0, 1), caller.result())
        assert handle.result() == {(0, 0): "loaded", (0, 1): "late"} and watcher.result() == {(0, 0): "loaded"}
        assert not handle.cancel()


def test_a_failed_guess_fails_its_handle_and_is_forgotten(experts):
    with scripted(experts, slots=4) as (store, engine):
        handle = store.prefetch(0, [0, 1])
        [bad] = engine.take()  # one guess at a time
        engine.settle(bad.id, -errno.EIO)
        [good] = engine.take()
        land(engine, good.id)
        assert handle.result() == {bad.key: "failed", good.key: "loaded"}
        caller = Caller(store.acquire, *bad.key)
        run_dry_when(engine)
        assert experts.right(bad.key, caller.result())
        counted(store, prefetch_failures=1, prefetch_loads=1, demand_loads=1)


def run_dry_when(engine):
    land(engine, *[op.id for op in engine.take(wait=20)])


def test_a_guess_displaces_nothing_leased_pinned_or_unread(experts):
    with scripted(experts, slots=4) as (store, engine):
        store.prefetch(0, [0])
        pin = Caller(store.pin, 0, [1])
        run_dry_when(engine)
        pin.result()
        run_dry(engine)
        batch = Caller(store.acquire_many, 0, [2, 3])
        run_dry_when(engine)
        run_dry(engine)
        held, free = batch.result()
        handle = store.prefetch(0, [4, 5])
        assert not engine.take()  # their turn has come, and there is no slot for them
        assert handle.done() and set(handle.result().values()) == {"no_room"}
        free.release()
        handle = store.prefetch(0, [4, 5])
        run_dry(engine)
        assert handle.result() == {(0, 4): "loaded", (0, 5): "no_room"}
        assert [store.is_resident(0, e) for e in range(6)] == [True, True, True, False, True, False]
        assert experts.right((0, 2), held)
        counted(store, wasted=0, evictions=1, prefetch_cancelled=3)


def test_keys_prefetched_and_then_acquired_are_read_once_at_any_budget(experts):
    for slots in range(5):
        for batch in (True, False):
            with scripted(experts, slots=slots) as (store, engine):
                store.prefetch(0, range(8))
                run_dry(engine)

                def consume(store=store, batch=batch):
                    if batch:
                        return store.acquire_many(0, range(8)).release()
                    for expert in range(8):
                        store.acquire(0, expert).release()

                caller = Caller(consume)
                while not caller.done():
                    run_dry(engine)
                caller.result()
                counted(store, bytes_read=80_000, wasted=0, first_consumptions=slots)


def test_prefetching_twice_reads_once(experts):
    with scripted(experts, slots=4) as (store, engine):
        handles = [store.prefetch(0, [0, 1, 0]) for _ in range(3)]
        run_dry(engine)
        assert all(set(handle.result().values()) == {"loaded"} for handle in handles)
        assert set(store.prefetch(0, [0, 1]).result().values()) == {"resident"}
        counted(store, prefetch_issued=2, prefetch_loads=2, unread_resident=2, requests=0)


def test_an_unread_guess_that_a_demand_displaces_is_wasted(experts):
    with scripted(experts, slots=1) as (store, engine):
        store.prefetch(0, 0)
        run_dry(engine)
        caller = Caller(store.acquire, 0, 1)
        run_dry_when(engine)
        caller.result()
        counted(store, wasted=1, unread_resident=0, evictions=1, resident_experts=1)


def test_a_pin_that_joins_a_pass_through_gets_a_slot_all_the_same(experts):
    with scripted(experts, slots=2) as (store, engine):
        batch = Caller(store.acquire_many, 0, [0, 1])
        run_dry_when(engine)
        run_dry(engine)
        held = batch.result()
        passing = Caller(store.acquire, 0, 2)
        [op] = engine.take(wait=20)
        assert op.slot < 0
        pin = Caller(store.pin, 0, 2)
        until(lambda: engine.waits(op.id) == 2, "the pin's wait")
        held.release()
        land(engine, op.id)
        run_dry_when(engine)
        pin.result()
        assert store.is_resident(0, 2) and sorted(engine.leases()) == [0, 1]
        assert experts.right((0, 2), passing.result())
        store.unpin(0, 2)


def test_guesses_under_way_evict_for_no_more_than_their_share_of_the_slots(experts):
    with scripted(experts, slots=8, chunk=16384, guess_bytes=16 * 16384, guess_share=1.0) as (store, engine):
        caller = Caller(store.acquire_many, 0, range(8))
        until(lambda: store.stats().misses == 8, "eight misses")
        run_dry(engine)
        caller.result().release()
        handle = store.prefetch(1, range(6))
        counted(store, prefetch_issued=6, evictions=0)
        ops = engine.take()
        counted(store, evictions=4)
        assert len(ops) == 4 and not engine.take()  # the others wait until these have landed
        caller = Caller(store.acquire_many, 0, [8, 9, 10])  # and demands still find slots
        until(lambda: store.stats().misses == 11, "three misses")
        run_dry(engine)
        caller.result().release()
        run_dry(engine)
        # Four unread guesses, three leases: one slot was left when the turn of the others came.
        counted(store, demand_loads=11, pass_throughs=0, prefetch_loads=5)
        assert sorted(handle.result().values()) == ["loaded"] * 5 + ["no_room"]


def test_guesses_into_free_slots_are_not_held_back(experts):
    with scripted(experts, slots=8) as (store, engine):
        store.prefetch(0, range(8))
        counted(store, prefetch_issued=8, evictions=0)
        run_dry(engine)
