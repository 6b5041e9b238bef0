"""How each model family routes and computes: one row per family, by the name that its layout has.

Owns the table and how a row reads config.json. Knows no bytes and no store. Imports errors, layout (for config
spellings) and rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value, family_named
from fastcache.layout.record import Layout
from fastcache.moe import rules
from fastcache.moe.rules import F32, Config
from fastcache.moe.rules import Ffn as Ffn
from fastcache.moe.rules import Router as Router

ROLES: Final = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Latent:
    """Routed experts that work in a smaller space: down(x), experts, their weighted sum, a norm, up(...)."""

    down: str  # [latent, hidden]
    up: str  # [hidden, latent]
    width: str  # config key; without a value there is no latent space
    norm: str | None = None  # [latent]
    norm_if: str = ""  # config key that must be true for the norm to be there

    def names(self) -> set[str]:
        return {name for name in (self.down, self.up, self.norm) if name}


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
    choice_if: str = ""  # config key that is there and false when there is no choice bias
    weighs_input: bool = False  # a weight multiplies what the expert is given, not what it returns
    roles: tuple[str, ...] = ROLES  # what an expert must have, and a shared one has
    latent: Latent | None = None  # the routed experts' own, smaller space

    def as_gguf(self) -> Forward:
        """Return the same with GGUF's names, which are those after "blk.L."."""
        return replace(
            self,
            router_weight="ffn_gate_inp.weight",
            router_bias=self.router_bias and "ffn_gate_inp.bias",
            choice_bias=self.choice_bias and "exp_probs_b.bias",
            shared=self.shared and "ffn_{}_shexp.weight",
            shared_gate=self.shared_gate and "ffn_gate_inp_shexp.weight",
            latent=self.latent
            and replace(
                self.latent,
                down="ffn_latent_down.weight",
                up="ffn_latent_up.weight",
                norm=self.latent.norm and "ffn_latent_norm.weight",
            ),
        )

    def names(self, config: Config | None = None) -> set[str]:
        """Return every tensor of a layer that the row computes with, but the routed experts; if a config is like this.

        None: of any config.
        """
        names = {self.router_weight, self.router_bias}
        if self.shared and (config is None or self.has_shared(config)):
            names |= {self.shared_gate, *(self.shared.format(role) for role in self.roles)}
        if config is None or self.has_choice_bias(config):
            names.add(self.choice_bias)
        if self.latent and (config is None or config_value(config, self.latent.width) is not None):
            names |= self.latent.names()
        return {name for name in names if name}

    def has_shared(self, config: Config) -> bool:
        """Say whether a checkpoint of the family with this config.json has a shared expert."""
        return self.shared is not None and not _denied(config, self.shared_if)

    def has_choice_bias(self, config: Config) -> bool:
        """Say whether its router chooses with a bias."""
        return self.choice_bias is not None and not _denied(config, self.choice_if)


def _denied(config: Config, key: str) -> bool:
    levels = (config, config.get("text_config") or {})
    return any(key in level and not level[key] for level in levels)


def register_forward(family: str, forward: Forward) -> None:
    """Let `load_block` compute the blocks of a family; replaces the family's row, if it has one.

    Raises
    ------
    TypeError
        It is no Forward.
    """
    if not isinstance(forward, Forward):
        raise TypeError(f"a forward is a fastcache.moe.Forward(...), not {forward!r}")
    FORWARDS[family] = forward


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


def top_k_of(layout: Layout, layer: int) -> int | None:
    """Return how many experts serve a token in a layer: the config says it of all layers, or lists it by layer."""
    family = family_named(layout.family)
    if layout.top_k is not None or family is None:
        return layout.top_k
    listed = config_value(layout.config, *family.top_k)
    value = listed[layer] if isinstance(listed, list) and layer < len(listed) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _as_deepseek_v3(bias: str = "mlp.gate.e_score_correction_bias", shared: bool = True) -> Forward:
    return Forward(
        "mlp.gate.weight",
        rules.SIGMOID,
        rules.swiglu,
        choice_bias=bias,
        shared="mlp.shared_experts.{}_proj.weight" if shared else None,
        shared_if="n_shared_experts",
    )


_QWEN_SHARED = Forward(
    "mlp.gate.weight",
    rules.softmax_norm_topk_prob,
    rules.swiglu,
    shared="mlp.shared_expert.{}_proj.weight",
    shared_gate="mlp.shared_expert_gate.weight",
    shared_if="shared_expert_intermediate_size",
)
FORWARDS: Final[dict[str, Forward]] = {
    "mixtral": Forward("block_sparse_moe.gate.weight", rules.softmax_always_renormalised, rules.swiglu),
    **dict.fromkeys(("qwen2_moe", "qwen3_next"), _QWEN_SHARED),
    "qwen3_moe": Forward("mlp.gate.weight", rules.softmax_norm_topk_prob, rules.swiglu),
    "olmoe": Forward("mlp.gate.weight", rules.softmax_norm_topk_prob, rules.swiglu),
    "deepseek_v2": Forward(
        "mlp.gate.weight",
        rules.deepseek_v2,
        rules.swiglu,
        shared="mlp.shared_experts.{}_proj.weight",
        shared_if="n_shared_experts",
    ),
    # Kimi K2 too. Defaults: DeepseekV3Config.
    "deepseek_v3": replace(
        _as_deepseek_v3(),
        router=rules.Sigmoid(
            scale=("routed_scaling_factor", 2.5),
            renormalise=("norm_topk_prob", True),
            groups=(("n_group", 8), ("topk_group", 4)),
        ),
    ),
    **dict.fromkeys(
        ("deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "solar_open"), _as_deepseek_v3()
    ),
    "mimo_v2_flash": _as_deepseek_v3(shared=False),
    "exaone_moe": replace(_as_deepseek_v3("mlp.e_score_correction_bias"), shared_if="num_shared_experts"),
    "sarvam_moe": _as_deepseek_v3("mlp.gate.expert_bias"),
    "gpt_oss": Forward("mlp.router.weight", rules.topk_softmax, rules.clamped_swiglu, router_bias="mlp.router.bias"),
    "granitemoe": Forward("block_sparse_moe.router.layer.weight", rules.topk_softmax, rules.swiglu),
    "minimax": Forward("block_sparse_moe.gate.weight", rules.softmax_always_renormalised, rules.swiglu),
    "minimax_m2": Forward(
        "block_sparse_moe.gate.weight",
        rules.Sigmoid(scale=None, renormalise=None, groups=None),
        rules.swiglu,
        choice_bias="block_sparse_moe.e_score_correction_bias",
    ),
    "phimoe": Forward("block_sparse_moe.gate.weight", rules.sparsemixer, rules.swiglu),
    "lfm2_moe": Forward(
        "feed_forward.gate.weight",
        rules.Sigmoid(
            scale=("routed_scaling_factor", 1.0),
            renormalise=("norm_topk_prob", None),
            groups=None,
            least=1e-6,
            bias=False,
        ),
        rules.swiglu,
        choice_bias="feed_forward.expert_bias",
        choice_if="use_expert_bias",
    ),
    "llama4_text": Forward(
        "feed_forward.router.weight",
        rules.topk_sigmoid,
        rules.swiglu,
        shared="feed_forward.shared_expert.{}_proj.weight",
        weighs_input=True,
    ),
    "jamba": Forward("feed_forward.router.weight", rules.softmax_as_it_is, rules.swiglu),
    "dbrx": Forward("ffn.router.layer.weight", rules.dbrx, rules.swiglu),
    "ernie4_5_moe": Forward(
        "mlp.gate.weight",
        rules.ernie,
        rules.swiglu,
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        shared="mlp.shared_experts.{}_proj.weight",
        shared_if="moe_num_shared_experts",
    ),
    "hunyuan_v1_moe": Forward(
        "mlp.gate.wg.weight",
        rules.softmax_always_renormalised,
        rules.swiglu,
        shared="mlp.shared_mlp.{}_proj.weight",
        shared_if="use_mixed_mlp_moe",
    ),
    "hy_v3": Forward(
        "mlp.router.gate.weight",
        rules.Sigmoid(scale=("router_scaling_factor", None), renormalise=None, groups=None),
        rules.swiglu,
        choice_bias="mlp.expert_bias",
        shared="mlp.shared_mlp.{}_proj.weight",
        shared_if="num_shared_experts",
    ),
    "qwen3_5_moe_text": replace(_QWEN_SHARED, router=rules.softmax_always_renormalised, shared_if=""),
    **dict.fromkeys(
        ("kimi_linear", "kimi_k3"),
        Forward(
            "block_sparse_moe.gate.weight",
            rules.KIMI,
            rules.swiglu_or_situ,
            choice_bias="block_sparse_moe.gate.e_score_correction_bias",
            shared="block_sparse_moe.shared_experts.{}_proj.weight",
            shared_if="num_shared_experts",
            # Source: moonshotai/Kimi-K3, `modeling_kimi_linear.py` (KimiSparseMoeBlock).
            latent=Latent(
                "block_sparse_moe.routed_expert_down_proj.weight",
                "block_sparse_moe.routed_expert_up_proj.weight",
                width="routed_expert_hidden_size",
                norm="block_sparse_moe.routed_expert_norm.weight",
                norm_if="latent_moe_use_norm",
            ),
        ),
    ),
    "nemotron_h": Forward(
        "mixer.gate.weight",
        rules.SIGMOID,
        rules.relu2,
        choice_bias="mixer.gate.e_score_correction_bias",
        shared="mixer.shared_experts.{}_proj.weight",
        shared_if="n_shared_experts",
        roles=("up", "down"),
        latent=Latent("mixer.fc1_latent_proj.weight", "mixer.fc2_latent_proj.weight", width="moe_latent_size"),
    ),
}
