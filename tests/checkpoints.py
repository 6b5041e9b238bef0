"""Makes checkpoints for tests: single safetensors files, broken ones too, and tiny MoE directories.

Every expert's bytes are a pattern of (layer, expert, tensor), so that a wrong place is loud.
"""

import json
import struct
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I32": 4, "F64": 8}


def st(path, tensors, pad=0, raw_header=None, tail=b"", meta=None, length=None, spaced=True):
    """Write a safetensors file.

    `tensors` are (name, dtype, shape, bytes[, (begin, end)]). `raw_header` replaces the JSON, `length` its length.
    """
    head, data, at = {}, bytearray(), 0
    if meta is not None:
        head["__metadata__"] = meta
    for name, dtype, shape, content, *offsets in tensors:
        begin, end = offsets[0] if offsets else (at, at + len(content))
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        data += content
        at += len(content)
    text = (
        raw_header if raw_header is not None else json.dumps(head, separators=None if spaced else (",", ":")).encode()
    )
    text += b" " * pad
    path = Path(path)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data) + tail)
    return path


def pattern(nbytes, *seed):
    """Return bytes that only this `seed` has."""
    return np.random.default_rng([zlib.crc32(str(each).encode()) for each in seed]).bytes(nbytes)


def tensor(name, dtype, shape, *seed):
    """Return an entry for `st`, filled with the pattern of `seed`."""
    return (name, dtype, shape, pattern(int(np.prod(shape, dtype=int)) * SIZES[dtype], *seed))


def name_of(layer, expert, module, suffix="weight", block="mlp.experts", prefix="model"):
    return f"{prefix}.layers.{layer}.{block}.{expert}.{module}.{suffix}"


def split_experts(
    layers, n_experts, dtype="F32", inter=6, hidden=4, modules=("gate_proj", "up_proj", "down_proj"), **names
):
    """Return entries of complete experts, one tensor per module."""
    entries = []
    for layer in layers:
        for expert in range(n_experts):
            for number, module in enumerate(modules):
                shape = (hidden, inter) if module in ("down_proj", "w2") else (inter, hidden)
                entries.append(tensor(name_of(layer, expert, module, **names), dtype, shape, layer, expert, number))
    return entries


def moe_dir(path, shards, config=None, index=True, weight_map=None):
    """Write a directory of `shards` (lists of entries) with an index (if wanted) and a config (if given)."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, entries in zip(names, shards, strict=True):
        st(path / name, entries)
    if index:
        found = {entry[0]: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        found = {**found, **(weight_map or {})}
        write_index(path, {key: value for key, value in found.items() if value is not None})
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def write_index(path, weight_map):
    (Path(path) / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def qwen(n_experts=4, layers=2, **more):
    return {
        "model_type": "qwen3_moe",
        "num_experts": n_experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        **more,
    }


def expert_views(layout, layer, expert):
    """Read one expert as a store would: its tensors' bytes, and the labelled arrays over them."""
    experts = layout.layers[layer]
    record = experts.records[experts.record_of[expert]]
    blocks = []
    for number, stored in enumerate(record.tensors):
        with open(layout.files[experts.file[expert, number]], "rb") as file:
            file.seek(experts.offset[expert, number])
            blocks.append(file.read(stored.nbytes))
            assert len(blocks[-1]) == stored.nbytes
    return {
        view.label: np.ndarray(view.shape, view.dtype, bytearray(blocks[view.tensor]), view.offset, view.strides)
        for view in record.views
    }


def as_numbers(entry):
    """Return an entry of `st` as an array."""
    _, dtype, shape, content, *_ = entry
    kinds = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
    plain = {"F32": "<f4", "F16": "<f2", "U8": "u1", "I32": "<i4", "F64": "<f8"}
    return np.frombuffer(content, kinds.get(dtype) or plain[dtype]).reshape(shape)
