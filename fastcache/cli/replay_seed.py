"""`fastcache replay-seed`: small scenarios whose counters are known. Imports click, rich, errors and seed_replay."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fastcache.cli.options import SIZE, as_json, engine
from fastcache.errors import FastcacheError


@click.command("replay-seed", short_help="Check the store against small scenarios of known counters.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False),
    help="Where the file is written.  [default: TMPDIR]",
)
@click.option("--chunk", type=SIZE, default=None, help="Bytes per read.  [default: FASTCACHE_CHUNK, else built-in]")
@engine
@as_json
def replay_seed(directory: str | None, chunk: int | None, engine: str | None, as_json: bool) -> None:
    """Run ten small scenarios on the file of `fixture seed`, and print what they count beside what they must count.

    Serial reads, batches, prefetches, a file that is cut under an open store: with lru and eight slots every counter
    is known. Exit 1 on any difference.
    """
    from fastcache.seed_replay import run

    with tempfile.TemporaryDirectory(prefix="fastcache-seed-", dir=directory) as scratch:
        try:
            rows = run(scratch, engine=engine, chunk=chunk)
        except FastcacheError:
            raise
        except ValueError as error:  # settings, from the environment too
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"ok": all(row.ok for row in rows), "rows": [row.to_dict() for row in rows]}))
    else:
        table = Table("scenario", "must count", "counted", "", show_lines=True)
        for row in rows:
            table.add_row(row.check, _text(row.seed), _text(row.got), "ok" if row.ok else "DIFFERS")
        Console().print(table)
    if not all(row.ok for row in rows):
        raise SystemExit(1)


def _text(values: dict[str, Any]) -> str:
    return "\n".join(f"{name} {value}" for name, value in values.items())
