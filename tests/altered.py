"""Copies of small checkpoints with something changed: a key, a tensor, a byte."""

import json
import re
import struct

import gguf as package
import numpy as np
from checkpoints import st
from ggufs import ARRAY, BOOL, F32, I32, STRING, U32, gguf, text
from trunks import DTYPES, tensors_of

_STORED = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def altered(source, path, config=None, tensors=None, drop=()):
    """Write a safetensors checkpoint like `source` to the directory `path`.

    Keys of `config` that are None go. `tensors`: name to array, or to a function of the stored one. `drop`: patterns of
    names that go.
    """
    said = json.loads((source / "config.json").read_text()) | (config or {})
    arrays = tensors_of(source)
    for name, change in (tensors or {}).items():
        arrays[name] = change(arrays[name]) if callable(change) else change
    kept = {name: array for name, array in arrays.items() if not any(re.fullmatch(each, name) for each in drop)}
    path.mkdir()
    (path / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    entries = [(n, _STORED[a.dtype], list(a.shape), np.ascontiguousarray(a).tobytes()) for n, a in kept.items()]
    st(path / "model.safetensors", entries)
    return path


def altered_gguf(source, path, metadata=None, tensors=None, drop=(), keys=()):
    """Write a GGUF file like `source` to `path`.

    `metadata`: key to a Python value; one that begins with "." is the architecture's. `tensors`: name to a float32
    array, stored so, or to a function of the stored bytes. `drop`, `keys`: patterns of tensors and of keys that go.
    """
    reader = package.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    said = {(architecture + key if key.startswith(".") else key): value for key, value in (metadata or {}).items()}
    pairs = [
        (field.name, int(field.types[0]), b"".join(part.tobytes() for part in field.parts[3:]))
        for field in reader.fields.values()
        if not field.name.startswith("GGUF.")
        and field.name not in said
        and not any(re.fullmatch(each, field.name.removeprefix(architecture)) for each in keys)
    ]
    entries = {
        each.name: (each.name, tuple(map(int, each.shape[::-1])), each.tensor_type.name, each.data.tobytes())
        for each in reader.tensors
        if not any(re.fullmatch(pattern, each.name) for pattern in drop)
    }
    for name, change in (tensors or {}).items():
        if callable(change):
            *rest, raw = entries[name]
            entries[name] = (*rest, change(raw))
        else:
            entries[name] = (name, change.shape, "F32", np.ascontiguousarray(change, np.float32).tobytes())
    return gguf(path, list(entries.values()), pairs + [packed(key, value) for key, value in said.items()])


def packed(key, value):
    """A metadata pair of a Python value; integers are unsigned, where they can be."""
    if isinstance(value, bool):
        return key, BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return (key, U32, struct.pack("<I", value)) if value >= 0 else (key, I32, struct.pack("<i", value))
    if isinstance(value, float):
        return key, F32, struct.pack("<f", value)
    if isinstance(value, str):
        return key, STRING, text(value)
    _, kind, _ = packed(key, value[0] if value else 0)
    return key, ARRAY, struct.pack("<IQ", kind, len(value)) + b"".join(packed(key, each)[2] for each in value)
