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
from fastcache.moe.decoder import Config, Decoder, norm_of
from fastcache.moe.ffn import silu
from fastcache.moe.speculator import Speculator
from fastcache.moe.values import count, truth
from fastcache.moe.weights import require
from fastcache.quant.coded import stored_as
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
        hidden = count(config, "hidden_size")
        self.first_norm = norm_of(config, tensors, f"{prefix}{row.first_norm}", hidden)
        self.second_norm = norm_of(config, tensors, f"{prefix}{row.second_norm}", hidden)
        self.attention = row.attention(config, tensors, layer)
        self.moe_names = frozenset[str]()  # hub names of what the MoE block has of the trunk
        self.feed_forward: MoEBlock | _Dense
        if layer in layout.layers:
            self.feed_forward = load_block(layout, layer, experts, speculator=speculator, trunk=stored)
            start = f"blk.{layer}." if layout.format == "gguf" else prefix
            self.moe_names = frozenset(start + name for name in self.feed_forward.names)
            if self.feed_forward.hidden != hidden:
                raise UnsupportedCheckpoint(
                    f"layer {layer}: the router takes {self.feed_forward.hidden} numbers; config.json: hidden_size is "
                    f"{hidden}"
                )
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
        hidden = count(config, "hidden_size")
        inner = require(tensors, self._gate)[0]
        for name, shape in ((self._gate, (inner, hidden)), (self._up, (inner, hidden)), (self._down, (hidden, inner))):
            require(tensors, name, shape)

    def __call__(self, x: F32) -> F32:
        inner = silu(linear(x, self._tensors, self._gate))
        inner *= linear(x, self._tensors, self._up)
        return linear(inner, self._tensors, self._down)


def drafts_of(config: Config) -> int:
    """Return how many layers behind the decoder's only draft tokens."""
    metadata = config.get("gguf")
    if isinstance(metadata, Mapping):
        drafts = metadata.get(f"{metadata.get('general.architecture')}.nextn_predict_layers")
    else:
        drafts = config_value(config, "num_nextn_predict_layers")
    return drafts if isinstance(drafts, int) else 0


def head_of(
    row: Decoder, config: Config, tensors: Mapping[str, NDArray[Any]], format: str, shape: tuple[int, int]
) -> str:
    """Return the name of the matrix that makes logits: the embedding's where they are tied and none is stored.

    One that is stored is what the model was saved with, whatever `tie_word_embeddings` says: transformers 5 and
    llama.cpp take it too.
    """
    name = f"{row.head}.weight"
    tied = truth(config, "tie_word_embeddings", False) or format == "gguf"
    if tied and not any(each in tensors for each in stored_as(name)):
        name = f"{row.embedding}.weight"
    require(tensors, name, shape)
    return name
