"""From a code of the compiled half to the error a user sees: what, where, what to do. Imports errors, keys, units."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

from fastcache import errors
from fastcache.keys import ExpertKey
from fastcache.units import format_bytes

# Codes below zero come from the calls, those from 1001 on from reads (fastcache_ext/ioqueue.pxd); else an errno.
FORKED, UNKNOWN, TIMEOUT, PINS = -1, -2, -3, -4
SHORT, CHANGED, CLOSED, CANCELLED, SOURCE, OVERFLOW, CHECKSUM = 1001, 1002, 1003, 1004, 1005, 1006, 1007


def failure(
    code: int,
    *,
    store: str,
    layers: Sequence[tuple[int, int]],
    layer: int | None,
    expert: int | None,
    path: str | None,
    offset: int,
    wanted: int,
    got: int,
    overflow_limit: int,
    holders: Sequence[tuple[int, int, int]],
    cause: BaseException | None,
) -> Exception:
    """Return the error for `code`; the rest says where it happened."""
    key = ExpertKey(layer, expert) if layer is not None and expert is not None else None
    what = f"layer {layer} expert {expert}"
    if code == FORKED:
        return errors.ForkedStore(f"store {store!r} was opened in another process: call store.reopen() in this one")
    if code == CLOSED:
        return errors.StoreClosed(f"store {store!r} is closed")
    if code == UNKNOWN:
        return errors.UnknownExpert(_unknown(dict(layers), layer, expert))
    if code == TIMEOUT:
        return errors.ReadTimeout(f"{what}: not landed in time; the read goes on, and a later acquire may find it")
    if code == PINS:
        return errors.BudgetTooSmall(
            f"pinning {wanted} more experts would leave no slot for the others ({got} unpinned): unpin some, or "
            "raise the budget"
            if key is None
            else f"{what}: no slot could be freed to pin it: everything is leased or pinned"
        )
    if code in (OVERFLOW, errno.ENOMEM):
        named = (
            ", ".join(f"layer {h[0]} expert {h[1]} ({format_bytes(h[2])})" for h in holders[:5])
            or "none that can be named"
        )
        refused = (
            f"pass-through buffers may hold no more than {format_bytes(overflow_limit)}"
            if code == OVERFLOW
            else "the system gives no memory for a pass-through buffer"
        )
        error = errors.OverflowLimit(
            f"{what}: no slot is free, and {refused}. Largest holders: {named}. Release leases and arrays "
            "sooner, or raise budget= or overflow="
        )
        error.holders = [(ExpertKey(h[0], h[1]), h[2]) for h in holders]
        return error
    where = f"{what}: {path or 'source'}"
    if code == CHANGED:
        return errors.CheckpointChanged(f"{where} changed after it was opened: open the checkpoint again")
    if code == SOURCE:
        failed = errors.ReadFailed(f"{what}: read_expert failed: {cause!r}", errno=errno.EIO, key=key)
        failed.__cause__ = cause
        return failed
    if code == CANCELLED:
        return errors.ReadFailed(f"{what}: the prefetch was cancelled", errno=errno.ECANCELED, key=key)
    kind: type[errors.ReadFailed] = errors.ReadFailed
    number = code
    if code == SHORT:
        kind, number = errors.ShortRead, errno.ENODATA
        why = f" ended early: wanted {wanted} bytes at offset {offset}, got {got}; it was cut after it was opened"
    elif code == CHECKSUM:
        kind, number = errors.ChecksumMismatch, errno.EBADMSG
        why = (
            f": the expert that begins there at offset {offset}, and may go on in other files, is not the one that was "
            f"checksummed: CRC-32C {got:08x}, and the sidecar has {wanted:08x}"
            + ("; `fastcache verify` names all that differ" if store else "")
        )
    else:
        why = f": reading {wanted} bytes at offset {offset} failed: {os.strerror(code)}"
    return kind(
        where + why,
        errno=number,
        filename=path,
        key=key,
        offset=offset,
        wanted=wanted,
        got=got,
    )


def batch_error(failed: Mapping[tuple[int, int], Exception]) -> errors.BatchFailed:
    """Return the one error of a batch, some of whose experts failed."""
    named = {ExpertKey(*key): error for key, error in failed.items()}
    kind: type[errors.BatchFailed] = errors.BatchFailed
    if all(isinstance(error, errors.BudgetTooSmall) for error in named.values()):
        kind = errors.PinsDoNotFit
    key, first = next(iter(named.items()))
    count = "1 expert" if len(named) == 1 else f"{len(named)} experts"
    return kind(f"{count} of the batch failed (see .failed); the first was {tuple(key)}: {first}", named)


def _unknown(layers: dict[int, int], layer: int | None, expert: int | None) -> str:
    if layer not in layers:
        known = sorted(layers)
        span = f"{known[0]} to {known[-1]}" if known else "none"
        return f"layer {layer} has no routed experts (a dense layer, or none at all); MoE layers: {span}"
    return f"layer {layer} has experts 0 to {layers[layer] - 1}; there is no expert {expert}"
