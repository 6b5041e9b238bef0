"""`fastcache mrc`: miss-ratio curves of a trace. Imports click, errors, outputs, traces and units."""

from __future__ import annotations

import json
import os
from functools import partial

import click

from fastcache.cli.traces import naming_scratch, percent, policy_option, read_as, trace_options, words
from fastcache.errors import FastcacheError
from fastcache.outputs import check_output, refuse_other_kind, whole_file
from fastcache.units import format_bytes


@click.command(short_help="Compute miss-ratio curves of a routing trace.")
@trace_options
@policy_option
@click.option("--points", type=click.IntRange(2, 1000), default=24, help="Capacities that are simulated.")
@click.option(
    "--out", "outs", multiple=True, type=click.Path(dir_okay=False), help="A .json, .png or .svg. Repeatable."
)
@click.option("--overwrite", is_flag=True, help="Let --out replace a file of another kind than it writes.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON although --out is given.")
def mrc(
    trace: str,
    format: str | None,
    expert_bytes: int | None,
    top_k: int | None,
    names: tuple[str, ...],
    points: int,
    outs: tuple[str, ...],
    overwrite: bool,
    as_json: bool,
) -> None:
    """Compute miss-ratio curves of a routing trace, and mark token cycle, knee and compulsory floor.

    The curve of lru is exact; the others, and belady, are simulated. Prints JSON, or with --out what to look for.
    """
    from fastcache.traces.mrc import mrc
    from fastcache.traces.plot import check_picture, is_picture, plot

    pictures = [out for out in outs if not out.lower().endswith(".json")]
    try:
        for out in outs:
            if not os.path.splitext(out)[1]:
                raise click.UsageError(f"--out {out!r} does not say what to write: end it in .json, .png or .svg")
            if out in pictures:
                check_picture(out)
            check_output(out, [trace])
            if not overwrite:
                ours = partial(is_picture, out) if out in pictures else _is_json
                refuse_other_kind(out, ours, f"{os.path.splitext(out)[1]} of this command")
        read = read_as(trace, format, expert_bytes, top_k)
        with naming_scratch():
            curves = mrc(read, None if names == ("all",) else words(names, "--policy"), points)
        for out in pictures:
            plot(curves, out)
    except FastcacheError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    text = json.dumps({"trace": os.path.basename(trace)} | curves.to_dict())
    for out in outs:
        if out not in pictures:
            with whole_file(out) as file:
                file.write(text.encode() + b"\n")
    if as_json or not outs:
        click.echo(text)
        return
    marks = curves.to_dict()
    for name in ("token_cycle", "knee"):
        if mark := marks[name]:
            size = "" if mark["bytes"] is None else f", {format_bytes(mark['bytes'])}"
            rates = ", ".join(f"{policy} {percent(ratio)}" for policy, ratio in mark["miss_ratio"].items())
            click.echo(f"{name.replace('_', ' ')}: {mark['experts']} of {read.pool} experts{size}; misses: {rates}")
    click.echo(f"compulsory floor: {percent(curves.floor)} of {read.requests} requests are an expert's first")


def _is_json(head: bytes) -> bool:
    return head.startswith(b'{"trace": ')
