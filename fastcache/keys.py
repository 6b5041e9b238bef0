"""ExpertKey: the identity of one routed expert, and how callers may write it."""

from __future__ import annotations

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """A routed expert: its layer as the checkpoint numbers it (dense layers count), and its index in that layer."""

    layer: int
    expert: int
