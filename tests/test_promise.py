"""The main promise: whatever is made from a lease shows its expert's bytes for as long as it lives."""

import contextlib
import gc
import importlib.util
import pickle
import random
import sys
import threading
import time

import numpy as np
import pytest
from checkpoints import as_numbers, moe_dir, qwen, split_experts
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from rig import PATIENCE, assert_identities, held

import fastcache

LAYERS, EXPERTS, TOP_K = 2, 10, 3
SHAPES = {0: ("F32", 33, 40), 1: ("BF16", 21, 48)}  # dtype, inner, hidden: two sizes of slot

ARRAYS = {  # what people do with an array
    "the array": lambda a: a,
    "slice": lambda a: a[1:, ::2],
    "row": lambda a: a[3],
    "reversed": lambda a: a[::-1],
    "reshape": lambda a: a.reshape(-1),
    "transpose": lambda a: a.T,
    "bytes": lambda a: a.view(np.uint8) if a.flags.c_contiguous else a.T.view(np.uint8),
    "new axis": lambda a: a[None, ..., None],
    "broadcast": lambda a: np.broadcast_to(a, (3, *a.shape)),
    "asarray": lambda a: np.asarray(a),
    "array, no copy": lambda a: np.array(a, copy=None),
    "astype, no copy": lambda a: a.astype(a.dtype, copy=False),
    "ascontiguousarray": lambda a: np.ascontiguousarray(a),
    "as_strided": lambda a: as_strided(a, (5, 4), (a.strides[0], a.strides[1]), writeable=False),
    "windows": lambda a: sliding_window_view(a, 3, axis=0),
    "split": lambda a: np.split(a, [2], axis=0)[1],
    "subok": lambda a: a.view(np.matrix) if a.dtype == np.float32 else a,
    "ndarray(buffer=array)": lambda a: (
        np.ndarray(a.shape, a.dtype, buffer=a.view(np.uint8), strides=a.strides) if a.flags.c_contiguous else a
    ),
}
WITH_A_FORMAT = {  # NumPy gives ml_dtypes no buffer format and no DLPack type
    "memoryview": lambda a: memoryview(a),
    "memoryview of a slice": lambda a: memoryview(a[2:5]),
    "asarray of a memoryview": lambda a: np.asarray(memoryview(a)),
    "from_dlpack": lambda a: np.from_dlpack(a),
    "ndarray(buffer=memoryview)": lambda a: np.ndarray(a.size, a.dtype, buffer=memoryview(a.reshape(-1, order="A"))),
}
BUFFERS = {  # what people do with the lease itself
    "memoryview": lambda b: memoryview(b),
    "memoryview slice": lambda b: memoryview(b)[100:900:3],
    "memoryview cast": lambda b: memoryview(b)[: len(memoryview(b)) // 8 * 8].cast("d"),
    "frombuffer": lambda b: np.frombuffer(b, np.uint8),
    "frombuffer at an offset": lambda b: np.frombuffer(b, np.uint8, 500, 77),
    "asarray": lambda b: np.asarray(memoryview(b)),
    "asarray of the object": lambda b: (
        np.asarray(memoryview(b).obj) if not isinstance(b, bytes) else np.frombuffer(b, "u1")
    ),
    "ndarray(buffer=)": lambda b: np.ndarray((900,), np.uint8, buffer=b),
    "ndarray(buffer=, offset, strides)": lambda b: np.ndarray((30, 20), np.int16, b, 64, (50, 2)),
    "ndarray(buffer=memoryview)": lambda b: np.ndarray((900,), np.uint8, buffer=memoryview(b)),
    "slice of ndarray(buffer=)": lambda b: np.ndarray((900,), np.uint8, buffer=b)[5:700].reshape(5, -1).T,
    "PickleBuffer": lambda b: pickle.PickleBuffer(b).raw(),
}
if importlib.util.find_spec("torch"):
    import torch

    BUFFERS["torch.frombuffer"] = lambda b: torch.frombuffer(b, dtype=torch.uint8).numpy()
    WITH_A_FORMAT["torch.from_numpy"] = lambda a: torch.from_numpy(a).numpy()


def shown(view):
    """Return the bytes that a view shows now."""
    return view.tobytes() if isinstance(view, (np.ndarray, memoryview)) else bytes(view)


class Checkpoint:
    """A tiny MoE directory, and for each expert what every kind of view must show."""

    def __init__(self, directory):
        entries = [
            entry
            for layer, (dtype, inter, hidden) in SHAPES.items()
            for entry in split_experts([layer], EXPERTS, dtype, inter, hidden)
        ]
        self.path = moe_dir(directory, [entries[::2], entries[1::2]], qwen(EXPERTS, LAYERS, num_experts_per_tok=TOP_K))
        by_name = {entry[0]: as_numbers(entry) for entry in entries}
        self.expected = {}
        with fastcache.open(self.path, "all", engine="pread", direct="off") as store:
            self.slot_bytes = store.describe()["slot_bytes"]
            for key in store:
                name = f"model.layers.{key.layer}.mlp.experts.{key.expert}.{{}}_proj.weight"
                arrays = {label: by_name[name.format(label)] for label in ("gate", "up", "down")}
                assert all(store[key][label].tobytes() == array.tobytes() for label, array in arrays.items())
                self.expected[key] = {
                    **{
                        (label, kind): shown(make(array))
                        for label, array in arrays.items()
                        for kind, make in self.kinds(key.layer).items()
                    },
                    **{(None, kind): shown(make(bytes(store[key]))) for kind, make in BUFFERS.items()},
                }

    @staticmethod
    def kinds(layer):
        return ARRAYS | (WITH_A_FORMAT if SHAPES[layer][0] == "F32" else {})

    def view(self, rng, lease):
        """Return a view of some kind, and the bytes that it must show."""
        label, kind = rng.choice([*self.expected[lease.key]])
        expected = self.expected[lease.key][label, kind]
        if label is None:
            return BUFFERS[kind](lease), expected, (lease.key, kind)
        return self.kinds(lease.key.layer)[kind](lease[label]), expected, (lease.key, label, kind)


@pytest.fixture(scope="module")
def checkpoint(disk):
    return Checkpoint(disk / "promise")


EXPECTED = (fastcache.StoreClosed, fastcache.BudgetTooSmall)  # closed under us; everything leased when a pin came


class Stress:
    """Threads that take views of everything, and a store that is closed and opened again under them."""

    def __init__(self, checkpoint, seconds, seed, **arguments):
        self.checkpoint, self.arguments, self.seed = checkpoint, arguments, seed
        self.budget = (TOP_K + 1) * max(checkpoint.slot_bytes)
        self.end = time.monotonic() + seconds
        self.store, self.failures, self.checked = self.open(), [], 0

    def open(self):
        return fastcache.open(self.checkpoint.path, self.budget, timeout=PATIENCE, **self.arguments)

    def run(self):
        threads = [threading.Thread(target=self.work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        pause, rng = threading.Event(), random.Random(self.seed)
        while time.monotonic() < self.end and not self.failures:
            pause.wait(0.2)
            assert self.store.describe()["arena_bytes"] <= self.budget
            assert_identities(self.store, quiet=False)
            assert self.store._check() == 0
            if rng.random() < 0.3:
                old, self.store = self.store, self.open()
                old.close()
                assert_identities(old)
        for thread in threads:
            thread.join(PATIENCE + 10)
            assert not thread.is_alive(), "deadlock"
        if self.failures:
            raise self.failures[0]
        assert self.checked > 100
        self.store.unpin(list(self.store))
        gc.collect()
        told = self.store.describe()
        assert told["leased_slots"] == 0 and told["overflow_bytes"] == 0
        self.store.close()
        assert_identities(self.store)

    def work(self, n):
        rng, kept = random.Random(f"{self.seed} {n}"), []
        try:
            while time.monotonic() < self.end and not self.failures:
                with contextlib.suppress(*EXPECTED):
                    try:
                        self.step(rng, kept)
                    except fastcache.BatchFailed as error:
                        _, others = error.split(EXPECTED)
                        if others is not None:
                            raise others from None
                self.look(rng, kept)
        except BaseException as error:
            self.failures.append(error)

    def look(self, rng, kept):
        rng.shuffle(kept)
        for view, expected, what in kept:
            assert shown(view) == expected, what
            self.checked += 1
        del kept[rng.randrange(1, 9) :]

    def keep(self, rng, kept, lease):
        for _ in range(rng.randrange(3)):
            kept.append(self.checkpoint.view(rng, lease))
        if rng.random() < 0.5:
            lease.release()

    def step(self, rng, kept):
        store, layer = self.store, rng.randrange(LAYERS)
        some = rng.sample(range(EXPERTS), rng.randrange(1, TOP_K + 1))
        action = rng.choice(["get", "get", "many", "many", "ready", "guess", "guess", "pin", "unpin", "ask"])
        if action == "get":
            self.keep(rng, kept, store[layer, some[0]])
        elif action == "many":
            for lease in store.acquire_many(layer, [*some, some[0]]):
                self.keep(rng, kept, lease)
        elif action == "ready":
            for _, lease in store.as_ready(layer, range(EXPERTS) if rng.random() < 0.1 else some):
                self.keep(rng, kept, lease)
                if rng.random() < 0.05:
                    break
        elif action == "guess":
            handle = store.prefetch(layer, some)
            if rng.random() < 0.3:
                handle.cancel()
            elif rng.random() < 0.3:
                handle.result(timeout=PATIENCE)
        elif action == "pin":
            store.pin(layer, some[0])
        elif action == "unpin":
            store.unpin(layer, range(EXPERTS))
        else:
            assert isinstance(store.is_resident(layer, some[0]), bool)
            assert store.stats().requests >= 0


@pytest.fixture
def nervous():
    """Threads take turns a hundred times more often."""
    was = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(was)


@pytest.mark.parametrize("policy", ["next_use", "lru"])
@pytest.mark.parametrize("chunk", [4096, None])
def test_no_view_of_any_kind_ever_changes(checkpoint, engine, chunk, policy, nervous):
    Stress(checkpoint, 0.7, 1, engine=engine, chunk=chunk, policy=policy).run()


@pytest.mark.stress
@pytest.mark.parametrize("chunk", [4096, None])
def test_no_view_of_any_kind_ever_changes_for_long(checkpoint, engine, chunk, nervous, stress_seconds):
    Stress(checkpoint, stress_seconds / 4, time.time_ns(), engine=engine, chunk=chunk).run()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_each_kind_of_view_alone_keeps_its_expert(checkpoint, engine, layer):
    """One slot; the view is all that is left; every other expert is read. Then the view goes, and so does the hold."""
    key = fastcache.ExpertKey(layer, 4)
    with fastcache.open(checkpoint.path, 2 * max(checkpoint.slot_bytes), engine=engine) as store:
        for (label, kind), expected in checkpoint.expected[key].items():
            lease = store[key]
            source = lease if label is None else lease[label]
            view = (BUFFERS if label is None else checkpoint.kinds(layer))[kind](source)
            lease.release()
            del lease, source
            before = held(store)
            for other in store:
                if other != key:
                    store.acquire(*other).release()
            assert shown(view) == expected, (label, kind)
            assert before <= 1
            del view
            assert held(store) == 0, (label, kind)
        assert_identities(store)
