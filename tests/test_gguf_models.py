"""Whole models from GGUF files: logits of transformers, greedy tokens of float64, streamed against resident."""

import exact
import numpy as np
import pytest
from converted import ARCHITECTURES, as_gguf
from recorded import GGUF_FILES, RTOL, assert_close, case, gguf_case, recorded

from fastcache import moe
from fastcache.layout.build import build_layout

files = pytest.mark.parametrize("name", GGUF_FILES)
STEPS = 6


def base_of(path):
    return build_layout(path).config["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("trunk", ["mapped", "resident"])
@files
def test_logits_are_the_recorded_ones_and_greedy_tokens_those_of_float64(name, trunk):
    path = gguf_case(name)
    data = recorded(path)
    ids = data["input_ids"]
    with moe.load(path, budget="all", trunk=trunk) as model:
        got = model.forward(ids)
        assert_close(got, data["logits"])
        np.testing.assert_array_equal(got.argmax(axis=1), data["logits"].argmax(axis=1))
        wanted = exact.logits(path, ids, base=base_of(path))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())
        assert list(model.generate(ids, STEPS, stop=())) == exact.greedy(path, ids, STEPS, base=base_of(path))
        assert model.eos == {2}


def run(model, ids):
    """Prefill, then decode: all bits of it."""
    cache = model.new_cache()
    parts = [model.forward(ids, cache)]
    for _ in range(3):
        parts.append(model.forward([int(parts[-1][-1].argmax())], cache))
    return np.concatenate(parts).tobytes()


@files
def test_streaming_equals_resident_bit_for_bit(name, engine):
    path = gguf_case(name)
    ids = recorded(path)["input_ids"]
    with moe.load(path, experts="resident") as model:
        wanted = run(model, ids)
    with moe.load(path, budget=1, engine=engine) as probe:
        one = max(probe.store.expert_nbytes(key) for key in probe.store) + (1 << 14)
    for budget in (one, "2 cycles"):
        for predictor in (None, "lookahead"):
            with moe.load(path, budget=budget, engine=engine, predictor=predictor) as model:
                assert run(model, ids) == wanted, (budget, predictor)
                assert model.store.stats().misses > 0


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_converted_file_of_any_family_is_the_recorded_model(family, tmp_path):
    data = recorded(case(family))
    path = tmp_path / "model.gguf"
    as_gguf(case(family) / "f32", path, family)
    with moe.load(path, experts="resident") as model:
        assert_close(model.forward(data["input_ids"]), data["logits"])
        assert list(model.generate(data["input_ids"], 8, stop=())) == data["greedy"].tolist()
        wanted = run(model, data["input_ids"])
    for budget in (1, "2 cycles"):
        with moe.load(path, budget=budget) as model:
            assert run(model, data["input_ids"]) == wanted
