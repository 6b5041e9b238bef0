"""Options that the commands on traces share. Imports click, errors, outputs, traces, units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click

from fastcache.cli.options import Size
from fastcache.errors import TraceError
from fastcache.outputs import naming
from fastcache.traces.capacity import with_sizes
from fastcache.traces.columns import scratch_directory
from fastcache.traces.importers import FORMATS, read
from fastcache.traces.trace import Trace

_OPTIONS = (
    click.argument("trace", type=click.Path(exists=True, dir_okay=False)),
    click.option(
        "--format", type=click.Choice(list(FORMATS)), help="What the trace is.  [default: what its first bytes show]"
    ),
    click.option("--expert-bytes", type=Size(least=1), help="Bytes of an expert.  [default: what the trace says]"),
    click.option("--top-k", type=click.IntRange(min=1), help="Experts per token.  [default: what the trace says]"),
)


def trace_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the argument TRACE and what read_as() needs."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_as(path: str, format: str | None, expert_bytes: int | None, top_k: int | None) -> Trace:
    """Return the trace that those options name; one that is only a part is said to be, on stderr.

    Raises TraceError also where there is no request in it, so no rate of hits.
    """
    with naming_scratch():
        trace = read(path, format)
        if not trace.requests:
            raise TraceError("no request is in it: a trace that asks for nothing", filename=path)
        trace = with_sizes(trace, expert_bytes, top_k)
    if not trace.complete:
        why = f"{trace.lost} records were lost" if trace.lost else "the process died, or the disk was full"
        click.echo(f"{path}: a part of a run: {why}; what follows is of that part", err=True)
    return trace


@contextlib.contextmanager
def naming_scratch() -> Iterator[None]:
    """Say of an error that names no file that it was of a temporary one, and where those are: see TMPDIR."""
    with naming(f"a temporary file in {scratch_directory()} (TMPDIR says where)"):
        yield


def percent(rate: float) -> str:
    """Return a share as people read it."""
    return f"{100 * rate:.1f} %"


def words(texts: tuple[str, ...], option: str) -> list[str]:
    """Return what stands between commas in a repeatable option; one that names nothing is refused, not ignored."""
    found = []
    for text in texts:
        named = [word.strip() for word in text.split(",") if word.strip()]
        if not named:
            raise click.UsageError(f"{option} {text!r} names nothing: give one or more, with commas between")
        found += named
    return found


policy_option = click.option(
    "--policy",
    "names",
    multiple=True,
    default=("all",),
    help="Names with commas between; all: every policy, and belady. Repeatable.",
)
