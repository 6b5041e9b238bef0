"""Advice about budgets: from the model's own sizes, a trace, a rate and free memory."""

import dataclasses
import json

import numpy as np
import pytest
from checkpoints import moe_dir, qwen, split_experts
from click.testing import CliRunner
from routing import groups_of, tokens, trace_of

import fastcache
from fastcache.cli import main
from fastcache.errors import TraceError
from fastcache.fixture import DemoShape, write_demo_checkpoint
from fastcache.layout.build import build_layout
from fastcache.rawread import RawRead
from fastcache.traces import capacity as room
from fastcache.traces import read, write_trace
from fastcache.traces.advise import advise, read_rate
from fastcache.traces.model import of_model, slots_of
from fastcache.traces.mrc import mrc
from fastcache.traces.replay import replay
from fastcache.units import format_bytes

SHAPE = DemoShape(layers=6, experts=20, hidden=64, intermediate=32, top_k=3)
EXPERT = 3 * 64 * 32 * 2
RATE = RawRead(nbytes=10**9, seconds=1.0, threads=4, block=4 << 20, direct=True)


@pytest.fixture(scope="module")
def model(disk):
    write_demo_checkpoint(disk / "advise", shape=SHAPE)
    return disk / "advise"


@pytest.fixture(scope="module")
def slot(model):
    """Bytes of a slot: an expert begins inside of a page."""
    (size,) = slots_of(build_layout(model)).slot_bytes
    assert size > EXPERT
    return size


def test_a_policy_that_no_store_has_is_refused(model):
    with pytest.raises(ValueError, match="no policy 'belady'"):
        advise(model, tokens(count=10), "belady", rate=RATE, free_bytes=1 << 30)


def test_advice_is_what_a_replay_of_the_budget_says(model, slot):
    layout = build_layout(model)
    assert layout.top_k == 3
    trace = tokens(count=100)
    mine = of_model(trace, layout)
    assert mine.layers == tuple((layer, 20) for layer in layout.layers) and mine.sizes().tolist() == [EXPERT] * 120
    found = advise(model, trace, rate=RATE, free_bytes=1 << 30)
    assert found.expert_bytes == 120 * slot and found.cycle.budget_bytes == 18 * slot
    assert 18 * slot <= found.knee.budget_bytes < found.budget.budget_bytes <= found.asked_bytes
    assert found.points[-1].hit_rate - found.budget.hit_rate <= 0.03
    less = [point for point in found.points if point.budget_bytes < found.budget.budget_bytes]
    assert less[-1].hit_rate < found.points[-1].hit_rate - 0.03
    (row,) = replay(mine, ["next_use"], [room.of_budget(mine, found.budget.budget_bytes, slots_of(layout))])
    assert found.budget.hit_rate == row.hit_rate
    assert found.budget.read_bytes_per_token == pytest.approx(row.misses * EXPERT / (trace.requests / 18))
    assert found.budget.read_seconds_per_token == pytest.approx(found.budget.read_bytes_per_token / 1e9)
    rates = [point.hit_rate for point in found.points]
    assert [point.budget_bytes for point in found.points] == sorted(point.budget_bytes for point in found.points)
    assert rates[-1] == 1 - (trace.counts() > 0).sum() / trace.requests
    give, least, more = found.lines
    assert give.startswith(f"Give {format_bytes(found.budget.budget_bytes)} (budget={found.budget.budget_bytes}), ")
    assert f"{found.budget.hit_rate:.1%} of requests hit" in give and "1.00 GB/s" in give
    assert "The knee is at" in least and f"token cycle, {18 * slot / 1024:.1f} KiB" in least
    assert more.startswith("More buys")


@pytest.mark.parametrize("policy", ["next_use", "lru"])
def test_the_knee_is_that_of_the_miss_ratio_curve(model, slot, policy):
    for together in (1, 4):
        mine = of_model(tokens(count=100, together=together), build_layout(model))
        found = advise(model, mine, policy, rate=RATE, free_bytes=1 << 30)
        wanted = mrc(mine, [policy])
        assert found.knee.budget_bytes == wanted.knee * slot
        assert found.knee.hit_rate == pytest.approx(1 - wanted.to_dict()["knee"]["miss_ratio"][policy])


def test_little_memory_bounds_the_budget_and_is_said(model, slot):
    usable = 30 * slot
    trunk = advise(model, tokens(count=50), rate=RATE, free_bytes=1 << 30).trunk_bytes
    found = advise(model, tokens(count=50), rate=RATE, free_bytes=trunk + int(usable / 0.85) + 1)
    assert found.usable_bytes == usable and 26 * slot < found.budget.budget_bytes <= usable
    assert "free memory are usable" in found.lines[0] and "does not fit" in found.lines[2]
    less = advise(model, tokens(count=50), rate=RATE, free_bytes=trunk)
    assert less.budget.budget_bytes == 0 and less.budget.hit_rate == 0.0
    assert f"One token cycle, {18 * slot / 1024:.1f} KiB, does not fit" in less.lines[1]


def test_a_cycle_of_few_experts_needs_no_more(model, slot):
    trace = trace_of([[20 * layer + expert for expert in (0, 1, 2)] for _ in range(50) for layer in range(6)], [20] * 6)
    found = advise(model, trace, rate=RATE, free_bytes=1 << 30)
    assert found.budget.budget_bytes == 18 * slot and found.budget.hit_rate == 1 - 18 / 900
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
    """A trace that counts fewer experts, for it asks for no others: the same experts under other keys."""
    layout = build_layout(model)
    layers = sorted(layout.layers)
    trace = dataclasses.replace(
        trace_of([[8 * i + 7, 8 * i + 3] for i in range(len(layers))], [8] * len(layers)),
        layers=tuple((layer, 8) for layer in layers),
    )
    assert groups_of(of_model(trace, layout)) == [[20 * i + 7, 20 * i + 3] for i in range(len(layers))]


def live(store, trace):
    """Ask a store for what a trace has, batch for batch."""
    first = trace.layer_first
    for group in groups_of(trace):
        i = int(np.searchsorted(first, group[0], "right")) - 1
        store.acquire_many(trace.layers[i][0], [key - int(first[i]) for key in group]).release()
    return store.stats()


@pytest.mark.parametrize("kind", ["alike", "of two sizes"])
def test_a_store_opened_with_an_advised_budget_has_the_promised_experts_and_hits_as_often(disk, kind):
    path = disk / f"promised-{kind}"
    if kind == "alike":
        write_demo_checkpoint(path, shape=SHAPE)
    else:
        sizes = [split_experts([layer], 20, inter=48 if layer % 2 else 80, hidden=64) for layer in range(6)]
        moe_dir(path, [[entry for layer in sizes for entry in layer]], qwen(20, 6, num_experts_per_tok=3))
    trace = of_model(tokens(count=60), build_layout(path))
    found = advise(path, trace, "lru", rate=RATE, free_bytes=1 << 30)
    for point in {found.budget, found.knee, found.cycle, *found.points[::7], found.points[-1]}:
        with fastcache.open(path, budget=point.budget_bytes, policy="lru", speculation="off") as store:
            assert store.describe()["slots"] == point.experts
            assert live(store, trace).hit_rate == point.hit_rate


def test_layers_or_experts_of_another_model_are_refused_though_every_request_could_be_served(model, tmp_path):
    layout = build_layout(model)
    asked = [[4 * layer + expert for expert in (0, 3)] for layer in range(6)]

    def stored(name, layers, keys):
        made = dataclasses.replace(trace_of(keys, [count for _, count in layers]), layers=tuple(layers))
        write_trace(made, tmp_path / name, {"counters": []})  # as a recording: its layers are the store's
        return read(tmp_path / name)

    assert of_model(trace_of(asked, [4] * 6), layout).pool == 120  # counted by an importer, from what is asked for
    for layers, keys, why in (
        ([(layer, 4) for layer in range(6)], asked, "is of 4 experts in layer 0; the model has 20 there"),
        ([(layer, 20) for layer in range(4)], [[0, 1], [79]], "knows no layer 4, in which the model has experts"),
        ([(layer, 32) for layer in range(6)], [[0, 1], [5]], "is of 32 experts in layer 0; the model has 20 there"),
    ):
        with pytest.raises(TraceError, match=why + ": is it that model's trace"):
            of_model(stored("other", layers, keys), layout)
    with pytest.raises(TraceError, match="knows no layer 4"):  # a token asks for something in every layer
        of_model(trace_of([[4 * layer, 4 * layer + 3] for layer in range(4)], [4] * 4), layout)
    declared = trace_of([[0, 1]], [32] * 6)  # no importer counts so: nothing asks for expert 31
    with pytest.raises(TraceError, match="is of 32 experts"):
        of_model(declared, layout)
    partly = trace_of([[0, 3, 19]], [20] * 8)  # layers without experts are named by some formats
    assert of_model(partly, layout).requests == 3


def test_another_checkpoints_trace_is_said_to_be_one_where_the_layers_are_alike(model, disk, tmp_path):
    with fastcache.open(model, budget="all", ghosts=False) as store, store.record(tmp_path / "own"):
        live(store, of_model(tokens(count=5), build_layout(model)))
    write_demo_checkpoint(disk / "twin", shape=SHAPE, shards=2)
    write_trace(tokens(count=5), tmp_path / "unsaid")
    for path, trace, same in ((model, "own", True), (disk / "twin", "own", False), (model, "unsaid", None)):
        found = CliRunner().invoke(main, ["advise", str(path), "--trace", str(tmp_path / trace), "--json"])
        assert found.exit_code == 0 and json.loads(found.stdout)["same_checkpoint"] is same
        assert ("recorded with other files" in found.stderr) is (same is False)


def test_more_experts_per_token_than_a_layer_has_are_refused(model, tmp_path):
    for top_k in (21, 100):
        with pytest.raises(ValueError, match=f"top_k is {top_k}, and a layer has 20 experts"):
            advise(model, tokens(count=5), rate=RATE, top_k=top_k)
    assert advise(model, tokens(count=5), rate=RATE, top_k=20).cycle.experts == 120
    write_trace(tokens(count=5), tmp_path / "a")
    refused = CliRunner().invoke(main, ["advise", str(model), "--trace", str(tmp_path / "a"), "--top-k", "21"])
    assert refused.exit_code == 2 and "a layer has 20 experts" in refused.stderr


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
