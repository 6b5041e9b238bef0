"""The command line: one thin file per command, everything on the public API. Figures to stdout, progress to stderr."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import click

from fastcache.cli.advise import advise
from fastcache.cli.checksum import checksum
from fastcache.cli.demo import demo
from fastcache.cli.fixture import fixture
from fastcache.cli.generate import generate
from fastcache.cli.inspect import inspect
from fastcache.cli.mrc import mrc
from fastcache.cli.pack import pack
from fastcache.cli.replay import replay
from fastcache.cli.replay_seed import replay_seed
from fastcache.cli.verify import verify
from fastcache.errors import FastcacheError


class _Group(click.Group):
    """Shows our errors and the system's as one line, not as a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run; an output that is full is an error like others, of --help too."""
        try:
            return super().main(*args, **options)
        except OSError as error:
            click.echo(f"Error: {_said(error)}", err=True)
            sys.exit(1)
        finally:
            _drop_unwritten()

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FastcacheError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error
        except (BrokenPipeError, ChildProcessError):
            raise
        except OSError as error:
            raise click.ClickException(_said(error)) from error


def _said(error: OSError) -> str:
    """Return its text; what has no room and names no file is stdout: whatever else is written is named."""
    nameless = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"{error}: standard output" if nameless else str(error)


def _drop_unwritten() -> None:
    """Send what cannot be written to stdout nowhere: the interpreter would try again at its end, and complain."""
    if sys.stdout is None:  # started with it closed
        return
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="fastcache-moe", prog_name="fastcache")
def main() -> None:
    """Stream Mixture-of-Experts experts from NVMe into a bounded arena of leased slots."""


main.add_command(advise)
main.add_command(checksum)
main.add_command(demo)
main.add_command(fixture)
main.add_command(generate)
main.add_command(mrc)
main.add_command(pack)
main.add_command(replay)
main.add_command(inspect)
main.add_command(replay_seed)
main.add_command(verify)
