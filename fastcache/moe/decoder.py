"""How each model family's decoder is built around its MoE blocks: one row per family.

Owns the table, and what of a config it reads. The attention of a row is any callable of (config, tensors, layer), the
tensors by the hub's names. Knows no store. Imports errors, layout (config spellings), and of moe attention, demands,
mla, norms, rope and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.moe.attention import Attention, GroupedQuery, Tensors
from fastcache.moe.demands import ON, Neutral, anything, words
from fastcache.moe.mla import mla_of
from fastcache.moe.norms import RmsNorm
from fastcache.moe.rope import Rope, rope_of
from fastcache.moe.values import count, number, truth
from fastcache.moe.weights import floats, require

Config: TypeAlias = Mapping[str, Any]
Window: TypeAlias = Callable[[Config, int], int | None]  # layer -> tokens that a token sees, None: all


@dataclass(frozen=True, slots=True)
class Decoder:
    """One family. Tensor names are the hub's, without ".weight"; a layer's are after "model.layers.L."."""

    attention: Callable[[Config, Tensors, int], Attention]
    first_norm: str = "input_layernorm"
    second_norm: str = "post_attention_layernorm"
    last_norm: str = "model.norm"
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    dense: str = "mlp.{}_proj"  # of a layer without experts; {} is gate, up, down
    scaled: bool = False  # Granite's multipliers of embeddings, residuals and logits
    takes: Mapping[str, Neutral] = field(default_factory=dict)  # keys that `check_config` leaves to the row


def decoder_of(family: str) -> Decoder:
    """Return the row of a family.

    Raises
    ------
    UnsupportedCheckpoint
        No decoder is known for it; its blocks may be, and its experts can be served.
    """
    row = DECODERS.get(family)
    if row is None:
        raise UnsupportedCheckpoint(
            f"no NumPy decoder for the family {family!r}, only for {', '.join(sorted(DECODERS))}; the bytes are "
            f"served: use fastcache.open and your own forward, with fastcache.moe.load_block where that knows it"
        )
    return row


def epsilon(config: Config) -> float:
    """Return what the norms add to the mean square; families differ in it, so that a silent config is refused."""
    return number(config, "rms_norm_eps", above=0)


def norm_of(config: Config, tensors: Tensors, name: str, width: int) -> RmsNorm:
    """Return the norm whose weight is `name`.weight, [width]."""
    return RmsNorm(floats(tensors, f"{name}.weight", (width,)), epsilon(config))


def _no_window(config: Config, layer: int) -> int | None:
    return None


def _window(config: Config, layer: int) -> int | None:
    """One for all layers, or none."""
    return None if config_value(config, "sliding_window") is None else count(config, "sliding_window")


def _window_if_used(config: Config, layer: int) -> int | None:
    """What Qwen's configs say only counts if `use_sliding_window`."""
    if not truth(config, "use_sliding_window", False):
        return None
    if config_value(config, "max_window_layers"):  # from that layer on, or not looked at: it was changed
        raise UnsupportedCheckpoint("config.json: use_sliding_window with max_window_layers can be read two ways")
    return _window(config, layer)


def _window_by_type(config: Config, layer: int) -> int | None:
    return count(config, "sliding_window") if _layer_type(config, layer) == "sliding_attention" else None


def _qwen2_window(config: Config, layer: int) -> int | None:
    if not truth(config, "use_sliding_window", False):
        return None
    if config_value(config, "layer_types") is None:  # which layers would slide was changed more than once
        raise UnsupportedCheckpoint("config.json: use_sliding_window without layer_types; the decoder needs both")
    return _window_by_type(config, layer)


def _layer_type(config: Config, layer: int) -> str:
    """Return the kind of a layer's attention; gpt-oss's before the key was there: sliding first, then in turns."""
    types = config_value(config, "layer_types")
    if types is None:
        return ("sliding_attention", "full_attention")[layer % 2]
    if not isinstance(types, list) or layer >= len(types):
        raise UnsupportedCheckpoint(f"config.json: layer_types says nothing of layer {layer}")
    kind = types[layer]
    if kind not in ("sliding_attention", "full_attention"):
        raise UnsupportedCheckpoint(f"config.json: layer {layer} has attention of type {kind!r}, which is not computed")
    return str(kind)


def grouped_query(
    config: Config,
    tensors: Tensors,
    layer: int,
    *,
    normed: bool | str = False,
    window: Window = _no_window,
    sinks: bool = False,
    scale_key: str = "",
    biases: tuple[str, str] = ("", ""),
    rotary: float = 1.0,
    factors: bool = False,
) -> GroupedQuery:
    """Return the grouped-query attention of a layer.

    Parameters
    ----------
    config : mapping
    tensors : mapping of str to ndarray
        By the hub's names.
    layer : int
    normed : bool or str
        Queries and keys have norms; a string: if the config's key of that name is true.
    window : callable
        (config, layer) -> the layer's window, or None.
    sinks : bool
        Heads have a sink.
    scale_key : str
        The config's key of the logits' scale; empty: head_dim ** -0.5.
    biases : (str, str)
        Which of q, k, v and o may have biases, "qkv"; and the config's key that says whether they do. Where it says
        nothing, those that are there count.
    rotary : float
        The part of a head that is rotated, where the config does not say.
    factors : bool
        Frequencies are divided by the tensor rope_freqs.weight, where there is one: GGUF's "llama" files.

    Raises
    ------
    UnsupportedCheckpoint, MissingTensor
        The config lacks a size or asks for what is not computed; a tensor is not there, or has another shape.
    """
    prefix = f"model.layers.{layer}.self_attn."
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    width = count(config, "head_dim", hidden // heads)
    if (values := count(config, "v_head_dim", width)) != width:
        raise UnsupportedCheckpoint(f"config.json: v_head_dim is {values}, head_dim {width}; the decoder wants one")
    if heads % kv_heads:
        raise UnsupportedCheckpoint(f"config.json: {heads} attention heads for {kv_heads} of keys")
    rows = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    for short, n in rows.items():
        require(tensors, f"{prefix}{short}_proj.weight", (n, hidden))
    require(tensors, f"{prefix}o_proj.weight", (hidden, rows["q"]))
    kind = None if config_value(config, "layer_types") is None else _layer_type(config, layer)
    limit = window(config, layer)
    if kind is not None and (kind == "sliding_attention") != (limit is not None):
        raise UnsupportedCheckpoint(f"config.json: layer_types has {kind!r} for layer {layer}, its window is {limit}")
    if isinstance(normed, str):
        normed = truth(config, normed, False)
    clip = None if config_value(config, "clip_qkv") is None else number(config, "clip_qkv", above=0)
    rope = rope_of(config, width, kind, partial=rotary)
    if factors and "rope_freqs.weight" in tensors:
        rope = _divided(rope, tensors, "rope_freqs.weight")
    return GroupedQuery(
        tensors,
        prefix,
        rope,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        biases=_biases(config, tensors, prefix, biases, rows | {"o": hidden}),
        query_norm=_head_norm(config, tensors, f"{prefix}q_norm", width, heads) if normed else None,
        key_norm=_head_norm(config, tensors, f"{prefix}k_norm", width, kv_heads) if normed else None,
        sinks=floats(tensors, f"{prefix}sinks", (heads,)) if sinks else None,
        window=limit,
        clip=clip,
        scale=number(config, scale_key) if scale_key else None,
    )


def _head_norm(config: Config, tensors: Tensors, name: str, width: int, heads: int) -> RmsNorm:
    """Of each head, or of the row of them all."""
    weight = floats(tensors, f"{name}.weight")
    if weight.shape not in ((width,), (heads * width,)):
        raise UnsupportedCheckpoint(f"'{name}.weight' has shape {weight.shape}; {heads} heads are {width} wide")
    return RmsNorm(weight, epsilon(config))


def _biases(
    config: Config, tensors: Tensors, prefix: str, may: tuple[str, str], rows: Mapping[str, int]
) -> dict[str, Any]:
    shorts, key = may
    said = truth(config, key, False) if key and config_value(config, key) is not None else None
    return {
        f"{short}_proj": floats(tensors, name, (rows[short],))
        for short in shorts
        for name in (f"{prefix}{short}_proj.bias",)
        if said or (said is None and name in tensors)
    }


def _divided(rope: Rope, tensors: Tensors, name: str) -> Rope:
    """As llama.cpp rotates Llama 3's files, whose converter wrote the stretched wavelengths as factors."""
    factors = floats(tensors, name, rope.inv_freq.shape)
    if (factors <= 0).any():
        raise UnsupportedCheckpoint(f"{name!r} has factors that are not above 0: {factors.min()}")
    return Rope.of(
        rope.inv_freq / factors,
        attention_scale=rope.attention_scale,
        interleaved=rope.interleaved,
        limit=rope.limit,
    )


def _latent(config: Config, tensors: Tensors, layer: int) -> Attention:
    return mla_of(config, tensors, f"model.layers.{layer}.self_attn.")


def _any(*keys: str) -> Mapping[str, Neutral]:
    return MappingProxyType(dict.fromkeys(keys, anything))


_ROUTED = _any("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "scoring_func")
_ROUTED_V3 = {**_ROUTED, **_any("moe_router_activation_func")}
_CHOSEN = {**_any("norm_topk_prob"), "scoring_func": words("softmax", "softmax_of_the_chosen")}  # of the k alone

DECODERS: Final[Mapping[str, Decoder]] = {
    "mixtral": Decoder(partial(grouped_query, window=_window, factors=True), takes=_any("sliding_window")),
    "qwen2_moe": Decoder(
        partial(grouped_query, window=_qwen2_window, biases=("qkv", "qkv_bias")),
        takes=_any("sliding_window", "norm_topk_prob"),
    ),
    "qwen3_moe": Decoder(
        partial(grouped_query, normed=True, window=_window_if_used, biases=("qkvo", "attention_bias")),
        takes={**_any("sliding_window", "norm_topk_prob"), "use_qk_norm": ON},
    ),
    "olmoe": Decoder(
        partial(grouped_query, normed=True, biases=("qkvo", "attention_bias")),
        takes={**_any("clip_qkv", "norm_topk_prob"), "use_qk_norm": ON},
    ),
    "glm4_moe": Decoder(
        partial(grouped_query, normed="use_qk_norm", biases=("qkv", "attention_bias"), rotary=0.5),
        takes={**_ROUTED_V3, **_any("use_qk_norm")},
    ),
    "gpt_oss": Decoder(
        partial(grouped_query, window=_window_by_type, sinks=True, biases=("qkvo", "attention_bias")),
        takes={**_CHOSEN, **_any("sliding_window", "swiglu_limit")},
    ),
    "granitemoe": Decoder(
        partial(grouped_query, scale_key="attention_multiplier", biases=("qkvo", "attention_bias")),
        scaled=True,
        takes={
            **_CHOSEN,
            **_any("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        },
    ),
    "deepseek_v2": Decoder(_latent, takes=_ROUTED),
    "deepseek_v3": Decoder(_latent, takes=_ROUTED_V3),  # Kimi K2 too
}
