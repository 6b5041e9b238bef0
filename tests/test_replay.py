"""Replay and simulation: the store's own table and policies step for step, and Belady against every choice."""

import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Experts, in_time, layers_of, run_dry, scripted
from routing import groups_of, real, tokens, trace_of

from fastcache.cli import main
from fastcache.traces import capacity as room
from fastcache.traces import replay as replaying
from fastcache.traces.importers import read
from fastcache.traces.replay import BELADY, next_uses, policies, replay
from fastcache_ext.belady import Belady, NextUses
from fastcache_ext.driven import Table
from fastcache_ext.simulate import Simulator

DEMAND = 0


def by_hand(trace, policy, slots):
    """Serve a trace step by step on the tests' own table. Returns (hits, evictions, pass-throughs)."""
    sizes = [count for _, count in trace.layers]
    table = Table(sizes, [0] * trace.pool, [slots], policy)
    hits = evictions = passed = 0
    for group in groups_of(trace):
        here = {key: table.slot_of(key) for key in group}
        for slot in here.values():
            if slot >= 0:
                table.lease(slot)
        landing = []
        for key, slot in here.items():
            table.request(key)
            if slot >= 0:
                hits += 1
                continue
            slot, evicted = table.reserve(key, DEMAND, DEMAND)
            if slot < 0:
                passed += 1
                continue
            evictions += evicted is not None
            table.lease(slot)
            here[key] = slot
            landing.append(slot)
        for slot in landing:
            table.read(slot)
            table.publish(slot)
        for slot in here.values():
            if slot >= 0:
                table.drop(slot)
    assert table.check() == 0
    return hits, evictions, passed


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("slots", [0, 2, 5, 19, 60, 120])
def test_the_simulator_does_what_the_table_does_step_by_step(policy, slots):
    trace = tokens(together=2)
    (row,) = replay(trace, [policy], [room.of_slots(trace, slots)])
    assert (row.hits, row.evictions, row.pass_throughs) == by_hand(trace, policy, slots)
    assert row.hits + row.misses == trace.requests


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("slots", [3, 7, 20])
def test_a_run_of_one_caller_replays_to_the_live_counters(tmp_path, policy, slots):
    trace = tokens(layers=4, experts=12, count=60)
    experts = Experts(tmp_path, layers_of(4, 12, 100))
    with scripted(experts, slots, policy=policy) as (store, engine):
        for group in groups_of(trace):
            keys = [(key // 12, key % 12) for key in group]

            leases = asked(store, engine, keys)
            for lease in leases:
                lease.release()
        live = store.stats()
    (row,) = replay(trace, [policy], [room.of_slots(trace, slots)])
    assert (row.hits, row.misses) == (live.hits, live.misses)
    assert (row.evictions, row.pass_throughs) == (live.evictions, live.pass_throughs)


def asked(store, engine, keys):
    from rig import Caller

    caller = Caller(store.acquire_many, keys)
    while not caller.done():
        run_dry(engine)
    return caller.result()


def best(groups, slots, bypass):
    """The most hits, by trying every choice of victims or, with bypass, of what to keep after each batch."""

    @functools.cache
    def hits_from(i, cache):
        if i == len(groups):
            return 0
        group = frozenset(groups[i])
        held, others = cache & group, cache - group
        new = [key for key in groups[i] if key not in held]
        if bypass:
            everything = sorted(cache | group)
            kept = [frozenset(some) for some in itertools.combinations(everything, min(slots, len(everything)))]
        else:
            admitted = new[: slots - len(held)]
            left = min(len(others), slots - len(held) - len(admitted))
            kept = [held.union(admitted, some) for some in itertools.combinations(sorted(others), left)]
        return len(held) + max(hits_from(i + 1, after) for after in kept)

    return hits_from(0, frozenset())


GROUPS = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), min_size=1, max_size=9)


@given(GROUPS, st.integers(0, 5))
@settings(max_examples=150)
def test_belady_is_as_good_as_the_best_of_all_choices(groups, slots):
    trace = trace_of(groups, [7])
    plain, bypass = replay(trace, BELADY, [room.of_slots(trace, slots)])
    assert bypass.hits == best(tuple(map(tuple, groups)), slots, True)
    if all(len(group) <= slots for group in groups):  # else which of a batch pass through is the store's order
        assert plain.hits == best(tuple(map(tuple, groups)), slots, False)
    assert plain.hits <= bypass.hits


@pytest.mark.parametrize("fraction", ["0.05", "0.2", "0.6"])
def test_no_policy_beats_belady(fraction):
    trace = tokens(together=2)
    rows = {row.policy: row for row in replay(trace, [*policies(), *BELADY], [room.of_fraction(trace, fraction)])}
    assert all(rows[name].hits <= rows["belady"].hits for name in policies())
    assert rows["belady"].hits <= rows["belady_bypass"].hits


def test_next_uses_are_the_batches_in_which_a_key_comes_again(monkeypatch):
    monkeypatch.setattr(replaying, "PIECE", 7)
    trace = tokens(count=5)
    groups = groups_of(trace)
    expected = [
        next((j for j in range(i + 1, len(groups)) if key in groups[j]), 2**31 - 1)
        for i, group in enumerate(groups)
        for key in group
    ]
    assert next_uses(trace).tolist() == expected


@pytest.mark.parametrize("piece", [1, 50])
def test_pieces_change_nothing(monkeypatch, piece):
    trace = tokens(count=60, together=3)
    names, rooms = [*policies(), *BELADY], [room.of_slots(trace, 11), room.of_slots(trace, 50)]
    whole = replay(trace, names, rooms)
    monkeypatch.setattr(replaying, "PIECE", piece)
    assert replay(trace, names, rooms) == whole


def test_a_trace_without_requests_replays_to_nothing():
    trace = trace_of([], [4])
    for row in replay(trace, [*policies(), *BELADY], [room.of_fraction(trace, 0.5)]):
        assert (row.capacity, row.hits, row.misses, row.hit_rate) == (2, 0, 0, 0.0)


def test_size_classes_are_separate_and_misses_are_counted_in_bytes():
    trace = tokens(layers=2, experts=8, top_k=2, count=50)
    small, large = 4096, 3 * 4096
    trace = dataclasses.replace(trace, expert_nbytes=np.array([small, large]))
    capacity = room.of_budget(trace, 5 * small + 3 * large)
    assert capacity.slots == (3, 5) and sorted(set(capacity.cls.tolist())) == [0, 1]
    for name in [*policies(), *BELADY]:
        (row,) = replay(trace, [name], [capacity])
        halves = []
        for layer, slots in ((0, 5), (1, 3)):  # nothing of a class is evicted for the other
            part = trace_of([group for group in groups_of(trace) if group[0] // 8 == layer], [8, 8], 2)
            halves += replay(part, [name], [room.of_slots(part, slots)])
        if name in ("lru", *BELADY):  # the others count time in requests or layers of all classes
            assert row.hits == sum(half.hits for half in halves)
        assert small * row.misses < row.bytes_missed < large * row.misses
    whole = room.of_budget(trace, "all")
    assert whole.slots == (8, 8)
    (row,) = replay(trace, ["lru"], [whole])
    assert row.misses == (trace.counts() > 0).sum()
    assert row.bytes_missed == ((trace.counts() > 0) * trace.sizes()).sum()


def test_capacities_round_down_and_know_what_a_trace_says():
    trace = trace_of([[0], [10]], [10, 90], 3)
    assert [room.of_fraction(trace, share).experts for share in ("0.07", 0.29, "0.999", 1, 0)] == [7, 29, 99, 100, 0]
    assert room.of_fraction(trace, 0.07).fraction == 0.07
    assert room.of_slots(trace, 1000).experts == 100
    assert room.cycle_experts(trace) == 6 and room.cycle_bytes(trace) is None
    sized = room.with_sizes(trace, "4097B")
    assert room.cycle_bytes(sized) == 6 * 8192
    assert room.of_budget(sized, "2 cycles").experts == 12
    assert room.of_budget(sized, "25% of experts").experts == 25
    assert room.of_budget(sized, "81920").experts == 10
    assert room.with_sizes(trace, top_k=7).top_k == 7
    for budget, message in {
        "2 cycles": "does not say how large",
        "50% of free": "does not say how large",
    }.items():
        with pytest.raises(ValueError, match=message):
            room.of_budget(trace, budget)
    for budget, message in {"50% of free": "no free memory", "auto": "no free memory", "many": "not a size"}.items():
        with pytest.raises(ValueError, match=message):
            room.of_budget(sized, budget)
    with pytest.raises(ValueError, match="cycle is not known"):
        room.of_budget(dataclasses.replace(sized, top_k=None), "1 cycle")
    with pytest.raises(ValueError, match="between 0 and 1"):
        room.of_fraction(trace, "1.5")


def simulator(slots=2, policy="lru"):
    return Simulator(np.array([0, 3, 6], np.int32), np.zeros(6, np.uint8), np.zeros(6, np.int64), [slots], policy)


@pytest.mark.parametrize(
    ("keys", "sizes"), [([0, 1], [3]), ([0, 1], [1]), ([0, 6], [2]), ([0, -1], [2]), ([1, 1], [2]), ([0, 1], [3, -1])]
)
def test_requests_that_cannot_be_are_refused_before_any_is_served(keys, sizes):
    keys, sizes = np.array([2, *keys], np.int32), np.array([1, *sizes], np.int64)
    one = simulator()
    with pytest.raises(ValueError, match="do not add up"):
        one.run(keys, sizes)
    assert one.hits == one.misses == 0 and one.check() == 0
    if keys.tolist() != [2, 1, 1]:
        belady = Belady(np.zeros(6, np.uint8), np.zeros(6, np.int64), [2])
        with pytest.raises(ValueError, match="do not add up"):
            belady.run(keys, sizes, np.zeros(3, np.int32))
        with pytest.raises(ValueError, match="do not add up"):
            NextUses(6).fill(keys, sizes, 0, np.zeros(3, np.int32))


def test_arguments_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match="one entry per key"):
        Simulator(np.array([0, 3], np.int32), bytes(2), np.zeros(3, np.int64), [2], "lru")
    with pytest.raises(KeyError):
        simulator(policy="no such")
    with pytest.raises(ValueError, match="one entry per key"):
        Belady(bytes(3), np.zeros(3, np.int64), [2]).run(np.zeros(1, np.int32), np.ones(1, np.int64), bytes(8))
    with pytest.raises(ValueError, match="one entry per key"):
        NextUses(3).fill(np.zeros(1, np.int32), np.ones(1, np.int64), 0, bytearray(8))
    with pytest.raises(ValueError, match="no policy 'fifo'"):
        replay(tokens(count=1), ["fifo"], [])


@pytest.mark.alone("its clock allows for little")
def test_ctrl_c_ends_a_replay_within_a_second():
    trace = trace_of([[0, 1], [2, 3]], [4])
    many = dataclasses.replace(
        trace,
        keys=np.tile(trace.keys, 1 << 22),
        batches=np.arange(0, (1 << 24) + 1, 2),
        phase=np.broadcast_to(np.uint8(0), 1 << 23),
        token=np.broadcast_to(np.int64(-1), 1 << 23),
    )
    pressed = []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.05, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        replay(many, ["lru"], [room.of_slots(many, 3)] * 50)
    in_time(pressed[0], 1)
    timer.join()


BOUNDED = """
import resource, sys
import numpy as np
from fastcache.traces.capacity import of_fraction
from fastcache.traces.importers import read
from fastcache.traces.replay import replay
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + (14 << 20),) * 2)
trace = read(sys.argv[1])
print(trace.requests, [row.hits for row in replay(trace, ["lru", "belady"], [of_fraction(trace, "0.5")])])
"""


def test_memory_is_bounded_by_the_pool_and_not_by_the_trace(disk):
    """4 million requests: their keys alone, 16 MB, are more than the process may add."""
    path = disk / "long.bin"
    layer = np.arange(4_000_000 // 4) % 5
    pairs = np.empty((4_000_000, 2), "<i4")
    pairs[:, 0] = np.repeat(layer, 4)
    pairs[:, 1] = np.tile([0, 1, 2, 3, 4, 5, 6, 7], 4_000_000 // 8)
    pairs.tofile(path)
    environment = os.environ | {"TMPDIR": str(disk), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", BOUNDED, path], capture_output=True, text=True, check=False, env=environment
    )
    path.unlink()
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("4000000 [")


# Real traces: hit rates in %, of an independent replay; capacity as a share of the pool.
ANCHORS = {
    "kimi": {"lru": {3: 0.0, 5: 0.0, 10: 40.7}, "belady": {3: 27.0, 5: 45.2, 10: 81.6}},
    "qwen": {
        "lru": {3: 0.0, 5: 35.1, 10: 46.6, 15: 61.0, 20: 69.1},
        "belady": {3: 42.2, 5: 54.2, 10: 70.4, 15: 78.7, 20: 84.0},
    },
}


@pytest.mark.parametrize("name", ANCHORS)
def test_known_figures_of_real_traces_come_out(name):
    trace = read(real(name))
    for policy, rates in ANCHORS[name].items():
        rooms = [room.of_fraction(trace, f"{share / 100}") for share in rates]
        rows = replay(trace, [policy], rooms)
        for row, rate in zip(rows, rates.values(), strict=True):
            assert 100 * row.hit_rate == pytest.approx(rate, abs=0.06), row


@pytest.mark.alone("its clock allows for little")
def test_all_policies_and_belady_at_five_sizes_take_a_few_seconds():
    started = time.monotonic()
    trace = read(real("kimi"))
    rooms = [room.of_fraction(trace, share) for share in ("0.03", "0.05", "0.1", "0.15", "0.2")]
    assert len(replay(trace, [*policies(), *BELADY], rooms)) == 5 * (len(policies()) + 2)
    in_time(started, 10)


def call(*arguments):
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "small.bin"
    np.array([[0, 0], [0, 1], [1, 3], [0, 1], [0, 2], [1, 3]], "<i4").tofile(path)
    return path


def test_the_command_prints_one_object(pairs):
    result = call(pairs, "--json", "--fractions", "0.25,0.5", "--slots", "8", "--policy", "lru,belady")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert {"trace", "requests", "distinct", "pool", "rows"} <= printed.keys()
    assert (printed["trace"], printed["requests"], printed["distinct"], printed["pool"]) == ("small.bin", 6, 4, 8)
    rows = [(row["policy"], row["capacity"], row["fraction"], row["hits"]) for row in printed["rows"]]
    assert rows == [
        ("lru", 2, 0.25, 1),
        ("belady", 2, 0.25, 1),
        ("lru", 4, 0.5, 2),
        ("belady", 4, 0.5, 2),
        ("lru", 8, 1.0, 2),
        ("belady", 8, 1.0, 2),
    ]
    assert all(row["hit_rate"] == row["hits"] / 6 for row in printed["rows"])


def test_all_means_every_policy_and_belady(pairs):
    rows = json.loads(call(pairs, "--json").stdout)["rows"]
    assert len(rows) == 5 * (len(policies()) + 1)
    assert [row["policy"] for row in rows[: len(policies()) + 1]] == [*policies(), "belady"]


def test_budgets_need_sizes_and_give_bytes(pairs):
    result = call(pairs, "--budget", "8KiB", "--expert-bytes", "4096", "--top-k", "1", "--budget", "1 cycle", "--json")
    rows = json.loads(result.stdout)["rows"]
    assert {row["capacity"] for row in rows} == {2} and {row["budget_bytes"] for row in rows} == {8192}
    assert all(row["bytes_missed"] == 4096 * row["misses"] for row in rows)
    table = call(pairs, "--budget", "8KiB", "--expert-bytes", "4096").stdout
    assert "8.0 KiB" in table and all(name in table for name in (*policies(), "belady"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fifo"], "no policy 'fifo'"),
        (["--budget", "1GiB"], "--expert-bytes"),
        (["--fractions", "2"], "between 0 and 1"),
        (["--fractions", "many"], "many"),
        (["--slots", "-1"], "not a number of slots"),
        (["--format", "fastcache"], "FCTRACE1"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(pairs, arguments, message):
    result = call(pairs, *arguments)
    assert result.exit_code != 0 and message in result.output and "Traceback" not in result.output
