"""`fastcache fixture`: checkpoints made from nothing. Imports click and fixture."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def fixture() -> None:
    """Write small checkpoints to try things on."""


@fixture.command(short_help="Write a layer of 24 tiny experts.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def seed(directory: Path) -> None:
    """Write one synthetic layer of 24 experts (59,776 bytes, always the same) into DIRECTORY and print its path.

    Its tensors are named and typed as Kimi K3's are. `fastcache replay-seed` runs on such a file.
    """
    from fastcache.fixture import write_seed_shard

    click.echo(write_seed_shard(directory))
