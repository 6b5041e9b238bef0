"""A file whose reads take as long as a test wants: FUSE, by its protocol, in a process of its own. Root only.

As a script: python fuse.py FILE NBYTES BYTE mounts itself over FILE and obeys its standard input.
"""

import contextlib
import ctypes
import errno
import os
import select
import struct
import sys

from gate import Gate

LIBC = ctypes.CDLL(None, use_errno=True)
INIT, GETATTR, OPEN, READ, RELEASE, FLUSH, INTERRUPT, FORGET, FORGETS, DESTROY = 26, 3, 14, 15, 18, 25, 36, 2, 42, 38
FLAGS = 1 << 22 | 1  # INIT: requests of up to 1 MiB; reading ahead does not wait


class SlowFile(Gate):
    """Context manager: a file of `nbytes` equal bytes at `path`; reads are answered, or held until they may go on."""

    def __init__(self, path, data):
        self.path, self.data = path, data
        path.write_bytes(b"")

    def __enter__(self):
        arguments = [__file__, str(self.path), str(len(self.data)), str(self.data[0])]
        return self.start(arguments, b"mounted\n", "FUSE")

    def __exit__(self, *exc):
        LIBC.umount2(os.fsencode(self.path), 2)  # MNT_DETACH
        self.process.kill()
        self.end()


def serve(path, nbytes, byte):
    """Answer the kernel until it goes away. Interrupted reads give up; a device may."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=100000,user_id=0,group_id=0,allow_other,max_read=1048576"
    if LIBC.mount(b"fuse", os.fsencode(path), b"fuse", 6, options.encode()) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    attr = struct.pack("<6Q3I7I", 1, nbytes, -(-nbytes // 512), 1, 1, 1, 0, 0, 0, 0o100644, 1, 0, 0, 0, 4096, 0)
    held, holding = {}, False

    def answer(unique, body=b"", error=0):
        with contextlib.suppress(FileNotFoundError):  # nobody waits for it any more
            os.write(fd, struct.pack("<IiQ", 16 + len(body), -error, unique) + body)

    def read(unique, body):
        _, offset, size = struct.unpack_from("<QQI", body)
        answer(unique, bytes([byte]) * max(min(size, nbytes - offset), 0))

    print("mounted", flush=True)
    while True:
        for ready in select.select([fd, 0], [], [])[0]:
            if ready == 0:
                word = os.read(0, 1)
                if not word:
                    return
                holding = word == b"h"
                while held and not holding:
                    read(*held.popitem())
                print("holding" if holding else "passing", flush=True)
                continue
            try:
                request = os.read(fd, 1 << 21)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                return
            _, opcode, unique = struct.unpack_from("<IIQ", request)
            body = request[40:]
            if opcode == INIT:
                answer(unique, struct.pack("<4I2H2I2HI7I", 7, 31, 1 << 20, FLAGS, 64, 48, 1 << 20, 1, 256, 0, *[0] * 8))
            elif opcode == GETATTR:
                answer(unique, struct.pack("<Q2I", 3600, 0, 0) + attr)
            elif opcode == OPEN:
                answer(unique, struct.pack("<Q2I", 1, 0, 0))
            elif opcode == READ and holding:
                held[unique] = body
                if len(held) == 1:
                    print("held", flush=True)
            elif opcode == READ:
                read(unique, body)
            elif opcode == INTERRUPT:
                [unique] = struct.unpack_from("<Q", body)
                if held.pop(unique, None) is not None:
                    answer(unique, error=errno.EINTR)
            elif opcode in (RELEASE, FLUSH):
                answer(unique)
            elif opcode not in (FORGET, FORGETS):
                answer(unique, error=errno.ENOSYS)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
