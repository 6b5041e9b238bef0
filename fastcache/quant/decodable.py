"""Whether a weight could be decoded, from the types and shapes of its arrays alone.

Owns `check_decodable` and arrays that take no memory to ask it with. Imports errors, formats.scheme, the rest of quant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.formats.scheme import schemes_of
from fastcache.quant.blocks import decoder_of, is_blocks
from fastcache.quant.coded import coded_weight
from fastcache.quant.codes import FLOAT8
from fastcache.quant.floats import is_plain


def hollow(arrays: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> Mapping[str, NDArray[Any]]:
    """Return an array of zeros for each (label, dtype, shape), of one element's memory whatever its shape."""
    return {label: np.broadcast_to(np.zeros((), dtype), shape) for label, dtype, shape in arrays}


def check_decodable(arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    """Raise what `linear` would raise for the weight `name` of such arrays, whatever numbers they hold.

    Raises
    ------
    UnsupportedCheckpoint
        The weight is stored in a way that is not decoded; the message names the config's key if that is why.
    CheckpointError
        Its codes and scales do not fit each other.
    """
    for label in (name, f"{name}.weight"):
        if label in arrays and is_blocks(arrays[label].dtype):
            decoder_of(arrays[label].dtype)
            return
    if name in arrays and is_plain(arrays[name].dtype):
        return
    if coded_weight(arrays, name, values=False) is None:
        problems = [scheme.problem for array in arrays.values() for scheme in schemes_of(array.dtype) if scheme.problem]
        stored = ", ".join(f"{label} {array.dtype.name}" for label, array in arrays.items())
        why = f" (config.json: {problems[0]})" if problems else ""
        if not why and f"{name}.weight" in arrays and arrays[f"{name}.weight"].dtype in FLOAT8:
            why = " (float8 without a scale)"
        raise UnsupportedCheckpoint(f"no arithmetic here for {name!r}, its bytes are served: {stored}{why}")
