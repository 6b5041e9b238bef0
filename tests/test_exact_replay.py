"""A recorded run replayed gives the live counters to the digit: any policy, engine, mix of calls and threads."""

import contextlib
import dataclasses
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rig import Experts, assert_identities, layers_of, run_dry, scripted, settings

import fastcache
from fastcache import errors
from fastcache.store import ExpertStore
from fastcache.traces import replay_exact
from fastcache.traces.format import RECORD, open_records, pack_header
from fastcache_ext.policy import NAMES as POLICIES
from fastcache_ext.replay import Replay
from fastcache_ext.watch import switch

LAYERS, EXPERTS, TOP_K = 4, 16, 4


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(LAYERS, EXPERTS, 3000), parts=2, top_k=TOP_K)


@pytest.fixture(scope="module")
def mixed(disk):
    """Experts in three size classes."""
    sizes = {(layer, e): (3000, 9000, 20000)[e % 3] for layer in range(LAYERS) for e in range(EXPERTS)}
    return Experts(disk, sizes, parts=2, top_k=TOP_K)


def held_to(store, path):
    """The replay of `path` gives what `store` counted until now; returns the replay."""
    live = store.stats(layers=True, phases=True)
    again = replay_exact(path)
    assert not again.divergence and not again.differences and again.same, again
    for name, value in again.counters.items():
        family, _, member = name.partition(".")
        assert value == (getattr(live, family)[member] if member else getattr(live, family)), name
    for layer, counts in again.layers.items():
        assert {name: live.layers[layer][name] for name in counts} == counts
    for phase, counts in again.phases.items():
        assert {name: getattr(live.phases[phase], name) for name in counts if "." not in name} == {
            name: n for name, n in counts.items() if "." not in name
        }
    return again


def act(store, rng, kept, calls):
    """One thread's random calls; `kept` holds leases, which pile up and go at random."""
    for _ in range(calls):
        layer = int(rng.integers(LAYERS))
        picks = rng.choice(EXPERTS, int(rng.integers(1, TOP_K + 1)), replace=False).tolist()
        what = rng.random()
        try:
            if what < 0.3:
                kept += store.acquire_many(layer, picks)
            elif what < 0.5:
                kept.append(store[layer, picks[0]])
            elif what < 0.6:
                ready = store.as_ready(layer, picks)
                for _, (_, lease) in zip(range(int(rng.integers(0, 4))), ready, strict=False):
                    kept.append(lease)
                ready.close()
            elif what < 0.75:
                handle = store.prefetch(layer, picks)
                if rng.random() < 0.3:
                    handle.cancel()
            elif what < 0.8:
                store.pin(layer, picks[0])
                store.unpin(layer, range(EXPERTS))
            elif what < 0.85:
                store.mark_token(int(rng.integers(0, 3)))
            elif what < 0.9:
                store.acquire_many(layer, picks, timeout=0).release()
            elif what < 0.95:
                with store.phase(("prefill", "decode")[int(rng.integers(2))]):
                    store.acquire_many(layer, picks).release()
            elif what < 0.97:
                store.warm([(layer, expert) for expert in picks])
            else:
                store.unpin(layer, range(EXPERTS))
        except (errors.BatchFailed, errors.ReadTimeout, errors.OverflowLimit, errors.BudgetTooSmall, OSError):
            pass
        while len(kept) > int(rng.integers(4)):
            kept.pop(int(rng.integers(len(kept))))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_thread_on_every_engine(experts, engine, policy, tmp_path):
    rng = np.random.default_rng(1)
    with fastcache.open(experts.source, budget=10 * 4096, policy=policy, engine=engine) as store:
        with store.record(tmp_path / "trace"):
            for token in range(60):
                store.mark_token()
                for layer in range(LAYERS):
                    if token % 3 == 0:
                        store.prefetch(layer, rng.choice(EXPERTS, 2, replace=False).tolist()).wait()
                    store.acquire_many(layer, rng.choice(EXPERTS, TOP_K, replace=False).tolist()).release()
        again = held_to(store, tmp_path / "trace")
    assert again.policy == policy and again.ended == "stopped" and again.counters["evictions"] > 100


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("classes", ["one class", "three classes"])
def test_many_threads_with_leases_held_at_random(experts, mixed, engine, policy, classes, tmp_path):
    source = experts.source if classes == "one class" else mixed.source
    happened = ("evictions", "pass_throughs", "joins", "prefetch_loads", "hits", "wasted")
    totals = np.zeros(len(happened), int)
    for round in range(3):
        budget = (TOP_K + 1) * 4096 if classes == "one class" else 180_000
        store = fastcache.open(source, budget=budget, policy=policy, engine=engine, overflow="300KiB")
        with store, store.record(tmp_path / "trace", overwrite=True) as rec:
            kept = [[] for _ in range(4)]
            with ThreadPoolExecutor(4) as pool:
                rngs = [np.random.default_rng((round, i)) for i in range(4)]
                for done in [pool.submit(act, store, rngs[i], kept[i], 150) for i in range(4)]:
                    done.result()
            rec.stop()
            assert rec.exact
            again = replay_exact(tmp_path / "trace")
            assert again.same, again
            totals += [again.counters[name] for name in happened]
            kept.clear()
        assert_identities(store)
    assert (totals > 0).all(), dict(zip(happened, totals.tolist(), strict=True))


def test_policies_that_change_while_the_store_serves(experts, engine, tmp_path):
    names = list(POLICIES)
    for round in range(3):
        store = fastcache.open(experts.source, budget=7 * 4096, policy="auto", engine=engine)
        with store, store.record(tmp_path / "trace", overwrite=True) as rec:
            kept = [[] for _ in range(3)]
            rng = np.random.default_rng(round)
            with ThreadPoolExecutor(3) as pool:
                calls = [pool.submit(act, store, np.random.default_rng((round, i)), kept[i], 150) for i in range(3)]
                switches = 0
                while not all(call.done() for call in calls):
                    switch(store, names[int(rng.integers(len(names)))])
                    switches += 1
                for call in calls:
                    call.result()
            rec.stop()
            again = replay_exact(tmp_path / "trace")
            assert again.same and again.policy == "next_use" and switches > 5, again
            assert (open_records(tmp_path / "trace")[1]["kind"] == 32).sum() >= switches
            kept.clear()


def test_reads_that_fail_are_short_are_late_or_are_cancelled(experts, tmp_path):
    """A scripted engine lands, cuts, fails and holds back reads at random while several threads ask."""
    failed = cancelled = 0
    for round in range(6):
        policy = list(POLICIES)[round % len(POLICIES)]
        rng = np.random.default_rng(round)
        path = tmp_path / f"trace-{round}"
        with scripted(experts, slots=TOP_K + 1, policy=policy) as (store, engine):
            rec = store.record(path)
            kept = [[] for _ in range(3)]
            with ThreadPoolExecutor(3) as pool:
                calls = [pool.submit(act, store, np.random.default_rng((round, i)), kept[i], 80) for i in range(3)]
                while not all(call.done() for call in calls):
                    engine.take(room=8, wait=0.002)
                    for op in rng.permutation(engine.in_hand).tolist():
                        fate = rng.random()
                        if fate < 0.5:
                            engine.fill(op)
                        elif fate < 0.6:
                            engine.settle(op, -5)
                        elif fate < 0.7:
                            engine.fill(op, 512)
                for call in calls:
                    call.result()
            run_dry(engine)
            rec.stop()
            again = held_to(store, path)
            failed += again.counters["demand_failures"] + again.counters["prefetch_failures"]
            cancelled += again.counters["prefetch_cancelled"]
            assert again.counters["errors.read_failed"] > 0 and again.counters["evictions"] > 0
            kept.clear()
    assert failed > 0 and cancelled > 0


class InMemory:
    """A Python source, some of whose reads raise."""

    def __init__(self):
        self.calls = 0

    def keys(self):
        return [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]

    def expert_nbytes(self, key):
        return 3000 + 100 * (key[1] % 2)

    def read_expert(self, key):
        self.calls += 1
        if self.calls % 7 == 0:
            raise OSError(5, "not now")
        return bytes(self.expert_nbytes(key))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_python_source(policy, tmp_path):
    with ExpertStore(InMemory(), settings(budget=6 * 4096, policy=policy), "python", None) as store:
        rec = store.record(tmp_path / "trace")
        kept = [[] for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(act, store, np.random.default_rng(i), kept[i], 100) for i in range(3)]:
                done.result()
        rec.stop()
        again = replay_exact(tmp_path / "trace")
        assert again.same and again.counters["errors.source"] > 0, again
        kept.clear()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recording_that_is_stopped_while_others_go_on(experts, engine, policy, tmp_path):
    with fastcache.open(experts.source, budget=8 * 4096, policy=policy, engine=engine) as store:
        rec = store.record(tmp_path / "trace")
        kept = [[] for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(act, store, np.random.default_rng(i), kept[i], 200) for i in range(3)]
            while rec.records < 1000 and not all(call.done() for call in calls):
                pass
            rec.stop()
            for call in calls:
                call.result()
        again = replay_exact(tmp_path / "trace")
        assert again.same and 0 < again.counters["requests"] < store.stats().requests, again
        kept.clear()


def test_a_recording_that_closing_the_store_ended_while_reads_were_under_way(experts, tmp_path):
    with scripted(experts, slots=8, policy="next_use") as (store, engine):
        rec = store.record(tmp_path / "trace")
        guess = store.prefetch(0, [1, 2, 3])
        landed = engine.take()[0].id
        while not engine.fill(landed):
            pass
        waiting = ThreadPoolExecutor(1).submit(store.acquire_many, 1, [4, 5])
        while store.stats().misses < 2:
            pass
        held_before = store.stats()
        rec.stop()
        again = held_to(store, tmp_path / "trace")
        assert again.counters["misses_in_flight"] == 2 and again.counters["prefetch_in_flight"] > 0
        assert held_before.misses_in_flight == 2
        run_dry(engine)
        waiting.result().release()
        assert guess.wait()


def test_a_full_file_replays_to_the_counters_of_the_moment_it_was_full(experts, tmp_path):
    with fastcache.open(experts.source, budget=8 * 4096, policy="next_use", engine="pread") as store:
        rec = store.record(tmp_path / "trace", max_bytes="64KiB")
        rng, kept = np.random.default_rng(3), []
        while not rec.ended:
            act(store, rng, kept, 1)
        act(store, rng, kept, 20)
        again = replay_exact(tmp_path / "trace")
        assert again.same and again.ended == "max_bytes" and again.counters["requests"] < store.stats().requests


@pytest.fixture
def trace(experts, tmp_path):
    """A recording of one thread's calls."""
    store = fastcache.open(experts.source, budget=6 * 4096, policy="lru", engine="pread")
    with store, store.record(tmp_path / "trace"):
        act(store, np.random.default_rng(4), [], 100)
        act(store, np.random.default_rng(5), [], 100)
    return tmp_path / "trace"


def test_a_recording_that_began_after_requests_is_refused(experts, tmp_path):
    with fastcache.open(experts.source, budget=6 * 4096, engine="pread") as store:
        store[0, 0].release()
        with store.record(tmp_path / "trace"):
            store[0, 1].release()
    with pytest.raises(errors.TraceError, match="began after requests, or records were lost"):
        replay_exact(tmp_path / "trace")


def test_a_trace_that_no_store_recorded_is_refused(tmp_path, trace):
    from fastcache.traces import read_trace, write_trace

    write_trace(read_trace(trace), tmp_path / "plain", run={})
    with pytest.raises(errors.TraceError, match="not a recording of a store: `run` has no classes, counters"):
        replay_exact(tmp_path / "plain")


def test_another_policy_than_the_recorded_one_diverges_and_says_where(trace):
    trace.write_bytes(trace.read_bytes().replace(b'"policy": "lru"', b'"policy": "lfu"'))
    again = replay_exact(trace)
    assert not again.same and again.divergence.startswith("record ")
    assert "recorded" in again.divergence and "replayed: " in again.divergence


@pytest.mark.parametrize(("kind", "field"), [(17, "value"), (3, "flags"), (18, "value"), (16, "value"), (2, "value")])
def test_every_changed_record_is_found(trace, kind, field):
    _, records = open_records(trace)
    start = trace.stat().st_size - 8 * len(records)
    records = np.array(records)
    changed = np.flatnonzero(records["kind"] == kind)[-3]
    records[field][changed] += 1
    with open(trace, "r+b") as file:
        file.seek(start)
        file.write(records.tobytes())
    with contextlib.suppress(errors.TraceError):  # where a record cannot be at all
        again = replay_exact(trace)
        assert again.divergence and not again.same


def test_a_counter_that_differs_is_named(trace):
    header, records = open_records(trace)
    index = header.run["counters"].index("hits")
    at = np.flatnonzero((records["kind"] == 28) & (records["aux"] == index) & (records["flags"] == 0))[0]
    with open(trace, "r+b") as file:
        file.seek(trace.stat().st_size - 8 * (len(records) - int(at)) + 4)
        file.write((int(records["value"][at]) + 1).to_bytes(4, "little"))
    again = replay_exact(trace)
    assert not again.same and again.differences == {"hits": (again.counters["hits"] + 1, again.counters["hits"])}


def test_a_file_without_its_end_replays_as_far_as_it_goes(trace):
    _, records = open_records(trace)
    whole = replay_exact(trace)
    kept = int(np.flatnonzero(records["kind"] == 2)[-1])
    with open(trace, "r+b") as file:
        file.truncate(trace.stat().st_size - 8 * (len(records) - kept))
    again = replay_exact(trace)
    assert again.records == kept and not again.divergence and not again.same and again.ended == ""
    assert 0 < again.counters["requests"] < whole.counters["requests"] and not again.live


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", [-3, 5]),
        ("slots", [10**6]),
        ("slots", [2**40]),
        ("classes", [[0, -1]]),
        ("classes", [["x", 1]]),
        ("counters", 3),
        ("counters", ["requests"]),
        ("policies", [[]]),
        ("policy", {}),
    ],
)
def test_a_header_that_no_store_wrote_is_refused(trace, name, value):
    header, records = open_records(trace)
    run = dict(header.run) | {name: value}
    trace.write_bytes(pack_header(dataclasses.replace(header, run=run)) + np.array(records).tobytes())
    with pytest.raises(errors.TraceError):
        replay_exact(trace)


def test_a_signal_ends_a_long_replay():
    def stop(*_):
        raise KeyboardInterrupt

    records = np.zeros(20_000_000, RECORD)
    records["kind"] = 31  # timeouts, which are counted
    replay = Replay([4], bytes(4), [2], [8] * 4, "lru", ["lru"], False)
    was = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            replay.run(records)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)
    assert sum(map(sum, replay.rows())) < len(records)


def test_noise_is_refused_or_diverges_and_harms_nothing(trace):
    """Records changed at random: never a crash, and never the same counters unless nothing that matters changed."""
    _, records = open_records(trace)
    start, original = trace.stat().st_size - 8 * len(records), np.array(records)
    rng, found = np.random.default_rng(6), 0
    for _ in range(300):
        records = original.copy()
        raw = records.view(np.uint8)
        for at in rng.integers(len(raw), size=int(rng.integers(1, 5))).tolist():
            raw[at] = rng.integers(256)
        with open(trace, "r+b") as file:
            file.seek(start)
            file.write(records.tobytes())
        try:
            found += not replay_exact(trace).same
        except errors.TraceError:
            found += 1
    assert found > 150
