"""What a checkpoint is, from its headers alone: sizes, places, types, and what is wrong with it.

Owns the figures of `fastcache inspect`. Reads no tensor and starts no engine. Imports errors, inventory, layout,
quant.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np

from fastcache.errors import CheckpointError
from fastcache.inventory import Inventory, inventory_of
from fastcache.layout.build import build_layout
from fastcache.layout.record import LayerExperts, Layout, Record
from fastcache.quant.decodable import check_decodable, hollow

_ROLES = ("gate", "up", "down")


def inspect_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Say what the checkpoint at `path` holds, from its headers alone.

    Parameters
    ----------
    path : path-like
        As for `fastcache.open`.

    Returns
    -------
    dict
        Ready for JSON; sizes in bytes, without padding.

        * path, format ("safetensors" or "gguf"), family, top_k (None if the config does not say)
        * moe_layers: numbers of the layers that have routed experts; n_experts: of a layer, the most of any
        * layers: per such layer its experts, expert_bytes (min, max) and dtypes
        * expert_bytes: min, max, and total of all experts
        * token_cycle_bytes: what one token touches, in each layer its top_k largest experts; None without top_k
        * extents_per_expert: min, mean, max of the places in files that an expert is read from
        * dtypes: bytes of the experts by stored type; trunk_dtypes: the same of all other tensors; trunk_bytes
        * siblings: labels of the tensors that travel with an expert
        * misaligned_fraction: of the experts' tensors, how many begin where their type cannot be read from; such a
          tensor is moved once, after it was read
        * files: path and bytes of each; not_indexed: files beside them that are not of the checkpoint
        * problems: what a user should know, one sentence each

    Raises
    ------
    CheckpointError
        The checkpoint cannot be trusted or served; the message says why.
    """
    layout = build_layout(path)
    inventory = inventory_of(layout)
    payload = inventory.payload()
    there = inventory.nbytes > 0
    misaligned = there & (inventory.offset % inventory.align != 0)
    extents = _extents(inventory)
    layers = [_layer(number, experts) for number, experts in layout.layers.items()]
    sizes = {record.nbytes for experts in layout.layers.values() for record in experts.records}
    trunk: Counter[str] = Counter()
    for tensor in layout.trunk.values():
        trunk[tensor.dtype] += tensor.nbytes
    result = {
        "path": os.path.abspath(os.fsdecode(path)),
        "format": layout.format,
        "family": layout.family,
        "moe_layers": list(layout.layers),
        "n_experts": max(len(experts) for experts in layout.layers.values()),
        "top_k": layout.top_k,
        "expert_bytes": {"min": min(sizes), "max": max(sizes), "total": int(payload.sum())},
        "token_cycle_bytes": _cycle(inventory, payload),
        "extents_per_expert": {
            "min": int(extents.min()),
            "mean": round(float(extents.mean()), 2),
            "max": int(extents.max()),
        },
        "dtypes": dict(sum((_dtypes(experts) for experts in layout.layers.values()), Counter()).most_common()),
        "siblings": list(dict.fromkeys(tensor.label for record in inventory.records for tensor in record.tensors)),
        "trunk_bytes": inventory.trunk_bytes,
        "trunk_dtypes": dict(trunk.most_common()),
        "misaligned_fraction": float(misaligned.sum() / max(1, there.sum())),
        "layers": layers,
        "files": [{"path": file, "bytes": os.path.getsize(file)} for file in layout.files],
        "not_indexed": list(layout.not_indexed),
    }
    result["problems"] = _problems(layout, inventory.records, result)
    return result


def _extents(inventory: Inventory) -> np.ndarray[Any, np.dtype[Any]]:
    """Places that each expert is read from: int64 [K]. Tensors that touch are one place."""
    file = np.where(inventory.nbytes > 0, inventory.file, np.iinfo(np.int32).max).astype(np.int64)
    order = np.lexsort((inventory.offset, file), axis=1)
    file, begin, nbytes = (
        np.take_along_axis(each, order, axis=1) for each in (file, inventory.offset, inventory.nbytes)
    )
    new = nbytes > 0
    new[:, 1:] &= (file[:, 1:] != file[:, :-1]) | (begin[:, 1:] != begin[:, :-1] + nbytes[:, :-1])
    return np.asarray(new.sum(axis=1))


def _cycle(inventory: Inventory, payload: np.ndarray[Any, np.dtype[Any]]) -> int | None:
    if not inventory.top_k:
        return None
    ends = np.cumsum([count for _, count in inventory.layers])
    return sum(int(np.sort(each)[-inventory.top_k :].sum()) for each in np.split(payload, ends[:-1]))


def _dtypes(experts: LayerExperts) -> Counter[str]:
    """Bytes of a layer's experts by stored type."""
    found: Counter[str] = Counter()
    for record, count in zip(
        experts.records, np.bincount(experts.record_of, minlength=len(experts.records)), strict=True
    ):
        for tensor in record.tensors:
            found[tensor.dtype] += tensor.nbytes * int(count)
    return found


def _layer(number: int, experts: LayerExperts) -> dict[str, Any]:
    sizes = [record.nbytes for record in experts.records]
    return {
        "layer": number,
        "experts": len(experts),
        "expert_bytes": {"min": min(sizes), "max": max(sizes)},
        "dtypes": list(_dtypes(experts)),
    }


def _problems(layout: Layout, records: list[Record], figures: dict[str, Any]) -> list[str]:
    found = []
    if layout.family == "unknown":
        name = layout.config.get("model_type") or layout.config.get("architectures")
        found.append(
            f"the family table has no row for {name!r}" if name else "neither config nor names tell the family"
        )
    if layout.top_k is None:
        found.append("the config does not say how many experts a token uses: token cycles cannot be computed")
    for text in dict.fromkeys(text for record in records for text in _served_as_bytes(record)):
        found.append(text)
    if figures["misaligned_fraction"]:
        found.append(
            f"{figures['misaligned_fraction']:.0%} of the experts' tensors are misaligned for their type in the file: "
            f"each is moved once after it was read"
        )
    if layout.not_indexed:
        names = ", ".join(os.path.basename(file) for file in layout.not_indexed[:3])
        more = len(layout.not_indexed) - 3
        found.append(f"not of this checkpoint, and left aside: {names}" + (f" and {more} more" if more > 0 else ""))
    return found


def _served_as_bytes(record: Record) -> list[str]:
    """Say which of a record's tensors have no arithmetic here."""
    arrays = hollow((view.label, view.dtype, view.shape) for view in record.views)
    found = []
    for role in _ROLES:
        if any(label.partition(".")[0] == role for label in arrays):
            try:
                check_decodable(arrays, role)
            except CheckpointError as error:
                found.append(str(error))
        elif role in record.refused:
            stored = sorted({f"{tensor.label} {tensor.dtype}" for tensor in record.tensors})
            found.append(f"no arithmetic here for these experts, their bytes are served: {', '.join(stored)}")
    return found
