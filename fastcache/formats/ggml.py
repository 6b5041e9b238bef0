"""GGML's tensor types, as the gguf package lists them: number, name, and how many bytes a block of elements takes.

Owns how an array of blocks says what it is: uint8, the type's name in the dtype's metadata, so that every view and
slice of it says so too. The package is imported by the first call. Imports numpy and gguf.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

_KEY: Final = "ggml"


class Block(NamedTuple):
    """What a row is made of."""

    elements: int
    nbytes: int


@functools.cache
def names() -> Mapping[int, str]:
    """Return the name of each type by its number in a file: 0 is F32, 12 is Q4_K, ..."""
    from gguf import GGMLQuantizationType

    return {int(each): each.name for each in GGMLQuantizationType}


@functools.cache
def blocks() -> Mapping[str, Block]:
    """Return the block of each type by name; of F32 and its like, one element."""
    from gguf import GGML_QUANT_SIZES

    return {each.name: Block(*size) for each, size in GGML_QUANT_SIZES.items()}


@functools.cache
def carrier(name: str) -> np.dtype[Any]:
    """Return the dtype of an array over the blocks of type `name`: uint8 that says so, equal to any other uint8."""
    return np.dtype(np.uint8, metadata={_KEY: name})


def type_of(dtype: np.dtype[Any]) -> str | None:
    """Return the name of the GGML type whose blocks an array of this dtype holds; None for any other array."""
    return None if dtype.metadata is None else dtype.metadata.get(_KEY)
