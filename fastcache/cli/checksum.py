"""`fastcache checksum`: a checksum of every expert, written beside the checkpoint. Imports click and integrity."""

from __future__ import annotations

import json

import click

from fastcache.cli.bars import bytes_bar
from fastcache.cli.options import as_json, engine


@click.command(short_help="Write a sidecar of checksums, one for each expert.")
@click.argument("path", type=click.Path())
@click.option(
    "--output",
    "-o",
    type=click.Path(),
    default=None,
    help="Where to write.  [default: beside the first file, as its name with .checksums added]",
)
@click.option("--overwrite", is_flag=True, help="Replace a sidecar, nothing else: today's bytes are the right ones.")
@engine
@as_json
def checksum(path: str, output: str | None, overwrite: bool, engine: str | None, as_json: bool) -> None:
    """Write a sidecar: the CRC-32C of every expert of the checkpoint at PATH. Reads all of them once, repacks nothing.

    `fastcache verify` and fastcache.open(..., verify="sidecar") hold the checkpoint to it.
    """
    from fastcache.integrity import checksum as make

    with bytes_bar("checksum") as progress:
        written = make(path, output, overwrite=overwrite, engine=engine, progress=progress)
    click.echo(json.dumps({"sidecar": written}) if as_json else written)
