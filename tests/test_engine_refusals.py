"""Machines that refuse io_uring, or parts of it: by filter, by sysctl, by limit. Each in a process of its own."""

import errno
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def shard(disk):
    path = disk / "refusals"
    path.write_bytes(bytes(range(256)) * 16384)
    return path


def child(code: str, *args: str) -> subprocess.CompletedProcess:
    """Run code in a new interpreter that can make raw stores as this file does."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=120)


FILTER = """
import ctypes, struct
from pathlib import Path
def refuse_io_uring(action):
    "Install a seccomp filter on io_uring_setup, _enter and _register."
    libc = ctypes.CDLL(None, use_errno=True)
    code = [(0x20, 0, 0, 0), (0x35, 0, 2, 425), (0x25, 1, 0, 427), (0x06, 0, 0, action), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, ctypes.byref(Filter(5, ctypes.addressof(program))), 0, 0):
        sys.exit(77)
KILL, EPERM = 0x80000000, 0x00050001
"""


def filtered(code: str, path) -> str:
    done = child(FILTER + textwrap.dedent(code), str(path))
    if done.returncode == 77:
        pytest.skip("no seccomp filter can be installed here")
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


def test_the_pread_engine_makes_no_io_uring_call_at_all(shard):
    """Under a filter that kills: importing, opening, reading and closing survive it."""
    out = filtered(
        """
        refuse_io_uring(KILL)
        from test_engines import raw
        with raw(sys.argv[1], 4096, 4, "pread") as store:
            print(len(bytes(store[0, 3]["bytes"])))
        """,
        shard,
    )
    assert out == "4096"


def test_a_filter_that_refuses_io_uring_is_an_error_of_the_ring_only(shard):
    out = filtered(
        """
        refuse_io_uring(EPERM)
        from fastcache_ext import liburing
        from test_engines import raw
        if not liburing.load():
            sys.exit(77)
        try:
            with raw(sys.argv[1], 4096, 4, "uring"):
                pass
        except OSError as error:
            print(error.errno, "seccomp" in liburing.refusal(error.errno))
        """,
        shard,
    )
    assert out == f"{errno.EPERM} True"


@pytest.mark.root
@pytest.mark.alone("switches io_uring off for the whole machine")
def test_a_ring_that_a_sysctl_forbids_says_which(shard):
    knob = Path("/proc/sys/kernel/io_uring_disabled")
    if not knob.exists():
        pytest.skip("this kernel has no such sysctl")
    before = knob.read_text()
    try:
        knob.write_text("2")
        done = child(
            """
            from fastcache_ext import liburing
            from test_engines import raw
            liburing.load()
            try:
                with raw(sys.argv[1], 4096, 4, "uring"):
                    pass
            except OSError as error:
                print(error.errno, liburing.refusal(error.errno))
            """,
            str(shard),
        )
    finally:
        knob.write_text(before)
    assert done.returncode == 0, done.stderr
    assert "no usable liburing" in done.stdout or "1 EPERM: io_uring is switched off" in done.stdout


@pytest.mark.root
def test_refused_registration_leaves_plain_reads(shard):
    done = child(
        """
        import os, resource, time
        from test_engines import Raw
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        fd = os.open(sys.argv[1], os.O_RDONLY)      # readable by its number, whoever owns the folder
        os.setresuid(65534, 65534, 65534)
        store = Raw(f"/proc/self/fd/{fd}", 65536, 16, "uring")
        e, deadline = 0, time.monotonic() + 30
        while not store._progress()[1] and time.monotonic() < deadline:     # until registration was tried
            with store[0, e % 64] as lease:
                assert bytes(lease["bytes"]) == bytes(range(256)) * 256
            e += 1
        memory = store._memory()
        print(memory["registered_bytes"], memory["registration_errno"], store._shut(10**10))
        """,
        str(shard),
    )
    if "PermissionError" in done.stderr:
        pytest.skip("the file cannot be reopened by another user here")
    assert done.returncode == 0, done.stderr
    registered, error, closed = done.stdout.split()
    assert (registered, closed) == ("0", "True") and int(error) in (errno.ENOMEM, errno.EPERM)
