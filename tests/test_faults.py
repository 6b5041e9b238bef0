"""What a read may come back as, scripted below the queue: short, late, failed, refused, out of order, or not at all."""

import _thread
import errno
import os
import random
import time

import pytest
from rig import Caller, Experts, assert_identities, expert_bytes, in_time, layers_of, run_dry, scripted, until

import fastcache

EMPTY_OR_POISON = 0xA5


@pytest.fixture
def experts(disk):
    """Two layers of six experts of 20,000 bytes; the file ends 100 bytes after a multiple of 4,096."""
    made = Experts(disk, layers_of(2, 6, 20_000))
    tail = (100 - made.path.stat().st_size) % 4096
    return Experts(disk, layers_of(2, 6, 20_000), tail=tail)


def ask(engine, call, *args, **kwargs):
    """Start a blocking call, and return it with the reads it has asked for."""
    caller = Caller(call, *args, **kwargs)
    ops = engine.take(wait=20)
    assert ops, "no read was asked for"
    return caller, ops


# ---- one read, and what it brings


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("short", [1, 100, 511, 512, 513, 4095, 4096, 8191, 8192, 12288, 16384, 19999])
def test_a_read_that_comes_back_short_is_completed(experts, short, direct):
    with scripted(experts, slots=4, direct=direct) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 0, 3)
        assert not engine.fill(op.id, short)
        rest = engine.now(op.id)
        assert rest.offset + rest.nbytes == op.offset + op.nbytes
        assert rest.offset == op.offset + (short // 512 * 512 if op.direct else short)
        assert not store.is_resident(0, 3)
        assert engine.fill(op.id)
        assert experts.right((0, 3), caller.result())
        assert store.stats().bytes_read == 20_000


def test_a_direct_read_is_never_resumed_at_an_unaligned_offset(experts):
    with scripted(experts, slots=4) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 0, 3)
        for short in (700, 512, 4000, 513):
            assert not engine.fill(op.id, short)
            now = engine.now(op.id)
            assert now.offset % 512 == now.nbytes % 512 == now.address % 512 == 0
        engine.fill(op.id)
        assert experts.right((0, 3), caller.result())


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_the_end_of_the_file_before_the_expert_is_a_short_read_that_says_where(experts, direct):
    with scripted(experts, slots=4, direct=direct) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 1, 5)
        engine.fill(op.id, 8192)
        engine.settle(op.id, 0)
        error = caller.error()
        assert type(error) is fastcache.ShortRead and isinstance(error, OSError)
        assert error.key == (1, 5) and error.filename == str(experts.path) and error.got == 0
        assert error.offset == op.offset + 8192 and error.wanted == op.expected - 8192
        assert str(error.offset) in str(error) and "layer 1 expert 5" in str(error)
        assert not store.is_resident(1, 5) and engine.leases() == [0] * 4


def test_a_device_that_never_brings_a_whole_block_is_given_up(experts):
    with scripted(experts, slots=4) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 0, 0)
        tries = 1
        while not engine.fill(op.id, 100):
            tries += 1
            assert tries < 100
        assert isinstance(caller.error(), fastcache.ShortRead)


def test_interruptions_are_retried_but_not_for_ever(experts):
    with scripted(experts, slots=4) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 0, 0)
        for code in [errno.EINTR, errno.EAGAIN] * 10:
            assert not engine.settle(op.id, -code)
        assert engine.fill(op.id)
        assert experts.right((0, 0), caller.result())
        caller, [op] = ask(engine, store.acquire, 0, 1)
        tries = 0
        while not engine.settle(op.id, -errno.EAGAIN):
            tries += 1
            assert tries < 1000
        assert caller.error().errno == errno.EAGAIN


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.ENOTSUP])
def test_a_file_that_refuses_direct_reads_is_served_buffered_with_the_unpadded_range(experts, code):
    with scripted(experts, slots=4) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 1, 5)
        [(start, size)] = experts.ranges[1, 5]
        assert op.direct and (op.offset, op.nbytes) != (start, size)
        engine.scribble(op.id)
        assert not engine.settle(op.id, -code)
        again = engine.now(op.id)
        assert not again.direct and (again.offset, again.nbytes) == (start, size)
        assert engine.fill(op.id)
        assert experts.right((1, 5), caller.result())
        caller, [op] = ask(engine, store.acquire, 0, 2)
        assert not op.direct and (op.offset, op.nbytes) == experts.ranges[0, 2][0]
        engine.fill(op.id)
        assert experts.right((0, 2), caller.result())
        told = store.describe()["direct"]
        assert told["used"] == "buffered" and errno.errorcode[code] in told["reason"]


def test_a_refusal_after_progress_asks_for_the_rest_only(experts):
    with scripted(experts, slots=4, chunk=8192) as (store, engine):
        caller, ops = ask(engine, store.acquire, 0, 3)
        [(start, _)] = experts.ranges[0, 3]
        assert not engine.fill(ops[0].id, 4096)
        assert not engine.settle(ops[0].id, -errno.EINVAL)
        now = engine.now(ops[0].id)
        assert not now.direct and now.offset == ops[0].offset + 4096 > start
        for op in reversed(ops):
            engine.fill(op.id)
        assert experts.right((0, 3), caller.result())


def test_direct_required_means_that_a_refusal_is_an_error(experts):
    with scripted(experts, slots=4, direct="require") as (store, engine):
        caller, [op] = ask(engine, store.acquire, 0, 0)
        assert engine.settle(op.id, -errno.EINVAL)
        assert caller.error().errno == errno.EINVAL


def test_an_io_error_is_raised_and_neither_retried_nor_cached(experts):
    with scripted(experts, slots=1) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 0, 3)
        engine.scribble(op.id)
        assert engine.settle(op.id, -errno.EIO) and not engine.in_hand
        error = caller.error()
        assert type(error) is fastcache.ReadFailed and error.errno == errno.EIO
        assert error.filename == str(experts.path) and error.key == (0, 3) and error.offset == op.offset
        assert not store.is_resident(0, 3)
        assert store.describe()["direct"]["used"] == "direct"
        caller, [op] = ask(engine, store.acquire, 0, 3)
        engine.fill(op.id)
        assert experts.right((0, 3), caller.result())


@pytest.mark.parametrize("size", [1, 511, 512, 4095, 4096, 4097, 2 * 4096 + 100])
def test_the_last_bytes_of_a_file_of_any_size_are_served(disk, engine, size):
    path = disk / f"size-{size}"
    path.write_bytes(expert_bytes(0, 0, size))
    ranges = {(0, e): (size - n, n) for e, n in enumerate(sorted({1, min(size, 100), size}))}
    with fastcache.open(fastcache.FileRangeSource(path, ranges), "all", engine=engine) as store:
        for (layer, expert), (offset, n) in ranges.items():
            assert bytes(store[layer, expert]) == expert_bytes(0, 0, size)[offset:][:n]


def test_a_file_that_changes_while_it_is_read_is_not_believed(experts):
    with scripted(experts, slots=4) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 0, 0)
        engine.write(op.id)
        os.utime(experts.path, ns=(1, 1))
        engine.settle(op.id, op.expected)
        error = caller.error()
        assert type(error) is fastcache.CheckpointChanged and str(experts.path) in str(error)
        assert not store.is_resident(0, 0) and engine.leases() == [0] * 4


# ---- several reads, and whose bytes they are


def test_pads_land_in_no_other_slot_and_in_no_other_extent(disk):
    experts = Experts(disk, layers_of(1, 6, 9_001), parts=3, gap=333)
    with scripted(experts, slots=4) as (store, engine):
        slots = set()
        for expert in (3, 0, 5):
            caller, ops = ask(engine, store.acquire, 0, expert)
            assert len(ops) == 3 and len({op.slot for op in ops}) == 1
            slots.add(ops[0].slot)
            for op in random.Random(expert).sample(ops, 3):
                engine.fill(op.id)
            assert experts.right((0, expert), caller.result())
        [untouched] = set(range(4)) - slots
        assert set(engine.peek(untouched)) == {EMPTY_OR_POISON}
        for expert in (3, 0, 5):
            assert experts.right((0, expert), store[0, expert])


def test_a_failed_request_of_four_frees_its_slot_only_after_the_other_three(experts):
    with scripted(experts, slots=1, chunk=8192, overflow=1 << 20) as (store, engine):
        first, ops = ask(engine, store.acquire, 0, 0)
        assert len(ops) == 3
        engine.scribble(ops[1].id)
        engine.settle(ops[1].id, -errno.EIO)
        second, others = ask(engine, store.acquire, 0, 1)  # the only slot still is a target: this one passes through
        assert not first.done() and {op.slot for op in others} == {-1}
        engine.fill(ops[2].id)
        engine.fill(others[0].id)
        engine.fill(ops[0].id)
        assert isinstance(first.error(), fastcache.ReadFailed)
        third, more = ask(engine, store.acquire, 0, 2)  # now the slot is free, while the second still is under way
        assert {op.slot for op in more} == {0}
        for op in [*reversed(more), *others[1:]]:
            engine.fill(op.id)
        assert experts.right((0, 1), second.result()) and experts.right((0, 2), third.result())
        assert store.stats().demand_failures == 1 and store.stats().pass_throughs == 1


def test_too_much_here_does_not_make_up_for_too_little_there(experts):
    with scripted(experts, slots=2, chunk=8192) as (store, engine):
        caller, ops = ask(engine, store.acquire, 0, 0)
        for op in ops:
            engine.write(op.id)
        assert engine.settle(ops[0].id, ops[0].nbytes + 4096)
        assert not engine.settle(ops[1].id, ops[1].nbytes - 4096)
        assert engine.settle(ops[2].id, ops[2].expected)
        assert not caller.done() and not store.is_resident(0, 0)
        engine.fill(ops[1].id)
        assert experts.right((0, 0), caller.result())


def test_a_failed_expert_of_a_batch_does_not_lose_the_others(experts):
    with scripted(experts, slots=6) as (store, engine):
        caller, ops = ask(engine, store.acquire_many, 0, [4, 1, 4, 3])
        assert [op.key for op in ops] == [(0, 4), (0, 1), (0, 3)]
        engine.settle(ops[1].id, -errno.EIO)
        engine.fill(ops[2].id)
        engine.fill(ops[0].id)
        error = caller.error()
        assert type(error) is fastcache.BatchFailed and isinstance(error, ExceptionGroup)
        assert list(error.failed) == [fastcache.ExpertKey(0, 1)] and error.failed[0, 1].errno == errno.EIO
        assert store.is_resident(0, 4) and store.is_resident(0, 3) and not store.is_resident(0, 1)
        assert engine.leases() == [0] * 6


# ---- who waits may leave; the read does not


def test_a_wait_that_times_out_leaves_the_read_to_land(experts):
    with scripted(experts, slots=2) as (store, engine):
        with pytest.raises(fastcache.ReadTimeout):
            store.acquire(0, 0, timeout=0.01)
        [op] = engine.take()
        assert sorted(engine.leases()) == [0, 1]  # the read's own
        engine.fill(op.id)
        assert store.is_resident(0, 0) and engine.leases() == [0, 0]
        assert experts.right((0, 0), store.acquire(0, 0, timeout=0))
        with pytest.raises(TimeoutError):
            store.acquire_many(0, [1, 2, 3], timeout=0.01)
        assert max(engine.leases()) == 1
        run_dry(engine)
        assert engine.leases() == [0, 0]


@pytest.mark.alone("its clock allows for little")
def test_ctrl_c_in_a_wait_arrives_within_a_second_and_drops_its_hold(experts):
    with scripted(experts, slots=2) as (store, engine):

        def press():
            [op] = engine.take(wait=20)
            start = time.monotonic()
            _thread.interrupt_main()
            return op, start

        presser = Caller(press)
        with pytest.raises(KeyboardInterrupt):
            store.acquire(0, 0)
        op, start = presser.result()
        in_time(start, 1)
        assert sorted(engine.leases()) == [0, 1]
        engine.fill(op.id)
        assert engine.leases() == [0, 0] and experts.right((0, 0), store[0, 0])


def test_a_dropped_iterator_lets_its_reads_land_and_holds_nothing(experts):
    with scripted(experts, slots=6) as (store, engine):
        ready = store.as_ready(0, range(6))
        ops = engine.take()
        engine.fill(ops[4].id)
        expert, lease = next(ready)
        assert expert == 4 and experts.right((0, 4), lease)
        engine.fill(ops[2].id)
        del ready, lease
        assert sorted(engine.leases()) == [0, 0, 1, 1, 1, 1]
        run_dry(engine)
        assert engine.leases() == [0] * 6 and store.stats().demand_loads == 6


def test_close_with_reads_in_flight_keeps_their_memory_until_they_are_over(experts, caplog):
    with scripted(experts, slots=12) as (store, engine):
        caller, [op] = ask(engine, store.acquire, 0, 5)
        engine.fill(op.id)
        held = caller.result()
        store.prefetch(0, range(5))
        engine.take()
        waiting, _ = ask(engine, store.acquire_many, 1, range(6))
        hand = engine.in_hand
        assert len(hand) > 6
        store.close(timeout=0.01)
        assert "has not returned" in caplog.text
        with pytest.raises(fastcache.StoreClosed):
            store.acquire(0, 5)
        for id in reversed(hand):
            engine.scribble(id)  # the kernel writes late: into memory that is still ours
            engine.fill(id)
        assert len(waiting.result()) == 6  # what was at the device landed
        assert not store._speculation()["predictors"]["caller"]["unread"]  # but for the guess
        store.close()
        assert experts.right((0, 5), held)


def test_close_drops_what_is_queued_and_says_so_to_whoever_waits(experts):
    with scripted(experts, slots=12, queue_depth=1, io_threads=1) as (store, engine):
        caller = Caller(store.acquire_many, 0, range(6))
        [one, other] = engine.take(wait=20)
        closer = Caller(store.close)
        until(lambda: store._counters()[0]["demand_cancelled"] == 4, "dropping the queue")
        engine.fill(other.id)
        engine.fill(one.id)
        failed = caller.error().failed
        assert len(failed) == 4 and {type(error) for error in failed.values()} == {fastcache.StoreClosed}
        closer.result()


# ---- everything at once


@pytest.mark.parametrize("policy", ["lru", "next_use"])
@pytest.mark.parametrize("seed", range(3))
def test_no_script_shows_a_wrong_byte_or_loses_count(disk, seed, policy):
    """Three threads of callers; reads end in any order, short, late, failed or interrupted. take() asserts I6."""
    experts = Experts(disk, layers_of(2, 8, 9_000), parts=2)
    rng = random.Random(seed)
    with scripted(experts, slots=3, chunk=4096, policy=policy, overflow=60_000) as (store, engine):

        def call(seed):
            rng, kept = random.Random(seed), []
            for _ in range(60):
                layer, some = rng.randrange(2), rng.sample(range(8), rng.randrange(1, 4))
                try:
                    if rng.random() < 0.3:
                        handle = store.prefetch(layer, some)
                        if rng.random() < 0.5:
                            handle.cancel()
                    elif rng.random() < 0.5:
                        kept += store.acquire_many(layer, some, timeout=20)
                    else:
                        kept += [lease for _, lease in store.as_ready(layer, some, timeout=20)]
                except fastcache.BatchFailed as error:
                    if error.split((fastcache.ReadFailed, fastcache.OverflowLimit))[1] is not None:
                        raise
                rng.shuffle(kept)
                assert all(experts.right(lease.key, lease) for lease in kept)
                del kept[rng.randrange(3) :]
            return True

        callers = [Caller(call, 100 * seed + n) for n in range(3)]
        while not all(caller.done() for caller in callers):
            engine.take(rng.randrange(1, 6))
            hand = engine.in_hand
            if not hand or rng.random() < 0.2:
                continue
            id = rng.choice(hand)
            fate = rng.random()
            if fate < 0.04:
                engine.scribble(id)
                engine.settle(id, -errno.EIO)
            elif fate < 0.1:
                engine.settle(id, -errno.EINTR)
            elif fate < 0.3:
                engine.fill(id, rng.randrange(1, 4096))
            else:
                engine.fill(id)
            assert store._check() == 0
        assert all(caller.result() for caller in callers)
        run_dry(engine)
        assert_identities(store)
        assert engine.leases() == [0] * 3 and store.describe()["overflow_bytes"] == 0
