"""`fastcache demo`: the whole product in one command. Imports click, rich, threadpoolctl, units and demo."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from threadpoolctl import threadpool_limits

from fastcache.cli.bars import when_drawn
from fastcache.cli.options import SIZE, as_json, engine
from fastcache.units import format_bytes


@click.command(short_help="Decode with a model larger than its budget, and check it.")
@click.option("--size", type=SIZE, default="1GiB", help="Size of the checkpoint that is written.")
@click.option(
    "--dir", "directory", type=click.Path(file_okay=False), help="Where; a real disk.  [default: /var/tmp, else TMPDIR]"
)
@click.option("--budget", default=None, help="As fastcache.open takes it.  [default: half of the expert bytes]")
@click.option("--tokens", type=click.IntRange(min=1), default=32, help="Tokens to decode.")
@click.option("--predictor", type=click.Choice(["lookahead", "none"]), default="lookahead", help="What is read ahead.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Other weights and other tokens.")
@click.option("--keep", is_flag=True, help="Leave the checkpoint and print where it is.")
@engine
@as_json
def demo(
    size: int,
    directory: str | None,
    budget: str | None,
    tokens: int,
    predictor: str,
    seed: int,
    keep: bool,
    engine: str | None,
    as_json: bool,
) -> None:
    """Decode with a model larger than its budget, and check every bit against resident experts.

    Writes a checkpoint of Qwen3-30B-A3B's expert shapes, decodes through the store, then with resident experts.
    Exit 1 if any bit differs.
    """
    from fastcache.demo import run

    budget_or_bytes = int(budget) if budget is not None and budget.isdecimal() else budget
    asked_to_leave: list[int] = []
    with (
        _scratch(directory, keep, asked_to_leave) as scratch,
        _progress(asked_to_leave) as progress,
        threadpool_limits(1),
    ):
        try:
            result = run(
                scratch,
                size=size,
                budget=budget_or_bytes,
                tokens=tokens,
                engine=engine,
                predictor=predictor,
                seed=seed,
                progress=progress,
            )
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    if keep:
        result["checkpoint"] = str(scratch)
    if as_json:
        click.echo(json.dumps(result))
    else:
        Console().print(_table(result))
    if not result["bit_identical"]:
        raise SystemExit(1)


@contextlib.contextmanager
def _scratch(directory: str | None, keep: bool, asked_to_leave: list[int]) -> Iterator[Path]:
    """Make a directory of our own inside `directory`, and remove it and what had to be made for it at the end.

    Of a terminated run too: SIGTERM is an exit that cleans up, and is written down in `asked_to_leave`. `keep` leaves
    the directory after a run that came to its end.
    """

    def leave(number: int, frame: object) -> None:
        asked_to_leave.append(number)
        raise SystemExit(128 + number)

    if directory is None:  # /tmp is often memory
        directory = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    home = Path(directory).absolute()
    made = [path for path in (home, *home.parents) if not path.exists()]  # the innermost first
    before = signal.signal(signal.SIGTERM, leave)
    kept = False
    try:
        home.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="fastcache-demo-", dir=home))
        try:
            yield scratch
            kept = keep
        finally:
            if not kept:
                shutil.rmtree(scratch, ignore_errors=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        if not kept:
            with contextlib.suppress(OSError):  # others may have put something there
                for path in made:
                    path.rmdir()


@contextlib.contextmanager
def _progress(asked_to_leave: list[int]) -> Iterator[Callable[[str, int, int], None]]:
    """Give a function of (stage, done, total) that draws one bar per stage, made when the stage first reports.

    It leaves where that was asked for: a signal that comes while a compiled module is imported raises into code that
    forgets it.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with when_drawn(*columns) as shown:

        def draw(stage: str, done: int, total: int) -> None:
            if asked_to_leave:
                raise SystemExit(128 + asked_to_leave[0])
            if stage not in tasks:
                tasks[stage] = shown().add_task(stage)
            shown().update(tasks[stage], completed=done, total=total)

        yield draw


def _table(result: dict[str, Any]) -> Table:
    """Return the figures as people read them."""
    described = result["describe"]
    table = Table(show_header=False, title="fastcache demo")
    per_layer = f"{result['layers']} layers x {result['experts_per_layer']} experts of"
    table.add_row(
        "checkpoint", f"{format_bytes(result['checkpoint_bytes'])}: {per_layer} {format_bytes(result['expert_nbytes'])}"
    )
    table.add_row(
        "budget", f"{format_bytes(result['budget_bytes'])}, of which arena {format_bytes(result['arena_bytes'])}"
    )
    same = "yes" if result["bit_identical"] else f"NO: {result['differing_steps']} of {result['steps']} blocks differ"
    table.add_row("bit-identical", f"{same} (against resident experts, {result['tokens']} tokens)")
    resident = f"{result['resident_tokens_per_s']:.2f} with resident experts"
    table.add_row("tokens/s", f"{result['tokens_per_s']:.2f} streamed, {resident}")
    table.add_row(
        "requests",
        f"{result['requests']} = {result['hits']} hits + {result['joins']} joins + {result['misses']} misses",
    )
    table.add_row("hits", f"{result['first_consumptions']} first consumptions of a prefetch, {result['reuses']} reuses")
    table.add_row("bytes read", f"{format_bytes(result['bytes_read'])} while decoding")
    share = result["read_gb_per_s"] / result["ceiling_gb_per_s"] if result["ceiling_gb_per_s"] else 0.0
    table.add_row(
        "reading",
        f"{result['read_gb_per_s']:.2f} GB/s alone, {result['decode_gb_per_s']:.2f} GB/s while decoding; raw ceiling "
        f"{result['ceiling_gb_per_s']:.2f} GB/s ({share:.0%})",
    )
    for feature in ("engine", "direct", "hugepages", "mlock", "registered", "policy"):
        if feature in described:
            table.add_row(feature, _feature(described[feature]))
    if "checkpoint" in result:
        table.add_row("kept in", result["checkpoint"])
    return table


def _feature(feature: dict[str, Any]) -> str:
    """Return what served, and why it is not what was asked for."""
    text = str(feature["used"])
    if "fraction" in feature:
        text += f" ({feature['fraction']:.0%} of the arena)"
    return f"{text}: {feature['reason']}" if feature.get("reason") else text
