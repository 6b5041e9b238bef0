"""Whether experts can be what a forward computes with: the shapes of their weights, and biases that it leaves out.

Owns `check_shapes` and `check_biases`. Reads no weight. Imports errors, layout.record, linear (its arrays) and quant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.record import LayerExperts, Layout
from fastcache.quant.blocks import decoder_of, is_blocks
from fastcache.quant.coded import coded_weight
from fastcache.quant.floats import is_plain

Arrays = Mapping[str, NDArray[Any]]


def check_shapes(where: str, arrays: Arrays, roles: Sequence[str], width: int) -> None:
    """Refuse an expert whose weights do not fit each other, or what it is given.

    Parameters
    ----------
    where : str
        For messages.
    arrays : mapping of str to ndarray
        As labelled for `fastcache.linear`; their numbers are not looked at.
    roles : sequence of str
        "gate" and "up" [inter, width], "down" [width, inter].
    width : int

    Raises
    ------
    UnsupportedCheckpoint
        The message says which weight has which shape.
    """
    shapes = {role: shape for role in roles if (shape := _shape(arrays, role)) is not None}
    inner = next((shape[0] for role, shape in shapes.items() if role != "down"), None)
    for role, shape in shapes.items():
        wanted = (width, inner or shape[1]) if role == "down" else (inner, width)
        if shape != wanted:
            raise UnsupportedCheckpoint(f"{where}: {role!r} has shape {shape}; {wanted} would fit")


def _shape(arrays: Arrays, role: str) -> tuple[int, ...] | None:
    """Return a weight's shape; None of words of packed integers, which do not tell how many are padding."""
    for label in (role, f"{role}.weight"):
        stored = arrays.get(label)
        if stored is not None and is_blocks(stored.dtype):
            return (*stored.shape[:-1], decoder_of(stored.dtype).width(stored.shape[-1]))
        if stored is not None and label == role and is_plain(stored.dtype):
            return stored.shape
    if any(array.dtype == np.int32 for label, array in arrays.items() if label.startswith(f"{role}.")):
        return None
    coded = coded_weight(arrays, role, values=False)
    return None if coded is None else coded.shape


def check_biases(layout: Layout, located: LayerExperts, roles: Sequence[str], wanted: bool | None) -> None:
    """Refuse experts with biases that are not computed with, unless they are zeros; or without those that are.

    Parameters
    ----------
    layout : Layout
    located : LayerExperts
        The experts of one layer.
    roles : sequence of str
    wanted : bool or None
        Whether the forward adds biases; None: nobody knows, so that nothing is checked.
    """
    for number, record in enumerate(located.records):
        labels = {view.label: view.tensor for view in record.views}
        for role in roles:
            column = labels.get(f"{role}.bias")
            if wanted and column is None:
                raise UnsupportedCheckpoint(
                    f"layer {located.layer}: the NumPy forward of {layout.family!r} computes with {role}.bias, and "
                    f"these experts have none; use fastcache.open and your own"
                )
            if wanted is False and column is not None:
                _check_zeros(layout, located, number, column, f"{role}.bias")


def _check_zeros(layout: Layout, located: LayerExperts, number: int, column: int, label: str) -> None:
    nbytes = located.records[number].tensors[column].nbytes
    for expert in np.flatnonzero(located.record_of == number).tolist():
        path, offset = layout.files[located.file[expert, column]], int(located.offset[expert, column])
        if np.fromfile(path, np.uint8, count=nbytes, offset=offset).any():
            raise UnsupportedCheckpoint(
                f"layer {located.layer}: the NumPy forward of {layout.family!r} computes without {label}, and expert "
                f"{expert} has one that is not zero; use fastcache.open and your own"
            )
