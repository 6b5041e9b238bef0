"""BigMoeOnEdge's `route_trace v1`: comment lines that say what the model is, names of columns, a row per routed expert.

Imports errors, NumPy and what cuts requests into batches.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from fastcache.errors import TraceError
from fastcache.traces.runs import MAX_EXPERTS, MAX_LAYERS, Runs, short
from fastcache.traces.spool import Path_
from fastcache.traces.trace import BLOCK, DECODE, PREFILL, Trace

_FACTS = ("n_expert", "n_expert_used", "n_layer")
_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes")
_NEEDED = ("phase", "step", "layer", "expert")
_MOST = {"phase": 1, "residency": 2}  # 0: a miss, 1: a hit, 2: the first use of what was read ahead
_DIGITS = 15  # of a number, at most


def read_route_csv(path: Path_) -> Trace:
    """Read BigMoeOnEdge's `route_trace v1`: comment lines, then one line per (step, layer, slot).

    Phase 0 is the prompt, whose steps a layer serves together; phase 1 is decoding, step by step. Columns are known by
    the names in the line before the first row; those that are not read are held against what they may be.

    Raises
    ------
    TraceError
        The header lacks n_expert or the layers, or a line is not what its columns are.
    """
    with open(path, "rb") as file:
        facts, sizes, number, line = _header(file, path)
        experts, top_k, n_layer = (_count(facts.get(name, "0").encode()) for name in _FACTS)
        layers = [layer for layer, size in sizes.items() if size > 0] or list(range(min(n_layer or 0, MAX_LAYERS + 1)))
        known = experts and experts <= MAX_EXPERTS and 0 < len(layers) <= MAX_LAYERS
        if not known or top_k is None or top_k > (experts or 0):
            told = ", ".join(f"{name}={facts.get(name)}" for name in _FACTS)
            raise TraceError(f"the header does not give n_layer and n_expert of a model: {told}", filename=path)
        with Runs(path, "line", dict.fromkeys(sorted(layers), experts or 0)) as runs:
            columns = _Columns(_COLUMNS, sizes)
            if b"phase" in line:
                columns = _Columns(_names(line, runs, number), sizes)
                line, number = file.readline(), number + 1
            last = None
            rows: list[tuple[int, ...]] = []
            while line:
                if text := line.strip():
                    try:
                        row = columns.row(text)
                    except ValueError as error:
                        raise runs.refuse(number, f"not {','.join(columns.names)}: {error}: {short(text)}") from None
                    now = (row.get("turn", 0), row["phase"], row["step"] if row["phase"] else -1)
                    if now != last or len(rows) >= BLOCK // 8:
                        _flush(runs, rows)
                        if now != last:
                            runs.cut()
                        last = now
                    phase = DECODE if row["phase"] else PREFILL
                    rows.append((row["layer"], row["expert"], number, phase, row["step"]))
                line, number = file.readline(), number + 1
            _flush(runs, rows)
            model = Path(facts.get("model", str(path))).name
            nbytes = [sizes[layer] for layer in sorted(layers)] if sizes else None
            return runs.finish(model, top_k or None, nbytes)


def _header(file: Any, path: Path_) -> tuple[dict[str, str], dict[int, int], int, bytes]:
    """Return (facts, bytes of an expert by layer, number of the first line after the comments, that line)."""
    facts: dict[str, str] = {}
    sizes: dict[int, int] = {}
    number, line = 1, file.readline()
    if line.split() != [b"#", b"route_trace", b"v1"]:
        raise TraceError(f"does not start with '# route_trace v1': {short(line)}", filename=path, record=1, unit="line")
    while line.startswith(b"#"):
        words = dict(word.split("=", 1) for word in line.decode("utf-8", "replace").split() if "=" in word)
        if "layer" in words and "expert_bytes" in words:
            layer, size = (_count(words[name].encode()) for name in ("layer", "expert_bytes"))
            if layer is None or size is None or layer >= MAX_LAYERS:
                raise TraceError(f"no layer and its bytes: {short(line)}", filename=path, record=number, unit="line")
            if layer in sizes:
                raise TraceError(f"layer {layer} is there twice", filename=path, record=number, unit="line")
            sizes[layer] = size
        else:
            facts |= words
        number, line = number + 1, file.readline()
    return facts, sizes, number, line


class _Columns:
    """The columns of a file; there may be more than are known here, and fewer."""

    def __init__(self, names: tuple[str, ...], sizes: dict[int, int]) -> None:
        self.names, self._sizes = names, sizes
        self._known = [(name, names.index(name)) for name in _COLUMNS if name in names and name != "weight"]
        self._weight = names.index("weight") if "weight" in names else None

    def row(self, text: bytes) -> dict[str, int]:
        """Return the numbers of a line by name. Raises ValueError, which says what is none."""
        fields = text.split(b",")
        if len(fields) != len(self.names):
            raise ValueError(f"{len(fields)} fields, not {len(self.names)}")
        row = {}
        for name, at in self._known:
            value = _count(fields[at])
            if value is None:
                raise ValueError(f"{name} is {short(fields[at])}")
            row[name] = value
        for name, most in _MOST.items():
            if row.get(name, 0) > most:
                raise ValueError(f"{name} is {row[name]}")
        if self._weight is not None:
            _check_weight(fields[self._weight])
        nbytes, layer = row.get("expert_bytes", 0), row["layer"]
        if nbytes and nbytes != self._sizes.get(layer, nbytes):  # 0: nothing was read for it
            raise ValueError(f"expert_bytes is {nbytes}: the header gives layer {layer} {self._sizes[layer]}")
        return row


def _names(line: bytes, runs: Runs, number: int) -> tuple[str, ...]:
    names = tuple(line.strip().decode("utf-8", "replace").split(","))
    for name in _NEEDED:
        if name not in names:
            raise runs.refuse(number, f"the columns have no {name}: {short(line)}")
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise runs.refuse(number, f"the columns have {name} twice: {short(line)}")
    return names


def _check_weight(field: bytes) -> None:
    """Refuse what is no weight; one that the engine does not know is nan."""
    try:
        wrong = math.isinf(float(field))
    except ValueError:
        wrong = True
    if wrong:
        raise ValueError(f"weight is {short(field)}")


def _count(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) <= _DIGITS else None


def _flush(runs: Runs, rows: list[tuple[int, ...]]) -> None:
    if rows:
        layer, expert, number, phase, token = np.asarray(rows, np.int64).T
        runs.add(layer, expert, number, phase=phase, token=token)
        rows.clear()
