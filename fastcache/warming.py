"""Warming: filling the budget before the first token, and saying when that is done.

Owns which experts come first and how much is read at a time. Knows no slot: room is the compiled half's business.
Imports errors and keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from fastcache.errors import CheckpointMismatch
from fastcache.keys import ExpertKey

WINDOW_BYTES = 32 << 20  # payload of one of the two windows under way: what a demand that comes meanwhile waits behind
Progress = Callable[[int, int], Any]


class Warmed(NamedTuple):
    """What became of the experts of one `ExpertStore.warm`."""

    loaded: int  # read
    resident: int  # were here already
    no_room: int  # found no slot that a guess may take


class _Handle(Protocol):
    def wait(self) -> bool: ...
    def result(self) -> Mapping[ExpertKey, str]: ...
    def _errors(self) -> dict[tuple[int, int], Exception]: ...


class _Store(Protocol):
    fingerprint: str
    _sizing: Any  # `.cls`: size class by dense key

    @property
    def hot_list(self) -> Iterable[tuple[int, int]] | None: ...
    @property
    def layers(self) -> tuple[int, ...]: ...
    def experts(self, layer: int) -> range: ...
    def expert_nbytes(self, layer: ExpertKey, /) -> int: ...
    def is_resident(self, layer: ExpertKey, /) -> bool: ...
    def __contains__(self, key: object) -> bool: ...
    def _key(self, layer: Any, expert: Any) -> int: ...
    def _vacant(self) -> list[int]: ...
    def _warm(self, keys: list[tuple[int, int]]) -> _Handle: ...
    def _batch_error(self, failed: Mapping[tuple[int, int], Exception]) -> Exception: ...


class HotKeys:
    """A store's attribute `hot_list`: looked through when it is set, so that a mistake is told where it is made.

    CheckpointMismatch: a HotList of another checkpoint; UnknownExpert: a key that is not here; TypeError: no keys.
    """

    def __get__(self, store: _Store, owner: object = None) -> Iterable[tuple[int, int]] | None:
        hot: Iterable[tuple[int, int]] | None = vars(store).get("hot_list")  # a data descriptor goes before it
        return hot

    def __set__(self, store: _Store, hot: Iterable[tuple[int, int]] | None) -> None:
        if hot is not None:
            of = getattr(hot, "fingerprint", store.fingerprint)
            if of != store.fingerprint:
                raise CheckpointMismatch(
                    f"hot_list: made with another checkpoint (fingerprint {of}, this one has {store.fingerprint}); "
                    "observe this one anew"
                )
            if isinstance(hot, Iterator):
                hot = list(hot)  # it gives its keys once, and warm() may be called often
            for key in _keys(hot, "hot_list"):
                store._key(*key)
        vars(store)["hot_list"] = hot


def warm(store: _Store, keys: Iterable[tuple[int, int]] | None, progress: Progress | None) -> Warmed:
    """Read experts and wait for them; see `ExpertStore.warm`."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a callable or None; got {progress!r}")
    wanted = filling(store) if keys is None else list(dict.fromkeys(_keys(keys)))
    sizes = {key: store.expert_nbytes(key) for key in wanted}  # and UnknownExpert before anything is read
    total, done = sum(sizes.values()), 0
    here: list[ExpertKey] = []
    waiting: deque[ExpertKey] = deque()
    for key in wanted:
        (here if store.is_resident(key) else waiting).append(key)
    held = store._warm([*here])  # until the end, so that none of them makes room for another
    windows: deque[tuple[list[ExpertKey], _Handle]] = deque([(here, held)])
    became: dict[ExpertKey, str] = {}
    failed: dict[tuple[int, int], Exception] = {}
    if progress is not None:
        progress(0, total)
    while windows or waiting:
        while waiting and len(windows) < 2:
            window = list(_window(waiting, sizes))
            windows.append((window, store._warm([*window])))
        window, handle = windows.popleft()
        handle.wait()
        became |= handle.result()
        failed |= handle._errors()
        del handle  # its leases: what it read is unread, and no guess of ours takes that away
        done += sum(sizes[key] for key in window)
        if progress is not None and window:
            progress(done, total)
    del held
    if failed:
        raise store._batch_error(failed)
    count = [*became.values()].count
    return Warmed(len(became) - count("resident") - count("no_room"), count("resident"), count("no_room"))


def _keys(keys: object, what: str = "keys") -> Iterator[ExpertKey]:
    if not isinstance(keys, Iterable) or isinstance(keys, (str, bytes)):
        raise TypeError(f"{what} is an iterable of (layer, expert), or None; got {keys!r}")
    for key in keys:
        if not isinstance(key, tuple) or len(key) != 2:
            raise TypeError(f"{what} is an iterable of (layer, expert), or None; it has {key!r}")
        yield ExpertKey(*key)


def filling(store: _Store) -> list[ExpertKey]:
    """Return what fits into the slots that hold nothing: the hot list, then every layer's first expert, and so on."""
    vacant = store._vacant()
    chosen: dict[ExpertKey, None] = {}
    for key in _in_turn(store):
        size_class = store._sizing.cls[store._key(*key)]
        if size_class < len(vacant) and vacant[size_class] and key not in chosen and not store.is_resident(key):
            vacant[size_class] -= 1
            chosen[key] = None
            if not any(vacant):
                break
    return list(chosen)


def _in_turn(store: _Store) -> Iterator[ExpertKey]:
    if store.hot_list is not None:
        yield from _keys(store.hot_list, "hot_list")
    experts = {layer: store.experts(layer) for layer in store.layers}
    for expert in range(max(map(len, experts.values()), default=0)):
        for layer in experts:
            if (layer, expert) in store:
                yield ExpertKey(layer, expert)


def _window(waiting: deque[ExpertKey], sizes: Mapping[ExpertKey, int]) -> Iterator[ExpertKey]:
    nbytes = 0
    while waiting and nbytes < WINDOW_BYTES:
        key = waiting.popleft()
        nbytes += max(sizes[key], 1)
        yield key
