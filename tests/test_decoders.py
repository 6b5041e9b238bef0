"""Whole models through `fastcache.moe.load`, against what transformers recorded, and streamed against resident."""

import numpy as np
import pytest
from recorded import assert_close, case, recorded

from fastcache import moe
from fastcache.errors import CheckpointNotFound
from fastcache.moe import attention
from fastcache.moe.decoder import DECODERS

FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
)
BUDGETS = ("all", "2 cycles", "0.5 cycles", "one expert", 1)


@pytest.mark.parametrize("trunk", ["mapped", "resident"])
@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_the_greedy_continuation_are_the_recorded_ones(family, stored, trunk):
    path = case(family)
    data = recorded(path)
    with moe.load(path / stored, budget="all", trunk=trunk) as model:
        assert_close(model.forward(data["input_ids"]), data["logits"])
        cache = model.new_cache()
        assert list(model.generate(data["input_ids"], 8, stop=(), cache=cache)) == data["greedy"].tolist()
        assert cache.length == len(data["input_ids"]) + 7


@pytest.mark.parametrize(("family", "stored"), [("gpt_oss_mxfp4", "mxfp4"), ("deepseek_v3_fp8", "fp8")])
def test_encoded_checkpoints_give_the_recorded_logits(family, stored):
    path = case(family)
    data = recorded(path)
    for trunk in ("mapped", "resident"):
        with moe.load(path / stored, budget="all", trunk=trunk) as model:
            assert_close(model.forward(data["input_ids"]), data["logits"])


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_and_bfloat16_files_of_the_same_weights_give_the_same_bits(family):
    path = case(family)
    ids = recorded(path)["input_ids"]
    bits = []
    for stored in ("f32", "bf16"):
        with moe.load(path / stored, experts="resident") as model:
            bits.append(model.forward(ids).tobytes())
    assert bits[0] == bits[1]


def run(model, ids):
    """Prefill, then decode: all bits of it."""
    cache = model.new_cache()
    parts = [model.forward(ids, cache)]
    for _ in range(4):
        parts.append(model.forward([int(parts[-1][-1].argmax())], cache))
    return np.concatenate(parts).tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_equals_resident_bit_for_bit(family, engine):
    path = case(family) / "bf16"
    ids = recorded(case(family))["input_ids"]
    with moe.load(path, experts="resident") as model:
        assert model.store is None
        wanted = run(model, ids)
    for budget in BUDGETS:
        for predictor in (None, "lookahead"):
            for threads in (1, 4):
                with moe.load(path, budget="1 B", engine=engine) as probe:
                    size = max(probe.store.expert_nbytes(key) for key in probe.store) + (1 << 14)
                given = size if budget == "one expert" else budget
                with moe.load(path, budget=given, engine=engine, predictor=predictor, io_threads=threads) as model:
                    assert run(model, ids) == wanted, (budget, predictor, threads)
                    stats = model.store.stats(phases=True)
                    assert stats.misses > 0 and stats.phases["decode"].requests > 0
                    assert stats.phases["prefill"].requests > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces_gives_the_logits_of_the_prompt_at_once(family):
    data = recorded(case(family))
    ids = data["input_ids"]
    with moe.load(case(family) / "f32", experts="resident") as model:
        for pieces in ((1,) * len(ids), (5, 1, 6), (len(ids) - 1, 1), (2, 7, 3)):  # windows of 6 begin within them
            cache, at, parts = model.new_cache(), 0, []
            for n in pieces:
                parts.append(model.forward(ids[at : at + n], cache))
                at += n
            assert_close(np.concatenate(parts), data["logits"])


@pytest.mark.parametrize("most", [1, 100, 150])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_few_scores_at_a_time_give_the_same(family, most, monkeypatch):
    monkeypatch.setattr(attention, "SCORES", most)  # queries go by ones, by twos, by threes
    data = recorded(case(family))
    with moe.load(case(family) / "f32", experts="resident") as model:
        assert_close(model.forward(data["input_ids"]), data["logits"])


def test_every_decoder_has_a_recorded_case():
    assert set(DECODERS) == set(FAMILIES) - {"kimi_k2"}  # which is a deepseek_v3


def test_what_is_no_number_of_tokens_or_no_temperature_is_refused_at_the_call():
    with moe.load(case("mixtral") / "f32", experts="resident") as model:
        with pytest.raises(TypeError, match="max_tokens must be an integer; got 2.5"):
            model.generate([1], max_tokens=2.5)
        with pytest.raises(ValueError, match="max_tokens must be at least 0; got -1"):
            model.generate([1], max_tokens=-1)
        with pytest.raises(ValueError, match="finite; got inf"):
            model.generate([1], max_tokens=1, temperature=float("inf"))
        with pytest.raises(ValueError, match="at least one token id"):
            model.forward([])
        with pytest.raises(ValueError, match="ids must be integers; got float64"):
            model.forward([1.5])
        assert list(model.generate([1], max_tokens=0)) == []
    with pytest.raises(CheckpointNotFound, match="path of the checkpoint is empty"):
        moe.load("")
