"""The experts of one call of a block, one after another as their bytes arrive.

Owns the order of asking: all at once, or in waves where the store parts them. Knows no arithmetic. Imports linear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from fastcache.linear import Arrays


class Experts(Protocol):
    """What a block asks of an ExpertStore or of ResidentExperts.

    An object that also has `waves(layer, experts)`, as a store has, is asked for one list of it at a time.
    """

    def as_ready(self, layer: int, experts: Sequence[int], /) -> Iterator[tuple[int, Arrays]]:
        """Give (expert, arrays) of each distinct expert of a layer once, as its bytes arrive."""
        ...


class Waves(Protocol):
    """What `waves` gives: lists of experts, each expert once, sized when asked for."""

    def __next__(self) -> Sequence[int]: ...

    def take(self) -> Sequence[int]:
        """Return what fits beside all that is leased now; it may be empty."""
        ...


def arriving(experts: Experts, layer: int, wanted: Sequence[int]) -> Generator[tuple[int, Arrays], None, None]:
    """Ask for experts now, and give (expert, arrays) of each as it arrives. Close it to let go of the rest.

    Whatever fits is asked for as soon as it fits: a slot that was let go is read into while the next expert is
    computed, so that neither the device nor the processor rests between waves.
    """
    waves: Waves | None = None
    first: Sequence[int] = wanted
    if wanted and hasattr(experts, "waves"):
        waves = experts.waves(layer, wanted)
        first = next(waves)
    # Not in the generator: its body does not run before it is asked for an expert.
    return _each(experts, layer, waves, deque([experts.as_ready(layer, first)] if first else []))


def _each(
    experts: Experts, layer: int, waves: Waves | None, under_way: deque[Iterator[tuple[int, Arrays]]]
) -> Generator[tuple[int, Arrays], None, None]:
    try:
        while under_way:
            for item in under_way[0]:
                yield item
                del item  # or its slot stays leased while the next one is waited for
                more = waves.take() if waves is not None else ()
                if more:
                    under_way.append(experts.as_ready(layer, more))
            under_way.popleft()
            if waves is not None and not under_way and (more := next(waves, ())):
                under_way.append(experts.as_ready(layer, more))
    finally:
        for ready in under_way:
            close = getattr(ready, "close", None)
            if close is not None:
                close()
