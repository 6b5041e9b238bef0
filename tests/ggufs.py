"""Writes GGUF files byte by byte, whole and broken. The gguf package's writer refuses most of it."""

import struct
from pathlib import Path

import gguf as package
import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
TYPE = {each.name: int(each) for each in package.GGMLQuantizationType}


def text(value, endian="<"):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack(endian + "Q", len(raw)) + raw


def u16(key, value):
    return (key, U16, struct.pack("<H", value))


def u32(key, value):
    return (key, U32, struct.pack("<I", value))


def i32(key, value):
    return (key, I32, struct.pack("<i", value))


def f32(key, value):
    return (key, F32, struct.pack("<f", value))


def string(key, value):
    return (key, STRING, text(value))


def strings(key, values):
    return (key, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values)))


def gguf(path, tensors=(), pairs=(), *, align=None, version=3, endian="<", counts=None, offsets=None, tail=b""):
    """Write a file of `tensors` (name, shape, type name or number, bytes) and `pairs` (key, type, packed value).

    `counts` replaces (tensors, pairs) in the header, `offsets` the offset of each tensor by name.
    """
    pairs = list(pairs)
    if align is not None:
        pairs.append(u32("general.alignment", align))
    align = align or 32
    tensors_count, pairs_count = counts or (len(tensors), len(pairs))
    out = b"GGUF" + struct.pack(endian + "IQQ", version, tensors_count, pairs_count)
    for key, kind, value in pairs:
        out += text(key, endian) + struct.pack(endian + "I", kind) + value
    at, data = 0, b""
    for name, shape, kind, content in tensors:
        out += text(name, endian) + struct.pack(endian + "I", len(shape))
        out += b"".join(struct.pack(endian + "Q", dim) for dim in reversed(shape))
        out += struct.pack(endian + "IQ", TYPE.get(kind, kind), (offsets or {}).get(name, at))
        padded = content + b"\0" * (-len(content) % align)
        data += padded
        at += len(padded)
    path = Path(path)
    path.write_bytes(out + b"\0" * (-len(out) % align) + data + tail)
    return path


def moe_pairs(arch="qwen3moe", experts=4, used=2, layers=1, **more):
    """The metadata of a model of `layers` layers."""
    counts = {"expert_count": experts, "expert_used_count": used, "block_count": layers, **more}
    keyed = [(f"{arch}.{key}", value) for key, value in counts.items()]
    return [
        string("general.architecture", arch),
        *(f32(key, value) if isinstance(value, float) else u32(key, value) for key, value in keyed),
    ]


def weights(shape, *seed):
    """float32 numbers that only this `seed` has."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def stored(name, array, kind="F32"):
    """A tensor for `gguf`: `array` in the type `kind`, which the package must be able to write."""
    packed = package.quants.quantize(np.ascontiguousarray(array, np.float32), package.GGMLQuantizationType[kind])
    return (name, array.shape, kind, packed.tobytes())


def experts(layer, n_experts=4, inter=32, hidden=64, kinds=("F32", "F32", "F32")):
    """The merged tensors of one layer."""
    shapes = (("gate", (inter, hidden)), ("up", (inter, hidden)), ("down", (hidden, inter)))
    return [
        stored(f"blk.{layer}.ffn_{role}_exps.weight", weights((n_experts, *shape), layer, number), kind)
        for number, ((role, shape), kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
