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

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.linear import linear
from fastcache.moe.norms import RmsNorm
from fastcache.moe.rope import Config, Rope, rope_of, rope_parameters, softmax_scale
from fastcache.moe.values import count, truth
from fastcache.moe.weights import floats, require
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.coded import coded_weight
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
            count(config, key)
            for key in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        self.rows: tuple[tuple[int, ...], ...] = ((self.rank + self.rotary,),)
        self.scale = softmax_scale(config, self.nope + self.rotary)
        hidden = require(trunk, f"{prefix}kv_a_proj_with_mqa.weight")[-1]
        queries = self.heads * (self.nope + self.rotary)
        compressed = None if config_value(config, "q_lora_rank") is None else count(config, "q_lora_rank")
        rows = {"kv_a_proj_with_mqa": self.rank + self.rotary, "o_proj": hidden}
        shapes: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa": (self.rank + self.rotary, hidden),
            "o_proj": (hidden, self.heads * self.value),
        }
        if f"{prefix}k_b_proj.weight" in trunk:  # GGUF
            shapes |= {"k_b_proj": (self.heads, self.rank, self.nope), "v_b_proj": (self.heads, self.value, self.rank)}
        else:
            shapes["kv_b_proj"] = (self.heads * (self.nope + self.value), self.rank)
        if compressed is None:
            shapes["q_proj"] = (queries, hidden)
        else:
            shapes |= {"q_a_proj": (compressed, hidden), "q_b_proj": (queries, compressed)}
            rows["q_a_proj"] = compressed
        for name, shape in shapes.items():
            require(trunk, f"{prefix}{name}.weight", shape)
        self._biases = self._read_biases(config, rows)
        self._key_norm = self._norm("kv_a_layernorm", self.rank)
        self._query_norm = None if compressed is None else self._norm("q_a_layernorm", compressed)

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
            weight = _widened(self._trunk, f"{self._prefix}kv_b_proj.weight")
            parted = weight.reshape(self.heads, self.nope + self.value, self.rank)
            return parted[:, : self.nope], parted[:, self.nope :]
        # GGUF files keep the halves apart, and the keys' transposed.
        keys = _widened(self._trunk, f"{self._prefix}k_b_proj.weight")
        return keys.swapaxes(1, 2), _widened(self._trunk, f"{self._prefix}v_b_proj.weight")

    def _project(self, x: F32, name: str) -> F32:
        y = linear(x, self._trunk, f"{self._prefix}{name}.weight")
        bias = self._biases.get(name)
        return y if bias is None else y + bias

    def _norm(self, name: str, width: int) -> RmsNorm:
        return RmsNorm(floats(self._trunk, f"{self._prefix}{name}.weight", (width,)), _EPSILON)

    def _read_biases(self, config: Config, rows: Mapping[str, int]) -> dict[str, F32]:
        """Those that `attention_bias` says are there; where it says nothing, those that are."""
        silent = config_value(config, "attention_bias") is None
        said = None if silent else truth(config, "attention_bias", False)
        return {
            name: floats(self._trunk, full, (n,))
            for name, n in rows.items()
            for full in (f"{self._prefix}{name}.bias",)
            if said or (said is None and full in self._trunk)
        }


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
        The config lacks a size, or has a rope that is not computed here; a weight has another shape than it says.
    CheckpointError
        A norm or a bias is damaged.
    """
    if rope_parameters(config)["partial_rotary_factor"] not in (None, 1):
        raise UnsupportedCheckpoint("config.json: partial_rotary_factor, with the rotated part of a head apart already")
    if set(config_value(config, "layer_types") or ()) - {"full_attention"}:
        raise UnsupportedCheckpoint(f"config.json: layer_types is {config_value(config, 'layer_types')!r} with latents")
    interleaved = truth(config, "rope_interleave", True)  # DeepSeek's own weights are; a config that is silent, too
    rotary = count(config, "qk_rope_head_dim")
    return Mla(config, trunk, prefix, rope_of(config, rotary, interleaved=interleaved))


def _widened(trunk: Trunk, name: str) -> F32:
    """Return a stored weight as float32, bit for bit what `linear` multiplies by."""
    coded = coded_weight(trunk, name)
    if coded is not None:
        return coded.dense()
    stored = trunk[name]
    return blocks_to_float32(stored) if is_blocks(stored.dtype) else to_float32(stored)
