"""Recordings that are a part of what happened: every reader says so, and reads what there is."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import moe_dir, qwen, split_experts
from click.testing import CliRunner

import fastcache
from fastcache.cli import main
from fastcache.traces import read_trace, write_trace
from fastcache.traces.format import RECORD, open_records
from fastcache.traces.missing import END, GAP

LAYERS, EXPERTS, TOP_K = 2, 8, 4


@pytest.fixture
def model(disk, tmp_path):
    path = disk / tmp_path.name / "model"
    path.parent.mkdir()
    config = qwen(EXPERTS, LAYERS, num_experts_per_tok=TOP_K)
    moe_dir(path, [split_experts(range(LAYERS), EXPERTS, inter=48, hidden=64)], config)
    return path


@pytest.fixture
def trace(model, tmp_path):
    """A whole recording."""
    path = tmp_path / "trace"
    with fastcache.open(model, budget="50% of experts", policy="lru") as store, store.record(path):
        for turn in range(30):
            for layer in store.layers:
                store.acquire_many(layer, [(turn + i) % EXPERTS for i in range(TOP_K)]).release()
    return path


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


def rewritten(path, change):
    """Write the file anew, its records as `change` returns them."""
    records = open_records(path)[1].copy()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - records.nbytes] + change(records).tobytes())


def with_a_gap(records):
    """As a recorder has it that could not write as fast as records came: GAP at the place, their number in END."""
    at = int(np.flatnonzero(records["kind"] == 2)[5])  # before a batch
    assert records["kind"][-1] == END
    records["value"][-1] = 7
    return np.concatenate([records[:at], np.array([(GAP, 0, 0, 7)], RECORD), records[at:]])


def test_a_whole_recording_is_complete_and_nothing_is_said(trace, model):
    read = read_trace(trace)
    assert read.complete and read.lost == 0
    for command in (("replay", trace), ("mrc", trace), ("advise", model, "--trace", trace)):
        result = run(*command, "--json")
        printed = json.loads(result.stdout)
        assert (printed["complete"], printed["lost"]) == (True, 0) and result.stderr == ""


@pytest.mark.parametrize(
    ("change", "lost", "says"),
    [
        (with_a_gap, 7, "7 records were lost"),
        (lambda records: records[:-1], 0, "the process died, or the disk was full"),
        (lambda records: with_a_gap(records)[:-1], 7, "7 records were lost"),
    ],
    ids=["gap", "no end", "both"],
)
def test_every_command_says_that_a_trace_is_a_part_and_goes_on(trace, model, change, lost, says):
    rewritten(trace, change)
    read = read_trace(trace)
    assert not read.complete and read.lost == lost
    for command in (("replay", trace), ("mrc", trace), ("advise", model, "--trace", trace)):
        for json_too in ((), ("--json",)):
            result = run(*command, *json_too)
            assert result.exit_code == 0 and "a part of a run" in result.stderr and says in result.stderr
            if json_too:
                printed = json.loads(result.stdout)
                assert printed["complete"] is False and printed["lost"] == lost
    write_trace(read, trace.with_suffix(".copy"))
    again = read_trace(trace.with_suffix(".copy"))
    assert not again.complete and again.lost == lost and again.requests == read.requests


def test_a_recording_is_read_up_to_wherever_it_broke_off(trace):
    whole = read_trace(trace)
    data, count = trace.read_bytes(), len(open_records(trace)[1])
    requests = []
    for kept in range(count):
        trace.write_bytes(data[: len(data) - 8 * (count - kept)])
        part = read_trace(trace)
        assert not part.complete
        np.testing.assert_array_equal(part.keys, whole.keys[: part.requests])
        requests.append(part.requests)
    assert requests == sorted(requests) and requests[0] == 0 and requests[-1] == whole.requests
    assert set(np.diff(requests).tolist()) == {0, TOP_K}  # batches are there whole or not at all


def test_a_process_that_is_killed_leaves_a_part_of_a_trace(model, tmp_path):
    script = f"""
import sys, fastcache
from pathlib import Path
path = Path({str(tmp_path / "trace")!r})
store = fastcache.open({str(model)!r}, budget="all")
store.record(path)
start = path.stat().st_size
while True:
    store.acquire_many(0, [0, 1, 2, 3]).release()
    if path.stat().st_size > start:
        print("running", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=os.getcwd()) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    result = run("replay", tmp_path / "trace", "--slots", 8, "--json")
    printed = json.loads(result.stdout)
    assert result.exit_code == 0 and not printed["complete"] and printed["requests"] > 0
