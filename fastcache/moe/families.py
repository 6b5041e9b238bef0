"""How each model family routes and computes: one row per family, by the name that its layout has.

Owns the table and how a row reads config.json. Knows no bytes and no store. Imports errors, layout.families
(for config spellings), routers, ffn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.linear import Arrays
from fastcache.moe import ffn, routers

F32: TypeAlias = NDArray[np.float32]
Config: TypeAlias = Mapping[str, Any]
Router: TypeAlias = Callable[[F32], routers.Routing]  # logits [T, E] -> experts, weights [T, k]
Ffn: TypeAlias = Callable[[F32, Arrays], F32]  # x [T, hidden], expert -> [T, hidden]

ROLES: Final = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Forward:
    """One family's MoE block. Tensor names are on-disk names after "model.layers.L."."""

    router_weight: str  # [E, hidden]
    router: Callable[[Config, int, F32 | None], Router]  # config, top_k, choice bias -> Router
    ffn: Callable[[Config], Ffn]
    router_bias: str | None = None  # [E], added to the logits
    choice_bias: str | None = None  # [E], added to the scores for choosing only
    shared: str | None = None  # the shared expert's tensors; {} is gate, up, down
    shared_gate: str | None = None  # [1, hidden]; its sigmoid scales the shared expert
    shared_if: str = ""  # config key that is there and 0 or null when there is no shared expert

    def as_gguf(self) -> Forward:
        """Return the same with GGUF's names, which are those after "blk.L."."""
        return replace(
            self,
            router_weight="ffn_gate_inp.weight",
            router_bias=self.router_bias and "ffn_gate_inp.bias",
            choice_bias=self.choice_bias and "exp_probs_b.bias",
            shared=self.shared and "ffn_{}_shexp.weight",
            shared_gate=self.shared_gate and "ffn_gate_inp_shexp.weight",
        )

    def names(self) -> set[str]:
        """Return every tensor of a layer that the row computes with, but the routed experts."""
        shared = [self.shared.format(role) for role in ROLES] if self.shared else []
        return {*shared} | {
            name for name in (self.router_weight, self.router_bias, self.choice_bias, self.shared_gate) if name
        }

    def has_shared(self, config: Config) -> bool:
        """Say whether a checkpoint of the family with this config.json has a shared expert."""
        levels = (config, config.get("text_config") or {})
        return self.shared is not None and not any(
            self.shared_if in level and not level[self.shared_if] for level in levels
        )


def forward_of(family: str, format: str = "safetensors") -> Forward:
    """Return the row of a family, its tensor names as the format has them.

    Raises
    ------
    UnsupportedCheckpoint
        No forward is known for it; its experts can still be served.
    """
    row = FORWARDS.get(family)
    if row is None:
        raise UnsupportedCheckpoint(
            f"the NumPy forward is not available for the family {family!r}, only for {', '.join(sorted(FORWARDS))}; "
            f"the bytes are served: use fastcache.open and your own forward"
        )
    return row if format == "safetensors" else row.as_gguf()


def _value(config: Config, key: str, default: Any) -> Any:
    """A key's value; the default where it is absent or null."""
    value = config_value(config, key)
    return default if value is None else value


def _expect(config: Config, key: str, *wanted: object) -> None:
    """Refuse a config whose `key` says something that the row does not compute. Absent is fine: v5 drops keys."""
    value = config_value(config, key)
    if value is not None and value not in wanted:
        raise UnsupportedCheckpoint(
            f"config.json: {key} is {value!r}; this family's NumPy forward computes {' or '.join(map(repr, wanted))} "
            f"only. The bytes are served: use fastcache.open and your own forward"
        )


def _swiglu(config: Config) -> Ffn:
    _expect(config, "hidden_act", "silu", "swish")
    return ffn.swiglu


def _clamped_swiglu(config: Config) -> Ffn:
    # Checkpoints older than the key were made with this alpha.
    alpha = float(_value(config, "swiglu_alpha", 1.702))
    return partial(ffn.clamped_swiglu, alpha=alpha, limit=float(_value(config, "swiglu_limit", 7.0)))


def _softmax_always_renormalised(config: Config, k: int, bias: F32 | None) -> Router:
    return partial(routers.softmax_topk, k=k, renormalise=True)


def _softmax_norm_topk_prob(config: Config, k: int, bias: F32 | None) -> Router:
    return partial(routers.softmax_topk, k=k, renormalise=bool(_value(config, "norm_topk_prob", False)))


def _topk_softmax(config: Config, k: int, bias: F32 | None) -> Router:
    return partial(routers.topk_softmax, k=k)


def _deepseek_v2(config: Config, k: int, bias: F32 | None) -> Router:
    _expect(config, "scoring_func", "softmax")
    _expect(config, "topk_method", "greedy", "group_limited_greedy")
    # DeepSeek's own code renormalises then, transformers never does; no published checkpoint tells who is right.
    _expect(config, "norm_topk_prob", False)
    scale = float(_value(config, "routed_scaling_factor", 1.0))
    if _value(config, "topk_method", "greedy") == "greedy":
        return partial(routers.deepseek_v2, k=k, scale=scale)
    n_group, topk_group = int(_value(config, "n_group", 1)), int(_value(config, "topk_group", 1))
    return partial(routers.deepseek_v2, k=k, scale=scale, n_group=n_group, topk_group=topk_group)


def _deepseek_v3(config: Config, k: int, bias: F32 | None) -> Router:
    # A v5 save drops scoring_func and topk_method: the family alone says sigmoid.
    _expect(config, "scoring_func", "sigmoid")
    _expect(config, "topk_method", "noaux_tc")
    if bias is None:
        raise ValueError("this family's router needs e_score_correction_bias")
    return partial(
        routers.deepseek_v3,
        k=k,
        bias=bias,
        scale=float(_value(config, "routed_scaling_factor", 2.5)),  # defaults: DeepseekV3Config
        renormalise=bool(_value(config, "norm_topk_prob", True)),
        n_group=int(_value(config, "n_group", 8)),
        topk_group=int(_value(config, "topk_group", 4)),
    )


FORWARDS: Final[Mapping[str, Forward]] = {
    "mixtral": Forward("block_sparse_moe.gate.weight", _softmax_always_renormalised, _swiglu),
    "qwen2_moe": Forward(
        "mlp.gate.weight",
        _softmax_norm_topk_prob,
        _swiglu,
        shared="mlp.shared_expert.{}_proj.weight",
        shared_gate="mlp.shared_expert_gate.weight",
        shared_if="shared_expert_intermediate_size",
    ),
    "qwen3_moe": Forward("mlp.gate.weight", _softmax_norm_topk_prob, _swiglu),
    "olmoe": Forward("mlp.gate.weight", _softmax_norm_topk_prob, _swiglu),
    "deepseek_v2": Forward(
        "mlp.gate.weight",
        _deepseek_v2,
        _swiglu,
        shared="mlp.shared_experts.{}_proj.weight",
        shared_if="n_shared_experts",
    ),
    "deepseek_v3": Forward(  # Kimi K2 too
        "mlp.gate.weight",
        _deepseek_v3,
        _swiglu,
        choice_bias="mlp.gate.e_score_correction_bias",
        shared="mlp.shared_experts.{}_proj.weight",
        shared_if="n_shared_experts",
    ),
    "gpt_oss": Forward("mlp.router.weight", _topk_softmax, _clamped_swiglu, router_bias="mlp.router.bias"),
    "granitemoe": Forward("block_sparse_moe.router.layer.weight", _topk_softmax, _swiglu),
}
