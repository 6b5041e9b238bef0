"""A bar for commands that read all bytes of a checkpoint: share, bytes, bytes/s, time left; on stderr. Imports rich."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


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
    with contextlib.ExitStack() as stack:
        progress = Progress(*columns, console=Console(stderr=True))
        task = progress.add_task(what, total=None)

        def draw(done: int, total: int) -> None:
            if not progress.live.is_started:  # not before there is something to show: an error may come first
                stack.enter_context(progress)
            progress.update(task, completed=done, total=total)

        yield draw
