"""The sidecar: a checksum of every expert, kept beside a checkpoint. Its format, and whether it is of these files.

Knows no store. Imports errors, fingerprint, inventory, outputs, placement and the CRC of the compiled half.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcache.errors import CheckpointMismatch, SidecarError, SidecarNotFound
from fastcache.fingerprint import fingerprint
from fastcache.inventory import Inventory
from fastcache.outputs import is_ordinary, refuse_other_kind, whole_file
from fastcache.placement import Placement
from fastcache_ext.crc import crc32c

Array = np.ndarray[Any, np.dtype[Any]]
SUFFIX = ".checksums"
FORMAT, VERSION, ALGORITHM = "fastcache.checksums", 1, "crc32c"
SAMPLES, SAMPLE_BYTES = 16, 64  # places of a file that tell it from another saved alike, and their size
SCAN = "\0scan"  # verify= of a store that is to write down what comes; no path is this
_HEAD = re.compile(rb'\s*\{\s*"format"\s*:\s*"' + re.escape(FORMAT.encode()) + b'"')  # damaged ones too
_HINT = "make one with `fastcache checksum`"


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What `fastcache checksum` found out."""

    fingerprint: str  # of names, sizes and places: see fastcache.fingerprint
    files: list[dict[str, Any]]  # name, bytes, sample: CRC-32C of 16 short places
    layers: list[tuple[int, int]]  # (layer number, experts)
    sums: Array  # uint32 [K]: CRC-32C of an expert's payload in layout order; 0 where there is no expert


@dataclass(frozen=True, slots=True)
class Checks:
    """What a store holds arrivals to."""

    requested: str | None
    path: str | None  # of the sidecar; None: nothing is checked
    sums: Array | None  # uint32 [K]; None with SCAN: what comes is written down
    why: str = ""


def sidecar_path(inventory: Inventory) -> str:
    """Return where a checkpoint's sidecar lies: beside its first file, whose name it bears with ".checksums" added.

    Raises
    ------
    SidecarError
        The source's bytes are in no file.
    """
    if inventory.by_hand or not inventory.paths or inventory.paths[0] is None:
        raise SidecarError("checksums are of files, and this source's bytes are in none: it must check them itself")
    return inventory.paths[0] + SUFFIX


def describe_files(inventory: Inventory) -> list[dict[str, Any]]:
    """Return name, bytes and sample of each file, read now. The sample is the CRC-32C of 16 places of 64 bytes."""
    return [_describe_file(path) for path in inventory.paths if path is not None]


def _describe_file(path: str) -> dict[str, Any]:
    with open(path, "rb", buffering=0) as file:
        size, sample = os.fstat(file.fileno()).st_size, 0
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for i in range(SAMPLES):
            at = max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1)
            sample = crc32c(os.pread(file.fileno(), SAMPLE_BYTES, at), sample)
    return {"name": os.path.basename(path), "bytes": size, "sample": f"{sample:08x}"}


def write_sidecar(path: str, sidecar: Sidecar, *, overwrite: bool) -> None:
    """Write a sidecar whole or not at all.

    Raises
    ------
    FileExistsError
        As `check_place`.
    OSError
        It cannot be written there.
    """
    ends = np.cumsum([count for _, count in sidecar.layers])
    pieces = np.split(sidecar.sums, ends[:-1])
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "algorithm": ALGORITHM,
        "fingerprint": sidecar.fingerprint,
        "files": sidecar.files,
        "layers": {
            str(layer): piece.astype(">u4").tobytes().hex()
            for (layer, _), piece in zip(sidecar.layers, pieces, strict=True)
        },
    }
    body["check"] = _check(body)
    check_place(path, overwrite=overwrite)
    with whole_file(path, replace=overwrite) as file:
        file.write(json.dumps(body, indent=1).encode() + b"\n")


def check_place(path: str, *, overwrite: bool) -> None:
    """Look at what is there already.

    Raises
    ------
    FileExistsError
        It is a sidecar, and `overwrite` is not set: whoever makes it anew takes the bytes of today for the right ones.
        Or it is anything else.
    """
    if not os.path.lexists(path):
        return
    if os.path.exists(path) and not is_ordinary(path):
        raise FileExistsError(f"{path}: is no ordinary file, and no sidecar is written there")
    refuse_other_kind(path, lambda head: _HEAD.match(head) is not None, "sidecar of checksums")
    if not overwrite:
        raise FileExistsError(
            f"{path}: there is a sidecar already; verify against it, or replace it (--overwrite, overwrite=True)"
        )


def read_sidecar(path: str) -> Sidecar:
    """Read a sidecar.

    Raises
    ------
    SidecarNotFound
        There is none.
    SidecarError
        It is damaged, a directory, or of a version or an algorithm that this program does not know.
    """
    try:
        with open(path, "rb") as file:
            body = json.loads(file.read())
    except FileNotFoundError:
        raise SidecarNotFound(f"{path}: there is no sidecar of checksums; {_HINT}") from None
    except IsADirectoryError:
        raise SidecarError(f"{path}: a directory, not a sidecar of checksums; {_HINT}") from None
    except (ValueError, RecursionError) as error:
        raise SidecarError(f"{path}: no sidecar, or a damaged one: not JSON ({error}); {_HINT}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise SidecarError(f"{path}: not a sidecar of checksums; {_HINT}")
    if body.get("version") != VERSION or body.get("algorithm") != ALGORITHM:
        raise SidecarError(
            f"{path}: version {body.get('version')!r} with {body.get('algorithm')!r}; this program knows version "
            f"{VERSION} with {ALGORITHM!r}: {_HINT}"
        )
    check = body.pop("check", None)
    try:
        if check != _check(body):
            raise SidecarError(f"{path}: damaged: its own checksum does not fit; {_HINT}")
        pieces = [np.frombuffer(bytes.fromhex(text), ">u4") for text in body["layers"].values()]
        layers = [(int(layer), len(piece)) for layer, piece in zip(body["layers"], pieces, strict=True)]
        sums = np.concatenate([np.zeros(0, ">u4"), *pieces]).astype(np.uint32)
        files = [{"name": str(f["name"]), "bytes": int(f["bytes"]), "sample": str(f["sample"])} for f in body["files"]]
        return Sidecar(str(body["fingerprint"]), files, layers, sums)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SidecarError(f"{path}: damaged: {error!r}; {_HINT}") from None


def _check(body: dict[str, Any]) -> str:
    return f"{crc32c(json.dumps(body, sort_keys=True, separators=(',', ':')).encode()):08x}"


def misfit(sidecar: Sidecar, inventory: Inventory, sizes: Sequence[int]) -> str | None:
    """Say how a sidecar's files are not these by name, size and header; None if they are. `changed()` looks inside."""
    names = [os.path.basename(path or "") for path in inventory.paths]
    known = [file["name"] for file in sidecar.files]
    if known != names:
        other = next((a for a in known if a not in names), known[0] if known else "nothing")
        return f"it was made of {len(known)} files with {other} among them, and these are {len(names)}: {names[0]}, ..."
    for file, size in zip(sidecar.files, sizes, strict=True):
        if file["bytes"] != size:
            return f"{file['name']} had {file['bytes']} bytes when it was checksummed, and has {size} now"
    if sidecar.fingerprint != fingerprint(inventory, sizes) or sidecar.layers != inventory.layers:
        return "the tensors lie at other places than when they were checksummed"
    return None


def changed(sidecar: Sidecar, files: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of files that differ where they were sampled: other contents saved alike, or damage."""
    return [was["name"] for was, now in zip(sidecar.files, files, strict=True) if was["sample"] != now["sample"]]


def checks(verify: str | None, inventory: Inventory, sizes: Sequence[int]) -> Checks:
    """Return what a store opened with `verify` is to hold arrivals to.

    Raises
    ------
    SidecarNotFound, SidecarError
        There is no sidecar, or it cannot be used, or the source's bytes are in no file.
    CheckpointMismatch
        The sidecar is of other files, or these have changed since.
    """
    if verify is None:
        return Checks(None, None, None, "bytes are taken as they come")
    beside = sidecar_path(inventory)
    if verify == SCAN:
        return Checks(verify, "", None)
    path = beside if verify == "sidecar" else verify
    sidecar = read_sidecar(path)
    why = misfit(sidecar, inventory, sizes)
    if why is None and (others := changed(sidecar, describe_files(inventory))):
        why = f"other contents than were checksummed, in {', '.join(others[:3])}: `fastcache verify` tells more"
    if why is not None:
        raise CheckpointMismatch(f"{path}: not of this checkpoint, or older than it: {why}")
    return Checks(verify, path, sidecar.sums)


def native(wanted: Checks, inventory: Inventory, placement: Placement) -> tuple[Any, Any, Any, Any] | None:
    """Return what the compiled half takes as `sums`; None: nothing is checked."""
    if wanted.path is None:
        return None
    width = placement.tensors.shape[1]
    nbytes = np.zeros((len(inventory.records), width), np.int64)
    for i, record in enumerate(inventory.records):
        nbytes[i, : len(record.tensors)] = [tensor.nbytes for tensor in record.tensors]
    places = np.ascontiguousarray(placement.tensors, np.int64)
    sums = None if wanted.sums is None else np.ascontiguousarray(wanted.sums, np.uint32)
    return places, nbytes, np.ascontiguousarray(inventory.record_of, np.uint16), sums
