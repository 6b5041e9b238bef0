"""`fastcache replay TRACE --exact`: what an exact replay says. Imports click, rich and traces."""

from __future__ import annotations

import json

import click
from rich.console import Console


def show_exact(trace: str, as_json: bool) -> None:
    """Replay a recording exactly and print the outcome. Exits with 1 if anything differs from the recorded run.

    Raises
    ------
    click.ClickException
        The file is no exact recording.
    """
    from fastcache.traces import replay_exact

    try:
        again = replay_exact(trace)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(again.to_dict()))
    else:
        console = Console(highlight=False)
        console.print(f"{again.records:,} records, policy {again.policy}, ended: {again.ended or 'not said'}")
        for name in ("requests", "hits", "joins", "misses", "pass_throughs", "evictions", "prefetch_loads", "wasted"):
            console.print(f"  {name:15} {again.counters[name]:>12,}")
        if again.divergence:
            console.print(f"the replay left the recorded run: {again.divergence}")
        for name, (live, replayed) in again.differences.items():
            console.print(f"  {name}: live {live:,}, replayed {replayed:,}")
        if again.same:
            console.print("every decision and every counter is that of the live run")
        elif not again.live:
            console.print("the file has no counters at its end to compare with: the process died, or the disk was full")
    if not again.same:
        raise SystemExit(1)
