"""Description: what was asked of a store, what it really does, and why. Imports settings, sidecar, units."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fastcache.settings import Settings
from fastcache.sidecar import Checks
from fastcache.units import HUGE, format_bytes, whole_huge

PENDING = "the arena is still being prepared in the background; open(progress=...) waits for it"
HUGE_ENOUGH = 0.9  # share of the arena in huge pages that counts as all, and that "require" accepts


def feature(requested: object, used: object, reason: str = "", **more: object) -> dict[str, Any]:
    """Return one feature's entry."""
    return {"requested": requested, "used": used, "reason": reason, **more}


class Description(dict[str, Any]):
    """Features to {requested, used, reason, ...}, figures to numbers; JSON takes it. `str()` of it is for people."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers, as JSON takes them."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in self.items()}

    def __str__(self) -> str:
        lines = []
        for name, value in self.items():
            if isinstance(value, dict) and "used" in value:
                asked = "" if value["requested"] in (None, "auto", value["used"]) else f" (asked: {value['requested']})"
                why = f": {value['reason']}" if value["reason"] else ""
                more = "".join(
                    f", {key} {format_bytes(extra) if key.endswith('bytes') and isinstance(extra, int) else extra}"
                    for key, extra in value.items()
                    if key not in ("requested", "used", "reason", "files", "predictors", "io")
                )
                lines.append(f"{name:12} {value['used']}{asked}{more}{why}")
            elif name.endswith("bytes") and isinstance(value, int):
                lines.append(f"{name:12} {format_bytes(value)}")
            else:
                lines.append(f"{name:12} {value}")
        return "\n".join(lines)

    __repr__ = __str__


def describe_store(
    s: Settings,
    m: Mapping[str, Any],
    files: Sequence[Mapping[str, Any]],
    *,
    name: str,
    family: str,
    fingerprint: str,
    policy: dict[str, Any],
    engine: tuple[str, str, str | None],
    budget_bytes: int,
    slot_bytes: Sequence[int],
    cycle_bytes: int | None,
    speculation: dict[str, Any],
    overflow_limit: int,
    metadata: tuple[int, int],
    not_indexed: Sequence[str],
    checks: Checks,
    build: tuple[str, str, str],
) -> Description:
    """Return the description of a store from its settings `s`, the kernel's word on its memory `m`, and its files."""
    arena = m.get("arena_bytes", 0)
    rows = [row for row in files if row["path"] is not None]
    direct = sum(bool(row["direct"]) for row in rows)
    used = "direct" if rows and direct == len(rows) else "mixed" if direct else "buffered" if rows else "none"
    reasons = sorted({row["reason"] for row in rows if not row["direct"] and row["reason"]})
    huge = m.get("huge_bytes", 0)
    registered = m.get("registered_bytes", 0)  # io_uring pins what it registers: mlock is left with the rest
    held = m.get("locked_bytes", 0) + registered
    limit = "raise RLIMIT_MEMLOCK (ulimit -l)"
    pages = "2 MiB pages" if huge >= HUGE_ENOUGH * whole_huge(arena) > 0 else "mixed" if huge else "ordinary pages"
    pending = PENDING if not m.get("settled", True) else ""
    pinned = f"{format_bytes(registered)} of it by io_uring's registration, the rest by mlock" if registered else ""
    if held == registered > 0:
        pinned = "by io_uring's registration"
    return Description(
        {
            "name": name,
            "family": family,
            "fingerprint": fingerprint,
            "policy": policy,
            "engine": feature(s.engine, engine[0], engine[1], liburing=engine[2]),
            "direct": feature(
                s.direct, used, "; ".join(reasons), files_direct=direct, files_buffered=len(rows) - direct
            ),
            "hugepages": feature(
                s.hugepages, pages, _why_small(s.hugepages, arena, huge, m), fraction=huge / arena if arena else 0.0
            ),
            "mlock": feature(
                s.mlock,
                "none" if not held else "all" if held >= arena else "part",
                _errno(m.get("mlock_errno", 0), limit) or pending or pinned,
                locked_bytes=held,
            ),
            "registered": feature(
                s.mlock,
                registered > 0,
                _errno(m.get("registration_errno", 0), limit)
                or (pending if engine[0] == "uring" else "only io_uring registers buffers"),
                registered_bytes=registered,
            ),
            "speculation": speculation,
            "verify": feature(
                checks.requested, "none" if checks.path is None else "sidecar", checks.why, sidecar=checks.path
            ),
            "build": feature(
                None,
                build[0],
                "" if build[0] == "release" else "for looking for mistakes; times mean nothing",
                flags=build[1],
                compiler=build[2],
            ),
            "budget_bytes": budget_bytes,
            "arena_bytes": arena,
            "populated_bytes": m.get("populated_bytes", 0),
            "slots": m.get("slots", 0),
            "leased_slots": m.get("leased_slots", 0),
            "slot_bytes": slot_bytes[0] if len(slot_bytes) == 1 else list(slot_bytes),
            "slot_classes": [
                {"slot_bytes": b, "slots": n} for b, n in zip(slot_bytes, m.get("class_slots", ()), strict=False)
            ],
            "slabs": {name: m.get(name, 0) for name in ("slab_bytes", "slabs", "trades", "traded_out")},
            "token_cycle_bytes": cycle_bytes,
            "overflow_limit_bytes": overflow_limit,
            "overflow_bytes": m.get("overflow_bytes", 0),
            "overflow_peak_bytes": m.get("overflow_peak", 0),
            "metadata_bytes": metadata[0],
            "metadata_bytes_per_expert": -(-metadata[0] // max(1, metadata[1])),
            "files": len(rows),
            "not_indexed": list(not_indexed),
        }
    )


def _errno(number: int, hint: str) -> str:
    return f"{os.strerror(number)}; {hint}" if number else ""


def _why_small(requested: str, arena: int, huge: int, memory: Mapping[str, Any]) -> str:
    if requested == "off" or not arena or huge >= HUGE_ENOUGH * whole_huge(arena) > 0:
        return ""
    if arena < HUGE:
        return "the arena is smaller than one huge page"
    if memory.get("huge_errno"):
        return _errno(memory["huge_errno"], "the kernel refused")
    if not memory.get("settled", True):
        return PENDING
    return "the kernel gave fewer: see /sys/kernel/mm/transparent_hugepage/enabled"
