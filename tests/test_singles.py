"""SINGLE, a hit of one expert in one record: it says what a BATCH of one and its REQUEST say, to every reader."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from rig import Experts, layers_of
from test_exact_replay import EXPERTS, LAYERS, POLICIES, act, held_to
from test_recording import counters_of, recorded

import fastcache
from fastcache import recording
from fastcache.errors import TraceError
from fastcache.traces import read_trace, replay_exact
from fastcache.traces.format import (
    BATCH,
    FIRST_EVENT,
    HIT,
    MISS,
    REQUEST,
    SINGLE,
    open_records,
    pack_header,
    unfold,
)  # fmt: skip

GAP = 27
EARLIER = Path(__file__).parent / "data" / "before_single.fctrace"


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(LAYERS, EXPERTS, 3000), parts=2, top_k=4)


@pytest.fixture
def store(experts):
    with fastcache.open(experts.source, budget=10 * 4096, policy="lru", engine="pread", name="recorded") as opened:
        yield opened


def test_a_hit_of_one_expert_is_one_record_and_any_other_batch_of_one_is_two(store, tmp_path):
    with store.record(tmp_path / "trace") as rec:
        store[0, 1].release()
        kept = store[0, 1]
        store[0, 1].release()
        kept.release()
        store.acquire_many(0, [1]).release()
        store[0, 1].release()
    of = recorded(tmp_path / "trace")
    assert of[of["kind"] < FIRST_EVENT].tolist() == [
        *[(BATCH, 0, 0, 1), (REQUEST, MISS, 0, 1)],
        *[(SINGLE, 0, 0, 1), (SINGLE, 0, 1, 1)],  # the second on what was held
        *[(BATCH, 0, 0, 1), (REQUEST, HIT, 0, 1)],
        (SINGLE, 0, 0, 1),
    ]
    assert rec.records == len(of)
    trace = read_trace(tmp_path / "trace")
    assert trace.keys.tolist() == [1] * 5 and trace.batches.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_hit_that_finds_no_room_is_one_record_lost(store, tmp_path):
    header = recording.header_of(store, store.name, store._inventory, store._payload, store._sizing, store._settings)
    store[0, 1].release()
    hits = 0
    with recording.record(store, header, tmp_path / "trace", ring=32) as rec:
        while not (rec.dropped and rec.records > 500) and hits < 10_000_000:
            for _ in range(200):
                store[0, 1].release()
            hits += 200
    records = recorded(tmp_path / "trace")
    lost = records["value"][records["kind"] == GAP]
    assert set(records["kind"].tolist()) == {SINGLE, GAP} and lost.min() > 0
    last = int(records["kind"][-1] == GAP)  # of what was lost up to the end: written with the trailer
    assert lost.sum() == rec.dropped > 0 and rec.records == len(records) - last
    assert (records["kind"] == SINGLE).sum() + rec.dropped == hits == counters_of(tmp_path / "trace")["hits"]
    assert read_trace(tmp_path / "trace").requests == hits - rec.dropped and not rec.exact


def test_a_recording_of_a_version_without_singles_is_read():
    trace = read_trace(EARLIER)
    assert trace.name == "before SINGLE" and trace.layers == ((0, 6), (1, 6)) and trace.expert_nbytes == 3000
    assert trace.keys.tolist() == [0, 0, 1, 2, 6, 6, 7, 8, 0, 0, 2, 3, 6, 6, 8, 9, 0, 0, 3, 4, 6, 6, 9, 10]
    assert np.diff(trace.batches).tolist() == [1, 1, 2] * 6 and trace.token.tolist() == np.repeat(range(3), 6).tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_of_one_expert_on_held_and_free_ones_from_several_threads(experts, engine, policy, tmp_path):
    def ask(seed):
        rng, kept = np.random.default_rng(seed), []
        for _ in range(400):
            kept.append(store[int(rng.integers(LAYERS)), int(rng.geometric(0.4)) % EXPERTS])
            while len(kept) > int(rng.integers(1, 4)):
                kept.pop(int(rng.integers(len(kept)))).release()

    with fastcache.open(experts.source, budget=12 * 4096, policy=policy, engine=engine) as store:
        with store.record(tmp_path / "trace"), ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(ask, seed) for seed in range(3)]:
                done.result()
        again = held_to(store, tmp_path / "trace")
    records = open_records(tmp_path / "trace")[1]
    singles = records[records["kind"] == SINGLE]
    assert again.counters["requests"] == 1200 and again.counters["misses"] > 50 and len(singles) > 300
    assert {0, 1} <= set(singles["aux"].tolist())


def test_a_single_counts_as_the_two_records_of_earlier_versions_do(experts, tmp_path):
    store = fastcache.open(experts.source, budget=12 * 4096, policy="next_use", engine="pread")
    with store, store.record(tmp_path / "new"):
        act(store, np.random.default_rng(7), [], 400)
    header, records = open_records(tmp_path / "new")
    earlier, _ = unfold(np.array(records), np.arange(len(records)))
    assert len(earlier) == len(records) + (records["kind"] == SINGLE).sum() > len(records)
    assert not (earlier["kind"] == SINGLE).any()
    (tmp_path / "earlier").write_bytes(pack_header(header) + earlier.tobytes())
    new, old = replay_exact(tmp_path / "new"), replay_exact(tmp_path / "earlier")
    assert new.same and old.same and old.records > new.records
    assert (new.counters, new.phases, new.layers) == (old.counters, old.phases, old.layers)


def test_a_recording_of_a_version_without_singles_still_replays_to_its_counters():
    header, records = open_records(EARLIER)
    if header.run["counters"] != list(recording.COUNTERS):
        pytest.skip("there are other counters by now, which the file does not have")
    again = replay_exact(EARLIER)
    assert again.same and again.ended == "stopped" and not (records["kind"] == SINGLE).any()
    assert (again.counters["hits"], again.counters["misses"], again.counters["evictions"]) == (6, 18, 14)


@pytest.fixture
def two(store, tmp_path):
    """A recording of a miss and a hit on it: its header and records, and where the SINGLE is."""
    with store.record(tmp_path / "two"):
        store[0, 1].release()
        store[0, 1].release()
    header, records = open_records(tmp_path / "two")
    (at,) = np.flatnonzero(records["kind"] == SINGLE).tolist()
    return header, np.array(records), at


def replayed(path, header, records):
    path.write_bytes(pack_header(header) + records.tobytes())
    return replay_exact(path)


def test_a_single_of_an_expert_that_is_not_there_is_no_hit_and_diverges(two, tmp_path):
    header, records, at = two
    records["value"][at] = 2
    assert replayed(tmp_path / "changed", header, records).divergence == (
        f"record {at}: recorded SINGLE expert (0, 2) (flags 0, aux 0); replayed: BATCH 1 (flags 0, aux 0)"
    )


def test_a_single_with_flags_diverges_and_on_what_was_held_counts_so(two, tmp_path):
    header, records, at = two
    records["aux"][at] = 1
    assert replayed(tmp_path / "held", header, records).differences == {"hits_on_held": (0, 1)}
    records["flags"][at] = 1
    assert replayed(tmp_path / "flags", header, records).divergence.startswith(f"record {at}: recorded SINGLE")


def test_a_single_that_cannot_be_is_refused(two, tmp_path):
    header, records, at = two
    records["value"][at] = header.pool
    with pytest.raises(TraceError, match=rf"record {at}: SINGLE {header.pool} .* cannot be here"):
        replayed(tmp_path / "key", header, records)
    records[at - 1] = (BATCH, 0, 0, 1)  # which is followed by no request
    with pytest.raises(TraceError, match=rf"record {at - 1}: BATCH 1 .* cannot be here"):
        replayed(tmp_path / "inside", header, records)
