"""Recording: what a store does, written to a trace file as it happens.

Owns the file's header and the handle; the compiled half writes the records (docs/traces.md). Imports what a
header tells, and the compiled tape.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from fastcache.errors import ForkedStore, RecordingError
from fastcache.inventory import Inventory
from fastcache.outputs import naming, refuse_other_kind
from fastcache.settings import Settings
from fastcache.sizing import Sizing
from fastcache.traces.format import MAGIC, Header, pack_header
from fastcache.units import parse_bytes
from fastcache_ext.counters import ERRORS, NAMES, WAIT_BUCKETS
from fastcache_ext.policy import NAMES as POLICIES
from fastcache_ext.serve import Server
from fastcache_ext.tape import LEAST_BYTES, RING, Tape, mark_token, policy_in_use, running

log = logging.getLogger("fastcache")
MAX_BYTES = "1GiB"
__all__ = ["MAX_BYTES", "Recording", "mark_token", "record"]
COUNTERS = (  # by their number in a record
    *NAMES,
    *(f"errors.{name}" for name in ERRORS),
    *(f"demand_wait_buckets.{i}" for i in range(WAIT_BUCKETS)),
)
_UNSURE = "@@@"
_PLACE, _TRUE = b'"exact": "@@@"', b'"exact": true '  # of one length: "false" fits over what stands there


class Recording:
    """A recording of a store; made by `ExpertStore.record`. A context manager: leaving it stops the recording.

    It runs until `stop()`, until the store is closed or the file is full, whether this handle is kept or not.

    Attributes
    ----------
    path : Path
    max_bytes : int
    """

    def __init__(self, store: Server, name: str, path: str | os.PathLike[str], max_bytes: int, tape: Tape) -> None:
        self.path, self.max_bytes = Path(path), max_bytes
        self._store, self._name, self._tape = store, name, tape
        self._warned = False

    def stop(self) -> None:
        """Record nothing more, and wait until everything is in the file. Stopping twice is fine.

        Raises
        ------
        ForkedStore
            In a child of the process that opened the store.
        """
        self._tape.stop(self._store)
        self._state()

    def _state(self) -> tuple[int, int, bool, str, int]:
        state = self._tape.state(self._store)
        if state[4] and not self._warned:
            self._warned = True
            log.warning("%s: the recording in %s ended: %s", self._name, self.path, os.strerror(state[4]))
        return state

    @property
    def records(self) -> int:
        """Records so far, of 8 bytes each, as docs/traces.md counts them; those that were lost not among them."""
        return self._state()[0]

    @property
    def dropped(self) -> int:
        """Records that were lost, because the file could not be written as fast as they came."""
        return self._state()[1]

    @property
    def exact(self) -> bool:
        """Whether it replays exactly: begun before the store was asked for anything, and nothing lost."""
        return self._state()[2]

    @property
    def ended(self) -> str:
        """Why it ended: "stopped", "closed" (the store was), "max_bytes" or "error"; "" while it runs."""
        return self._state()[3]

    @property
    def error(self) -> OSError | None:
        """What writing the file failed with. What was written before is a trace."""
        code = self._state()[4]
        return OSError(code, os.strerror(code), str(self.path)) if code else None

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        try:
            records, dropped, exact, ended, _ = self._state()
        except ForkedStore:
            return f"<Recording {str(self.path)!r}, of the process that opened the store>"
        state = f"ended: {ended}" if ended else "running"
        return f"<Recording {str(self.path)!r}: {records} records, {dropped} lost, exact {exact}, {state}>"


def header_of(
    store: Server,
    name: str,
    inventory: Inventory,
    payload: np.ndarray[Any, Any],
    sizing: Sizing,
    settings: Settings,
    fingerprint: str = "",
) -> Header:
    """Return the header of a store's trace. `payload`: bytes of each expert, int64 [K]."""
    import fastcache  # its version, which it does not know while this module is imported

    by_number = {number: name for name, number in POLICIES.items()}
    policies = [by_number.get(number, "") for number in range(max(by_number) + 1)]
    edges = np.cumsum([0, *(count for _, count in inventory.layers)])
    per_layer = [set(payload[a:b].tolist()) for a, b in itertools.pairwise(edges)]
    nbytes: tuple[int, ...] = tuple(payload.tolist())
    most = max((count for _, count in inventory.layers), default=0)
    if all(len(sizes) == 1 for sizes in per_layer):
        nbytes = tuple(sizes.pop() for sizes in per_layer)
    return Header(
        model=name,
        fingerprint=fingerprint,
        layers=tuple(inventory.layers),
        top_k=inventory.top_k if most >= (inventory.top_k or 0) else None,  # of a source that says what cannot be
        expert_nbytes=nbytes[0] if len(set(nbytes)) == 1 else nbytes,
        run={
            "fastcache": fastcache.__version__,
            "policy": policies[policy_in_use(store)],
            "chosen": settings.policy,
            "policies": policies,
            "engine": store.engine_used,
            "budget_bytes": sizing.budget,
            "slots": list(sizing.slabs.slots),
            "slabs": sizing.slabs.plan(),
            "slot_bytes": list(sizing.slot_bytes),
            "classes": [[kind, len(list(keys))] for kind, keys in itertools.groupby(sizing.cls.tolist())],
            "counters": list(COUNTERS),
            "guesses": "wait",
            "exact": _UNSURE,
        },
    )


def record(
    store: Server,
    header: Header,
    path: str | os.PathLike[str],
    max_bytes: int | str | None = None,
    ring: int = RING,
    overwrite: bool = False,
) -> Recording:
    """Start a recording: see ExpertStore.record. `ring`: records that may wait to be written."""
    limit = parse_bytes(MAX_BYTES if max_bytes is None else max_bytes, "max_bytes")
    text = pack_header(header)
    at = text.index(_PLACE)
    text = text.replace(_PLACE, _TRUE, 1)
    if limit < len(text) + LEAST_BYTES:
        raise ValueError(f"max_bytes is {limit}; a recording of this store takes at least {len(text) + LEAST_BYTES}")
    if running(store):  # before the file is truncated: it may be the one that is written
        raise _busy(header)
    if overwrite:
        refuse_other_kind(path, lambda head: head.startswith(MAGIC), "trace")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if overwrite else os.O_EXCL), 0o666)
    except FileExistsError as error:
        why = "there is a file already; overwrite=True would replace a trace"
        raise FileExistsError(error.errno, why, os.fspath(path)) from None
    tape = Tape()
    try:
        with naming(path), open(fd, "wb", closefd=False) as file:
            file.write(text)
        tape.start(store, fd, start=len(text), exact_at=at + len(_TRUE) - 5, limit=limit, ring=ring)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno == errno.EBUSY:
            raise _busy(header) from None
        raise
    return Recording(store, header.model, path, limit, tape)


def _busy(header: Header) -> RecordingError:
    return RecordingError(f"{header.model} is being recorded already: stop() that recording first")
