"""How experts of different sizes share a budget: slots that a size class keeps, and slabs that classes trade.

Owns the plan; who gets which slab later is the compiled half's to say. Imports placement.

A slab is a run of bytes that any one class cuts into its own slots. It is large enough for what is left over at its
end to be little, whichever class has it, and small enough for there to be several. Classes whose experts all together
fill no slab, or of which a slab would hold too many, keep a share of their own; so does what whole slabs leave over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastcache.placement import share_slots

MAX_PER_SLAB = 256  # slots of a class in one slab: what a trade looks at is bounded
MAX_SLAB = 1 << 30  # bytes, unless one slot is larger: a slab is registered with the kernel as a whole
LEAST_SLABS = 4  # fewer are not worth the while
MOST_SLOTS = 64  # of the class whose slots fill the slab without a rest
MOST_WASTE = 1 / 32  # of a slab, at its end
GRAIN = 8  # how many bytes at the end of slabs one byte of slab is worth: between smaller slabs and less waste


@dataclass(frozen=True, slots=True)
class Slabs:
    """A plan, per size class. Without slabs `slots` is all there is."""

    slots: list[int]  # outside slabs
    slab_bytes: int  # 0: there are none
    own: list[int]  # slabs that the class begins with
    most: list[int]  # slabs that it can have; 0: it trades none
    per: list[int]  # its slots in a slab
    least: list[int]  # slots below which it gives none up

    @property
    def count(self) -> int:
        """Return how many slabs there are."""
        return sum(self.own)

    @property
    def begins_with(self) -> list[int]:
        """Return the slots of each class at the start."""
        return [n + k * per for n, k, per in zip(self.slots, self.own, self.per, strict=True)]

    def arena_bytes(self, slot_bytes: Sequence[int]) -> int:
        """Return the bytes of it all."""
        return sum(n * size for n, size in zip(self.slots, slot_bytes, strict=True)) + self.count * self.slab_bytes

    def plan(self) -> tuple[int, list[int], list[int], list[int], list[int]] | None:
        """Return it as the compiled half takes it, the slots outside slabs apart; None: no slabs."""
        return (self.slab_bytes, self.own, self.most, self.per, self.least) if self.count else None


def plan_slabs(budget: int, slot_bytes: Sequence[int], experts: Sequence[int], batch: int = 1) -> Slabs:
    """Cut `budget` bytes for `experts[c]` experts in slots of `slot_bytes[c]` bytes, asked for `batch` at a time.

    Never more bytes than the budget. A budget for all experts, experts of one size, and budgets too small for
    LEAST_SLABS slabs with little waste are shared for good, in proportion to the bytes of each class's experts.
    """
    shares = share_slots(budget, slot_bytes, experts)
    none = [0] * len(shares)
    static = Slabs(shares, 0, none, none, none, none)
    totals = [size * n for size, n in zip(slot_bytes, experts, strict=True)]
    if len(slot_bytes) < 2 or sum(totals) <= budget:
        return static
    nbytes, traders = _slab(budget, slot_bytes, totals)
    if not traders:
        return static
    per = [nbytes // size if c in traders else 0 for c, size in enumerate(slot_bytes)]
    slots = [0 if c in traders else n for c, n in enumerate(shares)]
    left = budget - sum(n * size for n, size in zip(slots, slot_bytes, strict=True))
    count = left // nbytes
    while count >= LEAST_SLABS:
        kept = _rest(left - count * nbytes, slot_bytes, experts, slots, traders)
        most = [(experts[c] - kept[c]) // per[c] if c in traders else 0 for c in range(len(per))]
        own = _deal(count, most, totals, traders)
        if own is not None and sum(n > 0 for n in most) > 1:
            begins = [n + k * slots for n, k, slots in zip(kept, own, per, strict=True)]
            least = [min(n, batch + 1) for n in begins]
            return Slabs(kept, nbytes, own, [min(n, count) for n in most], per, least)
        count -= 1  # nearly all experts fit: what is over serves better as slots
    return static


def _slab(budget: int, slot_bytes: Sequence[int], totals: Sequence[int]) -> tuple[int, set[int]]:
    """Return the bytes of a slab, and the classes that trade: two or more, or none."""
    best: tuple[float, int, set[int]] = (1.0, 0, set())
    largest = max(slot_bytes)
    for one in slot_bytes:
        for n in range(1, MOST_SLOTS + 1):
            size = n * one
            if size * LEAST_SLABS > budget or size > max(MAX_SLAB, largest):
                break
            traders = {c for c, b in enumerate(slot_bytes) if totals[c] >= size and 1 <= size // b <= MAX_PER_SLAB}
            if len(traders) < 2:
                continue
            waste = max(size % slot_bytes[c] for c in traders) / size
            cost = waste + size / budget / GRAIN
            if waste <= MOST_WASTE and (cost, size) < best[:2]:
                best = (cost, size, traders)
    return best[1], best[2]


def _rest(
    left: int, slot_bytes: Sequence[int], experts: Sequence[int], slots: list[int], traders: set[int]
) -> list[int]:
    """Return the slots that classes keep, with those that `left` bytes buy: to who has the least of its share first."""
    slots = list(slots)
    while True:
        able = [c for c in range(len(slots)) if slots[c] < experts[c] and slot_bytes[c] <= left]
        if not able:
            return slots
        c = min(able, key=lambda c: (c not in traders, slots[c] / experts[c], slot_bytes[c]))
        slots[c] += 1
        left -= slot_bytes[c]


def _deal(count: int, most: Sequence[int], totals: Sequence[int], traders: set[int]) -> list[int] | None:
    """Divide `count` slabs in proportion to bytes, none more than it can have; None: they cannot take as many."""
    if sum(most) < count:
        return None
    whole = sum(totals[c] for c in traders)
    own = [min(most[c], count * totals[c] // whole) if c in traders else 0 for c in range(len(totals))]
    while sum(own) < count:
        c = min((c for c in traders if own[c] < most[c]), key=lambda c: own[c] / totals[c])
        own[c] += 1
    return own
