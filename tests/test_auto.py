"""`policy="auto"`: when it changes the policy and when it does not, and what the store says of it; `store.mrc()`."""

import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from rig import Experts, layers_of, until
from test_ghost import lru_curve, simulate, tokens

import fastcache
from fastcache_ext.policy import NAMES
from fastcache_ext.watch import Watch, check, report

LAYERS, EXPERTS, SLOTS = 8, 32, 25
WINDOW, LEADS, REST = 1024, 3, 6  # sampled requests; windows; windows


def moody(count, seed=3):
    """Traffic that stays with two layers for twenty tokens, among ten experts that change by two a token: lru's."""
    rng = np.random.default_rng(seed)
    asked = []
    for token in range(count):
        first = 2 * (token // 20 % (LAYERS // 2))
        for turn in range(LAYERS):
            asked.append((2 * token + rng.permutation(10)[:2]) % EXPERTS + EXPERTS * (first + turn % 2))
    return np.concatenate(asked).astype(np.int32)


def scattered(count, seed=4):
    """Traffic whose token cycle does not fit, without a mood: lru hits nothing, what counts picks does."""
    return tokens(LAYERS, EXPERTS, 4, count, seed, stay=0.0)


def choosing(*traffic, **more):
    watch = Watch([EXPERTS] * LAYERS, bytes(LAYERS * EXPERTS), [SLOTS], choosing=True, **more)
    for keys in traffic:
        watch.hear(keys)
    assert watch.check() == 0
    return watch


def test_it_follows_traffic_that_changes_its_character():
    first, second, third = moody(2000), scattered(1000), moody(2000, seed=5)
    watch = choosing(first, second, third)
    ends = np.cumsum([len(first), len(second), len(third)])
    at = [(int(np.searchsorted(ends, heard)), policy) for heard, policy in watch.switches]
    assert at[0] == (0, "lru")
    assert [policy for phase, policy in at if phase == 1][-1] in ("next_use", "lfu")
    assert at[-1] == (2, "lru")
    assert len(at) <= 4, watch.switches


def test_a_lead_has_to_last_some_windows_and_the_last_switch_to_be_some_windows_ago():
    keys = moody(2000)
    first = choosing(keys).switches[0][0]
    assert REST * WINDOW <= first < (REST + LEADS + 2) * WINDOW  # from the start on; the store opens with next_use
    back_and_forth = [part for i in range(20) for part in (moody(60, 10 + i), scattered(30, 40 + i))]
    switches = choosing(*back_and_forth).switches
    for (before, _), (after, _) in itertools.pairwise(switches):
        assert after - before >= REST * WINDOW


def test_nothing_is_changed_for_less_than_a_margin():
    everything_fits = Watch([EXPERTS] * LAYERS, bytes(LAYERS * EXPERTS), [250], choosing=True)
    everything_fits.hear(moody(2000))
    assert everything_fits.switches == []
    alone = choosing(moody(2000), policies=("next_use",))
    assert alone.switches == []


def test_ghosts_that_only_watch_change_nothing():
    watch = Watch([EXPERTS] * LAYERS, bytes(LAYERS * EXPERTS), [SLOTS], choosing=False)
    watch.hear(moody(2000))
    report = watch.report()
    assert watch.switches == [] and report["used"] == "next_use"
    assert report["rates"]["lru"] > report["rates"]["next_use"] + 0.02


def serve(store, *traffic):
    """Ask in batches; every 24 tokens, before the worker would, the ghosts serve too. Returns the hits of each part."""
    hits = []
    for keys in traffic:
        top_k = 2 if len(hits) % 2 == 0 else 4
        before = store.stats().hits
        for token, row in enumerate(keys.reshape(-1, LAYERS, top_k)):
            for batch in row.tolist():
                store.acquire_many(batch[0] // EXPERTS, [key % EXPERTS for key in batch]).release()
            if token % 24 == 23:
                store.mrc()
        hits.append(store.stats().hits - before)
    assert store._check() == 0 and check(store) == 0
    return hits


def open_store(disk, **arguments):
    experts = Experts(disk, layers_of(LAYERS, EXPERTS, 4096), gap=0, top_k=2)
    return fastcache.open(experts.source, **({"budget": SLOTS * 4096, "mlock": "off", "engine": "pread"} | arguments))


def test_a_live_store_follows_its_traffic_and_hits_more_than_with_one_policy(disk):
    traffic = [moody(1400), scattered(500), moody(1400, seed=5)]
    with open_store(disk, policy="auto") as store:
        assert store.describe()["slots"] == SLOTS
        hits = serve(store, *traffic)
        entry, curve = store.describe()["policy"], store.mrc()
        assert curve.lost == 0 and curve.requests == store.stats().requests == sum(map(len, traffic))
        assert entry["requested"] == "auto" and entry["used"] == "lru" == curve.used
        assert entry["switches"] == curve.switches >= 3
        assert all(name in entry["reason"] for name in NAMES) and "sampled requests" in entry["reason"]
        assert "lru" in str(store.describe())
    fixed = {policy: simulate(np.concatenate(traffic), LAYERS, EXPERTS, SLOTS, policy) for policy in NAMES}
    assert sum(hits) > max(fixed.values()), (hits, fixed)


def test_ghosts_beside_a_fixed_policy_change_nothing(disk):
    with open_store(disk, policy="next_use", ghosts=True) as store:
        hits = serve(store, moody(700))
        assert store.describe()["policy"] == {"requested": "next_use", "used": "next_use", "reason": ""}
        curve = store.mrc()
    assert curve.switches == 0 and curve.policies["lru"] > curve.policies["next_use"] + 0.02
    assert hits == [simulate(moody(700), LAYERS, EXPERTS, SLOTS, "next_use")]


def test_the_worker_serves_the_ghosts_without_being_asked(disk):
    keys = scattered(100)
    with open_store(disk, policy="auto") as store:
        for row in keys.reshape(-1, LAYERS, 4):
            for layer, experts in enumerate(row.tolist()):
                store.acquire_many(layer, [expert - layer * EXPERTS for expert in experts]).release()
        until(lambda: "ghosts after" in store.describe()["policy"]["reason"], "the worker's turn")
        sampled = int(store.describe()["policy"]["reason"].split("after ")[1].split()[0])
        assert 0 < sampled < len(keys)
        assert store.mrc().sampled == len(keys) - 4  # all but the visit that may still go on


def test_auto_starts_with_next_use_and_says_so(disk):
    with open_store(disk, policy="auto") as store:
        entry = store.describe()["policy"]
        assert (entry["requested"], entry["used"], entry["switches"]) == ("auto", "next_use", 0)
        assert entry["reason"] == "no sampled request yet"
        assert store.mrc().hit_rates == (0.0,) * 64


def test_the_live_curve_is_that_of_lru_at_every_size(disk):
    keys = moody(300)
    with open_store(disk, ghosts=True) as store:
        serve(store, keys)
        store.acquire(0, 0).release()  # the last visit is complete
        curve = store.mrc()
    assert curve.rate == 1.0 and curve.sampled == len(keys) and curve.requests == len(keys) + 1
    assert curve.slots[-1] == LAYERS * EXPERTS and curve.nbytes == tuple(4096 * n for n in curve.slots)
    assert curve.hit_rates == pytest.approx(lru_curve(keys, curve.slots), abs=1e-9)
    assert curve.at(curve.nbytes[10]) == curve.hit_rates[10] and curve.at(100) == 0.0
    assert curve.policies.keys() == NAMES.keys()
    assert json.loads(json.dumps(curve.to_dict()))["curve"][-1]["slots"] == LAYERS * EXPERTS
    assert store.mrc() == curve  # after close


def test_prefetches_and_pins_are_no_demands_of_the_ghosts(disk):
    with open_store(disk, ghosts=True) as store:
        store.prefetch(0, range(8)).wait()
        store.pin(1, [3])
        assert store.mrc().requests == 0
        store.acquire_many(0, [1, 2, 2, 3]).release()
        assert store.mrc().requests == 3 == store.stats().requests


def test_without_ghosts_the_curve_is_refused_and_the_error_says_how_to_get_it(disk, monkeypatch):
    with open_store(disk) as store, pytest.raises(fastcache.FeatureUnavailable, match="ghosts=True.*FASTCACHE_GHOSTS"):
        store.mrc()
    monkeypatch.setenv("FASTCACHE_GHOSTS", "1")
    with open_store(disk) as store:
        assert store.mrc().used == "next_use"
    with open_store(disk, ghosts=False) as store, pytest.raises(fastcache.FeatureUnavailable):
        store.mrc()
    monkeypatch.setenv("FASTCACHE_GHOSTS", "yes")
    with pytest.raises(ValueError, match="FASTCACHE_GHOSTS"):
        open_store(disk)
    monkeypatch.setenv("FASTCACHE_GHOSTS", "0")
    monkeypatch.setenv("FASTCACHE_POLICY", "auto")
    with open_store(disk) as store:
        assert store.mrc().used == "next_use"


def test_a_store_without_slots_has_nothing_to_sample(disk):
    with open_store(disk, policy="auto", budget=0) as store:
        assert store.describe()["policy"]["used"] == "next_use"
        store.acquire(0, 0).release()
        assert store.mrc().policies.get("next_use", 0.0) == 0.0


def test_a_burst_of_hits_is_heard_whole(disk):
    """A prefill's unions, all resident: faster than ghosts are served, and less than their ring holds."""
    experts = Experts(disk, layers_of(8, 128, 4096), gap=0, top_k=2)
    with fastcache.open(experts.source, "all", mlock="off", engine="pread", ghosts=True) as store:
        for layer in range(8):
            store.acquire_many(layer, range(128)).release()
        store.mrc()
        for _ in range(3):
            for layer in range(8):
                store.acquire_many(layer, range(128)).release()
        assert store.mrc().lost == 0


def test_its_thread_sleeps_while_nothing_is_asked_for_and_serves_what_comes_after(disk):
    def naps():
        return sum(
            int(line.split()[1])
            for task in Path("/proc/self/task").iterdir()
            if (task / "comm").read_text().startswith("fastcache-work")
            for line in (task / "status").read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )

    def asleep():
        before = naps()
        time.sleep(0.05)  # a dozen looks of one that is awake
        return naps() == before > 0

    with open_store(disk, ghosts=True) as store:
        for _ in range(3):
            served = report(store)["sampled"]
            for expert in [*range(4)] * 3:
                store.acquire(0, expert).release()
            until(lambda served=served: report(store)["sampled"] >= served + 8, "all visits but the open one")
            until(asleep, "the end of its looks")


def test_a_forked_child_is_refused(disk):
    with open_store(disk, ghosts=True) as store:
        pid = os.fork()
        if pid == 0:
            try:
                store.mrc()
            except fastcache.ForkedStore:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
