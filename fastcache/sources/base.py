"""The protocol of an expert source, and Extent. Knows no file and no store. Imports errors and keys."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from fastcache.errors import InvalidSource
from fastcache.keys import ExpertKey

MAX_NUMBER = (1 << 20) - 1  # of a layer, and of an expert in it: a store keeps a row for each number up to the highest

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Extent(NamedTuple):
    """A range of bytes in a file. An expert is its extents, one after the other."""

    path: str
    offset: int  # bytes
    nbytes: int  # at least 1


@runtime_checkable
class ExpertSource(Protocol):
    """What every source has: which experts there are, and how large they are.

    A source is an `ExtentSource` or a `ReadSource` as well. It may have an attribute `top_k`, the number of experts
    that a token uses in a layer, from which a store knows its token cycle.

    The answers must not change while a store uses the source, and any thread may ask.
    """

    def keys(self) -> Iterable[ExpertKey]:
        """Return every expert's key, each once."""
        ...

    def expert_nbytes(self, key: ExpertKey, /) -> int:
        """Return the size of an expert in bytes.

        Raises
        ------
        KeyError
            The source has no such expert.
        """
        ...


@runtime_checkable
class ExtentSource(ExpertSource, Protocol):
    """A source of which the store reads the files itself, with direct I/O where it can."""

    def extents(self, key: ExpertKey, /) -> Sequence[Extent]:
        """Return where an expert's bytes lie, in order; their sizes add up to `expert_nbytes(key)`.

        Raises
        ------
        KeyError
            The source has no such expert.
        """
        ...


@runtime_checkable
class ReadSource(ExpertSource, Protocol):
    """A source that hands over bytes: from memory, from a network, computed."""

    def read_expert(self, key: ExpertKey, /) -> Buffer:
        """Return an expert's bytes: a C-contiguous buffer of `expert_nbytes(key)` bytes, copied before the next call.

        Called in Python by the thread that needs the expert, or by the prefetch worker. What it raises fails the
        acquire, and is its `__cause__`.
        """
        ...


def mapping(given: object, what: str) -> Mapping[Any, Any]:
    """Return `given` if it is a mapping; a TypeError that says what it should map."""
    if not isinstance(given, Mapping):
        raise TypeError(f"wants a mapping of (layer, expert) to {what}; got {type(given).__name__}")
    return given


def as_key(key: object) -> ExpertKey:
    """Return `key`, a pair of integers from 0 to 1,048,575, as an ExpertKey.

    Raises
    ------
    TypeError
        It is not a pair of integers.
    InvalidSource
        One of them is out of range.
    """
    if not isinstance(key, tuple) or len(key) != 2 or any(isinstance(part, bool) for part in key):
        raise TypeError(f"a key must be (layer, expert), two integers; got {key!r}")
    try:
        layer, expert = (operator.index(part) for part in key)
    except TypeError:
        raise TypeError(f"a key must be (layer, expert), two integers; got {key!r}") from None
    if not (0 <= layer <= MAX_NUMBER and 0 <= expert <= MAX_NUMBER):
        raise InvalidSource(f"layer and expert must be from 0 to {MAX_NUMBER:,}; got {key!r}")
    return ExpertKey(layer, expert)
