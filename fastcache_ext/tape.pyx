"""Tape: the border of a recording. What happens in a store goes to an open file until it is stopped.

May import core, monitor, recorder and what is below.
"""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t

import os

from fastcache_ext.arena cimport fork_generation
from fastcache_ext.core cimport Core
from fastcache_ext.monitor cimport core_lock, core_mark_token, core_unlock
from fastcache_ext.recorder cimport (
    FC_ENDED_STOPPED, RECORDER_LEAST, recorder_end, recorder_free, recorder_head, recorder_join, recorder_new, recorder_start,
)

ENDED = ("", "stopped", "closed", "max_bytes", "error")     # by FC_ENDED_*
RING = 1 << 19                          # records: 4 MiB while a recording runs
MOST_TOKENS = 2**31 - 1                 # at once: a record's value has 32 bits
LEAST_BYTES = 8 * RECORDER_LEAST        # of a file, besides its header
cdef int64_t SLICE_NS = 200000000       # a wait looks for signals this often


cdef class Tape:
    """One recording of one store. The store's lock protects it; a store has at most one that runs."""

    def __dealloc__(self):
        # In a forked child its thread is not there; and the core it points to may be gone, so nothing is locked here.
        if self.r != NULL and self.forks == fork_generation() and self.r.joined:
            recorder_free(self.r)

    def start(self, Core core not None, int fd, *, start, exact_at, limit, ring=RING):
        """Record from here on. `fd` is the tape's from now on, unless this raises.

        Parameters
        ----------
        start : int
            Bytes of the header that stands in the file.
        exact_at : int
            Offset of five bytes in it that become "false" if the recording turns out not to be exact.
        limit : int
            Bytes of the file at most.
        ring : int
            Records that may wait to be written.

        Raises
        ------
        OSError
            EFBIG: no room for records within the limit; EBUSY: another recording runs; what starting a thread gave.
        """
        cdef int error = 0
        core.check()
        if self.r != NULL:
            raise RuntimeError("started already")
        if core.tape is not None and not running(core):
            (<Tape>core.tape).stop(core)        # it has ended by itself: wait for its thread, of which the core knows one
        self.forks = fork_generation()
        self.r = recorder_new(fd, start, exact_at, limit, ring, &error)
        if self.r != NULL:
            error = recorder_start(self.r, &core.c.mutex, &core.c.recorder, &core.c.table.policy.witness, &core.c.counters,
                                   &core.c.used)
        if error != 0:
            raise OSError(error, os.strerror(error))
        core.tape = self
        core.recorder = self.r

    cdef int started(self, Core core) except -1:
        """Nothing, or an error: it was never begun, or this is a forked child."""
        if self.r == NULL or core.c == NULL:
            raise RuntimeError("this tape records nothing")
        return core.same_process()

    def stop(self, Core core not None):
        """Record nothing more, and wait until all of it is in the file. Stopping twice is fine."""
        cdef int rc = 0
        self.started(core)
        with nogil:
            core_lock(core.c)
            recorder_end(self.r, FC_ENDED_STOPPED)
            core_unlock(core.c)
        while True:
            with nogil:
                rc = recorder_join(self.r, SLICE_NS)
            if rc == 0:
                return
            PyErr_CheckSignals()

    def state(self, Core core not None):
        """(records, lost, exact, why it ended or "", errno or 0)"""
        self.started(core)
        core_lock(core.c)
        state = recorder_head(self.r), self.r.dropped, self.r.exact and not self.r.dropped, self.r.ended, self.r.error
        core_unlock(core.c)
        return state[0], state[1], bool(state[2]), ENDED[state[3]], state[4]


def running(Core core not None):
    """Whether the store is being recorded."""
    core.check()
    core_lock(core.c)
    yes = core.c.recorder != NULL
    core_unlock(core.c)
    return bool(yes)


def policy_in_use(Core core not None):
    """The number of the policy that the store evicts by now."""
    core.check()
    core_lock(core.c)
    kind = core.c.table.policy.kind
    core_unlock(core.c)
    return kind


def mark_token(Core core not None, n):
    """What is requested from here on is for the next n tokens."""
    core.check()
    if not 0 <= n <= MOST_TOKENS:
        raise ValueError(f"n must be from 0 to {MOST_TOKENS} tokens; got {n}")
    core_mark_token(core.c, n)
