"""What a budget means in bytes: "8GiB", "25% of experts", "50% of free", "2 cycles", "all", "auto". Imports units."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from fastcache.errors import InvalidBudget
from fastcache.units import exact, format_bytes, parse_bytes

RESERVE = Fraction(15, 100)  # share of free memory that "auto" leaves alone
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%\s*(?:of\s+(\w+))?")
_CYCLES = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*cycles?")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a budget is measured against, in bytes of slots (padding included)."""

    expert_bytes: int  # all experts
    cycle_bytes: int | None  # one token's experts; None where top_k is not known
    trunk_bytes: int  # tensors that belong to no expert
    free_bytes: int  # memory this process may still take


def parse_budget(value: object, facts: Facts, what: str = "budget") -> tuple[int, str]:
    """Return (bytes, how they came about) for a budget as `fastcache.open` takes it; `what` is its name in errors.

    Raises
    ------
    InvalidBudget
        For a negative number, text that is no budget, or a share above 100 %. It is a ValueError.
    TypeError
        For a bool, a float, or anything else that is neither an integer nor a string.
    """
    text = "auto" if value is None else value.strip().lower() if isinstance(value, str) else ""
    if text == "auto":
        free = facts.free_bytes - facts.trunk_bytes
        limit = max(int(free * (1 - RESERVE)), 0)
        if facts.expert_bytes <= limit:
            return facts.expert_bytes, f"all experts, {format_bytes(facts.expert_bytes)}, fit into free memory"
        return limit, (
            f"{format_bytes(limit)}: free memory {format_bytes(facts.free_bytes)} less trunk "
            f"{format_bytes(facts.trunk_bytes)} less {float(RESERVE):.0%}"
        )
    if not isinstance(value, str):
        try:
            size = parse_bytes(value, what)
        except ValueError as error:
            raise InvalidBudget(str(error)) from None
        return size, format_bytes(size)
    if text == "all":
        return facts.expert_bytes, f"all experts, {format_bytes(facts.expert_bytes)}"
    if match := _PERCENT.fullmatch(text):
        share, of = exact(match[1]) / 100, match[2] or ""
        base = {"experts": facts.expert_bytes, "free": facts.free_bytes}.get(of)
        if base is None:
            raise InvalidBudget(f"{what} {value!r}: say '{match[1]}% of experts' or '{match[1]}% of free' (memory)")
        if share > 1:
            more = "all that there are: 'all' takes them" if of == "experts" else "all that is free"
            raise InvalidBudget(f"{what} {value!r} is more than {more}")
        size = int(base * share)
        return size, f"{match[1]} % of {of}, {format_bytes(size)}"
    if match := _CYCLES.fullmatch(text):
        if facts.cycle_bytes is None:
            raise InvalidBudget(f"{what} {value!r}: the token cycle is not known, because the source gives no top_k")
        size = int(facts.cycle_bytes * exact(match[1]))
        if size >= 2**63:
            raise InvalidBudget(f"{what} {value!r} is larger than 8 EiB")
        return size, f"{match[1]} token cycles, {format_bytes(size)}"
    try:
        size = parse_bytes(value, what)
    except ValueError as error:
        hint = "" if "larger" in str(error) else "; or 'auto', 'all', 'P% of experts', 'P% of free', 'N cycles'"
        raise InvalidBudget(f"{error}{hint}") from None
    return size, format_bytes(size)
