"""`fastcache inspect`: what a checkpoint is, from its headers alone. Imports click, rich, units and inspection."""

from __future__ import annotations

import json
import os
from itertools import groupby
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastcache.cli.options import as_json
from fastcache.units import format_bytes


@click.command(short_help="Show what a checkpoint is, from its headers.")
@click.argument("path", type=click.Path())
@as_json
def inspect(path: str, as_json: bool) -> None:
    """Show what the checkpoint at PATH is: family, experts, types, sizes, where they lie, and what is wrong with it.

    PATH is a directory, a .safetensors file, or a .gguf file (any part of a split one). Only headers are read.
    """
    from fastcache.inspection import inspect_checkpoint

    figures = inspect_checkpoint(path)
    if as_json:
        click.echo(json.dumps(figures))
        return
    console = Console(highlight=False)
    console.print(_summary(figures))
    console.print(_layers(figures))
    for problem in figures["problems"]:
        console.print(Text(f"! {problem}", style="yellow"), soft_wrap=True)


def _summary(figures: dict[str, Any]) -> Table:
    table = Table(show_header=False, title=Text(os.path.basename(figures["path"]) or figures["path"]))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    sizes, extents, files = figures["expert_bytes"], figures["extents_per_expert"], figures["files"]
    of_token = f", {figures['top_k']} of them per token" if figures["top_k"] else ""
    rows = {
        "family": f"{figures['family']} ({figures['format']}, {_count(len(files), 'file')}, "
        f"{format_bytes(sum(file['bytes'] for file in files))})",
        "MoE layers": f"{len(figures['moe_layers'])} ({_ranges(figures['moe_layers'])})",
        "experts": f"{figures['n_experts']} in a layer{of_token}",
        "one expert": _span(format_bytes(sizes["min"]), format_bytes(sizes["max"])),
        "all experts": format_bytes(sizes["total"]),
        "token cycle": "unknown"
        if figures["token_cycle_bytes"] is None
        else format_bytes(figures["token_cycle_bytes"]),
        "the rest": f"{format_bytes(figures['trunk_bytes'])} ({_shares(figures['trunk_dtypes'])})",
        "stored as": _shares(figures["dtypes"]),
        "an expert's tensors": ", ".join(figures["siblings"]),
        "reads per expert": _span(str(extents["min"]), str(extents["max"])),
        "misaligned": f"{figures['misaligned_fraction']:.1%} of the experts' tensors",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _layers(figures: dict[str, Any]) -> Table:
    """One row for each run of layers that are alike."""
    table = Table("layers", "experts", "one expert", "types")
    for column in table.columns[:3]:
        column.justify = "right"
    for alike, run in groupby(figures["layers"], key=_but_the_number):
        sizes = alike["expert_bytes"]
        table.add_row(
            _ranges([each["layer"] for each in run]),
            str(alike["experts"]),
            _span(format_bytes(sizes["min"]), format_bytes(sizes["max"])),
            Text(", ".join(alike["dtypes"])),
        )
    return table


def _but_the_number(layer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if key != "layer"}


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _shares(sizes: dict[str, int]) -> str:
    total = sum(sizes.values()) or 1
    shares = {dtype: size / total for dtype, size in sizes.items()}
    return ", ".join(f"{dtype} {share:.0%}" if share >= 0.005 else f"{dtype} <1%" for dtype, share in shares.items())


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
