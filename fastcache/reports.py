"""What a store says of itself: its counters as Stats, the phase that they are counted in, its description.

Functions of a store, for store.py. Imports curve, describe, speculation, stats, and how the
compiled half was built.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Mapping
from typing import Any

from fastcache.curve import policy_feature
from fastcache.describe import Description, describe_store
from fastcache.speculation import describe_speculation
from fastcache.stats import PHASES, Stats, Window
from fastcache_ext import built


def opened_now() -> Window:
    """Return the window of a store that was just opened: like no other's, and empty."""
    now = time.monotonic_ns()
    return Window(secrets.token_hex(8), now, now)


def counted(store: Any, layers: bool = False, phases: bool = False) -> Stats:
    """Return a store's counters since it was opened; they never go back."""
    since = store._opened._replace(until=time.monotonic_ns())  # first: of two calls the later one counted no less
    every, by_layer, by_phase = store._counters(layers, phases)
    gauges = store._gauges()

    def stats(values: Mapping[str, Any], its_layers: Mapping[int, Any], **more: Any) -> Stats:
        named = {errno.errorcode.get(number, "other"): n for number, n in values["read_errnos"].items()}
        return Stats(**{**values, "read_errnos": named}, **gauges, layers=its_layers, **more)

    of_phases = {
        name: stats(*of_phase, window=since._replace(source=f"{since.source}/{name}"))
        for name, of_phase in by_phase.items()
    }
    return stats(every, by_layer, phases=of_phases, window=since)


def described(store: Any, liburing: str | None) -> Description:
    """Return a store's description; `liburing` is the path of the library, where io_uring is used."""
    return describe_store(
        store._settings,
        store._memory(),
        store._file_rows or store._files.describe(),
        name=store.name,
        family=store.family,
        fingerprint=store.fingerprint,
        policy=policy_feature(store._settings.policy, store._ghosts()),
        engine=(store.engine_used, store.engine_reason, liburing),
        budget_bytes=store.budget_bytes,
        slot_bytes=store._sizing.slot_bytes,
        cycle_bytes=store._sizing.cycle,
        speculation=describe_speculation(store._settings.speculation, store._speculation(), store._schedulers),
        overflow_limit=store._sizing.overflow,
        metadata=(store._metadata_bytes, len(store)),
        not_indexed=store._inventory.not_indexed,
        checks=store._checks,
        build=(built.KIND, built.FLAGS, built.COMPILER),
    )


class Phase:
    """The context manager that `store.phase(...)` returns: inside the store is in the phase, after it in the former."""

    __slots__ = ("_former", "_phase", "_store")

    def __init__(self, store: Any, name: str | None) -> None:
        if name is not None and name not in PHASES[1:]:
            raise ValueError(f"a phase is one of {', '.join(map(repr, PHASES[1:]))}, or None; got {name!r}")
        self._store = store
        self._phase = PHASES.index(name) if name is not None else 0
        self._former: list[int] = []

    def __enter__(self) -> None:
        self._former.append(self._store._set_phase(self._phase))

    def __exit__(self, *exc: object) -> None:
        former = self._former.pop()
        if not self._store._forked():  # a child that leaves its parent's block
            self._store._set_phase(former)
