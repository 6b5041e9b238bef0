"""Budgets: what each means in slots, that every one gives the same bytes, and what is said of small ones."""

import itertools
import logging
import random

import numpy as np
import pytest
from checkpoints import moe_dir, qwen, split_experts
from rig import Experts, assert_identities, expert_bytes, layers_of

import fastcache
from fastcache.budget import Facts, parse_budget
from fastcache.errors import InvalidBudget
from fastcache.units import parse_bytes

LAYERS, EXPERTS, TOP_K, NBYTES = 2, 8, 3, 9_000
SLOT = 12_288
CYCLE = LAYERS * TOP_K * SLOT
PHRASES = {
    "all": LAYERS * EXPERTS * SLOT,
    "ALL": LAYERS * EXPERTS * SLOT,
    "25% of experts": LAYERS * EXPERTS * SLOT // 4,
    "12.5 % of experts": LAYERS * EXPERTS * SLOT // 8,
    "100% of experts": LAYERS * EXPERTS * SLOT,
    "2 cycles": 2 * CYCLE,
    "1 cycle": CYCLE,
    "0.5 cycles": CYCLE // 2,
    "96KiB": 96 << 10,
    "0.5 MiB": 1 << 19,
    "98304": 98_304,
    "98 kB": 98_000,
}
COUNTS = {"all": 16, "k": TOP_K, "k-1": TOP_K - 1, "one expert": 1, "none": 0}


@pytest.fixture(scope="module")
def experts(disk):
    # Experts end where pages end, so that a slot is the same on sectors of 512 and of 4,096 bytes.
    return Experts(disk, layers_of(LAYERS, EXPERTS, NBYTES), top_k=TOP_K, gap=SLOT - NBYTES)


@pytest.fixture(scope="module")
def hundred():
    """A hundred experts of one page each, ten of them a token cycle."""
    return fastcache.MemorySource({(layer, e): bytes(4096) for layer in range(5) for e in range(20)}, top_k=2)


@pytest.mark.parametrize("percent", range(101))
def test_every_percentage_of_a_hundred_experts_is_as_many_slots(hundred, percent):
    for text in (f"{percent}% of experts", f"{percent}.0 % of experts"):
        with fastcache.open(hundred, budget=text) as store:
            assert slots(store) == percent


@pytest.mark.parametrize("tenths", range(101))
def test_every_tenth_of_a_cycle_of_ten_experts_is_one_slot(hundred, tenths):
    with fastcache.open(hundred, budget=f"{tenths // 10}.{tenths % 10} cycles") as store:
        assert slots(store) == tenths


def test_shares_are_exact_however_many_digits_they_have():
    facts = Facts(10**17, 10**17, 0, 10**17)
    assert parse_budget("0.29% of experts", facts)[0] == 29 * 10**13
    assert parse_budget("33.333333333333333% of free", facts)[0] == 33333333333333333
    assert parse_budget("0." + "0" * 5000 + "1% of experts", facts)[0] == 0
    assert parse_bytes("1.001kB") == 1001 and parse_bytes("0.1TB") == 10**11
    for text in ("9" * 5000, "9" * 5000 + " cycles", "9" * 5000 + "% of experts", "9" * 5000 + ".5 GiB"):
        with pytest.raises(InvalidBudget, match=r"^budget .* is (larger than 8 EiB|more than all)"):
            parse_budget(text, facts)


def slots(store):
    return store.describe()["slots"]


def walk(store, turns=40):
    """Yield (key, lease) of batches as a router would ask for them, by every call that gives leases."""
    rng = random.Random(9)
    for turn in range(turns):
        layer, some = turn % LAYERS, rng.sample(range(EXPERTS), TOP_K)
        if turn % 4 == 0:
            store.prefetch(layer, some)
        if turn % 3 == 0:
            leases = store.acquire_many(layer, some)
        elif turn % 3 == 1:
            leases = [store[layer, expert] for expert in some]
        else:
            leases = [lease for _, lease in store.as_ready(layer, some)]
        for lease in leases:
            yield lease.key, lease


# ---- bytes


@pytest.mark.parametrize("policy", ["next_use", "lru"])
@pytest.mark.parametrize("budget", [*(n * SLOT for n in COUNTS.values()), 1, SLOT - 1, SLOT + 1, 5 * SLOT - 1])
def test_every_budget_gives_the_same_bytes_and_is_kept(experts, engine, budget, policy):
    with fastcache.open(experts.source, budget, engine=engine, policy=policy) as store:
        for key, lease in walk(store):
            assert experts.right(key, lease)
        del lease
        told = store.describe()
        assert told["arena_bytes"] <= budget and told["slots"] == min(budget // SLOT, 16)
        assert told["overflow_bytes"] == told["leased_slots"] == 0
        assert store.stats().resident_experts <= budget // SLOT
        assert store._check() == 0
        if budget == 0:
            assert store.stats().pass_throughs == store.stats().misses > 0
            assert set(store.prefetch(0, range(3)).result().values()) == {"no_room"}
    assert_identities(store)


@pytest.mark.parametrize("chunk", [4096, None])
@pytest.mark.parametrize("count", COUNTS)
def test_two_sizes_of_expert_share_a_budget_without_mixing(disk, engine, count, chunk):
    """Layer 0 in bfloat16, layer 1 in float32: two classes of slots."""
    entries = split_experts([0], 6, "BF16", 40, 64) + split_experts([1], 6, "F32", 40, 64)
    path = moe_dir(disk / f"mixed-{engine}-{count}-{chunk}", [entries], qwen(6, 2, num_experts_per_tok=2))
    with fastcache.open(path, "all", engine="pread") as every:
        classes = every.describe()["slot_classes"]
        assert len(classes) == 2 and [row["slots"] for row in classes] == [6, 6]
        one = max(row["slot_bytes"] for row in classes)
    with fastcache.open(path, COUNTS[count] * one, engine=engine, chunk=chunk) as store:
        told = store.describe()
        assert told["arena_bytes"] <= told["budget_bytes"] == COUNTS[count] * one
        assert sum(row["slots"] * row["slot_bytes"] for row in told["slot_classes"]) == told["arena_bytes"]
        kept = []
        for turn in range(60):
            layer, expert = turn % 2, (turn * 5) % 6
            lease = store[layer, expert]
            for number, label in enumerate(("gate", "up", "down")):
                array = lease[label]
                assert array.tobytes() == entries[18 * layer + 3 * expert + number][3]
            kept = [*kept[-2:], array]
        assert store._check() == 0
    assert_identities(store)


def test_what_is_left_of_a_budget_is_used(disk):
    """Proportional shares round down; the rest goes to whoever can use it."""
    sizes = (
        {(0, e): 100_000 for e in range(4)} | {(1, e): 9_000 for e in range(20)} | {(2, e): 30_000 for e in range(8)}
    )
    experts = Experts(disk, sizes)
    with fastcache.open(experts.source, "all", engine="pread") as every:
        whole = every.describe()
    for budget in range(0, whole["arena_bytes"], 37_000):
        with fastcache.open(experts.source, budget, engine="pread", mlock="off") as store:
            told = store.describe()
            pairs = zip(told["slot_classes"], whole["slot_classes"], strict=True)
            could_use = min(row["slot_bytes"] for row, full in pairs if row["slots"] < full["slots"])
            assert budget - could_use < told["arena_bytes"] <= budget


# ---- words


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_budget_in_words(experts, phrase):
    with fastcache.open(experts.source, phrase, engine="pread") as store:
        assert store.budget_bytes == PHRASES[phrase]
        assert slots(store) == min(PHRASES[phrase] // SLOT, 16)
        assert store.describe()["token_cycle_bytes"] == CYCLE


def test_free_memory_and_auto(experts):
    with fastcache.open(experts.source, "1% of free", engine="pread") as store:
        assert 1 << 20 < store.budget_bytes < 1 << 40 and slots(store) == 16
    for auto in (None, "auto", " Auto"):
        with fastcache.open(experts.source, auto, engine="pread") as store:
            assert store.budget_bytes == 16 * SLOT


@pytest.mark.parametrize(
    "budget",
    [
        "25%",
        "25 % of the experts",
        "25% of memory",
        "",
        " ",
        "all of it",
        "12x",
        "-1",
        "-1 cycles",
        "1e3",
        "nan",
        "inf",
        "0x10",
        "8 GiBs",
        -1,
        -(2**70),
        2**63,
        "9999999999 GiB",
        "9" * 400 + " cycles",
        "200% of experts",
        "100.1% of free",
    ],
)
def test_a_budget_that_is_none_is_refused(experts, budget):
    with pytest.raises(fastcache.InvalidBudget) as caught:
        fastcache.open(experts.source, budget)
    assert isinstance(caught.value, (ValueError, fastcache.BudgetTooSmall)) and "budget" in str(caught.value)
    if budget == "25%":
        assert "of experts" in str(caught.value) and "of free" in str(caught.value)
    if budget == "200% of experts":
        assert "'all' takes them" in str(caught.value)


@pytest.mark.parametrize("budget", [True, False, 1.5, float("nan"), float("inf"), b"8GiB", [1], 3 + 0j])
def test_a_budget_of_another_type_is_refused(experts, budget):
    with pytest.raises(TypeError, match="budget"):
        fastcache.open(experts.source, budget)


def test_an_integer_of_any_kind_is_a_budget(experts):
    class Index:
        def __index__(self):
            return 2 * SLOT

    for budget in (np.int32(2 * SLOT), np.uint64(2 * SLOT), Index()):
        with fastcache.open(experts.source, budget, engine="pread") as store:
            assert store.budget_bytes == 2 * SLOT and slots(store) == 2


def test_cycles_need_a_top_k(disk):
    with pytest.raises(fastcache.InvalidBudget, match="top_k"):
        fastcache.open(Experts(disk, layers_of(1, 2, 100)).source, "2 cycles")


@pytest.mark.parametrize("value", ["48KiB", "4 cycles", "all"])
def test_the_environment_takes_what_the_argument_takes(experts, monkeypatch, value):
    monkeypatch.setenv("FASTCACHE_EXPERT_CACHE_BYTES", value)
    with fastcache.open(experts.source, engine="pread") as store:
        by_variable = store.budget_bytes
    monkeypatch.setenv("FASTCACHE_EXPERT_CACHE_BYTES", "")
    with fastcache.open(experts.source, value, engine="pread") as store:
        assert store.budget_bytes == by_variable
    with fastcache.open(experts.source, engine="pread") as store:
        assert store.budget_bytes == 16 * SLOT  # empty is unset


@pytest.mark.parametrize("value", ["25%", "-5", "lots"])
def test_a_bad_budget_in_the_environment_names_the_variable(experts, monkeypatch, value):
    monkeypatch.setenv("FASTCACHE_EXPERT_CACHE_BYTES", value)
    with pytest.raises(ValueError, match="FASTCACHE_EXPERT_CACHE_BYTES"):
        fastcache.open(experts.source, engine="pread")


# ---- warnings


@pytest.mark.parametrize(
    ("budget", "says", "number"),
    [
        (0, "one batch of 3", TOP_K * SLOT),
        (SLOT, "one batch of 3", TOP_K * SLOT),
        (TOP_K * SLOT - 1, "one batch of 3", TOP_K * SLOT),
        (TOP_K * SLOT, "one token cycle", CYCLE),
        (CYCLE - 1, "one token cycle", CYCLE),
        (CYCLE, None, 0),
        ("all", None, 0),
    ],
)
def test_a_budget_below_a_batch_or_a_cycle_is_warned_of_once_with_the_number_to_give(
    experts, caplog, budget, says, number
):
    with caplog.at_level(logging.INFO, "fastcache"), fastcache.open(experts.source, budget, engine="pread") as store:
        for _, lease in walk(store, 8):
            lease.release()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if says is None:
        assert warnings == []
    else:
        [warning] = warnings
        assert says in warning and f"({number} bytes)" in warning
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(told) == 1 and "of 16 experts in slots" in told[0]


# ---- pins


def test_pins_survive_pressure_until_they_are_taken_back(experts, engine):
    with fastcache.open(experts.source, 4 * SLOT, engine=engine, policy="lru") as store:
        store.pin(0, [1, 2])
        store.pin(0, [1, 2])  # twice is once
        address = store[0, 1]["data"].ctypes.data
        for _ in range(2):
            for layer, expert in itertools.product(range(LAYERS), range(EXPERTS)):
                store.acquire(layer, expert).release()
        assert store.is_resident(0, 1) and store.is_resident(0, 2)
        assert store[0, 1]["data"].ctypes.data == address
        assert store[0, 2]["data"].tobytes() == expert_bytes(0, 2, NBYTES)
        assert store.describe()["leased_slots"] == 2
        store.unpin(0, [1, 2, 3])
        store.unpin(0, 1)
        assert store.describe()["leased_slots"] == 0
        for expert in range(EXPERTS):
            store.acquire(1, expert).release()
        assert not store.is_resident(0, 1) and not store.is_resident(0, 2)
        assert_identities(store)


@pytest.mark.parametrize("budget", [0, SLOT, 3 * SLOT])
def test_pins_that_would_leave_no_slot_pin_nothing(experts, engine, budget):
    with fastcache.open(experts.source, budget, engine=engine) as store:
        with pytest.raises(fastcache.BudgetTooSmall):
            store.pin(0, range(budget // SLOT or 1))
        assert store.describe()["leased_slots"] == 0 and store.stats().bytes_read == 0
        if budget > SLOT:
            store.pin(0, [0])
            with pytest.raises(fastcache.BudgetTooSmall):
                store.pin(1, [0, 1])
            store.pin(0, [0, 1])
        for key, lease in walk(store, 10):
            assert experts.right(key, lease)


def test_pins_that_find_everything_leased_are_one_error_that_names_them(experts, engine):
    with fastcache.open(experts.source, 3 * SLOT, engine=engine) as store:
        held = store.acquire_many(0, [0, 1, 2])
        with pytest.raises(fastcache.BudgetTooSmall) as caught:  # as when they would leave no slot
            store.pin(1, [4, 5])
        assert isinstance(caught.value, fastcache.PinsDoNotFit) and isinstance(caught.value, fastcache.BatchFailed)
        assert list(caught.value.failed) == [(1, 4), (1, 5)]
        assert str(caught.value).startswith("2 experts of the batch failed") and "leased or pinned" in str(caught.value)
        _some, rest = caught.value.split(lambda error: error is caught.value.failed[1, 4])
        assert isinstance(rest, fastcache.PinsDoNotFit) and list(rest.failed) == [(1, 5)]
        held.release()
        store.pin(1, [4, 5])
        assert store.describe()["leased_slots"] == 2


def test_a_pinned_expert_outlives_its_pin_in_the_hands_of_a_caller(experts, engine):
    with fastcache.open(experts.source, 2 * SLOT, engine=engine) as store:
        store.pin(0, 5)
        array = store[0, 5]["data"]
        store.unpin(0, 5)
        for expert in range(EXPERTS):
            store.acquire(1, expert).release()
        assert array.tobytes() == expert_bytes(0, 5, NBYTES)
        del array
        assert store.describe()["leased_slots"] == 0
