"""PythonWorker: the one thread for what only Python can do. Imports nothing of ours."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("fastcache")


class PythonWorker:
    """One thread for what only Python can do: a Python source's prefetches, and callbacks."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"fastcache-python-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], Any]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a prefetch or its callback failed")
            job = None  # or it would keep the store until the next one
            job = None  # it refers to the store, which may be dropped while this thread has nothing to do
