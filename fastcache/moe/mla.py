"""Multi-head latent attention of DeepSeek-V2, V3 and Kimi K2, over a cache of the latents.

Owns `mla_of` and `Mla`. Knows no checkpoint: weights come from a mapping of names to stored arrays, and what was
computed for earlier tokens from a cache that takes rows. Imports errors, layout.families (config spellings), linear,
quant, and of moe norms and rope.

Sources: DeepSeek-V2 (arXiv:2405.04434), section 2.1 and appendix C; DeepSeek-V3, `inference/model.py` (MLA);
transformers, `modeling_deepseek_v3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import MissingTensor, UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.linear import linear
from fastcache.moe.norms import RmsNorm
from fastcache.moe.rope import Config, Rope, rope_of, softmax_scale
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.coded import coded_weight, stored_as
from fastcache.quant.floats import to_float32

F32: TypeAlias = NDArray[np.float32]
Trunk: TypeAlias = Mapping[str, NDArray[Any]]

SCORES: Final = 8 << 20
"""Attention weights that are held at a time, float32: 32 MiB, or those of one token."""
_EPSILON: Final = 1e-6  # of the two norms inside; `rms_norm_eps` is for those around the block


class LayerCache(Protocol):
    """Rows of one layer, one per token."""

    def append(self, *rows: F32) -> tuple[F32, ...]:
        """Keep rows [T, ...] of the next T tokens, and return those of all S tokens so far, [S, ...]."""
        ...


class Mla:
    """The attention of one decoder layer. Made by `mla_of`.

    Notes
    -----
    Per token and layer the cache takes one row of kv_lora_rank + qk_rope_head_dim float32: 2,304 bytes for DeepSeek-V3
    and Kimi K2 (as keys and values, the 128 heads of the former would take 163,840). Keys are never expanded: a head's
    query goes through that head's part of `kv_b_proj` into the latent space, where all heads share the keys; so a
    prefill takes about three times the products that expanded attention takes, and a decoded token a hundred times
    fewer.

    While it runs, a call holds `kv_b_proj` as float32, 64 MiB for DeepSeek-V3, 4 * heads * T * (kv_lora_rank +
    qk_rope_head_dim) bytes of queries, and `SCORES` attention weights. Safe to call from any number of threads, each
    with its own cache.
    """

    def __init__(self, config: Config, trunk: Trunk, prefix: str, rope: Rope) -> None:
        self._trunk, self._prefix, self._rope = trunk, prefix, rope
        self.heads, self.rank, self.rotary, self.nope, self.value = (
            _count(config, key)
            for key in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        self.rows: tuple[tuple[int, ...], ...] = ((self.rank + self.rotary,),)
        self.scale = softmax_scale(config, self.nope + self.rotary)
        compressed = config_value(config, "q_lora_rank") is not None
        parted = f"{prefix}k_b_proj.weight" in trunk  # GGUF
        self._require("kv_a_proj_with_mqa", "o_proj", *(("k_b_proj", "v_b_proj") if parted else ("kv_b_proj",)))
        self._require(*(("q_a_proj", "q_b_proj") if compressed else ("q_proj",)))
        self._key_norm = self._norm("kv_a_layernorm")
        self._query_norm = self._norm("q_a_layernorm") if compressed else None

    def __call__(self, x: F32, start: int, cache: LayerCache) -> F32:
        """Attend from tokens to themselves and to all before them.

        Parameters
        ----------
        x : ndarray, float32, [T, hidden]
            What the layer's first norm gives.
        start : int
            Position of the first token: the number of tokens that the cache has.
        cache : LayerCache
            Takes one row a token.

        Returns
        -------
        ndarray, float32, [T, hidden]
            Without the residual.
        """
        n = len(x)
        latent, key = np.split(self._project(x, "kv_a_proj_with_mqa"), [self.rank], axis=1)
        rows = np.empty((n, self.rank + self.rotary), np.float32)
        rows[:, : self.rank] = self._key_norm(latent)
        rows[:, self.rank :] = self._rope.rotate(key[:, np.newaxis], start)[:, 0]
        (seen,) = cache.append(rows)  # [S, rank + rotary]
        to_latent, to_value = self._expansions()  # [heads, nope, rank], [heads, value, rank]
        query = self._queries(x, start, to_latent)  # [T, heads, rank + rotary]
        summed = self._attend(query, seen, start)  # [heads, T, rank]
        values = np.matmul(summed, to_value.swapaxes(1, 2))  # [heads, T, value]
        return self._project(np.ascontiguousarray(values.swapaxes(0, 1)).reshape(n, -1), "o_proj")

    def _queries(self, x: F32, start: int, to_latent: F32) -> F32:
        if self._query_norm is not None:
            x = self._query_norm(self._project(x, "q_a_proj"))
            x = self._project(x, "q_b_proj")
        else:
            x = self._project(x, "q_proj")
        heads = x.reshape(len(x), self.heads, self.nope + self.rotary)
        query = np.empty((len(x), self.heads, self.rank + self.rotary), np.float32)
        plain = np.ascontiguousarray(heads[..., : self.nope].swapaxes(0, 1))
        query[..., : self.rank] = np.matmul(plain, to_latent).swapaxes(0, 1)
        query[..., self.rank :] = self._rope.rotate(heads[..., self.nope :], start)
        query *= np.float32(self.scale)
        return query

    def _attend(self, query: F32, seen: F32, start: int) -> F32:
        """Sum the latents that each query sees, weighted: as many tokens at a time as `SCORES` allows."""
        n = len(query)
        summed = np.empty((self.heads, n, self.rank), np.float32)
        step = max(1, SCORES // (self.heads * len(seen)))
        for first in range(0, n, step):
            end = min(first + step, n)
            visible = seen[: start + end]
            rows = query[first:end].reshape(-1, query.shape[-1])
            scores = np.matmul(rows, visible.T).reshape(end - first, self.heads, -1)
            for token in range(first, end - 1):  # the last one sees all
                scores[token - first, :, start + token + 1 :] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            part = np.matmul(scores.reshape(len(rows), -1), visible[:, : self.rank])
            summed[:, first:end] = part.reshape(end - first, self.heads, self.rank).swapaxes(0, 1)
        return summed

    def _expansions(self) -> tuple[F32, F32]:
        """Return what a latent becomes in each head: keys [heads, nope, rank] and values [heads, value, rank]."""
        if f"{self._prefix}k_b_proj.weight" not in self._trunk:
            both = f"{self._prefix}kv_b_proj.weight"
            weight = _widened(self._trunk, both)
            expected = (self.heads * (self.nope + self.value), self.rank)
            if weight.shape != expected:
                raise UnsupportedCheckpoint(f"{both!r} has shape {weight.shape}; config.json says {expected}")
            parted = weight.reshape(self.heads, self.nope + self.value, self.rank)
            return parted[:, : self.nope], parted[:, self.nope :]
        # GGUF files keep the halves apart, and the keys' transposed.
        keys = _widened(self._trunk, f"{self._prefix}k_b_proj.weight")
        values = _widened(self._trunk, f"{self._prefix}v_b_proj.weight")
        found = keys.shape, values.shape
        if found != ((self.heads, self.rank, self.nope), (self.heads, self.value, self.rank)):
            raise UnsupportedCheckpoint(f"k_b_proj and v_b_proj of {self._prefix!r} have shapes {found}")
        return keys.swapaxes(1, 2), values

    def _project(self, x: F32, name: str) -> F32:
        y = linear(x, self._trunk, f"{self._prefix}{name}.weight")
        bias = self._trunk.get(f"{self._prefix}{name}.bias")
        return y if bias is None else y + to_float32(bias)

    def _norm(self, name: str) -> RmsNorm:
        self._require(name)
        return RmsNorm(to_float32(self._trunk[f"{self._prefix}{name}.weight"]), _EPSILON)

    def _require(self, *names: str) -> None:
        for name in names:
            full = f"{self._prefix}{name}.weight"
            if not any(each in self._trunk for each in stored_as(full)):
                raise MissingTensor(f"the checkpoint has no tensor {full!r}; its layer cannot be computed without it")


def mla_of(config: Config, trunk: Trunk, prefix: str) -> Mla:
    """Return the attention of one layer.

    Parameters
    ----------
    config : mapping
        config.json, or a GGUF file's metadata in its words.
    trunk : mapping of str to ndarray
        Tensors by on-disk name, as `fastcache.linear` takes them.
    prefix : str
        What the layer's names start with: "model.layers.3.self_attn.".

    Raises
    ------
    MissingTensor
        A weight is not in the trunk.
    UnsupportedCheckpoint
        The config lacks a size, or has a rope that is not computed here.
    """
    interleaved = config_value(config, "rope_interleave")  # DeepSeek's own weights are; a config that is silent, too
    rotary = _count(config, "qk_rope_head_dim")
    return Mla(config, trunk, prefix, rope_of(config, rotary, interleaved=interleaved is None or bool(interleaved)))


def _widened(trunk: Trunk, name: str) -> F32:
    """Return a stored weight as float32, bit for bit what `linear` multiplies by."""
    coded = coded_weight(trunk, name)
    if coded is not None:
        return coded.dense()
    stored = trunk[name]
    return blocks_to_float32(stored) if is_blocks(stored.dtype) else to_float32(stored)


def _count(config: Config, key: str) -> int:
    value = config_value(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}; latent attention needs a positive integer")
    return value
