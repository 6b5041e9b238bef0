"""What GGUF metadata says of a decoder around its experts, in config.json's words; and tensor names in the hub's.

Nothing is refused here: a file whose decoder cannot be computed is still served. Values are passed on as they are, and
what reads the config judges them. Sources: gguf's constants.py; llama.cpp's llama-model.cpp and llama-context.cpp, for
what a missing key means; its conversion scripts, for what was done to the tensors. Imports nothing of ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

_KEYS: Final = {
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.clamp_kqv": "clip_qkv",
}
_LATENT: Final = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "attention.value_length_mla": "v_head_dim",
}
_SCALING: Final = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}

_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",  # gpt-oss and GLM-4
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # [heads, rank, nope]: a half of kv_b_proj, transposed
    "attn_v_b": "self_attn.v_b_proj",  # [heads, value, rank]: the other half
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MOST_LAYERS: Final = 10_000  # a list is made of them, and a header may say anything
_NAME = re.compile(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)")


def decoder_of_metadata(metadata: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return what config.json would say of a model of `family` around its experts.

    `rope_interleave` is true where rows of queries and keys were permuted so that rotated pairs are neighbours.
    """
    architecture = metadata.get("general.architecture")

    def value(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    config = {name: value(key) for key, name in _KEYS.items() if value(key) is not None}
    if config.get("clip_qkv") == 0:
        del config["clip_qkv"]  # none, as llama.cpp reads it
    parameters = _rope(value)
    if value("attention.kv_lora_rank") is None:
        heads, hidden = config.get("num_attention_heads"), value("embedding_length")
        if "head_dim" not in config and _whole(heads) and _whole(hidden):
            config["head_dim"] = hidden // heads
        rotary, head = value("rope.dimension_count"), config.get("head_dim")
        if rotary is not None:
            parameters["partial_rotary_factor"] = rotary / head if _whole(rotary) and _whole(head) else rotary
        if value("attention.value_length") is not None:
            config["v_head_dim"] = value("attention.value_length")
    else:
        config |= {name: value(key) for key, name in _LATENT.items() if value(key) is not None}
        config.pop("head_dim", None)  # of the latent, or of the expanded keys in old files
        head, rotary = value("attention.key_length_mla") or value("attention.key_length"), value("rope.dimension_count")
        if _whole(head) and _whole(rotary):
            config["qk_nope_head_dim"] = head - rotary
        config.setdefault("v_head_dim", value("attention.value_length"))
        # Written as 0.1 mscale_all_dim for this architecture; mscale is not written, and is the same in all of these.
        multiplier = value("rope.scaling.yarn_log_multiplier")
        if _real(multiplier) and parameters["rope_type"] == "yarn":
            parameters["mscale"] = parameters["mscale_all_dim"] = round(multiplier / 0.1, 6)
    if architecture == "llama":
        config["rope_interleave"] = True
    if family == "gpt_oss":
        config["sliding_window"] = value("attention.sliding_window")
        layers = value("block_count")
        if _whole(layers) and layers <= _MOST_LAYERS:
            config["layer_types"] = [("sliding", "full")[layer % 2] + "_attention" for layer in range(layers)]
        parameters["truncate"] = False  # the model's; GGUF has no key for it
    config["rope_parameters"] = parameters
    return config


def hub_name(name: str) -> str:
    """Return the hub's name of a GGUF tensor: "blk.3.attn_q.weight" is "model.layers.3.self_attn.q_proj.weight".

    Names that are no decoder's around its MoE blocks are returned as they are.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, module, suffix = match.groups()
    if module == "attn_sinks":
        return f"model.layers.{layer}.self_attn.sinks"
    return f"model.layers.{layer}.{_LAYER[module]}.{suffix}" if module in _LAYER else name


def _rope(value: Any) -> dict[str, Any]:
    parameters = {name: value(key) for key, name in _SCALING.items() if value(key) is not None}
    if "factor" not in parameters and value("rope.scale_linear"):  # its name in old files
        parameters["factor"] = value("rope.scale_linear")
    if parameters.get("factor") == 0:  # none, too
        del parameters["factor"]
    parameters["rope_theta"] = 10000.0 if value("rope.freq_base") is None else value("rope.freq_base")
    kind = value("rope.scaling.type") or "linear"
    none = kind == "none" or (kind == "linear" and "factor" not in parameters)
    parameters["rope_type"] = "default" if none else kind
    given, factor = value("rope.scaling.attn_factor"), parameters.get("factor")
    if kind == "yarn" and _real(given) and _real(factor):
        # llama.cpp: times what YaRN asks for.
        parameters["attention_factor"] = given * (0.1 * math.log(max(factor, 1)) + 1)
    return parameters


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _real(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and 0 < value < math.inf
