"""ExpertStore: a checkpoint or source, streamed into leased slots. The one module that crosses to fastcache_ext.

Owns what the public calls mean: keys, budgets, fallbacks and their reasons, errors. Moves no bytes itself.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from fastcache import assembly, errors, failures, recording, reports
from fastcache.curve import LiveCurve, live_curve
from fastcache.describe import Description
from fastcache.fingerprint import fingerprint
from fastcache.inventory import Inventory, inventory_of
from fastcache.keys import ExpertKey
from fastcache.placement import Placement
from fastcache.pyworker import PythonWorker
from fastcache.settings import Settings
from fastcache.settings import seconds as in_seconds
from fastcache.sidecar import checks
from fastcache.sizing import size_store
from fastcache.speculation import limit_guesses
from fastcache.stats import Stats
from fastcache.trunk import Trunk
from fastcache.units import format_bytes, whole
from fastcache.warming import HotKeys, Warmed, warm
from fastcache.waves import Waves
from fastcache_ext import liburing
from fastcache_ext.arguments import Leases
from fastcache_ext.files import FileSet
from fastcache_ext.handles import Prefetch
from fastcache_ext.policy import NAMES as POLICIES
from fastcache_ext.serve import Server
from fastcache_ext.views import Catalog, ExpertLease
from fastcache_ext.watch import report as ghost_report

__all__ = ["POLICIES", "ExpertLease", "ExpertStore", "Leases", "Prefetch"]

log = logging.getLogger("fastcache")
PAGE = os.sysconf("SC_PAGESIZE")
CLOSE_SECONDS = 30.0


class ExpertStore(Server):
    """Experts of a checkpoint, read on demand into a bounded arena and handed out as leases. Made by `fastcache.open`.

    Attributes
    ----------
    name : str
    family : str
        The model family's row, or "unknown".
    top_k : int or None
        Experts that a token uses in a layer.
    trunk : Trunk
        Every tensor of no routed expert by its on-disk name: read-only, as stored, memory-mapped when asked for. Its
        arrays outlive `close()`. Empty for a source.
    budget_bytes : int
        What the arena may take; `describe()["arena_bytes"]` is what it takes.
    fingerprint : str
        Tells this checkpoint from others: what a `HotList` is kept with.
    hot_list : iterable of ExpertKey, or None
        What `warm()` reads first, hottest first, as a `HotList`; another checkpoint's is refused when it is set.

    Notes
    -----
    Thread-safe. A child after fork gets ForkedStore from every call, and `reopen()` gives it a store of its own.
    """

    hot_list = HotKeys()

    def __init__(
        self, source: Any, settings: Settings, name: str | None, progress: Callable[[int, int], Any] | None
    ) -> None:
        self._arguments = (source, settings, name, progress)
        self._closing = threading.RLock()  # a signal handler or a destructor may close the store inside of close()
        self._source = source
        self._source_errors: dict[int, BaseException] = {}
        self._python_worker: PythonWorker | None = None
        self._settings = settings
        self._opened = reports.opened_now()
        self._baseline: Stats | None = None  # what reset_stats() has put behind us
        self._file_rows: Sequence[Mapping[str, Any]] = []  # as they were at close
        inventory = self._inventory = inventory_of(source)
        self.name = name or (
            os.path.basename(os.path.abspath(source))
            if isinstance(source, (str, os.PathLike))
            else type(source).__name__
        )
        self.family, self.top_k = inventory.family, inventory.top_k
        self.trunk = Trunk(inventory.layout)
        direct = cast(Literal["auto", "require", "off"], settings.direct)
        self._files = FileSet(inventory.paths, direct=direct, memory=inventory.memory)
        rows = self._files.describe()
        file_align = [row["align"] for row in rows]
        sizes = [row["size"] for row in rows]
        assembly.check_ends(inventory, sizes)
        self.fingerprint = fingerprint(inventory, sizes)
        self._checks = checks(settings.verify, inventory, sizes)
        placement = assembly.place_experts(inventory, file_align)
        largest = max([512, *file_align])
        slot_align = max(PAGE, largest)
        self._metadata_bytes = assembly.metadata_bytes(inventory, placement, settings.policy, self._checks)
        sizing = self._sizing = size_store(inventory, placement.span, slot_align, settings, self.name)
        self.budget_bytes = sizing.budget
        self._start_reading(
            inventory, placement, settings, chunk=-(-settings.chunk // largest) * largest, slot_align=slot_align
        )
        # Columns that have served their turn.
        inventory.file = inventory.offset = inventory.nbytes = inventory.align = np.zeros((0, 1), np.int64)
        self._schedulers = limit_guesses(self, settings, inventory.paths, largest)
        self._set_timeout(settings.timeout)
        assembly.settle(self, settings, sizing.arena, progress)

    # ---- opening

    def _start_reading(
        self, inventory: Inventory, placement: Placement, settings: Settings, chunk: int, slot_align: int
    ) -> None:
        self._set_catalog(
            Catalog(
                assembly.tensor_records(inventory),
                inventory.record_of,
                placement.tensors,
                ExpertKey,
                errors.LeaseReleased,
                errors.ForkedStore,
            )
        )
        self._payload = inventory.payload()
        arguments = assembly.core_arguments(inventory, placement, self._sizing, settings, self._checks)
        try:
            self._open(files=self._files, chunk=chunk, slot_align=slot_align, **arguments)
        except OSError as error:
            hint = "; reserve explicit huge pages (vm.nr_hugepages)" if settings.hugepages == "hugetlb" else ""
            raise errors.FeatureUnavailable(error.errno, f"{error.strerror}: {error.filename}{hint}") from error
        if self.engine_used == "pread" and arguments["engine"] == "auto":
            log.warning(
                "%s: io_uring is not used (%s); reading with %d threads",
                self.name,
                self.engine_reason,
                settings.io_threads,
            )

    # ---- experts

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layers, as the checkpoint numbers them, ascending."""
        return tuple(layer for layer, _ in self._inventory.layers)

    def experts(self, layer: int) -> range:
        """Return the expert indices of a layer; a dense or unknown layer is UnknownExpert."""
        for number, count in self._inventory.layers:
            if number == layer:
                return range(count)
        self._key(layer, 0)  # raises, as for every key that is none
        return range(0)

    def __len__(self) -> int:
        return int(self._inventory.exists.sum())

    def __iter__(self) -> Iterator[ExpertKey]:
        k = 0
        for layer, count in self._inventory.layers:
            for expert in range(count):
                if self._inventory.exists[k]:
                    yield ExpertKey(layer, expert)
                k += 1

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple) or len(key) != 2:
            return False
        try:
            self._key(*key)
        except (TypeError, ValueError, errors.UnknownExpert):
            return False
        return True

    def expert_nbytes(self, layer: int | ExpertKey, expert: int | None = None) -> int:
        """Return an expert's payload in bytes, without padding."""
        return int(self._payload[self._key(*self._pair(layer, expert))])

    def is_resident(self, layer: int | ExpertKey, expert: int | None = None) -> bool:
        """Whether an acquire would be a hit now. Counts nothing."""
        return self._is_resident(*self._pair(layer, expert))

    def prefetch(
        self,
        layer: int | ExpertKey | Iterable[ExpertKey],
        experts: Iterable[int] | int | None = None,
        *,
        predictor: str | None = None,
    ) -> Prefetch:
        """Start reading experts, the likeliest first, and return at once.

        A prefetch evicts nothing that is leased, pinned or not yet used, and reads only while no demand is queued.
        `predictor` names who guesses ("caller" if None; 61 other names at most): what became of its guesses stands
        under that name in `describe()["speculation"]`, and decides whether the next ones are read or declined.

        Returns
        -------
        Prefetch
            done(), cancel(), wait(timeout), result(timeout), add_done_callback(callback).
        """
        handle = self._prefetch(layer, experts, predictor)
        if self._inventory.by_hand and not handle.done():
            self._worker().put(handle._fill)
        return handle

    def warm(
        self, keys: Iterable[tuple[int, int]] | None = None, progress: Callable[[int, int], Any] | None = None
    ) -> Warmed:
        """Read experts into slots, and wait until they are there: a gate before the first token, and no speculation.

        Counted like prefetches, never declined. Takes no slot that is leased, pinned, or filled and not used yet. Reads
        of other threads wait behind 64 MiB of it at most.

        Parameters
        ----------
        keys : iterable of ExpertKey, optional
            The first is the most important; they may take slots of experts used before. None: fill what is empty, from
            `hot_list`, if there is one, then with expert 0 of every layer, expert 1, and so on.
        progress : callable, optional
            Called with (bytes done, bytes of all).

        Raises
        ------
        UnknownExpert
            Before anything is read.
        BatchFailed
            At the end, if reads failed: `.failed` says which and why. The others stay.
        """
        return warm(self, keys, progress)

    def waves(self, layer: int, experts: Iterable[int]) -> Waves:
        """Part the experts of a layer into lists that fit the budget beside what is leased, hits first, each once.

        Each list is sized when it is asked for, from what is leased then: acquire its experts, and let go of them
        before the next. It has at least one expert, even when no slot is free. Other threads may take the room.
        """
        return Waves(self, layer, experts)

    # ---- what it says of itself

    def stats(self, layers: bool = False, phases: bool = False) -> Stats:
        """Return the counters since opening, or since reset_stats(); `str()` of it is for people.

        The snapshot is never torn, and takes no lock that a hit would wait for. `after - before` is what happened in
        between; StatsMismatch of two stores or across a reset_stats(). A load counts in the phase of the request that
        began it, a wait in that of the request that waited.

        Parameters
        ----------
        layers : bool
            Give `.layers` too: {layer: {counter: int}}.
        phases : bool
            Give `.phases` too: {"none" | "prefill" | "decode": Stats}; with `layers`, each with its own.
        """
        baseline = self._baseline  # first: another thread's reset_stats() would put it ahead of what is read
        now = reports.counted(self, layers, phases)
        return now if baseline is None else now - baseline

    def reset_stats(self) -> None:
        """Count from here. Residency is kept; `stats().at_start` says what was there: unread prefetches, for one."""
        self._baseline = reports.counted(self, layers=True, phases=True)

    def phase(self, name: Literal["prefill", "decode"] | None) -> reports.Phase:
        """Return a context manager, inside of which what is requested counts in that phase; see `stats(phases=True)`.

        The phase is the store's, not the thread's: other threads' requests count in it too, and of blocks that overlap
        in several threads the one left last decides. Costs two moments under the store's mutex, and a hit nothing.
        """
        return reports.Phase(self, name)

    def mrc(self) -> LiveCurve:
        """Return the live miss-ratio curve, and every policy's hit rate, of the demands so far.

        FeatureUnavailable without `open(..., ghosts=True)` or policy="auto". Takes milliseconds; thread-safe.
        """
        return live_curve(self._ghosts(curve=True), self._sizing.experts)

    def _ghosts(self, curve: bool = False) -> dict[str, Any] | None:
        return ghost_report(self, curve)

    def describe(self) -> Description:
        """Return per feature what was asked, what is used and why, and the sizes of things."""
        self._same_process()
        return reports.described(self, liburing.source() if self.engine_used == "uring" else None)

    def __repr__(self) -> str:
        state = ", closed" if self._file_rows else ""
        return f"<ExpertStore {self.name!r}: {len(self)} experts, budget {format_bytes(self.budget_bytes)}{state}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an ExpertStore cannot be pickled: open the checkpoint again in the other process, or reopen() after a fork"
        )

    def record(
        self, path: str | os.PathLike[str], max_bytes: int | str | None = None, *, overwrite: bool = False
    ) -> recording.Recording:
        """Write what happens in this store to a trace file, until stop(), close() or `max_bytes` (None: 1 GiB).

        Begin before the first request: `fastcache.traces.replay_exact` replays such a file to this store's counters.

        Raises
        ------
        OSError
            The file is there and no trace, or `overwrite` is not set; or it cannot be written: later, that ends it.
        RecordingError, ValueError
            The store is being recorded already; `max_bytes` has no room for records.
        """
        about = self.name, self._inventory, self._payload, self._sizing, self._settings, self.fingerprint
        return recording.record(self, recording.header_of(self, *about), path, max_bytes, overwrite=overwrite)

    def mark_token(self, n: int = 1) -> None:
        """Say that what is requested from here on is for the next n < 2**31 tokens (a prompt, say), in a recording."""
        recording.mark_token(self, whole("n", n))

    # ---- ends

    def reopen(self) -> ExpertStore:
        """Return a new store with the arguments of this one, for example in a child after fork."""
        return ExpertStore(*self._arguments)

    def close(self, timeout: float | None = None) -> None:
        """Stop: queued reads are dropped, reads at the device are waited for, at most `timeout` seconds (None: 30).

        Live leases and arrays stay valid; their memory goes with the last of them. Closing twice is fine.
        """
        seconds = CLOSE_SECONDS if timeout is None else in_seconds(timeout)
        if self._forked():  # nothing here is the child's; and the lock may be held by a thread that it does not have
            return
        with self._closing:
            if self._python_worker is not None:
                self._python_worker.stop()
            self._file_rows = self._file_rows or self._files.describe()
            if self._shut(int(seconds * 1e9)):
                self._files.close()
            else:
                log.error(
                    "%s: a read has not returned within %.1f s of close(); its memory is kept until it does",
                    self.name,
                    seconds,
                )

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- what the border asks

    def _error(
        self, code: int, layer: Any, expert: Any, path: str | None, offset: int, wanted: int, got: int
    ) -> Exception:
        cause = None
        if code == failures.SOURCE:
            cause = self._source_errors.get(self._key(layer, expert))
        return failures.failure(
            code,
            store=self.name,
            layers=self._inventory.layers,
            layer=layer,
            expert=expert,
            path=path,
            offset=offset,
            wanted=wanted,
            got=got,
            overflow_limit=self._sizing.overflow,
            holders=self._holders(),
            cause=cause,
        )

    def _batch_error(self, failed: Mapping[tuple[int, int], Exception]) -> errors.BatchFailed:
        return failures.batch_error(failed)

    def _read_expert(self, layer: int, expert: int) -> Any:
        return self._source.read_expert(ExpertKey(layer, expert))

    def _source_failed(self, key: int, error: BaseException) -> None:
        self._source_errors[key] = error.with_traceback(None)  # frames would keep the store alive

    def _call_when_done(self, handle: Prefetch, callback: Callable[[Prefetch], Any]) -> None:
        self._worker().put(lambda: (handle.wait(), callback(handle)))

    def _worker(self) -> PythonWorker:
        with self._closing:
            if self._python_worker is None:
                self._python_worker = PythonWorker(self.name)
                weakref.finalize(self, self._python_worker.stop)  # a store that is dropped without close()
            return self._python_worker
