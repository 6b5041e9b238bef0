"""Reading ahead in the MoE forward: what is asked for and when, and that no output ever changes."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rig import assert_identities

import fastcache
from fastcache.fixture import DemoShape, write_demo_checkpoint
from fastcache.layout.build import build_layout
from fastcache.moe import Speculator, load_block
from fastcache.predictors import HotList, NullPredictor, PreviousToken, RouterLookahead

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"]
PREDICTORS = {
    "none": NullPredictor,
    "lookahead": RouterLookahead,
    "lookahead, more": lambda: RouterLookahead(n=3),
    "previous token": PreviousToken,
    "hot list": lambda: HotList("any", n=2),
}
SHAPE = DemoShape(layers=4, experts=16, hidden=64, intermediate=32, top_k=4)


@pytest.fixture(scope="module")
def model(disk):
    write_demo_checkpoint(disk / "speculator-model", shape=SHAPE)
    return disk / "speculator-model"


def decode(blocks, hidden, tokens=12, width=1):
    """Give each block what the one before made of a made-up stream; return every output's bytes."""
    rng, out = np.random.default_rng(4), []
    for _ in range(tokens):
        x = rng.standard_normal((width, hidden), dtype=np.float32)
        for block in blocks:
            y = block(x)
            out.append(y.tobytes())
            x = x + y
            x /= np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    return out


class Noting:
    """A store that notes what it is asked to read ahead."""

    def __init__(self, store):
        self.store, self.as_ready, self.asked = store, store.as_ready, []

    def prefetch(self, layer, experts, *, predictor):
        self.asked.append((layer, list(experts), predictor))
        return self.store.prefetch(layer, experts, predictor=predictor)


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_predictor_changes_a_bit_of_any_family(family, predictor):
    path = DATA / family / "bf16"
    layout = build_layout(path)
    resident = [load_block(layout, layer, experts="resident") for layer in layout.layers]
    wanted = decode(resident, resident[0].hidden)
    with fastcache.open(path, budget="40% of experts", speculation="always") as store:
        speculator = Speculator(PREDICTORS[predictor](), depth=2)
        blocks = [load_block(layout, layer, experts=store, speculator=speculator) for layer in layout.layers]
        assert decode(blocks, blocks[0].hidden) == wanted
        issued = store.stats().prefetch_issued
        assert issued == 0 if predictor == "none" else speculator.stats().layers > 0
        assert store.describe()["speculation"]["predictors"].keys() <= {speculator.predictor.name}


def test_lookahead_asks_the_next_layer_s_router_and_never_past_the_last(model):
    layout = build_layout(model)
    with fastcache.open(model, budget="50% of experts") as store:
        noting, speculator = Noting(store), Speculator(RouterLookahead())
        blocks = [load_block(layout, layer, experts=noting, speculator=speculator) for layer in range(SHAPE.layers)]
        x = np.random.default_rng(1).standard_normal((1, SHAPE.hidden), dtype=np.float32)
        for block in blocks:
            block(x)
        assert noting.asked == [
            (layer, blocks[layer].route(x)[0][0].tolist(), "router-lookahead") for layer in range(1, SHAPE.layers)
        ]
        tally = speculator.stats()  # the input never changed, so the router is foretold exactly
        assert (tally.layers, tally.recall, tally.precision) == (3, 1.0, 1.0)
        s = store.stats()
        assert s.first_consumptions + s.late_joins_ok == s.prefetch_issued > 0


def test_more_than_the_router_chooses_goes_on_by_its_logits(model):
    block = load_block(model, 0, experts="resident")
    x = np.random.default_rng(1).standard_normal((2, SHAPE.hidden), dtype=np.float32)
    order = np.argsort(-block.router_logits(x), axis=1, kind="stable")
    for n in (1, 4, 6, 16):
        assert block._gate.likely(x[:1], n) == order[0, :n].tolist()
        assert set(block._gate.likely(x, n)) == set(order[:, :n].flat)


def test_the_first_layers_of_the_next_token_are_foretold_only_without_a_hidden_state(model):
    layout = build_layout(model)
    with fastcache.open(model, budget="50% of experts") as store:
        noting, speculator = Noting(store), Speculator(PreviousToken(), depth=2)
        blocks = [load_block(layout, layer, experts=noting, speculator=speculator) for layer in range(SHAPE.layers)]
        decode(blocks, SHAPE.hidden, tokens=1)
        assert [layer for layer, *_ in noting.asked] == [0, 0, 1]
        noting.asked.clear()
        decode(blocks, SHAPE.hidden, tokens=1)
        assert [layer for layer, *_ in noting.asked] == [1, 2, 2, 3, 3, 0, 0, 1]


@pytest.mark.parametrize(("width", "most", "asked"), [(2, 1, 0), (2, 2, 3), (1, 1, 3), (0, 1, 0)])
def test_a_prefill_is_observed_and_not_guessed(model, width, most, asked):
    layout = build_layout(model)
    with fastcache.open(model, budget="50% of experts") as store:
        speculator = Speculator(RouterLookahead(), most_tokens=most)
        noting = Noting(store)
        blocks = [load_block(layout, layer, experts=noting, speculator=speculator) for layer in range(SHAPE.layers)]
        decode(blocks, SHAPE.hidden, tokens=1, width=width)
        assert len(noting.asked) == asked


def test_experts_that_cannot_be_read_ahead_are_left_alone(model):
    speculator = Speculator(RouterLookahead())
    blocks = [load_block(model, layer, experts="resident", speculator=speculator) for layer in range(SHAPE.layers)]
    alone = [load_block(model, layer, experts="resident") for layer in range(SHAPE.layers)]
    assert decode(blocks, SHAPE.hidden) == decode(alone, SHAPE.hidden)
    assert speculator.stats().layers == 0


def test_a_hot_list_learns_while_the_model_runs(model):
    layout = build_layout(model)
    with fastcache.open(model, budget="50% of experts") as store:
        hot = HotList(store.fingerprint)
        speculator = Speculator(hot)
        blocks = [load_block(layout, layer, experts=store, speculator=speculator) for layer in range(SHAPE.layers)]
        decode(blocks, SHAPE.hidden)
        assert len(hot) >= SHAPE.layers * SHAPE.top_k
        assert 0 < speculator.stats().recall <= 1
    assert_identities(store, quiet=False)


def test_a_depth_of_no_layer_is_refused():
    with pytest.raises(ValueError, match="depth"):
        Speculator(depth=0)


def example(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "lookahead.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    )


def test_the_example_decodes_with_lookahead(model):
    done = example(model, "--tokens", "6", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    assert "recall" in done.stdout and "bit-identical: yes" in done.stdout
    assert re.search(r"times as fast with look-ahead: [\d.]+ \(median of 3: [\d.]+ to [\d.]+\)", done.stdout)


def test_the_example_calls_no_read_of_warm_a_guess(model):
    done = example(model, "--tokens", "6", "--rounds", "1")
    plain, ahead = done.stdout.split("\nrouter-lookahead: ", 1)
    assert plain.startswith("none:") and "no guess was made" in plain and "wasted" not in plain
    assert int(re.search(r"(\d+) experts were read by warm\(\) before it", plain)[1]) > 0
    found = re.search(r"(\d+) guesses read: (\d+) used, (\d+) came late, (\d+) wasted, (\d+) c", ahead)
    issued, used, late, wasted, cancelled = map(int, found.groups())
    assert issued >= used + late + wasted + cancelled > 0


def test_the_example_says_mistakes_in_one_line_as_the_commands_do(model, tmp_path):
    for arguments, code, says in (
        (["/nowhere"], 1, "Error: CheckpointNotFound: /nowhere: no such file or directory\n"),
        ([tmp_path], 1, f"Error: CheckpointError: {tmp_path}: no .safetensors or .gguf file in this directory\n"),
        ([model, "--budget", "much"], 1, "Error: InvalidBudget: budget 'much' is not a size"),
        ([model, "--tokens", "0"], 2, "--tokens must be at least 1; got 0\n"),
        ([model, "--rounds", "0"], 2, "--rounds must be at least 1; got 0\n"),
    ):
        done = example(*arguments)
        assert done.returncode == code
        assert says in done.stderr and "Traceback" not in done.stderr
        assert not done.stdout
