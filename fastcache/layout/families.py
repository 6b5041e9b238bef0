"""The table of model families: which tensors are routed experts, and what each of them means. One row per family.

Names and orientations are those of transformers' `save_pretrained` and of the hub, by family; nothing here is guessed
from sizes. Knows no file. Imports errors only.
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


@dataclass(frozen=True, slots=True)
class Family:
    """One row: where the experts of a model family are, and what the config calls their number."""

    name: str
    model_types: tuple[str, ...]  # values of config.json's model_type
    block: str = "mlp.experts"  # path inside a layer, up to the expert's number or to the fused tensor's name
    roles: Mapping[str, str] = field(default_factory=dict)  # per-expert module -> "gate", "up", "down"
    fused: Mapping[str, Fused] = field(default_factory=dict)  # stored name after `block` -> how to read it
    stacked: frozenset[str] = frozenset()  # modules of `roles` that are tensors [E, out, in], of one role each
    n_experts: tuple[str, ...] = ("num_experts", "num_local_experts")  # config keys, the first present wins
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    signature: tuple[str, ...] = ()  # stored names after `block`; any of them tells the family without a config


_PROJ = MappingProxyType({"gate_proj": "gate", "up_proj": "up", "down_proj": "down"})
_W123 = MappingProxyType({"w1": "gate", "w3": "up", "w2": "down"})

FAMILIES: tuple[Family, ...] = (
    Family(
        "mixtral",
        ("mixtral",),
        block="block_sparse_moe.experts",
        roles=_W123,
        n_experts=("num_local_experts", "num_experts"),
        signature=("w1.weight",),
    ),
    Family("qwen2_moe", ("qwen2_moe",), roles=_PROJ),
    Family("qwen3_moe", ("qwen3_moe",), roles=_PROJ),
    Family("olmoe", ("olmoe",), roles=_PROJ),
    Family("deepseek_v2", ("deepseek_v2",), roles=_PROJ, n_experts=("n_routed_experts",)),
    Family(
        "deepseek_v3",
        ("deepseek_v3", "kimi_k2", "kimi_k25"),
        roles=_PROJ,
        n_experts=("n_routed_experts",),
    ),
    Family(
        "kimi_k3",
        ("kimi_k3", "kimi_k3_text"),
        block="block_sparse_moe.experts",
        roles=_W123,
        n_experts=("num_experts", "n_routed_experts"),
        top_k=("num_experts_per_token", "num_experts_per_tok"),
        signature=("w1.weight_packed",),
    ),
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
        n_experts=("num_local_experts", "num_experts"),
        top_k=("num_experts_per_tok", "experts_per_token"),
        signature=("gate_up_proj_bias", "gate_up_proj_blocks"),
    ),
    Family(
        "granitemoe",
        ("granitemoe",),
        block="block_sparse_moe",
        fused={
            "input_linear.weight": Fused(("gate", "up")),  # [E, 2I, H]
            "output_linear.weight": Fused(("down",)),  # [E, H, I]
        },
        n_experts=("num_local_experts", "num_experts"),
        signature=("input_linear.weight",),
    ),
)

#: For any other checkpoint: bytes under stored names. gate_proj, up_proj and down_proj say by themselves what they are.
UNKNOWN = Family(
    "unknown",
    (),
    block="",
    roles=_PROJ,
    n_experts=(),
    top_k=("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "experts_per_token"),
)


def config_value(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the first of `keys` that the config has, or its `text_config` (models that also see); else None."""
    text = config.get("text_config")
    for level in (config, text if isinstance(text, Mapping) else {}):
        for key in keys:
            if level.get(key) is not None:
                return level[key]
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
