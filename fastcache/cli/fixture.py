"""`fastcache fixture`: checkpoints made from nothing. Imports click and fixture."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def fixture() -> None:
    """Write checkpoints that tests and replays use."""


@fixture.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def seed(directory: Path) -> None:
    """Write the seed's synthetic shard (59,776 bytes) into DIRECTORY and print its path."""
    from fastcache.fixture import write_seed_shard

    click.echo(write_seed_shard(directory))
