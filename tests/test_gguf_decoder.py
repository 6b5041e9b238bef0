"""GGUF metadata and names in the hub's words: against the gguf package's own table of names, and what keys mean."""

import math

import gguf as package
import pytest

from fastcache.layout.gguf_decoder import decoder_of_metadata, hub_name
from fastcache.moe.rope import rope_of, rope_parameters, softmax_scale

ATTENTION = [f"self_attn.{each}_proj.weight" for each in "qkvo"]
BIASES = [f"self_attn.{each}_proj.bias" for each in "qkv"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
QK_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
DENSE = [f"mlp.{role}_proj.weight" for role in ("gate", "up", "down")]
LATENT = [
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    "self_attn.k_b_proj.weight",
    "self_attn.v_b_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
]
NAMES = {
    "LLAMA": ATTENTION + NORMS,
    "QWEN2MOE": ATTENTION + BIASES + NORMS,
    "QWEN3MOE": ATTENTION + NORMS + QK_NORMS,
    "OLMOE": ATTENTION + NORMS + QK_NORMS,
    "DEEPSEEK2": LATENT + NORMS + DENSE,
    "GPT_OSS": [*ATTENTION, *BIASES, "self_attn.o_proj.bias", "self_attn.sinks", *NORMS],
    "GLM4_MOE": ATTENTION + BIASES + NORMS + QK_NORMS + DENSE,
}


@pytest.mark.parametrize("architecture", NAMES)
def test_every_tensor_gets_back_the_hubs_name(architecture):
    table = package.get_tensor_name_map(package.MODEL_ARCH[architecture], 40)
    whole = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for name in whole + [f"model.layers.37.{each}" for each in NAMES[architecture]]:
        # The package knows modules; a converter puts ".weight" behind sinks.
        stored = table.get_name(name if "sinks" not in name else f"{name}.weight", try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        assert hub_name(stored) == name


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_exps.weight", "rope_freqs.weight", "x"])
def test_other_names_stay_as_they_are(name):
    assert hub_name(name) == name


def metadata(architecture, **values):
    named = {key.replace("__", "."): value for key, value in values.items()}
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in named.items()}


def test_heads_are_as_wide_as_the_file_says_or_parts_of_the_hidden_state():
    stated = metadata("qwen3moe", embedding_length=2048, attention__head_count=32, attention__key_length=128)
    assert decoder_of_metadata(stated, "qwen3_moe")["head_dim"] == 128
    silent = metadata("llama", embedding_length=4096, attention__head_count=32)
    assert decoder_of_metadata(silent, "mixtral")["head_dim"] == 128


def test_permuted_rows_are_those_of_llama_alone():
    for architecture in ("qwen2moe", "qwen3moe", "olmoe", "glm4moe", "gpt-oss", "deepseek2"):
        assert "rope_interleave" not in decoder_of_metadata(metadata(architecture), "any")
    assert decoder_of_metadata(metadata("llama"), "mixtral")["rope_interleave"] is True


def test_partial_rotation_is_the_quotient_of_two_lengths():
    found = decoder_of_metadata(
        metadata("glm4moe", attention__key_length=128, rope__dimension_count=64, rope__freq_base=1e6), "glm4_moe"
    )
    assert rope_parameters(found)["partial_rotary_factor"] == 0.5
    assert len(rope_of(found, 128).inv_freq) == 32


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "default"),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "default"),
        ({"rope__scaling__factor": 4.0}, "linear"),
        ({"rope__scale_linear": 4.0}, "linear"),  # as files of 2023 have it
        ({"rope__scaling__type": "linear"}, "default"),
        ({"rope__scaling__factor": 0.0}, "default"),
        ({"rope__scaling__factor": 0.0, "rope__scale_linear": 4.0}, "default"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, "linear"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "yarn"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
    ],
)
def test_kinds_of_rope(values, kind):
    found = rope_parameters(decoder_of_metadata(metadata("qwen3moe", **values), "qwen3_moe"))
    assert found["rope_type"] == kind and found["rope_theta"] == 10000.0
    assert kind not in ("linear", "yarn") or found["factor"] == 4.0


def test_deepseeks_sizes_and_scale():
    common = {
        "attention__head_count": 128,
        "attention__head_count_kv": 1,
        "attention__q_lora_rank": 1536,
        "attention__kv_lora_rank": 512,
        "rope__dimension_count": 64,
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 40.0,
        "rope__scaling__original_context_length": 4096,
        "rope__scaling__yarn_log_multiplier": 0.10000000149011612,
        "context_length": 163840,
    }
    new = metadata(
        "deepseek2",
        **common,
        attention__key_length=576,
        attention__value_length=512,
        attention__key_length_mla=192,
        attention__value_length_mla=128,
    )
    old = metadata("deepseek2", **common, attention__key_length=192, attention__value_length=128)
    for found in (decoder_of_metadata(new, "deepseek_v3"), decoder_of_metadata(old, "deepseek_v3")):
        assert "head_dim" not in found
        assert [found[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")] == [128, 64, 128]
        assert (found["q_lora_rank"], found["kv_lora_rank"]) == (1536, 512)
        assert softmax_scale(found, 192) == pytest.approx(0.1352337788608801, rel=1e-9)
        assert rope_of(found, 64).attention_scale == 1.0


def test_gpt_oss_slides_in_every_second_layer_and_its_yarn_is_not_rounded():
    found = decoder_of_metadata(
        metadata(
            "gpt-oss",
            block_count=4,
            attention__sliding_window=128,
            rope__freq_base=150000.0,
            rope__scaling__type="yarn",
            rope__scaling__factor=32.0,
            rope__scaling__original_context_length=4096,
        ),
        "gpt_oss",
    )
    assert found["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert found["sliding_window"] == 128
    assert found["rope_parameters"]["truncate"] is False
    assert rope_of(found, 64).attention_scale == pytest.approx(0.1 * math.log(32) + 1)


def test_an_attention_factor_is_times_what_yarn_asks_for():
    found = decoder_of_metadata(
        metadata("qwen3moe", rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__attn_factor=0.5),
        "qwen3_moe",
    )
    assert found["rope_parameters"]["attention_factor"] == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize("value", ["many", [1, 2], True, -1, 0, None, float("nan"), 2**40])
def test_nonsense_does_not_keep_a_file_from_opening(value):
    for architecture, family in (("deepseek2", "deepseek_v2"), ("gpt-oss", "gpt_oss"), ("llama", "mixtral")):
        for key in (
            "block_count",
            "attention.head_count",
            "attention.key_length",
            "attention.kv_lora_rank",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scaling.type",
            "rope.scaling.factor",
            "rope.scaling.attn_factor",
            "rope.scaling.yarn_log_multiplier",
        ):
            given = metadata(architecture, rope__scaling__type="yarn", embedding_length=64) | {
                f"{architecture}.{key}": value
            }
            assert decoder_of_metadata(given, family)["rope_parameters"]
