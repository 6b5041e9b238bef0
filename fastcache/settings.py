"""The arguments of `fastcache.open`, resolved: argument, else environment, else built-in. Imports units."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastcache.units import is_flag, parse_bytes, whole

CHUNK_BYTES = 4 << 20
QUEUE_DEPTH = 32
IO_THREADS = 4
MAX_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for, checked. "auto" means: what works, and describe() says what that was."""

    budget: Any
    budget_name: str  # what an error about it calls it
    policy: str
    engine: str
    direct: str
    mlock: str
    hugepages: str
    chunk: int
    queue_depth: int
    io_threads: int
    overflow: int | None
    timeout: float | None
    speculation: str = "auto"
    ghosts: bool = False  # ghost caches watch the traffic
    guess_bytes: int | None = None
    guess_share: float = 0.25
    verify: str | None = None  # "sidecar", or the path of one; None: nothing is checked


def resolve(
    *,
    policies: Sequence[str],
    budget: Any = None,
    policy: Any = None,
    engine: Any = None,
    direct: Any = None,
    mlock: Any = None,
    hugepages: Any = None,
    chunk: Any = None,
    queue_depth: Any = None,
    io_threads: Any = None,
    overflow: Any = None,
    timeout: Any = None,
    speculation: Any = None,
    ghosts: Any = None,
    guess_bytes: Any = None,
    guess_share: Any = None,
    verify: Any = None,
) -> Settings:
    """Return checked settings; None is the environment's value, else the built-in one.

    Raises
    ------
    ValueError
        A value is not one of those allowed; where it came from the environment, the message names the variable.
    TypeError
        An argument has the wrong type.
    """

    def size(value: Any, what: str) -> int:
        return parse_bytes(value, what)

    def one_of(*allowed: str) -> Callable[[Any, str], str]:
        def check(value: Any, what: str) -> str:
            if value not in allowed:
                raise ValueError(f"{what} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
            return str(value)

        return check

    def count(value: Any, what: str) -> int:
        number = whole(what, value)
        if not 1 <= number <= 4096:
            raise ValueError(f"{what} must be from 1 to 4096; got {number}")
        return number

    def whole_chunk(value: Any, what: str) -> int:
        number = parse_bytes(value, what)
        if not 512 <= number <= MAX_CHUNK_BYTES:
            raise ValueError(f"{what} must be from 512 bytes to 1 GiB; got {number}")
        return number

    def switch(value: Any, what: str) -> bool:
        if value not in (True, False, "0", "1"):
            raise ValueError(f"{what} must be True or False (in the environment 1 or 0); got {value!r}")
        return value in (True, "1")

    def share(value: Any, what: str) -> float:
        try:
            number = 0.0 if is_flag(value) else float(value)
        except (TypeError, ValueError):
            number = 0.0
        if not 0 < number <= 1:
            raise ValueError(f"{what} must be above 0 and at most 1; got {value!r}")
        return number

    def sidecar(value: Any, what: str) -> str | None:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in os.fsdecode(value):
            raise TypeError(f"{what} must be 'sidecar', 'off', or the path of a sidecar; got {value!r}")
        return None if value == "off" else os.fsdecode(value)

    feature = one_of("auto", "require", "off")
    if timeout is not None:
        timeout = seconds(timeout)
    chosen = _pick("policy", policy, "FASTCACHE_POLICY", "next_use", one_of(*policies, "auto"))
    return Settings(
        **_budget(budget),
        policy=chosen,
        engine=_pick("engine", engine, "FASTCACHE_ENGINE", "auto", one_of("auto", "uring", "pread")),
        direct=_pick("direct", direct, None, "auto", feature),
        mlock=_pick("mlock", mlock, None, "auto", feature),
        hugepages=_pick("hugepages", hugepages, None, "auto", one_of("auto", "require", "off", "hugetlb")),
        chunk=_pick("chunk", chunk, "FASTCACHE_CHUNK", CHUNK_BYTES, whole_chunk),
        queue_depth=_pick("queue_depth", queue_depth, None, QUEUE_DEPTH, count),
        io_threads=_pick("io_threads", io_threads, None, IO_THREADS, count),
        overflow=_pick("overflow", overflow, "FASTCACHE_OVERFLOW", None, size),
        timeout=timeout,
        speculation=_pick("speculation", speculation, "FASTCACHE_SPECULATION", "auto", one_of("auto", "always", "off")),
        ghosts=_pick("ghosts", ghosts, "FASTCACHE_GHOSTS", False, switch) or chosen == "auto",
        guess_bytes=_pick("guess_bytes", guess_bytes, "FASTCACHE_GUESS_BYTES", None, whole_chunk),
        guess_share=_pick("guess_share", guess_share, "FASTCACHE_GUESS_SHARE", 0.25, share),
        verify=_pick("verify", verify, "FASTCACHE_VERIFY", None, sidecar),
    )


def seconds(value: Any, what: str = "timeout") -> float:
    """Return a time that a call may take; a ValueError for what is no number, or below 0: True is none."""
    try:
        number = -1.0 if is_flag(value) else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not number >= 0:
        raise ValueError(f"{what} must be a number of seconds >= 0, or None; got {value!r}")
    return number


def from_environment(variable: str) -> str | None:
    """Return the value of an environment variable; an empty one is unset."""
    return os.environ.get(variable) or None


def _budget(value: Any) -> dict[str, Any]:
    """The budget is parsed when the sizes of experts are known; until then, where it came from is kept with it."""
    found: dict[str, Any] = {"budget": None, "budget_name": "budget"}

    def keep(value: Any, what: str) -> None:
        found.update(budget=value, budget_name=what)

    _pick("budget", value, "FASTCACHE_EXPERT_CACHE_BYTES", None, keep)
    return found


def _pick(name: str, value: Any, variable: str | None, default: Any, check: Callable[[Any, str], Any]) -> Any:
    if value is not None:
        return check(value, name)
    text = from_environment(variable) if variable else None
    if text is None:
        return default
    return check(text, f"{variable} (for {name})")
