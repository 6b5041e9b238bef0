"""For tests: an engine that does what a script says.

Owns Evidence (the judge of predictors, driven step by step) and Scripted (the engine
of a store opened with engine "scripted": no thread takes its reads; a test does, and settles each as it likes). Nothing else
imports it. May import every module below serve.
"""
from libc.errno cimport EBADF, errno
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memset

import os
from collections import namedtuple

from fastcache_ext.arena cimport fc_arena
from fastcache_ext.atomics cimport fc_load32
from fastcache_ext.core cimport Core
from fastcache_ext.evidence cimport *
from fastcache_ext.ioqueue cimport FC_AGAIN, FC_CANCEL_NOT, FC_DEMAND, fc_op, fc_port
from fastcache_ext.port cimport core_port
from fastcache_ext.evidence import MODES, NAMES as OUTCOMES, STATES
from fastcache_ext.monitor cimport core_close, core_lock, core_unlock
from fastcache_ext.threads cimport fc_now_ns

cdef extern from "unistd.h" nogil:
    ssize_t pread(int fd, void *buffer, size_t nbytes, int64_t offset)
    int usleep(unsigned int microseconds)

Op = namedtuple("Op", "id key path offset nbytes expected direct demand slot address generation")


cdef class Evidence:
    """The judge of predictors alone: what the store would tell it is told by a test. Times are nanoseconds."""
    cdef fc_evidence e

    def __cinit__(self, int n_layers, int n_keys, int n_slots, mode="auto"):
        if evidence_init(&self.e, n_layers, n_keys, n_slots) != 0:
            raise MemoryError
        self.e.mode = MODES[mode]

    def __dealloc__(self):
        evidence_free(&self.e)

    def admit(self, int predictor, int nth=0, int total=1):
        return bool(evidence_admit(&self.e, predictor, nth, total))

    def issued(self, int predictor, int slot, int layer, int key, int64_t payload, int evicted=-1):
        evidence_issued(&self.e, predictor, slot, layer, key, payload, evicted)

    def demand(self, int key, int layer):
        evidence_demand(&self.e, key, layer)

    def joined(self, int slot):
        evidence_joined(&self.e, slot)

    def landed(self, int slot, late=False, int64_t early=0, int64_t wait_ns=0):
        evidence_landed(&self.e, slot, late, early, wait_ns)

    def dropped(self, int slot, cancelled):
        evidence_dropped(&self.e, slot, cancelled, 0)

    def used(self, int slot):
        evidence_used(&self.e, slot)

    def wasted(self, int slot):
        evidence_wasted(&self.e, slot)

    def absent(self, int key, int64_t payload):
        evidence_absent(&self.e, key, payload)

    def wait(self, int64_t begin_ns, int64_t end_ns, int64_t nbytes):
        """One wait of a demand, with no guess at the device."""
        evidence_wait_begins(&self.e, begin_ns)
        evidence_wait_ends(&self.e, end_ns, nbytes)

    def wait_begins(self, int64_t now_ns):
        evidence_wait_begins(&self.e, now_ns)

    def wait_ends(self, int64_t now_ns, int64_t nbytes):
        evidence_wait_ends(&self.e, now_ns, nbytes)

    def read_begins(self, int64_t now_ns):
        return evidence_read_begins(&self.e, now_ns)

    def read_ends(self, int slot, promoted, int64_t begun, int64_t now_ns, int64_t nbytes):
        evidence_read_ends(&self.e, slot, promoted, begun, now_ns, nbytes)

    def hold_back(self):
        self.e.held_back = 1

    def counts(self, int predictor):
        cdef int i
        return {OUTCOMES[i]: self.e.predictors[predictor].count[i] for i in range(N_EVIDENCE)}

    def state(self, int predictor):
        return STATES[self.e.predictors[predictor].state]

    @property
    def ns_per_byte(self):
        return self.e.ns_per_byte

    @property
    def watched(self):
        return self.e.watched


cdef void look_yourself(void *engine) noexcept nogil:
    """An engine's part in stopping reads: the test asks wants_stopped()."""


cdef class Scripted:
    """The engine of a store that was opened with engine "scripted". Its methods may be called from any thread, one at a time."""
    cdef Core core
    cdef fc_port port
    cdef dict hand              # id -> address of its fc_op
    cdef object __weakref__

    def __cinit__(self, Core core not None):
        core.check()
        self.core = core
        self.hand = {}
        core_port(core.c, &self.port)
        if core.engine_used == "scripted":
            core.c.stop_reads = look_yourself

    cdef fc_op *find(self, uint64_t id) except NULL:
        return <fc_op *><uintptr_t>self.hand[id]

    cdef object tell(self, const fc_op *op):
        return Op(op.id, self.core._where(op.load.key), self.core.fileset.paths[op.file - self.core.c.files],
                  op.offset, op.nbytes, op.expected, bool(op.direct), op.klass == FC_DEMAND, op.load.slot,
                  <uintptr_t>op.dest, op.load.generation)

    def take(self, int room=1 << 20, double wait=0.0):
        """Take at most `room` reads, as an engine does; wait at most `wait` seconds for the first. Returns Ops.

        Raises AssertionError for a read whose memory is the target of another one in hand, or lies in a slot
        that another expert's read in hand aims at.
        """
        cdef fc_op *ops[64]
        cdef int n = 0
        cdef int64_t until = fc_now_ns() + <int64_t>(wait * 1e9)
        taken = []
        while len(taken) < room:
            with nogil:
                n = self.port.take(self.port.ctx, ops, 1, 0)
            if n > 0:
                taken.append(self.receive(ops[0]))
            elif taken or n < 0 or fc_now_ns() >= until:
                break
            else:
                with nogil:
                    usleep(200)
        return taken

    cdef object receive(self, fc_op *op):
        cdef fc_op *other
        new = self.tell(op)
        for known in self.hand.values():
            other = <fc_op *><uintptr_t>known
            assert (new.address + op.nbytes <= <uintptr_t>other.dest
                    or <uintptr_t>other.dest + other.nbytes <= new.address), (new, self.tell(other))
            assert new.slot < 0 or other.load.slot != new.slot or other.load == op.load, (new, self.tell(other))
        if new.slot >= 0:
            start = <uintptr_t>self.core.c.arena.addr[new.slot]
            end = start + self.core.c.arena.class_bytes[self.core.c.arena.cls[new.slot]]
            assert start <= new.address and new.address + op.nbytes <= end, ("outside its slot", new)
        self.hand[op.id] = <uintptr_t>op
        return new

    def settle(self, uint64_t id, int64_t res):
        """Report bytes read, or -errno. True when the read is over; False when it now asks for what is missing."""
        cdef fc_op *op = self.find(id)
        cdef int verdict
        with nogil:
            verdict = self.port.settle(self.port.ctx, op, res)
        if verdict == FC_AGAIN:
            return False
        del self.hand[id]
        return True

    def write(self, uint64_t id, nbytes=None):
        """Do what the device does: put bytes of the file where the read wants them. Returns how many, without settling."""
        cdef fc_op *op = self.find(id)
        cdef int64_t n = op.nbytes if nbytes is None else min(op.nbytes, <int64_t>nbytes)
        if op.file.fd_buffered < 0:
            raise OSError(EBADF, "a memory file has no reads to script")
        with nogil:
            n = pread(op.file.fd_buffered, op.dest, <size_t>n, op.offset)
        if n < 0:
            raise OSError(errno, os.strerror(errno))
        return n

    def fill(self, uint64_t id, nbytes=None):
        """write(), then settle() with what was written."""
        return self.settle(id, self.write(id, nbytes))

    def scribble(self, uint64_t id, int byte=0xEE):
        """Overwrite the destination of a read, as a device may before it fails."""
        cdef fc_op *op = self.find(id)
        memset(op.dest, byte, <size_t>op.nbytes)

    def now(self, uint64_t id):
        """The Op as it stands, after a settle() that was not the end."""
        return self.tell(self.find(id))

    def waits(self, uint64_t id):
        """How many calls wait for the expert of a read."""
        core_lock(self.core.c)
        n = self.find(id).load.waits
        core_unlock(self.core.c)
        return n

    def patience(self):
        """How many completions of the reads in hand the engine may sleep through at once."""
        cdef fc_op *ops[64]
        cdef int n = 0, calm
        for known in self.hand.values():
            ops[n] = <fc_op *><uintptr_t>known
            n += 1
        with nogil:
            calm = self.port.patience(self.port.ctx, ops, n)
        return calm

    def wants_stopped(self):
        """Ids of reads in hand that nobody wants any more."""
        return [id for id in self.hand if fc_load32(&self.find(id).cancel) != FC_CANCEL_NOT]

    @property
    def in_hand(self):
        """Ids of reads that are not settled, oldest first."""
        return list(self.hand)

    def poison(self, int byte=0xA5):
        """Fill the arena; for before the first read."""
        memset(self.core.c.arena.base, byte, <size_t>self.core.c.arena.nbytes)

    def peek(self, int32_t slot):
        """The bytes of a slot, padding included."""
        cdef fc_arena *a = self.core.c.arena
        return (<char *>a.addr[slot])[:a.class_bytes[a.cls[slot]]]

    def leases(self):
        """Lease counts by slot."""
        cdef int32_t i
        core_lock(self.core.c)
        counts = [fc_load32(&self.core.c.arena.leases[i]) for i in range(self.core.c.arena.n_slots)]
        core_unlock(self.core.c)
        return counts

    def drained(self, int64_t timeout_ns):
        """What joining an engine's threads means here: no new work, and every read in hand over. False: not in time."""
        cdef int64_t until = fc_now_ns() + timeout_ns
        with nogil:
            core_close(self.core.c)
        while self.hand:
            if timeout_ns >= 0 and fc_now_ns() >= until:
                return False
            with nogil:
                usleep(200)
        return True
