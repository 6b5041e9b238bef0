"""How much memory this process may still take: the machine's, and that of every cgroup above it."""

from __future__ import annotations

from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge page-rounded number for "none"


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be taken without swapping or meeting a limit.

    The least of MemAvailable and, for each cgroup (v1 or v2) on the path of this process, its limit less what of its
    use cannot be reclaimed (use less inactive file pages).
    """
    free = _meminfo(proc / "meminfo").get("MemAvailable", 0)
    for directory, limit_names, use_name, inactive_name in _groups(proc, cgroups):
        limits = [limit for name in limit_names if (limit := _number(directory / name)) is not None]
        use = _number(directory / use_name)
        if limits and use is not None:
            inactive = _stat(directory / "memory.stat").get(inactive_name, 0)
            free = min(free, min(limits) - max(use - inactive, 0))
    return max(free, 0)


def _groups(proc: Path, cgroups: Path) -> list[tuple[Path, tuple[str, ...], str, str]]:
    """(directory, files with limits, file with use, name of reclaimable bytes) of each cgroup on the path."""
    found: list[tuple[Path, tuple[str, ...], str, str]] = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroups
            files = (("memory.max", "memory.high"), "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            files = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")  # type: ignore[assignment]
        else:
            continue
        directory = root / path.lstrip("/")
        while True:
            found.append((directory, *files))
            if directory == root or root not in directory.parents:
                break
            directory = directory.parent
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdigit() or int(text) >= _NO_LIMIT:
        return None
    return int(text)


def _stat(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}


def _meminfo(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) >= 2}
