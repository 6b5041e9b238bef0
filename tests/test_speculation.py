"""Guesses by predictor: how each ends, what it is charged, and which are declined."""

import re

import pytest
from rig import Caller, Experts, assert_evidence, land, layers_of, run_dry, scripted

import fastcache
from fastcache.speculation import describe_speculation


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(6, 40, 10_000))


def row(store, name):
    return store.describe()["speculation"]["predictors"][name]


def acquire(store, engine, layer, some):
    """Acquire and release a batch, serving what it reads."""
    caller = Caller(store.acquire_many, layer, some)
    while not caller.done():
        run_dry(engine)
    caller.result().release()


def test_each_predictor_is_credited_with_the_end_of_each_of_its_guesses(experts):
    with scripted(experts, slots=4, chunk=4096) as (store, engine):
        store.prefetch(0, [0, 1], predictor="alice")
        run_dry(engine)
        acquire(store, engine, 0, [0])
        late = store.prefetch(0, [2], predictor="bob")
        engine.take()
        caller = Caller(store.acquire, 0, 2)
        land(engine, *[op.id for op in engine.take(wait=20)])
        run_dry(engine)
        caller.result().release()
        assert late.result() == {(0, 2): "late"}
        cancelled = store.prefetch(1, [3], predictor="bob")
        cancelled.cancel()
        failing = store.prefetch(1, [4])
        engine.settle(engine.take()[0].id, -5)
        assert failing.result() == {(1, 4): "failed"}
        assert row(store, "alice") | {"issued": 2, "used": 1, "unread": 1, "late": 0} == row(store, "alice")
        assert row(store, "bob") | {"issued": 2, "late": 1, "cancelled": 1, "used": 0} == row(store, "bob")
        assert row(store, "bob")["late_wait_ns"] == store.stats().late_join_wait_ns > 0
        assert row(store, "caller") | {"issued": 1, "failed": 1, "bytes": 0} == row(store, "caller")
        pin = Caller(store.pin, 2, 0)
        while not pin.done():
            run_dry(engine)
        acquire(store, engine, 3, range(3))  # needs every slot but the pinned one
        assert row(store, "alice") | {"wasted": 1, "unread": 0} == row(store, "alice")
        assert row(store, "pin") | {"issued": 1, "unread": 1} == row(store, "pin")
        assert_evidence(store)


def test_the_reason_tells_of_the_worst_three_predictors_and_how_many_more_there_are(experts):
    with scripted(experts, slots=8) as (store, engine):
        for n in range(60):
            store.prefetch(0, [n % 40], predictor=f"predictor {n}")
        run_dry(engine)
        told = store._speculation()
    sixty = [name for name in told["predictors"] if name.startswith("predictor")]
    for i, name in enumerate(sixty):
        more = {"state": "full", "remembered": 40.0, "hits": 30.0, "gain_ns": 1e6 * i, "cost_ns": 5e5}
        told["predictors"][name] |= more
    told["predictors"]["predictor 50"]["state"] = "stopped"
    told["predictors"]["predictor 51"]["state"] = told["predictors"]["predictor 52"]["state"] = "narrowed"
    told["predictors"]["predictor 52"]["cost_ns"] = 1e9
    entry = describe_speculation("auto", told, {})
    said = re.findall(r"predictor \d+", entry["reason"])
    assert said == ["predictor 50", "predictor 52", "predictor 51"]
    assert entry["reason"].endswith("; and 57 more (57 full): see 'predictors'") and len(entry["reason"]) < 500
    assert len(entry["predictors"]) == 60 and entry["used"] == "narrowed"
    told["predictors"] = {name: told["predictors"][name] for name in ("predictor 1", "predictor 50", "predictor 0")}
    few = describe_speculation("auto", told, {})["reason"]
    assert re.findall(r"predictor \d+", few) == ["predictor 50", "predictor 0", "predictor 1"] and "more" not in few


@pytest.mark.parametrize("bad", ["", 3, b"x"])
def test_a_predictor_is_a_name(experts, bad):
    with scripted(experts, slots=2) as (store, _), pytest.raises(TypeError, match="non-empty str"):
        store.prefetch(0, [0], predictor=bad)


def test_a_store_tells_sixty_one_predictors_apart_beside_its_own_three(experts):
    with scripted(experts, slots=2) as (store, _):
        for n in range(61):  # besides "caller", "pin" and "warm"
            store.prefetch(0, [], predictor=f"predictor {n}")
        store.prefetch(0, [], predictor="predictor 7")
        with pytest.raises(
            ValueError, match=r'61 predictors apart, beside "caller", pins and warm\(\); .one more. would'
        ):
            store.prefetch(0, [], predictor="one more")
        with pytest.raises(ValueError, match=r"pin\(\)"):
            store.prefetch(0, [], predictor="pin")


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_speculation_switched_off_reads_nothing_but_pins(experts, slots):
    with scripted(experts, slots=slots, speculation="off") as (store, engine):
        handle = store.prefetch(0, [0, 1, 2])
        assert handle.done() and set(handle.result().values()) == {"declined"}
        assert not engine.take() and store.stats().prefetch_issued == 0
        told = store.describe()["speculation"]
        assert (told["requested"], told["used"], told["predictors"]["caller"]["declined"]) == ("off", "off", 3)
        if slots > 1:
            pin = Caller(store.pin, 0, 1)
            while not pin.done():
                run_dry(engine)
            assert store.prefetch(0, [0, 1]).result() == {(0, 0): "declined", (0, 1): "resident"}


@pytest.mark.parametrize(("requested", "state"), [("always", "full"), ("off", "stopped"), ("auto", "narrowed")])
def test_a_verdict_that_nobody_heeds_is_not_told(requested, state):
    row = {"state": "narrowed", "issued": 9, "declined": 0, "remembered": 40, "hits": 20, "gain_ns": 2, "cost_ns": 1}
    io = {"priority": "none", "limit_bytes": 1}
    told = describe_speculation(requested, {"predictors": {"p": row}, "counts": ["issued"], "io": io}, {})
    assert told["predictors"] == {"p": {"state": state, "issued": 9}}


def test_an_unknown_kind_of_speculation_is_refused(experts, monkeypatch):
    with pytest.raises(ValueError, match="speculation must be one of"):
        fastcache.open(experts.source, "all", speculation="maybe")
    monkeypatch.setenv("FASTCACHE_SPECULATION", "on")
    with pytest.raises(ValueError, match="FASTCACHE_SPECULATION"):
        fastcache.open(experts.source, "all")
    monkeypatch.setenv("FASTCACHE_SPECULATION", "always")
    with fastcache.open(experts.source, "all") as store:
        assert store.describe()["speculation"]["requested"] == "always"


def test_the_skewed_schedule_is_three_reuses_one_first_consumption_and_three_unread(experts):
    with scripted(experts, slots=4) as (store, engine):
        handle = store.prefetch(0, range(4))
        assert not handle.done()  # its caller is not blocked: nothing was read yet
        run_dry(engine)
        for _ in range(4):
            store.acquire(0, 2).release()
        stats = store.stats()
        assert (stats.reuses, stats.first_consumptions, stats.unread_resident, stats.adjusted_hits) == (3, 1, 3, 0)
        assert row(store, "caller") | {"issued": 4, "used": 1, "unread": 3} == row(store, "caller")


@pytest.mark.parametrize("slots", range(1, 12))
def test_who_prefetches_and_then_acquires_reads_each_expert_once_and_is_never_declined(experts, slots):
    with scripted(experts, slots=slots, chunk=4096) as (store, engine):
        before = 0
        for turn in range(60):
            some = [(7 * turn + n) % 40 for n in range(8)]
            layer = turn % 6
            absent = [expert for expert in some if not store.is_resident(layer, expert)]
            handle = store.prefetch(layer, some)
            assert not absent or engine.in_hand or not handle.done() or "no_room" in handle.result().values()
            if turn % 2:
                run_dry(engine)
            acquire(store, engine, layer, some)
            assert "declined" not in handle.result().values()
            assert store.stats().bytes_read - before == 10_000 * len(absent)
            before = store.stats().bytes_read
        told = store.describe()["speculation"]
        assert told["used"] == "full" and told["predictors"]["caller"]["declined"] == 0
        assert store.stats().wasted == 0


def test_a_predictor_that_is_always_wrong_is_stopped_within_a_few_tens_of_guesses(experts):
    with scripted(experts, slots=240) as (store, engine):
        issued = []
        for turn in range(100):
            layer = turn % 6
            store.prefetch(layer, [10 + (turn + n) % 30 for n in range(8)], predictor="wrong")
            run_dry(engine)
            acquire(store, engine, layer, [turn % 10, (turn + 5) % 10])
            issued.append(row(store, "wrong")["issued"])
        told = store.describe()["speculation"]
        assert told["used"] == "stopped" and "wrong (stopped" in told["reason"] and "0 of the last" in told["reason"]
        assert issued[9] <= 32 and issued[99] <= 48  # the rest are probes
        assert store.stats().evictions == 0  # it is found out though nothing evicts its guesses
        handle = store.prefetch(0, [39], predictor="another")
        run_dry(engine)
        assert handle.result() != {(0, 39): "declined"}  # each is judged by its own guesses
        assert store.describe()["speculation"]["used"] == "narrowed"


def test_a_predictor_that_was_wrong_and_becomes_right_is_let_in_again(experts):
    with scripted(experts, slots=8) as (store, engine):
        issued = {}
        for turn in range(400):
            layer, wanted = turn % 6, [(turn * 3 + n) % 40 for n in range(4)]
            right = turn < 40 or turn >= 150
            guess = wanted if right else [(expert + 20) % 40 for expert in wanted]
            store.prefetch(layer, guess, predictor="moody")
            run_dry(engine)
            acquire(store, engine, layer, wanted)
            if turn in (110, 149, 360, 399):
                issued[turn] = row(store, "moody")["issued"]
            if turn == 149:
                assert store.describe()["speculation"]["used"] == "stopped"
        assert store.describe()["speculation"]["used"] == "full"
        assert issued[149] - issued[110] < 20 and issued[399] - issued[360] > 100


def test_where_nothing_is_declined_no_predictor_is_called_stopped(experts):
    with scripted(experts, slots=240, speculation="always") as (store, engine):
        for turn in range(30):
            store.prefetch(turn % 6, [10 + (turn + n) % 30 for n in range(8)], predictor="wrong")
            run_dry(engine)
            acquire(store, engine, turn % 6, [turn % 10])
        told = store.describe()["speculation"]
        wrong = row(store, "wrong")
        assert told["used"] == wrong["state"] == "full" and wrong["declined"] == 0
