"""From a path to a model: its experts streamed or resident, its trunk mapped or converted.

Owns `load`. Imports layout, opening, settings (environment), trunk, predictors, and model and speculator of moe.
"""

from __future__ import annotations

import os
from typing import Any, Final, Literal

from fastcache.layout.build import build_layout
from fastcache.moe.decoder import decoder_of
from fastcache.moe.model import Model
from fastcache.moe.speculator import Speculator
from fastcache.opening import open as open_store
from fastcache.predictors import Predictor, RouterLookahead
from fastcache.settings import from_environment
from fastcache.trunk import Trunk

STREAMING_BYTES: Final = 2 << 30
"""The budget that FASTCACHE_SSD_STREAMING=1 asks for."""


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
    if isinstance(predictor, str) and predictor != "lookahead":
        raise ValueError(f'predictor is a Predictor, "lookahead" or None, not {predictor!r}')
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
