"""Forks, exits and signals: nothing hangs, nothing is said, and nobody's memory is touched."""

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from rig import Caller, Experts, assert_identities, expert_bytes, in_time, layers_of, run_dry, scripted, until

import fastcache

NBYTES = 9_000


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 8, NBYTES))


def forked(work):
    """Run `work` in a child made by fork; return its exit code (0: it returned True)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        threading.Event().wait(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


# ---- fork


def test_a_child_gets_forked_store_from_every_call_and_frees_nothing(experts, engine):
    with fastcache.open(experts.source, "all", engine=engine) as store:
        lease, array, handle = store[0, 1], store[0, 2]["data"], store.prefetch(0, [3])
        ready = store.as_ready(0, [1, 4])
        calls = [
            lambda: store[0, 1],
            lambda: store.acquire(0, 5),
            lambda: store.acquire_many(0, [1, 5]),
            lambda: store.as_ready(0, [1]),
            lambda: next(ready),
            lambda: store.prefetch(0, [6]),
            lambda: store.pin(0, 1),
            lambda: store.unpin(0, 1),
            lambda: store.is_resident(0, 1),
            lambda: store.stats(),
            lambda: store.describe(),
            lambda: store.reset_stats(),
            lambda: handle.done(),
            lambda: handle.wait(),
            lambda: handle.result(),
            lambda: handle.cancel(),
            lambda: lease["data"],
            lambda: lease.copy(),
            lambda: memoryview(lease),
        ]

        def child():
            nonlocal lease, array, handle, ready, calls
            for n, call in enumerate(calls):
                with pytest.raises(fastcache.ForkedStore, match="reopen"):
                    call()
                    print(f"call {n} went through", file=sys.stderr)
            del lease, array, handle, ready, call
            calls = None
            gc.collect()
            store.close()
            with store.reopen() as mine:
                return experts.right((1, 4), mine[1, 4]) and mine.stats().misses == 1

        assert forked(child) == 0
        assert experts.right((0, 1), lease) and array.tobytes() == expert_bytes(0, 2, NBYTES)
        for layer in range(2):
            for expert in range(8):
                assert experts.right((layer, expert), store[layer, expert])
        assert_identities(store, quiet=False)


def test_a_fork_while_threads_hold_the_stores_lock_and_reads_fly_harms_neither(experts, engine):
    stop = threading.Event()
    with fastcache.open(experts.source, 3 * 12_288, engine=engine) as store:

        def work(seed):
            rng = random.Random(seed)
            while not stop.is_set():
                key = rng.randrange(2), rng.randrange(8)
                assert experts.right(key, store[key])
                store.prefetch(0, rng.randrange(8))

        def child():
            gc.collect()
            try:
                store[0, 0]
            except fastcache.ForkedStore:
                store.close()
                return True

        workers = [Caller(work, seed) for seed in range(2)]
        try:
            for _ in range(30):
                assert forked(child) == 0
                subprocess.run(["true"], check=True)
        finally:
            stop.set()
        for worker in workers:
            worker.result()
        assert store._check() == 0


def test_a_child_may_close_while_a_thread_of_its_parent_was_closing(experts):
    with scripted(experts, slots=4) as (store, engine):
        store.prefetch(0, [0])
        [op] = engine.take()
        closer = Caller(store.close)
        until(lambda: closing(store), "closing")
        assert forked(lambda: store.close() is None) == 0
        engine.fill(op.id)
        closer.result()


def closing(store):
    try:
        store.is_resident(0, 0)
    except fastcache.StoreClosed:
        return True
    return False


# ---- exit

EXITS = {
    "end of file": "",
    "sys.exit": "sys.exit(0)",
    "view in a global": "view = store[0, 0]; array = view['data']",
    "closed by atexit before": "import atexit; atexit.register(store.close)",
    "a thread in a wait": """
        def work():
            try:
                for e in range(16): store[0, e]
            except fastcache.StoreClosed:
                pass
        threading.Thread(target=work, daemon=True).start()
    """,
    "a thread that exits": "t = threading.Thread(target=lambda: store.prefetch(0, range(16))); t.start(); t.join()",
    "in a cycle": "store.me = [store, handle, store.as_ready(0, range(4))]",
    "collected while reading": "import gc; store.me = [store, handle]; del store, handle; gc.collect()",
    "half an iterator": "ready = store.as_ready(0, range(16)); next(ready)",
    "two stores": "other = fastcache.open(source, '16MiB', engine=engine); other.prefetch(0, range(16))",
}


@pytest.mark.parametrize("how", EXITS)
def test_an_exit_with_reads_in_flight_is_prompt_and_silent(large, engine, how):
    script = f"""
import sys, threading, fastcache
engine = {engine!r}
source = fastcache.FileRangeSource({str(large)!r}, {{(0, e): (e << 22, 1 << 22) for e in range(16)}})
store = fastcache.open(source, "32MiB", engine=engine)
handle = store.prefetch(0, range(16))
print("ready", flush=True)
{textwrap.dedent(EXITS[how])}
"""
    fd = os.open(large, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    child = subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        start = time.monotonic()
        out, err = child.communicate(timeout=20)
    finally:
        child.kill()
    assert (child.returncode, out, err) == (0, b"", b"")
    assert time.monotonic() - start < 2


# ---- signals


def test_a_storm_of_signals_disturbs_thousands_of_gets_in_nothing(experts, engine):
    count, rng = 0, random.Random(5)

    def strike(*_):
        nonlocal count
        count += 1

    was = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with fastcache.open(experts.source, 4 * 12_288, engine=engine) as store:
            for _ in range(3_000):
                key = rng.randrange(2), rng.randrange(8)
                assert experts.right(key, store[key])
            assert store.stats().requests == 3_000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)
    assert count > 10


@pytest.mark.alone("its clock allows for little")
@pytest.mark.parametrize("wait", ["get", "many", "ready", "pin", "handle"])
def test_a_signal_handlers_exception_leaves_every_kind_of_wait(experts, wait):
    class Struck(Exception):
        pass

    def strike(*_):
        raise Struck

    with scripted(experts, slots=4) as (store, engine):
        handle = store.prefetch(0, [7])
        calls = {
            "get": lambda: store[0, 1],
            "many": lambda: store.acquire_many(0, [1, 2]),
            "ready": lambda: next(store.as_ready(0, [1, 2])),
            "pin": lambda: store.pin(0, [1, 2]),
            "handle": lambda: handle.wait(),
        }
        was = signal.signal(signal.SIGALRM, strike)
        try:
            start = time.monotonic()
            with pytest.raises(Struck):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                calls[wait]()
            in_time(start, 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, was)
        run_dry(engine)
        gc.collect()
        assert engine.leases() == [0] * 4 and handle.done()
