"""Find a liburing at run time and hand out its functions; nothing here happens at import.

Owns the search: the shared object inside the installed ``liburing`` package (which is never imported), then the
system's ``liburing-ffi.so.2`` and ``liburing.so.2``. No build promises which functions it exports, so each one is
checked, and a library that lacks one is passed over with a reason. Knows no queue and no read. May import libc.
"""

import errno as errno_names
import importlib.util
import os
import threading
from pathlib import Path

from libc.stdint cimport uintptr_t
from libc.string cimport memcpy, memset

cdef extern from "dlfcn.h" nogil:
    """
    #include <dlfcn.h>
    /* The object that holds an address, and where in it. */
    static const char *fc_object_of(void *address, uintptr_t *offset) {
        Dl_info info;
        if (!dladdr(address, &info)) return NULL;
        *offset = (uintptr_t)address - (uintptr_t)info.dli_fbase;
        return info.dli_fname; }
    """
    int RTLD_NOW
    int RTLD_LOCAL
    void *dlopen(const char *path, int mode)
    void *dlsym(void *handle, const char *name)
    int dlclose(void *handle)
    char *dlerror()
    const char *fc_object_of(void *address, uintptr_t *offset)

cdef enum:
    NEEDED = 5          # the first five names: without one of them there is no ring
    REGISTRATION = 7    # the next two: without one of them there are only unregistered reads
    ALL = 8

cdef const char *NAMES[ALL]
NAMES[:] = [
    "io_uring_queue_init_params", "io_uring_queue_exit", "io_uring_get_sqe", "io_uring_submit_and_wait",
    "io_uring_peek_batch_cqe", "io_uring_register_buffers_sparse", "io_uring_register_buffers_update_tag",
    "io_uring_cq_advance",
]

ctypedef int (*fc_number)() noexcept nogil

cdef fc_liburing_table functions            # filled while `serving` is NULL, constant afterwards
cdef fc_liburing_table *serving = NULL
cdef void *addresses[ALL]                   # [name] where each function was found, or NULL
cdef object guard = threading.Lock()        # around the search only
cdef bint tried = False
cdef str found_version = ""
cdef list failures = []


cdef fc_liburing_table *liburing_table() noexcept nogil:
    return serving


cdef void fill(fc_liburing_table *table, void **at) noexcept nogil:
    # memcpy: a pointer to data may not be assigned to a pointer to a function
    memset(table, 0, sizeof(fc_liburing_table))
    memcpy(&table.queue_init_params, &at[0], sizeof(void *))
    memcpy(&table.queue_exit, &at[1], sizeof(void *))
    memcpy(&table.get_sqe, &at[2], sizeof(void *))
    memcpy(&table.submit_and_wait, &at[3], sizeof(void *))
    memcpy(&table.peek_batch_cqe, &at[4], sizeof(void *))
    memcpy(&table.register_buffers_sparse, &at[5], sizeof(void *))
    memcpy(&table.register_buffers_update_tag, &at[6], sizeof(void *))
    if at[7] != NULL:
        memcpy(&table.cq_advance, &at[7], sizeof(void *))
    else:
        table.cq_advance = fc_cq_advance


cdef str last_error():
    cdef char *text = dlerror()
    return "dlopen failed" if text == NULL else (<bytes>text).decode("utf-8", "replace")


cdef str try_library(str path):
    """Take every function from the library at `path`; return why it cannot serve, or None."""
    global serving, found_version
    cdef bytes name = os.fsencode(path)
    cdef void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)
    cdef void *at[ALL]
    cdef void *major
    cdef void *minor
    cdef int i
    if handle == NULL:
        return last_error()
    for i in range(ALL):
        at[i] = dlsym(handle, NAMES[i])
        if at[i] == NULL and i < NEEDED:
            dlclose(handle)
            return f"exports no {NAMES[i].decode()}"
    major = dlsym(handle, "io_uring_major_version")
    minor = dlsym(handle, "io_uring_minor_version")
    found_version = "before 2.3"            # the first that tells
    if major != NULL and minor != NULL:
        found_version = f"{(<fc_number>major)()}.{(<fc_number>minor)()}"
    for i in range(ALL):
        addresses[i] = at[i]
    fill(&functions, at)
    serving = &functions                    # the handle stays open for the life of the process
    return None


def _candidates() -> list:
    """List (path, "") of each library worth a try, and (what, why) of each place that has none."""
    try:
        spec = importlib.util.find_spec("liburing")
    except (ImportError, ValueError) as exc:
        spec, missing = None, f"cannot be located: {exc}"
    else:
        missing = "is not installed"
    found = []
    if spec is not None:
        missing = "has no shared object of that name"
        if spec.origin and ".so" in Path(spec.origin).name:
            found.append(spec.origin)
        for folder in spec.submodule_search_locations or ():
            found += sorted(str(file) for file in Path(folder).glob("liburing*.so*"))
    steps = [(path, "") for path in found] or [("the liburing package", missing)]
    return [*steps, ("liburing-ffi.so.2", ""), ("liburing.so.2", "")]


def load(candidates=None) -> bool:
    """Find a liburing, once.

    Parameters
    ----------
    candidates : list of str, optional
        Libraries to try, in order, in place of the usual places.

    Returns
    -------
    bool
        Whether one serves. Once one does, it serves until the process ends and later calls change nothing. A failed
        search is repeated only for explicit candidates.

    Notes
    -----
    Opens shared objects and makes no io_uring call. About 2 ms. Safe from any thread.
    """
    global tried
    with guard:
        if serving != NULL or (tried and candidates is None):
            return serving != NULL
        tried = True
        failures.clear()
        steps = _candidates() if candidates is None else [(os.fspath(path), "") for path in candidates]
        for path, reason in steps:
            reason = reason or try_library(path)
            if reason is None:
                break
            failures.append((path, reason))
        return serving != NULL


def source():
    """Return the path of the library that serves, or None."""
    if serving == NULL:
        return None
    return function_addresses()[NAMES[0].decode()][0]


def steps() -> list:
    """Return (path, reason) of each library that was passed over, in the order of the tries."""
    return list(failures)


def version() -> str:
    """Return the version of the library that serves, such as "2.15"; "" when none does."""
    return found_version


def registration() -> str:
    """Return why this library cannot register buffers; "" where it can, or where none serves."""
    if serving == NULL:
        return ""
    missing = [NAMES[i].decode() for i in range(NEEDED, REGISTRATION) if addresses[i] == NULL]
    return f"{source()} exports no {' and no '.join(missing)}" if missing else ""


def function_addresses() -> dict:
    """Return {function: (path of its object, offset in it)} of the library's functions in use; {} when none serves."""
    cdef uintptr_t offset = 0
    cdef const char *path
    cdef int i
    found = {}
    if serving == NULL:
        return found
    for i in range(ALL):
        path = fc_object_of(addresses[i], &offset) if addresses[i] != NULL else NULL
        if path != NULL:
            found[NAMES[i].decode()] = (os.fsdecode(<bytes>path), offset)
    return found


def probe(unsigned entries=4) -> int:
    """Make a ring and drop it; return 0, or the errno of the refusal (ENOSYS when no liburing serves)."""
    cdef fc_io_uring ring
    cdef fc_ring_params params
    cdef int rc
    if serving == NULL:
        return errno_names.ENOSYS
    memset(&ring, 0, sizeof(ring))
    memset(&params, 0, sizeof(params))
    with nogil:
        rc = serving.queue_init_params(entries, &ring, &params)
        if rc >= 0:
            serving.queue_exit(&ring)
    return -rc if rc < 0 else 0


def refusal(int error) -> str:
    """Say in words why a ring could not be made, given the errno: what refuses it on this machine."""
    name = errno_names.errorcode.get(error, str(error))
    if serving == NULL and tried:
        return "no usable liburing: " + "; ".join(f"{path}: {reason}" for path, reason in failures)
    if error == errno_names.EPERM:
        try:
            disabled = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
        except OSError:
            disabled = "0"
        if disabled != "0":
            return f"{name}: io_uring is switched off by sysctl kernel.io_uring_disabled={disabled}"
        return f"{name}: io_uring is refused, most likely by a seccomp filter (a container's default profile)"
    if error == errno_names.ENOSYS:
        return f"{name}: this kernel has no io_uring, or a seccomp filter hides it"
    if error == errno_names.ENOMEM:
        return f"{name}: no memory for a ring within RLIMIT_MEMLOCK (ulimit -l) or the control group's limit"
    return f"{name}: {os.strerror(error)}"
