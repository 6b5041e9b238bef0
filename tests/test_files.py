"""Opening the files of a store: what is refused, and how each file's reads are decided by a read."""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastcache_ext.files import FileSet

SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 2 * 4096 + 100, 1 << 20]


def write(path, nbytes: int) -> str:
    path.write_bytes(bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256))
    return str(path)


def descriptors() -> dict[int, str]:
    links = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            links[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return links


def of(path: str) -> list[int]:
    return [fd for fd, link in descriptors().items() if link == path]


@pytest.fixture
def folder(disk):
    """A new folder on a file system that reads directly."""
    path = Path(tempfile.mkdtemp(dir=disk))
    files = FileSet([write(path / "probe", 8192)])
    if files.direct_count == 0:
        pytest.skip(f"no direct reads in {disk}: {files.reasons[0]}")
    return path


@pytest.fixture
def shm():
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    path = f"/dev/shm/fastcache-test-{os.getpid()}"
    with open(path, "wb") as file:
        file.write(b"x" * 5000)
    yield path
    os.unlink(path)


def run(*command) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def sectors_4k(tmp_path):
    """A mounted ext4 on a loop device with sectors of 4096 bytes."""
    if not shutil.which("losetup") or not shutil.which("mkfs.ext4"):
        pytest.skip("needs losetup and mkfs.ext4")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    try:
        device = run("losetup", "--find", "--show", "--sector-size", "4096", str(image))
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"no loop device: {exc.stderr}")
    try:
        run("mkfs.ext4", "-q", "-b", "4096", device)
        run("mount", device, str(mount))
        try:
            yield mount
        finally:
            run("umount", str(mount))
    finally:
        run("losetup", "--detach", device)


def test_every_size_is_tried_at_its_start_and_end_and_read_directly(folder):
    files = FileSet([write(folder / str(size), size) for size in SIZES], direct="require")
    assert files.direct_count == len(files) == len(SIZES)
    assert files.reasons == [""] * len(SIZES)
    assert [row["size"] for row in files.describe()] == SIZES


def test_the_largest_alignment_is_a_power_of_two_of_at_least_512(folder):
    files = FileSet([write(folder / "a", 4096)])
    assert files.align >= 512 and files.align & (files.align - 1) == 0
    assert files.align == max(row["align"] for row in files.describe())
    assert FileSet([]).align == 512


def test_two_descriptors_per_file_that_block_and_do_not_outlive_exec(folder):
    path = write(folder / "a", 4096)
    files = FileSet([path])
    fds = of(path)
    assert len(fds) == 2
    flags = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in fds]
    assert sorted(bool(flag & os.O_DIRECT) for flag in flags) == [False, True]
    assert not any(flag & os.O_NONBLOCK for flag in flags)
    assert not any(os.get_inheritable(fd) for fd in fds)
    files.close()
    files.close()
    assert of(path) == [] and files.direct_count == 0


def test_dropping_the_set_closes_its_descriptors(folder):
    path = write(folder / "a", 4096)
    files = FileSet([path])
    assert of(path)
    del files
    assert of(path) == []


def test_direct_off_opens_one_descriptor_and_says_so(folder):
    path = write(folder / "a", 4096)
    files = FileSet([path], direct="off")
    assert len(of(path)) == 1 and files.direct_count == 0
    assert files.reasons == ["switched off (direct=off)"]


def test_tmpfs_is_buffered_because_it_is_memory_already(shm):
    files = FileSet([shm])
    (row,) = files.describe()
    assert not row["direct"] and row["filesystem"] == "tmpfs" and row["size"] == 5000
    assert row["reason"] == "tmpfs keeps its files in memory"
    assert len(of(shm)) == 1


def test_requiring_direct_reads_names_the_file_that_has_none(shm):
    with pytest.raises(OSError, match="Direct reads are required, but tmpfs keeps its files in memory") as caught:
        FileSet([shm], direct="require")
    assert caught.value.filename == shm and caught.value.errno == errno.EOPNOTSUPP
    assert of(shm) == []


def test_one_buffered_file_does_not_make_the_others_buffered(folder, shm):
    files = FileSet([write(folder / "a", 4096), shm, write(folder / "b", 100)])
    assert [row["direct"] for row in files.describe()] == [True, False, True]


@pytest.mark.root
def test_sectors_of_4096_bytes_decide_the_alignment(sectors_4k):
    files = FileSet([write(sectors_4k / str(size), size) for size in SIZES], direct="require")
    assert files.align == 4096
    assert files.direct_count == len(SIZES)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        FileSet([str(tmp_path)])
    assert caught.value.filename == str(tmp_path)


def test_a_fifo_is_refused_and_does_not_block(tmp_path):
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    with pytest.raises(OSError, match="Not a regular file, but a FIFO") as caught:
        FileSet([path])
    assert caught.value.filename == path


def test_a_device_is_refused():
    with pytest.raises(OSError, match="Not a regular file, but a device"):
        FileSet(["/dev/zero"])


def test_a_missing_file_closes_those_opened_before_it(folder):
    path = write(folder / "a", 4096)
    with pytest.raises(FileNotFoundError) as caught:
        FileSet([path, str(folder / "missing")])
    assert caught.value.filename == str(folder / "missing")
    caught = None  # its traceback holds the set
    assert of(path) == []


def test_an_unreadable_file_is_refused(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = write(tmp_path / "a", 10)
    os.chmod(path, 0)
    with pytest.raises(PermissionError):
        FileSet([path])


def test_a_memory_file_holds_its_buffer_until_close():
    buffer = bytearray(b"abcd" * 100)
    files = FileSet([None], memory=[buffer])
    assert files.describe()[0]["size"] == 400 and files.direct_count == 0 and files.reasons == ["in memory"]
    with pytest.raises(BufferError):
        buffer.clear()
    files.close()
    buffer.clear()


def test_memory_and_paths_may_be_mixed_and_must_not_contradict(folder):
    path = write(folder / "a", 4096)
    files = FileSet([path, None], memory=[None, b"xyz"])
    assert [row["path"] for row in files.describe()] == [path, None]
    with pytest.raises(ValueError, match="both a path and memory"):
        FileSet([path], memory=[b"xyz"])
    with pytest.raises(ValueError, match="1 memory entries for 2 paths"):
        FileSet([path, path], memory=[None])
    with pytest.raises(TypeError):
        FileSet([None])
    with pytest.raises(BufferError):
        FileSet([None], memory=[memoryview(b"abcdef")[::2]])


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match='"auto", "require" or "off"'):
        FileSet([], direct="yes")


LIMITS = """
import resource, sys
from fastcache_ext.files import FileSet
folder, soft, hard = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
paths = [f"{folder}/{i}" for i in range(100)]
files = FileSet(paths)
print(len(files), resource.getrlimit(resource.RLIMIT_NOFILE)[0] > soft)
"""


def limited(folder, soft: int, hard: int) -> subprocess.CompletedProcess:
    for i in range(100):
        write(folder / str(i), 600)
    return subprocess.run(
        [sys.executable, "-c", LIMITS, str(folder), str(soft), str(hard)], capture_output=True, text=True, timeout=60
    )


def test_a_low_soft_limit_on_open_files_is_raised(tmp_path):
    done = limited(tmp_path, 64, 1024)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["100", "True"]


def test_a_low_hard_limit_on_open_files_says_how_many_are_needed(tmp_path):
    done = limited(tmp_path, 64, 128)
    assert done.returncode != 0
    assert "100 files need 2" in done.stderr and "the hard limit is 128" in done.stderr


def test_a_limit_that_suffices_is_left_alone(tmp_path):
    done = limited(tmp_path, 1024, 1024)
    assert done.stdout.split() == ["100", "False"]
