"""`fastcache advise`: what budget to give. Imports click, errors, traces and units."""

from __future__ import annotations

import json

import click

from fastcache.cli.options import as_json
from fastcache.cli.traces import naming_scratch, read_as
from fastcache.errors import FastcacheError
from fastcache.traces.importers import FORMATS


@click.command(short_help="Say what budget a model should get for a trace's traffic.")
@click.argument("model", type=click.Path(exists=True))
@click.option("--trace", required=True, type=click.Path(exists=True, dir_okay=False), help="Traffic like the model's.")
@click.option("--format", type=click.Choice(list(FORMATS)), help="Of the trace.  [default: what its first bytes show]")
@click.option("--top-k", type=click.IntRange(min=1), help="Experts per token.  [default: what the model says]")
@click.option("--policy", default="next_use", help="The store's: next_use, lru, lfu, s3fifo or sieve.")
@as_json
def advise(model: str, trace: str, format: str | None, top_k: int | None, policy: str, as_json: bool) -> None:
    """Say in three lines what budget MODEL should get, and what more would buy.

    From the trace's curve over the model's own sizes, the rate at which its files can be read (up to 256 MiB are), and
    the memory that the machine and its cgroups leave.
    """
    from fastcache.traces.advise import advise

    try:
        read = read_as(trace, format, None, None)
        with naming_scratch():
            advice = advise(model, read, policy, top_k=top_k)
    except FastcacheError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if advice.same_checkpoint is False:
        click.echo(f"{trace}: recorded with other files than these; layers and experts are alike", err=True)
    if as_json:
        click.echo(json.dumps(advice.to_dict()))
        return
    for line in advice.lines:
        click.echo(line)
