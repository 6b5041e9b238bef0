"""What a budget means in bytes: "8GiB", "25% of experts", "50% of free", "2 cycles", "all", "auto". Imports units."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastcache.errors import BudgetTooSmall
from fastcache.units import format_bytes, parse_bytes

RESERVE = 0.15  # share of free memory that "auto" leaves alone
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%\s*(?:of\s+(\w+))?", re.IGNORECASE)
_CYCLES = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*cycles?", re.IGNORECASE)


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
    BudgetTooSmall
        For a negative number, or text that is no budget. It is a ValueError.
    TypeError
        For a bool, a float, or anything else that is neither an integer nor a string.
    """
    if value is None or value == "auto":
        free = facts.free_bytes - facts.trunk_bytes
        limit = max(int(free * (1 - RESERVE)), 0)
        if facts.expert_bytes <= limit:
            return facts.expert_bytes, f"all experts, {format_bytes(facts.expert_bytes)}, fit into free memory"
        return limit, (
            f"{format_bytes(limit)}: free memory {format_bytes(facts.free_bytes)} less trunk "
            f"{format_bytes(facts.trunk_bytes)} less {RESERVE:.0%}"
        )
    if not isinstance(value, str):
        try:
            size = parse_bytes(value, what)
        except ValueError as error:
            raise BudgetTooSmall(str(error)) from None
        return size, format_bytes(size)
    text = value.strip()
    if text.lower() == "all":
        return facts.expert_bytes, f"all experts, {format_bytes(facts.expert_bytes)}"
    if match := _PERCENT.fullmatch(text):
        share, of = float(match[1]) / 100, (match[2] or "").lower()
        base = {"experts": facts.expert_bytes, "free": facts.free_bytes}.get(of)
        if base is None:
            raise BudgetTooSmall(f"{what} {value!r}: say '{match[1]}% of experts' or '{match[1]}% of free' (memory)")
        size = int(base * share)
        return size, f"{match[1]} % of {of}, {format_bytes(size)}"
    if match := _CYCLES.fullmatch(text):
        if facts.cycle_bytes is None:
            raise BudgetTooSmall(f"{what} {value!r}: the token cycle is not known, because the source gives no top_k")
        size = int(facts.cycle_bytes * float(match[1]))
        return size, f"{match[1]} token cycles, {format_bytes(size)}"
    try:
        size = parse_bytes(text, what)
    except ValueError as error:
        if "larger" in str(error):
            raise BudgetTooSmall(str(error)) from None
        raise BudgetTooSmall(f"{error}; or 'auto', 'all', 'P% of experts', 'P% of free', 'N cycles'") from None
    return size, format_bytes(size)
