"""`fastcache replay`: a trace through the store's policies. Imports click, rich, traces and units."""

from __future__ import annotations

import json
import os

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fastcache.cli.exact import show_exact
from fastcache.cli.options import as_json
from fastcache.cli.traces import naming_scratch, percent, policy_option, read_as, trace_options, words
from fastcache.errors import FastcacheError
from fastcache.traces.trace import Trace
from fastcache.units import format_bytes

FRACTIONS = ("0.03", "0.05", "0.1", "0.15", "0.2")


@click.command(short_help="Replay a routing trace through the store's policies.")
@trace_options
@policy_option
@click.option(
    "--fractions", multiple=True, help=f"Shares of the pool. Repeatable, as --slots.  [default: {','.join(FRACTIONS)}]"
)
@click.option("--slots", multiple=True, help="Numbers of experts, with commas between. Repeatable.")
@click.option("--budget", "budgets", multiple=True, help="64GB, 8GiB, '25% of experts', '2 cycles', all. Repeatable.")
@click.option(
    "--exact",
    is_flag=True,
    help="A recording (store.record): once more as it ran, to its counters; no other option but --json.",
)
@as_json
def replay(
    trace: str,
    format: str | None,
    expert_bytes: int | None,
    top_k: int | None,
    names: tuple[str, ...],
    fractions: tuple[str, ...],
    slots: tuple[str, ...],
    budgets: tuple[str, ...],
    exact: bool,
    as_json: bool,
) -> None:
    """Replay a routing trace from an empty store, once per policy and capacity.

    Hit rates are shares of the distinct experts of each batch. "belady" knows the future and, like the store, gives
    every miss a slot if it can: no policy can do better. "belady_bypass" may read without keeping: no cache can.

    With --exact, a recording is replayed at its own budget and policy; exit 1 if a decision or a counter differs.
    """
    if exact:
        if names != ("all",) or fractions or slots or budgets or format or expert_bytes or top_k:
            raise click.UsageError("--exact replays a recording as it ran: it takes no other option but --json")
        show_exact(trace, as_json)
        return
    from fastcache.traces import capacity as room
    from fastcache.traces.replay import BELADY, policies, replay

    read = read_as(trace, format, expert_bytes, top_k)
    try:
        rooms = [room.of_fraction(read, share) for share in words(fractions, "--fractions")]
        rooms += [room.of_slots(read, _positive(number)) for number in words(slots, "--slots")]
        rooms += [room.of_budget(read, budget) for budget in budgets]
        rooms = rooms or [room.of_fraction(read, share) for share in FRACTIONS]
        chosen = [*policies(), BELADY[0]] if names == ("all",) else words(names, "--policy")
        with naming_scratch():
            rows = replay(read, chosen, rooms)
    except FastcacheError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    result = {
        "trace": os.path.basename(trace),
        "model": read.name,
        "requests": read.requests,
        "batches": len(read.phase),
        "distinct": int((read.counts() > 0).sum()),
        "pool": read.pool,
        "layers": len(read.layers),
        "top_k": read.top_k,
        "complete": read.complete,
        "lost": read.lost,
        "rows": [row.to_dict() for row in rows],
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("experts", "of pool", *(["budget"] if budgets else []), *chosen):
        table.add_column(name, justify="right", no_wrap=True)
    for start in range(0, len(rows), len(chosen)):
        cells = rows[start : start + len(chosen)]
        capacity, budget = cells[0], cells[0].budget_bytes
        size = ["" if budget is None else format_bytes(budget)] if budgets else []
        rates = (percent(row.hit_rate) for row in cells)
        table.add_row(str(capacity.capacity), percent(capacity.fraction), *size, *rates)
    console = Console(highlight=False)
    console.print(_title(read, result["distinct"]), style="bold", soft_wrap=True, markup=False)
    console.print(table)


def _title(trace: Trace, distinct: object) -> str:
    return f"{trace.name}: hit rates of {trace.requests} requests for {distinct} of {trace.pool} experts"


def _positive(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a number of slots")
    return int(text)
