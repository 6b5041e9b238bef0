"""The files of one store, opened once: two descriptors each, a fingerprint, and a tried answer on direct reads.

Owns the descriptors and the decision for or against O_DIRECT, which a read decides and not the open flag: stacked file
systems take the flag and refuse the read. Knows no expert, slot or queue. May import ioqueue (fc_file) and libc.
"""

import errno as errno_names
import os
import resource
import stat

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINTR, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free

from fastcache_ext.atomics cimport fc_load32, fc_store32
from fastcache_ext.ioqueue cimport fc_file

cdef extern from *:
    """
    #include <errno.h>
    #include <stdint.h>
    #include <string.h>
    #include <unistd.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <sys/vfs.h>

    #if !defined(SYS_statx)
    #  if defined(__x86_64__)
    #    define SYS_statx 332
    #  else
    #    define SYS_statx 291           /* every architecture with the generic table */
    #  endif
    #endif

    typedef struct { int64_t size, dev, ino, mtime_ns; } fc_print;

    static int fc_fingerprint(int fd, fc_print *print) {
        struct stat st;
        memset(print, 0, sizeof *print);
        if (fstat(fd, &st) < 0) return errno;
        print->size = (int64_t)st.st_size;
        print->dev = (int64_t)st.st_dev;
        print->ino = (int64_t)st.st_ino;
        print->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
        return 0; }

    /* The alignments of direct reads by STATX_DIOALIGN; 1 when the kernel tells, else 0. By number and by offset, since
       headers and C libraries are older than kernels. */
    static int fc_statx_dioalign(int fd, uint32_t *memory, uint32_t *offset) {
        enum { DIOALIGN = 0x2000, EMPTY_PATH = 0x1000, MEMORY_AT = 152, OFFSET_AT = 156 };
        _Alignas(8) unsigned char st[512];
        uint32_t mask;
        memset(st, 0, sizeof st);
        if (syscall(SYS_statx, fd, "", EMPTY_PATH, DIOALIGN, st) != 0) return 0;
        memcpy(&mask, st, sizeof mask);
        memcpy(memory, st + MEMORY_AT, sizeof *memory);
        memcpy(offset, st + OFFSET_AT, sizeof *offset);
        return (mask & DIOALIGN) != 0; }

    static uint32_t fc_statfs_magic(int fd) {
        struct statfs fs;
        return fstatfs(fd, &fs) == 0 ? (uint32_t)fs.f_type : 0; }
    """
    ctypedef struct fc_print:
        int64_t size
        int64_t dev
        int64_t ino
        int64_t mtime_ns

    int fc_fingerprint(int fd, fc_print *result) noexcept nogil
    int fc_statx_dioalign(int fd, uint32_t *memory, uint32_t *offset) noexcept nogil
    uint32_t fc_statfs_magic(int fd) noexcept nogil

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **memory, size_t align, size_t nbytes)

cdef extern from "unistd.h" nogil:
    ssize_t pread(int fd, void *buffer, size_t nbytes, int64_t offset)
    int close(int fd)

cdef enum:
    MIN_ALIGN = 512             # bytes: below a sector nothing is gained, and the tables assume it
    PAGE_GUESS = 4096           # bytes: what serves where nobody tells the alignment
    SPARE_FDS = 64              # left to the rest of the program when the limit has to be raised

IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
FILESYSTEMS = IN_MEMORY | {
    0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0xF2F52010: "f2fs", 0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs", 0x794C7630: "overlayfs", 0x65735546: "fuse", 0x6969: "nfs", 0xFF534D42: "cifs",
    0x01021997: "9p", 0x73717368: "squashfs",
}


cdef int file_check(const fc_file *file, int *changed) noexcept nogil:
    cdef fc_print now
    cdef int rc
    changed[0] = 0
    if file.memory != NULL or file.fd_buffered < 0:
        return 0
    rc = fc_fingerprint(file.fd_buffered, &now)
    if rc != 0:
        return rc
    changed[0] = (now.size != file.size or now.mtime_ns != file.mtime_ns
                  or now.dev != file.dev or now.ino != file.ino)
    return 0


cdef int64_t read_aligned(int fd, uint8_t *dest, int64_t nbytes, int64_t offset) noexcept nogil:
    """Read once: bytes, or -errno."""
    cdef int64_t n = -1
    cdef int tries = 100
    while n < 0 and tries > 0:
        n = pread(fd, dest, <size_t>nbytes, offset)
        if n < 0 and errno != EINTR:
            return -errno
        tries -= 1
    return n if n >= 0 else -errno


cdef tuple probe(const fc_file *file, int64_t align):
    """Read directly at the start and over the tail; return (errno, reason), or None where both came back whole.

    The memory is aligned to `align` and to no more, as a slot's windows are.
    """
    cdef void *scratch = NULL
    cdef int64_t at, got, expected
    if posix_memalign(&scratch, <size_t>(2 * align), <size_t>(2 * align)) != 0:
        raise MemoryError(f"{2 * align} bytes to try a direct read")
    try:
        for where, at in (("start", 0), ("end", max(file.size - 1, 0) // align * align)):
            with nogil:
                got = read_aligned(file.fd_direct, <uint8_t *>scratch + align, align, at)
            expected = min(align, file.size - at)
            if got < 0:
                name = errno_names.errorcode.get(-got, str(-got))
                return -got, f"a direct read of {align} bytes at its {where} (offset {at}) failed with {name}"
            if got != expected:
                return errno_names.EIO, f"a direct read at its {where} (offset {at}) gave {got} bytes of {expected}"
    finally:
        free(scratch)
    return None


def _block_size(dev: int):
    """Return the logical block size in bytes of a block device or of the disk of a partition, or None."""
    base = f"/sys/dev/block/{os.major(dev)}:{os.minor(dev)}"
    for queue in (f"{base}/queue", f"{base}/../queue"):
        try:
            with open(f"{queue}/logical_block_size") as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return None


def _round_up(int64_t align) -> int:
    """Return the smallest power of two that is at least `align` and MIN_ALIGN."""
    cdef int64_t power = MIN_ALIGN
    while power < align:
        power *= 2
    return power


def _open(path: str, int flags) -> int:
    """Open a regular file; anything else is an error, and a FIFO must not block."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno_names.EISDIR, os.strerror(errno_names.EISDIR), path)
        if not stat.S_ISREG(mode):
            device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
            kind = "FIFO" if stat.S_ISFIFO(mode) else "device" if device else "special file"
            raise OSError(errno_names.EINVAL, f"Not a regular file, but a {kind}", path)
        os.set_blocking(fd, True)       # of a non-blocking file io_uring would answer EAGAIN
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_room(n_files: int, per_file: int) -> None:
    """Raise the soft limit on open files where this many do not fit, or say what is needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = 0
    needed = used + n_files * per_file + SPARE_FDS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < needed - SPARE_FDS:
        raise OSError(
            errno_names.EMFILE,
            f"{n_files} files need {needed} descriptors ({used} are open), and the hard limit is {hard}: "
            "raise it (ulimit -Hn)",
        )


cdef object take_memory(fc_file *file, object buffer):
    """Point a file at a buffer; return what holds it."""
    cdef Py_buffer view
    held = memoryview(buffer)               # keeps the export after `view` is given back
    PyObject_GetBuffer(held, &view, PyBUF_SIMPLE)
    file.memory = <const uint8_t *>view.buf
    file.size = view.len
    PyBuffer_Release(&view)
    return held


cdef tuple try_direct(fc_file *file, str path):
    """Open a file with O_DIRECT too and try it; return (errno, reason) where it is of no use, else None."""
    cdef uint32_t memory_align = 0, offset_align = 0
    cdef fc_print seen
    cdef int64_t align
    magic = fc_statfs_magic(file.fd_buffered)
    if magic in IN_MEMORY:                  # it takes the flag, and any alignment, and copies all the same
        return errno_names.EOPNOTSUPP, f"{IN_MEMORY[magic]} keeps its files in memory"
    told = fc_statx_dioalign(file.fd_buffered, &memory_align, &offset_align)
    if told and offset_align == 0:
        return errno_names.EOPNOTSUPP, "the file system has no direct reads of this file (statx: alignment 0)"
    try:
        file.fd_direct = _open(path, os.O_DIRECT)
    except OSError as exc:
        name = errno_names.errorcode.get(exc.errno, str(exc.errno))
        return exc.errno, f"opening it with O_DIRECT failed with {name}"
    if fc_fingerprint(file.fd_direct, &seen) != 0 or seen.dev != file.dev or seen.ino != file.ino:
        raise OSError(errno_names.ESTALE, "Replaced by another file while it was opened", path)
    if told:
        tries = [max(memory_align, offset_align)]
    else:
        tries = [_block_size(file.dev) or PAGE_GUESS]
        if tries[0] < PAGE_GUESS:           # a file system may demand more than its device
            tries.append(PAGE_GUESS)
    refusal = None
    for align in tries:
        file.align = _round_up(align)
        refusal = probe(file, file.align)
        if refusal is None:
            break
    return refusal


cdef str take_file(fc_file *file, str path, str direct):
    """Open a file; return why it is not read directly, or ""."""
    cdef fc_print seen
    cdef int rc
    file.fd_buffered = _open(path, 0)
    rc = fc_fingerprint(file.fd_buffered, &seen)
    if rc != 0:
        raise OSError(rc, os.strerror(rc), path)
    file.size, file.dev, file.ino, file.mtime_ns = seen.size, seen.dev, seen.ino, seen.mtime_ns
    os.posix_fadvise(file.fd_buffered, 0, 0, os.POSIX_FADV_RANDOM)
    if direct == "off":
        return "switched off (direct=off)"
    refusal = try_direct(file, path)
    if refusal is None:
        fc_store32(&file.direct, 1)
        return ""
    if direct == "require":
        raise OSError(refusal[0], f"Direct reads are required, but {refusal[1]}", path)
    if file.fd_direct >= 0:
        close(file.fd_direct)
        file.fd_direct = -1
    file.align = MIN_ALIGN
    return refusal[1]


cdef void drop(fc_file *file) noexcept nogil:
    if file.fd_direct >= 0:
        close(file.fd_direct)
    if file.fd_buffered >= 0:
        close(file.fd_buffered)
    file.fd_direct = file.fd_buffered = -1
    fc_store32(&file.direct, 0)
    file.memory = NULL


cdef class FileSet:
    """Files held open for reading.

    Parameters
    ----------
    paths : list of str
        By file index; None stands for a memory file.
    direct : {"auto", "require", "off"}
        Whether files are read around the page cache: where a tried read shows that it works; everywhere, or OSError;
        nowhere.
    memory : list, optional
        By file index: the buffer of each memory file (C-contiguous; held until ``close``), None for the others.

    Raises
    ------
    OSError
        A file cannot be opened, is not a regular one, or cannot be read directly where that is required: ``filename``
        names it. Or the limit on open files is too low.

    Notes
    -----
    Opening costs two descriptors and two small reads per file. A child after fork may drop its copy.
    """

    def __cinit__(self, paths, direct="auto", memory=None):
        cdef int32_t i
        if direct not in ("auto", "require", "off"):
            raise ValueError(f'direct must be "auto", "require" or "off", not {direct!r}')
        self.paths = [None if path is None else os.fspath(path) for path in paths]
        self.reasons = [""] * len(self.paths)
        self.keep = []
        memory = [None] * len(self.paths) if memory is None else list(memory)
        if len(memory) != len(self.paths):
            raise ValueError(f"{len(memory)} memory entries for {len(self.paths)} paths")
        self.files = <fc_file *>calloc(max(len(self.paths), 1), sizeof(fc_file))
        if self.files == NULL:
            raise MemoryError
        for i in range(len(self.paths)):
            self.files[i].fd_direct = self.files[i].fd_buffered = -1
            self.files[i].align = MIN_ALIGN
        self.n_files = <int32_t>len(self.paths)
        _make_room(sum(path is not None for path in self.paths), 1 if direct == "off" else 2)
        for i in range(self.n_files):
            if self.paths[i] is None:
                self.keep.append(take_memory(&self.files[i], memory[i]))
                self.reasons[i] = "in memory"
            elif memory[i] is not None:
                raise ValueError(f"file {i} has both a path and memory")
            else:
                self.reasons[i] = take_file(&self.files[i], self.paths[i], direct)

    @property
    def align(self):
        """Bytes: the largest alignment of a direct read of any of the files; 512 at least."""
        cdef int64_t align = MIN_ALIGN
        cdef int32_t i
        for i in range(self.n_files):
            align = max(align, self.files[i].align)
        return align

    @property
    def direct_count(self):
        """The number of files that are read directly now; a read that fails can end it for its file."""
        cdef int32_t i
        cdef int count = 0
        for i in range(self.n_files):
            count += fc_load32(&self.files[i].direct) != 0
        return count

    def __len__(self):
        return self.n_files

    def describe(self):
        """Return a list of dicts, by file: path, size and align in bytes, filesystem, direct, and why not."""
        cdef fc_file *file
        cdef int32_t i, ended
        rows = []
        for i in range(self.n_files):
            file = &self.files[i]
            reason = self.reasons[i]
            ended = fc_load32(&file.direct_errno)
            if ended != 0:
                reason = f"a direct read failed with {errno_names.errorcode.get(ended, ended)}; buffered since"
            magic = fc_statfs_magic(file.fd_buffered) if file.fd_buffered >= 0 else 0
            rows.append({
                "path": self.paths[i],
                "size": file.size,
                "align": file.align,
                "filesystem": FILESYSTEMS.get(magic, hex(magic)) if magic else None,
                "direct": fc_load32(&file.direct) != 0,
                "reason": reason,
            })
        return rows

    def close(self):
        """Close the descriptors and let the memory files go. Only when no read is in flight; twice is fine."""
        cdef int32_t i
        for i in range(self.n_files):
            drop(&self.files[i])
        self.keep.clear()

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.n_files):
            drop(&self.files[i])
        free(self.files)
