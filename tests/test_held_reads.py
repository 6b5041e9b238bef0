"""Reads that the device does not give back: fanotify holds them in the kernel until another process lets go."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from gate import Gate
from rig import Caller, Experts, assert_identities, expert_bytes, in_time, layers_of, until

import fastcache

pytestmark = pytest.mark.root

HOLDER = """
import ctypes, os, select, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
fd = libc.fanotify_init(4, os.O_RDONLY)                                     # FAN_CLASS_CONTENT
if fd < 0 or libc.fanotify_mark(fd, 1, 0x20000, -100, sys.argv[1].encode()):   # FAN_ACCESS_PERM
    sys.exit(os.strerror(ctypes.get_errno()))
print("watching", flush=True)
held, holding = [], False
while True:
    for ready in select.select([fd, 0], [], [])[0]:
        if ready == 0:
            word = os.read(0, 1)
            if not word:
                sys.exit()
            holding = word == b"h"
            print("holding" if holding else "passing", flush=True)
        else:
            events = os.read(fd, 4096)
            while events:
                length, _, _, _, _, file, _ = struct.unpack_from("IBBHqii", events)
                held.append(file)
                events = events[length:]
            if holding:
                print("held", flush=True)
        while held and not holding:
            os.write(fd, struct.pack("iI", held[-1], 1))
            os.close(held.pop())
"""


@pytest.fixture
def experts(disk):
    return Experts(disk, layers_of(1, 8, 9_000))


@pytest.fixture
def holder(experts):
    holder = Gate().start(["-c", HOLDER, str(experts.path)], b"watching\n", "fanotify")
    yield holder
    holder.end()


@pytest.fixture
def store(experts, holder, engine):
    """A store that has read expert 0, and whose every further read is held."""
    with fastcache.open(experts.source, "all", engine=engine) as opened:
        opened.acquire(0, 0).release()
        holder.hold()
        probe = opened.prefetch(0, [7])
        if probe.wait(timeout=0.5):
            pytest.skip("this kernel does not hold such reads")
        holder.wait_for_one()
        yield opened
        holder.let_go()
    assert_identities(opened)


@pytest.mark.alone("its clock allows for little")
def test_ctrl_c_leaves_a_held_read_within_a_second(store, holder, experts):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        store.acquire(0, 7)
    in_time(start, 1.1)
    assert experts.right((0, 0), store[0, 0])  # hits go on
    holder.let_go()
    assert experts.right((0, 7), store[0, 7])


def test_a_timeout_leaves_a_held_read(store, holder, experts):
    with pytest.raises(fastcache.ReadTimeout):
        store.acquire(0, 7, timeout=0.05)
    holder.let_go()
    assert experts.right((0, 7), store[0, 7])


def test_close_gives_up_in_time_keeps_the_memory_and_ends_later(store, holder, experts, caplog):
    array = store[0, 0]["data"]
    waiting = Caller(store.acquire, 0, 7)
    until(lambda: store.stats().joins == 1)
    start = time.monotonic()
    store.close(timeout=0.1)
    assert time.monotonic() - start < 2 and "has not returned" in caplog.text
    assert bytes(array) == expert_bytes(0, 0, 9_000)
    holder.let_go()
    store.close()
    assert experts.right((0, 7), waiting.result())


@pytest.mark.alone("its clock allows for little")
@pytest.mark.parametrize("seconds", [0.2, pytest.param(5.5, marks=pytest.mark.slow)])
def test_a_store_that_is_dropped_with_a_held_read_waits_a_while_and_then_leaves_it_its_memory(
    experts, holder, engine, seconds
):
    tasks = len(os.listdir("/proc/self/task"))
    store = fastcache.open(experts.source, "all", engine=engine)
    holder.hold()
    if store.prefetch(0, [3]).wait(timeout=0.5):
        pytest.skip("this kernel does not hold such reads")
    holder.wait_for_one()
    timer = threading.Timer(seconds, holder.let_go)
    timer.start()
    start = time.monotonic()
    del store
    gc.collect()
    in_time(start, 5.4)
    timer.join()
    until(lambda: len(os.listdir("/proc/self/task")) <= tasks + (seconds > 5), "the end of the engine's thread")


@pytest.mark.alone("its clock allows for little")
@pytest.mark.slow
def test_an_exit_does_not_wait_for_ever_and_is_no_crash(experts, holder, engine):
    script = f"""
        import sys, fastcache
        source = fastcache.FileRangeSource({str(experts.path)!r}, {{(0, e): (7, 9000) for e in range(8)}})
        store = fastcache.open(source, "all", engine={engine!r})
        print("open", flush=True)
        sys.stdin.readline()
        handle = store.prefetch(0, range(8))
        print("asked", flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert child.stdout.readline() == b"open\n"
        holder.hold()
        start = time.monotonic()
        child.stdin.write(b"\n")
        child.stdin.flush()
        _, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 0 and b"Traceback" not in err, err
    in_time(start, 9)
    holder.let_go()
