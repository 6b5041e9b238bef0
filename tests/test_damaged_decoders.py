"""Decoders of damaged checkpoints: an error of the checkpoint when it is loaded or computed, never other tokens."""

import json
import re

import numpy as np
import pytest
from altered import altered, altered_gguf
from recorded import case, gguf_case, recorded
from trunks import tensors_of

from fastcache import moe
from fastcache.errors import CheckpointError, CheckpointTruncated, FastcacheError, MissingTensor, UnsupportedCheckpoint

NAN, INF = float("nan"), float("inf")
LAYER = "model.layers.0."


def narrower(array):
    """Of the 64 numbers of a hidden state, all but two."""
    return array[:-2] if len(array) == 64 else array[:, :-2]


def with_one(value):
    """Return a change that puts a value into the middle of an array."""

    def change(stored):
        array = stored.copy()
        array.reshape(-1)[array.size // 2] = value
        return array

    return change


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", f"{LAYER}input_layernorm.weight"),
        ("mixtral", "model.norm.weight"),
        ("mixtral", f"{LAYER}block_sparse_moe.gate.weight"),
        ("qwen3_moe", f"{LAYER}self_attn.q_norm.weight"),
        ("gpt_oss", f"{LAYER}self_attn.sinks"),
        ("gpt_oss", f"{LAYER}self_attn.k_proj.bias"),
        ("gpt_oss", f"{LAYER}mlp.router.bias"),
        ("deepseek_v3", f"{LAYER}self_attn.kv_a_layernorm.weight"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_a_small_tensor_with_a_number_that_is_none_is_refused_at_load(tmp_path, family, name, value):
    path = altered(case(family) / "bf16", tmp_path / "model", tensors={name: with_one(value)})
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}' is damaged: 1 of"):
        moe.load(path)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("mixtral", f"{LAYER}self_attn.q_proj.weight", "layer 0"),
        ("mixtral", "model.layers.1.self_attn.o_proj.weight", "layer 1"),
        ("qwen3_moe", "model.layers.1.mlp.up_proj.weight", "layer 1"),
        ("deepseek_v3", f"{LAYER}self_attn.kv_b_proj.weight", "layer 0"),
        ("deepseek_v3", "model.layers.2.mlp.shared_experts.up_proj.weight", "layer 2"),
        ("mixtral", "lm_head.weight", r"lm_head\.weight"),
    ],
)
def test_a_large_one_when_it_is_computed_with_and_the_cache_is_as_it_was(tmp_path, family, name, value, said):
    path = altered(case(family) / "bf16", tmp_path / "model", tensors={name: with_one(value)})
    ids = recorded(case(family))["input_ids"]
    for trunk in ("mapped", "resident"):
        with moe.load(path, trunk=trunk) as model:
            cache = model.new_cache()
            with pytest.raises(CheckpointError, match=f"^{said} gives numbers that are NaN or infinite"):
                model.forward(ids, cache)
            assert [each.length for each in cache] == [0] * model.layers
            with pytest.raises(CheckpointError, match=said):
                next(model.generate(ids, 1))


def test_an_expert_with_a_number_that_is_none_is_found_by_its_layer(tmp_path):
    tensors = {f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight": with_one(NAN) for e in range(8)}
    path = altered(case("mixtral") / "bf16", tmp_path / "model", tensors=tensors)
    for experts in ("stream", "resident"):
        with moe.load(path, experts=experts) as model, pytest.raises(CheckpointError, match="^layer 1 gives"):
            model.forward([1, 2, 3])


def test_a_damaged_row_of_the_embedding_ends_what_uses_it_alone(tmp_path):
    def change(stored):
        array = stored.copy()
        array[7, 3] = NAN
        return array

    path = altered(case("mixtral") / "bf16", tmp_path / "model", tensors={"model.embed_tokens.weight": change})
    with moe.load(path) as model:
        assert np.isfinite(model.forward([1, 2, 3])).all()
        with pytest.raises(CheckpointError, match=r"^model\.embed_tokens\.weight gives numbers"):
            model.forward([1, 7, 3])


@pytest.mark.parametrize(
    ("name", "drop", "said"),
    [
        ("model.embed_tokens.weight", 1, "embed_tokens.* has shape"),
        ("model.norm.weight", 1, r"model.norm.weight' has shape \(63,\); by the config it should be \(64,\)"),
        ("lm_head.weight", 1, r"lm_head.weight' has shape \(127, 64\); by the config it should be \(128, 64\)"),
        (f"{LAYER}self_attn.q_proj.weight", 1, "q_proj.weight' has shape"),
        (f"{LAYER}self_attn.k_proj.weight", 16, "k_proj.weight' has shape"),
        (f"{LAYER}self_attn.v_proj.weight", 16, "v_proj.weight' has shape"),
        (f"{LAYER}self_attn.o_proj.weight", 1, "o_proj.weight' has shape"),
        (f"{LAYER}post_attention_layernorm.weight", 1, "has shape"),
        (f"{LAYER}block_sparse_moe.gate.weight", 1, "router has shape"),
    ],
)
def test_a_tensor_of_another_shape_is_named_at_load(tmp_path, name, drop, said):
    change = (lambda a: a[:, :-1]) if name == "model.embed_tokens.weight" else (lambda a: a[:-drop])
    path = altered(case("mixtral") / "f32", tmp_path / "model", tensors={name: change})
    with pytest.raises(UnsupportedCheckpoint, match=said):
        moe.load(path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.1.mlp.gate_proj.weight", lambda a: a[:-1]),  # of a dense layer
        ("model.layers.1.mlp.down_proj.weight", lambda a: a[:, :-1]),
        (f"{LAYER}self_attn.q_norm.weight", lambda a: a[:-1]),
        (f"{LAYER}mlp.experts.0.down_proj.weight", lambda a: a[:-1]),
        (f"{LAYER}mlp.experts.3.up_proj.weight", lambda a: a[:-1]),
    ],
)
def test_shapes_of_a_layer_fit_each_other_or_are_refused_at_load(tmp_path, name, change):
    path = altered(case("qwen3_moe") / "f32", tmp_path / "model", tensors={name: change})
    with pytest.raises(CheckpointError, match="shape|stored"):
        moe.load(path)


@pytest.mark.parametrize(
    ("family", "names", "change", "said"),
    [
        ("mixtral", r".*experts\.\d+\.w[123]\.weight", narrower, "experts: 'gate' has shape"),  # by themselves they fit
        ("deepseek_v3", r".*shared_experts\.up_proj\.weight", lambda a: a[:-1], "shared expert: 'up' has shape"),
        ("deepseek_v3", r".*shared_experts\.down_proj\.weight", lambda a: a[:, :-1], "shared expert: 'down' has shape"),
    ],
)
def test_experts_that_could_not_be_multiplied_by_are_refused_at_load(tmp_path, family, names, change, said):
    source = case(family) / "bf16"
    tensors = {name: change for name in tensors_of(source) if re.fullmatch(names, name)}
    path = altered(source, tmp_path / "model", tensors=tensors)
    for experts in ("stream", "resident"):
        with pytest.raises(UnsupportedCheckpoint, match=said):
            moe.load(path, experts=experts)


@pytest.mark.parametrize("key", ["q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"])
@pytest.mark.parametrize("by", [-2, 2])
def test_latent_sizes_that_are_not_the_tensors_are_refused_at_load(tmp_path, key, by):
    said = json.loads((case("deepseek_v3") / "f32" / "config.json").read_text())[key]
    path = altered(case("deepseek_v3") / "f32", tmp_path / "model", {key: said + by})
    with pytest.raises(UnsupportedCheckpoint, match="has shape .*; by the config it should be"):
        moe.load(path)


@pytest.mark.parametrize("value", [0, -1, "16", 1.5, True, [16]])
@pytest.mark.parametrize("key", ["q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "num_attention_heads"])
def test_latent_sizes_that_are_no_sizes_are_refused_by_name(tmp_path, key, value):
    path = altered(case("deepseek_v3") / "f32", tmp_path / "model", {key: value})
    with pytest.raises(UnsupportedCheckpoint, match=key if value is not True or key[0] != "q" else "."):
        moe.load(path)


def test_a_query_that_is_compressed_needs_its_rank(tmp_path):
    path = altered(case("deepseek_v3") / "f32", tmp_path / "model", {"q_lora_rank": None})
    with pytest.raises(MissingTensor, match="q_proj"):
        moe.load(path)


@pytest.mark.parametrize("at", [0.2, 0.5, 0.95])
def test_a_file_that_ends_early_is_truncated_at_load(tmp_path, at):
    whole = gguf_case("llama-q4_0").read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[: int(at * len(whole))])
    with pytest.raises(CheckpointTruncated):
        moe.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["llama-q4_0", "qwen3moe-mxfp4"])
def test_no_value_of_a_metadata_key_is_a_bare_error_or_other_tokens_unsaid(tmp_path, name):
    """Whatever stands there: refused as an error of the checkpoint, or the tokens are those of the file."""
    source, path = gguf_case(name), tmp_path / "model.gguf"
    ids = recorded(source)["input_ids"][:4]
    with moe.load(source) as model:
        wanted = model.forward(ids).tobytes()
    decides = {".rope.freq_base", ".expert_used_count", ".attention.layer_norm_rms_epsilon", ".nextn_predict_layers"}
    keys = [
        *decides,
        ".attention.head_count",
        ".attention.head_count_kv",
        ".attention.key_length",
        ".attention.value_length",
        ".rope.dimension_count",
        ".block_count",
        ".embedding_length",
        ".expert_count",
        ".context_length",
        "general.architecture",
        "tokenizer.ggml.eos_token_id",
    ]
    refused = 0
    for key in keys:
        for value in (0, 1, 3, 2**31, -1, 1.5, NAN, INF, "text", "", True, [1, 2], []):
            altered_gguf(source, path, {key: value})
            try:
                with moe.load(path, experts="resident") as model:
                    got = model.forward(ids).tobytes()
            except FastcacheError:
                refused += 1
            else:
                assert got == wanted or key in decides, (key, value)
    assert refused > len(keys)


@pytest.mark.parametrize(
    ("metadata", "keys", "said"),
    [
        ({".expert_used_count": 9}, (), "top-k is 9 and the layer has 8"),
        ({".block_count": 0}, (), "num_hidden_layers is None"),
        ({".attention.head_count": 3}, (), "3 attention heads for 2"),
        ({".attention.value_length": 16}, (), "v_head_dim is 16, head_dim 32"),
        ({".rope.dimension_count": "all"}, (), "partial_rotary_factor of the rope is 'all'"),
        ({}, [r"\.attention\.layer_norm_rms_epsilon"], "rms_norm_eps is None"),
        ({}, [r"\.attention\.head_count"], "num_attention_heads is None"),
        ({}, [r"\.embedding_length"], "hidden_size is None"),
        ({}, [r"\.block_count"], "num_hidden_layers is None"),
        ({}, [r"\.expert_used_count"], "top-k is None"),
        ({}, [r"general\.architecture"], "no NumPy decoder"),
        ({"tokenizer.ggml.eos_token_id": "end"}, (), "eos_token_id is 'end'"),
    ],
)
def test_what_a_gguf_file_lacks_or_says_wrongly_is_named(tmp_path, metadata, keys, said):
    path = altered_gguf(gguf_case("llama-q4_0"), tmp_path / "model.gguf", metadata, keys=keys)
    with pytest.raises(CheckpointError, match=said):
        moe.load(path)


def test_a_file_without_a_tokenizer_has_no_end_and_computes_all_the_same(tmp_path):
    source = gguf_case("llama-q4_0")
    path = altered_gguf(source, tmp_path / "model.gguf", keys=[r"tokenizer\..*"])
    with moe.load(path) as model, moe.load(source) as whole:
        assert model.eos == frozenset()
        ids = recorded(source)["input_ids"]
        assert model.forward(ids).tobytes() == whole.forward(ids).tobytes()


def test_blocks_whose_scale_is_none_are_found_when_they_are_computed_with(tmp_path):
    def change(raw):  # Q8_0: a float16 scale before 32 bytes
        return b"\x00\x7e" + raw[2:]

    source = gguf_case("llama-q4_0")
    path = altered_gguf(source, tmp_path / "model.gguf", tensors={"blk.1.attn_v.weight": change})
    with moe.load(path) as model, pytest.raises(CheckpointError, match="^layer 1 gives numbers"):
        model.forward([1, 2, 3])
