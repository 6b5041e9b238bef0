"""Whole models from rope, attention, blocks and a GGUF file's words, against what transformers recorded."""

import numpy as np
import pytest
from converted import as_gguf
from plain import Plain
from recorded import GGUF_FILES, assert_close, case, gguf_case, recorded

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_oss")
CONVERTED = tuple(family for family in FAMILIES if family != "qwen3_moe")  # that one has a dense layer in between
PIECES = 6e-6  # products of other shapes round differently; routed experts of DeepSeek-V2 count sixteenfold


def case_of(family):
    path = case(family)
    data = recorded(path)
    return path, data["input_ids"], data["logits"], data.get("greedy")


def greedy(model, ids, steps):
    logits, out = model.forward(ids)[-1], []
    for _ in range(steps):
        out.append(int(logits.argmax()))
        logits = model.forward(np.array(out[-1:]))[0]
    return out


@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_the_greedy_continuation_are_the_recorded_ones(family, stored):
    path, ids, logits, continuation = case_of(family)
    assert_close(Plain(path / stored).forward(ids), logits)
    assert greedy(Plain(path / stored), ids, len(continuation)) == continuation.tolist()


@pytest.mark.parametrize(("family", "stored"), [("deepseek_v3_fp8", "fp8"), ("gpt_oss_mxfp4", "mxfp4")])
def test_codes_with_scales_give_the_recorded_logits(family, stored):
    path, ids, logits, _ = case_of(family)
    assert_close(Plain(path / stored).forward(ids), logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_pieces_gives_the_logits_of_the_prompt_at_once(family):
    path, ids, _, _ = case_of(family)
    whole = Plain(path / "f32").forward(ids)
    for pieces in ((1,) * len(ids), (5, 1, 6), (len(ids) - 1, 1)):
        model, at, parts = Plain(path / "f32"), 0, []
        for n in pieces:
            parts.append(model.forward(ids[at : at + n]))
            at += n
        assert_close(np.concatenate(parts), whole, PIECES)


@pytest.mark.parametrize("family", CONVERTED)
def test_a_converted_file_gives_the_same_logits(family, tmp_path):
    path, ids, logits, continuation = case_of(family)
    as_gguf(path / "f32", tmp_path / "model.gguf", family)
    assert_close(Plain(tmp_path / "model.gguf").forward(ids), logits)
    assert greedy(Plain(tmp_path / "model.gguf"), ids, len(continuation)) == continuation.tolist()


@pytest.mark.parametrize("name", GGUF_FILES)
def test_a_gguf_file_of_any_type_gives_the_recorded_logits(name):
    path = gguf_case(name)
    assert_close(Plain(path).forward(recorded(path)["input_ids"]), recorded(path)["logits"])
