"""The table of model families: which tensors are routed experts, and what each of them means. One row per family.

Names and orientations are those of transformers' `save_pretrained` and of the hub, by family; nothing here is guessed
from sizes. A model that is missing: `fastcache.register_family`. Knows no file. Imports errors only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fastcache.errors import CheckpointError

# Multi-token-prediction layers: extra decoder layers that draft tokens. Never the decoder's own experts.
MTP_PREFIX = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:[_.]|$)")


@dataclass(frozen=True, slots=True)
class Fused:
    """How to read one stored tensor [E, ...] that holds a part of every expert of a layer."""

    roles: tuple[str, ...]  # ("gate", "up"), ("down",), ("gate.bias", "up.bias")
    transposed: bool = False  # stored [in, out]; a label's array is always [out, in]
    interleaved: bool = False  # rows of out alternate gate, up, gate, up; else all gate rows come first
    encoded: bool = False  # blocks or scales, [out, ...]: rows of a role under role + the last word of the name
    flat: bool = False  # stored [E * rows, columns]: the config's number of experts cuts it


@dataclass(frozen=True, slots=True)
class Family:
    """One row: where the experts of a model family are, and what the config calls their number.

    A key of the config may be a path: "ffn_config.moe_top_k".
    """

    name: str
    model_types: tuple[str, ...]  # values of config.json's model_type
    block: str = "mlp.experts"  # path inside a layer, up to the expert's number or to the fused tensor's name
    roles: Mapping[str, str] = field(default_factory=dict)  # per-expert module -> "gate", "up", "down"
    fused: Mapping[str, Fused] = field(default_factory=dict)  # stored name after `block` -> how to read it
    stacked: frozenset[str] = frozenset()  # modules of `roles` that are tensors [E, out, in], of one role each
    n_experts: tuple[str, ...] = ("num_experts", "num_local_experts")  # config keys, the first present wins
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    signature: tuple[str, ...] = ()  # stored names after `block`; any of them tells the family without a config
    also: tuple[str, ...] = ()  # other blocks that some files of the family have, with the same names after it
    gguf: tuple[str, ...] = ()  # general.architecture, where it is not the family's name
    trunk: tuple[str, ...] = ()  # blocks whose experts are not the layer's: JetMoE has some in its attention
    identity: str = ""  # config key: this many numbers after the experts' are experts that pass on what they are given


_PROJ = MappingProxyType({"gate_proj": "gate", "up_proj": "up", "down_proj": "down"})
_W123 = MappingProxyType({"w1": "gate", "w3": "up", "w2": "down"})
# What transformers 5 has in memory for all of these, and some files have too: [E, 2I, H] and [E, H, I].
_V5 = MappingProxyType({"gate_up_proj": Fused(("gate", "up")), "down_proj": Fused(("down",))})
_GRANITE = MappingProxyType(
    {"input_linear.weight": Fused(("gate", "up")), "output_linear.weight": Fused(("down",))}  # [E, 2I, H], [E, H, I]
)
_ROUTED = ("n_routed_experts", "num_experts")
_LOCAL = ("num_local_experts", "num_experts")


def _proj(
    name: str, *more: str, n_experts: tuple[str, ...] = ("num_experts", "num_local_experts"), **row: Any
) -> Family:
    """A row with gate_proj, up_proj and down_proj per expert, or as transformers 5 fuses them."""
    return Family(name, (name, *more), roles=_PROJ, fused=_V5, n_experts=n_experts, **row)


def _w123(name: str, *more: str, n_experts: tuple[str, ...] = _LOCAL, **row: Any) -> Family:
    """A row with w1, w3 and w2 per expert; what transformers 5 has in memory is under another path."""
    row.setdefault("block", "block_sparse_moe.experts")
    return Family(name, (name, *more), roles=_W123, fused=_V5, also=("mlp.experts",), n_experts=n_experts, **row)


FAMILIES: list[Family] = [
    _w123("mixtral", signature=("w1.weight",), gguf=("llama",)),
    _w123("minimax"),
    _w123("minimax_m2", gguf=("minimax-m2",)),
    _w123("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
    _w123("phimoe"),
    _w123(
        "kimi_linear",
        n_experts=("num_experts",),
        top_k=("num_experts_per_token", "num_experts_per_tok"),
        gguf=("kimi-linear",),
    ),
    _w123(
        "kimi_k3",
        "kimi_k3_text",
        n_experts=("num_experts", "n_routed_experts"),
        top_k=("num_experts_per_token", "num_experts_per_tok"),
        signature=("w1.weight_packed",),
    ),
    _w123("deepseek_v4", block="ffn.experts", n_experts=_ROUTED),
    _w123("lfm2_moe", block="feed_forward.experts", n_experts=("num_experts",), gguf=("lfm2moe",)),
    _proj("qwen2_moe", gguf=("qwen2moe",)),
    _proj("qwen3_moe", gguf=("qwen3moe",)),
    _proj("qwen3_next", gguf=("qwen3next",)),
    _proj("qwen3_5_moe_text", "qwen3_5_moe", gguf=("qwen35moe",)),
    _proj("olmoe"),
    _proj("flex_olmo"),
    _proj("deepseek_v2", n_experts=_ROUTED, gguf=("deepseek2",)),  # of GGUF, v3 and Kimi K2 if the gating is sigmoid
    _proj("deepseek_v3", "kimi_k2", "kimi_k25", n_experts=_ROUTED),
    _proj("deepseek_v32", n_experts=_ROUTED),
    _proj("glm4_moe", n_experts=_ROUTED, gguf=("glm4moe",)),
    _proj("glm4_moe_lite", n_experts=_ROUTED),
    _proj("glm_moe_dsa", n_experts=_ROUTED),
    _proj("dots1", n_experts=_ROUTED),
    _proj("solar_open", n_experts=_ROUTED),
    _proj("axk1", n_experts=_ROUTED),
    _proj("hy_v4", n_experts=_ROUTED),
    _proj("sarvam_moe", n_experts=_ROUTED),
    _proj("mimo_v2_flash", n_experts=_ROUTED),
    _proj("exaone_moe", gguf=("exaone-moe",)),
    _proj("ernie4_5_moe", n_experts=("moe_num_experts",), top_k=("moe_k",), gguf=("ernie4_5-moe",)),
    _proj("hunyuan_v1_moe", n_experts=("num_experts",), top_k=("moe_topk",), gguf=("hunyuan-moe",)),
    _proj("hy_v3"),
    _proj("jamba", block="feed_forward.experts"),
    _proj("afmoe"),
    _proj("bailing_hybrid", top_k=("num_experts_per_token", "num_experts_per_tok")),
    _proj("cohere2_moe"),
    _proj("flint"),
    _proj("kolibri1"),
    _proj("laguna"),
    _proj("mellum"),
    _proj("longcat_flash", n_experts=_ROUTED, top_k=("moe_topk", "num_experts_per_tok"), identity="zero_expert_num"),
    _proj("zaya"),
    Family(
        "nemotron_h",
        ("nemotron_h",),
        block="mixer.experts",
        roles={"up_proj": "up", "down_proj": "down"},  # no gate
        fused={"up_proj": Fused(("up",)), "down_proj": Fused(("down",))},
        n_experts=_ROUTED,
        gguf=("nemotron_h_moe",),
    ),
    Family("gemma4_text", ("gemma4_text",), block="experts", fused=_V5, top_k=("top_k_experts",)),
    Family(
        "gpt_oss",
        ("gpt_oss",),
        fused={
            "gate_up_proj": Fused(("gate", "up"), transposed=True, interleaved=True),  # [E, H, 2I]
            "gate_up_proj_bias": Fused(("gate.bias", "up.bias"), interleaved=True),  # [E, 2I]
            "down_proj": Fused(("down",), transposed=True),  # [E, I, H]
            "down_proj_bias": Fused(("down.bias",)),  # [E, H]
            # MXFP4, as on the hub: [E, out, in / 32, 16] and [E, out, in / 32].
            "gate_up_proj_blocks": Fused(("gate", "up"), interleaved=True, encoded=True),
            "gate_up_proj_scales": Fused(("gate", "up"), interleaved=True, encoded=True),
            "down_proj_blocks": Fused(("down",), encoded=True),
            "down_proj_scales": Fused(("down",), encoded=True),
        },
        n_experts=_LOCAL,
        top_k=("num_experts_per_tok", "experts_per_token"),
        signature=("gate_up_proj_bias", "gate_up_proj_blocks"),
        gguf=("gpt-oss",),
    ),
    Family(
        "llama4_text",
        ("llama4_text",),
        block="feed_forward.experts",
        fused={
            "gate_up_proj": Fused(("gate", "up"), transposed=True),  # [E, H, 2I]
            "down_proj": Fused(("down",), transposed=True),  # [E, I, H]
        },
        n_experts=_LOCAL,
        gguf=("llama4",),
    ),
    Family(
        "aria_text",
        ("aria_text", "aria"),
        fused={
            "fc1.weight": Fused(("gate", "up"), transposed=True),  # [E, H, 2I]
            "fc2.weight": Fused(("down",), transposed=True),  # [E, I, H]
        },
        n_experts=("moe_num_experts",),
        top_k=("moe_topk",),
        signature=("fc1.weight",),
    ),
    Family(
        "dbrx",
        ("dbrx",),
        block="ffn.experts",
        fused={  # each [E * I, H]
            "mlp.w1": Fused(("gate",), flat=True),
            "mlp.v1": Fused(("up",), flat=True),
            "mlp.w2": Fused(("down",), flat=True, transposed=True),
        },
        n_experts=("ffn_config.moe_num_experts", "num_experts"),
        top_k=("ffn_config.moe_top_k", "num_experts_per_tok"),
        signature=("mlp.v1",),
    ),
    Family(
        "granitemoe",
        ("granitemoe",),
        block="block_sparse_moe",
        fused=_GRANITE,
        n_experts=_LOCAL,
        signature=("input_linear.weight",),
    ),
    Family("granitemoeshared", ("granitemoeshared",), block="block_sparse_moe", fused=_GRANITE, n_experts=_LOCAL),
    Family(
        "granitemoehybrid",
        ("granitemoehybrid",),
        block="block_sparse_moe",
        fused=_GRANITE,
        n_experts=_LOCAL,
        gguf=("granitehybrid",),
    ),
    Family("granitemoe_swa", ("granitemoe_swa",), block="block_sparse_moe.experts", fused=_V5, n_experts=_LOCAL),
    Family("jetmoe", ("jetmoe",), block="mlp", fused=_GRANITE, n_experts=_LOCAL, trunk=("self_attention.experts",)),
    Family("inkling2_text", ("inkling2_text",), fused={"w2_weight": Fused(("down",))}, n_experts=_ROUTED),
]

#: For any other checkpoint: bytes under stored names. gate_proj, up_proj and down_proj say by themselves what they are.
UNKNOWN = Family(
    "unknown",
    (),
    block="",
    roles=_PROJ,
    n_experts=(
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "ffn_config.moe_num_experts",
    ),
    top_k=("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "experts_per_token"),
)


def register_family(family: Family) -> None:
    """Put a row before all others: it wins over theirs for its model types, and over one of its own name.

    Raises
    ------
    TypeError
        It is no Family.
    ValueError
        It has no name, or the one of the fallback; or no role is known of any of its tensors.
    """
    if not isinstance(family, Family):
        raise TypeError(f"a family is a fastcache.Family(...), not {family!r}")
    if not family.name or family.name == UNKNOWN.name:
        raise ValueError(f"a family needs a name of its own, not {family.name!r}")
    known = {*family.roles.values(), *(role for how in family.fused.values() for role in how.roles)}
    if not known & {"gate", "up", "down"}:
        raise ValueError(f"family {family.name!r}: neither `roles` nor `fused` says which tensor is gate, up or down")
    FAMILIES[:] = [family, *(other for other in FAMILIES if other.name != family.name)]


def family_named(name: str) -> Family | None:
    """Return the row of that name."""
    return next((family for family in FAMILIES if family.name == name), None)


def config_value(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the first of `keys` that the config has, or its `text_config` (models that also see); else None.

    "a.b" is the key "b" of the mapping "a".
    """
    text = config.get("text_config")
    for level in (config, text if isinstance(text, Mapping) else {}):
        for key in keys:
            outer, dot, inner = key.partition(".")
            value = level.get(outer)
            if dot:
                value = value.get(inner) if isinstance(value, Mapping) else None
            if value is not None:
                return value
    return None


def config_count(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """Return a positive integer of the config. None where it is absent or a list per layer.

    Raises
    ------
    CheckpointError
        For anything else.
    """
    for key in keys:
        value = config_value(config, key)
        if value is None or isinstance(value, list):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"config.json: {key} is {value!r}, not a positive integer")
        return value
    return None


def family_of_config(config: Mapping[str, Any]) -> Family | None:
    """Return the row of the config's model_type, UNKNOWN for one that has no row, or None if it has no model_type."""
    text = config.get("text_config")
    types = [config.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None]
    for model_type in types:
        for family in FAMILIES:
            if model_type in family.model_types:
                return family
    return None if types == [None, None] else UNKNOWN


def family_of_names(names: Iterable[tuple[str, str]]) -> Family:
    """Return the row whose signature is among `names`, pairs of (block, stored name); UNKNOWN if none is."""
    known = set(names)
    for family in FAMILIES:
        if any((family.block, name) in known for name in family.signature):
            return family
    return UNKNOWN
