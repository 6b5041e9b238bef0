"""Grouped-query attention in float32: norms of queries and keys, biases, sinks, windows, partial rotation.

Owns `Attention` (what a decoder asks of any kind of attention) and `GroupedQuery`. Knows no checkpoint: weights come
from a mapping of names to stored arrays, and what earlier tokens left from a cache. Imports linear, and of moe cache,
norms and rope.

Sources: Ainslie et al., "GQA" (arXiv:2305.13245); openai/gpt-oss, `gpt_oss/torch/model.py` (sinks, windows);
transformers, `modeling_qwen3_moe.py`, `modeling_olmoe.py`, `modeling_glm4_moe.py`, `modeling_gpt_oss.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.linear import linear
from fastcache.moe.cache import LayerCache, Rows
from fastcache.moe.norms import RmsNorm
from fastcache.moe.rope import Rope

F32: TypeAlias = NDArray[np.float32]
Tensors: TypeAlias = Mapping[str, NDArray[Any]]

SCORES: Final = 8 << 20
"""Attention weights that are held at a time, float32: 32 MiB, or those of one token."""


class Attention(Protocol):
    """The attention of one decoder layer."""

    @property
    def rows(self) -> Rows:
        """The shapes of what its cache takes of one token."""
        ...

    def __call__(self, x: F32, start: int, cache: LayerCache, /) -> F32:
        """Attend from tokens at positions start, start + 1, ... to themselves and to what the cache has.

        x [T, hidden] float32, what the layer's first norm gives -> [T, hidden] float32, without the residual. `start`
        is the number of tokens in the cache, which takes the T tokens' rows.
        """
        ...


class GroupedQuery:
    """Attention whose keys and values are shared by groups of query heads.

    Parameters
    ----------
    tensors : mapping of str to ndarray
        As `fastcache.linear` takes them: {q,k,v,o}_proj.weight, under `prefix`.
    prefix : str
        "model.layers.3.self_attn."
    rope : Rope
    heads, kv_heads, width : int
        Query heads, key and value heads, and the width of each.
    biases : mapping of str to ndarray
        float32, by "q_proj", "k_proj", "v_proj", "o_proj"; what is not there is not added.
    query_norm, key_norm : RmsNorm, optional
        Of each head; or of the row of all heads, if their weights are as long as that.
    sinks : ndarray, float32, [heads], optional
        Each head's logit of a key that has no value.
    window : int, optional
        Tokens that a token sees, itself included; None: all.
    clip : float, optional
        Queries, keys and values are cut to [-clip, clip] (where they are normed, after that).
    scale : float, optional
        Of the logits; width ** -0.5 if None.

    Notes
    -----
    The cache takes 2 * kv_heads * width float32 per token. Beside q, k, v and the result a call holds `SCORES`
    attention weights: long prompts go a block of queries at a time. Bits depend on how many tokens are given at once,
    never on where weights come from. Safe to call from any number of threads, each with its own cache.
    """

    def __init__(
        self,
        tensors: Tensors,
        prefix: str,
        rope: Rope,
        *,
        heads: int,
        kv_heads: int,
        width: int,
        biases: Mapping[str, F32],
        query_norm: RmsNorm | None = None,
        key_norm: RmsNorm | None = None,
        sinks: F32 | None = None,
        window: int | None = None,
        clip: float | None = None,
        scale: float | None = None,
    ) -> None:
        self._tensors, self._prefix, self._rope, self._biases = tensors, prefix, rope, biases
        self.heads, self.kv_heads, self.width, self.window = heads, kv_heads, width, window
        self.rows: Rows = ((kv_heads, width), (kv_heads, width))
        self._query_norm, self._key_norm = query_norm, key_norm
        self._sinks = None if sinks is None else sinks.reshape(kv_heads, heads // kv_heads, 1, 1)
        self._clip = None if clip is None else np.float32(clip)
        self._scale = np.float32(1 / math.sqrt(width) if scale is None else scale)

    def __call__(self, x: F32, start: int, cache: LayerCache) -> F32:
        """Attend; see `Attention`."""
        n = len(x)
        q = self._heads(x, "q_proj", self._query_norm)
        k = self._heads(x, "k_proj", self._key_norm)
        v = self._heads(x, "v_proj", None)
        keys, values = cache.append(self._rope.rotate(k, start), v)  # [S, kv_heads, width]
        y = self._attend(self._rope.rotate(q, start), keys, values, start)
        return self._project(y.reshape(n, -1), "o_proj")

    def _heads(self, x: F32, name: str, norm: RmsNorm | None) -> F32:
        y = self._project(x, name)
        whole = norm is not None and norm.weight.size == y.shape[1]
        if norm is not None and whole:
            y = norm(y)
        if self._clip is not None:
            np.clip(y, -self._clip, self._clip, out=y)
        y = y.reshape(len(x), -1, self.width)
        return y if norm is None or whole else norm(y)

    def _project(self, x: F32, name: str) -> F32:
        y = linear(x, self._tensors, f"{self._prefix}{name}.weight")
        if name in self._biases:
            y += self._biases[name]
        return y

    def _attend(self, query: F32, keys: F32, values: F32, start: int) -> F32:
        """Sum the values that queries [T, heads, width] see: of keys, values [S, kv_heads, width] -> as the queries."""
        n, group = len(query), self.heads // self.kv_heads
        out = np.empty((n, self.heads, self.width), np.float32)
        step = max(1, SCORES // (self.heads * len(keys)))
        for first in range(0, n, step):
            end = min(first + step, n)
            low = 0 if self.window is None else max(0, start + first + 1 - self.window)
            seen = slice(low, start + end)
            # [kv_heads, group * t, width]: one product per head of keys, whose rows lie apart but need no copy.
            block = query[first:end].reshape(end - first, self.kv_heads, group, self.width).transpose(1, 2, 0, 3)
            rows = np.multiply(block, self._scale, order="C").reshape(self.kv_heads, -1, self.width)
            scores = np.matmul(rows, keys[seen].transpose(1, 2, 0))
            scores = scores.reshape(self.kv_heads, group, end - first, -1)
            self._hide(scores, start + first, low)
            self._softmax(scores)
            part = np.matmul(scores.reshape(*rows.shape[:2], -1), values[seen].swapaxes(0, 1))
            part = part.reshape(self.kv_heads, group, end - first, self.width).transpose(2, 0, 1, 3)
            out[first:end] = part.reshape(end - first, self.heads, self.width)
        return out

    def _hide(self, scores: F32, position: int, low: int) -> None:
        """Mask what tokens from `position` on do not see among keys from `low` on: scores [..., t, s], in place."""
        n, s = scores.shape[-2:]
        if n == 1:
            return  # the keys end with the token itself, and begin with its window
        distance = np.arange(position, position + n)[:, np.newaxis] - np.arange(low, low + s)
        hidden = distance < 0
        if self.window is not None:
            hidden |= distance >= self.window
        np.copyto(scores, np.float32(-np.inf), where=hidden)

    def _softmax(self, scores: F32) -> None:
        most = scores.max(axis=-1, keepdims=True)
        if self._sinks is not None:
            most = np.maximum(most, self._sinks)
        scores -= most
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if self._sinks is not None:
            total += np.exp(self._sinks - most)
        scores /= total
