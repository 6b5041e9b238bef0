"""Arrays that grow on disk: what a full disk does to them."""

import contextlib
import errno
import subprocess

import numpy as np
import pytest

from fastcache.traces import columns


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A file system of 64 KiB for temporary files."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", tmp_path], check=True)
        stack.enter_context(monkeypatch.context()).setattr(columns, "scratch_directory", lambda: str(tmp_path))
        yield tmp_path


@pytest.mark.root
def test_zeros_that_have_no_room_are_an_error_and_no_signal_when_they_are_touched(small_disk):
    with columns.Column(np.int64) as column:
        array = column.zeros(4096)
        array[:] = 1
        assert array.sum() == 4096
    with columns.Column(np.int64) as column, pytest.raises(OSError) as caught:
        column.zeros(1 << 20)[:] = 1
    assert caught.value.errno == errno.ENOSPC


def test_no_zeros_take_no_room():
    with columns.Column(np.int64) as column:
        assert column.zeros(0).tolist() == []
