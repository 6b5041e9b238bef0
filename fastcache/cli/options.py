"""Option types that several commands share. Imports click and units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fastcache.units import parse_bytes

if TYPE_CHECKING:
    ParamType = click.ParamType[int, Any]
else:  # generic since click 8.3, and only to type checkers
    ParamType = click.ParamType


class Size(ParamType):
    """Bytes, or a number with a unit: 4096, 512MB, 8GiB."""

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes."""
        try:
            size = parse_bytes(value)
        except (TypeError, ValueError) as error:
            self.fail(str(error).removeprefix("size "), param, ctx)
        if size < self.least:
            self.fail(f"must be at least {self.least}; got {size}", param, ctx)
        return size


SIZE = Size()
engine = click.option(
    "--engine",
    type=click.Choice(["auto", "uring", "pread"]),
    default=None,
    help="How to read; a named engine never falls back.  [default: FASTCACHE_ENGINE, else auto]",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
