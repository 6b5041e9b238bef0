"""Run `python ARGUMENTS` under a seccomp filter that answers EPERM to every io_uring call, as containers do."""

import ctypes
import os
import struct
import sys

EPERM = 0x00050001  # SECCOMP_RET_ERRNO
ALLOW = 0x7FFF0000


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def refuse_io_uring() -> None:
    """Install the filter: load the call's number, and refuse 425 to 427."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = [(0x20, 0, 0, 0), (0x35, 0, 2, 425), (0x25, 1, 0, 427), (0x06, 0, 0, EPERM), (0x06, 0, 0, ALLOW)]
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(5, ctypes.addressof(lines))), 0, 0):
        sys.exit(f"no seccomp filter can be installed here: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    refuse_io_uring()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
