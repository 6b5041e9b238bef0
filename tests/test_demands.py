"""A checkpoint that has or asks for more than its decoder computes is refused by name; what is harmless is not."""

import exact
import numpy as np
import pytest
from altered import altered, altered_gguf
from recorded import RTOL, assert_close, case, gguf_case, recorded

from fastcache import moe
from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint

LAYER = "model.layers.0."
ONES = np.ones(64, np.float32)


def forward(path, ids):
    with moe.load(path, budget="all") as model:
        return model.forward(ids)


def refused(path, said, error=UnsupportedCheckpoint):
    for experts in ("stream", "resident"):
        with pytest.raises(error, match=said):
            moe.load(path, experts=experts)


@pytest.mark.parametrize(
    ("family", "name", "array"),
    [
        ("mixtral", f"{LAYER}self_attn.q_proj.bias", ONES),
        ("mixtral", f"{LAYER}self_attn.q_norm.weight", ONES[:16]),
        ("mixtral", f"{LAYER}self_attn.sinks", ONES[:4]),
        ("mixtral", f"{LAYER}self_attn.gate_proj.weight", np.ones((64, 64), np.float32)),
        ("mixtral", f"{LAYER}self_attn.q_proj.lora_A.weight", np.ones((4, 64), np.float32)),
        ("mixtral", f"{LAYER}input_layernorm.bias", ONES),
        ("mixtral", f"{LAYER}pre_feedforward_layernorm.weight", ONES),
        ("mixtral", f"{LAYER}block_sparse_moe.gate.bias", ONES[:8]),
        ("mixtral", f"{LAYER}block_sparse_moe.shared_experts.up_proj.weight", np.ones((48, 64), np.float32)),
        ("mixtral", "model.norm.bias", ONES),
        ("mixtral", "model.embed_norm.weight", ONES),
        ("mixtral", "lm_head.bias", ONES),
        ("mixtral", "model.layers.7.input_layernorm.weight", ONES),  # the config says two layers
        ("qwen3_moe", f"{LAYER}self_attn.q_proj.bias", ONES),  # attention_bias is false
        ("qwen3_moe", "model.layers.1.mlp.up_proj.bias", ONES),  # a dense layer
        ("deepseek_v3", f"{LAYER}self_attn.q_b_proj.bias", ONES),
        ("deepseek_v3", f"{LAYER}self_attn.kv_b_proj.bias", ONES),
        ("deepseek_v3", f"{LAYER}self_attn.indexer.wk.weight", ONES),
        ("deepseek_v3", "model.layers.1.mlp.shared_experts.up_proj.bias", ONES),
        ("gpt_oss", f"{LAYER}self_attn.q_norm.weight", ONES[:16]),
    ],
)
def test_a_tensor_that_nothing_computes_with_is_named(tmp_path, family, name, array):
    refused(altered(case(family) / "f32", tmp_path / "model", tensors={name: array}), f"has {name}")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", f"{LAYER}self_attn.rotary_emb.inv_freq"),
        ("mixtral", f"{LAYER}self_attn.k_scale"),
        ("mixtral", f"{LAYER}self_attn.q_proj.input_scale"),
        ("mixtral", "vision_tower.layers.0.self_attn.q_proj.bias"),
        ("mixtral", "model.visual.blocks.0.norm.weight"),
        ("mixtral", "mtp.layers.0.input_layernorm.weight"),
        ("deepseek_v3", "model.layers.3.eh_proj.weight"),  # num_nextn_predict_layers is 1
    ],
)
def test_what_changes_no_token_is_passed_over(tmp_path, family, name):
    data = recorded(case(family))
    path = altered(case(family) / "f32", tmp_path / "model", tensors={name: ONES})
    assert_close(forward(path, data["input_ids"]), data["logits"])


def test_layers_that_draft_are_as_many_as_the_config_says(tmp_path):
    path = altered(case("deepseek_v3") / "f32", tmp_path / "model", tensors={"model.layers.4.eh_proj.weight": ONES})
    refused(path, "has model.layers.4.eh_proj.weight")
    config = {"num_nextn_predict_layers": 0}
    path = altered(case("deepseek_v3") / "f32", tmp_path / "none", config, {"model.layers.3.eh_proj.weight": ONES})
    refused(path, "has model.layers.3.eh_proj.weight")


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mixtral", {"attn_logit_softcapping": 50.0}),
        ("mixtral", {"final_logit_softcapping": 30.0}),
        ("mixtral", {"clip_qkv": 8.0}),
        ("mixtral", {"qk_layernorm": True}),
        ("mixtral", {"residual_multiplier": 0.22}),
        ("mixtral", {"logits_scaling": 8.0}),
        ("mixtral", {"attention_multiplier": 0.015}),
        ("mixtral", {"norm_topk_prob": False}),
        ("mixtral", {"routed_scaling_factor": 2.5}),
        ("mixtral", {"scoring_func": "sigmoid"}),
        ("mixtral", {"n_group": 8}),
        ("mixtral", {"swiglu_limit": 7.0}),
        ("mixtral", {"no_rope_layers": [1, 0]}),
        ("mixtral", {"position_embedding_type": "nope"}),
        ("mixtral", {"use_parallel_residual": True}),
        ("mixtral", {"attention_chunk_size": 8192}),
        ("qwen3_moe", {"use_qk_norm": False}),
        ("deepseek_v3", {"sliding_window": 128}),
        ("granitemoe", {"sliding_window": 128}),
    ],
)
def test_what_a_config_asks_for_and_is_not_computed_is_refused_by_its_key(tmp_path, family, config):
    ((key, value),) = config.items()
    said = f"{key} is {value!r}".replace("[", r"\[").replace("]", r"\]")
    refused(altered(case(family) / "f32", tmp_path / "model", config), said)


def test_what_a_config_may_say_and_asks_nothing_is_passed_over(tmp_path):
    config = {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 0.0,
        "clip_qkv": None,
        "qk_layernorm": False,
        "residual_multiplier": 1.0,
        "logits_scaling": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "no_rope_layers": [1, 1],
        "position_embedding_type": "rope",
        "layer_types": ["full_attention", "full_attention"],
    }
    data = recorded(case("mixtral"))
    assert_close(
        forward(altered(case("mixtral") / "f32", tmp_path / "model", config), data["input_ids"]), data["logits"]
    )


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("mixtral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has 'sliding_attention'"),
        ("gpt_oss", {"layer_types": ["sliding_attention", "chunked_attention"]}, "chunked_attention"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is None"),
        ("deepseek_v3", {"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "two ways"),
        ("mixtral", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "su"}}, "rope of kind 'su'"),
        ("mixtral", {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, "longrope"),
        ("mixtral", {"rms_norm_eps": None}, "rms_norm_eps is None"),
        ("mixtral", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("mixtral", {"num_attention_heads": 3}, "3 attention heads for 2"),
        ("mixtral", {"hidden_size": 32}, "hidden_size is 32"),
        ("mixtral", {"head_dim": 8}, "has shape"),
        ("qwen3_moe", {"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ("granitemoe", {"logits_scaling": float("nan")}, "logits_scaling is nan"),
    ],
)
def test_a_config_that_contradicts_itself_or_the_tensors_is_refused(tmp_path, family, config, said):
    refused(altered(case(family) / "f32", tmp_path / "model", config), said, CheckpointError)


def test_biases_that_the_config_promises_must_be_there(tmp_path):
    refused(altered(case("qwen3_moe") / "f32", tmp_path / "a", {"attention_bias": True}), "q_proj.bias", MissingTensor)
    refused(altered(case("deepseek_v3") / "f32", tmp_path / "b", {"attention_bias": True}), "bias", MissingTensor)
    gone = [r".*self_attn\.o_proj\.bias"]
    refused(altered(case("gpt_oss") / "f32", tmp_path / "c", drop=gone), "o_proj.bias", MissingTensor)


def test_a_bias_of_which_the_config_says_nothing_is_added(tmp_path):
    rows = {f"model.layers.{n}.self_attn.{each}_proj.bias": np.zeros(64 if each == "q" else 32, np.float32)
            for n in range(3) for each in "qkv"}  # fmt: skip
    data = recorded(case("qwen3_moe"))
    config = {"attention_bias": None}
    path = altered(case("qwen3_moe") / "f32", tmp_path / "zeros", config, rows)
    assert_close(forward(path, data["input_ids"]), data["logits"])
    path = altered(case("qwen3_moe") / "f32", tmp_path / "ones", config, {name: rows[name] + 1 for name in rows})
    assert np.abs(forward(path, data["input_ids"]) - data["logits"]).max() > 0.1


def test_heads_of_glm_are_rotated_by_half_where_the_config_is_silent(tmp_path):
    data = recorded(case("glm4_moe"))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    path = altered(case("glm4_moe") / "f32", tmp_path / "model", {"rope_parameters": rope})
    assert_close(forward(path, data["input_ids"]), data["logits"])


def test_a_stored_head_counts_and_without_one_tied_weights_are_the_embeddings(tmp_path):
    data = recorded(case("mixtral"))
    path = altered(case("mixtral") / "f32", tmp_path / "both", {"tie_word_embeddings": True})
    assert_close(forward(path, data["input_ids"]), data["logits"])
    path = altered(case("mixtral") / "f32", tmp_path / "tied", {"tie_word_embeddings": True}, drop=[r"lm_head\..*"])
    embedding = altered(
        case("mixtral") / "f32", tmp_path / "copied", tensors={"lm_head.weight": _embedding(case("mixtral") / "f32")}
    )
    assert forward(path, data["input_ids"]).tobytes() == forward(embedding, data["input_ids"]).tobytes()
    refused(altered(case("mixtral") / "f32", tmp_path / "none", drop=[r"lm_head\..*"]), "lm_head", MissingTensor)


def _embedding(source):
    with moe.load(source, experts="resident") as model:
        return np.array(model.trunk["model.embed_tokens.weight"])


def test_biases_of_experts_that_the_family_has_not_are_refused(tmp_path):
    bias = np.ones((4, 256), np.float32)
    path = altered_gguf(gguf_case("qwen3moe-q2_k"), tmp_path / "model.gguf", tensors={"blk.0.ffn_gate_exps.bias": bias})
    refused(path, "without gate.bias, and expert 0 has one that is not zero")


def test_biases_of_zeros_are_passed_over_as_some_quantisers_write_them(tmp_path):
    source = gguf_case("qwen3moe-q2_k")
    tensors = {
        "blk.0.ffn_gate_exps.bias": np.zeros((4, 256), np.float32),
        "blk.0.attn_output.bias": np.zeros(256, np.float32),
        "output.bias": np.zeros(288, np.float32),
    }
    path = altered_gguf(source, tmp_path / "model.gguf", tensors=tensors)
    assert_close(forward(path, recorded(source)["input_ids"]), recorded(source)["logits"])


def test_the_multipliers_of_granite_are_those_of_its_weights(tmp_path):
    """What a multiplier does to a sum, a weight of that many times the size does too; powers of two keep every bit."""
    source, ids = case("granitemoe") / "f32", recorded(case("granitemoe"))["input_ids"]
    multipliers = {
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.5,
        "logits_scaling": 8.0,
    }
    layers = [f"model.layers.{n}." for n in range(2)]
    times = {"model.embed_tokens.weight": 4, "lm_head.weight": 0.125}
    times |= {f"{layer}self_attn.q_proj.weight": 0.5 for layer in layers}
    times |= {f"{layer}self_attn.o_proj.weight": 0.25 for layer in layers}
    times |= {f"{layer}block_sparse_moe.output_linear.weight": 0.25 for layer in layers}
    scaled = {name: (lambda array, by=by: array * np.float32(by)) for name, by in times.items()}
    got = forward(altered(source, tmp_path / "said", multipliers), ids)
    wanted = forward(altered(source, tmp_path / "done", tensors=scaled), ids)
    assert got.tobytes() == wanted.tobytes()
    assert np.abs(got - recorded(case("granitemoe"))["logits"]).max() > 0.1


def test_an_embedding_whose_numbers_need_a_scale_is_refused(tmp_path):
    tensors = {"model.embed_tokens.weight_scale": np.full((128, 1), 2, np.float32)}
    refused(altered(case("mixtral") / "bf16", tmp_path / "model", tensors=tensors), "embed_tokens.weight' is stored as")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_q.bias", (128,)),
        ("blk.0.attn_sinks.weight", (4,)),
        ("blk.0.attn_q.scale", (1,)),
        ("blk.0.attn_sub_norm.weight", (64,)),
        ("rope_factors_long.weight", (16,)),
        ("output.bias", (288,)),
        ("token_embd_norm.weight", (64,)),
        ("blk.2.attn_norm.weight", (64,)),
    ],
)
def test_more_tensors_in_a_gguf_file_are_named(tmp_path, name, shape):
    path = altered_gguf(gguf_case("llama-q4_0"), tmp_path / "model.gguf", tensors={name: np.ones(shape, np.float32)})
    refused(path, f"has {name}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (".attn_logit_softcapping", 50.0),
        (".final_logit_softcapping", 30.0),
        (".attention.clamp_kqv", 8.0),
        (".attention.scale", 0.5),
        (".attention.sliding_window", 128),
        (".residual_scale", 0.22),
        (".logit_scale", 8.0),
        (".use_parallel_residual", True),
        (".attention.causal", False),
        (".expert_group_count", 4),
        (".expert_gating_func", 2),
        (".expert_weights_scale", 2.5),
        (".rope.scaling.type", "longrope"),
        (".attention.some_new_thing", 1),
    ],
)
def test_metadata_that_asks_for_more_is_refused_by_its_key(tmp_path, key, value):
    path = altered_gguf(gguf_case("llama-q4_0"), tmp_path / "model.gguf", {key: value})
    known = {
        ".attention.clamp_kqv": "clip_qkv",
        ".expert_group_count": "n_group",
        ".expert_gating_func": "scoring_func",
        ".expert_weights_scale": "routed_scaling_factor",
        ".rope.scaling.type": "kind 'longrope'",
    }
    refused(path, known.get(key, f"llama{key} is"))


def test_metadata_that_asks_nothing_is_passed_over(tmp_path):
    said = {
        ".attn_logit_softcapping": 0.0,
        ".attention.clamp_kqv": 0.0,
        ".attention.sliding_window": 0,
        ".attention.causal": True,
        ".use_parallel_residual": False,
        ".expert_weights_scale": 0.0,
        ".rope.scaling.type": "none",
        ".tensor_data_layout": "Meta AI original pth",
        "quantize.imatrix.entries_count": 3,
    }
    source = gguf_case("llama-q4_0")
    path = altered_gguf(source, tmp_path / "model.gguf", said)
    assert_close(forward(path, recorded(source)["input_ids"]), recorded(source)["logits"])


def test_frequency_factors_divide_the_frequencies_of_llama_files(tmp_path):
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    path = altered_gguf(gguf_case("llama-q4_0"), tmp_path / "llama.gguf", tensors={"rope_freqs.weight": factors})
    ids = recorded(gguf_case("llama-q4_0"))["input_ids"]
    with moe.load(path, budget="all") as model:
        base = model.config["rope_parameters"]["rope_theta"]
        wanted = exact.logits(path, ids, base=base, factors=factors)
        got = model.forward(ids)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=RTOL * np.abs(wanted).max())
        assert np.abs(got - exact.logits(path, ids, base=base)).max() > 0.01
        assert list(model.generate(ids, 4, stop=())) == exact.greedy(path, ids, 4, base=base, factors=factors)


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        (np.ones(8, np.float32), "rope_freqs.weight' has shape"),
        (np.zeros(16, np.float32), "not above 0"),
        (np.full(16, np.nan, np.float32), "rope_freqs.weight' is damaged"),
    ],
)
def test_frequency_factors_that_cannot_be_are_refused(tmp_path, factors, said):
    path = altered_gguf(gguf_case("llama-q4_0"), tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors})
    refused(path, said, CheckpointError)


def test_two_norms_where_a_decoder_has_one_are_refused(tmp_path):
    tensors = {"blk.1.post_attention_norm.weight": np.ones(64, np.float32)}
    path = altered_gguf(gguf_case("llama-q4_0"), tmp_path / "model.gguf", tensors=tensors)
    refused(path, r"has 'blk\.1\.ffn_norm.weight' and 'blk\.1\.post_attention_norm.weight'")


def test_frequency_factors_of_other_architectures_are_refused(tmp_path):
    tensors = {"rope_freqs.weight": np.ones(16, np.float32)}
    path = altered_gguf(gguf_case("qwen3moe-mxfp4"), tmp_path / "model.gguf", tensors=tensors)
    refused(path, "has rope_freqs.weight")
