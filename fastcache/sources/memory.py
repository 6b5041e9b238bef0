"""MemorySource: experts that are in memory already. Imports keys and sources.base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastcache.keys import ExpertKey
from fastcache.sources.base import as_key, mapping

if TYPE_CHECKING:
    from typing_extensions import Buffer


class MemorySource:
    """Experts as bytes in memory: for tests, and for weights that something else has loaded.

    Parameters
    ----------
    experts : mapping of (layer, expert) to bytes-like
        C-contiguous buffers of any element type. They are kept, not copied; changing one changes what later loads read.
    top_k : int, optional
        Experts that a token uses in a layer.

    Raises
    ------
    TypeError
        A key is not a pair of integers, or a value is not a C-contiguous buffer.

    Notes
    -----
    Any thread may use it.
    """

    def __init__(self, experts: Mapping[Any, Buffer], *, top_k: int | None = None) -> None:
        self.top_k = top_k
        self._bytes = {as_key(key): _as_bytes(key, buffer) for key, buffer in mapping(experts, "buffers").items()}

    def keys(self) -> Sequence[ExpertKey]:
        """Return every expert's key, in the order of the mapping."""
        return tuple(self._bytes)

    def expert_nbytes(self, key: ExpertKey, /) -> int:
        """Return the size of an expert in bytes."""
        return self._bytes[key].nbytes

    def read_expert(self, key: ExpertKey, /) -> memoryview:
        """Return an expert's bytes, read-only and without a copy."""
        return self._bytes[key]

    def __repr__(self) -> str:
        return f"<MemorySource: {len(self._bytes)} experts, {sum(map(len, self._bytes.values()))} bytes>"


def _as_bytes(key: Any, buffer: Buffer) -> memoryview:
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(f"expert {tuple(key)}: wants a bytes-like object; got {type(buffer).__name__}") from None
    if not view.c_contiguous:
        raise TypeError(f"expert {tuple(key)}: its buffer is not C-contiguous; give numpy.ascontiguousarray(...) of it")
    return view.toreadonly().cast("B") if view.nbytes else memoryview(b"")
