"""One layer of a decoder: norms, attention, and a MoE block or a dense feed-forward.

Owns `Layer` and `head_of`. Knows no family: rows of decoder and families do. Imports errors, layout, linear, store, and
of moe what a layer is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.layout.record import Layout
from fastcache.linear import linear
from fastcache.moe.block import MoEBlock, load_block
from fastcache.moe.decoder import Config, Decoder, norm_of, require
from fastcache.moe.ffn import silu
from fastcache.moe.speculator import Speculator
from fastcache.store import ExpertStore

F32: TypeAlias = NDArray[np.float32]


class Layer:
    """Norms, attention, and a MoE block or a dense feed-forward."""

    def __init__(
        self,
        row: Decoder,
        config: Config,
        tensors: Mapping[str, NDArray[Any]],
        layout: Layout,
        layer: int,
        experts: ExpertStore | Literal["resident"],
        stored: Mapping[str, NDArray[Any]],
        speculator: Speculator | None,
    ) -> None:
        prefix = f"model.layers.{layer}."
        self.first_norm = norm_of(config, tensors, f"{prefix}{row.first_norm}")
        self.second_norm = norm_of(config, tensors, f"{prefix}{row.second_norm}")
        self.attention = row.attention(config, tensors, layer)
        self.feed_forward: MoEBlock | _Dense
        if layer in layout.layers:
            self.feed_forward = load_block(layout, layer, experts, speculator=speculator, trunk=stored)
        else:
            self.feed_forward = _Dense(config, tensors, f"{prefix}{row.dense}.weight")


class _Dense:
    """The feed-forward of a layer without experts: down(silu(gate x) * up x)."""

    def __init__(self, config: Config, tensors: Mapping[str, NDArray[Any]], names: str) -> None:
        activation = config_value(config, "hidden_act")
        if activation not in (None, "silu", "swish"):
            raise UnsupportedCheckpoint(f"config.json: hidden_act is {activation!r}; dense layers compute silu only")
        self._tensors = tensors
        self._gate, self._up, self._down = (names.format(role) for role in ("gate", "up", "down"))
        for name in (self._gate, self._up, self._down):
            require(tensors, name)

    def __call__(self, x: F32) -> F32:
        inner = silu(linear(x, self._tensors, self._gate))
        inner *= linear(x, self._tensors, self._up)
        return linear(inner, self._tensors, self._down)


def head_of(row: Decoder, config: Config, tensors: Mapping[str, NDArray[Any]], format: str) -> str:
    """Return the name of the matrix that makes logits: the embedding's where they are tied."""
    tied = config_value(config, "tie_word_embeddings")
    head = f"{row.head}.weight"
    if tied or (format == "gguf" and head not in tensors):
        return f"{row.embedding}.weight"
    require(tensors, head)
    return head
