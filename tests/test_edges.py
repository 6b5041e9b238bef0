"""What lies at the edges: files that end too early, arguments that are none, objects that nobody made, early ends."""

import contextlib
import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from checkpoints import split_experts, st
from rig import Experts, assert_identities, expert_bytes, layers_of, until

import fastcache
from fastcache.errors import CheckpointTruncated
from fastcache.layout.build import build_layout
from fastcache.sources import Extent
from fastcache_ext.batch import Batch

NBYTES = 9_000


@pytest.fixture(scope="module")
def experts(disk):
    return Experts(disk, layers_of(2, 8, NBYTES))


@pytest.fixture
def store(experts, engine):
    with fastcache.open(experts.source, "all", engine=engine) as opened:
        yield opened
        assert opened._check() == 0
    assert_identities(opened)


def child(script, *args, timeout=60):
    """Run a script in another process, where a crash is an exit code."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# ---- files that end before their experts do


class Unchecked:
    """An ExtentSource that believes what it was told."""

    def __init__(self, path, ranges):
        self.path, self.ranges = str(path), ranges

    def keys(self):
        return list(self.ranges)

    def expert_nbytes(self, key):
        return sum(nbytes for _, nbytes in self.ranges[key])

    def extents(self, key):
        return [Extent(self.path, offset, nbytes) for offset, nbytes in self.ranges[key]]


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("over", [1, 511, 4096, (1 << 40) - 4 * 4096])
def test_an_expert_that_ends_after_its_file_is_refused_at_open(disk, engine, direct, over):
    path = disk / f"too-short-{engine}-{direct}-{over}"
    path.write_bytes(bytes(3 * 4096))
    ranges = {(0, 0): [(0, 4096)], (0, 1): [(4096, 4096), (2 * 4096, 4096)]}
    fastcache.open(Unchecked(path, ranges), "all", engine=engine, direct=direct).close()
    for late in ([(0, 3 * 4096 + over)], [(0, 4096), (2 * 4096 + over, 4096)], [(3 * 4096 - 1 + over, 1)]):
        with pytest.raises(CheckpointTruncated, match=f"{path}.*ends at byte {3 * 4096 + over}.*12288"):
            fastcache.open(Unchecked(path, ranges | {(0, 2): late}), "all", engine=engine, direct=direct)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_file_that_was_cut_after_its_source_was_made_is_refused_at_open(disk, engine, direct):
    experts = Experts(disk, layers_of(1, 4, NBYTES))
    os.truncate(experts.path, experts.path.stat().st_size - 1)
    with pytest.raises(CheckpointTruncated, match=experts.path.name):
        fastcache.open(experts.source, 2 * 12_288, engine=engine, direct=direct)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_checkpoint_that_was_cut_after_its_header_was_read_is_refused_at_open(disk, engine, direct):
    path = st(disk / f"cut-{engine}-{direct}.safetensors", split_experts([0], 4))
    layout = build_layout(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointTruncated, match=path.name):
        fastcache.open(layout, "all", engine=engine, direct=direct)


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("left", [0, 100, 4 * NBYTES, 4 * NBYTES + 1, 8 * NBYTES - 1])
def test_a_file_that_is_cut_after_open_never_shows_another_experts_bytes(disk, engine, direct, left):
    experts = Experts(disk, layers_of(1, 8, NBYTES), gap=0)
    source = Unchecked(experts.path, experts.ranges)
    with fastcache.open(source, 3 * 12_288, engine=engine, direct=direct) as store:
        for expert in range(8):
            assert experts.right((0, expert), store[0, expert])  # every slot has been somebody's
        resident = [expert for expert in range(8) if store.is_resident(0, expert)]
        os.truncate(experts.path, left)
        for expert in set(range(8)) - set(resident):
            errors = fastcache.ShortRead, fastcache.CheckpointChanged
            with pytest.raises(errors, match=f"layer 0 expert {expert}: .*{experts.path.name}"):
                store[0, expert]
            assert not store.is_resident(0, expert)
        for expert in resident:
            assert not store.is_resident(0, expert) or experts.right((0, expert), store[0, expert])
        assert store._check() == 0
    assert_identities(store)


# ---- sources that name no experts


class Named:
    """A Python source of the keys that it is given."""

    def __init__(self, *keys):
        self.given = keys

    def keys(self):
        return self.given

    def expert_nbytes(self, key):
        return 100

    def read_expert(self, key):
        return bytes(100)


@pytest.mark.parametrize("key", [(-1, 0), (0, -1), (-3, -3), (-(2**70), 0), (1 << 20, 0)])
def test_a_key_that_no_layer_can_have_is_a_value_error_at_open(key):
    with pytest.raises(ValueError):
        fastcache.open(Named((0, 0), key), "all", engine="auto")


@pytest.mark.parametrize("key", [(0.0, 1), ("0", "1"), (None, 0), (True, 0), (0,), (0, 1, 2), 7, "01", [0, 1]])
def test_a_key_that_is_no_pair_of_integers_is_a_type_error_at_open(key):
    with pytest.raises(TypeError, match="two integers"):
        fastcache.open(Named((0, 0), key), "all", engine="auto")


# ---- arguments


class Index:
    """An integer by its __index__ alone."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("-inf"), "x", [], object()])
def test_a_timeout_that_is_none_is_refused_before_anything_is_counted(store, timeout, resident):
    if resident:
        store.prefetch(0, [1, 2]).wait()
    before = store.stats()
    for call in (
        lambda: store.acquire(0, 1, timeout=timeout),
        lambda: store.acquire_many(0, [1, 2], timeout=timeout),
        lambda: store.acquire_many(0, iter([1, 2]), timeout=timeout),
        lambda: store.as_ready(0, [1, 2], timeout=timeout),
        lambda: store.pin(0, [1, 2], timeout=timeout),
    ):
        with pytest.raises((ValueError, TypeError)):
            call()
    assert store.stats() == before and store.is_resident(0, 1) == resident


def test_keys_that_are_integers_by_index_alone_are_served_and_counted_once(store, experts):
    for hits in range(2):
        assert experts.right((0, 3), store[Index(0), Index(3)])
        assert experts.right((0, 4), store.acquire(Index(0), Index(4)))
        assert [lease.key for lease in store.acquire_many(Index(1), [Index(2), Index(5)])] == [(1, 2), (1, 5)]
        assert dict(store.as_ready(Index(0), [Index(6)])).keys() == {6}
        s = store.stats()
        assert (s.requests, s.misses, s.hits) == (5 + 5 * hits, 5, 5 * hits)
    store.pin(Index(0), [Index(3)])
    store.unpin(Index(0), [Index(3)])
    assert store.prefetch(Index(0), [Index(3)]).done()
    assert (Index(0), Index(3)) in store and store.expert_nbytes(Index(0), Index(3)) == NBYTES
    assert store.stats().requests == 10


@pytest.mark.parametrize("number", [np.int8, np.uint64, np.intp, lambda value: np.array(value, np.int32)])
def test_numpys_integers_are_keys(store, experts, number):
    for _ in range(2):
        assert experts.right((1, 3), store[number(1), number(3)])
        assert [lease.key for lease in store.acquire_many(number(1), number(2))] == [(1, 2)]
        assert [lease.key for lease in store.acquire_many(1, np.array([number(4), number(4)]))] == [(1, 4)] * 2
    assert (store.stats().requests, store.stats().misses) == (6, 3)


@pytest.mark.parametrize(
    "some",
    [
        np.ones(8, bool),
        np.array([1.0, 2.0]),
        np.zeros(0),
        np.array([[0, 1]]),
        np.zeros((0, 2), int),
        np.array(1.0),
        np.array(["1"]),
        np.array([1], object),
        "1",
        b"1",
        1.0,
        [1.0],
        ["1"],
        [None],
        [[1]],
        pytest.param(object(), id="object"),
    ],
    ids=repr,
)
def test_experts_that_are_no_row_of_integers_are_a_type_error_and_count_nothing(store, some):
    for call in (store.acquire_many, store.as_ready, store.prefetch, store.pin, store.unpin):
        with pytest.raises(TypeError):
            call(0, some)
    s = store.stats()
    assert s.requests == s.prefetch_issued == 0


@pytest.mark.parametrize(
    "expert", ["1", 1.0, np.array([1]), np.True_, [1], pytest.param(object(), id="object")], ids=repr
)
def test_one_expert_that_is_no_integer_is_a_type_error_and_counts_nothing(store, expert):
    for call in (lambda: store[0, expert], lambda: store.acquire(0, expert), lambda: store[expert, 0]):
        with pytest.raises(TypeError):
            call()
    assert (0, expert) not in store and store.stats().requests == 0


# ---- objects that only a store makes


def test_what_a_store_makes_cannot_be_made_by_hand(store):
    ready = type(store.as_ready(0, [0]))
    for kind in (fastcache.ExpertLease, fastcache.Prefetch, Batch, ready):
        for args in ((), (store,), (store, 0, 1)):
            with pytest.raises(TypeError):
                kind(*args)


def test_a_store_that_was_never_opened_raises_from_every_call():
    bare = fastcache.ExpertStore.__new__(fastcache.ExpertStore)
    for call in (
        lambda: len(bare),
        lambda: list(bare),
        lambda: (0, 0) in bare,
        lambda: bare[0, 0],
        lambda: bare.acquire(0, 0),
        lambda: bare.acquire_many(0, [0]),
        lambda: bare.as_ready(0, [0]),
        lambda: bare.prefetch(0, [0]),
        lambda: bare.pin(0, 0),
        lambda: bare.unpin(0, 0),
        lambda: bare.is_resident(0, 0),
        lambda: bare.expert_nbytes(0, 0),
        lambda: bare.stats(),
        lambda: bare.describe(),
        lambda: bare.close(),
        lambda: repr(bare),
    ):
        with pytest.raises(Exception):
            call()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda it: pickle.dumps(it, 0)])
def test_what_refers_to_a_store_cannot_be_copied_or_pickled(store, duplicate):
    for it in (store, store.prefetch(0, [1]), store.as_ready(0, [1, 2])):
        with pytest.raises(TypeError, match="pickled"):
            duplicate(it)


# ---- ends

POPULATED = """
import sys, fastcache
path, engine, mebibytes, turns = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
source = fastcache.FileRangeSource(path, {(0, e): (e << 20, 1 << 20) for e in range(mebibytes)})
for n in range(turns):
    store = fastcache.open(source, mebibytes << 20, engine=engine, mlock="off" if n % 3 == 0 else "auto")
    if n % 4 == 0:
        handle = store.prefetch(0, range(mebibytes))
    while store._progress()[0] < (mebibytes << 20) * n // turns and not store._progress()[1]:
        pass
    if n % 2:
        store.close()
    store = handle = None
print("done")
"""


@pytest.mark.parametrize("mebibytes, turns", [(64, 24), (256, 8)])
def test_a_store_may_go_while_its_memory_is_still_populated(disk, engine, mebibytes, turns):
    path = disk / f"sparse-{mebibytes}"
    path.touch()
    os.truncate(path, mebibytes << 20)
    child(POPULATED, path, engine, mebibytes, turns)


EXHAUSTED = """
import contextlib, os, resource, sys, fastcache
source = fastcache.FileRangeSource(sys.argv[1], {(0, e): (9_000 * e, 9_000) for e in range(8)})
before = len(os.listdir("/proc/self/task"))
store = fastcache.open(source, 4 * 16_384, engine=sys.argv[2])
lease = store[0, 1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
with contextlib.suppress(OSError):
    while True:
        taken.append(os.dup(0))
assert taken
store.close()
assert store.describe()["arena_bytes"] > 0 and lease.nbytes == 9_000
for fd in taken:
    os.close(fd)
while len(os.listdir("/proc/self/task")) > before:
    pass  # the kernel lists a thread a moment after it was joined
print("done")
"""


def test_a_store_closes_without_a_free_descriptor(experts, engine):
    child(EXHAUSTED, experts.path, engine)


def test_descriptors_and_threads_are_gone_when_close_returns(experts, engine):
    def descriptors():
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sorted(links)

    def threads():
        return len(os.listdir("/proc/self/task"))

    before, were, closed = descriptors(), threads(), []
    for n in range(50):
        store = fastcache.open(experts.source, 4 * 12_288, engine=engine)
        assert len(descriptors()) > len(before) and threads() > were
        lease = store[n % 2, n % 8]
        store.prefetch(0, range(8))
        store.close()
        closed.append((store, lease))  # neither of which has a descriptor or a thread
        assert descriptors() == before
        until(lambda: threads() == were, "the end of threads")  # the kernel lists one a moment after it was joined
    assert all(bytes(lease) == expert_bytes(*lease.key, NBYTES) for _, lease in closed)
