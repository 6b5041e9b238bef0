"""Recordings: what the file says, how a recording ends, what it refuses. Exact replay has a file of its own."""

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rig import Experts, TooSlow, layers_of, settings, until

import fastcache
from fastcache import ExpertKey, errors, moe, recording
from fastcache.cli import main
from fastcache.store import ExpertStore
from fastcache.traces import read_trace
from fastcache.traces.format import BATCH, FIRST_EVENT, HIT, MISS, REQUEST, SINGLE, TOKEN, open_records

LANDED, EVICTED, GAP, COUNTER, END = 16, 17, 27, 28, 29
STOPPED, CLOSED, FULL, ERROR = 1, 2, 3, 4
LAYERS, EXPERTS, NBYTES = 4, 16, 3000


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(LAYERS, EXPERTS, NBYTES), parts=2, top_k=4)


@pytest.fixture
def store(experts):
    with fastcache.open(experts.source, budget=10 * 4096, policy="lru", engine="pread", name="recorded") as opened:
        yield opened


def tokens(store, count, rng, mark=True):
    """Go through all layers `count` times, four experts each."""
    for _ in range(count):
        if mark:
            store.mark_token()
        for layer in store.layers:
            store.acquire_many(layer, rng.choice(EXPERTS, 4, replace=False).tolist()).release()


def counters_of(path):
    """Return {name: value} of the counters at the end of a trace, those of all phases added."""
    header, records = open_records(path)
    values = dict.fromkeys(header.run["counters"], 0)
    for row in records[records["kind"] == COUNTER]:
        value = int(row["value"])
        values[header.run["counters"][row["aux"]]] += value << 32 if row["flags"] & 1 else value & 0xFFFFFFFF
    return values


def live(store):
    """Return what the counters of the compiled half say, by the names of a trace."""
    every = store._counters()[0]
    named = {f"errors.{name}": value for name, value in every["errors"].items()}
    named |= {f"demand_wait_buckets.{i}": value for i, value in enumerate(every["demand_wait_buckets"])}
    return {name: every[name] for name in recording.NAMES} | named


def recorded(path):
    """Return the records before the counters."""
    records = open_records(path)[1]
    return records[(records["kind"] != COUNTER) & (records["kind"] != END)]


def test_a_trace_says_what_was_asked_for_and_what_came_of_it(store, tmp_path):
    rec = store.record(tmp_path / "trace")
    store.mark_token(3)
    store.acquire_many(0, [1, 2]).release()
    store.mark_token()
    store[0, 2].release()
    store.prefetch(1, [0]).wait()
    store.acquire_many(1, [0, 1]).release()
    rec.stop()
    header, records = open_records(tmp_path / "trace")
    assert header.model == "recorded" and header.top_k == 4 and header.expert_nbytes == NBYTES
    assert header.layers == tuple((layer, EXPERTS) for layer in range(LAYERS))
    assert header.run["policy"] == "lru" and header.run["engine"] == "pread" and header.run["slots"] == [10]
    assert header.run["budget_bytes"] == 40960 and header.run["classes"] == [[0, LAYERS * EXPERTS]]
    assert header.run["exact"] is True and rec.exact
    plain = records[records["kind"] < FIRST_EVENT].tolist()
    key = EXPERTS  # of layer 1, expert 0
    assert plain == [
        (TOKEN, 0, 0, 0),
        *[(BATCH, 0, 0, 2), (REQUEST, MISS, 0, 1), (REQUEST, MISS, 0, 2)],
        (TOKEN, 0, 0, 3),
        (SINGLE, 0, 0, 2),
        *[(BATCH, 1, 0, 1), (REQUEST, MISS, 0, key)],
        *[(BATCH, 0, 0, 2), (REQUEST, HIT, 0, key), (REQUEST, MISS, 0, key + 1)],
    ]
    assert sorted(records["value"][records["kind"] == LANDED].tolist()) == [1, 2, key, key + 1]
    assert records[-1].tolist() == (END, STOPPED, 0, 0)
    trace = read_trace(tmp_path / "trace")
    assert trace.token.tolist() == [0, 3, 3] and trace.keys.tolist() == [1, 2, 2, key, key + 1]


def test_the_batches_of_a_trace_have_the_phase_in_which_they_were_asked(store, tmp_path):
    store.mark_token()
    with store.phase("prefill"):
        rec = store.record(tmp_path / "trace")  # it begins inside a phase
        store.acquire_many(0, [1, 2]).release()
    store[0, 2].release()
    store.mark_token()
    with store.phase("decode"):
        store[0, 2].release()
        store.mark_token()
        store.acquire_many([ExpertKey(0, 1), ExpertKey(1, 1)]).release()  # of two layers: as it was asked for
    rec.stop()
    trace = read_trace(tmp_path / "trace")
    assert trace.phase.tolist() == [1, 0, 2, 2] and trace.token.tolist() == [-1, -1, 1, 2]
    assert trace.keys.tolist() == [1, 2, 2, 2, 1, EXPERTS + 1]


def test_a_models_own_run_is_recorded_in_its_phases(tmp_path):
    with moe.load(Path(__file__).parent / "data" / "qwen3_moe" / "bf16", budget="1 cycles") as model:
        rec = model.store.record(tmp_path / "trace")
        assert len(list(model.generate([1, 5, 7], max_tokens=4))) == 4
        rec.stop()
        live = {name: stats.requests for name, stats in model.store.stats(phases=True).phases.items()}
    trace = read_trace(tmp_path / "trace")
    asked = np.bincount(np.repeat(trace.phase, np.diff(trace.batches)), minlength=3).tolist()
    assert asked == [0, live["prefill"], live["decode"]] and min(asked[1:]) > 0
    tokens = np.repeat(trace.token, np.diff(trace.batches))
    assert np.unique(tokens[np.repeat(trace.phase, np.diff(trace.batches)) == 1]).tolist() == [0]
    records = recorded(tmp_path / "trace")
    assert records["aux"][records["kind"] == TOKEN].tolist() == [1, 2, 2, 2]


def test_a_number_of_tokens_that_no_record_holds_is_refused_and_an_index_beyond_is_not_known(store, tmp_path):
    for n in (-1, 2**31, 2**70):
        with pytest.raises(ValueError, match=f"n must be from 0 to 2147483647 tokens; got {n}"):
            store.mark_token(n)
    store.record(tmp_path / "trace")
    for n in (2**31 - 1, 1, 2**31 - 1):
        store.mark_token(n)
        store[0, 1].release()
    store.close()
    assert read_trace(tmp_path / "trace").token.tolist() == [0, 2**31 - 1, -1]


def test_the_counters_at_the_end_of_the_file_are_the_live_ones(store, tmp_path):
    with store.record(tmp_path / "trace") as rec:
        tokens(store, 20, np.random.default_rng(1))
    assert counters_of(tmp_path / "trace") == live(store)
    assert rec.records == len(recorded(tmp_path / "trace"))
    assert rec.dropped == 0 and rec.ended == "stopped" and rec.error is None
    assert (tmp_path / "trace").stat().st_size <= rec.max_bytes


def test_hits_touch_no_memory_of_the_recording_for_the_first_time(store, tmp_path):
    def faults():
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    store.acquire_many(0, [1, 2]).release()
    with store.record(tmp_path / "trace") as rec:
        store[0, 1].release()
        before = faults()
        for _ in range(400_000):  # 3 of the ring's 4 MiB
            store[0, 1].release()
        after = faults()
    assert rec.records == 400_001 and rec.dropped == 0
    assert after - before < 100  # pages of 4 KiB would have been 780


def test_nothing_is_recorded_after_stop_and_another_recording_may_follow(store, tmp_path):
    rng = np.random.default_rng(2)
    with store.record(tmp_path / "first") as first:
        tokens(store, 3, rng)
    seen = first.records
    tokens(store, 3, rng)
    with store.record(tmp_path / "second") as second:
        tokens(store, 3, rng)
    first.stop()
    assert first.records == seen == len(recorded(tmp_path / "first"))
    assert first.exact and not second.exact
    assert open_records(tmp_path / "first")[0].run["exact"] is True
    assert open_records(tmp_path / "second")[0].run["exact"] is False
    assert read_trace(tmp_path / "second").requests == 3 * LAYERS * 4


def test_a_store_is_recorded_once_at_a_time_and_the_running_file_is_left_alone(store, tmp_path):
    with store.record(tmp_path / "trace"):
        tokens(store, 2, np.random.default_rng(3))
        with pytest.raises(errors.RecordingError, match="recorded is being recorded already"):
            store.record(tmp_path / "trace")
    assert read_trace(tmp_path / "trace").requests == 2 * LAYERS * 4


def test_a_file_that_is_there_is_replaced_only_when_told(store, tmp_path):
    (tmp_path / "trace").write_bytes(b"months of traffic")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        store.record(tmp_path / "trace")
    assert (tmp_path / "trace").read_bytes() == b"months of traffic"
    with pytest.raises(FileExistsError, match="is no trace, and is not replaced"):
        store.record(tmp_path / "trace", overwrite=True)
    assert (tmp_path / "trace").read_bytes() == b"months of traffic"
    (tmp_path / "trace").write_bytes(b"FCTRACE1 and months of traffic")
    store.record(tmp_path / "trace", overwrite=True).stop()
    assert read_trace(tmp_path / "trace").requests == 0


def test_a_file_that_cannot_be_written_is_an_os_error_at_the_call(store, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.record(tmp_path / "none" / "trace")
    with pytest.raises(IsADirectoryError):
        store.record(tmp_path, overwrite=True)
    with store.record(tmp_path / "trace"):
        pass


def test_a_limit_without_room_is_refused_before_the_file_is_touched(store, tmp_path):
    with pytest.raises(ValueError, match=r"max_bytes is 1000; a recording of this store takes at least \d+"):
        store.record(tmp_path / "trace", max_bytes=1000)
    with pytest.raises(TypeError, match="max_bytes"):
        store.record(tmp_path / "trace", max_bytes=1e9)
    assert not (tmp_path / "trace").exists()


def test_a_full_file_ends_the_recording_with_the_counters_of_that_moment(store, tmp_path):
    rec = store.record(tmp_path / "trace", max_bytes="16KiB")
    rng = np.random.default_rng(4)
    for _ in range(10_000):
        tokens(store, 1, rng)
        if rec.ended:
            break
    tokens(store, 1, rng)
    rec.stop()
    assert rec.ended == "max_bytes" and (tmp_path / "trace").stat().st_size <= 16384
    records = open_records(tmp_path / "trace")[1]
    assert records[-1]["kind"] == END and records[-1]["flags"] == FULL
    counters = counters_of(tmp_path / "trace")
    assert 0 < counters["requests"] < store.stats().requests
    if rec.dropped == 0:  # the thread was in time
        assert rec.exact and counters["requests"] == read_trace(tmp_path / "trace").requests


@pytest.mark.alone("its clock allows for little")
def test_a_file_that_hits_have_filled_has_lost_nothing_as_a_rule(experts, tmp_path):
    """The thread is told that there are few milliseconds left, and ends the recording in time."""
    in_time = []
    with fastcache.open(experts.source, "all", mlock="off", engine="pread") as store:
        for i in range(6):
            rec = store.record(tmp_path / f"trace-{i}", max_bytes="4MiB")
            while not rec.ended:
                store.acquire(0, i)
            rec.stop()
            in_time.append(rec.ended == "max_bytes" and rec.dropped == 0)
    if sum(in_time) < 5:
        raise TooSlow(in_time)


def test_records_that_find_no_room_are_counted_and_marked_and_the_trace_is_not_exact(store, tmp_path):
    header = recording.header_of(store, store.name, store._inventory, store._payload, store._sizing, store._settings)
    rng = np.random.default_rng(5)
    with recording.record(store, header, tmp_path / "trace", ring=32) as rec:
        for _ in range(10_000):
            tokens(store, 10, rng)
            if rec.dropped:
                break
        tokens(store, 50, rng)
        until(lambda: rec.records > 500)
    assert rec.dropped > 0 and not rec.exact
    header, records = open_records(tmp_path / "trace")
    assert header.run["exact"] is False
    assert records[records["kind"] == GAP]["value"].sum() == rec.dropped == records[-1]["value"]
    assert read_trace(tmp_path / "trace").requests > 0  # batches are whole


def test_closing_the_store_ends_its_recording(experts, tmp_path):
    store = fastcache.open(experts.source, budget=10 * 4096, policy="lru", engine="pread")
    rec = store.record(tmp_path / "trace")
    tokens(store, 3, np.random.default_rng(6))
    before = live(store)
    store.close()
    assert rec.ended == "closed" and counters_of(tmp_path / "trace") == before
    assert open_records(tmp_path / "trace")[1][-1].tolist() == (END, CLOSED, 0, 0)
    rec.stop()
    with pytest.raises(errors.StoreClosed):
        store.record(tmp_path / "other")
    with pytest.raises(errors.StoreClosed):
        store.mark_token()


def test_a_recording_without_a_handle_goes_on_and_ends_with_a_store_that_is_dropped(experts, tmp_path):
    store = fastcache.open(experts.source, budget=10 * 4096, policy="lru", engine="pread")
    store.record(tmp_path / "trace")
    gc.collect()
    tokens(store, 3, np.random.default_rng(7))
    del store
    gc.collect()
    assert open_records(tmp_path / "trace")[1][-1].tolist() == (END, CLOSED, 0, 0)
    assert read_trace(tmp_path / "trace").requests == 3 * LAYERS * 4


def test_a_failing_disk_ends_the_recording_and_leaves_a_trace(experts, tmp_path):
    """In a process of its own: a limit on file sizes stands in for a full disk."""
    script = f"""
import logging, os, resource, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import numpy as np
import fastcache
from fastcache import FileRangeSource
from rig import until, TooSlow
from test_recording import tokens
logging.basicConfig(format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
source = FileRangeSource({str(experts.path)!r}, {experts.ranges!r}, top_k=4)
with fastcache.open(source, budget=10 * 4096, policy="lru", engine="pread", name="recorded") as store:
    rng = np.random.default_rng(8)
    rec = store.record({str(tmp_path / "trace")!r})
    start = os.stat(rec.path).st_size
    tokens(store, 3, rng)
    until(lambda: os.stat(rec.path).st_size == start + 8 * rec.records)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(rec.path).st_size + 1001, resource.RLIM_INFINITY))
    for _ in range(100_000):
        tokens(store, 10, rng)
        if rec.ended:
            break
    rec.stop()
    print(rec.ended, rec.error.errno, rec.error.filename, rec.exact, rec.dropped > 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout.split() == ["error", "27", str(tmp_path / "trace"), "False", "True"]
    assert done.stderr.count(f"recorded: the recording in {tmp_path / 'trace'} ended: File too large") == 1
    assert open_records(tmp_path / "trace")[0].run["exact"] is False
    assert read_trace(tmp_path / "trace").requests >= 3 * LAYERS * 4


def test_a_forked_child_neither_records_nor_stops_its_parents_recording(store, tmp_path):
    rng = np.random.default_rng(9)
    with store.record(tmp_path / "trace") as rec:
        tokens(store, 2, rng)
        child = os.fork()
        if child == 0:
            code = 0
            for call in (rec.stop, lambda: rec.records, lambda: store.record(tmp_path / "x"), store.mark_token):
                try:
                    call()
                except errors.ForkedStore:
                    continue
                code = 1
            code += "of the process" not in repr(rec)
            store.close()
            del rec
            gc.collect()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        tokens(store, 2, rng)
    assert counters_of(tmp_path / "trace") == live(store)
    assert read_trace(tmp_path / "trace").requests == 4 * LAYERS * 4 and not (tmp_path / "x").exists()


def test_a_recording_of_sizes_in_classes_says_which_expert_needs_which(disk, tmp_path):
    sizes = layers_of(2, 4, 3000) | {(1, e): 9000 for e in range(4)}
    del sizes[0, 2]  # there is no such expert
    experts = Experts(disk, sizes)
    with ExpertStore(experts.source, settings(budget=12 * 4096, engine="pread"), "mixed", None) as store:
        with store.record(tmp_path / "trace"):
            store.acquire_many(0, [3, 0]).release()
            store.acquire_many(1, [0, 1]).release()
        header = open_records(tmp_path / "trace")[0]
        assert header.expert_nbytes == (3000, 3000, 0, 3000, 9000, 9000, 9000, 9000)
        assert header.run["slots"] == store._sizing.slabs.slots
        kinds, counts = zip(*header.run["classes"], strict=True)
        assert len(set(kinds)) == 3
        assert np.repeat(kinds, counts).tolist() == store._sizing.cls.tolist()


def test_a_source_that_claims_more_experts_per_token_than_there_are_is_recorded_without(experts, tmp_path):
    source = fastcache.FileRangeSource(experts.path, experts.ranges, top_k=EXPERTS + 1)
    with fastcache.open(source, budget=40960) as store, store.record(tmp_path / "trace"):
        store[0, 1].release()
    trace = read_trace(tmp_path / "trace")
    assert trace.top_k is None and trace.requests == 1


def test_the_command_prints_the_live_counters_and_refuses_what_is_no_recording(experts, tmp_path):
    with fastcache.open(experts.source, budget=5 * 4096) as store:
        with store.record(tmp_path / "trace"):
            for expert in (1, 2, 3, 4, 5, 6, 1, 2):
                store.acquire(0, expert).release()
        live = store.stats()
    run = CliRunner()
    done = run.invoke(main, ["replay", str(tmp_path / "trace"), "--exact", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["same"]
    assert {name: told["counters"][name] for name in ("hits", "misses", "evictions")} == {
        "hits": live.hits, "misses": live.misses, "evictions": live.evictions,
    }  # fmt: skip
    assert "that of the live run" in run.invoke(main, ["replay", str(tmp_path / "trace"), "--exact"]).stdout
    assert run.invoke(main, ["replay", str(tmp_path / "trace"), "--exact", "--slots", "3"]).exit_code == 2
    (tmp_path / "lines").write_text('{"layer": 0, "token": 0, "experts": [1]}\n')
    refused = run.invoke(main, ["replay", str(tmp_path / "lines"), "--exact"])
    assert refused.exit_code == 1 and refused.stderr.startswith("Error: ") and refused.stderr.count("\n") == 1
