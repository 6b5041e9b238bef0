"""Tensors that a decoder computes with, held to the shapes that its config gives them, before anything is computed.

Owns `require`, `floats` and `shape_of`. Knows no family. Imports errors and quant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from fastcache.quant.blocks import decoder_of, is_blocks, self_told
from fastcache.quant.coded import coded_weight
from fastcache.quant.floats import is_plain

F32: TypeAlias = NDArray[np.float32]
Tensors: TypeAlias = Mapping[str, NDArray[Any]]

# What a weight of codes has beside it, and a plain one must not: it would change what the weight is.
_OF_CODES: Final = ("weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_scale_2", "pre_quant_scale")


def shape_of(tensors: Tensors, name: str) -> tuple[int, ...]:
    """Return the shape of a weight as `fastcache.linear` multiplies by it, however it is stored.

    Raises
    ------
    MissingTensor
        There is none of that name.
    UnsupportedCheckpoint, CheckpointError
        It is stored in a way that is not decoded, or its codes and scales do not fit each other.
    """
    stored = tensors.get(name)
    if stored is not None and is_blocks(stored.dtype):
        return (*stored.shape[:-1], decoder_of(stored.dtype).width(stored.shape[-1]))
    coded = coded_weight(tensors, name)
    if coded is not None:
        return coded.shape
    if stored is None:
        raise MissingTensor(f"the checkpoint has no tensor {name!r}; the model cannot be computed without it")
    if not is_plain(stored.dtype):
        raise UnsupportedCheckpoint(f"{name!r} is stored as {stored.dtype.name} without what makes numbers of it")
    stem = name.removesuffix("weight")
    if beside := [f"{stem}{suffix}" for suffix in _OF_CODES if f"{stem}{suffix}" in tensors]:
        raise UnsupportedCheckpoint(f"{beside[0]!r} lies beside {name!r}, which is stored as {stored.dtype.name}")
    return stored.shape


def require(tensors: Tensors, name: str, shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the shape of a weight that is there and can be multiplied by.

    Raises
    ------
    UnsupportedCheckpoint
        It has another shape than `shape`, besides what `shape_of` raises.
    """
    found = shape_of(tensors, name)
    if shape is not None and found != shape:
        raise UnsupportedCheckpoint(f"{name!r} has shape {found}; by the config it should be {shape}")
    return found


def floats(tensors: Tensors, name: str, shape: tuple[int, ...] | None = None) -> F32:
    """Return a stored tensor as float32: for norms, biases, and other small ones.

    Raises
    ------
    MissingTensor
        There is none of that name.
    UnsupportedCheckpoint
        It is stored as codes, or has another shape than `shape`.
    CheckpointError
        A number of it is infinite, or none.
    """
    if name not in tensors:
        raise MissingTensor(f"the checkpoint has no tensor {name!r}; the model cannot be computed without it")
    stored = tensors[name]
    array = self_told(stored)
    if array is None:
        raise UnsupportedCheckpoint(f"{name!r} is stored as {stored.dtype.name}; the decoder wants plain numbers there")
    if shape is not None and array.shape != shape:
        raise UnsupportedCheckpoint(f"{name!r} has shape {array.shape}; by the config it should be {shape}")
    return finite(name, array)


def finite(name: str, array: F32) -> F32:
    """Return an array whose numbers are all finite; raise CheckpointError for others: they are damage."""
    bad = ~np.isfinite(array)
    if bad.any():
        raise CheckpointError(f"{name!r} is damaged: {int(bad.sum())} of its {array.size} numbers are NaN or infinite")
    return array
