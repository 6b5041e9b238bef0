"""A trunk as a decoder asks for it: by the hub's names, and converted once where memory is no question.

Owns `Named` and `ResidentTrunk`. Imports errors, layout (GGUF's names), quant, trunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.gguf_decoder import hub_name
from fastcache.quant.blocks import blocks_to_float32, is_blocks
from fastcache.quant.coded import coded_weight, plain_name
from fastcache.quant.floats import is_plain, to_float32
from fastcache.trunk import ByName

Array: TypeAlias = NDArray[Any]
_EMBEDDING = "model.embed_tokens.weight"


class Named(ByName):
    """The tensors of `trunk` under other names: `names` says which is which. `asked` has those that anyone wanted."""

    def __init__(self, trunk: Mapping[str, Array], names: Mapping[str, str]) -> None:
        self._trunk, self._names, self.asked = trunk, names, set[str]()

    def __getitem__(self, name: str) -> Array:
        array = self._trunk[self._names[name]]
        self.asked.add(name)
        return array


def hub_names(names: Iterable[str], format: str) -> dict[str, str]:
    """Return {the hub's name: on-disk name}: GGUF's are others, and multimodal checkpoints have a prefix.

    Raises
    ------
    UnsupportedCheckpoint
        Two tensors of a GGUF file would have one name: a layer with a norm before and one after.
    """
    names = list(names)
    if format == "gguf":
        found = {hub_name(name): name for name in names}
        if twice := sorted(set(names) - set(found.values())):
            other = found[hub_name(twice[0])]
            raise UnsupportedCheckpoint(f"the file has {twice[0]!r} and {other!r}, of which a decoder here knows one")
        return found
    prefixes = [name.removesuffix(_EMBEDDING) for name in names if name.endswith(f".{_EMBEDDING}")]
    if len(prefixes) != 1 or _EMBEDDING in names:
        return {name: name for name in names}
    return {name.removeprefix(prefixes[0]): name for name in names}


class ResidentTrunk(ByName):
    """The tensors of `trunk` in memory, each converted to float32 when it is first asked for.

    Twice the bytes of a bfloat16 trunk, and no conversion at each product. Of a weight that is codes the float32 weight
    stands under "X.weight" and the scales beside it are not there.
    """

    def __init__(self, trunk: Mapping[str, Array]) -> None:
        self._trunk, self._held = trunk, dict[str, Array]()
        self._names = {plain_name(name): None for name in trunk if not _is_sibling(name, trunk)}

    def __getitem__(self, name: str) -> Array:
        array = self._held.get(name)
        if array is None:
            if name not in self._names:
                raise KeyError(name)
            array = self._held[name] = self._converted(name)
        return array

    def _converted(self, name: str) -> Array:
        coded = coded_weight(self._trunk, name) if name.endswith(".weight") else None
        if coded is not None:
            return coded.dense()
        stored = self._trunk[name]
        if is_blocks(stored.dtype):
            return blocks_to_float32(stored)
        return np.array(to_float32(stored) if is_plain(stored.dtype) else stored)


def labelled(trunk: Mapping[str, Array], weights: Mapping[str, str]) -> dict[str, Array]:
    """Return weights of a trunk as an expert's arrays are labelled: as stored, with what belongs to them.

    Parameters
    ----------
    trunk : mapping of str to ndarray
    weights : mapping of str to str
        Role to the on-disk name of its weight: {"gate": "model.layers.3.mlp.shared_experts.gate_proj.weight"}.
    """
    arrays: dict[str, Array] = {}
    stems = {name.removesuffix("weight"): role for role, name in weights.items()}
    for name in trunk:
        stem, _, suffix = name.rpartition(".")
        role = stems.get(f"{stem}.")
        if role is not None:
            array = trunk[name]
            arrays[role if suffix == "weight" and is_plain(array.dtype) else f"{role}.{suffix}"] = array
    return arrays


def _is_sibling(name: str, names: Mapping[str, Array]) -> bool:
    """Whether a tensor is the scale of codes beside it."""
    stem, _, last = name.rpartition(".")
    if last in ("qzeros", "scales", "g_idx"):
        return f"{stem}.qweight" in names
    return (
        last.startswith("weight_")
        and last != "weight_packed"
        and (f"{stem}.weight" in names or f"{stem}.weight_packed" in names)
    )
