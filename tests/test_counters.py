"""What is counted where: phases, waits, errors by class, gauges, windows; and that it all adds up."""

import errno
import os
import threading

import pytest
from rig import Caller, Experts, assert_flows, assert_identities, counted, land, layers_of, run_dry, scripted, until

import fastcache
from fastcache.stats import ERRORS, PHASES, WAIT_EDGES_US
from fastcache_ext import counters

NBYTES = 10_000


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 12, NBYTES))


def in_phase(store, phase, **expected):
    now = store.stats(phases=True).phases[phase]
    assert {name: getattr(now, name) for name in expected} == expected
    assert_identities(store, quiet=False)


def test_both_halves_know_the_same_phases_errors_and_buckets():
    assert counters.PHASES == PHASES and tuple(ERRORS) == counters.ERRORS
    assert len(WAIT_EDGES_US) + 1 == counters.WAIT_BUCKETS == len(fastcache.Stats().demand_wait_buckets)


# ---- phases


def test_a_request_counts_in_the_phase_of_the_store(experts):
    with fastcache.open(experts.source, "all") as store:
        store[0, 1]
        with store.phase("prefill"):
            store.acquire_many(0, [1, 2, 3])
            store.prefetch(1, [5, 6]).wait()
        with store.phase("decode"):
            store[1, 5], store[1, 5], store[0, 1]
            dict(store.as_ready(0, [2, 4]))
        s = store.stats(layers=True, phases=True)
        none, prefill, decode = (s.phases[name] for name in PHASES)
        assert (none.requests, none.misses, none.demand_loads) == (1, 1, 1)
        assert (prefill.requests, prefill.hits, prefill.misses, prefill.prefetch_loads) == (3, 1, 2, 2)
        assert (prefill.first_consumptions, prefill.unread_resident) == (0, 2)
        assert (decode.requests, decode.hits, decode.misses, decode.first_consumptions) == (5, 4, 1, 1)
        assert (decode.reuses, decode.hit_rate) == (3, 0.8)
        assert prefill.bytes_read == 4 * NBYTES and prefill.demand_waits == 2 and prefill.demand_wait_ns > 0
        assert prefill.layers[1]["prefetch_loads"] == 2 and decode.layers[1]["first_consumptions"] == 1
        assert dict(decode.layers[0]) | {"demand_wait_ns": 0} == dict.fromkeys(decode.layers[0], 0) | {
            "requests": 3, "hits": 2, "misses": 1, "demand_loads": 1, "bytes_read": NBYTES,
        }  # fmt: skip
        assert_identities(store)


def test_what_lands_later_counts_in_the_phase_that_asked_for_it(experts):
    with scripted(experts, slots=12) as (store, engine):
        with store.phase("prefill"):
            handle = store.prefetch(0, [2])  # first: no guess is read while a demand is
            ops = engine.take(wait=20)
            caller = Caller(store.acquire, 0, 1)
            ops += engine.take(wait=20)
        with store.phase("decode"):
            joiner, late = Caller(store.acquire, 0, 1), Caller(store.acquire, 0, 2)
            until(lambda: store.stats().joins == 2)
        in_phase(store, "prefill", misses_in_flight=1, prefetch_in_flight=1, reads_in_flight=2, joins_in_flight=0)
        in_phase(store, "decode", misses_in_flight=0, joins_in_flight=2, late_joins=1, bytes_read=0)
        land(engine, *[op.id for op in ops])
        caller.result(), joiner.result(), late.result(), handle.wait()
        in_phase(
            store, "prefill", demand_loads=1, prefetch_loads=1, late_joins_ok=1, demand_waits=1, bytes_read=2 * NBYTES
        )
        in_phase(store, "decode", joins_ok=2, demand_waits=2, bytes_read=0, misses=0)
        in_phase(store, "none", requests=0, demand_waits=0, bytes_read=0, reads=0, bytes_submitted=0)
        assert store.stats(phases=True).phases["decode"].late_join_wait_ns > 0


def test_leaving_a_phase_restores_the_former_whatever_happened(experts):
    with fastcache.open(experts.source, "all") as store:
        with store.phase("decode"):
            with pytest.raises(KeyError), store.phase("prefill"):
                with store.phase(None):
                    store[0, 1]
                store[0, 2]
                raise KeyError
            store[0, 3], store[0, 4]
        store[0, 5]
        again = store.phase("prefill")
        with again, again:
            store[0, 6]
        store[0, 7]
        requests = {name: s.requests for name, s in store.stats(phases=True).phases.items()}
        assert requests == {"none": 3, "prefill": 2, "decode": 2}
        with store.phase("decode"):
            store.close()
        assert store.stats(phases=True).phases["none"].requests == 3


@pytest.mark.parametrize("name", ["train", "", 1, "none"])
def test_an_unknown_phase_is_refused_at_once(experts, name):
    with (
        fastcache.open(experts.source, "all") as store,
        pytest.raises(ValueError, match="'prefill', 'decode', or None"),
    ):
        store.phase(name)


# ---- waits


def test_one_wait_falls_into_the_bucket_that_holds_it(experts):
    seen = set()
    with scripted(experts, slots=1) as (store, engine):
        for turn in range(24):
            before = store.stats()
            caller = Caller(store.acquire, turn % 2, turn % 12)
            ops = engine.take(wait=20)
            threading.Event().wait(turn * turn / 1e5)  # up to 5 ms: some spread over buckets
            land(engine, *[op.id for op in ops])
            caller.result()
            del caller
            one = store.stats() - before
            assert one.demand_waits == 1 and one.demand_wait_ns > 0
            [bucket] = [i for i, n in enumerate(one.demand_wait_buckets) if n]
            lower = WAIT_EDGES_US[bucket - 1] if bucket else 0
            assert lower * 1000 < one.demand_wait_ns <= WAIT_EDGES_US[bucket] * 1000
            assert one.wait_at_most(0.5) == one.wait_at_most(1.0) == WAIT_EDGES_US[bucket] / 1e6
            seen.add(bucket)
    assert len(seen) > 2


def test_a_hit_does_not_wait_and_every_expert_of_a_batch_waits_until_it_lands(experts):
    with scripted(experts, slots=12) as (store, engine):
        caller = Caller(store.acquire_many, 0, [0, 1, 2, 0])
        ops = engine.take(wait=20)
        land(engine, ops[0].id)
        counted(store, demand_waits=1)
        first = store.stats().demand_wait_ns
        land(engine, ops[1].id, ops[2].id)
        caller.result()
        counted(store, demand_waits=3)
        assert store.stats().demand_wait_ns - first > 2 * first
        store.acquire_many(0, [0, 1, 2])
        store.prefetch(0, [5])
        run_dry(engine)
        counted(store, demand_waits=3, misses=3)


def test_a_caller_that_gives_up_has_waited_until_then(experts):
    with scripted(experts, slots=12) as (store, engine):
        for call in (
            lambda: store.acquire(0, 3, timeout=0.03),
            lambda: store.acquire_many(0, [3], timeout=0.03),
            lambda: next(store.as_ready(0, [3], timeout=0.03)),
        ):
            before = store.stats()
            with pytest.raises(fastcache.ReadTimeout):
                call()
            one = store.stats() - before
            assert one.demand_waits == 1 and one.demand_wait_ns >= 0.03e9 and one.errors["timeout"] == 1
        with pytest.raises(fastcache.ReadTimeout):
            store.prefetch(0, [4]).result(timeout=0)
        assert store.stats().errors["timeout"] == 4
        run_dry(engine)
        counted(store, demand_waits=3, misses=1, joins=2, joins_ok=2, demand_loads=1)


def test_shares_of_waits_are_upper_edges():
    some = fastcache.Stats(demand_wait_buckets=(1, 0, 1, *[0] * 22, 2))
    assert [some.wait_at_most(share) for share in (0, 0.25, 0.5, 0.51, 1)] == [
        1e-6,
        1e-6,
        4e-6,
        float("inf"),
        float("inf"),
    ]
    assert fastcache.Stats().wait_at_most(0.99) == 0.0
    with pytest.raises(ValueError, match="from 0 to 1"):
        some.wait_at_most(99)


# ---- errors


def test_errors_are_counted_by_class_and_errno(experts):
    with scripted(experts, slots=3, overflow=0) as (store, engine):

        def fail(res):
            caller = Caller(store.acquire, 0, 1)
            [op] = engine.take(wait=20)
            engine.settle(op.id, res)
            assert caller.error()

        fail(-errno.EIO), fail(-errno.EIO), fail(-errno.ESTALE), fail(0), fail(-5000)
        s = store.stats()
        assert s.errors == dict.fromkeys(ERRORS, 0) | {"read_failed": 4, "short_read": 1}
        assert s.read_errnos == {"EIO": 2, "ESTALE": 1, "other": 1}
        assert s.demand_failures == 5
        store.prefetch(0, [2])
        [op] = engine.take(wait=20)
        engine.settle(op.id, -errno.ENXIO)
        callers = [Caller(store.acquire, 0, expert) for expert in (4, 5, 6)]
        until(lambda: store.stats().misses == 8)
        with pytest.raises(fastcache.OverflowLimit):
            store[0, 7]
        run_dry(engine)
        for caller in callers:
            caller.result().release()
        after = store.stats() - s
        assert {name: n for name, n in after.errors.items() if n} == {"read_failed": 1, "overflow_limit": 1}
        assert after.read_errnos == {"ENXIO": 1} and after.prefetch_failures == after.pass_through_failures == 1
        handle = store.prefetch(1, [9])
        assert handle.cancel() and not any((store.stats() - s - after).errors.values())
        with store.phase("decode"):
            closing = Caller(store.acquire, 1, 1)
            until(lambda: store.stats().misses == 10)
        store.close(0)
        assert isinstance(closing.error(), fastcache.StoreClosed)
        assert store.stats(phases=True).phases["decode"].errors["closed"] == 1


def test_a_changed_file_and_a_raising_source_have_classes_of_their_own(disk):
    mine = Experts(disk, layers_of(1, 4, NBYTES))
    with fastcache.open(mine.source, "all") as store:
        os.utime(mine.path, ns=(1, 1))
        with pytest.raises(fastcache.CheckpointChanged):
            store[0, 1]
        assert store.stats().errors["changed"] == 1
        assert_identities(store)

    class Broken:
        def keys(self):
            return [(0, 0)]

        def expert_nbytes(self, key):
            return 10

        def read_expert(self, key):
            raise OSError(errno.EIO, "no")

    with fastcache.open(Broken(), "all") as store:
        with pytest.raises(fastcache.ReadFailed):
            store[0, 0]
        assert store.stats().errors["source"] == 1 and not store.stats().read_errnos
        assert_identities(store)


# ---- gauges and windows


def test_gauges_say_what_is_held_and_what_is_at_the_device(experts):
    with scripted(experts, slots=2, chunk=4096) as (store, engine):
        caller = Caller(store.acquire_many, 0, [0, 1, 2])
        ops = engine.take(wait=20)
        s = store.stats()
        assert s.reads_in_flight == len(ops) == len(engine.in_hand)
        assert s.bytes_in_flight == sum(op.nbytes for op in ops)
        engine.settle(ops[0].id, -errno.EAGAIN)  # submitted again: still one read in flight
        assert (store.stats().reads_in_flight, store.stats().bytes_in_flight) == (s.reads_in_flight, s.bytes_in_flight)
        land(engine, ops[0].id)
        assert store.stats().reads == 1 and store.stats().reads_in_flight == len(ops) - 1
        run_dry(engine)
        s = store.stats()
        assert (s.reads_in_flight, s.bytes_in_flight, s.leased_slots) == (0, 0, 2)
        assert s.overflow_bytes == s.overflow_peak_bytes >= NBYTES
        assert s.bytes_submitted > s.bytes_read == 3 * NBYTES
        caller.result().release()
        del caller
        s = store.stats()
        assert (s.leased_slots, s.overflow_bytes) == (0, 0) and s.overflow_peak_bytes >= NBYTES
        store.pin(0, 0)
        assert store.stats().leased_slots == 1


def test_a_window_that_begins_with_unread_prefetches_says_so_and_adds_up(experts):
    with fastcache.open(experts.source, "all") as store:
        store.prefetch(0, [1, 2, 3]).wait()
        store[0, 9]
        before = store.stats(layers=True, phases=True)
        store.reset_stats()
        s = store.stats()
        assert (s.prefetch_loads, s.unread_resident, s.resident_experts) == (0, 3, 4)
        assert s.at_start["unread_resident"] == 3 and s.at_start["resident_experts"] == 4
        assert_identities(store)
        store[0, 1]
        s = store.stats()
        assert (s.hits, s.first_consumptions, s.unread_resident, s.at_start["unread_resident"]) == (1, 1, 2, 3)
        assert_identities(store)
        middle = store.stats(layers=True, phases=True)
        store.prefetch(0, [4]).wait()
        store[0, 2], store[0, 9]
        window = store.stats(layers=True, phases=True) - middle
        assert (window.prefetch_loads, window.first_consumptions, window.unread_resident) == (1, 1, 2)
        assert window.at_start["unread_resident"] == 2
        for part in (window, *window.phases.values(), before):
            assert_flows(part)
        assert not before.at_start


def test_a_difference_needs_the_same_parts_of_both(experts):
    with fastcache.open(experts.source, "all") as store:
        fresh = store.stats()
        store[0, 1]
        plain, full = store.stats(), store.stats(layers=True, phases=True)
        assert (full - fresh).layers[0]["misses"] == 1  # nothing had been counted: the parts are known to be 0
        assert not (store.stats() - full).layers
        with pytest.raises(ValueError, match="layers=True"):
            full - plain
        with pytest.raises(ValueError, match="phases=True"):
            store.stats(phases=True) - plain
        with pytest.raises(TypeError):
            full - 1


def test_what_is_read_under_the_mutex_is_what_is_read_without_it(experts):
    with fastcache.open(experts.source, "all") as store:
        with store.phase("decode"):
            store.acquire_many(0, range(6))
        assert store._counters(True, True, 0) == store._counters(True, True, 1)
