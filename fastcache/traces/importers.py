"""Traces of other programs, and which of the formats a file is in. docs/traces.md describes them.

One function per format: path -> Trace. Imports errors and NumPy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from fastcache.errors import TraceError
from fastcache.traces.format import MAGIC, read_trace
from fastcache.traces.route_csv import read_route_csv
from fastcache.traces.runs import MAX_EXPERTS, MAX_LAYERS, Runs, short
from fastcache.traces.spool import Path_, regular, stem
from fastcache.traces.trace import BLOCK, DECODE, PREFILL, UNKNOWN, Array, Trace


def read_pairs(path: Path_) -> Trace:
    """Read kimi-k3-in-c's expert trace: little-endian int32 pairs (layer, expert), no header.

    Raises
    ------
    TraceError
        The file is not whole pairs, a pair cannot be one, or they look like pairs of int64.
    """
    size = os.stat(path).st_size
    if size % 8:
        raise TraceError(f"the file ends after {size % 8} of its 8 bytes", filename=path, record=size // 8)
    pairs = np.memmap(os.fspath(path), "<i4", "r").reshape(-1, 2) if size else np.zeros((0, 2), np.int32)
    with Runs(path) as runs:
        for start in range(0, len(pairs), BLOCK):
            block = pairs[start : start + BLOCK]
            if start == 0 and _of_int64(block):
                raise TraceError(
                    "every second int32 is 0, as in pairs of int64: write int32, as numpy.astype('<i4').tofile does",
                    filename=path,
                )
            runs.add(block[:, 0], block[:, 1], start + np.arange(len(block)))
        return runs.finish(stem(path), None)


def _of_int64(block: Array) -> bool:
    """Whether int32 pairs are halves of int64: of small numbers, every second half is 0.

    Of int32 pairs that would be a trace in which every layer asks for its expert 0 alone, time and again: no router's.
    """
    return len(block) >= 4 and len(block) % 2 == 0 and not block[:, 1].any() and bool(block[:, 0].any())


def read_routed_experts(path: Path_) -> Trace:
    """Read vLLM's `routed_experts` saved by numpy.save: integers [tokens, layers, top_k].

    Each token is taken as a step of its own: the array does not say which tokens were served together. A layer of
    which every entry is 0 is one without experts (older versions number all layers).

    Raises
    ------
    TraceError
        It is no such array, or a token has the same expert twice, or a number that cannot be an expert's.
    """
    try:
        array = np.load(os.fspath(path), mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        # NumPy takes what it does not know for a pickle, and says how to load that.
        why = "it starts like none" if "pickle" in str(error) else error
        raise TraceError(f"not an array of numpy.save: {why}", filename=path) from None
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.dtype.kind not in "iu":
        what = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TraceError(f"wants integers [tokens, layers, top_k], has {what}", filename=path)
    tokens, layers, top_k = array.shape
    step = max(1, BLOCK // max(1, layers * top_k))
    blocks = range(0, tokens, step)
    routed = np.zeros(layers, bool)
    for start in blocks:
        routed |= (np.asarray(array[start : start + step]) != 0).any(axis=(0, 2))
    if top_k == 1:
        routed[:] = True
    numbers = np.flatnonzero(routed)
    with Runs(path, "token") as runs:
        for start in blocks:
            block = np.asarray(array[start : start + step], np.int64)[:, numbers]
            ordered = np.sort(block, axis=2)
            twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
            if twice.any():
                token, layer = np.argwhere(twice)[0].tolist()
                raise runs.refuse(start + token, f"layer {numbers[layer]} has an expert twice: {block[token, layer]}")
            token = np.repeat(start + np.arange(len(block)), len(numbers) * top_k)
            layer = np.tile(np.repeat(numbers, top_k), len(block))
            if len(numbers) == 1:  # nothing but the token ends a batch
                for i, row in enumerate(block):
                    runs.cut()
                    runs.add(numbers[0], row[0], start + i, token=start + i)
            else:
                runs.add(layer, block.ravel(), token, token=token)
        return runs.finish(stem(path), top_k)


def read_megatron(path: Path_) -> Trace:
    """Read a router trace of Megatron Core (`--moe-routing-trace-path`): one line per step and layer of one rank.

    A line is one batch: the distinct experts of its `top_indices`, [num_tokens][topk]. Lines of the multi-token
    prediction block (`mtp_idx`) number their layers by themselves and are left out.

    Raises
    ------
    TraceError
        A line is not such an object.
    """
    top_k = None
    with Runs(path, "line") as runs:
        for number, line in _objects(path):
            try:
                layer, step, indices = _count(line["layer"]), _count(line["step"]), line["top_indices"]
                experts = np.asarray(indices if indices else np.zeros((0, 1)), np.int64)
                if experts.ndim != 2 or ("topk" in line and len(experts) and experts.shape[1] != line["topk"]):
                    raise ValueError("top_indices is not [num_tokens][topk]")
                if any(type(expert) is not int for row in indices for expert in row):
                    raise ValueError("top_indices holds what is not an integer")
                if "num_tokens" in line and line["num_tokens"] != len(experts):
                    raise ValueError(f"num_tokens is {line['num_tokens']}, top_indices has {len(experts)}")
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise runs.refuse(number, f"not a record of a router trace: {_reason(error)}") from None
            if "mtp_idx" in line or line.get("block", "decoder") != "decoder":
                continue
            runs.cut()
            runs.add(layer, experts.ravel(), number, phase=UNKNOWN, token=step)
            top_k = max(top_k or 0, experts.shape[1]) if len(experts) else top_k
        return runs.finish(stem(path), top_k)


def read_jsonl(path: Path_) -> Trace:
    """Read lines of `{"layer": 3, "token": 17, "experts": [5, 1]}`; `phase`, "prefill" or "decode", may be there too.

    Lines of one layer that follow one another are one batch where they are of the same token, where all say phase
    "prefill", and where none has a token; a change of phase ends a batch always.

    Raises
    ------
    TraceError
        A line is not such an object.
    """
    widths: set[int] = set()
    last = None
    with Runs(path, "line") as runs:
        for number, line in _objects(path):
            try:
                layer, token = _count(line["layer"]), _count(line["token"]) if "token" in line else -1
                experts = [_count(expert) for expert in line["experts"]]
                phase = {None: UNKNOWN, "prefill": PREFILL, "decode": DECODE}[line.get("phase")]
            except (KeyError, TypeError, ValueError) as error:
                raise runs.refuse(
                    number, f'not {{"layer": .., "token": .., "experts": [..]}}: {_reason(error)}'
                ) from None
            now = phase, -1 if phase == PREFILL else token
            if now != last:
                runs.cut()
                last = now
            runs.add(layer, np.asarray(experts, np.int64), number, phase=phase, token=token)
            widths.add(len(experts))
        return runs.finish(stem(path), widths.pop() if len(widths) == 1 else None)


def _objects(path: Path_) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line that is not blank."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = next(key for key in fields if sum(key == name for name, _ in pairs) > 1)
            raise ValueError(f"{twice!r} is there twice")
        return fields

    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line, parse_constant=refuse, object_pairs_hook=once)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"not JSON: {error}", filename=path, record=number, unit="line") from None
            if not isinstance(value, dict):
                raise TraceError(f"not an object: {short(line)}", filename=path, record=number, unit="line")
            yield number, value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _reason(error: Exception) -> str:
    return f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)


FORMATS: dict[str, Callable[[Path_], Trace]] = {
    "fastcache": read_trace,
    "kimi-k3": read_pairs,
    "route-csv": read_route_csv,
    "vllm": read_routed_experts,
    "megatron": read_megatron,
    "jsonl": read_jsonl,
}


def detect(path: Path_) -> str:
    """Return the name in FORMATS of the format that a file's first bytes show.

    Raises
    ------
    TraceError
        They show none.
    """
    with open(path, "rb") as file:
        head = file.read(4096)
        if head.startswith(MAGIC):
            return "fastcache"
        if head.startswith(b"\x93NUMPY"):
            return "vllm"
        if head.startswith(b"#") and b"route_trace" in head.split(b"\n", 1)[0]:
            return "route-csv"
        if head.lstrip().startswith(b"{"):
            file.seek(0)
            line = next((line for line in file if line.strip()), b"")
            return "megatron" if b'"top_indices"' in line else "jsonl"
        size = os.fstat(file.fileno()).st_size
    pairs = np.frombuffer(head, "<i4", len(head) // 8 * 2).reshape(-1, 2)
    wrong = np.flatnonzero(((pairs < 0) | (pairs >= (MAX_LAYERS, MAX_EXPERTS))).any(axis=1))
    if len(pairs) and (not len(wrong) or _of_int64(pairs)):
        return "kimi-k3"
    names = f"name it with --format: {', '.join(FORMATS)}"
    if not size:
        raise TraceError("an empty file", filename=path)
    if size % 8 == 0:  # nothing but pairs has no start of its own: say which of them is none
        layer, expert = pairs[wrong[0]].tolist()
        raise TraceError(
            f"layer {layer}, expert {expert}: no model has one. It is a pair of int32, if this is a trace of kimi-k3, "
            f"and no other format starts like this file; {names}",
            filename=path,
            record=int(wrong[0]),
        )
    raise TraceError(f"not a trace of a known format; {names}", filename=path)


def read(path: Path_, format: str | None = None) -> Trace:
    """Read a trace in any of FORMATS; None: the one that its first bytes show.

    What comes through a pipe is kept in an unlinked file, under TMPDIR (else /var/tmp), while it is read.

    Raises
    ------
    TraceError
        A bad file, or record, by number; a device; a pipe from which more comes than there is room for.
    ValueError
        There is no such format.
    OSError
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"no trace format {format!r}; there are {', '.join(FORMATS)}")
    with regular(path) as again:
        return FORMATS[format or detect(again)](again)
