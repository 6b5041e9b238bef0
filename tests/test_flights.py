"""Reads that several calls share, batches larger than the cache, and as_ready; and how they are counted."""

import errno

import pytest
from rig import Caller, Experts, counted, land, layers_of, run_dry, scripted, until

import fastcache


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 12, 10_000))


# ---- one read per key


def test_threads_that_want_one_expert_share_one_read(experts):
    with scripted(experts, slots=3) as (store, engine):
        callers = [Caller(store.acquire, 0, 7) for _ in range(8)]
        [op] = engine.take(wait=20)
        until(lambda: store.stats().joins == 7, "seven joins")
        assert not engine.take()
        land(engine, op.id)
        leases = [caller.result() for caller in callers]
        assert all(experts.right((0, 7), lease) for lease in leases)
        assert len({lease.generation for lease in leases}) == 1
        counted(store, requests=8, misses=1, joins=7, joins_ok=7, demand_loads=1, bytes_read=10_000, hits=0)


def test_threads_share_a_read_into_a_private_buffer_too(experts):
    with scripted(experts, budget=0) as (store, engine):
        callers = [Caller(store.acquire, 0, 7) for _ in range(4)]
        [op] = engine.take(wait=20)
        until(lambda: store.stats().joins == 3, "three joins")
        assert op.slot == -1 and not engine.take()
        land(engine, op.id)
        leases = [caller.result() for caller in callers]
        assert all(experts.right((0, 7), lease) for lease in leases)
        counted(store, misses=1, joins_ok=3, pass_throughs=1, pass_through_bytes=10_000)
        assert store.describe()["overflow_bytes"] == 12_288
        del leases, callers
        assert store.describe()["overflow_bytes"] == 0


def test_everyone_who_joined_a_failed_read_is_told(experts):
    with scripted(experts, slots=3) as (store, engine):
        callers = [Caller(store.acquire, 0, 7) for _ in range(4)]
        [op] = engine.take(wait=20)
        until(lambda: store.stats().joins == 3, "three joins")
        engine.settle(op.id, -errno.EIO)
        assert {caller.error().errno for caller in callers} == {errno.EIO}
        counted(store, misses=1, joins=3, demand_failures=1, join_failures=3, bytes_read=0)


def test_batches_that_overlap_read_each_expert_once(experts):
    with scripted(experts, slots=12) as (store, engine):
        one = Caller(store.acquire_many, 0, [1, 2, 3, 4])
        ops = engine.take(4, wait=20)
        until(lambda: store.stats().misses == 4)
        two = Caller(store.acquire_many, 0, [6, 4, 3, 5])
        until(lambda: store.stats().requests == 8)
        more = engine.take()
        assert sorted(op.key[1] for op in [*ops, *more]) == [1, 2, 3, 4, 5, 6]
        land(engine, *engine.in_hand)
        assert all(experts.right(lease.key, lease) for lease in [*one.result(), *two.result()])
        counted(store, requests=8, misses=6, joins=2, joins_ok=2, demand_loads=6)


def test_duplicates_in_a_batch_are_one_request_and_several_handles(experts):
    with scripted(experts, slots=4) as (store, engine):
        caller = Caller(store.acquire_many, 0, [5, 5, 5])
        land(engine, *[op.id for op in engine.take(wait=20)])
        leases = caller.result()
        counted(store, requests=1, misses=1)
        assert len({id(lease) for lease in leases}) == 3
        for lease in leases:
            assert sum(engine.leases()) > 0
            assert experts.right((0, 5), lease["data"])
            lease.release()
        del lease
        assert sum(engine.leases()) == 0


def test_nothing_is_asked_for_nothing(experts):
    with scripted(experts, slots=2) as (store, engine):
        assert store.acquire_many(0, []) == [] and list(store.as_ready(0, [])) == []
        handle = store.prefetch(0, [])
        assert handle.done() and handle.result() == {} and not handle.cancel()
        store.pin(0, [])
        store.unpin(0, [])
        assert not engine.take()
        counted(store, requests=0, prefetch_issued=0)


# ---- batches against a small cache


def test_a_batch_evicts_none_of_its_own_resident_members(experts):
    with scripted(experts, slots=4, policy="lru") as (store, engine):
        store.prefetch(0, range(4))
        run_dry(engine)
        for expert in range(4):
            store.acquire(0, expert).release()
        caller = Caller(store.acquire_many, 0, [8, 9, 10, 0])  # 0 is the least recently used of all
        assert sorted(op.key[1] for op in engine.take(wait=20)) == [8, 9, 10]
        run_dry(engine)
        assert all(experts.right(lease.key, lease) for lease in caller.result())
        counted(store, hits=5, misses=3, evictions=3, pass_throughs=0)


def test_a_batch_larger_than_the_cache_is_served_whole(experts):
    with scripted(experts, slots=2) as (store, engine):
        caller = Caller(store.acquire_many, 0, range(7))
        until(lambda: len(engine.take()) >= 0 and len(engine.in_hand) == 7, "seven reads before the first wait")
        land(engine, *reversed(engine.in_hand))
        assert [lease.key.expert for lease in caller.result()] == list(range(7))
        assert all(experts.right(lease.key, lease) for lease in caller.result())
        counted(store, misses=7, demand_loads=2, pass_throughs=5)


def test_two_threads_that_hold_half_each_and_want_more_do_not_wait_for_each_other(experts):
    with scripted(experts, slots=4) as (store, engine):
        halves = [Caller(store.acquire_many, 0, [2 * n, 2 * n + 1]) for n in range(2)]
        until(lambda: len(engine.take()) >= 0 and len(engine.in_hand) == 4)
        land(engine, *engine.in_hand)
        held = [half.result() for half in halves]
        more = [Caller(store.acquire_many, 1, [2 * n, 2 * n + 1]) for n in range(2)]
        until(lambda: len(engine.take()) >= 0 and len(engine.in_hand) == 4)
        land(engine, *engine.in_hand)
        for leases in [*held, *[caller.result() for caller in more]]:
            assert all(experts.right(lease.key, lease) for lease in leases)


def test_the_overflow_limit_names_who_holds_the_memory(experts):
    with scripted(experts, slots=1, overflow=3 * 12_288) as (store, engine):
        caller = Caller(store.acquire_many, 1, [3, 4, 5, 6])
        until(lambda: len(engine.take()) >= 0 and len(engine.in_hand) == 4)
        land(engine, *engine.in_hand)
        held = caller.result()
        with pytest.raises(fastcache.OverflowLimit) as caught:
            store.acquire(0, 0)
        assert isinstance(caught.value, MemoryError) and "layer 1 expert 5" in str(caught.value)
        assert sorted(caught.value.holders) == [((1, expert), 12_288) for expert in (4, 5, 6)]
        counted(store, pass_through_failures=1, misses=5)
        assert all(experts.right(lease.key, lease) for lease in held)
        del held[1], caller
        later = Caller(store.acquire, 0, 0)
        land(engine, *[op.id for op in engine.take(wait=20)])
        assert experts.right((0, 0), later.result())


# ---- as_ready


def test_as_ready_gives_hits_first_and_then_what_lands(experts):
    with scripted(experts, slots=8) as (store, engine):
        store.prefetch(0, [2, 5])
        run_dry(engine)
        ready = store.as_ready(0, [0, 5, 1, 2, 3, 0])
        ops = {op.key[1]: op.id for op in engine.take()}
        assert sorted(ops) == [0, 1, 3]
        got = [next(ready)[0], next(ready)[0]]
        for expert in (3, 0, 1):
            land(engine, ops[expert])
            expert, lease = next(ready)
            assert experts.right((0, expert), lease)
            got.append(expert)
        assert got == [5, 2, 3, 0, 1]
        assert next(ready, None) is None and next(ready, None) is None
        counted(store, requests=5, hits=2, misses=3)


def test_as_ready_raises_failures_together_at_the_end(experts):
    with scripted(experts, slots=8) as (store, engine):
        ready = store.as_ready(0, range(4))
        ops = engine.take()
        engine.settle(ops[0].id, -errno.EIO)
        land(engine, ops[1].id)
        engine.settle(ops[2].id, -errno.ENODATA)
        land(engine, ops[3].id)
        assert [next(ready)[0], next(ready)[0]] == [1, 3]
        with pytest.raises(fastcache.BatchFailed) as caught:
            next(ready)
        assert {key.expert: error.errno for key, error in caught.value.failed.items()} == {
            0: errno.EIO,
            2: errno.ENODATA,
        }
        assert next(ready, None) is None


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("keep", [False, True])
def test_as_ready_serves_a_batch_larger_than_the_cache(experts, slots, keep):
    with scripted(experts, slots=slots) as (store, engine):

        def consume():
            kept, seen = [], []
            for expert, lease in store.as_ready(0, range(10)):
                assert experts.right((0, expert), lease)
                seen.append(expert)
                if keep:
                    kept.append(lease)
            assert all(experts.right(lease.key, lease) for lease in kept)
            return seen

        caller = Caller(consume)
        while not caller.done():
            engine.take()
            assert sum(engine.now(id).slot < 0 for id in engine.in_hand) <= 8
            land(engine, *engine.in_hand)
        assert sorted(caller.result()) == list(range(10))
        counted(store, requests=10)


def test_as_ready_loses_no_expert_that_lands_between_two_looks(disk, engine):
    """Real engines land whenever they like."""
    experts = Experts(disk, layers_of(1, 16, 600))
    with fastcache.open(experts.source, "all", engine=engine) as every:
        slot = every.describe()["slot_bytes"]
    with fastcache.open(experts.source, 8 * slot, engine=engine, direct="off", chunk=512) as store:
        for turn in range(400):
            some = range(turn % 8, turn % 8 + 8)
            assert sorted(expert for expert, _ in store.as_ready(0, some)) == list(some)


# ---- how long an engine may sleep


def test_an_engine_sleeps_through_the_reads_of_one_call_that_waits_for_all(experts):
    with scripted(experts, slots=10) as (store, engine):
        caller = Caller(store.acquire_many, 0, range(8))
        until(lambda: store.stats().misses == 8, "eight misses")
        assert len(engine.take()) == 8
        assert engine.patience() == 7
        land(engine, *engine.in_hand[:6])
        assert engine.patience() == 1
        land(engine, *engine.in_hand)
        caller.result().release()


def test_an_engine_wakes_for_each_read_when_somebody_wants_them_one_by_one(experts):
    with scripted(experts, slots=10) as (store, engine):
        ready = store.as_ready(0, range(4))
        engine.take()
        assert engine.patience() == 1
        land(engine, *engine.in_hand)
        assert len(list(ready)) == 4


@pytest.mark.parametrize("second", ["a join", "another call", "a guess", "a call that has left"])
def test_an_engine_wakes_for_each_read_when_two_wait(experts, second):
    with scripted(experts, slots=10) as (store, engine):
        if second == "a call that has left":
            with pytest.raises(fastcache.ReadTimeout):
                store.acquire_many(0, [9, 10, 11], timeout=0)
        elif second == "a guess":
            store.prefetch(1, 3)
            engine.take()
        first = Caller(store.acquire_many, 0, range(4))
        until(
            lambda: store.stats().misses >= 4 and len(engine.take()) + len(engine.in_hand) >= 4,
            "the first call's reads",
        )
        engine.take()
        other = None
        if second in ("a join", "another call"):
            other = Caller(store.acquire, 0, 0 if second == "a join" else 9)
            until(lambda: store.stats().requests == 5, "the second request")
            engine.take()
        assert engine.patience() == 1
        land(engine, *engine.in_hand)
        first.result().release()
        if other:
            other.result().release()


def test_an_engine_that_was_kicked_does_not_sleep_long(experts):
    with scripted(experts, slots=10) as (store, engine):
        caller = Caller(store.acquire_many, 0, range(8))
        until(lambda: store.stats().misses == 8, "eight misses")
        engine.take(8)  # as many as it had room for: it has not looked whether there are more
        assert engine.patience() == 1
        land(engine, *engine.in_hand)
        caller.result().release()
