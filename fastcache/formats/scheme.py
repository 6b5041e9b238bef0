"""How codes and the scales beside them belong together, said by the dtype of the codes.

Owns `Scheme`, and how an array carries those that its config allows: in its dtype's metadata, so that every view, slice
and copy has them too, and the array equals any other of its type. Knows no config. Imports numpy.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np

_KEY: Final = "fastcache.schemes"


class Scheme(NamedTuple):
    """One way in which a tensor of codes may be meant."""

    block: tuple[int, int] | None = None  # rows, columns that share a scale, 0: the whole axis; None: the grid tells
    bits: int = 0  # of one integer in a packed word; 0: unsaid
    asymmetric: bool = False  # zero points must be there
    problem: str = ""  # the config key, and its value, that this version does not decode
    packing: str = ""  # of a qweight: "gptq" (zero points stored less one), "gptq_v2" or "awq"
    ordered: bool = False  # of a qweight: g_idx must be there
    carries: bool = False  # of "gptq": zero points were made one less on whole words, so that a 0 borrowed


@functools.cache
def carrier(dtype: np.dtype[Any], schemes: tuple[Scheme, ...]) -> np.dtype[Any]:
    """Return a dtype equal to `dtype` whose arrays say that they are coded by one of `schemes`."""
    if not schemes:
        return dtype
    return np.dtype(dtype, metadata={_KEY: schemes})


def schemes_of(dtype: np.dtype[Any]) -> tuple[Scheme, ...]:
    """Return the schemes that an array of this dtype may be coded by; none if it does not say."""
    found: tuple[Scheme, ...] = () if dtype.metadata is None else dtype.metadata.get(_KEY, ())
    return found
