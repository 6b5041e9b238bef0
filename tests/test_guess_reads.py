"""Reads of guesses: how many at once, with which priority, and how they are stopped, in the queue and in the kernel."""

import errno
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fuse import SlowFile
from rig import Caller, Experts, assert_identities, counted, land, layers_of, run_dry, scripted, until

import fastcache
from fastcache import devices


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 12, 40_000))


def io(store):
    return store.describe()["speculation"]["io"]


# ---- how many


@pytest.mark.parametrize(
    ("limits", "reads"),
    [
        ({}, 1),
        ({"guess_bytes": 4 * 4096}, 4),
        ({"guess_bytes": 100 * 4096}, 8),  # a quarter of 32
        ({"guess_bytes": 100 * 4096, "guess_share": 0.1}, 3),
        ({"guess_share": 1.0}, 1),
        ({"guess_bytes": "512"}, 1),
    ],
)
def test_guess_reads_are_bounded_in_bytes_and_by_their_share_of_the_depth(experts, limits, reads):
    with scripted(experts, slots=12, chunk=4096, **limits) as (store, engine):
        store.prefetch(0, range(6))
        assert len(engine.take()) == reads
        assert io(store)["guess_reads"] == (
            3 if limits.get("guess_share") == 0.1 else 32 if limits.get("guess_share") else 8
        )
        if limits.get("guess_bytes") == "512":
            assert sum(engine.now(op).nbytes for op in engine.in_hand) <= 4096  # one unit of alignment, at least
        run_dry(engine)
        counted(store, prefetch_loads=6)


@pytest.mark.parametrize(
    "bad", [{"guess_bytes": 0}, {"guess_bytes": "2GiB"}, {"guess_share": 0}, {"guess_share": 1.5}, {"guess_share": "x"}]
)
def test_limits_that_make_no_sense_are_refused(experts, bad, monkeypatch):
    [(name, value)] = bad.items()
    with pytest.raises(ValueError, match=name):
        fastcache.open(experts.source, "all", **bad)
    monkeypatch.setenv(f"FASTCACHE_{name.upper()}", str(value))
    with pytest.raises(ValueError, match=f"FASTCACHE_{name.upper()}"):
        fastcache.open(experts.source, "all")


def test_no_guess_is_read_while_a_demand_is(experts):
    with scripted(experts, slots=12, chunk=4096, guess_bytes=8 * 4096) as (store, engine):
        caller = Caller(store.acquire, 1, 0)
        first = engine.take(1, wait=20)
        store.prefetch(0, range(4))
        rest = engine.take()
        assert all(op.key == (1, 0) for op in [*first, *rest])
        land(engine, *[op.id for op in [*first, *rest]])
        caller.result()
        assert {op.key[0] for op in engine.take()} == {0}
        run_dry(engine)


# ---- priorities


def sys_tree(root, scheduler, *, partition=False, slaves=()):
    disk = root / "devices" / f"disk-{len(list((root / 'devices').glob('*')))}"
    (disk / "queue").mkdir(parents=True)
    if scheduler is not None:
        (disk / "queue" / "scheduler").write_text(scheduler)
    where = disk
    if partition:
        where = disk / "part1"
        where.mkdir()
    for slave in slaves:
        (disk / "slaves").mkdir(exist_ok=True)
        (disk / "slaves" / slave.name).symlink_to(slave)
    return where


@pytest.mark.parametrize(
    ("text", "partition", "found", "heeded"),
    [
        ("none [mq-deadline] kyber bfq\n", False, "mq-deadline", True),
        ("none mq-deadline [bfq]\n", True, "bfq", True),
        ("[none] mq-deadline\n", True, "none", False),
        ("none\n", False, "none", False),
        ("[kyber]", False, "kyber", False),
        (None, False, "unknown", False),
    ],
)
def test_the_scheduler_is_that_of_the_files_disk(tmp_path, text, partition, found, heeded):
    place = sys_tree(tmp_path, text, partition=partition)
    number = os.stat(tmp_path).st_dev
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(place)
    told = devices.schedulers([str(tmp_path), None], sys=tmp_path / "block")
    assert list(told.values()) == [found] and devices.heeded(told) == heeded


def test_a_stack_of_devices_has_the_schedulers_of_the_lowest(tmp_path):
    lower = [sys_tree(tmp_path, "[mq-deadline]"), sys_tree(tmp_path, "[none]")]
    stack = sys_tree(tmp_path, "none", slaves=lower)
    number = os.stat(tmp_path).st_dev
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(stack)
    told = devices.schedulers([str(tmp_path)], sys=tmp_path / "block")
    assert sorted(told.values()) == ["mq-deadline", "none"] and not devices.heeded(told)


def test_a_store_says_which_priority_its_reads_have_and_why(experts, engine):
    with fastcache.open(experts.source, "all", engine=engine) as store:
        told = io(store)
        heeded = devices.heeded(devices.schedulers([str(experts.path)]))
        assert (told["priority"] == "none") != heeded and "schedule" in told["priority_reason"]
        store.prefetch(0, range(6)).wait()
        for expert in range(12):
            assert experts.right((0, expert), store[0, expert])
        assert io(store)["priority"] == told["priority"]  # no read was refused for it
    with fastcache.open(fastcache.MemorySource({(0, 0): b"1234"}), "all") as store:
        assert io(store)["priority"] == "none"


@pytest.mark.root
def test_a_process_that_gives_up_its_rights_reads_on_without_the_priority(experts, engine):
    script = f"""
import os, fastcache
from rig import expert_bytes
source = fastcache.FileRangeSource({str(experts.path)!r}, {dict(experts.ranges)!r})
with fastcache.open(source, "all", engine={engine!r}) as store:
    before = store.describe()["speculation"]["io"]["priority"]
    os.setresuid(65534, 65534, 65534)
    store.prefetch(0, range(4)).wait()
    for expert in range(12):
        assert bytes(store[0, expert]) == expert_bytes(0, expert, 40_000)
    after = store.describe()["speculation"]["io"]["priority"]
    print(before, "|", after)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}"},
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.strip().split(" | ")
    if engine == "uring" and before.startswith("real-time"):
        assert after == "none"


# ---- stopping


def test_a_read_that_the_kernel_stopped_empties_its_slot(experts):
    with scripted(experts, slots=4, chunk=4096) as (store, engine):
        handle = store.prefetch(0, [3])
        [op] = engine.take()
        assert handle.cancel() and engine.wants_stopped() == [op.id]
        assert sum(engine.leases()) == 1 and not handle.done()  # until its completion, the memory is the kernel's
        assert engine.settle(op.id, -errno.ECANCELED)
        assert handle.result() == {(0, 3): "cancelled"} and sum(engine.leases()) == 0
        assert io(store)["reads_stopped"] == 1
        counted(store, prefetch_cancelled=1, prefetch_failures=0)


@pytest.mark.parametrize("res", [-errno.ECANCELED, -errno.EINTR, 4096, "all"])
def test_a_read_that_is_wanted_again_is_read_again_where_it_was_stopped(experts, res):
    with scripted(experts, slots=4) as (store, engine):
        handle = store.prefetch(0, [3])
        [op] = engine.take()
        handle.cancel()
        caller = Caller(store.acquire, 0, 3)
        until(lambda: store.stats().joins == 1)
        if res == "all":
            engine.fill(op.id)
        else:
            assert not (engine.settle(op.id, res) if res < 0 else engine.fill(op.id, res))
        run_dry(engine)
        assert experts.right((0, 3), caller.result())
        counted(store, late_joins_ok=1, prefetch_cancelled=0, prefetch_loads=1)


@pytest.mark.parametrize("res", [-errno.ECANCELED, -errno.EINTR])
@pytest.mark.parametrize("again", [False, True])
def test_an_expert_of_which_one_read_was_stopped_and_others_were_not_is_read_anew(experts, res, again):
    with scripted(experts, slots=4, chunk=4096, guess_bytes=3 * 4096) as (store, engine):
        handle = store.prefetch(0, [3])
        ops = engine.take()
        assert len(ops) == 3 and handle.cancel()
        assert engine.settle(ops[0].id, res)  # its bytes are missing, and the cursor is past them
        if again:  # a guess wants it, and changes its mind too
            store.prefetch(0, [3])
            handle.cancel()
        caller = Caller(store.acquire, 0, 3)
        until(lambda: store.stats().joins == 1)
        assert not engine.take()  # never two reads into one place
        run_dry(engine)
        assert experts.right((0, 3), caller.result())
        counted(store, late_joins_ok=1, prefetch_cancelled=0, prefetch_loads=1)


def test_close_does_not_take_up_again_what_was_stopped(experts):
    with scripted(experts, slots=4, chunk=4096, guess_bytes=3 * 4096) as (store, engine):
        handle = store.prefetch(0, [3])
        ops = engine.take()
        handle.cancel()
        engine.settle(ops[0].id, -errno.ECANCELED)
        caller = Caller(store.acquire, 0, 3)
        until(lambda: store.stats().joins == 1)
        closing = Caller(store.close)
        until(lambda: not store._is_open())
        for op in ops[1:]:
            engine.fill(op.id)
        closing.result()
        assert isinstance(caller.error(), fastcache.StoreClosed)
        counted(store, prefetch_cancelled=1, join_failures=1)


@pytest.mark.parametrize("res", [-errno.EINTR, -errno.EAGAIN, 4096])
def test_a_stopped_read_that_made_some_way_is_not_taken_up_again(experts, res):
    with scripted(experts, slots=4) as (store, engine):
        handle = store.prefetch(0, [3])
        [op] = engine.take()
        handle.cancel()
        assert engine.settle(op.id, res) if res < 0 else engine.fill(op.id, res)
        assert handle.result() == {(0, 3): "cancelled"} and not engine.take()


def test_close_stops_the_guesses_that_are_being_read(experts):
    with scripted(experts, slots=4) as (store, engine):
        handle = store.prefetch(0, [3, 4])
        [op] = engine.take()
        closing = Caller(store.close)
        until(lambda: engine.wants_stopped() == [op.id], "the wish to stop the read")
        engine.settle(op.id, -errno.ECANCELED)
        closing.result()
        assert set(handle.result().values()) == {"failed"}
        counted(store, prefetch_cancelled=2)


def test_storms_of_guesses_joins_cancels_and_faults_add_up(experts):
    for seed in range(30):
        rng = random.Random(seed)
        with scripted(experts, slots=3, chunk=4096, guess_bytes=8 * 4096, guess_share=0.5) as (store, engine):
            handles, callers = [], []
            for _ in range(60):
                act = rng.randrange(6)
                if act <= 1:
                    some = rng.sample(range(12), rng.randrange(1, 5))
                    handles.append(store.prefetch(rng.randrange(2), some, predictor=rng.choice("abc")))
                elif act == 2 and handles:
                    handles.pop(rng.randrange(len(handles))).cancel()
                elif act == 3 and len(callers) < 2:
                    before = store.stats().requests
                    key = rng.randrange(2), rng.randrange(12)
                    callers.append((key, Caller(store.acquire, *key)))
                    until(lambda store=store, before=before: store.stats().requests > before)
                engine.take(rng.randrange(4))
                for id in rng.sample(engine.in_hand, rng.randrange(len(engine.in_hand) + 1)):
                    fate = rng.random()
                    if id in engine.wants_stopped() and fate < 0.5:
                        engine.settle(id, -errno.ECANCELED)
                    elif fate < 0.1:
                        engine.settle(id, rng.choice([-errno.EIO, -errno.EINTR, 0]))
                    else:
                        engine.fill(id)
                for key, caller in [(key, caller) for key, caller in callers if caller.done()]:
                    assert caller.error() or experts.right(key, caller.result())
                callers = [(key, caller) for key, caller in callers if not caller.done()]
                assert store._check() == 0
                assert_identities(store, quiet=False)
            run_dry(engine)
            for key, caller in callers:
                assert caller.error() or experts.right(key, caller.result())
            assert all(handle.done() for handle in handles)


def workers():
    """How many threads of this process are the kernel's, for reads that could not be done at once."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("iou-wrk") for name in names)


@pytest.mark.root
def test_the_kernel_stops_reads_that_wait_for_a_slow_device(disk):
    """Of 32 buffered reads a few wait for the device, and come back when it answers; the others for a kernel worker."""
    with SlowFile(disk / "slow", b"\x11" * (64 << 20)) as slow:
        source = fastcache.FileRangeSource(str(slow.path), {(0, e): (e << 20, 1 << 20) for e in range(64)})
        limits = {"guess_bytes": "32MiB", "guess_share": 1.0, "direct": "off"}
        with fastcache.open(source, "all", engine="uring", **limits) as store:
            slow.hold()
            handle = store.prefetch(0, range(32))
            slow.wait_for_one()
            until(lambda: store.stats().reads_in_flight == 32, "all reads at the device")
            until(lambda: workers() >= 4, "the kernel's workers")  # before, there is nothing to stop
            assert handle.cancel()
            until(lambda: store._speculation()["io"]["reads_stopped"] > 0, "a stopped read")
            assert io(store)["stops_asked"] == 32
            assert not handle.done()  # what the device has is over when it says so
            joined = Caller(store.acquire, 0, 31)
            until(lambda: store.stats().requests == 1)
            slow.let_go()
            assert bytes(joined.result()) == b"\x11" * (1 << 20)
            assert set(handle.result().values()) <= {"cancelled", "late"}
            assert_identities(store)
            slow.hold()
            store.prefetch(0, range(40, 64))
            slow.wait_for_one()
            timer = threading.Timer(0.3, slow.let_go)
            timer.start()
        timer.join()
        assert_identities(store)
        assert store.stats().prefetch_failures == 0
