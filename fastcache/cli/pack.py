"""`fastcache pack`: a checkpoint written anew, each expert in one aligned piece. Imports click and packing."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from fastcache.cli.bars import bytes_bar
from fastcache.cli.options import Size, as_json
from fastcache.errors import FastcacheError
from fastcache.units import format_bytes


@click.command(short_help="Write a checkpoint anew, each expert one aligned read.")
@click.argument("path", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--align", type=Size(512), default="4096", help="Every expert begins at a multiple of it.")
@click.option("--shard-bytes", type=Size(1), default="5GiB", help="A file ends before the expert that would pass it.")
@as_json
def pack(path: str, out: str, align: int, shard_bytes: int, as_json: bool) -> None:
    """Write the safetensors checkpoint at PATH anew into the directory OUT, so that each expert is one aligned read.

    Every tensor keeps its name, type, shape and bytes; other tools read the result. Each file is read again and
    compared. Run it again if it was interrupted: finished files are kept. Nothing is overwritten.
    """
    from fastcache.packing import pack as write

    try:
        with bytes_bar("pack") as progress:
            made = write(path, out, align=align, shard_bytes=shard_bytes, progress=progress)
    except FastcacheError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(asdict(made)))
        return
    click.echo(
        f"{made.path}: {made.experts} experts in {len(made.files)} files, {format_bytes(made.nbytes)}, of it padding "
        f"{format_bytes(made.padding + made.spaces)}; copied {len(made.copied)} other files"
    )
