"""Stream Mixture-of-Experts experts from NVMe into a bounded arena, as leased zero-copy NumPy views.

import fastcache
store = fastcache.open("Qwen3-30B-A3B/", budget="8GiB")
expert = store[3, 17]                       # layer 3, expert 17: held while anything refers to it
y = fastcache.linear(x, expert, "gate")     # x @ gate.T in float32
"""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from pathlib import Path as _Path

if next(_Path(__file__).parent.glob("_lrucache*"), None) is not None:
    raise ImportError(
        "two distributions are installed into the package `fastcache`: `fastcache-moe` (this one) and the caching "
        "decorator `fastcache`. Uninstall both (pip uninstall fastcache fastcache-moe), then install fastcache-moe"
    )

from fastcache.errors import (
    BatchFailed,
    BudgetTooSmall,
    CheckpointChanged,
    CheckpointError,
    CheckpointHeaderError,
    CheckpointIndexError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointTruncated,
    ChecksumMismatch,
    FastcacheError,
    FeatureUnavailable,
    ForkedStore,
    HotListError,
    InvalidBudget,
    InvalidRange,
    InvalidSource,
    LeaseReleased,
    MissingShard,
    MissingTensor,
    OverflowLimit,
    PinsDoNotFit,
    ReadFailed,
    ReadTimeout,
    RecordingError,
    ShortRead,
    SidecarError,
    SidecarNotFound,
    StatsMismatch,
    StoreClosed,
    TraceError,
    UnknownExpert,
    UnsupportedCheckpoint,
    WrongShard,
)
from fastcache.keys import ExpertKey
from fastcache.layout.families import Family, Fused
from fastcache.linear import linear
from fastcache.opening import open
from fastcache.registering import register_family
from fastcache.sources import ExpertSource, Extent, FileRangeSource, MemorySource
from fastcache.stats import Stats
from fastcache.store import ExpertLease, ExpertStore, Leases, Prefetch


def __getattr__(name: str) -> object:
    """These modules are imported when they are first named."""
    if name in ("integrity", "metrics", "moe", "packing", "predictors", "traces"):
        return _import_module(f"fastcache.{name}")
    raise AttributeError(f"module 'fastcache' has no attribute {name!r}")


try:
    __version__ = _metadata.version("fastcache-moe")
except _metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "BatchFailed",
    "BudgetTooSmall",
    "CheckpointChanged",
    "CheckpointError",
    "CheckpointHeaderError",
    "CheckpointIndexError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointTruncated",
    "ChecksumMismatch",
    "ExpertKey",
    "ExpertLease",
    "ExpertSource",
    "ExpertStore",
    "Extent",
    "Family",
    "FastcacheError",
    "FeatureUnavailable",
    "FileRangeSource",
    "ForkedStore",
    "Fused",
    "HotListError",
    "InvalidBudget",
    "InvalidRange",
    "InvalidSource",
    "LeaseReleased",
    "Leases",
    "MemorySource",
    "MissingShard",
    "MissingTensor",
    "OverflowLimit",
    "PinsDoNotFit",
    "Prefetch",
    "ReadFailed",
    "ReadTimeout",
    "RecordingError",
    "ShortRead",
    "SidecarError",
    "SidecarNotFound",
    "Stats",
    "StatsMismatch",
    "StoreClosed",
    "TraceError",
    "UnknownExpert",
    "UnsupportedCheckpoint",
    "WrongShard",
    "linear",
    "open",
    "register_family",
]
