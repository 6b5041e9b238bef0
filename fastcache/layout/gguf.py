"""GGUF's names and metadata in the words of the family table: which tensors are experts, and what the config says.

All architectures share one naming: blk.L.ffn_{gate,up,down}_exps.weight [E, out, in]; ffn_gate_up_exps with all gate
rows first; in old files blk.L.ffn_{gate,up,down}.E.weight. `general.architecture` tells the family. Sources: gguf's
constants.py; llama.cpp's llama-model.cpp, for what a missing key means, and llama-graph.cpp (build_moe_ffn), for the
order of gate and up.
Imports numpy, formats, layout.families, layout.names and layout.gguf_decoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from fastcache.formats.header import Header
from fastcache.layout.families import FAMILIES, Family, Fused
from fastcache.layout.gguf_decoder import decoder_of_metadata
from fastcache.layout.names import FUSED, Kind, Rows

BLOCK: Final = "blk"
_NAME = re.compile(
    r"blk\.([0-9]{1,6})\.(?:(ffn_(?:gate|up|down|gate_up)_exps)|(ffn_(?:gate|up|down))\.([0-9]{1,6}))\.([a-z_.]+)"
)
_STACKED = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
_ROW = Family(
    "unknown",
    (),
    block=BLOCK,
    roles={**_STACKED, "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"},
    stacked=frozenset(_STACKED),
    fused={
        "ffn_gate_up_exps.weight": Fused(("gate", "up")),  # [E, 2I, H]
        "ffn_gate_up_exps.bias": Fused(("gate.bias", "up.bias")),  # [E, 2I]
    },
    n_experts=("num_experts",),
)

_KEYS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "embedding_length": "hidden_size",
}
_ZERO_IS_NONE: Final = ("expert_count", "expert_used_count", "expert_weights_scale", "expert_group_count")
_GATING: Final = {1: "softmax", 2: "sigmoid", 3: "softmax_of_the_chosen"}
# What a file that lacks the key means.
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v2": {"scoring_func": "softmax"},
    **{
        name: {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
        for name in ("deepseek_v3", "glm4_moe", "dots1", "exaone_moe", "mimo_v2_flash", "nemotron_h")
    },
    "qwen3_next": {"norm_topk_prob": True},
    "lfm2_moe": {"norm_topk_prob": True},
}


def family_of_metadata(metadata: Mapping[str, Any]) -> Family:
    """Return the row of the file's architecture; one without a row has the architecture's own name."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        return _ROW
    name = next((family.name for family in FAMILIES if architecture in family.gguf), architecture)
    if name == "deepseek_v2" and _GATING.get(metadata.get(f"{architecture}.expert_gating_func", 1)) == "sigmoid":
        name = "deepseek_v3"
    return replace(_ROW, name=name)


def config_of_metadata(metadata: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return what config.json would say of the model, by its keys; the metadata itself is under "gguf"."""
    architecture = metadata.get("general.architecture")
    config: dict[str, Any] = {**decoder_of_metadata(metadata, family.name), **_DEFAULTS.get(family.name, {})}
    for key, name in _KEYS.items():
        value = metadata.get(f"{architecture}.{key}")
        if value is not None and (value or key not in _ZERO_IS_NONE):
            config[name] = value
    gating = metadata.get(f"{architecture}.expert_gating_func")
    if gating:
        config["scoring_func"] = _GATING.get(gating, gating)
    blocks, drafts = (metadata.get(f"{architecture}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    if isinstance(blocks, int) and isinstance(drafts, int) and blocks > drafts >= 0:
        config["num_hidden_layers"] = blocks - drafts
    if family.name == "deepseek_v2":
        config["topk_method"] = "greedy" if config.get("n_group", 1) == 1 else "group_limited_greedy"
    config["gguf"] = metadata
    return config


def find_gguf_rows(headers: Iterable[Header]) -> Rows:
    """Return a row for each tensor that is named like an expert's."""
    kinds: dict[Kind, int] = {}
    columns: list[tuple[int, int, int, int, int]] = []
    for file, header in enumerate(headers):
        for row, name in enumerate(header.names):
            match = _NAME.fullmatch(name)
            if match is not None:
                layer, merged, single, expert, suffix = match.groups()
                kind = Kind("", BLOCK, f"{merged or single}.{suffix}", merged is not None)
                number = FUSED if merged else int(expert)
                columns.append((kinds.setdefault(kind, len(kinds)), int(layer), number, file, row))
    table = np.array(columns, np.int32).reshape(-1, 5)
    return Rows(list(kinds), *(np.ascontiguousarray(table[:, column]) for column in range(5)))
