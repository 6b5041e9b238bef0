"""`fastcache generate`: tokens from a checkpoint, its experts streamed. Imports click, rich, units and moe."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fastcache.cli.options import as_json, engine
from fastcache.units import format_bytes

if TYPE_CHECKING:
    from fastcache.moe import Model


if TYPE_CHECKING:
    ParamType = click.ParamType[list[int], Any]
else:  # generic since click 8.3, and only to type checkers
    ParamType = click.ParamType


class Ids(ParamType):
    """Token ids: 1,15,7."""

    name = "ids"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Return them as integers."""
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in str(value).replace(",", " ").split()]
        except ValueError:
            return self.fail(f"{value!r} is no list of integers such as 1,15,7", param, ctx)


@click.command(short_help="Generate tokens, with the experts streamed.")
@click.argument("model", type=click.Path())
@click.option("--prompt", help="Text; needs tokenizer.json beside the checkpoint, and the extra `tokenizers`.")
@click.option("--ids", type=Ids(), help="Token ids instead: 1,15,7.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, help="Tokens to generate at most.")
@click.option("--budget", default=None, help='As fastcache.open takes it: "8GiB", "2 cycles", ...  [default: auto]')
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0: always the likeliest.")
@click.option("--top-k", type=click.IntRange(min=1), help="Sample among so many of the likeliest.")
@click.option("--top-p", type=click.FloatRange(min=0, min_open=True, max=1), help="Sample among this much probability.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the sampling.")
@click.option("--ignore-eos", is_flag=True, help="Go on after a token that ends a text.")
@engine
@as_json
def generate(
    model: str,
    prompt: str | None,
    ids: list[int] | None,
    max_tokens: int,
    budget: str | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    ignore_eos: bool,
    engine: str | None,
    as_json: bool,
) -> None:
    """Generate tokens after a prompt with the checkpoint at MODEL, its experts streamed through a bounded arena.

    Tokens go to stdout as they come; how fast, and how many experts were there already, to stderr if it is a terminal.
    """
    from fastcache import moe
    from fastcache.moe.tokens import Detokenizer, tokenizer_of

    if (prompt is None) == (ids is None):
        raise click.UsageError("give --prompt or --ids, " + ("one of them" if ids is None else "not both"))
    given = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
    idle = [name for name, value in given.items() if value is not None]
    if temperature == 0 and idle:
        raise click.UsageError(
            f"at --temperature 0 the likeliest token is taken, and {', '.join(idle)} would do nothing"
        )
    detokenizer = None
    if prompt is not None:
        tokenizer = tokenizer_of(model)
        ids, detokenizer = tokenizer.encode(prompt).ids, Detokenizer(tokenizer)
    budget_or_bytes = int(budget) if budget is not None and budget.isdecimal() else budget
    try:
        loaded = moe.load(model, budget=budget_or_bytes, engine=engine)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with loaded:
        assert ids is not None and loaded.store is not None
        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        try:
            tokens = loaded.generate(ids, max_tokens, stop=() if ignore_eos else None, **options)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        result = _run(loaded, tokens, detokenizer, show=not as_json)
        described = loaded.store.describe()
        result |= {
            "prompt_tokens": len(ids),
            "config_not_read": loaded.not_read,
            "stats": loaded.store.stats().to_dict(),
            "budget_bytes": loaded.store.budget_bytes,
            "engine": described["engine"]["used"],
            "rss_bytes": _peak_rss(),
        }
    if as_json:
        click.echo(json.dumps(result))


def _run(model: Model, tokens: Iterator[int], detokenizer: Any, show: bool) -> dict[str, Any]:
    """Generate, show, and time: the first token is the prompt's, the others are decoding."""
    assert model.store is not None
    out: list[int] = []
    began = first = last = time.perf_counter()
    with _line(beside_tokens=show and sys.stdout.isatty()) as say:
        for token in tokens:
            out.append(token)
            last = time.perf_counter()
            if len(out) == 1:
                first = last
            new = f"{token} " if detokenizer is None else detokenizer.add(token)
            if show:
                click.echo(new, nl=False)
                sys.stdout.flush()
            say(model, len(out), first - began, (len(out) - 1) / (last - first) if last > first else 0.0)
        if detokenizer is not None and (rest := detokenizer.end()) and show:
            click.echo(rest, nl=False)
        if show:
            click.echo()
    return {
        "tokens": out,
        "text": None if detokenizer is None else detokenizer.text,
        "prefill_s": first - began,
        "tokens_per_s": (len(out) - 1) / (last - first) if last > first else None,
    }


@contextlib.contextmanager
def _line(beside_tokens: bool) -> Iterator[Any]:
    """Give what shows one line that changes, on stderr if it is a terminal.

    Where the tokens come on a terminal too, a line that changes would get mixed up with them: it is shown once, at the
    end.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *figures: None
        return
    if beside_tokens:
        last: list[Any] = []
        yield lambda *figures: last.__setitem__(slice(None), figures)
        if last:
            console.print(_figures(*last), soft_wrap=True)
        return
    with Live(console=console, refresh_per_second=8, transient=False, redirect_stdout=False) as live:
        yield lambda *figures: live.update(_figures(*figures))


def _figures(model: Model, count: int, prefill: float, rate: float) -> Text:
    assert model.store is not None
    stats = model.store.stats()
    share = stats.hits / stats.requests if stats.requests else 0.0
    return Text(
        f"{count} tokens, {rate:.2f} tokens/s after {prefill:.2f} s for the prompt; {share:.0%} hits, "
        f"{format_bytes(stats.bytes_read)} read, budget {format_bytes(model.store.budget_bytes)}"
    )


def _peak_rss() -> int:
    """Return the most memory that this process has had resident, in bytes: mapped files too."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
