"""How a family's routing and activation follow from its config.json: functions from a config to a Router or an Ffn.

Owns the reading of the keys. A config that asks for what is not computed is refused. Knows no family and no bytes.
Imports errors, layout.families (for config spellings), routers, ffn and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.linear import Arrays
from fastcache.moe import ffn, routers
from fastcache.moe.values import count, number, truth

F32: TypeAlias = NDArray[np.float32]
Config: TypeAlias = Mapping[str, Any]
Router: TypeAlias = Callable[[F32], routers.Routing]  # logits [T, E] -> experts, weights [T, k]
Ffn: TypeAlias = Callable[[F32, Arrays], F32]  # x [T, hidden], expert -> [T, hidden]


def takes_biases(ffn_of: Callable[[Config], Ffn]) -> bool | None:
    """Say whether the experts of a row have biases; None of a row that is not known here."""
    if ffn_of is clamped_swiglu:
        return True
    return False if ffn_of in (swiglu, swiglu_or_situ, relu2) else None


def value_of(config: Config, key: str, default: Any) -> Any:
    """A key's value; the default where it is absent or null."""
    value = config_value(config, key)
    return default if value is None else value


def expect(config: Config, key: str, *wanted: object) -> None:
    """Refuse a config whose `key` says something that the row does not compute. Absent is fine: v5 drops keys."""
    value = config_value(config, key)
    if value is not None and value not in wanted:
        raise UnsupportedCheckpoint(
            f"config.json: {key} is {value!r}; this family's NumPy forward computes {' or '.join(map(repr, wanted))} "
            f"only. The bytes are served: use fastcache.open and your own forward"
        )


def needed(config: Config, key: str) -> Any:
    """Return a key's value; refuse a config without it."""
    value = config_value(config, key)
    if value is None:
        raise UnsupportedCheckpoint(
            f"config.json has no {key}, without which this family's NumPy forward is not known. The bytes are served: "
            f"use fastcache.open and your own forward"
        )
    return value


def swiglu(config: Config) -> Ffn:
    """SwiGLU, and no other activation."""
    expect(config, "hidden_act", "silu", "swish")
    expect(config, "ffn_config.ffn_act_fn.name", "silu")
    return ffn.swiglu


def swiglu_or_situ(config: Config) -> Ffn:
    """What `hidden_act` says: SwiGLU or Kimi K3's SiTU."""
    expect(config, "hidden_act", "silu", "swish", "situ")
    if config_value(config, "hidden_act") != "situ":
        return ffn.swiglu
    linear = config_value(config, "activation_situ_linear_beta") is not None
    needed(config, "activation_situ_beta")
    return partial(
        ffn.situ,
        beta=number(config, "activation_situ_beta", above=0),
        linear_beta=number(config, "activation_situ_linear_beta", above=0) if linear else None,
    )


def relu2(config: Config) -> Ffn:
    """Squared ReLU without a gate."""
    expect(config, "mlp_hidden_act", "relu2")
    expect(config, "mlp_bias", False)
    return ffn.relu2


def clamped_swiglu(config: Config) -> Ffn:
    """The SwiGLU of gpt-oss."""
    # Checkpoints older than the key were made with this alpha.
    alpha = number(config, "swiglu_alpha", 1.702, above=0)
    return partial(ffn.clamped_swiglu, alpha=alpha, limit=number(config, "swiglu_limit", 7.0, above=0))


def softmax_always_renormalised(config: Config, k: int, bias: F32 | None) -> Router:
    """Softmax, top k, divided by their sum."""
    return partial(routers.softmax_topk, k=k, renormalise=True)


def softmax_norm_topk_prob(config: Config, k: int, bias: F32 | None) -> Router:
    """Softmax, top k, divided by their sum if the config says so."""
    return partial(routers.softmax_topk, k=k, renormalise=truth(config, "norm_topk_prob", False))


def topk_softmax(config: Config, k: int, bias: F32 | None) -> Router:
    """Top k of the logits, softmax over them."""
    return partial(routers.topk_softmax, k=k)


def deepseek_v2(config: Config, k: int, bias: F32 | None) -> Router:
    """DeepSeek-V2's groups."""
    expect(config, "scoring_func", "softmax")
    expect(config, "topk_method", "greedy", "group_limited_greedy")
    # DeepSeek's own code renormalises then, transformers never does; no published checkpoint tells who is right.
    expect(config, "norm_topk_prob", False)
    scale = number(config, "routed_scaling_factor", 1.0)
    if value_of(config, "topk_method", "greedy") == "greedy":
        return partial(routers.deepseek_v2, k=k, scale=scale)
    n_group, topk_group = count(config, "n_group", 1), count(config, "topk_group", 1)
    return partial(routers.deepseek_v2, k=k, scale=scale, n_group=n_group, topk_group=topk_group)


def softmax_as_it_is(config: Config, k: int, bias: F32 | None) -> Router:
    """Softmax, top k, never divided."""
    return partial(routers.softmax_topk, k=k, renormalise=False)


def topk_sigmoid(config: Config, k: int, bias: F32 | None) -> Router:
    """Top k of the logits, the sigmoid of each."""
    return partial(routers.topk_sigmoid, k=k)


def dbrx(config: Config, k: int, bias: F32 | None) -> Router:
    """Softmax, top k, divided by an L_p norm."""
    ffn_config = config.get("ffn_config")
    given = ffn_config if isinstance(ffn_config, Mapping) else {}
    if given.get("moe_normalize_expert_weights", 1.0) is None:
        return partial(routers.softmax_norm, k=k, p=None)
    return partial(routers.softmax_norm, k=k, p=number(given, "moe_normalize_expert_weights", 1.0, above=0))


def ernie(config: Config, k: int, bias: F32 | None) -> Router:
    """Softmax with a bias for the choice."""
    if bias is None:
        raise ValueError("this family's router needs e_score_correction_bias")
    return partial(routers.ernie, k=k, bias=bias.reshape(-1), least=number(config, "moe_norm_min", 1e-12))


def sparsemixer(config: Config, k: int, bias: F32 | None) -> Router:
    """Phi-3.5-MoE's two rounds."""
    return partial(routers.sparsemixer, k=k, jitter=number(config, "router_jitter_noise", 0.01))


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """DeepSeek-V3's router by the keys of a config; a key's value where the config lacks it, `needed` without one."""

    scale: tuple[str, float | None] | None = ("routed_scaling_factor", None)
    renormalise: tuple[str, bool | None] | None = ("norm_topk_prob", None)  # None: always
    groups: tuple[tuple[str, int | None], tuple[str, int | None]] | None = (("n_group", None), ("topk_group", None))
    least: float = 1e-20
    bias: bool = True  # needed

    def __call__(self, config: Config, k: int, bias: F32 | None) -> Router:
        # A v5 save drops scoring_func and topk_method: the family alone says sigmoid.
        for key in ("scoring_func", "moe_router_activation_func"):
            expect(config, key, "sigmoid")
        expect(config, "topk_method", "noaux_tc")
        if bias is None and self.bias:
            raise ValueError("this family's router needs e_score_correction_bias")

        def get(read: Callable[..., Any], key: str, default: Any) -> Any:
            if default is None:
                needed(config, key)
            return read(config, key, default)

        n_group, topk_group = (1, 1) if self.groups is None else (get(count, *each) for each in self.groups)
        return partial(
            routers.deepseek_v3,
            k=k,
            bias=bias,
            scale=1.0 if self.scale is None else get(number, *self.scale),
            renormalise=True if self.renormalise is None else get(truth, *self.renormalise),
            n_group=n_group,
            topk_group=topk_group,
            least=self.least,
        )


SIGMOID: Final = Sigmoid()
KIMI: Final = Sigmoid(renormalise=("moe_renormalize", None), groups=(("num_expert_group", 1), ("topk_group", 1)))
