"""Recorded checkpoints as GGUF files, converted as llama.cpp's scripts do it: names by the gguf package's own table."""

import json
import re

import gguf as package
import numpy as np
from trunks import tensors_of

ARCHITECTURES = {
    "mixtral": "LLAMA",
    "qwen2_moe": "QWEN2MOE",
    "olmoe": "OLMOE",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
    "kimi_k2": "DEEPSEEK2",
    "gpt_oss": "GPT_OSS",
    "glm4_moe": "GLM4_MOE",
}


def as_gguf(source, path, family):
    """Write the F32 checkpoint in directory `source` to `path`."""
    config = json.loads((source / "config.json").read_text())
    architecture = package.MODEL_ARCH[ARCHITECTURES[family]]
    writer = package.GGUFWriter(path, package.MODEL_ARCH_NAMES[architecture])
    _add_metadata(writer, config, family)
    table = package.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, array in _tensors(tensors_of(source), config, family):
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(tensors, config, family):
    """Give (name in the table's words, array)."""
    experts = {}
    for name, array in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.([0-9]+)\.(\w+)\.weight", name)
        if match:
            stem, expert, role = match.groups()
            if role in ("w1", "w2", "w3"):
                stem = stem.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            experts.setdefault(f"{stem}.{role}.weight", {})[int(expert)] = array
        elif "experts.gate_up_proj" in name:  # gpt-oss: [E, H, 2I] or [E, 2I], alternating
            stem, bias = name.removesuffix("_bias").replace("gate_up", "{}"), name.endswith("_bias")
            for start, role in enumerate(("gate", "up")):
                half = array[..., start::2]
                yield (
                    (f"{stem.format(role)}.bias", half)
                    if bias
                    else (f"{stem.format(role)}.weight", half.swapaxes(1, 2))
                )
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", array.swapaxes(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            yield name.replace("_bias", ".bias"), array
        elif name.endswith("kv_b_proj.weight"):
            heads, nope, value = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
            both = array.reshape(heads, nope + value, -1)
            yield name.replace("kv_b", "k_b"), both[:, :nope].swapaxes(1, 2)
            yield name.replace("kv_b", "v_b"), both[:, nope:]
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), array
        elif name.endswith("sinks"):
            yield f"{name}.weight", array
        elif family == "mixtral" and re.search(r"self_attn\.[qk]_proj", name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            yield name, array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        else:
            yield name, array
    for name, found in experts.items():
        yield name, np.stack([found[expert] for expert in range(len(found))])


def _add_metadata(writer, c, family):
    rope = c["rope_parameters"]
    head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_expert_count(
        next(c[key] for key in ("n_routed_experts", "num_local_experts", "num_experts") if key in c)
    )
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(c.get("moe_intermediate_size", c["intermediate_size"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "kv_lora_rank" in c:
        writer.add_head_count_kv(1)
        writer.add_q_lora_rank(c["q_lora_rank"])
        writer.add_kv_lora_rank(c["kv_lora_rank"])
        writer.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
        writer.add_value_length(c["kv_lora_rank"])
        writer.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        writer.add_value_length_mla(c["v_head_dim"])
        writer.add_rope_dimension_count(c["qk_rope_head_dim"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    else:
        writer.add_head_count_kv(c["num_key_value_heads"])
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if family in ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe"):
        writer.add_leading_dense_block_count(c["first_k_dense_replace"])
        writer.add_expert_shared_count(c["n_shared_experts"])
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
        writer.add_expert_weights_norm(c["norm_topk_prob"])
        sigmoid = family != "deepseek_v2"
        writer.add_expert_gating_func(
            package.ExpertGatingFuncType.SIGMOID if sigmoid else package.ExpertGatingFuncType.SOFTMAX
        )
        if c["n_group"] > 1:
            writer.add_expert_group_count(c["n_group"])
            writer.add_expert_group_used_count(c["topk_group"])
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if family == "gpt_oss":
        writer.add_sliding_window(c["sliding_window"])
