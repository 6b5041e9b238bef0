"""What a config may ask of a decoder that none here computes: refused by its key, never passed over.

Owns the tables of keys, and which of their values ask for nothing. Knows no tensor. Imports errors and layout.families
(config spellings). Sources: transformers' configuration files; gguf's constants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value

Config: TypeAlias = Mapping[str, Any]
Neutral: TypeAlias = Callable[[Any], bool]


def _one_of(*values: float) -> Neutral:
    return lambda value: isinstance(value, (int, float)) and value in values


def anything(value: Any) -> bool:
    """Pass every value: the row computes with the key, or judges it itself."""
    return True


def words(*values: str) -> Neutral:
    """Return what only these words pass."""
    return lambda value: value in values


_OFF: Final = _one_of(False, 0)
_ONE: Final = _one_of(1)
_ONE_OR_NONE: Final = _one_of(0, 1)
ON: Final = _one_of(True)
_NEVER: Final = _one_of()

# Key of config.json -> whether a value asks for nothing. Null and absent never do.
_CONFIG: Final[Mapping[str, Neutral]] = {
    # of the scores and the logits
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "logits_soft_cap"), _OFF
    ),
    **dict.fromkeys(("logits_scaling", "logit_scale", "residual_multiplier", "embedding_multiplier"), _ONE),
    **dict.fromkeys(("scale_emb", "embed_scale", "rope_ratio", "rotary_pct"), _ONE),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth", "dim_model_base"), _NEVER),
    **dict.fromkeys(("attn_temperature_tuning", "mup_enabled"), _OFF),
    # of the attention
    "clip_qkv": _NEVER,
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "qk_norm", "use_qkv_norm"), _OFF),
    **dict.fromkeys(("attn_output_gate", "use_head_wise_attn_gate", "add_swa_attention_sink_bias"), _OFF),
    **dict.fromkeys(("add_full_attention_sink_bias", "alibi", "use_alibi", "use_bidirectional_attention"), _OFF),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_pattern"), _OFF),
    **dict.fromkeys(("num_kv_shared_layers", "use_cla", "rope_local_base_freq", "no_rope_layer_interval"), _OFF),
    "no_rope_layers": lambda value: isinstance(value, list) and all(value),
    "position_embedding_type": words("rope", "rotary"),
    "is_causal": ON,
    # of a layer
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "sandwich_norm"), _OFF),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "zero_centered_gamma"), _OFF),
    **dict.fromkeys(("mlp_bias", "use_bias", "lm_head_bias", "use_mlp_bias"), _OFF),
    # of the routing and the experts
    "routed_scaling_factor": _ONE_OR_NONE,
    **dict.fromkeys(("n_group", "topk_group"), _ONE_OR_NONE),
    "scoring_func": words("softmax"),
    "moe_router_activation_func": words("softmax"),
    "norm_topk_prob": ON,
    "swiglu_limit": _OFF,
    **dict.fromkeys(("moe_latent_size", "routed_expert_hidden_size", "zero_expert_num"), _OFF),
}

# Keys of a GGUF file after "architecture.", that are read, or change no number.
_READ: Final = frozenset(
    "vocab_size context_length embedding_length block_count leading_dense_block_count feed_forward_length "
    "expert_feed_forward_length expert_shared_feed_forward_length tensor_data_layout expert_count expert_used_count "
    "expert_shared_count expert_group_count expert_group_used_count expert_weights_scale expert_weights_norm "
    "expert_gating_func nextn_predict_layers attention.head_count attention.head_count_kv attention.key_length "
    "attention.value_length attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.q_lora_rank "
    "attention.kv_lora_rank attention.key_length_mla attention.value_length_mla "
    "attention.clamp_kqv rope.dimension_count rope.dimension_sections rope.freq_base rope.scaling.type "
    "rope.scaling.factor rope.scaling.attn_factor rope.scaling.original_context_length rope.scaling.finetuned "
    "rope.scaling.yarn_log_multiplier rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow".split()
)
_METADATA: Final[Mapping[str, Neutral]] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), _OFF),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "attention.scale"), _OFF),
    **dict.fromkeys(("attention.max_alibi_bias", "attention.shared_kv_layers", "attention.temperature_scale"), _OFF),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step", "expert_group_scale"), _ONE_OR_NONE),
    **dict.fromkeys(("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor", "rope.scale_linear"), _ONE),
    "attention.causal": ON,
    "attention.sliding_window": _OFF,
    "use_parallel_residual": _OFF,
}


def check_config(config: Config, takes: Mapping[str, Neutral]) -> None:
    """Refuse a config that asks for what is not computed.

    Parameters
    ----------
    config : mapping
        config.json, or a GGUF file's metadata in its words.
    takes : mapping of str to callable
        Of keys of the table, what the family's row says instead: `anything` where it computes with the key.

    Raises
    ------
    UnsupportedCheckpoint
        The message names the key and its value.
    """
    metadata = config.get("gguf")
    if isinstance(metadata, Mapping):
        _check_metadata(metadata)
    for key, neutral in _CONFIG.items():
        value = config_value(config, key)
        if value is not None and not takes.get(key, neutral)(value):
            raise UnsupportedCheckpoint(_text(f"config.json: {key}", value))


def _check_metadata(metadata: Config) -> None:
    prefix = f"{metadata.get('general.architecture')}."
    for key, value in metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _READ or (name in _METADATA and _METADATA[name](value)):
            continue
        if key != "gpt-oss.attention.sliding_window":
            raise UnsupportedCheckpoint(_text(key, value))


def _text(key: str, value: object) -> str:
    return (
        f"{key} is {value!r}, which this family's NumPy decoder does not compute: its tokens would be others. "
        f"The bytes are served: use fastcache.open and your own forward"
    )
