"""Writing sharded safetensors checkpoints, as the hub has them: headers, an index, and whatever data the caller has."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
BYTES = {"F32": 4, "BF16": 2, "U8": 1}
INDEX = "model.safetensors.index.json"


def nbytes(entry: Entry) -> int:
    return BYTES[entry[1]] * math.prod(entry[2])


def header(entries: Iterable[Entry]) -> tuple[bytes, list[Entry], int]:
    """Length and header of a file; its tensors as the safetensors library orders them (wide types first); bytes."""
    ordered = sorted(entries, key=lambda entry: (-BYTES[entry[1]], entry[0]))
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in ordered:
        name, dtype, shape = entry
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + nbytes(entry))}
        at += nbytes(entry)
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw, ordered, at


def write_index(directory: Path, files: dict[str, Iterable[Entry]], config: dict[str, Any]) -> int:
    """Write the index of `files` and config.json; return the index's bytes."""
    weight_map = {entry[0]: name for name, entries in files.items() for entry in entries}
    total = sum(nbytes(entry) for entries in files.values() for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (directory / INDEX).write_text(text)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(text)
