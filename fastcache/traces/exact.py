"""Exact replay: a recording through the store's own code again, and its counters beside the live ones.

Imports errors, the trace format and the compiled replay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastcache.errors import TraceError
from fastcache.traces.format import BATCH, GUESS, RECORD, Header, open_records
from fastcache.traces.missing import END
from fastcache.traces.trace import PHASES, Array
from fastcache_ext.replay import Replay

COUNTER = 28
ENDS = {1: "stopped", 2: "closed", 3: "max_bytes"}
KINDS = {
    1: "TOKEN", 2: "BATCH", 3: "REQUEST", 4: "SINGLE", 16: "LANDED", 17: "EVICTED", 18: "LEASED", 19: "RELEASED",
    20: "RETRY", 21: "SERVED", 22: "REFUSED", 23: "LEFT", 24: "CANCEL", 25: "PIN", 26: "UNPIN", 27: "GAP",
    28: "COUNTER", 29: "END", 30: "PHASE", 31: "TIMED_OUT", 32: "SWITCH", 33: "MOVED", 34: "TRADE", 35: "BEGUN",
}  # fmt: skip
_OF_KEYS = frozenset({3, 4, 16, 17, 20, 21, 22, 23, 24, 25, 26, 31, 34, 35})
_OUTCOMES = ("hit", "join", "miss", "no room", "declined")
# Times, and what was asked of the device: no policy decides them, and a replay reads nothing.
MEASURED = ("late_join_wait_ns", "demand_wait_ns", "reads", "bytes_submitted", "bytes_direct", "demand_wait_buckets")
_MEASURED_TOO = ("reads_in_flight", "bytes_in_flight")


@dataclass(frozen=True, slots=True)
class ExactReplay:
    """What an exact replay gave.

    Attributes
    ----------
    trace, policy : str
    records : int
        Records replayed, those of the counters at the end not among them.
    counters : mapping
        Of the replay, by the names of `store.stats()`; errors as "errors.<class>". What is measured is left out.
    phases, layers : mapping
        The same by phase of the request, and by layer.
    live : mapping
        The store's own counters when the recording ended, as the file has them; empty where it has none.
    ended : str
        Why the recording ended; "" where the file does not say, because the process died or the disk was full.
    divergence : str
        The first decision that differs from the recorded one, in words; "": all are the same.
    """

    trace: str
    policy: str
    records: int
    counters: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    layers: Mapping[int, Mapping[str, int]]
    live: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""
    divergence: str = ""

    @property
    def differences(self) -> dict[str, tuple[int, int]]:
        """{name: (live, replayed)} of the counters that differ; empty where the file has no counters."""
        return {name: (self.live[name], n) for name, n in self.counters.items() if self.live and self.live[name] != n}

    @property
    def same(self) -> bool:
        """Whether every decision and every counter is the live one."""
        return bool(self.live) and not self.divergence and not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dicts and numbers."""
        plain = {name: getattr(self, name) for name in ("trace", "policy", "records", "ended", "divergence", "same")}
        return plain | {
            "counters": dict(self.counters),
            "live": dict(self.live),
            "differences": {name: list(pair) for name, pair in self.differences.items()},
            "phases": {name: dict(counts) for name, counts in self.phases.items()},
            "layers": {layer: dict(counts) for layer, counts in self.layers.items()},
        }


def replay_exact(path: str | os.PathLike[str]) -> ExactReplay:
    """Replay a recording (`store.record`) at its own budget and policy, by the store's own code.

    Requests, landings, and which slots were leased come from the trace; hits, victims and pass-throughs are decided
    again, and compared with what was recorded. Memory is that of the file, mapped, and of the store's tables.

    Raises
    ------
    TraceError
        Not a recording; one that is not exact, because it began after requests or lost records; or one that cannot be.
    OSError
        The file cannot be read.
    """
    header, records = open_records(path)
    run = header.run
    missing = {"policy", "policies", "engine", "slots", "classes", "counters", "exact"} - set(run)
    if missing:
        raise TraceError(f"not a recording of a store: `run` has no {', '.join(sorted(missing))}", filename=path)
    if run["exact"] is not True:
        raise TraceError(
            "this recording is not exact: it began after requests, or records were lost (GAP). Call store.record() "
            "before the first request; a plain replay needs no exact trace",
            filename=path,
        )
    if header.expert_nbytes is None:
        raise TraceError("the header has no expert_nbytes", filename=path)
    if run.get("guesses") != "wait" and np.any((records["kind"] == BATCH) & (records["flags"] == GUESS)):
        raise TraceError(
            "a recording by an earlier version, whose guesses took their slots before their turn to be read: no exact "
            "replay of it; a plain replay can be",
            filename=path,
        )
    try:
        names = run["counters"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("counters are no list of names")
        counts = [count for _, count in header.layers]
        classes = np.repeat(*(np.asarray(column) for column in zip(*run["classes"], strict=True))).astype(np.uint8)
        replay = Replay(
            counts,
            classes.tobytes(),
            run["slots"],
            _sizes(header),
            run["policy"],
            run["policies"],
            run["engine"] == "python",
            run.get("slabs"),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise TraceError(f"the header is not usable: {error!r}", filename=path) from None
    how, at, instead = replay.run(np.ascontiguousarray(records))
    if how in ("lost", "strange"):
        raise TraceError(f"{_words(records[at], header)} cannot be here", filename=path, record=at)
    divergence = ""
    if how == "diverged":
        other = _words(np.asarray([instead], np.uint64).view(RECORD)[0], header) if instead else "nothing of the kind"
        divergence = f"record {at}: recorded {_words(records[at], header)}; replayed: {other}"
    rows = replay.rows()
    if len(names) != len(rows[0]):
        raise TraceError(f"the header names {len(names)} counters; this version has {len(rows[0])}", filename=path)
    live, ended = _trailer(records, names, path) if how in ("ended", "diverged") else ({}, "")
    return ExactReplay(
        trace=os.fspath(path) if isinstance(path, str) else str(path),
        policy=run["policy"],
        records=at,
        counters=_named(names, np.sum(rows, axis=0).tolist()),
        phases={("none", *PHASES[1:])[p]: _named(names, row) for p, row in enumerate(rows)},
        layers={
            number: {name: n for name, n in counts.items() if name != "demand_wait_ns"}
            for (number, _), counts in zip(header.layers, replay.layers(), strict=True)
        },
        live=live,
        ended=ended,
        divergence=divergence,
    )


def _sizes(header: Header) -> list[int]:
    nbytes = header.expert_nbytes
    if isinstance(nbytes, int):
        return [nbytes] * header.pool
    assert nbytes is not None
    if len(nbytes) == header.pool:
        return list(nbytes)
    return [size for size, (_, count) in zip(nbytes, header.layers, strict=True) for _ in range(count)]


def _named(names: list[str], values: list[int]) -> dict[str, int]:
    skip = (*MEASURED, *_MEASURED_TOO)
    return {name: n for name, n in zip(names, values, strict=True) if name.split(".")[0] not in skip}


def _trailer(records: Array, names: list[str], path: object) -> tuple[dict[str, int], str]:
    """Return the counters at the end of a file, and why it ended; ({}, "") where it does not say."""
    if not len(records) or records["kind"][-1] != END:
        return {}, ""
    values = [0] * len(names)
    i = len(records) - 2
    while i >= 0 and records["kind"][i] == COUNTER:
        row = records[i]
        if row["aux"] >= len(names):
            raise TraceError(f"a counter of number {row['aux']}, of {len(names)}", filename=path, record=i)
        values[row["aux"]] += int(row["value"]) << 32 if row["flags"] & 1 else int(row["value"]) & 0xFFFFFFFF
        i -= 1
    return _named(names, values), ENDS.get(int(records["flags"][-1]), "")


def _words(record: Any, header: Header) -> str:
    """Return a record as people read it."""
    kind, flags, aux, value = (int(record[name]) for name in ("kind", "flags", "aux", "value"))
    what = str(value)
    if kind in _OF_KEYS and 0 <= value < header.pool:
        first = np.concatenate([[0], np.cumsum([count for _, count in header.layers])])
        layer = int(np.searchsorted(first, value, "right")) - 1
        what = f"expert {(header.layers[layer][0], value - int(first[layer]))}"
    elif kind in (18, 19, 33):
        what = f"slot {value}"
    detail = _OUTCOMES[flags] if kind in (3, 21) and flags < len(_OUTCOMES) else f"flags {flags}"
    return f"{KINDS.get(kind, kind)} {what} ({detail}, aux {aux})"
