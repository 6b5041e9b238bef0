"""Checkpoints made from nothing: the shard that an earlier cache, the seed, was tested with, and demos of any size.

Owns a minimal safetensors writer (it streams; memory stays at one expert). Knows no store. Imports outputs, NumPy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fastcache.outputs import naming, whole_file

Tensor = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape
Progress = Callable[[int, int], object]  # bytes written so far, bytes in all

SEED_EXPERTS = 24
SEED_EXPERT_NBYTES = 1632
SEED_DATA_START = 20_608  # bytes: where expert 0 starts in the file
_SEED_PARTS = tuple((w, packed) for w in range(3) for packed in (True, False))  # stored order: w1, its scale, w2, ...
_ITEMSIZE = {"U8": 1, "BF16": 2, "F32": 4}


def _header(tensors: Iterable[Tensor]) -> bytes:
    """Return the length-prefixed safetensors header of tensors stored back to back in this order."""
    entries: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + int(np.prod(shape)) * _ITEMSIZE[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def seed_tensor(expert: int, w: int, packed: bool) -> np.ndarray:
    """Return one tensor of the seed's shard: uint8, [8, 64] packed or [8, 4] scale; `w` is 0, 1, 2 for w1, w2, w3."""
    shape = (8, 64) if packed else (8, 4)
    base = (expert * 977 + w * 31 + (0 if packed else 7)) & 0xFF
    return ((np.arange(shape[0] * shape[1]) + base) % 251).astype(np.uint8).reshape(shape)


def seed_expert(expert: int) -> bytes:
    """Return the 1,632 bytes of one expert of the seed's shard, as the file holds them."""
    return b"".join(seed_tensor(expert, w, packed).tobytes() for w, packed in _SEED_PARTS)


def write_seed_shard(directory: str | os.PathLike[str]) -> Path:
    """Write the seed's synthetic shard into `directory` (made if missing) and return its path.

    Layer 0, experts 0..23, six U8 tensors each in Kimi K3's naming; 59,776 bytes with
    sha256 5f2a99cabe69e53459822c4703b525575fa826cfcf9ba3b543494d19ae00f50a.

    Raises
    ------
    FileExistsError
        There is another file of that name.
    """
    name = "language_model.model.layers.0.block_sparse_moe.experts.{}.w{}.{}"
    tensors: list[Tensor] = [
        (name.format(e, w + 1, "weight_packed" if packed else "weight_scale"), "U8", (8, 64) if packed else (8, 4))
        for e in range(SEED_EXPERTS)
        for w, packed in _SEED_PARTS
    ]
    path = Path(directory) / "model-00001-of-00001.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = _header(tensors) + b"".join(map(seed_expert, range(SEED_EXPERTS)))
    if path.exists() and not (path.stat().st_size == len(data) and path.read_bytes() == data):
        raise FileExistsError(f"{path}: there is another file of that name, and it is not replaced: name another place")
    with whole_file(path) as file:
        file.write(data)
    return path


@dataclass(frozen=True, slots=True)
class DemoShape:
    """What a demo checkpoint holds; the defaults are Qwen3-30B-A3B's, whose bf16 experts are 9 MiB each."""

    layers: int
    experts: int  # per layer
    hidden: int = 2048
    intermediate: int = 768  # an expert's inner width
    top_k: int = 8

    @property
    def expert_nbytes(self) -> int:
        return 3 * self.hidden * self.intermediate * 2

    @property
    def nbytes(self) -> int:
        """Payload bytes of the whole checkpoint: experts and routers."""
        return self.layers * self.experts * (self.expert_nbytes + self.hidden * 2)

    def config(self) -> dict[str, Any]:
        """Return config.json as the hub writes it for this family."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16",
        }


def demo_shape(size_bytes: int) -> DemoShape:
    """Return the shape of about `size_bytes`: up to 48 layers of about 32 experts, then up to 128 experts in each.

    Raises
    ------
    ValueError
        When `size_bytes` is below one layer of top_k experts (73 MiB).
    """
    one = DemoShape(layers=1, experts=1)
    count = round(size_bytes / one.nbytes)
    if count < one.top_k:
        least = -(-one.top_k * one.nbytes // 2**20)
        raise ValueError(f"size {size_bytes} is below one layer of {one.top_k} experts: give at least {least} MiB")
    layers = min(48, max(2 if count >= 32 else 1, round(count / 32)))
    if count / layers > 128:
        layers = -(-count // 128)
    return DemoShape(layers, max(one.top_k, round(count / layers)))


def write_demo_checkpoint(
    directory: str | os.PathLike[str],
    size_bytes: int | None = None,
    *,
    shape: DemoShape | None = None,
    shards: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> DemoShape:
    """Write a Qwen3-MoE-shaped checkpoint of random weights into `directory` and return its shape.

    Give `size_bytes` (of real expert shapes) or a `shape`. An expert's gate, up and down lie side by side; layers are
    spread over `shards` files (default: four, or more of at most 4 GiB) under model.safetensors.index.json. Weights are
    scaled so that activations stay near 1, every expert differs, and the same arguments give the same bytes.
    The files are flushed and dropped from the page cache. Memory: two experts.

    Raises
    ------
    OSError
        ENOSPC when the file system has no room, before anything is written.
    """
    if shape is None:
        if size_bytes is None:
            raise TypeError("give size_bytes or shape")
        shape = demo_shape(size_bytes)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < shape.nbytes + 2**20:
        raise OSError(28, f"{shape.nbytes} bytes do not fit into the {free} that are free", str(directory))
    if shards is None:
        shards = max(4, -(-shape.nbytes // 2**32))
    pairs = [(layer, expert) for layer in range(shape.layers) for expert in range(shape.experts)]
    shards = min(shards, len(pairs))
    weight_map: dict[str, str] = {}
    done = 0
    for index in range(shards):
        part = pairs[len(pairs) * index // shards : len(pairs) * (index + 1) // shards]
        name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        tensors = [tensor for pair in part for tensor in _demo_tensors(shape, *pair)]
        weight_map |= dict.fromkeys((tensor[0] for tensor in tensors), name)
        with naming(directory / name), open(directory / name, "wb", buffering=0) as file:
            _write_all(file, _header(tensors))
            for layer, expert in part:
                for block in _demo_blocks(shape, layer, expert, seed):
                    _write_all(file, block)
                    done += block.nbytes
                if progress is not None:
                    progress(done, shape.nbytes)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    text = {"metadata": {"total_size": shape.nbytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(text, indent=1))
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1))
    return shape


def demo_router_bits(shape: DemoShape, layer: int, seed: int = 0) -> np.ndarray:
    """Return a layer's router as stored: bf16 in uint16 [experts, hidden]. Some experts are popular, some are rare."""
    rng = np.random.default_rng([seed, layer])
    router = rng.standard_normal((shape.experts, shape.hidden), dtype=np.float32) / np.float32(shape.hidden**0.5)
    router *= np.exp(rng.normal(0, 0.4, (shape.experts, 1))).astype(np.float32)
    return (router.view(np.uint32) >> 16).astype(np.uint16)  # truncated, which is near enough


def _demo_tensors(shape: DemoShape, layer: int, expert: int) -> list[Tensor]:
    """Return the tensors stored for one expert; a layer's router stands before its expert 0."""
    mlp = f"model.layers.{layer}.mlp"
    inner = (shape.intermediate, shape.hidden)
    router: list[Tensor] = [(f"{mlp}.gate.weight", "BF16", (shape.experts, shape.hidden))] if expert == 0 else []
    return [
        *router,
        (f"{mlp}.experts.{expert}.gate_proj.weight", "BF16", inner),
        (f"{mlp}.experts.{expert}.up_proj.weight", "BF16", inner),
        (f"{mlp}.experts.{expert}.down_proj.weight", "BF16", inner[::-1]),
    ]


def _demo_blocks(shape: DemoShape, layer: int, expert: int, seed: int) -> Iterable[np.ndarray]:
    """Yield the bytes of `_demo_tensors` as arrays: the router, if it stands here, and the expert as one block."""
    if expert == 0:
        yield demo_router_bits(shape, layer, seed)
    words = np.random.SFC64([seed, layer, expert]).random_raw(-(-shape.expert_nbytes // 8))
    # As bf16: random sign, mantissa and lowest exponent bit over a fixed exponent: +-2**e * [1, 4), whose rms is
    # 2.4 * 2**e. The odd e nearest to an rms of hidden**-0.5, so that e + 127 leaves its lowest bit free.
    exponent = 2 * round((np.log2(shape.hidden**-0.5 / 2.4) - 1) / 2) + 1 + 127
    words &= np.uint64(0x80FF_80FF_80FF_80FF)
    words |= np.uint64((exponent << 7) * 0x0001_0001_0001_0001)
    yield words.view(np.uint8)[: shape.expert_nbytes]


def _write_all(file: BinaryIO, data: bytes | np.ndarray) -> None:
    """Write everything: an unbuffered file may take a part only, and stops at 2 GiB."""
    view = memoryview(data.data if isinstance(data, np.ndarray) else data).cast("B")
    while view:
        view = view[file.write(view) :]
