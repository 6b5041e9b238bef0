"""What the experts of a layer must have that no sibling in the layer tells: the family's row and the other layers do.

Owns the checks across layers. Knows no file. Imports errors, layout.families and layout.record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from fastcache.errors import MissingTensor
from fastcache.layout.families import UNKNOWN, Family
from fastcache.layout.record import LayerExperts

ROLES: Final = frozenset(("gate", "up", "down"))
# Ends of names of tensors that are no numbers without one of the other end.
_PARTNERS: Final = (
    ("weight_packed", "weight_scale"),
    ("_blocks", "_scales"),
    ("qweight", "scales"),
    ("qweight", "qzeros"),
    ("qzeros", "qweight"),
)


def check_layers(
    path: str,
    family: Family,
    layers: Mapping[int, LayerExperts],
    *,
    gguf: bool,
    needs: Iterable[tuple[str, str]] = (),
) -> None:
    """Raise if a layer lacks a role of the family's row, a tensor that a layer stored alike has, or scales of codes.

    Parameters
    ----------
    path : str
        Names the checkpoint in an error.
    family : Family
    layers : mapping of int to LayerExperts
    gguf : bool
        It is a GGUF file.
    needs : iterable of (str, str)
        Ends of names, and the end of what the config wants beside such a tensor.

    Raises
    ------
    MissingTensor
        Names the layer and what it lacks.
    """
    roles = {layer: _roles(experts) for layer, experts in layers.items()}
    if gguf:  # one naming for all, so that any layer tells what the others need
        wanted = set.union({"up", "down"}, *roles.values())
    else:
        fused = {role for how in family.fused.values() for role in how.roles}
        wanted = set() if family is UNKNOWN else ({*family.roles.values()} | fused) & ROLES
    for layer, mine in roles.items():
        lost = sorted(wanted - mine)
        if lost and (mine or gguf):
            others = sum(mine.issuperset(lost) for mine in roles.values())
            name = f"blk.{layer}.ffn_{lost[0]}_exps.weight" if gguf else " and ".join(f'"{role}"' for role in lost)
            raise MissingTensor(f"{path}: layer {layer}: missing {name}, present for {others} of {len(layers)} layers")
    stored = {layer: _stored(experts) for layer, experts in layers.items()}
    for layer, tensors in stored.items():
        labels = {label for label, _, _ in tensors}
        for label in sorted(labels):
            for end, other in (*_PARTNERS, *needs):
                if label.endswith(end) and (partner := label.removesuffix(end) + other) not in labels:
                    raise MissingTensor(f"{path}: layer {layer}: missing {partner}, which {label} needs")
    for looks in set(stored.values()):
        for more in set(stored.values()):
            if looks < more:
                layer = next(each for each in stored if stored[each] == looks)
                others = sum(each >= more for each in stored.values())
                raise MissingTensor(
                    f"{path}: layer {layer}: missing {', '.join(sorted(label for label, _, _ in more - looks))}, "
                    f"present for {others} of {len(layers)} layers"
                )


def _roles(experts: LayerExperts) -> set[str]:
    """Roles that every expert of a layer has something of."""
    found = (
        {label.partition(".")[0] for label in (*(v.label for v in record.views), *(t.label for t in record.tensors))}
        for record in experts.records
    )
    return set.intersection(*found) & ROLES


def _stored(experts: LayerExperts) -> frozenset[tuple[str, str, tuple[int, ...]]]:
    return frozenset((t.label, t.dtype, t.shape) for record in experts.records for t in record.tensors)
