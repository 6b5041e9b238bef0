"""fastcache's own trace format: a JSON header, then records of 8 bytes. docs/traces.md describes it.

Owns the bytes: header, record layout, reader, writer. Events (kinds from FIRST_EVENT on) belong to the recorder; all
but PHASE are skipped here. Imports errors, outputs and NumPy.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from fastcache.errors import TraceError
from fastcache.outputs import whole_file
from fastcache.traces.columns import Batches
from fastcache.traces.missing import missing
from fastcache.traces.spool import regular, stem
from fastcache.traces.trace import BLOCK, DECODE, Array, Trace

MAGIC = b"FCTRACE1"
RECORD = np.dtype([("kind", "u1"), ("flags", "u1"), ("aux", "<u2"), ("value", "<i4")])
TOKEN, BATCH, REQUEST, SINGLE, FIRST_EVENT, PHASE = 1, 2, 3, 4, 16, 30  # values of `kind`
DEMAND, GUESS, PIN, WARM = 0, 1, 2, 3  # flags of a BATCH
HIT, JOIN, MISS, DECLINED, NOT_KNOWN = 0, 1, 2, 4, 255  # flags of a REQUEST; 3: found no room
_START = struct.Struct("<8sII")
_MAX_HEADER = 64 << 20  # bytes
_MAX_POOL = 1 << 26  # experts: as many as importers can meet (runs.py), and what replays take memory for


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the records; the fields are those of Trace."""

    model: str
    layers: tuple[tuple[int, int], ...]
    top_k: int | None = None
    fingerprint: str = ""
    expert_nbytes: int | tuple[int, ...] | None = None
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pool(self) -> int:
        """How many experts there are; keys are below it."""
        return sum(count for _, count in self.layers)


def pack_header(header: Header) -> bytes:
    """Return everything that stands before the first record; its length is a multiple of 8."""
    text = json.dumps(
        {
            "model": header.model,
            "fingerprint": header.fingerprint,
            "layers": [list(layer) for layer in header.layers],
            "top_k": header.top_k,
            "expert_nbytes": header.expert_nbytes,
            "run": dict(header.run),
        }
    ).encode()
    text += b" " * (-len(text) % RECORD.itemsize)
    return _START.pack(MAGIC, len(text), RECORD.itemsize) + text


def read_header(file: BinaryIO, filename: object) -> tuple[Header, int]:
    """Return the header of a file open at its start, and the offset of its first record.

    Raises
    ------
    TraceError
        It is not a trace of this format, or its header cannot be one.
    """
    start = file.read(_START.size)
    if len(start) < _START.size or not start.startswith(MAGIC):
        raise TraceError(f"does not start with {MAGIC.decode()}", filename=filename)
    _, length, size = _START.unpack(start)
    if size != RECORD.itemsize:
        raise TraceError(f"records of {size} bytes; this version reads {RECORD.itemsize}", filename=filename)
    if length % RECORD.itemsize or length > _MAX_HEADER:
        raise TraceError(f"a header of {length} bytes: not a multiple of 8 up to {_MAX_HEADER}", filename=filename)
    text = file.read(length)
    if len(text) < length:
        raise TraceError(f"the file ends {length - len(text)} bytes before its header does", filename=filename)
    try:
        fields = json.loads(text)
        return _header(fields), _START.size + length
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"the header is not usable: {error!r}", filename=filename) from None


def _header(fields: Any) -> Header:
    """Return the header that JSON says. Raises KeyError, TypeError or ValueError."""
    layers = tuple((_whole(number, 0), _whole(count, 1)) for number, count in fields["layers"])
    if any(a[0] >= b[0] for a, b in itertools.pairwise(layers)):
        raise ValueError("layers do not ascend")
    pool = sum(count for _, count in layers)
    if pool > _MAX_POOL:
        raise ValueError(f"{pool} experts")
    top_k, nbytes = fields.get("top_k"), fields.get("expert_nbytes")
    most = max((count for _, count in layers), default=0)
    if top_k is not None and layers and _whole(top_k, 1) > most:
        raise ValueError(f"top_k is {top_k}, and no layer has more than {most} experts")
    if isinstance(nbytes, list):
        if len(nbytes) not in (len(layers), pool):
            raise ValueError(f"{len(nbytes)} sizes for {len(layers)} layers of {pool} experts")
        nbytes = tuple(_whole(size, 0) for size in nbytes)
    elif nbytes is not None:
        nbytes = _whole(nbytes, 0)
    return Header(
        model=str(fields.get("model", "")),
        layers=layers,
        top_k=None if top_k is None else _whole(top_k, 1),
        fingerprint=str(fields.get("fingerprint", "")),
        expert_nbytes=nbytes,
        run=dict(fields.get("run", {})),
    )


def _whole(value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ValueError(f"{value!r} is not a whole number of at least {least}")
    return value


def open_records(path: str | os.PathLike[str]) -> tuple[Header, Array]:
    """Return (header, all records, mapped read-only: RECORD array [n], events included). Their values are not checked.

    Raises
    ------
    TraceError
        As read_header, or the file ends inside a record; as regular(), where it is no file.
    OSError
        The file cannot be read.
    """
    with regular(path) as again, open(again, "rb") as file:
        header, start = read_header(file, path)
        count, rest = divmod(os.fstat(file.fileno()).st_size - start, RECORD.itemsize)
        if rest:
            raise TraceError(f"the file ends after {rest} of its {RECORD.itemsize} bytes", filename=path, record=count)
        if count == 0:
            return header, np.zeros(0, RECORD)
        return header, np.memmap(file, RECORD, "r", offset=start, shape=(count,))


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a file of our format: the demands, as a Trace. Guesses, pins and events are checked and left out.

    Memory does not grow with the file. Raises as open_records, and TraceError for a record that cannot be.
    """
    header, records = open_records(path)
    run = {**header.run, **missing(header.run, records)}
    with Batches() as out:
        reader = _Reader(path, header.pool, out)
        for start in range(0, len(records), BLOCK):
            reader.take(np.asarray(records[start : start + BLOCK]), start)
        if run.get("complete", True):  # what ends anywhere may end inside a batch, which is left out
            reader.end()
        columns = out.finish()
    nbytes = header.expert_nbytes
    return Trace(
        name=header.model or stem(path),
        layers=header.layers,
        top_k=header.top_k,
        fingerprint=header.fingerprint,
        expert_nbytes=np.asarray(nbytes, np.int64) if isinstance(nbytes, tuple) else nbytes,
        run=run,
        **columns,
    )


def unfold(records: Array, at: Array) -> tuple[Array, Array]:
    """Return records [n], and their numbers [n], with each SINGLE as the BATCH and the REQUEST that it stands for."""
    single = records["kind"] == SINGLE
    if not single.any():
        return records, at
    copies = 1 + single.astype(np.int64)
    request = np.cumsum(copies)[single] - 1
    records, at = np.repeat(records, copies), np.repeat(at, copies)
    records["kind"][request], records["flags"][request] = REQUEST, HIT
    records[request - 1] = (BATCH, DEMAND, 0, 1)
    return records, at


class _Reader:
    """Takes records block by block; a batch that a block cuts waits for the next. It is never larger than the pool."""

    def __init__(self, path: str | os.PathLike[str], pool: int, out: Batches) -> None:
        self.path, self.pool, self.out = path, pool, out
        self.token = -1
        self.phases, self.phases_at = np.zeros(1, np.uint16), np.full(1, -1)  # and which record says so
        self.rest, self.rest_at = np.zeros(0, RECORD), np.zeros(0, np.int64)

    def refuse(self, wrong: Array, at: Array, message: str, values: Array | None = None) -> None:
        """Raise for the first record of `at` that `wrong` marks."""
        if wrong.any():
            i = int(np.argmax(wrong))
            text = message if values is None else message.format(values[i])
            raise TraceError(text, filename=self.path, record=int(at[i]))

    def take(self, block: Array, start: int) -> None:
        said = np.flatnonzero((block["kind"] == TOKEN) | (block["kind"] == PHASE))
        self.phases = np.concatenate([self.phases, block["aux"][said]])
        self.phases_at = np.concatenate([self.phases_at, said + start])
        self.refuse(self.phases > DECODE, self.phases_at, "phase {} is not known", self.phases)
        at = np.flatnonzero(block["kind"] < FIRST_EVENT)
        single = block["kind"] == SINGLE
        every = np.arange(start, start + len(block))
        self.refuse(single & (block["flags"] != HIT), every, "flags {} of a single are not known", block["flags"])
        records, at = unfold(block[at], at + start)
        records, at = np.concatenate([self.rest, records]), np.concatenate([self.rest_at, at])
        kind, value, flags = records["kind"], records["value"], records["flags"]
        self.refuse((kind < TOKEN) | (kind > REQUEST), at, "kind {} is not known", kind)
        self.refuse(
            (kind == REQUEST) & (flags > DECLINED) & (flags != NOT_KNOWN),
            at,
            "flags {} of a request are not known",
            flags,
        )
        opening = np.flatnonzero(kind != REQUEST)
        is_batch = kind[opening] == BATCH
        wrong = is_batch & ((value[opening] < 1) | (value[opening] > self.pool))
        self.refuse(wrong, at[opening], f"a batch of {{}} keys, of {self.pool}", value[opening])
        self.refuse(is_batch & (flags[opening] > WARM), at[opening], "a batch of mode {}", flags[opening])
        # What follows an opening record: as many requests as a batch says, none after a token.
        due = np.where(is_batch, value[opening], 0).astype(np.int64)
        follow = np.diff(opening, append=len(records)) - 1
        if len(records) and (len(opening) == 0 or opening[0] > 0):
            raise TraceError("a request outside a batch", filename=self.path, record=int(at[0]))
        self.refuse(follow > due, at[np.minimum(opening + due + 1, max(len(at) - 1, 0))], "a request outside a batch")
        short = follow < due
        if short[:-1].any():
            i = int(np.argmax(short))
            raise self.cut_short(int(due[i]), int(follow[i]), int(at[opening[i]]))
        end = len(records)
        if len(short) and short[-1]:
            end = int(opening[-1])
            opening, is_batch, due = opening[:-1], is_batch[:-1], due[:-1]
        self.rest, self.rest_at = records[end:].copy(), at[end:]
        self.emit(records[:end], at[:end], opening, is_batch, due)

    def cut_short(self, due: int, got: int, record: int) -> TraceError:
        return TraceError(f"the batch has {due} keys, but {got} follow", filename=self.path, record=record)

    def emit(self, records: Array, at: Array, opening: Array, is_batch: Array, due: Array) -> None:
        """Write down whole batches."""
        edges = opening[is_batch]
        asked, sizes = records["kind"] == REQUEST, due[is_batch]
        keys, where = records["value"][asked], at[asked]
        self.refuse((keys < 0) | (keys >= self.pool), where, f"key {{}} is not below {self.pool}", keys)
        owner = np.repeat(np.arange(len(edges)), sizes)
        order = np.lexsort((keys, owner))
        same = np.zeros(len(keys), bool)
        same[order[1:]] = (np.diff(keys[order]) == 0) & (np.diff(owner[order]) == 0)
        self.refuse(same, where, "key {} is twice in its batch", keys)
        # Which token each batch belongs to, and which phase: what the last record before it says.
        tokens = opening[~is_batch]
        numbers = np.concatenate([[self.token], records["value"][tokens].astype(np.int64)])
        self.token = int(numbers[-1])
        mine = np.searchsorted(tokens, edges)
        phase = np.searchsorted(self.phases_at, at[edges]) - 1
        demand = records["flags"][edges] == DEMAND
        self.out.append(
            keys[np.repeat(demand, sizes)], sizes[demand], self.phases[phase][demand], numbers[mine][demand]
        )
        kept = np.searchsorted(self.phases_at, self.rest_at[0]) - 1 if len(self.rest_at) else -1
        self.phases, self.phases_at = self.phases[kept:], self.phases_at[kept:]

    def end(self) -> None:
        """Nothing follows: refuse a batch that waits for more."""
        if len(self.rest):
            raise self.cut_short(int(self.rest["value"][0]), len(self.rest) - 1, int(self.rest_at[0]))


def write_trace(trace: Trace, path: str | os.PathLike[str], run: Mapping[str, Any] | None = None) -> None:
    """Write a trace in our format, whole or not at all; what each request was live is marked "not known".

    Parameters
    ----------
    run : mapping, optional
        What to say about the run, as JSON; default: what the trace says.

    Raises
    ------
    OSError
    ValueError
        A token index does not fit into 32 bits.
    """
    nbytes = trace.expert_nbytes
    header = Header(
        model=trace.name,
        layers=trace.layers,
        top_k=trace.top_k,
        fingerprint=trace.fingerprint,
        expert_nbytes=tuple(nbytes.tolist()) if isinstance(nbytes, np.ndarray) else nbytes,
        run=trace.run if run is None else run,
    )
    step = BLOCK // 4
    now = np.asarray([0, -1])
    with whole_file(path) as file:
        file.write(pack_header(header))
        for i in range(0, len(trace.phase), step):
            edges = np.asarray(trace.batches[i : i + step + 1])
            about = np.stack([trace.phase[i : i + step], trace.token[i : i + step]], axis=1).astype(np.int64)
            if np.abs(about).max() >= 2**31:
                raise ValueError(f"a token index of {np.abs(about).max()} does not fit into the format's 32 bits")
            changed = (about != np.concatenate([now[None], about[:-1]])).any(axis=1)
            now = about[-1]
            sizes = np.diff(edges)
            batch_at = np.cumsum(sizes + 1 + changed) - sizes - 1
            out = np.zeros(int(sizes.sum() + len(sizes) + changed.sum()), RECORD)
            out["kind"], out["flags"] = REQUEST, NOT_KNOWN
            token_at = batch_at[changed] - 1
            out["kind"][batch_at], out["flags"][batch_at], out["value"][batch_at] = BATCH, DEMAND, sizes
            out["kind"][token_at], out["flags"][token_at] = TOKEN, 0
            out["aux"][token_at], out["value"][token_at] = about[changed, 0], about[changed, 1]
            out["value"][out["kind"] == REQUEST] = trace.keys[edges[0] : edges[-1]]
            file.write(out.data)
