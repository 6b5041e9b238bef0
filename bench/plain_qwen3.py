"""A Qwen3-MoE decoder as plain as can be, for measuring the store under it: mapped trunk, one sequence, greedy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import fastcache
from fastcache.layout.build import build_layout
from fastcache.moe import load_block

F32 = np.ndarray[Any, np.dtype[np.float32]]


class PlainQwen3:
    """Experts from `store`; every other tensor mapped from its file. `forward` goes on where it ended."""

    def __init__(self, path: str, store: fastcache.ExpertStore) -> None:
        layout = build_layout(path)
        config = layout.config
        maps = [np.memmap(file, np.uint8, "r") for file in layout.files]
        self.trunk = {
            name: maps[info.file][info.offset : info.offset + info.nbytes].view(ml_dtypes.bfloat16).reshape(info.shape)
            for name, info in layout.trunk.items()
        }
        self.width, self.epsilon = config["head_dim"], np.float32(config["rms_norm_eps"])
        self.blocks = [load_block(layout, layer, store) for layer in range(config["num_hidden_layers"])]
        pairs = np.arange(0, self.width, 2, dtype=np.float32)
        self.frequency = (np.float32(config["rope_theta"]) ** (-pairs / np.float32(self.width))).astype(np.float32)
        self.keys: list[F32] = [np.zeros((0, config["num_key_value_heads"], self.width), np.float32)] * len(self.blocks)
        self.values = list(self.keys)
        self.start = 0

    def forward(self, ids: list[int]) -> F32:
        """ids [T] -> logits of the last one [vocabulary]."""
        h = self.trunk["model.embed_tokens.weight"][ids].astype(np.float32)
        for layer, block in enumerate(self.blocks):
            prefix = f"model.layers.{layer}."
            h = h + self._attention(self._norm(h, f"{prefix}input_layernorm"), layer, f"{prefix}self_attn.")
            h = h + block(self._norm(h, f"{prefix}post_attention_layernorm"))
        self.start += len(ids)
        return fastcache.linear(self._norm(h[-1:], "model.norm"), self.trunk, "lm_head.weight")[0]

    def _norm(self, x: F32, name: str) -> F32:
        weight = self.trunk[f"{name}.weight"].astype(np.float32)
        return np.asarray(weight * (x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon)))

    def _rotate(self, x: F32) -> F32:
        angle = np.arange(self.start, self.start + len(x), dtype=np.float32)[:, None, None] * self.frequency
        cos, sin = np.cos(angle), np.sin(angle)
        one, two = np.split(x, 2, axis=-1)
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    def _attention(self, x: F32, layer: int, prefix: str) -> F32:
        q, k, v = (
            fastcache.linear(x, self.trunk, f"{prefix}{each}_proj.weight").reshape(len(x), -1, self.width)
            for each in "qkv"
        )
        q, k = self._rotate(self._norm(q, f"{prefix}q_norm")), self._rotate(self._norm(k, f"{prefix}k_norm"))
        k = self.keys[layer] = np.concatenate([self.keys[layer], k])
        v = self.values[layer] = np.concatenate([self.values[layer], v])
        group = q.shape[1] // k.shape[1]
        scores = np.einsum("thd,shd->hts", q, np.repeat(k, group, axis=1)) / np.float32(np.sqrt(self.width))
        later = np.arange(len(k)) > np.arange(self.start, self.start + len(x))[:, None]
        scores = np.where(later, np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        y = np.einsum("hts,shd->thd", weights, np.repeat(v, group, axis=1)).reshape(len(x), -1)
        return fastcache.linear(y, self.trunk, f"{prefix}o_proj.weight")
