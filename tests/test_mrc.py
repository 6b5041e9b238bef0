"""Miss-ratio curves: lru's is what a replay gives at every size; marks, files and pictures."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from routing import groups_of, real, tokens, trace_of

from fastcache.cli import main
from fastcache.errors import FeatureUnavailable
from fastcache.traces import capacity as room
from fastcache.traces import write_trace
from fastcache.traces.importers import read
from fastcache.traces.mrc import Curve, grid, lru_hits, mrc
from fastcache.traces.plot import plot
from fastcache.traces.replay import policies, replay
from fastcache_ext.distances import Distances


@pytest.mark.parametrize("together", [1, 4])
def test_the_lru_curve_is_what_a_replay_gives_at_every_size(together):
    trace = tokens(together=together)
    hits, largest = lru_hits(trace)
    assert largest == max(map(len, groups_of(trace)))
    rows = replay(trace, ["lru"], [room.of_slots(trace, slots) for slots in range(largest, trace.pool + 1)])
    assert [row.hits for row in rows] == hits[largest:].tolist()


@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True), max_size=400))
def test_distances_are_those_of_a_list(groups):
    """By hand; positions are renumbered often, because few keys have few positions."""
    recent, counts, cold = [], [0] * 9, 0
    for group in groups:
        for key in group:
            if key in recent:
                counts[recent.index(key)] += 1
            else:
                cold += 1
        for key in group:
            if key in recent:
                recent.remove(key)
            recent.insert(0, key)
    trace = trace_of(groups * 3, [9])
    once, distances = trace_of(groups, [9]), Distances(9)
    distances.run(once.keys, np.diff(once.batches))
    assert np.frombuffer(distances.counts_by_distance(), np.int64).tolist() == counts
    assert distances.cold == cold
    hits, largest = lru_hits(trace)
    if largest:
        (row,) = replay(trace, ["lru"], [room.of_slots(trace, largest)])
        assert row.hits == hits[largest]


def test_renumbered_positions_change_nothing():
    """Positions run out after 4 * 40 + 1024 requests."""
    trace = tokens(layers=2, experts=20, count=2000)
    assert trace.requests > 5 * (4 * 40 + 1024)
    hits, largest = lru_hits(trace)
    for slots in (largest, 11, 23, 40):
        (row,) = replay(trace, ["lru"], [room.of_slots(trace, slots)])
        assert row.hits == hits[slots]


def test_requests_that_cannot_be_are_refused():
    for keys, sizes in (([0, 1], [3]), ([0, 9], [2]), ([0, -1], [2]), ([0], [1, -1]), ([0, 1], [1])):
        distances = Distances(9)
        with pytest.raises(ValueError, match="do not add up"):
            distances.run(np.array(keys, np.int32), np.array(sizes, np.int64))
        assert distances.cold == 0


def test_a_pool_beyond_what_positions_can_number_is_refused():
    for pool in (2**28 + 1, 2**30, 2**31 - 1, -1):
        with pytest.raises(ValueError, match=f"{pool} experts"):
            Distances(pool)


def test_marks_are_where_they_should_be():
    trace = tokens(layers=6, experts=20, top_k=3, count=300)
    found = mrc(trace, points=12)
    assert list(found.curves) == [*policies(), "belady"]
    assert found.cycle == 18 and found.exact_from == 3 and found.expert_bytes is None
    assert found.floor == found.distinct / trace.requests
    for curve in found.curves.values():
        assert (np.diff(curve.experts) > 0).all() and curve.experts[-1] == found.distinct
        assert curve.miss_ratio[-1] == pytest.approx(found.floor)
        assert 18 in curve.experts
    lru = found.curves["lru"]
    for slots, ratio in zip(lru.experts, lru.miss_ratio, strict=True):
        (row,) = replay(trace, ["lru"], [room.of_slots(trace, int(slots))])
        assert ratio == pytest.approx(1 - row.hit_rate)
    assert found.knee in found.curves["next_use"].experts
    marks = found.to_dict()
    assert marks["token_cycle"]["experts"] == 18 and marks["token_cycle"]["bytes"] is None
    assert set(marks["knee"]["miss_ratio"]) == set(found.curves)


def test_the_knee_is_farthest_below_the_chord():
    where = np.arange(5)
    assert Curve("x", where, np.array([1.0, 0.3, 0.2, 0.1, 0.0])).knee() == 1
    assert Curve("x", where, np.array([1.0, 1.0, 0.1, 0.05, 0.0])).knee() == 2
    assert Curve("x", where, np.ones(5)).knee() == 0
    assert Curve("x", np.array([7]), np.ones(1)).knee() == 0


def test_a_trace_without_requests_or_top_k_has_a_curve_too():
    empty = mrc(trace_of([], [4]))
    assert empty.cycle is None and empty.to_dict()["token_cycle"] is None and empty.knee == 0
    one = mrc(trace_of([[0, 1, 2]], [4]), ["lru"])
    assert one.floor == 1.0 and one.curves["lru"].miss_ratio.tolist() == [1.0] * len(one.curves["lru"].experts)
    assert grid(trace_of([[0]], [1]), 5) == [1]


def call(*arguments):
    return CliRunner().invoke(main, ["mrc", *map(str, arguments)])


@pytest.fixture
def path(tmp_path):
    write_trace(room.with_sizes(tokens(count=40), "1MiB"), tmp_path / "a.trace")
    return tmp_path / "a.trace"


def test_the_command_prints_json_or_writes_files(path, tmp_path):
    printed = json.loads(call(path, "--points", "5").stdout)
    assert {"trace", "compulsory_floor", "token_cycle", "knee", "curves", "exact_from"} <= printed.keys()
    assert printed["trace"] == "a.trace" and printed["token_cycle"]["bytes"] == 18 << 20
    result = call(path, "--points", "5", "--out", tmp_path / "a.json", "--policy", "lru,belady")
    assert result.exit_code == 0, result.output
    assert "token cycle: 18 of 120 experts, 18.0 MiB" in result.stdout and "compulsory floor" in result.stdout
    written = json.loads((tmp_path / "a.json").read_text())
    assert set(written["curves"]) == {"lru", "belady"}
    result = call(path, "--points", "5", "--out", tmp_path / "b.json", "--policy", "lru,belady", "--json")
    assert json.loads(result.stdout) == written == json.loads((tmp_path / "b.json").read_text())
    assert "no policy 'x'" in call(path, "--policy", "x").output


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_pictures(path, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"a.{suffix}"
    result = call(path, "--points", "5", "--out", out)
    assert result.exit_code == 0, result.output
    head = out.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in out.read_bytes()
    assert "matplotlib writes no .xyz" in call(path, "--points", "5", "--out", tmp_path / "a.xyz").output


def test_without_matplotlib_the_error_says_what_to_install(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(FeatureUnavailable, match=r"fastcache-moe\[plot\]"):
        plot(mrc(read(path), ["lru"], 3), tmp_path / "a.png")
    result = call(path, "--out", tmp_path / "a.png")
    assert result.exit_code == 1 and "fastcache-moe[plot]" in result.output and not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("name", ["kimi", "qwen"])
def test_curves_of_real_traces_agree_with_replays(name):
    trace = read(real(name))
    hits, largest = lru_hits(trace)
    for share in ("0.03", "0.1", "0.12"):
        capacity = room.of_fraction(trace, share)
        (row,) = replay(trace, ["lru"], [capacity])
        assert capacity.experts >= largest and row.hits == hits[capacity.experts]
