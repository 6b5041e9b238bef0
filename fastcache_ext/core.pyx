"""The border: a store of experts without meaning, for Python.

Owns Core. Turns negative codes into exceptions by asking the subclass which (`_error`), because errors are
Python's and live above. Knows no tensor and no NumPy. May import every module below it.

Thread safety: every method may be called from any thread. After a fork every method of the child raises, and nothing is freed.
"""
cimport cython
from cpython.ref cimport Py_INCREF
from libc.errno cimport ENOSYS
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport calloc, free, malloc

import atexit
import logging
import os
import weakref

from fastcache_ext import liburing
from fastcache_ext.evidence import MODES as SPECULATION
from fastcache_ext.policy import NAMES as POLICIES

from fastcache_ext.arena cimport (
    FC_HUGE_OFF, FC_HUGE_THP, FC_HUGE_TLB, arena_new, arena_unref, fc_arena, fc_slabs,
    fork_generation, slabs_read,
)
from fastcache_ext.atomics cimport fc_load32
from fastcache_ext.files cimport FileSet
from fastcache_ext.ghosts cimport MAX_GHOSTS
from fastcache_ext.given cimport key_parts, number
from fastcache_ext.hold cimport hold_arena, unhold_arena
from fastcache_ext.ioqueue cimport FC_ECLOSED, fc_extent, fc_port
from fastcache_ext.port cimport core_port
from fastcache_ext.monitor cimport (
    core_close, core_free, core_haunt, core_lock, core_new, core_unlock, fc_node,
)
from fastcache_ext.pread cimport pread_join, pread_start
from fastcache_ext.recorder cimport FC_ENDED_CLOSED, recorder_end, recorder_join
from fastcache_ext.sums cimport sums_new
from fastcache_ext.table cimport table_resident
from fastcache_ext.threads cimport fc_now_ns
from fastcache_ext.uring cimport uring_join, uring_kick, uring_start, uring_stop_reads
from fastcache_ext.worker cimport fc_worker, worker_join, worker_leave_ring, worker_start

cdef extern from *:
    """
    /* an int of one digit, or -1: what needs no call */
    static CYTHON_INLINE Py_ssize_t fc_small(PyObject *o) {
        if (!PyLong_CheckExact(o))
            return -1;
    #if PY_VERSION_HEX >= 0x030C0000
        return PyUnstable_Long_IsCompact((PyLongObject *)o) ? PyUnstable_Long_CompactValue((PyLongObject *)o) : -1;
    #else
        return Py_SIZE(o) == 1 ? (Py_ssize_t)((PyLongObject *)o)->ob_digit[0] : Py_SIZE(o) == 0 ? 0 : -1;
    #endif
    }
    """
    Py_ssize_t fc_small(object number) noexcept

cdef int64_t GUESS_CHUNK = 1 << 20      # bytes of the one guess read that a demand may have to wait for
cdef int64_t LEAK_NS = 5000000000       # what a dealloc or an exit grants reads that do not return
_open_cores = weakref.WeakSet()


@atexit.register
def _close_all():
    """Stop native threads before the interpreter goes. Reads that never return cost their memory, not the exit."""
    for core in list(_open_cores):
        if not core._shut(LEAK_NS):
            logging.getLogger("fastcache").error("a read has not returned at exit; its memory is left to the system")


cdef bytes copy(object source):
    return bytes(memoryview(source).cast("B")) if source is not None else b""


@cython.no_gc_clear         # the files must outlive the reads that __dealloc__ waits for, in a garbage cycle too
cdef class Core:
    """A store of (layer, expert) -> bytes. See `_open`; subclasses say what errors and Python sources mean."""

    def __cinit__(self, *args, **kwargs):
        self.timeout = -1.0
        self.max_layer = -1

    def _open(self, *, layers, cls_of, ext_first, extents, span, FileSet files, class_bytes, class_slots, policy,
              engine, chunk, queue_depth, io_threads, hugepages, mlock, registered, overflow, direct_required,
              slot_align=4096, speculation="auto", ghosts=False, choosing=False, slabs=None, sums=None):
        """Make the arena, the table and the engine.

        Parameters
        ----------
        layers : sequence of (int, int)
            Layer number and number of experts, ascending. Dense keys count through them in order.
        cls_of, ext_first, extents, span : buffers
            Per key: size class (uint8), first extent (int32, one more than keys), `fc_extent` records, bytes of slot used (int64).
        class_bytes, class_slots : sequences of int
            Bytes of a slot, and number of slots outside slabs, per size class.
        slabs : None or tuple
            What classes trade: (bytes of a slab, slabs that each class begins with, those that it can have, its slots in
            one, slots that it keeps), sequences per size class but for the first.
        engine : {"auto", "uring", "pread", "hand", "scripted"}
            "hand": loads are filled by `_read_expert`; "scripted": by a test.
        hugepages : {"thp", "tlb", "off"}
        mlock, registered : bool
            Whether to try.
        slot_align : int
            Bytes: what every slot and every pass-through buffer is aligned to.
        speculation : {"auto", "always", "off"}
            Which guesses are let in: see evidence.pyx.
        ghosts, choosing : bool
            Whether ghost caches of all policies watch the traffic, and whether they may change the policy.
        sums : tuple, optional
            (places int64 [keys, width], sizes int64 [records, width], record of each key uint16, checksums uint32 [keys]) of
            tensors in layout order: what is read is held to the checksums; where they are None, `_sums()` gives what came.

        Raises OSError with the errno and the name of what the system refused.
        """
        cdef int32_t i, n_classes = len(class_bytes), n_layers = len(layers)
        cdef int64_t bytes_[16]
        cdef int32_t slots_[16]
        cdef int error = 0
        cdef fc_arena *arena
        cdef fc_slabs plan
        cdef fc_port port
        cdef int huge = {"off": FC_HUGE_OFF, "thp": FC_HUGE_THP, "tlb": FC_HUGE_TLB}[hugepages]
        if self.c != NULL:
            raise RuntimeError("opened already")
        if n_classes > 16:
            raise ValueError("more than 16 size classes")
        if any(not 0 <= number < 1 << 20 or count < 0 for number, count in layers):
            raise ValueError("layer numbers must be from 0 to 1,048,575")
        self.fileset = files
        self.n_layers = n_layers
        self.max_layer = max((number for number, _ in layers), default=-1)
        self.layer_index = <int32_t *>malloc((self.max_layer + 2) * sizeof(int32_t))
        self.layer_number = <int32_t *>calloc(n_layers + 1, sizeof(int32_t))
        self.layer_first = <int32_t *>calloc(n_layers + 1, sizeof(int32_t))
        self.worker = <fc_worker *>calloc(1, sizeof(fc_worker))
        if self.layer_index == NULL or self.layer_number == NULL or self.layer_first == NULL or self.worker == NULL:
            raise MemoryError
        for i in range(self.max_layer + 2):
            self.layer_index[i] = -1
        for i in range(n_layers):
            self.layer_number[i] = layers[i][0]
            self.layer_index[self.layer_number[i]] = i
            self.layer_first[i + 1] = self.layer_first[i] + <int32_t>layers[i][1]
        for i in range(n_classes):
            bytes_[i] = class_bytes[i]
            slots_[i] = class_slots[i]
        slabs_read(&plan, slabs)
        arena = arena_new(bytes_, slots_, n_classes, &plan, huge, slot_align, &error)
        if arena == NULL:
            raise OSError(error, os.strerror(error), "mmap of the arena")
        try:
            self._make(arena, copy(cls_of), copy(ext_first), copy(extents), copy(span), POLICIES[policy],
                       max(<int>queue_depth, <int>io_threads) + 1, chunk)
        finally:
            arena_unref(arena)          # the core has its own reference
        if sums is not None:
            self._check_arrivals(*map(copy, sums))
        if ghosts:
            self._haunt(choosing)
        self.c.direct_required = direct_required
        self.c.overflow_limit = overflow
        self.c.evidence.mode = SPECULATION[speculation]
        core_port(self.c, &port)
        self.worker.core = self.c       # before what may fail: _stop() reaches the core through it
        self._start(&port, engine, queue_depth, io_threads)
        self.worker.ring = self.ring
        self.worker.register_ = registered and self.ring != NULL
        self.worker.mlock = mlock
        error = worker_start(self.worker)
        if error != 0:
            self._shut(LEAK_NS)
            raise OSError(error, os.strerror(error), "pthread_create")
        _open_cores.add(self)

    cdef int _make(self, fc_arena *arena, bytes cls_of, bytes first, bytes extents, bytes span, int policy, int n_ops,
                   int64_t chunk) except -1:
        self.c = core_new(
            arena, self.n_layers, self.layer_first, <const uint8_t *><const char *>cls_of, policy,
            <const fc_extent *><const char *>extents, len(extents) // sizeof(fc_extent), <const int32_t *><const char *>first,
            <const int64_t *><const char *>span, self.fileset.files if self.fileset is not None else NULL,
            self.fileset.n_files if self.fileset is not None else 0, n_ops, chunk, min(chunk, GUESS_CHUNK))
        if self.c == NULL:
            raise MemoryError
        hold_arena(arena)               # until _stop(): the first Hold need not take a reference
        return 0

    def _check_arrivals(self, bytes place, bytes nbytes, bytes record_of, bytes sums):
        cdef int64_t keys = len(record_of) // 2
        cdef int32_t width = len(place) // (8 * keys) if keys else 0
        self.c.sums = sums_new(
            keys, width, len(nbytes) // (8 * width) if width else 0, <const int64_t *><const char *>place,
            <const int64_t *><const char *>nbytes, <const uint16_t *><const char *>record_of,
            <const uint32_t *><const char *>sums if sums or not keys else NULL)
        if self.c.sums == NULL:
            raise MemoryError

    def _sums(self):
        """The checksums of what came so far, as bytes of uint32 [keys]. Nothing may be on its way."""
        if self.c == NULL or self.c.sums == NULL:
            raise RuntimeError("this store keeps no checksums")
        return (<const char *>self.c.sums.sums)[:4 * self.c.table.layer_first[self.n_layers]]

    cdef int _haunt(self, bint choosing) except -1:
        cdef int32_t kinds[MAX_GHOSTS]
        cdef int32_t n = 0
        for kind in sorted(POLICIES.values())[:MAX_GHOSTS]:
            kinds[n] = kind
            n += 1
        with nogil:
            core_haunt(self.c, kinds, n, choosing)
        return 0

    cdef int _start(self, fc_port *port, str engine, int queue_depth, int io_threads) except -1:
        """Start the engine; "auto" is uring, else pread, with the reason kept."""
        cdef int error = 0
        self.engine_used, self.engine_reason = engine, ""
        if engine == "auto" or engine == "uring":
            if liburing.load():
                self.ring = uring_start(port, queue_depth, &error)
                what = f"io_uring_setup: {os.strerror(error)}"
            else:
                error, what = ENOSYS, "no liburing: " + "; ".join(f"{path}: {why}" for path, why in liburing.steps())
            if self.ring != NULL:
                self.c.kick = <void (*)(void *) noexcept nogil>uring_kick
                self.c.stop_reads = <void (*)(void *) noexcept nogil>uring_stop_reads
                self.c.engine = self.ring
                self.c.moves_inline = 0
                self.engine_used = "uring"
            elif engine == "uring":
                raise OSError(error, os.strerror(error), what)
            else:
                self.engine_used, self.engine_reason = "pread", what
        if self.engine_used == "pread":
            self.pread = pread_start(port, io_threads, &error)
            if self.pread == NULL:
                raise OSError(error, os.strerror(error), "pthread_create")
        elif self.engine_used == "hand":
            self.c.by_hand = 1
            self.engine_used, self.engine_reason = "python", "the source's read_expert gives the bytes"
        return 0

    def __dealloc__(self):
        if self.c != NULL and self.c.fork_gen == fork_generation():
            self._stop(0 if self.shutting else LEAK_NS)
            if self.closed:
                core_free(self.c)
                free(self.worker)
            else:                       # the read that has not returned still refers to its file, and threads to the core
                Py_INCREF(self.fileset)
        free(self.layer_index)
        free(self.layer_number)
        free(self.layer_first)

    cdef bint _stop(self, int64_t timeout_ns):
        """No new work, queued reads dropped, threads joined, the arena's reference given up. False: a read did not return."""
        cdef int rc = 0
        cdef int64_t until = fc_now_ns() + timeout_ns
        if self.closed:
            return True
        with nogil:
            if self.recorder != NULL:
                core_lock(self.c)
                recorder_end(self.recorder, FC_ENDED_CLOSED)
                core_unlock(self.c)
            core_close(self.c)
            worker_leave_ring(self.worker)
            if self.ring != NULL:
                rc = uring_join(self.ring, timeout_ns)
                if rc == 0:
                    self.ring = NULL
                    self.c.kick = self.c.stop_reads = NULL
            if rc == 0 and self.pread != NULL:
                rc = pread_join(self.pread, timeout_ns)
                if rc == 0:
                    self.pread = NULL
            if rc == 0:
                rc = worker_join(self.worker, max(until - fc_now_ns(), 1000000000) if timeout_ns >= 0 else -1)
            if rc == 0 and self.recorder != NULL:
                rc = recorder_join(self.recorder, max(until - fc_now_ns(), 1000000000) if timeout_ns >= 0 else -1)
        if rc != 0:
            return False
        self.closed = True
        unhold_arena(self.c.arena)
        arena_unref(self.c.arena)
        self.c.arena = NULL
        return True

    def _shut(self, int64_t timeout_ns):
        """Close. True when every read has ended; False when one has not (its memory is kept)."""
        if self.c == NULL or self.closed or self.c.fork_gen != fork_generation():
            return True
        if self.stopping:
            return False                # another thread is at it
        if not self.shutting:
            self.last = self._memory()
            self.shutting = True
        self.stopping = True
        try:
            if not self._stop(timeout_ns):
                return False
        finally:
            self.stopping = False
        _open_cores.discard(self)
        return True

    def _memory(self):
        return {}

    # ---- what subclasses give

    def _error(self, code, layer, expert, path, offset, wanted, got):
        """Return the exception for a failure: `code` is a positive errno or FC_E*."""
        return OSError(code, f"layer {layer} expert {expert}: code {code}", path)

    def _read_expert(self, layer, expert):
        raise NotImplementedError

    def _source_failed(self, key, error):
        pass

    # ---- keys

    cdef int check(self) except -1:
        """Not a forked child's, not closed: or the exception. Costs two compares."""
        self.same_process()
        if self.c == NULL or fc_load32(&self.c.closing):
            raise self._error(FC_ECLOSED, None, None, None, 0, 0, 0)
        return 0

    cdef bint forked(self) noexcept:
        return self.c != NULL and self.c.fork_gen != fork_generation()

    def _forked(self):
        """Whether this is a child of the process that opened the store."""
        return self.forked()

    cdef int32_t key(self, object layer, object expert) except -1:
        cdef Py_ssize_t l, e
        l, e = fc_small(layer), fc_small(expert)
        if l < 0 or e < 0:
            l = number(layer, "layer")
            e = number(expert, "expert")
        cdef int32_t i = self.layer_index[l] if 0 <= l <= self.max_layer else -1
        if (i < 0 or e < 0 or e >= self.layer_first[i + 1] - self.layer_first[i]
                or self.c.span[self.layer_first[i] + e] < 0):
            raise self._error(-2, l, e, None, 0, 0, 0)
        return self.layer_first[i] + <int32_t>e

    cdef int same_process(self) except -1:
        """Nothing, or in a forked child the exception."""
        if self.forked():
            raise self._error(-1, None, None, None, 0, 0, 0)
        return 0

    def _same_process(self):
        self.same_process()

    def _key(self, layer, expert):
        return self.key(layer, expert)

    def _pair(self, layer, expert):
        """(layer, expert) of a call that takes both, or an ExpertKey alone."""
        return (layer, expert) if expert is not None else key_parts(layer)

    def _where(self, int32_t key):
        """(layer, expert) of a dense key."""
        if self.c == NULL or not 0 <= key < self.layer_first[self.n_layers]:
            raise ValueError(f"no dense key: {key}")
        cdef int32_t i = self.c.table.layer_of[key]
        return self.layer_number[i], key - self.layer_first[i]

    cdef object failure(self, const fc_node *node):
        layer, expert = self._where(node.key)
        path = None
        if self.fileset is not None and 0 <= node.error_file < self.fileset.n_files:
            path = self.fileset.paths[node.error_file]
        return self._error(node.error, layer, expert, path, node.error_offset, node.error_wanted, node.error_got)

    def _is_resident(self, layer, expert):
        self.check()
        cdef int32_t key = self.key(layer, expert)
        core_lock(self.c)
        resident = table_resident(&self.c.table, key)
        core_unlock(self.c)
        return bool(resident)
