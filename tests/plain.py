"""Decoders as plain as can be, resident and in a few lines each: what attention, rope and blocks give together."""

import numpy as np
from trunks import Rows, trunk_of

from fastcache.layout.gguf_decoder import hub_name
from fastcache.linear import linear
from fastcache.moe import load_block
from fastcache.moe.ffn import silu
from fastcache.moe.mla import mla_of
from fastcache.moe.rope import rope_of
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.floats import to_float32


def as_float32(array):
    return blocks_to_float32(array) if is_blocks(array.dtype) else to_float32(array)


class Plain:
    """One model. `forward` continues where it ended."""

    def __init__(self, path):
        self.layout, trunk = trunk_of(path)
        self.config = self.layout.config
        self.trunk = {hub_name(name): array for name, array in trunk.items()}
        self.epsilon = np.float32(self.config["rms_norm_eps"])
        layers = range(self.config["num_hidden_layers"])
        self.blocks = {n: load_block(self.layout, n, "resident") for n in self.layout.layers}
        self.attentions = [self._attention(f"model.layers.{n}.self_attn.", n) for n in layers]
        self.caches = [Rows() for _ in layers]
        self.start = 0

    def forward(self, ids):
        """ids [T] -> logits [T, vocabulary] float32."""
        h = as_float32(self.trunk["model.embed_tokens.weight"])[ids]
        for n, (attention, cache) in enumerate(zip(self.attentions, self.caches, strict=True)):
            prefix = f"model.layers.{n}."
            h = h + attention(self.norm(h, f"{prefix}input_layernorm"), self.start, cache)
            x = self.norm(h, f"{prefix}post_attention_layernorm")
            h = h + (self.blocks[n](x) if n in self.blocks else self._dense(x, f"{prefix}mlp."))
        self.start += len(ids)
        return linear(self.norm(h, "model.norm"), self.trunk, "lm_head.weight")

    def norm(self, x, name):
        return to_float32(self.trunk[f"{name}.weight"]) * (x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon))

    def _dense(self, x, prefix):
        inner = silu(self._project(x, f"{prefix}gate_proj")) * self._project(x, f"{prefix}up_proj")
        return self._project(inner, f"{prefix}down_proj")

    def _attention(self, prefix, layer):
        if "kv_lora_rank" in self.config:
            return mla_of(self.config, self.trunk, prefix)
        kind = (self.config.get("layer_types") or {layer: "full_attention"})[layer]
        window = self.config["sliding_window"] if kind == "sliding_attention" else None
        width = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        rope = rope_of(self.config, width, kind)
        return lambda x, start, cache: self._grouped(prefix, rope, width, window, x, start, cache)

    def _grouped(self, prefix, rope, width, window, x, start, cache):
        q, k, v = (self._project(x, f"{prefix}{each}_proj") for each in "qkv")
        if f"{prefix}q_norm.weight" in self.trunk:
            per_head = self.trunk[f"{prefix}q_norm.weight"].size == width
            q, k = (each.reshape(len(x), -1, width) if per_head else each for each in (q, k))
            q, k = self.norm(q, f"{prefix}q_norm"), self.norm(k, f"{prefix}k_norm")
        q, k, v = (each.reshape(len(x), -1, width) for each in (q, k, v))
        k, v = cache.append(rope.rotate(k, start), v)
        q = rope.rotate(q, start)
        group = q.shape[1] // k.shape[1]
        scores = np.einsum("thd,shd->hts", q, np.repeat(k, group, axis=1)) / np.float32(np.sqrt(width))
        distance = np.arange(start, start + len(x))[:, np.newaxis] - np.arange(len(k))
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = np.where(hidden, np.float32(-np.inf), scores)
        sinks = self.trunk.get(f"{prefix}sinks")
        if sinks is not None:  # a key of its own logit and no value
            column = np.broadcast_to(to_float32(sinks)[:, np.newaxis, np.newaxis], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, column], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = (weights / weights.sum(axis=-1, keepdims=True))[..., : len(k)]
        y = np.einsum("hts,shd->thd", weights, np.repeat(v, group, axis=1))
        return self._project(np.ascontiguousarray(y).reshape(len(x), -1), f"{prefix}o_proj")

    def _project(self, x, name):
        y = linear(x, self.trunk, f"{name}.weight")
        bias = self.trunk.get(f"{name}.bias")
        return y if bias is None else y + to_float32(bias)
