"""What one expert's bytes mean: stored tensors, and the labelled views over them.

Owns the nouns that checkpoint layouts produce and the store consumes. Knows no file format and no store.
Imports numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastcache.formats.header import Identity


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of an expert as the file holds it."""

    label: str  # unique within the expert: "gate", "gate.weight_packed", "gate_up_proj", ...
    dtype: str  # the format's own name: "BF16", "F8_E4M3", "U8", "Q4_K", ...
    shape: tuple[int, ...]  # of this expert's part alone
    nbytes: int  # contiguous bytes in the file; may be 0
    align: int  # bytes: what a numpy view of it needs (itemsize of the carrier dtype)


@dataclass(frozen=True, slots=True)
class View:
    """One label of a lease: an array over (part of) a stored tensor."""

    label: str  # "gate", "up", "down", "gate.bias", "gate.weight_packed", "gate_up_proj", ...
    tensor: int  # index into Record.tensors
    offset: int  # bytes from the tensor's first byte
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes


@dataclass(frozen=True, slots=True)
class Record:
    """The shape of an expert: shared by all experts stored alike."""

    tensors: tuple[StoredTensor, ...]  # in the order of the lease's own buffer
    views: tuple[View, ...]  # in the order that iterating a lease gives
    refused: Mapping[str, str] = field(default_factory=dict)  # label -> why it is a KeyError, and what to use instead

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def bytes_record(*sizes: int) -> Record:
    """Return the record of an expert that is plain bytes: "data", or "data.0", "data.1", ... where it lies in parts."""
    labels = ["data"] if len(sizes) == 1 else [f"data.{i}" for i in range(len(sizes))]
    u8 = np.dtype(np.uint8)
    return Record(
        tensors=tuple(StoredTensor(label, "U8", (n,), n, 1) for label, n in zip(labels, sizes, strict=True)),
        views=tuple(View(label, i, 0, u8, (n,), (1,)) for i, (label, n) in enumerate(zip(labels, sizes, strict=True))),
    )


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """Where the routed experts of one layer lie. E experts, T tensors (the most of any record).

    Column t of an expert is tensor t of its record; columns that its record does not have hold -1.
    """

    layer: int
    records: tuple[Record, ...]  # nearly always one
    record_of: np.ndarray  # uint16 [E]: index into records
    file: np.ndarray  # int32 [E, T]: index into Layout.files
    offset: np.ndarray  # int64 [E, T]: absolute byte offset in that file

    def __len__(self) -> int:
        return len(self.record_of)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that belongs to no routed expert: attention, norms, routers, shared experts."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int  # index into Layout.files
    offset: int  # absolute byte offset
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint, understood: which bytes are which expert."""

    family: str  # the family row's name, or "unknown"
    top_k: int | None  # experts per token, from the config
    files: tuple[str, ...]  # absolute paths
    layers: Mapping[int, LayerExperts]  # MoE layers only, ascending
    trunk: Mapping[str, TensorInfo]  # by on-disk name
    config: Mapping[str, Any]  # config.json, or {}; of GGUF, its metadata by the same keys
    not_indexed: tuple[str, ...] = ()  # absolute paths of files in the directory that are not of the checkpoint
    format: str = "safetensors"  # or "gguf"
    identities: tuple[Identity | None, ...] = ()  # of the files when their headers were read
