"""A whole decoder in NumPy: ids to logits, with its routed experts from a store or from memory.

Owns `Model` and `load`. Knows no family: rows of decoder and families do. Imports errors, layout, linear, opening,
settings (environment), store, trunk, predictors, units, and of moe what a decoder is made of.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.build import build_layout
from fastcache.layout.families import config_value
from fastcache.layout.record import Layout
from fastcache.linear import linear
from fastcache.moe.block import MoEBlock, load_block
from fastcache.moe.cache import KVCache
from fastcache.moe.decoder import Config, Decoder, count, decoder_of, norm_of, number, require
from fastcache.moe.ffn import silu
from fastcache.moe.sampling import check_sampling, sample
from fastcache.moe.speculator import Speculator
from fastcache.moe.tensors import Named, ResidentTrunk, hub_names
from fastcache.moe.tokens import eos_of
from fastcache.opening import open as open_store
from fastcache.predictors import Predictor, RouterLookahead
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.floats import is_plain, to_float32
from fastcache.settings import from_environment
from fastcache.store import ExpertStore
from fastcache.trunk import Trunk

F32: TypeAlias = NDArray[np.float32]

STREAMING_BYTES: Final = 2 << 30
"""The budget that FASTCACHE_SSD_STREAMING=1 asks for."""
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
        stored: Mapping[str, NDArray[Any]] = ResidentTrunk(trunk) if resident_trunk else trunk
        names = hub_names(stored, layout.format)
        self._tensors = tensors = Named(stored, names)
        self._embedding = f"{row.embedding}.weight"
        self._rows = Named(trunk, names)  # rows of the embedding are taken as stored: a few are converted, not all
        require(tensors, self._embedding)
        self.vocabulary, self.hidden = len(self._rows[self._embedding]), count(self.config, "hidden_size")
        self.layers = count(self.config, "num_hidden_layers")
        self._head = _head(row, self.config, tensors, layout.format)
        self._norm = norm_of(self.config, tensors, row.last_norm)
        scaled = self.config if row.scaled else {}
        self._times_embedding = np.float32(number(scaled, "embedding_multiplier", 1.0))
        self._times_residual = np.float32(number(scaled, "residual_multiplier", 1.0))
        self._over_logits = np.float32(number(scaled, "logits_scaling", 1.0))
        experts: ExpertStore | Literal["resident"] = "resident" if store is None else store
        self._layers = [
            _Layer(row, self.config, tensors, layout, n, experts, stored, speculator) for n in range(self.layers)
        ]
        self._piece = max(1, PARTS_BYTES // (4 * (layout.top_k or 1) * self.hidden))
        self.eos = eos_of(layout)
        self.path = os.path.dirname(layout.files[0]) if layout.files else ""

    def new_cache(self) -> KVCache:
        """Return an empty cache for one sequence."""
        return KVCache(self.layers)

    def forward(self, ids: ArrayLike, cache: KVCache | None = None, *, last_only: bool = False) -> F32:
        """Compute logits of the tokens that follow.

        Parameters
        ----------
        ids : array_like of int, [T]
        cache : KVCache, optional
            The tokens before these; takes these too. None: they are the first, and nothing is kept.
        last_only : bool
            Only of the last token.

        Returns
        -------
        ndarray, float32, [T, vocabulary], or [1, vocabulary]

        Raises
        ------
        ValueError
            Ids are not a list of integers in the vocabulary.
        CheckpointChanged
            A file of the trunk was written to.
        FastcacheError
            What the store raises. After any error the cache is as it was.

        Notes
        -----
        A layer at a time over all tokens, within a layer a bounded piece at a time. What a prompt is cut into changes
        last bits (sums of other shapes round differently); a store, its budget and what it reads ahead change none.
        """
        ids = self._checked(ids)
        self.trunk.check()  # and below: nothing is computed of other weights, or it is not given
        cache = self.new_cache() if cache is None else cache
        start = cache.length
        phase = nullcontext() if self.store is None else self.store.phase("decode" if len(ids) == 1 else "prefill")
        if self.store is not None:
            self.store.mark_token(len(ids))
        try:
            with phase:
                h = self._embedded(ids)
                for layer, kept in zip(self._layers, cache, strict=True):
                    a = layer.attention(layer.first_norm(h), start, kept)
                    a *= self._times_residual
                    h += a
                    for first in range(0, len(h), self._piece):
                        part = h[first : first + self._piece]
                        y = layer.feed_forward(layer.second_norm(part))
                        y *= self._times_residual
                        part += y
            logits = linear(self._norm(h[-1:] if last_only else h), self._tensors, self._head)
            if self._over_logits != 1:
                logits /= self._over_logits
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
        temperature : float
            0: always the likeliest.
        top_k, top_p : optional
            Sample only among the k likeliest; among those that together have probability p.
        seed : int, optional
            Of the sampling: the same seed, prompt and model give the same tokens.
        stop : iterable of int, optional
            Tokens that end it, which are not given. None: the model's own (`eos`).
        cache : KVCache, optional
            What was before the prompt; afterwards also what was generated, but the last token.

        Yields
        ------
        int
        """
        check_sampling(temperature, top_k, top_p)
        try:
            max_tokens = operator.index(max_tokens)
        except TypeError:
            raise TypeError(f"max_tokens must be an integer; got {max_tokens!r}") from None
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0; got {max_tokens}")
        prompt = self._checked(ids)
        ends = self.eos if stop is None else frozenset(stop)
        rng = np.random.default_rng(seed)
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
        for _ in range(most):
            token = sample(self.forward(ids, cache, last_only=True)[0], rng, **how)
            if token in ends:
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

    def _checked(self, ids: ArrayLike) -> NDArray[np.int64]:
        array = np.asarray(ids)
        if array.ndim != 1 or not array.size:
            raise ValueError(f"ids must be a list of at least one token id; got shape {array.shape}")
        if array.dtype.kind not in "iu":
            raise ValueError(f"ids must be integers; got {array.dtype}")
        if array.min() < 0 or array.max() >= self.vocabulary:
            raise ValueError(f"ids must be from 0 to {self.vocabulary - 1}; got {array.min()} to {array.max()}")
        return array.astype(np.int64)

    def _embedded(self, ids: NDArray[np.int64]) -> F32:
        stored = self._rows[self._embedding][ids]
        if is_blocks(stored.dtype):
            h = blocks_to_float32(stored)
        elif is_plain(stored.dtype):
            h = to_float32(stored)
        else:
            raise UnsupportedCheckpoint(f"{self._embedding!r} is stored as {stored.dtype.name}")
        if self._times_embedding != 1:
            h = h * self._times_embedding
        return h


class _Layer:
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


def _head(row: Decoder, config: Config, tensors: Mapping[str, NDArray[Any]], format: str) -> str:
    """Return the name of the matrix that makes logits: the embedding's where they are tied."""
    tied = config_value(config, "tie_word_embeddings")
    head = f"{row.head}.weight"
    if tied or (format == "gguf" and head not in tensors):
        return f"{row.embedding}.weight"
    require(tensors, head)
    return head


def load(
    path: str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    experts: Literal["stream", "resident"] = "stream",
    trunk: Literal["mapped", "resident"] = "mapped",
    predictor: Predictor | Literal["lookahead"] | None = "lookahead",
    **options: Any,
) -> Model:
    """Load a checkpoint as a model that computes logits and generates tokens.

    Parameters
    ----------
    path : path
        As for `fastcache.open`.
    budget : int or str, optional
        As for `fastcache.open`. None: FASTCACHE_EXPERT_CACHE_BYTES, else 2 GiB if FASTCACHE_SSD_STREAMING is 1, else
        "auto": all experts where they fit.
    experts : {"stream", "resident"}
        Through a store, or all in memory now. The outputs are bit-identical.
    trunk : {"mapped", "resident"}
        The other weights: multiplied as stored, from memory maps, converted a block at a time; or converted to float32
        once (twice the bytes of bfloat16), which may differ in last bits.
    predictor : Predictor or "lookahead" or None
        What guesses the next layers' experts while a token is decoded; None: nothing. Changes no output.
    **options
        Of `fastcache.open`: policy, engine, io_threads, ...

    Returns
    -------
    Model

    Raises
    ------
    UnsupportedCheckpoint
        No decoder for the family, or for what its config asks for.
    MissingTensor
        A tensor that the model needs is not there.
    CheckpointError, ValueError, TypeError
        As `fastcache.open`.
    """
    if experts not in ("stream", "resident"):
        raise ValueError(f'experts is "stream" or "resident", not {experts!r}')
    if trunk not in ("mapped", "resident"):
        raise ValueError(f'trunk is "mapped" or "resident", not {trunk!r}')
    if experts == "resident" and from_environment("FASTCACHE_VERIFY") not in (None, "off"):
        raise ValueError(
            'FASTCACHE_VERIFY is set, and resident experts are held to no sidecar: stream them, with budget="all", or '
            "unset it and run `fastcache verify`"
        )
    if experts == "resident" and (options or budget is not None):
        given = ", ".join([*(["budget"] if budget is not None else []), *options])
        raise ValueError(f"{given}: for experts that are streamed; these are resident")
    layout = build_layout(path)
    decoder_of(layout.family)
    resident = trunk == "resident"
    if experts == "resident":
        return Model(layout, None, Trunk(layout), resident_trunk=resident)
    if budget is None and from_environment("FASTCACHE_EXPERT_CACHE_BYTES") is None and _streaming():
        budget = STREAMING_BYTES
    options.setdefault("name", os.path.basename(os.path.abspath(os.fspath(path))))
    store = open_store(layout, budget=budget, **options)
    try:
        speculator = None
        if predictor is not None:
            speculator = Speculator(RouterLookahead() if isinstance(predictor, str) else predictor)
        return Model(layout, store, store.trunk, resident_trunk=resident, speculator=speculator)
    except BaseException:
        store.close()
        raise


def _streaming() -> bool:
    text = from_environment("FASTCACHE_SSD_STREAMING")
    if text not in (None, "0", "1"):
        raise ValueError(f"FASTCACHE_SSD_STREAMING must be 1 or 0; got {text!r}")
    return text == "1"
