"""Advice about budgets: from the model's own sizes, a trace, a rate and free memory."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner
from routing import groups_of, tokens, trace_of

from fastcache.cli import main
from fastcache.errors import TraceError
from fastcache.fixture import DemoShape, write_demo_checkpoint
from fastcache.layout.build import build_layout
from fastcache.rawread import RawRead
from fastcache.traces import capacity as room
from fastcache.traces import write_trace
from fastcache.traces.advise import advise, of_model, read_rate
from fastcache.traces.mrc import mrc
from fastcache.traces.replay import replay

SHAPE = DemoShape(layers=6, experts=20, hidden=64, intermediate=32, top_k=3)
EXPERT = 3 * 64 * 32 * 2
RATE = RawRead(nbytes=10**9, seconds=1.0, threads=4, block=4 << 20, direct=True)


@pytest.fixture(scope="module")
def model(disk):
    write_demo_checkpoint(disk / "advise", shape=SHAPE)
    return disk / "advise"


def test_a_policy_that_no_store_has_is_refused(model):
    with pytest.raises(ValueError, match="no policy 'belady'"):
        advise(model, tokens(count=10), "belady", rate=RATE, free_bytes=1 << 30)


def test_advice_is_what_a_replay_of_the_budget_says(model):
    layout = build_layout(model)
    assert layout.top_k == 3
    trace = tokens(count=100)
    mine = of_model(trace, layout)
    assert mine.layers == tuple((layer, 20) for layer in layout.layers) and mine.sizes().tolist() == [EXPERT] * 120
    found = advise(model, trace, rate=RATE, free_bytes=1 << 30)
    assert found.expert_bytes == 120 * EXPERT and found.cycle.budget_bytes == 18 * EXPERT
    assert 18 * EXPERT <= found.knee.budget_bytes < found.budget.budget_bytes <= found.asked_bytes
    assert found.points[-1].hit_rate - found.budget.hit_rate <= 0.03
    less = [point for point in found.points if point.budget_bytes < found.budget.budget_bytes]
    assert less[-1].hit_rate < found.points[-1].hit_rate - 0.03
    (row,) = replay(mine, ["next_use"], [room.of_budget(mine, found.budget.budget_bytes)])
    assert found.budget.hit_rate == row.hit_rate
    assert found.budget.read_bytes_per_token == pytest.approx(row.misses * EXPERT / (trace.requests / 18))
    assert found.budget.read_seconds_per_token == pytest.approx(found.budget.read_bytes_per_token / 1e9)
    rates = [point.hit_rate for point in found.points]
    assert [point.budget_bytes for point in found.points] == sorted(point.budget_bytes for point in found.points)
    assert rates[-1] == 1 - (trace.counts() > 0).sum() / trace.requests
    give, least, more = found.lines
    assert give.startswith("Give ") and f"{found.budget.hit_rate:.1%} of requests hit" in give and "1.00 GB/s" in give
    assert "The knee is at" in least and "token cycle, 216.0 KiB" in least and more.startswith("More buys")


@pytest.mark.parametrize("policy", ["next_use", "lru"])
def test_the_knee_is_that_of_the_miss_ratio_curve(model, policy):
    for together in (1, 4):
        mine = of_model(tokens(count=100, together=together), build_layout(model))
        found = advise(model, mine, policy, rate=RATE, free_bytes=1 << 30)
        wanted = mrc(mine, [policy])
        assert found.knee.budget_bytes == wanted.knee * EXPERT
        assert found.knee.hit_rate == pytest.approx(1 - wanted.to_dict()["knee"]["miss_ratio"][policy])


def test_little_memory_bounds_the_budget_and_is_said(model):
    usable = 30 * EXPERT
    trunk = advise(model, tokens(count=50), rate=RATE, free_bytes=1 << 30).trunk_bytes
    found = advise(model, tokens(count=50), rate=RATE, free_bytes=trunk + int(usable / 0.85) + 1)
    assert found.usable_bytes == usable and 26 * EXPERT < found.budget.budget_bytes <= usable
    assert "free memory are usable" in found.lines[0] and "does not fit" in found.lines[2]
    less = advise(model, tokens(count=50), rate=RATE, free_bytes=trunk)
    assert less.budget.budget_bytes == 0 and less.budget.hit_rate == 0.0
    assert "One token cycle, 216.0 KiB, does not fit" in less.lines[1]


def test_a_cycle_of_few_experts_needs_no_more(model):
    trace = trace_of([[20 * layer + expert for expert in (0, 1, 2)] for _ in range(50) for layer in range(6)], [20] * 6)
    found = advise(model, trace, rate=RATE, free_bytes=1 << 30)
    assert found.budget.budget_bytes == 18 * EXPERT and found.budget.hit_rate == 1 - 18 / 900
    assert found.lines[2].startswith("More buys nothing")


def test_a_trace_of_another_model_is_refused(model):
    layout = build_layout(model)
    last = max(layout.layers)
    for layers, key, what in [
        ([20] * (last + 2), 20 * (last + 1), f"layer {last + 1}, expert 0"),
        ([25] * (last + 1), 25 * last + 20, f"layer {last}, expert 20"),
    ]:
        with pytest.raises(TraceError, match=what):
            of_model(trace_of([[key]], layers), layout)
    wide = tokens(layers=6, experts=20, count=3)
    wider = dataclasses.replace(wide, layers=tuple((layer, 20) for layer in range(8)))  # never asked: no matter
    assert groups_of(of_model(wider, layout)) == groups_of(wide)


def test_layers_keep_their_numbers_whatever_the_dense_keys_are(model):
    """A trace that counts other layers and wider ones: the same experts under other keys."""
    layout = build_layout(model)
    layers = sorted(layout.layers)
    trace = dataclasses.replace(
        trace_of([[30 * i + 7, 30 * i + 3] for i in range(len(layers))], [30] * len(layers)),
        layers=tuple((layer, 30) for layer in layers),
    )
    assert groups_of(of_model(trace, layout)) == [[20 * i + 7, 20 * i + 3] for i in range(len(layers))]


def test_nothing_to_go_by_is_said(model):
    with pytest.raises(TraceError, match="asks for nothing"):
        advise(model, trace_of([], [20]), rate=RATE)


def test_the_rate_is_measured_on_the_checkpoints_files(model):
    rate = read_rate(build_layout(model))
    assert rate.nbytes > 0 and rate.gb_per_s > 0 and rate.block % 4096 == 0


def test_the_command_prints_three_lines_or_one_object(model, tmp_path):
    path = tmp_path / "a.trace"
    write_trace(tokens(count=30), path)

    def call(*arguments):
        return CliRunner().invoke(main, ["advise", *map(str, arguments)])

    result = call(model, "--trace", path)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 3
    printed = json.loads(call(model, "--trace", path, "--json").stdout)
    assert printed["free_bytes"] > 0 and printed["read_gb_per_s"] > 0 and len(printed["lines"]) == 3
    np.array([[99, 0]], "<i4").tofile(tmp_path / "other")
    result = call(model, "--trace", tmp_path / "other")
    assert result.exit_code == 1 and "is it that model's trace?" in result.output
    assert "no policy 'x'" in call(model, "--trace", path, "--policy", "x").output
