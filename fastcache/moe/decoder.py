"""How each model family's decoder is built around its MoE blocks: one row per family.

Owns the table, and what of a config it reads. The attention of a row is any callable of (config, tensors, layer), the
tensors by the hub's names. Knows no store. Imports errors, layout (config spellings, GGUF's names), quant, and of moe
attention, mla, norms and rope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import MissingTensor, UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.moe.attention import Attention, GroupedQuery, Tensors
from fastcache.moe.mla import mla_of
from fastcache.moe.norms import RmsNorm
from fastcache.moe.rope import rope_of
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.coded import stored_as
from fastcache.quant.floats import is_plain, to_float32

F32: TypeAlias = NDArray[np.float32]
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


def number(config: Config, key: str, default: float | None = None) -> float:
    """Return a number of the config; the default where it is absent or null."""
    value = config_value(config, key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}, not a number")
    return float(value)


def count(config: Config, key: str, default: int | None = None) -> int:
    """Return a positive integer of the config; the default where it is absent or null."""
    value = config_value(config, key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}; the decoder needs a positive integer")
    return value


def epsilon(config: Config) -> float:
    """Return what the norms add to the mean square."""
    return number(config, "rms_norm_eps", 1e-6)


def floats(tensors: Tensors, name: str) -> F32:
    """Return a stored tensor as float32: for norms, biases, and other small ones.

    Raises
    ------
    MissingTensor
        There is none of that name.
    UnsupportedCheckpoint
        It is stored as codes.
    """
    if name not in tensors:
        raise MissingTensor(f"the checkpoint has no tensor {name!r}; the model cannot be computed without it")
    stored = tensors[name]
    if is_blocks(stored.dtype):
        return blocks_to_float32(stored)
    if not is_plain(stored.dtype):
        raise UnsupportedCheckpoint(f"{name!r} is stored as {stored.dtype.name}; the decoder wants plain numbers there")
    return to_float32(stored)


def norm_of(config: Config, tensors: Tensors, name: str) -> RmsNorm:
    """Return the norm whose weight is `name`.weight."""
    return RmsNorm(floats(tensors, f"{name}.weight"), epsilon(config))


def _no_window(config: Config, layer: int) -> int | None:
    return None


def _window(config: Config, layer: int) -> int | None:
    """One for all layers, or none."""
    return None if config_value(config, "sliding_window") is None else count(config, "sliding_window")


def _window_if_used(config: Config, layer: int) -> int | None:
    """What Qwen's configs say only counts if `use_sliding_window`."""
    return _window(config, layer) if config_value(config, "use_sliding_window") else None


def _window_by_type(config: Config, layer: int) -> int | None:
    return count(config, "sliding_window") if _layer_type(config, layer) == "sliding_attention" else None


def _qwen2_window(config: Config, layer: int) -> int | None:
    if not config_value(config, "use_sliding_window"):
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

    Raises
    ------
    UnsupportedCheckpoint, MissingTensor
        The config lacks a size or asks for what is not computed; a tensor is not there.
    """
    prefix = f"model.layers.{layer}.self_attn."
    heads = count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    width = count(config, "head_dim", count(config, "hidden_size") // heads)
    if heads % kv_heads:
        raise UnsupportedCheckpoint(f"config.json: {heads} attention heads for {kv_heads} of keys")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        require(tensors, f"{prefix}{name}.weight")
    biases = {
        name: floats(tensors, f"{prefix}{name}.bias")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        if f"{prefix}{name}.bias" in tensors
    }
    if isinstance(normed, str):
        normed = bool(config_value(config, normed))
    clip = config_value(config, "clip_qkv")
    kind = None if config_value(config, "layer_types") is None else _layer_type(config, layer)
    return GroupedQuery(
        tensors,
        prefix,
        rope_of(config, width, kind),
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        biases=biases,
        query_norm=norm_of(config, tensors, f"{prefix}q_norm") if normed else None,
        key_norm=norm_of(config, tensors, f"{prefix}k_norm") if normed else None,
        sinks=floats(tensors, f"{prefix}sinks") if sinks else None,
        window=window(config, layer),
        clip=None if clip is None else number(config, "clip_qkv"),
        scale=number(config, scale_key) if scale_key else None,
    )


def require(tensors: Tensors, name: str) -> None:
    """Raise MissingTensor unless a weight is there, plain or encoded."""
    if not any(each in tensors for each in stored_as(name)):
        raise MissingTensor(f"the checkpoint has no tensor {name!r}; the model cannot be computed without it")


def _latent(config: Config, tensors: Tensors, layer: int) -> Attention:
    return mla_of(config, tensors, f"model.layers.{layer}.self_attn.")


DECODERS: Final[Mapping[str, Decoder]] = {
    "mixtral": Decoder(partial(grouped_query, window=_window)),
    "qwen2_moe": Decoder(partial(grouped_query, window=_qwen2_window)),
    "qwen3_moe": Decoder(partial(grouped_query, normed=True, window=_window_if_used)),
    "olmoe": Decoder(partial(grouped_query, normed=True)),
    "glm4_moe": Decoder(partial(grouped_query, normed="use_qk_norm")),
    "gpt_oss": Decoder(partial(grouped_query, window=_window_by_type, sinks=True)),
    "granitemoe": Decoder(partial(grouped_query, scale_key="attention_multiplier"), scaled=True),
    "deepseek_v2": Decoder(_latent),
    "deepseek_v3": Decoder(_latent),  # Kimi K2 too
}
