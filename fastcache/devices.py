"""Which I/O scheduler serves a file, and whether it heeds priorities. Reads /sys; imports nothing of ours."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

SYS = Path("/sys/dev/block")
HEEDING = frozenset({"mq-deadline", "bfq"})  # kyber and none take requests as they come


def schedulers(paths: Iterable[str | None], sys: Path = SYS) -> dict[str, str]:
    """Return {block device: its scheduler} of the devices that files lie on; "unknown" where /sys does not say.

    A partition has its disk's; a stack of devices (md, dm) has those of the lowest.
    """
    found: dict[str, str] = {}
    for number in {os.stat(path).st_dev for path in paths if path is not None}:
        _look(sys / f"{os.major(number)}:{os.minor(number)}", found)
    return found


def _look(device: Path, found: dict[str, str]) -> None:
    device = device.resolve()
    lower = sorted((device / "slaves").glob("*"))
    for below in lower:
        _look(below, found)
    if lower:
        return
    for place in (device, device.parent):
        try:
            text = (place / "queue" / "scheduler").read_text()
        except OSError:
            continue
        chosen = text.partition("[")[2].partition("]")[0] if "[" in text else text.strip()
        found[place.name] = chosen or "none"
        return
    found[device.name] = "unknown"


def heeded(found: dict[str, str]) -> bool:
    """Whether every device has a scheduler that serves the higher priority class first."""
    return bool(found) and all(scheduler in HEEDING for scheduler in found.values())
