"""Sources that hand over bytes in Python: read by who needs them, shared by the others, cached like files' bytes."""

import gc
import threading

import pytest
from rig import Caller, assert_identities, expert_bytes, until

import fastcache

NBYTES = 5_000
PATIENCE = 20


class Source:
    """Experts of NBYTES bytes. `read_expert` waits for the gate of its key, if it has one, then raises or returns."""

    top_k = 2

    def __init__(self, experts=8):
        self.experts, self.calls = experts, []
        self.gates, self.faults = {}, {}
        self.entered = threading.Semaphore(0)

    def keys(self):
        return [(layer, expert) for layer in range(2) for expert in range(self.experts)]

    def expert_nbytes(self, key):
        return NBYTES

    def read_expert(self, key):
        self.calls.append(tuple(key))
        self.entered.release()
        if key in self.gates:
            assert self.gates[key].wait(PATIENCE)
        if key in self.faults:
            fault = self.faults.pop(key)
            if isinstance(fault, BaseException):
                raise fault
            return fault
        return expert_bytes(*key, NBYTES)


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def store(source):
    with fastcache.open(source, 3 * 8192) as opened:
        yield opened
        gc.collect()
        assert opened._check() == 0 and opened.describe()["leased_slots"] == 0
    assert_identities(opened)


def right(lease):
    return bytes(lease) == expert_bytes(*lease.key, NBYTES)


def test_every_call_serves_right_bytes_and_reads_once_what_is_resident(store, source):
    assert store.describe()["engine"]["used"] == "python"
    assert right(store[0, 1]) and right(store[0, 1])
    assert all(map(right, store.acquire_many(1, [3, 1, 3])))
    assert sorted(expert for expert, lease in store.as_ready(0, range(8)) if right(lease)) == list(range(8))
    assert source.calls[:3] == [(0, 1), (1, 3), (1, 1)]
    store.pin(0, 6)
    assert store.is_resident(0, 6)
    store.unpin(0, 6)


def test_threads_that_want_one_expert_read_it_once(store, source):
    gate = source.gates[0, 5] = threading.Event()
    callers = [Caller(store.acquire, 0, 5) for _ in range(6)]
    until(lambda: store.stats().joins == 5)
    gate.set()
    assert all(right(caller.result()) for caller in callers)
    assert source.calls == [(0, 5)] and store.stats().bytes_read == NBYTES
    del callers


@pytest.mark.parametrize(
    "fault", [ValueError("gone"), b"short", b"x" * (NBYTES + 1), "text", None, memoryview(bytes(2 * NBYTES))[::2]]
)
def test_what_the_source_gets_wrong_is_a_failed_read_with_its_cause(store, source, fault):
    source.faults[0, 5] = fault if fault is not None else 5
    with pytest.raises(fastcache.ReadFailed, match="layer 0 expert 5") as caught:
        store[0, 5]
    cause = caught.value.__cause__
    assert cause is fault if isinstance(fault, Exception) else isinstance(cause, (TypeError, ValueError, BufferError))
    assert not store.is_resident(0, 5)
    assert right(store[0, 5])
    source.faults[1, 5] = ValueError("gone")
    with pytest.raises(fastcache.BatchFailed) as caught:
        store.acquire_many(1, [4, 5])
    assert list(caught.value.failed) == [(1, 5)] and store.is_resident(1, 4)
    del caught, cause


def test_an_interrupted_source_leaves_those_who_joined_something_to_go_on_with(store, source):
    """Ctrl-C in one thread's read_expert is no closed store for another thread."""
    source.gates[0, 1] = gate = threading.Event()
    source.faults[0, 1] = KeyboardInterrupt()
    first = Caller(store.acquire_many, 0, [1, 2])
    assert source.entered.acquire(timeout=PATIENCE)
    others = [Caller(store.acquire, 0, expert) for expert in (1, 2)]
    until(lambda: store.stats().joins == 2)
    gate.set()
    assert isinstance(first.error(), KeyboardInterrupt)
    del first
    assert isinstance(others[0].error(), fastcache.ReadFailed)
    assert right(others[1].result())  # nobody had begun to read that one: the one who joined does
    assert right(store[0, 1])
    del others


def test_a_source_may_ask_the_store_for_another_expert(source):
    with fastcache.open(source, 3 * 8192) as store:
        plain = source.read_expert
        source.read_expert = lambda key: bytes(store[0, 0]) if key == (0, 7) else plain(key)
        assert bytes(store[0, 7]) == expert_bytes(0, 0, NBYTES)


def test_a_prefetch_reads_in_the_background_and_calls_back(store, source):
    gate = source.gates[0, 1] = threading.Event()
    handle = store.prefetch(0, [1, 2])
    assert source.entered.acquire(timeout=PATIENCE) and not handle.done()
    told = []
    handle.add_done_callback(told.append)
    assert not handle.wait(timeout=0.01)
    gate.set()
    assert handle.result(timeout=PATIENCE) == {(0, 1): "loaded", (0, 2): "loaded"}
    until(lambda: told == [handle], "the callback")
    handle.add_done_callback(told.append)
    assert told == [handle, handle]
    assert right(store[0, 1]) and store.stats().first_consumptions == 1


def test_a_prefetch_that_fails_says_so(store, source):
    source.faults[0, 1] = ValueError("gone")
    assert store.prefetch(0, [1, 2]).result(timeout=PATIENCE) == {(0, 1): "failed", (0, 2): "loaded"}
    assert right(store[0, 1])


def test_a_demand_joins_the_prefetch_that_is_reading(store, source):
    gate = source.gates[0, 1] = threading.Event()
    store.prefetch(0, [1])
    assert source.entered.acquire(timeout=PATIENCE)
    caller = Caller(store.acquire, 0, 1)
    until(lambda: store.stats().late_joins == 1)
    gate.set()
    assert right(caller.result()) and source.calls == [(0, 1)]
    del caller


def test_closing_while_the_source_is_read_harms_nobody(source):
    store = fastcache.open(source, 3 * 8192)
    gate = source.gates[0, 1] = threading.Event()
    handle = store.prefetch(0, [1, 2])
    assert source.entered.acquire(timeout=PATIENCE)
    caller = Caller(store.acquire, 0, 1)
    until(lambda: store.stats().late_joins == 1)
    store.close()
    gate.set()
    lease = caller.result()  # its read was under way, and landed
    assert right(lease)
    assert handle.wait(timeout=PATIENCE)
    until(lambda: store.stats().prefetch_in_flight == 0)
    assert_identities(store)


def test_nothing_is_left_in_flight_when_a_prefetchs_store_goes_before_its_worker_comes(source):
    gate = source.gates[0, 0] = threading.Event()
    store = fastcache.open(source, 3 * 8192)
    store.prefetch(0, [0])
    assert source.entered.acquire(timeout=PATIENCE)
    handle = store.prefetch(0, [1])
    store.close()
    gate.set()
    assert handle.wait(timeout=PATIENCE)
    until(lambda: store.stats().prefetch_in_flight == 0)
    assert_identities(store)
