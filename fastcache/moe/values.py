"""Values of a config, held to their kind: what is none is refused by its key.

Owns `number`, `count` and `truth`. Imports errors and layout.families (config spellings).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value

Config: TypeAlias = Mapping[str, Any]


def number(config: Config, key: str, default: float | None = None, *, above: float = -math.inf) -> float:
    """Return a finite number of the config, above a bound; the default where it is absent or null."""
    value = config_value(config, key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < math.inf:
        more = "" if above == -math.inf else f" above {above:g}"
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}, not a number{more}")
    return float(value)


def count(config: Config, key: str, default: int | None = None) -> int:
    """Return a positive integer of the config; the default where it is absent or null."""
    value = config_value(config, key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}; the forward needs a positive integer")
    return value


def truth(config: Config, key: str, default: bool) -> bool:
    """Return a truth value of the config; the default where it is absent or null."""
    value = config_value(config, key)
    if value is None:
        return default
    if not isinstance(value, int) or value not in (0, 1):
        raise UnsupportedCheckpoint(f"config.json: {key} is {value!r}, not true or false")
    return bool(value)
