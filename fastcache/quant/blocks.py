"""Rows of GGML blocks as float32, by the gguf package's NumPy code.

An array of blocks says its type itself, in its dtype (`formats.ggml`). The package is imported by the first call.
Imports errors, formats.ggml, quant.floats, numpy and gguf.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.formats import ggml
from fastcache.quant.floats import is_plain, to_float32

_ROWS: Final = 16  # at a time: the package takes several arrays as large as what it is given


class Decoder(NamedTuple):
    """How to read one type."""

    name: str
    elements: int  # per block
    nbytes: int  # per block
    qtype: Any  # gguf.GGMLQuantizationType

    def width(self, row_bytes: int) -> int:
        """Return the elements of a row of that many bytes."""
        return row_bytes // self.nbytes * self.elements


def is_blocks(dtype: np.dtype[Any]) -> bool:
    """Say whether an array of `dtype` holds GGML blocks."""
    return ggml.type_of(dtype) is not None


def decoder_of(dtype: np.dtype[Any]) -> Decoder:
    """Return how to read the blocks of an array.

    Raises
    ------
    UnsupportedCheckpoint
        The gguf package cannot dequantise the type.
    """
    name = ggml.type_of(dtype)
    if name is None:
        raise TypeError(f"an array of {dtype} holds no GGML blocks")
    return _decoder(name)


@functools.cache
def _decoder(name: str) -> Decoder:
    from gguf import GGMLQuantizationType, quants

    block = ggml.blocks()[name]
    found = Decoder(name, block.elements, block.nbytes, GGMLQuantizationType[name])
    try:
        with np.errstate(all="ignore"):
            quants.dequantize(np.zeros((1, block.nbytes), np.uint8), found.qtype)
    except NotImplementedError:
        raise UnsupportedCheckpoint(
            f"the gguf package cannot dequantise {name}; the bytes are served: decode them yourself"
        ) from None
    return found


def widen_blocks(decoder: Decoder, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
    """Write the numbers of `rows` of blocks, uint8 [n, row bytes], into `out`, float32 [n, elements].

    Bit for bit what `gguf.dequantize` gives for all rows at once, which knows nothing beyond a block. Takes memory for
    16 rows at a time.
    """
    from gguf import quants

    with np.errstate(all="ignore"):  # a block of garbage is infinite or no number, as everywhere
        for first in range(0, len(rows), _ROWS):
            group = rows[first : first + _ROWS]
            out[first : first + _ROWS] = quants.dequantize(group, decoder.qtype)


def blocks_to_float32(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Return an array of blocks [..., row bytes] as float32 [..., elements]."""
    decoder = decoder_of(blocks.dtype)
    rows = blocks.reshape(-1, blocks.shape[-1])
    out = np.empty((len(rows), decoder.width(rows.shape[1])), np.float32)
    widen_blocks(decoder, rows, out)
    return out.reshape(*blocks.shape[:-1], out.shape[1])


def self_told(stored: NDArray[Any]) -> NDArray[np.float32] | None:
    """Return as float32 an array whose dtype alone says its numbers (GGML blocks, or plain); None: it is codes."""
    if is_blocks(stored.dtype):
        return blocks_to_float32(stored)
    return to_float32(stored) if is_plain(stored.dtype) else None
