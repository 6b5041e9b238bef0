"""Calls that come while another is under way: from other threads, handlers, callbacks, sources and keys themselves."""

import errno
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
from rig import Caller, Experts, assert_identities, expert_bytes, in_time, land, layers_of, run_dry, scripted, until

import fastcache

NBYTES = 9_000
SLOT = 12_288
PATIENCE = 20


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 8, NBYTES))


class Gate:
    """Where a read of a Source stops until it is let through."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.opened.wait(PATIENCE)


class Source:
    """A Python source of one layer; `does[expert]` is called before its bytes are given, each time."""

    def __init__(self):
        self.calls, self.does = [], {}

    def keys(self):
        return [(0, expert) for expert in range(8)]

    def expert_nbytes(self, key):
        return NBYTES

    def read_expert(self, key):
        self.calls.append(key.expert)
        self.does.get(key.expert, lambda: None)()
        return expert_bytes(*key, NBYTES)


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def store(source):
    with fastcache.open(source, 4 * SLOT, engine="auto") as opened:
        yield opened
        gc.collect()
        assert opened._check() == 0 and opened.describe()["leased_slots"] == 0
    assert_identities(opened)


def right(lease):
    return bytes(lease) == expert_bytes(*lease.key, NBYTES)


# ---- iterators


def test_an_iterator_that_another_thread_closes_ends_there_and_holds_nothing(experts):
    with scripted(experts, slots=4) as (store, engine):
        ready = store.as_ready(0, [0, 1])
        first, second = engine.take()
        waiters = [Caller(next, ready, None) for _ in range(2)]
        until(lambda: any(waiter.done() for waiter in waiters), "the refusal of one of two")
        [refused] = [waiter for waiter in waiters if waiter.done()]
        [waiter] = [waiter for waiter in waiters if waiter is not refused]
        assert isinstance(refused.error(), ValueError)
        ready.close()
        assert next(ready, None) is None
        land(engine, first.id)
        assert waiter.result() is None and next(ready, None) is None
        land(engine, second.id)
        assert engine.leases() == [0] * 4
        assert store.is_resident(*first.key) and store.is_resident(*second.key)


def test_an_iterator_that_a_signal_handler_closes_ends_there_and_holds_nothing(experts):
    with scripted(experts, slots=4) as (store, engine):
        ready = store.as_ready(0, [0, 1, 2])
        engine.take()

        def strike(*_):
            ready.close()
            land(engine, *engine.in_hand)

        was = signal.signal(signal.SIGALRM, strike)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            assert list(ready) == []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, was)
        assert engine.leases() == [0] * 4 and not engine.in_hand


def test_an_iterator_serves_one_thread_at_a_time(source):
    with fastcache.open(source, SLOT, engine="auto") as store:
        held, source.does[0] = store[0, 7], Gate()
        ready = store.as_ready(0, [0, 1])
        one = Caller(next, ready)
        assert source.does[0].reached.wait(PATIENCE)
        for _ in range(2):
            with pytest.raises(ValueError, match="already executing"):
                next(ready)
        source.does[0].opened.set()
        got = [one.result(), *ready]
        assert sorted(expert for expert, _ in got) == [0, 1] and all(right(lease) for _, lease in got)
        assert right(held) and source.calls == [7, 0, 1]


@pytest.mark.parametrize("caught", [True, False])
def test_a_source_that_goes_on_with_the_iterator_it_is_read_for_is_refused(source, caught):
    with fastcache.open(source, SLOT, engine="auto") as store:
        held = store[0, 7]
        refusals = []

        def goes_on():
            try:
                next(ready)
            except ValueError as error:
                refusals.append(error)
                if not caught:
                    raise

        source.does[0] = goes_on
        ready = store.as_ready(0, [0, 1])
        if caught:
            assert sorted(expert for expert, lease in ready if right(lease)) == [0, 1]
        else:
            with pytest.raises(fastcache.BatchFailed) as failed:
                assert [expert for expert, _ in ready] == 0  # raises at its end
            assert list(failed.value.failed) == [(0, 0)]
            assert failed.value.failed[0, 0].__cause__ is refusals[0]
        assert len(refusals) == 1 and right(held)


# ---- keys that do something


CALLS = {
    "acquire_many": lambda store, some: store.acquire_many(0, some),
    "as_ready": lambda store, some: store.as_ready(0, some),
    "prefetch": lambda store, some: store.prefetch(0, some),
    "pin": lambda store, some: store.pin(0, some),
    "acquire_many of keys": lambda store, some: store.acquire_many((0, expert) for expert in some),
    "prefetch of keys": lambda store, some: store.prefetch((0, expert) for expert in some),
}


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_experts_that_close_the_store_meet_a_closed_store(experts, engine, call, resident):
    store = fastcache.open(experts.source, 4 * SLOT, engine=engine)
    if resident:
        store.acquire(0, 1).release()

    def some():
        yield 1
        store.close()
        yield 1

    with pytest.raises(fastcache.StoreClosed):
        CALLS[call](store, some())
    assert store._check() == 0 and store.stats().requests == resident


class Acts:
    """An expert's number that does something when it is looked at."""

    def __init__(self, value, action):
        self.value, self.action = value, action

    def __index__(self):
        self.action()
        return self.value


@pytest.mark.parametrize("resident", [False, True])
def test_a_number_that_closes_the_store_meets_a_closed_store(experts, engine, resident):
    for call in [
        lambda store, n: store[0, n],
        lambda store, n: store.acquire_many(0, [n, 2]),
        lambda s, n: s.pin(0, [n]),
    ]:
        store = fastcache.open(experts.source, 4 * SLOT, engine=engine)
        if resident:
            store.acquire_many(0, [1, 2]).release()
        with pytest.raises(fastcache.StoreClosed):
            call(store, Acts(1, store.close))


def test_experts_that_raise_reserve_nothing(experts):
    with scripted(experts, slots=4) as (store, engine):
        for call in CALLS.values():
            with pytest.raises(ZeroDivisionError):
                call(store, (1 // (1 - expert) for expert in range(3)))
        assert not engine.take() and engine.leases() == [0] * 4 and store.stats().requests == 0


SHRINKING = """
import contextlib, gc, fastcache
source = fastcache.MemorySource({(0, e): bytes([e]) * 4096 for e in range(8)})
store = fastcache.open(source, "all", engine="auto")
some = []

class Last:
    def __index__(self):
        some.clear()
        gc.collect()
        return 1

for call in (store.acquire_many, lambda *args: list(store.as_ready(*args)), store.prefetch, store.pin):
    for n in (1, 40, 60):
        some[:] = [Last(), *(object() for _ in range(n))]
        with contextlib.suppress(IndexError, RuntimeError, TypeError):
            call(0, some)
print("done")
"""


def test_a_list_that_is_emptied_while_it_is_read_is_not_read_beyond_its_end():
    command = [sys.executable, "-X", "faulthandler", "-c", SHRINKING]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


# ---- pins


@pytest.mark.parametrize("released", [True, False])
def test_a_pin_that_joins_a_pass_through_is_resident_or_told_that_it_cannot_be(experts, released):
    with scripted(experts, slots=2) as (store, engine):
        batch = Caller(store.acquire_many, 0, [0, 1])
        land(engine, *[op.id for op in engine.take(wait=20)])
        run_dry(engine)
        held = batch.result()
        passing = Caller(store.acquire, 0, 2)
        [op] = engine.take(wait=20)
        pin = Caller(store.pin, 0, [2])
        until(lambda: engine.waits(op.id) == 2, "the pin's wait")
        if released:
            held.release()
        land(engine, op.id)
        if released:
            land(engine, *[op.id for op in engine.take(wait=20)])
            assert pin.result() is None and store.is_resident(0, 2)
        else:
            failed = pin.error().failed
            assert list(failed) == [(0, 2)] and isinstance(failed[0, 2], fastcache.BudgetTooSmall)
        assert experts.right((0, 2), passing.result())
        del passing, pin
        gc.collect()
        assert store.describe()["overflow_bytes"] == 0
        store.unpin(0, 2)
        held.release()
        del held, batch
        assert engine.leases() == [0, 0]


@pytest.mark.parametrize("slots, wanted", [(2, ([0], [1])), (4, ([0, 1], [2, 3])), (3, ([0, 1], [1, 2]))])
def test_threads_that_pin_at_once_never_pin_the_last_slot(experts, slots, wanted):
    with scripted(experts, slots=slots) as (store, engine):
        pins = [Caller(store.pin, 0, some) for some in wanted]
        until(lambda: len(engine.take()) >= 0 and store.stats().prefetch_issued == slots, "reads for both")
        run_dry(engine)
        refused = [number for number, pin in enumerate(pins) if pin.error() is not None]
        assert [type(pins[number].error()) for number in refused] == [fastcache.BudgetTooSmall]
        assert sum(engine.leases()) == len(wanted[1 - refused[0]])  # of the refused call nothing stays pinned
        other = Caller(store.acquire, 1, 0)
        [op] = engine.take(wait=20)
        assert op.slot >= 0
        land(engine, op.id)
        assert experts.right((1, 0), other.result())
        assert all(store.is_resident(0, expert) for expert in wanted[1 - refused[0]])
        store.unpin(0, wanted[0] + wanted[1])


# ---- Python sources


def test_a_callback_may_want_what_its_worker_has_not_begun_to_read(store, source):
    gate = source.does[0] = Gate()
    first, got, told = store.prefetch(0, [0]), [], threading.Event()
    assert gate.reached.wait(PATIENCE)
    first.add_done_callback(lambda _: (got.append(bytes(store.acquire(0, 1))), told.set()))
    second = store.prefetch(0, [1])  # stands behind the callback
    gate.opened.set()
    assert told.wait(PATIENCE) and got == [expert_bytes(0, 1, NBYTES)]
    assert second.result(PATIENCE) == {(0, 1): "late"} and source.calls == [0, 1]


def test_a_demand_reads_at_once_the_guess_that_nobody_has_begun(store, source):
    gate = source.does[0] = Gate()
    first = store.prefetch(0, [0])
    assert gate.reached.wait(PATIENCE)
    second = store.prefetch(0, [1, 2, 3])
    assert right(store[0, 2]) and source.calls == [0, 2]
    assert right(store[0, 3]) and source.calls == [0, 2, 3]
    gate.opened.set()
    assert first.result(PATIENCE) == {(0, 0): "loaded"}
    assert second.result(PATIENCE) == {(0, 1): "loaded", (0, 2): "late", (0, 3): "late"}
    assert source.calls == [0, 2, 3, 1]


def test_a_closed_store_reads_nothing_more_from_its_source(source):
    threads = threading.active_count()
    store, gate = fastcache.open(source, 4 * SLOT, engine="auto"), Gate()
    source.does[0] = gate
    handles = [store.prefetch(0, [0]), store.prefetch(0, [1]), store.prefetch(0, [2, 3])]
    assert gate.reached.wait(PATIENCE)
    store.close()
    gate.opened.set()
    until(lambda: threading.active_count() == threads, "the end of the worker")
    assert source.calls == [0]
    assert all(handle.wait(PATIENCE) for handle in handles)
    assert "loaded" not in [*handles[1].result().values(), *handles[2].result().values()]


@pytest.mark.alone("its clock allows for little")
def test_whoever_joined_a_read_that_was_interrupted_goes_on_promptly(store, source):
    gate, struck = Gate(), KeyboardInterrupt()

    def interrupted():
        gate()
        source.does.clear()
        raise struck

    source.does[1] = interrupted
    owner = Caller(store.acquire_many, 0, [1, 2])
    assert gate.reached.wait(PATIENCE)
    joiners = [Caller(store.acquire, 0, 1), Caller(store.acquire, 0, 2), Caller(store.acquire_many, 0, [1, 2])]
    until(lambda: store.stats().requests == 6)
    start = time.monotonic()
    gate.opened.set()
    assert owner.error() is struck
    assert isinstance(joiners[0].error(), fastcache.ReadFailed) and joiners[0].error().__cause__ is struck
    assert right(joiners[1].result())
    failed = joiners[2].error().failed
    assert list(failed) == [(0, 1)] and failed[0, 1].__cause__ is struck
    in_time(start, 1)
    assert right(store[0, 1]) and store.is_resident(0, 2)
    del owner, joiners, failed


def test_everyone_who_joined_a_read_that_failed_sees_why(store, source):
    gate, fault = Gate(), OSError(errno.EREMOTEIO, "the other side is gone")

    def fails():
        gate()
        source.does.clear()
        raise fault

    source.does[5] = fails
    callers = [Caller(store.acquire, 0, 5)]
    assert gate.reached.wait(PATIENCE)
    callers += [Caller(store.acquire, 0, 5) for _ in range(3)] + [Caller(store.acquire_many, 0, [5])]
    until(lambda: store.stats().joins == 4)
    gate.opened.set()
    errors = [*[caller.error() for caller in callers[:-1]], callers[-1].error().failed[0, 5]]
    assert all(isinstance(error, fastcache.ReadFailed) and error.__cause__ is fault for error in errors)
    assert right(store[0, 5]) and source.calls == [5, 5]
    del callers, errors


@pytest.mark.parametrize("failing", [False, True])
def test_a_store_that_was_never_closed_is_freed_with_its_worker(source, failing):
    def fails():
        raise ValueError("gone")

    if failing:
        source.does[1] = fails
    threads = threading.active_count()
    store = fastcache.open(source, 4 * SLOT, engine="auto")
    told = threading.Event()
    handle = store.prefetch(0, [0, 1])
    handle.add_done_callback(lambda _: told.set())
    assert told.wait(PATIENCE)
    gone = weakref.ref(store)
    del store, handle
    until(lambda: gc.collect() >= 0 and gone() is None, "the end of the store")
    until(lambda: threading.active_count() == threads, "the end of its worker")
