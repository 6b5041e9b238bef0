"""A whole decoder in NumPy: ids to logits, with its routed experts from a store or from memory.

Owns `Model`. Knows no family: rows of decoder and families do. Imports errors, layout, linear, quant, store, trunk, and
of moe what a decoder is made of.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcache.errors import CheckpointError, UnsupportedCheckpoint
from fastcache.layout.record import Layout
from fastcache.linear import linear
from fastcache.moe.asked import Asked
from fastcache.moe.cache import KVCache
from fastcache.moe.decoder import decoder_of, norm_of
from fastcache.moe.demands import check_config
from fastcache.moe.layers import Layer, drafts_of, head_of
from fastcache.moe.sampling import check_ids, check_sampling, generator, sample, stop_tokens
from fastcache.moe.speculator import Speculator
from fastcache.moe.tensors import Named, ResidentTrunk, hub_names
from fastcache.moe.tokens import eos_of
from fastcache.moe.unused import check_used
from fastcache.moe.values import count, number
from fastcache.moe.weights import require
from fastcache.quant.blocks import self_told
from fastcache.quant.coded import coded_weight
from fastcache.store import ExpertStore
from fastcache.trunk import Trunk
from fastcache.units import whole

F32: TypeAlias = NDArray[np.float32]

_log = logging.getLogger("fastcache")
PARTS_BYTES: Final = 128 << 20
"""Experts' outputs that a block holds at a time: a longer prompt goes through it in pieces."""


class Model:
    """A decoder with its experts. Made by `load`; a context manager that closes its store.

    Attributes
    ----------
    store : ExpertStore or None
        Where the experts are; None if they are resident.
    trunk : Trunk
        Every other tensor, mapped.
    config : mapping
        config.json, or a GGUF file's metadata in its words.
    family : str
    vocabulary, hidden, layers : int
    eos : frozenset of int
        Tokens that end a text, of generation_config.json and config.json.
    not_read : dict
        Keys of config.json with values, that this decoder does not know, and that may ask for something. What is known
        to change a number, and is not computed, was refused.

    Notes
    -----
    Arithmetic is float32. `forward` may be called from several threads, each with its own cache.
    """

    def __init__(
        self,
        layout: Layout,
        store: ExpertStore | None,
        trunk: Trunk,
        *,
        resident_trunk: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        self.store, self.trunk, self.config, self.family = store, trunk, layout.config, layout.family
        row = decoder_of(layout.family)
        config = layout.config if layout.format == "gguf" else Asked(layout.config)
        layout = dataclasses.replace(layout, config=config)
        check_config(config, row.takes)
        stored: Mapping[str, NDArray[Any]] = ResidentTrunk(trunk) if resident_trunk else trunk
        names = hub_names(stored, layout.format)
        self._tensors = tensors = Named(stored, names)
        self._embedding = f"{row.embedding}.weight"
        stored_names = hub_names(trunk, layout.format)
        self._rows = Named(trunk, stored_names)  # rows of the embedding are taken as stored: a few are converted
        self.hidden, self.layers = count(config, "hidden_size"), count(config, "num_hidden_layers")
        self.vocabulary, width = require(self._rows, self._embedding)
        if coded_weight(self._rows, self._embedding) is not None:
            raise UnsupportedCheckpoint(f"{self._embedding!r} is stored as codes with scales, of which no row is taken")
        if width != self.hidden:
            raise UnsupportedCheckpoint(
                f"{self._embedding!r} has shape {(self.vocabulary, width)}; hidden_size is {self.hidden}"
            )
        self._head = head_of(row, config, tensors, layout.format, (self.vocabulary, width))
        self._norm = norm_of(config, tensors, row.last_norm, self.hidden)
        scaled = config if row.scaled else {}
        self._times_embedding = np.float32(number(scaled, "embedding_multiplier", 1.0))
        self._times_residual = np.float32(number(scaled, "residual_multiplier", 1.0))
        self._over_logits = np.float32(number(scaled, "logits_scaling", 1.0, above=0))
        experts: ExpertStore | Literal["resident"] = "resident" if store is None else store
        self._layers = [Layer(row, config, tensors, layout, n, experts, stored, speculator) for n in range(self.layers)]
        used = tensors.asked.union({self._embedding}, *(layer.moe_names for layer in self._layers))
        check_used(
            stored_names,
            used,
            self.layers,
            drafts_of(config),
            gguf=layout.format == "gguf",
            trunk=trunk,
        )
        self._rows_kept = [layer.attention.rows for layer in self._layers]
        self._checkpoint = (layout.files, layout.identities)
        self._piece = max(1, PARTS_BYTES // (4 * (layout.top_k or 1) * self.hidden))
        self.eos = eos_of(layout)
        self.path = os.path.dirname(layout.files[0]) if layout.files else ""
        self.not_read = config.left() if isinstance(config, Asked) else {}  # GGUF's keys are all known, or refused
        if self.not_read:
            said = ", ".join(f"{key} ({value!r:.40})" for key, value in self.not_read.items())
            _log.warning("%s: of config.json, the decoder of %s does not read %s", self.path, self.family, said)

    def new_cache(self) -> KVCache:
        """Return an empty cache for one sequence."""
        return KVCache(self.layers)

    def forward(self, ids: ArrayLike, cache: KVCache | None = None, *, last_only: bool = False) -> F32:
        """Compute logits of the tokens that follow.

        Parameters
        ----------
        ids : array_like of int, [T]
        cache : KVCache, optional
            The tokens before these, of this checkpoint; takes these too. None: they are the first, and nothing is kept.
        last_only : bool
            Only of the last token.

        Returns
        -------
        ndarray, float32, [T, vocabulary], or [1, vocabulary]

        Raises
        ------
        ValueError
            Ids are not a list of integers in the vocabulary.
        CheckpointMismatch
            The cache has another number of layers, keeps other rows, or has tokens of another checkpoint.
        CheckpointChanged
            A file of the trunk was written to.
        CheckpointError
            What a layer gave is NaN or infinite: weights are damaged, or too large for float32.
        FastcacheError
            What the store raises. After any error the cache is as it was.

        Notes
        -----
        A layer at a time over all tokens, within a layer a bounded piece at a time. What a prompt is cut into changes
        last bits (sums of other shapes round differently); a store, its budget and what it reads ahead change none.
        """
        ids = self._checked(ids)
        self._claim(cache)
        self.trunk.check()  # and below: nothing is computed of other weights, or it is not given
        cache = self.new_cache() if cache is None else cache
        start = cache.length
        phase = nullcontext() if self.store is None else self.store.phase("decode" if len(ids) == 1 else "prefill")
        try:
            with phase, np.errstate(all="ignore"):  # what is no number is an error below, and one that says where
                if self.store is not None:
                    self.store.mark_token(len(ids))
                h = self._embedded(ids)
                _check_finite(h, self._embedding)
                for n, (layer, kept) in enumerate(zip(self._layers, cache, strict=True)):
                    a = layer.attention(layer.first_norm(h), start, kept)
                    a *= self._times_residual
                    h += a
                    for first in range(0, len(h), self._piece):
                        part = h[first : first + self._piece]
                        y = layer.feed_forward(layer.second_norm(part))
                        y *= self._times_residual
                        part += y
                    _check_finite(h, f"layer {n}")
                logits = linear(self._norm(h[-1:] if last_only else h), self._tensors, self._head)
                if self._over_logits != 1:
                    logits /= self._over_logits
            _check_finite(logits, self._head)
            self.trunk.check()
        except BaseException:
            cache.truncate(start)
            raise
        return logits

    def generate(
        self,
        ids: ArrayLike,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Iterable[int] | None = None,
        cache: KVCache | None = None,
    ) -> Iterator[int]:
        """Generate tokens after a prompt, one at a time.

        Parameters
        ----------
        ids : array_like of int, [T]
            The prompt; at least one token.
        max_tokens : int
            0: the prompt goes into the cache, and no token comes.
        temperature : float
            0: always the likeliest.
        top_k, top_p : optional
            Sample only among the k likeliest; among those that together have probability p.
        seed : int, optional
            Of the sampling: the same seed, prompt and model give the same tokens.
        stop : int or iterable of int, optional
            Tokens that end it, which are not given. None: the model's own (`eos`); (): none.
        cache : KVCache, optional
            What was before the prompt. Afterwards it has the prompt and what was given, but for the last token of them
            all, however it ended: to go on, give the tokens from `cache.length` on, and what is to follow them.

        Yields
        ------
        int

        Raises
        ------
        TypeError, ValueError
            At the call: an argument is of another type, or out of its range.
        CheckpointMismatch
            At the call: the cache is another model's.
        """
        check_sampling(temperature, top_k, top_p)
        max_tokens = whole("max_tokens", max_tokens)
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0; got {max_tokens}")
        prompt = self._checked(ids)
        ends = self.eos if stop is None else stop_tokens(stop, self.vocabulary)
        self._claim(cache)
        rng = generator(seed)
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        return self._generated(prompt, max_tokens, ends, self.new_cache() if cache is None else cache, rng, how)

    def _generated(
        self,
        ids: NDArray[np.int64],
        most: int,
        ends: frozenset[int],
        cache: KVCache,
        rng: np.random.Generator,
        how: dict[str, Any],
    ) -> Iterator[int]:
        if not most and len(ids) > 1:
            self.forward(ids[:-1], cache, last_only=True)
        for _ in range(most):
            token = sample(self.forward(ids, cache, last_only=True)[0], rng, **how)
            if token in ends:
                cache.truncate(cache.length - 1)  # as where it ends for another reason: all but the last one given
                return
            yield token
            ids = np.array([token])

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.family}: {self.layers} layers, {'resident' if self.store is None else self.store!r}>"

    def _claim(self, cache: KVCache | None) -> None:
        if cache is None:
            return
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache is a KVCache, such as model.new_cache() gives, or None; got {cache!r}")
        cache.claim(self._rows_kept, self._checkpoint, f"{self.family} of {self.layers} layers in {self.path!r}")

    def _checked(self, ids: ArrayLike) -> NDArray[np.int64]:
        try:
            array = np.asarray(ids)
        except ValueError:
            raise ValueError(f"ids must be a list of token ids; got {ids!r}") from None
        if array.ndim != 1 or not array.size:
            raise ValueError(f"ids must be a list of at least one token id; got shape {array.shape}")
        large = array.dtype == object and all(type(each) is int for each in array)  # integers beyond 64 bits
        if array.dtype.kind not in "iu" and not large:
            raise ValueError(f"ids must be integers; got {array.dtype}")
        check_ids("ids", array, self.vocabulary)
        return array.astype(np.int64)

    def _embedded(self, ids: NDArray[np.int64]) -> F32:
        stored = self._rows[self._embedding][ids]
        h = self_told(stored)
        if h is None:
            raise UnsupportedCheckpoint(f"{self._embedding!r} is stored as {stored.dtype.name}")
        if self._times_embedding != 1:
            h = h * self._times_embedding
        return h


def _check_finite(array: F32, where: str) -> None:
    if not np.isfinite(array).all():
        raise CheckpointError(
            f"{where} gives numbers that are NaN or infinite: weights are damaged (`fastcache verify` tells of "
            f"experts), or too large for float32"
        )
