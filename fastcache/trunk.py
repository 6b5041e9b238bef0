"""Every tensor of a checkpoint that belongs to no routed expert, by its on-disk name, where it lies: memory maps.

Owns `Trunk`, and `ByName`, what it shares with other mappings of names to tensors. Reads no bytes itself: the system
does, when an array's pages are touched. Knows no family and no store.
Imports errors, formats, layout and numpy.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import CheckpointChanged, CheckpointTruncated, MissingTensor, UnsupportedCheckpoint
from fastcache.formats import ggml
from fastcache.formats.dtypes import DTYPES, carrier_shape
from fastcache.formats.header import identity_of
from fastcache.layout.quantization import Quantization
from fastcache.layout.record import Layout, TensorInfo

Array: TypeAlias = NDArray[Any]


class ByName(Mapping[str, Array]):
    """Tensors by the names in `_names`: whatever is cheap to say of them without touching one."""

    _names: Mapping[str, Any]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class Trunk(ByName):
    """Names to read-only arrays over memory maps of the files, as stored.

    bfloat16, float8 and the like are ml_dtypes' arrays; GGML's types are uint8 [..., bytes of a row] whose dtype says
    which type it is, as those of codes say how their scales lie; what shares bytes (F4, F6) is uint8.
    `fastcache.linear` takes a trunk and a full name.

    Parameters
    ----------
    layout : Layout, optional
        Without one the trunk is empty.

    Raises
    ------
    OSError
        A file is not there.

    Notes
    -----
    A file is mapped when the first of its tensors is asked for, and stays mapped while the trunk or one of its arrays
    lives; a store that is closed changes nothing. What is touched is in the page cache, which the system may drop and
    read again. A file that is cut off under a mapping faults the process when such a page is touched: replace files
    by renaming, never in place. Thread-safe.
    """

    def __init__(self, layout: Layout | None = None) -> None:
        self._infos: Mapping[str, TensorInfo] = {} if layout is None else layout.trunk
        self._names = self._infos
        self._files = () if layout is None else layout.files
        self._quantization = Quantization({} if layout is None else layout.config)
        self._gguf = layout is not None and layout.format == "gguf"
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._arrays: dict[str, Array] = {}
        self._seen = {n: identity_of(os.stat(self._files[n])) for n in {info.file for info in self._infos.values()}}
        known = () if layout is None else layout.identities  # of when the places of tensors were read
        self._seen |= {n: each for n, each in enumerate(known) if n in self._seen and each is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(info.nbytes for info in self._infos.values())

    def __getitem__(self, name: str) -> Array:
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = self._mapped(self._infos[name])
        return array

    def __repr__(self) -> str:
        return f"<Trunk: {len(self)} tensors, {self.nbytes} bytes in {len(self._seen)} files>"

    def find(self, name: str) -> str:
        """Return the on-disk name of a tensor, which may have a longer prefix, as multimodal checkpoints have.

        Raises
        ------
        MissingTensor
            No tensor of that name, or several.
        """
        if name in self._infos:
            return name
        found = [other for other in self._infos if other.endswith(f".{name}")]
        if len(found) != 1:
            raise MissingTensor(
                f"the checkpoint has {'no' if not found else 'more than one'} tensor {name!r}"
                + (f": {', '.join(sorted(found))}" if found else "; its layer cannot be computed without it")
            )
        return found[0]

    def check(self) -> None:
        """Raise CheckpointChanged if a mapped file was written to since the checkpoint was opened.

        One that was replaced by renaming, or removed, is still what is mapped. By size and time: a limit, not a proof.
        """
        for n in tuple(self._maps):
            try:
                now = identity_of(os.stat(self._files[n]))
            except OSError:
                continue
            if now != self._seen[n] and now[:2] == self._seen[n][:2]:
                raise CheckpointChanged(f"{self._files[n]}: the file has changed since the checkpoint was opened")

    def _mapped(self, info: TensorInfo) -> Array:
        if self._gguf and info.dtype not in DTYPES:
            dtype = ggml.carrier(info.dtype)
            rows = info.shape[:-1]
            shape = (*rows, info.nbytes // max(1, int(np.prod(rows, dtype=np.int64))))
        elif info.dtype in DTYPES:
            dtype = self._quantization.carrier(info.dtype, DTYPES[info.dtype].carrier)
            shape = carrier_shape(info.dtype, info.shape, info.nbytes)
        else:
            raise UnsupportedCheckpoint(f"{info.name!r} is stored as {info.dtype}, which this version does not know")
        if not info.nbytes:
            array: Array = np.empty(shape, dtype)
            array.flags.writeable = False
            return array
        memory = self._map(info)
        return np.ndarray(shape, dtype, buffer=memory, offset=info.offset)

    def _map(self, info: TensorInfo) -> mmap.mmap:
        with self._lock:
            memory = self._maps.get(info.file)
            if memory is None:
                path = self._files[info.file]
                with open(path, "rb", buffering=0) as file:
                    if identity_of(os.fstat(file.fileno())) != self._seen[info.file]:
                        raise CheckpointChanged(f"{path}: the file has changed since the checkpoint was opened")
                    memory = self._maps[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(memory) < info.offset + info.nbytes:
            raise CheckpointTruncated(
                f"{self._files[info.file]}: {info.name!r} needs {info.nbytes} bytes at {info.offset}; "
                f"the file has {len(memory)}"
            )
        return memory
