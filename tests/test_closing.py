"""Closing: what it ends, what it keeps, and that nothing is left: no descriptor, no thread, no mapping."""

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref

import pytest
from rig import Caller, Experts, expert_bytes, layers_of, run_dry, scripted, until

import fastcache

NBYTES = 9_000


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 8, NBYTES))


def test_close_from_another_thread_ends_waits_and_keeps_views(experts):
    with scripted(experts, slots=4, queue_depth=1, io_threads=1) as (store, engine):
        store.prefetch(0, [0])
        run_dry(engine)
        array = store[0, 0]["data"]
        store.prefetch(1, [5, 6])
        engine.take()  # takes the engine's two reads, so that everything else stays queued
        caller = Caller(store.acquire, 0, 1)
        until(lambda: store.stats().misses == 1)
        closer = Caller(store.close)
        assert isinstance(caller.error(), fastcache.StoreClosed)
        run_dry(engine)
        closer.result()
        assert array.tobytes() == expert_bytes(0, 0, NBYTES)


def test_closing_twice_and_using_a_closed_store(experts, engine):
    store = fastcache.open(experts.source, "all", engine=engine)
    store.acquire(0, 1).release()
    handle = store.prefetch(0, [2])
    handle.wait()
    store.close()
    store.close()
    for call in (
        lambda: store[0, 1],
        lambda: store.acquire_many(0, [1]),
        lambda: store.as_ready(0, [1]),
        lambda: store.prefetch(0, [1]),
        lambda: store.pin(0, 1),
        lambda: store.unpin(0, 1),
        lambda: store.is_resident(0, 1),
        lambda: store.__enter__()[0, 1],
    ):
        with pytest.raises(fastcache.StoreClosed, match="closed"):
            call()
    assert handle.done() and handle.result() == {(0, 2): "loaded"}
    assert store.stats().misses == 1 and len(store) == 16 and (0, 1) in store
    assert store.describe()["arena_bytes"] == 16 * 12_288
    with store.reopen() as again:
        assert experts.right((0, 1), again[0, 1])


def test_leaving_the_block_by_an_exception_shows_that_exception(experts, engine):
    with pytest.raises(ZeroDivisionError), fastcache.open(experts.source, "all", engine=engine) as store:
        array, view = store[0, 1]["data"], memoryview(store[0, 2])
        _ = 1 / 0
    assert array.tobytes() == expert_bytes(0, 1, NBYTES) and bytes(view) == expert_bytes(0, 2, NBYTES)


def test_close_may_be_called_from_within_close(experts):
    """By a log handler here; a destructor or a signal handler does the same."""
    with scripted(experts, slots=4) as (store, engine):

        class Closes(logging.Handler):
            def emit(self, record):
                store.close(timeout=0)

        handler = Closes()
        store.prefetch(0, [0])
        engine.take()
        log = logging.getLogger("fastcache")
        log.addFilter(once := Once())
        log.addHandler(handler)
        try:
            Caller(store.close, timeout=0.01).result()
        finally:
            log.removeHandler(handler)
            log.removeFilter(once)


class Once(logging.Filter):
    passed = False

    def filter(self, record):
        passed, self.passed = self.passed, True
        return not passed


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon"])
def test_a_close_timeout_that_is_none_is_refused(experts, engine, timeout):
    with fastcache.open(experts.source, "all", engine=engine) as store, pytest.raises(ValueError):
        store.close(timeout=timeout)


def test_describe_and_stats_may_race_with_close(experts, engine):
    for _ in range(40):
        store = fastcache.open(experts.source, "all", engine=engine)
        store.prefetch(0, range(8))
        stop = threading.Event()

        def look(store=store, stop=stop):
            while not stop.is_set():
                assert store.describe()["arena_bytes"] == 16 * 12_288
                assert store.stats().requests == 0

        looker = Caller(look)
        store.close()
        stop.set()
        looker.result()


def test_many_stores_leave_no_descriptor_thread_or_mapping(experts, engine):
    def left():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(maps.readlines())

    store = view = None
    for n in range(220):
        if n == 20:
            del store, view
            before = left()
        store = fastcache.open(experts.source, 4 * 12_288, engine=engine)
        if n % 3:
            view = store[n % 2, n % 8]["data"]
            store.prefetch(0, range(8))
        if n % 2:
            store.close()  # the others are closed by their end
    del store, view
    fds, threads, maps = left()
    assert (fds, threads) == before[:2]
    assert maps <= before[2] + 20  # malloc's own; a store that left one would show 200 times


def test_a_store_in_a_garbage_cycle_goes_with_its_reads_in_flight(large, engine):
    ranges = {(0, e): (e << 22, 1 << 22) for e in range(16)}
    tasks = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        store = fastcache.open(fastcache.FileRangeSource(large, ranges), "64MiB", engine=engine)
        store.cycle = [store, store.prefetch(0, range(16)), store.as_ready(0, range(4))]
        gone = weakref.ref(store)
        del store
        gc.collect()
        assert gone() is None
    assert len(os.listdir("/proc/self/task")) == tasks


def test_a_python_sources_worker_ends_with_its_store():
    class Slow:
        def keys(self):
            return [(0, 0), (0, 1)]

        def expert_nbytes(self, key):
            return 100

        def read_expert(self, key):
            return bytes([key[1]]) * 100

    before = threading.active_count()
    for close in (True, False):
        store = fastcache.open(Slow(), "all")
        assert store.prefetch(0, [0, 1]).result(timeout=20) == {(0, 0): "loaded", (0, 1): "loaded"}
        if close:
            store.close()
        del store
        gc.collect()
        until(lambda: threading.active_count() == before, "the end of the worker")


def test_an_iterator_of_a_closed_store_gives_what_landed_and_says_what_did_not(experts):
    with scripted(experts, slots=8, queue_depth=1, io_threads=1) as (store, engine):
        ready = store.as_ready(0, range(5))
        one, other = engine.take()
        engine.fill(one.id)
        closer = Caller(store.close)
        until(lambda: store.stats().demand_cancelled == 3, "dropping the queue")
        engine.fill(other.id)
        closer.result()
        got = [next(ready), next(ready)]
        assert [expert for expert, _ in got] == [0, 1]
        assert all(experts.right((0, expert), lease) for expert, lease in got)
        with pytest.raises(fastcache.BatchFailed) as caught:
            next(ready)
        assert {type(error) for error in caught.value.failed.values()} == {fastcache.StoreClosed}
        assert sorted(key.expert for key in caught.value.failed) == [2, 3, 4]


def test_an_iterator_that_waits_for_room_in_a_closed_store_says_so(experts):
    with scripted(experts, slots=1) as (store, engine):
        ready = store.as_ready(0, range(3))
        [op] = engine.take()
        engine.fill(op.id)
        kept = next(ready)
        store.close()
        with pytest.raises((fastcache.StoreClosed, fastcache.BatchFailed)):
            next(ready)
        assert experts.right((0, 0), kept[1])


HALFWAY = """
import gc, os, resource, sys, fastcache
source = fastcache.FileRangeSource(sys.argv[1], {(0, e): (7, 9000) for e in range(8)})
def left():
    gc.collect()
    return sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
before, outcomes = left(), []
for spare in range(12, 0, -1):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before[0]) - 1 + spare,) * 2)  # one of them was listdir's
    try:
        with fastcache.open(source, "all", engine=sys.argv[2]) as store:
            outcomes.append(bytes(store[0, 1]) == bytes(store[0, 2]))
        del store
    except OSError:
        outcomes.append(None)
    assert left() == before, (spare, left(), before)
assert outcomes[0] is True and outcomes[-1] is None, outcomes
"""


def test_an_open_that_fails_halfway_leaves_nothing(experts, engine):
    """Without descriptors: first for what the engine needs, then for the file."""
    done = subprocess.run([sys.executable, "-c", HALFWAY, str(experts.path), engine], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
