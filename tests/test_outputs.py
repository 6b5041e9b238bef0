"""Files that are written: whole or not at all, never over what is read, and devices and pipes as they are."""

import errno
import os
import stat
import subprocess
import sys
import threading

import pytest

from fastcache.outputs import check_output, refuse_input, refuse_other_kind, whole_file


def write(path, data=b"new", **options):
    with whole_file(path, **options) as file:
        file.write(data)


def test_a_file_takes_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "a"
    write(path)
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    path.chmod(0o640)
    with pytest.raises(KeyError), whole_file(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"new"
    write(path, b"newer")
    assert path.read_bytes() == b"newer" and stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(FileExistsError):
        write(path, replace=False)
    assert path.read_bytes() == b"newer" and os.listdir(tmp_path) == ["a"]


def umask():
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def test_a_link_keeps_its_name_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("second")
    (tmp_path / "second").symlink_to("real/a")
    for data in (b"one", b"two"):  # a link to nothing, and to a file
        write(tmp_path / "link", data)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "a").read_bytes() == data
    assert os.listdir(tmp_path / "real") == ["a"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    assert check_output(path) == str(path)
    write(path, b"through")
    reader.join()
    assert read == [b"through"] and stat.S_ISFIFO(path.stat().st_mode)


def test_a_full_device_is_named_and_stays_one():
    with pytest.raises(OSError, match="/dev/full") as caught:
        write("/dev/full")
    assert caught.value.errno == errno.ENOSPC and stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_the_standard_output_goes_on_where_it_is_whatever_it_is(tmp_path, name):
    script = (
        "import sys; from fastcache.outputs import whole_file\n"
        "print('before', flush=True)\n"
        f"with whole_file({name!r}) as file: file.write(b'in it\\n')\n"
        "print('after')"
    )
    path = tmp_path / "out"
    with path.open("wb") as out:
        inode = os.fstat(out.fileno()).st_ino
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True)
    assert path.read_text() == "before\nin it\nafter\n" and path.stat().st_ino == inode
    piped = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True)
    assert piped.stdout == "before\nin it\nafter\n" and os.listdir(tmp_path) == ["out"]


def test_a_file_that_is_read_is_refused_by_any_name(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"kept")
    (tmp_path / "soft").symlink_to(path)
    os.link(path, tmp_path / "hard")
    for name in ("a", "soft", "hard", "../" + tmp_path.name + "/a"):
        with pytest.raises(FileExistsError, match="is read here"):
            check_output(tmp_path / name, [tmp_path / "none", path])
    refuse_input(tmp_path / "new", [path])
    refuse_input("/dev/null", ["/dev/null"])  # keeps nothing that could be lost
    assert check_output(tmp_path / "new", [path]) == str(tmp_path / "new")


def test_a_file_of_another_kind_is_refused_and_an_empty_one_is_nobodys(tmp_path):
    path = tmp_path / "a"
    ours = lambda head: head.startswith(b"ours")  # noqa: E731
    refuse_other_kind(path, ours, "file of ours")
    for data in (b"", b"ours, an older one"):
        path.write_bytes(data)
        refuse_other_kind(path, ours, "file of ours")
    path.write_bytes(b"theirs")
    with pytest.raises(FileExistsError, match="is no file of ours"):
        refuse_other_kind(path, ours, "file of ours")
    refuse_other_kind("/dev/zero", ours, "file of ours")  # is not replaced anyhow
