"""`fastcache verify`: every expert against its checksum. Imports click and integrity."""

from __future__ import annotations

import json
import sys

import click

from fastcache.cli.bars import bytes_bar
from fastcache.cli.options import as_json, engine
from fastcache.units import format_bytes


@click.command(short_help="Hold a checkpoint's experts to their checksums.")
@click.argument("path", type=click.Path())
@click.option(
    "--sidecar",
    type=click.Path(),
    default=None,
    help="The sidecar.  [default: beside the first file, as its name with .checksums added]",
)
@engine
@as_json
def verify(path: str, sidecar: str | None, engine: str | None, as_json: bool) -> None:
    """Hold every expert of the checkpoint at PATH to the sidecar that `fastcache checksum` wrote.

    Reads all of them once. Exits with 1 if anything differs, and names it.
    """
    from fastcache.integrity import verify as hold

    with bytes_bar("verify") as progress:
        found = hold(path, sidecar, engine=engine, progress=progress)
    if as_json:
        bad = [
            {
                "layer": key.layer,
                "expert": key.expert,
                "error": type(error).__name__,
                "message": str(error),
                **{name: getattr(error, name, None) for name in ("filename", "offset", "wanted", "got")},
            }
            for key, error in found.bad.items()
        ]
        figures = {"sidecar": found.path, "experts": found.experts, "bytes": found.nbytes, "ok": found.ok}
        click.echo(json.dumps({**figures, "bad": bad, "changed_files": found.changed}))
    else:
        for error in found.bad.values():
            click.echo(str(error))
        for name in found.changed:
            click.echo(f"{name}: not as it was where it was sampled")
        good = found.experts - len(found.bad)
        click.echo(f"{good} of {found.experts} experts ({format_bytes(found.nbytes)} in all) are as they were")
    if not found:
        sys.exit(1)
