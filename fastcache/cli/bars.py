"""Bars on stderr: of what reads all bytes of a checkpoint, share, bytes, bytes/s and time left. Imports rich."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextlib.contextmanager
def when_drawn(*columns: ProgressColumn) -> Iterator[Callable[[], Progress]]:
    """Give a function that returns a Progress on stderr, shown from its first call on: an error may come before."""
    with contextlib.ExitStack() as stack:
        progress = Progress(*columns, console=Console(stderr=True))

        def shown() -> Progress:
            if not progress.live.is_started:
                stack.enter_context(progress)
            return progress

        yield shown


@contextlib.contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function of (bytes done, bytes of all) that draws."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: list[TaskID] = []
    with when_drawn(*columns) as shown:

        def draw(done: int, total: int) -> None:
            if not tasks:
                tasks.append(shown().add_task(what, total=None))
            shown().update(tasks[0], completed=done, total=total)

        yield draw
