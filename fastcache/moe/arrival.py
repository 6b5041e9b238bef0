"""The experts of one call of a block, one after another as their bytes arrive.

Owns the order of asking: all at once, or in waves where the store parts them. Knows no arithmetic. Imports linear.
"""

from __future__ import annotations

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
    """What `waves` gives: lists of experts, each once, sized when asked for."""

    def __next__(self) -> Sequence[int]: ...

    def fits(self) -> bool:
        """Whether the next list would find slots beside what is leased now."""
        ...


def arriving(experts: Experts, layer: int, wanted: Sequence[int]) -> Generator[tuple[int, Arrays], None, None]:
    """Ask for experts now, and give (expert, arrays) of each as it arrives. Close it to let go of the rest.

    Asks for the next wave when the last expert of a wave has arrived and is about to be computed, if there is a slot
    left beside it: so that the device does not rest at the edges of waves.
    """
    parted: Waves | None = None
    first: Sequence[int] = wanted
    if wanted and hasattr(experts, "waves"):
        parted = experts.waves(layer, wanted)
        first = next(parted)
    # Not in the generator: its body does not run before it is asked for an expert.
    return _each(experts, layer, parted, len(first), experts.as_ready(layer, first) if first else iter(()))


def _each(
    experts: Experts, layer: int, parted: Waves | None, count: int, ready: Iterator[tuple[int, Arrays]]
) -> Generator[tuple[int, Arrays], None, None]:
    upcoming: Iterator[tuple[int, Arrays]] | None = None
    try:
        while True:
            for item in ready:
                count -= 1
                if count == 0 and parted is not None and parted.fits():
                    wave = next(parted)
                    upcoming, count = experts.as_ready(layer, wave), len(wave)
                yield item
                del item  # or its slot stays leased while the next one is waited for
            if upcoming is None:
                wave = [] if parted is None else next(parted, [])
                if not wave:
                    return
                upcoming, count = experts.as_ready(layer, wave), len(wave)
            ready, upcoming = upcoming, None
    finally:
        for under_way in (ready, upcoming):
            close = getattr(under_way, "close", None)
            if close is not None:
                close()
