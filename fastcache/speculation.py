"""What a store says of its guesses: how many are let in, and why. Imports describe, devices, units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastcache import devices
from fastcache.describe import feature
from fastcache.units import exact

NOT_JUDGED = ("pin", "warm")
FEW = 32  # resolved guesses below which nothing is decided
STATES = ("full", "narrowed", "stopped")  # from good to bad
SAID = 3  # predictors that the reason speaks of; "predictors" has them all


def limit_guesses(store: Any, settings: Any, paths: Iterable[str | None], align: int) -> dict[str, str]:
    """Tell a store that was just opened how much guesses may ask of the device; return the devices' schedulers."""
    try:
        found = devices.schedulers(paths)
    except OSError:  # gone, or closed to us: the reads will say so
        found = {}
    depth = settings.io_threads if store.engine_used == "pread" else settings.queue_depth
    most = int(depth * exact(str(settings.guess_share)))
    store._limit_guesses(settings.guess_bytes or 0, most, align, devices.heeded(found))
    return found


def _why_priority(priority: str, found: Mapping[str, str]) -> str:
    named = ", ".join(f"{device}: {scheduler}" for device, scheduler in found.items()) or "no block device"
    if priority == "none":
        return f"no scheduler that heeds I/O priorities ({named})"
    limit = "" if priority.startswith("real") else "; the real-time class needs CAP_SYS_NICE or CAP_SYS_ADMIN"
    return f"the scheduler heeds I/O priorities ({named}){limit}"


def describe_speculation(requested: str, told: Mapping[str, Any], found: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry "speculation" of a description, from what was asked for and what the compiled half tells.

    "reason" tells of the worst three predictors, and how many more there are. "used" is "full", "narrowed" or
    "stopped": what the predictors that were heard of have in common, "narrowed" when they differ; or "off".
    "predictors" holds their counters; issued == used + late + wasted + cancelled + failed + unread + in_flight. "io"
    says what guesses may have at the device, and with which priority.
    """
    rows = {
        name: row
        for name, row in told["predictors"].items()
        if row["issued"] or row["declined"] or name not in ("caller", *NOT_JUDGED)
    }
    if requested in ("always", "off"):  # there is a verdict, and nobody heeds it
        rows = {name: {**row, "state": "full" if requested == "always" else "stopped"} for name, row in rows.items()}
    judged = {name: row for name, row in rows.items() if name not in NOT_JUDGED}
    if requested == "off":
        used, reason = "off", "speculation='off': every prefetch is declined; pins and warm() are not"
    elif requested == "always":
        used, reason = "full", "speculation='always': nothing is declined"
    else:
        states = {row["state"] for row in judged.values()}
        used = states.pop() if len(states) == 1 else "narrowed" if states else "full"
        reason = _reason(judged)
    return feature(
        requested,
        used,
        reason or "nothing was guessed yet",
        io={**told["io"], "priority_reason": _why_priority(told["io"]["priority"], found)},
        predictors={name: {key: row[key] for key in ("state", *told["counts"])} for name, row in rows.items()},
    )


def _reason(judged: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how the predictors do: the worst few, and of how many more nothing is said here."""
    worst = sorted(judged, key=lambda name: (-STATES.index(judged[name]["state"]), _saved_ns(judged[name])))
    told = [_sentence(name, judged[name]) for name in worst[:SAID]]
    rest = worst[SAID:]
    if rest:
        states = [judged[name]["state"] for name in rest]
        counts = ", ".join(f"{states.count(state)} {state}" for state in reversed(STATES) if state in states)
        told.append(f"and {len(rest)} more ({counts}): see 'predictors'")
    return "; ".join(told)


def _saved_ns(row: Mapping[str, Any]) -> float:
    return float(row["gain_ns"] - row["cost_ns"])


def _sentence(name: str, row: Mapping[str, Any]) -> str:
    n = round(row["remembered"])
    if row["state"] == "full" and n < FEW:
        return f"{name}: {n} guesses resolved, {FEW} are needed to judge"
    figures = (
        f"{round(row['hits'])} of the last {n} guesses were used; they saved {row['gain_ns'] / 1e6:.1f} ms of waits "
        f"and cost {row['cost_ns'] / 1e6:.1f} ms"
    )
    verdict = {"full": "", "narrowed": " (half of each call is read)", "stopped": " (stopped, but for probes)"}
    return f"{name}{verdict[row['state']]}: {figures}"
