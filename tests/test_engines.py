"""Both engines under the core: the right bytes, the right error, and no thread or descriptor left."""

import contextlib
import errno
import gc
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from fastcache_ext.files import FileSet
from fastcache_ext.serve import Server
from fastcache_ext.views import Catalog

SHORT = 1001  # FC_ESHORT
CLOSED_CHANGED = {SHORT, 1002}  # a file that shrinks is short and changed


class Refused(Exception):
    """What a raw store raises: `code` is a positive errno or one of the core's own numbers."""

    def __init__(self, code, layer, expert, path, offset, wanted, got):
        super().__init__(code, layer, expert, path, offset, wanted, got)
        self.code, self.expert, self.path, self.offset = code, expert, path, offset


class Raw(Server):
    """One layer of equal experts: expert e is bytes [e * nbytes, (e + 1) * nbytes) of the file at `path`."""

    def __init__(self, path, nbytes, slots, engine, direct="auto", depth=32, threads=4, chunk=1 << 20, registered=True):
        files = FileSet([str(path)], direct=direct)
        self.nbytes, self.experts = nbytes, os.path.getsize(path) // nbytes
        align = files.align
        starts = [e * nbytes for e in range(self.experts)]
        heads = [start % align for start in starts]
        slot = (max(heads) + nbytes + align - 1) // align * align
        slot = (slot + 4095) // 4096 * 4096
        spans = [(head + nbytes + align - 1) // align * align for head in heads]
        self._set_catalog(
            Catalog(
                [([("bytes", 0, 0, np.uint8, (nbytes,), (1,))], {}, [nbytes])],
                np.zeros(self.experts, np.uint16),
                np.array(heads, np.int64).reshape(-1, 1),
                tuple,
                RuntimeError,
            )
        )
        self._open(
            layers=[(0, self.experts)],
            cls_of=bytes(self.experts),
            ext_first=np.arange(self.experts + 1, dtype=np.int32),
            extents=b"".join(struct.pack("<qqqii", start, nbytes, 0, 0, 0) for start in starts),
            span=np.array(spans, np.int64),
            files=files,
            class_bytes=[slot],
            class_slots=[slots],
            policy="lru",
            engine=engine,
            chunk=chunk,
            queue_depth=depth,
            io_threads=threads,
            hugepages="off",
            mlock=False,
            registered=registered,
            overflow=-1,
            direct_required=direct == "require",
        )

    def _error(self, *what):
        return Refused(*what)

    def _batch_error(self, failed):
        return Refused(*next(iter(failed.values())).args)


@contextlib.contextmanager
def raw(*args, **kwargs):
    store = Raw(*args, **kwargs)
    try:
        yield store
    finally:
        assert store._shut(10_000_000_000), "a read did not return"


@pytest.fixture(scope="module")
def shard(disk):
    """8 MiB and 100 bytes of noise, and its bytes."""
    path = disk / "engines"
    data = random.Random(7).randbytes((8 << 20) + 100)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return path, data


@pytest.fixture
def uring_only(engine):
    if engine != "uring":
        pytest.skip("about the ring")


def forget(path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return names


def links() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


@pytest.mark.parametrize("direct", ["require", "off"])
@pytest.mark.parametrize("nbytes", [100, 4096, 65536 + 3, (1 << 20) + 513])
def test_every_byte_of_every_expert_arrives_cold_and_warm(engine, shard, direct, nbytes):
    path, data = shard
    with raw(path, nbytes, 4, engine, direct) as store:
        some = [*random.Random(nbytes).sample(range(store.experts), min(store.experts, 64)), store.experts - 1]
        for pass_ in ("cold", "warm"):
            if pass_ == "cold":
                forget(path)
            for e in some:
                with store[0, e] as lease:
                    assert bytes(lease["bytes"]) == data[e * nbytes : (e + 1) * nbytes], (pass_, e)


@pytest.mark.parametrize("depth", [1, 2, 3, 32, 500])
def test_any_depth_serves_a_batch_of_every_size(engine, shard, depth):
    path, data = shard
    with raw(path, 4096, 512, engine, depth=depth, threads=depth, chunk=4096) as store:
        for n in (1, 2, 7, 64, 512):
            first = random.Random(n).randrange(store.experts - n)
            with store.acquire_many(0, list(range(first, first + n))) as leases:
                got = b"".join(bytes(lease["bytes"]) for lease in leases)
            assert got == data[first * 4096 : (first + n) * 4096]


def test_ten_thousand_reads_through_eight_slots(engine, shard):
    path, data = shard
    rng = random.Random(3)
    with raw(path, 512, 8, engine, "require") as store:
        for _ in range(10_000):
            e = rng.randrange(store.experts)
            assert bytes(store[0, e]["bytes"]) == data[e * 512 : (e + 1) * 512]


def test_reads_go_on_while_others_are_in_flight(engine, shard):
    """A demand is handed to an engine that already sleeps on a prefetch."""
    path, data = shard
    with raw(path, 65536, 32, engine, "require", chunk=16384) as store:
        for start in range(0, 96, 8):
            ahead = store._prefetch(0, list(range(start, start + 8)))
            e = start + 20
            assert bytes(store[0, e]["bytes"]) == data[e * 65536 : (e + 1) * 65536]
            ahead.wait()


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_file_that_was_cut_fails_its_own_experts_only(engine, disk, direct):
    path = disk / f"cut-{engine}-{direct}"
    path.write_bytes(b"\xa5" * (1 << 20))
    with raw(path, 65536, 4, engine, direct) as store:
        os.truncate(path, 8 * 65536 + 100)
        for e in (8, 15):
            with pytest.raises(Refused) as caught:
                store[0, e]
            assert caught.value.code in CLOSED_CHANGED and caught.value.expert == e
        assert store._check() == 0


def run(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.root
def test_a_failing_disk_is_an_io_error_with_its_place(engine, tmp_path):
    if not shutil.which("losetup") or not shutil.which("mkfs.ext4"):
        pytest.skip("needs losetup and mkfs.ext4")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.touch()
    os.truncate(image, 64 << 20)
    try:
        device = run("losetup", "--find", "--show", str(image))
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"no loop device: {exc.stderr}")
    try:
        run("mkfs.ext4", "-q", device)
        run("mount", device, str(mount))
        path = mount / "shard"
        path.write_bytes(b"\x5a" * (16 << 20))
        os.sync()
        with raw(path, 1 << 20, 4, engine, "require") as store:
            os.truncate(image, 1 << 20)  # the disk loses what is behind its first MiB
            with pytest.raises(Refused) as caught:
                store[0, 9]
            assert caught.value.code == errno.EIO and caught.value.path == str(path)
            assert 9 << 20 <= caught.value.offset < 10 << 20
            assert store._check() == 0
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=False)
        run("losetup", "--detach", device)


def test_threads_and_descriptors_are_gone_after_close(engine, shard):
    path, _ = shard
    name = {"uring": "fastcache-ring", "pread": "fastcache-pread"}[engine]
    gc.collect()  # stores of earlier tests
    others, before = threads().count(name), sorted(links())
    for _ in range(50):
        with raw(path, 4096, 4, engine, threads=3) as store:
            store.acquire(0, 1).release()
            assert threads().count(name) - others == (3 if engine == "pread" else 1)
        del store
    assert threads().count(name) == others
    assert sorted(links()) == before


def test_closing_with_reads_in_flight_is_prompt_and_keeps_what_is_held(engine, shard):
    path, data = shard
    for _ in range(20):
        store = Raw(path, 65536, 100, engine, "require", chunk=4096)
        held = store[0, 0]["bytes"]
        store._prefetch(0, list(range(1, 100)))
        start = time.monotonic()
        assert store._shut(10_000_000_000)
        assert time.monotonic() - start < 5
        assert bytes(held) == data[:65536]


def test_an_idle_store_uses_no_processor_time(engine, shard):
    path, _ = shard
    with raw(path, 4096, 4, engine) as store:
        store.acquire(0, 1).release()
        deadline = time.monotonic() + 10
        while not store._progress()[1] and time.monotonic() < deadline:
            time.sleep(0.01)  # memory is populated and registered in the background
        start = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - start < 0.05


def test_signals_neither_fail_nor_repeat_a_read(engine, shard):
    path, data = shard
    hits = 0

    def count(*_):
        nonlocal hits
        hits += 1

    was = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with raw(path, 65536, 4, engine, "require") as store:
            for e in range(128):
                assert bytes(store[0, e % store.experts]["bytes"]) == data[e * 65536 :][:65536]
            assert store._counters()[0]["misses"] == 128
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)
    assert hits > 0


def test_a_ring_closed_beneath_its_store_fails_reads_and_still_closes(uring_only, shard):
    """Programs that close "every descriptor" exist. The reads say so; nothing hangs."""
    path, _ = shard
    before = set(os.listdir("/proc/self/fd"))
    with raw(path, 4096, 4, "uring") as store:
        store.acquire(0, 1).release()
        for fd in set(os.listdir("/proc/self/fd")) - before:
            with contextlib.suppress(FileNotFoundError):
                if "io_uring" in os.readlink(f"/proc/self/fd/{fd}"):
                    os.close(int(fd))
        for e in (2, 3):
            with pytest.raises(Refused) as caught:
                store[0, e]
            assert caught.value.code == errno.EBADF
