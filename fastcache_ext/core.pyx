"""The border: a store of experts without meaning, for Python.

Owns Core. Turns negative codes into exceptions by asking the subclass which (`_error`), because errors are
Python's and live above. Knows no tensor and no NumPy. May import every module below it.

Thread safety: every method may be called from any thread. After a fork every method of the child raises, and nothing is freed.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.number cimport PyNumber_AsSsize_t
from cpython.ref cimport Py_INCREF
from libc.errno cimport ENOSYS
from libc.stdint cimport int32_t, int64_t, uint8_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

import atexit
import os
import weakref

from fastcache_ext import liburing
from fastcache_ext.arena import huge_bytes
from fastcache_ext.counters import LAYER_NAMES, NAMES
from fastcache_ext.policy import NAMES as POLICIES

from fastcache_ext.arena cimport (
    FC_HOLDERS, FC_HUGE_OFF, FC_HUGE_THP, FC_HUGE_TLB, arena_new, arena_ref, arena_unref, fc_arena, fork_generation,
)
from fastcache_ext.atomics cimport fc_load32, fc_load64
from fastcache_ext.counters cimport N_COUNTERS, N_LAYER_COUNTERS, counters_read
from fastcache_ext.files cimport FileSet
from fastcache_ext.ioqueue cimport FC_ECLOSED, fc_extent, fc_port
from fastcache_ext.landing cimport landing_port
from fastcache_ext.monitor cimport (
    core_close, core_free, core_lock, core_new, core_unlock, fc_node,
)
from fastcache_ext.pread cimport pread_join, pread_start
from fastcache_ext.table cimport table_check
from fastcache_ext.threads cimport fc_now_ns
from fastcache_ext.uring cimport uring_flags, uring_join, uring_kick, uring_registered, uring_start
from fastcache_ext.worker cimport worker_join, worker_start

cdef int64_t LEAK_NS = 5000000000       # what a dealloc or an exit grants reads that do not return
_open_cores = weakref.WeakSet()


@atexit.register
def _close_all():
    """Stop native threads before the interpreter goes. Reads that never return cost their memory, not the exit."""
    for core in list(_open_cores):
        core._shut(LEAK_NS)


cdef void *copy_buffer(object source) except NULL:
    """A malloc'ed copy of a contiguous buffer."""
    cdef Py_buffer view
    cdef void *p
    PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
    try:
        p = malloc(<size_t>view.len + 1)
        if p == NULL:
            raise MemoryError
        memcpy(p, view.buf, <size_t>view.len)
    finally:
        PyBuffer_Release(&view)
    return p


@cython.no_gc_clear         # the files must outlive the reads that __dealloc__ waits for, in a garbage cycle too
cdef class Core:
    """A store of (layer, expert) -> bytes. See `_open`; subclasses say what errors and Python sources mean."""

    def __cinit__(self, *args, **kwargs):
        self.timeout = -1.0

    def _open(self, *, layers, cls_of, ext_first, extents, span, FileSet files, class_bytes, class_slots, policy,
              engine, chunk, queue_depth, io_threads, hugepages, mlock, registered, overflow, direct_required):
        """Make the arena, the table and the engine.

        Parameters
        ----------
        layers : sequence of (int, int)
            Layer number and number of experts, ascending. Dense keys count through them in order.
        cls_of, ext_first, extents, span : buffers
            Per key: size class (uint8), first extent (int32, one more than keys), `fc_extent` records, bytes of slot used (int64).
        class_bytes, class_slots : sequences of int
            Bytes of a slot, and number of slots, per size class.
        engine : {"auto", "uring", "pread", "hand", "scripted"}
            "hand": loads are filled by `_read_expert`; "scripted": by a test.
        hugepages : {"thp", "tlb", "off"}
        mlock, registered : bool
            Whether to try.

        Raises OSError with the errno and the name of what the system refused.
        """
        cdef int32_t i, number, n_classes = len(class_bytes)
        cdef int32_t sizes_n = len(layers)
        cdef int64_t bytes_[16]
        cdef int32_t slots_[16]
        cdef int32_t *sizes
        cdef int error = 0, n_ops
        cdef fc_arena *arena
        cdef fc_extent *ext
        cdef int32_t *first
        cdef int64_t *spans
        cdef uint8_t *classes
        cdef fc_port port
        cdef int huge = {"off": FC_HUGE_OFF, "thp": FC_HUGE_THP, "tlb": FC_HUGE_TLB}[hugepages]
        if self.c != NULL:
            raise RuntimeError("opened already")
        if n_classes > 16:
            raise ValueError("more than 16 size classes")
        self.fileset = files
        self.layer_numbers = [int(number) for number, _ in layers]
        self.n_layers = sizes_n
        self.max_layer = max(self.layer_numbers, default=-1)
        self.layer_index = <int32_t *>malloc((self.max_layer + 2) * sizeof(int32_t))
        self.layer_first = <int32_t *>calloc(sizes_n + 1, sizeof(int32_t))
        sizes = <int32_t *>calloc(sizes_n + 1, sizeof(int32_t))
        if self.layer_index == NULL or self.layer_first == NULL or sizes == NULL:
            free(sizes)
            raise MemoryError
        for i in range(self.max_layer + 2):
            self.layer_index[i] = -1
        for i in range(sizes_n):
            self.layer_index[<int32_t>layers[i][0]] = i
            sizes[i] = layers[i][1]
            self.layer_first[i + 1] = self.layer_first[i] + sizes[i]
        for i in range(n_classes):
            bytes_[i] = class_bytes[i]
            slots_[i] = class_slots[i]
        arena = arena_new(bytes_, slots_, n_classes, huge, &error)
        if arena == NULL:
            free(sizes)
            raise OSError(error, os.strerror(error), "mmap of the arena")
        classes = <uint8_t *>copy_buffer(cls_of)
        first = <int32_t *>copy_buffer(ext_first)
        ext = <fc_extent *>copy_buffer(extents)
        spans = <int64_t *>copy_buffer(span)
        n_ops = max(<int>queue_depth, <int>io_threads) + 1
        self.c = core_new(arena, sizes_n, sizes, classes, POLICIES[policy], ext, first, spans,
                          files.files if files is not None else NULL, files.n_files if files is not None else 0,
                          n_ops, chunk, 4 * <int64_t>chunk)
        free(sizes)
        free(classes)
        arena_unref(arena)              # the core's own reference stays
        if self.c == NULL:
            free(first)
            free(ext)
            free(spans)
            raise MemoryError
        self.c.direct_required = direct_required
        self.c.overflow_limit = overflow
        landing_port(self.c, &port)
        self._start(&port, engine, queue_depth, io_threads)
        self.worker.core = self.c
        self.worker.ring = self.ring
        self.worker.register_ = registered and self.ring != NULL
        self.worker.mlock = mlock
        error = worker_start(&self.worker)
        if error != 0:
            self._shut(LEAK_NS)
            raise OSError(error, os.strerror(error), "pthread_create")
        _open_cores.add(self)

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
            self._stop(LEAK_NS)
            if self.closed:
                core_free(self.c)
            else:                       # the read that has not returned still refers to its file
                Py_INCREF(self.fileset)
        free(self.layer_index)
        free(self.layer_first)

    cdef bint _stop(self, int64_t timeout_ns):
        """No new work, queued reads dropped, threads joined, the arena's reference given up. False: a read did not return."""
        cdef int rc = 0
        cdef int64_t until = fc_now_ns() + timeout_ns
        if self.closed:
            return True
        with nogil:
            core_close(self.c)
            if self.ring != NULL:
                rc = uring_join(self.ring, timeout_ns)
                if rc == 0:
                    self.ring = NULL
                    self.c.kick = NULL
            if rc == 0 and self.pread != NULL:
                rc = pread_join(self.pread, timeout_ns)
                if rc == 0:
                    self.pread = NULL
            if rc == 0:
                rc = worker_join(&self.worker, max(until - fc_now_ns(), 1000000000) if timeout_ns >= 0 else -1)
        if rc != 0:
            return False
        self.closed = True
        arena_unref(self.c.arena)
        self.c.arena = NULL
        return True

    def _shut(self, int64_t timeout_ns):
        """Close. True when every read has ended; False when one has not (its memory is kept)."""
        if self.c == NULL or self.closed or self.c.fork_gen != fork_generation():
            return True
        if not self.shutting:
            self.last = self._memory()
            self.shutting = True
        if not self._stop(timeout_ns):
            return False
        _open_cores.discard(self)
        return True

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
        if self.forked():
            raise self._error(-1, None, None, None, 0, 0, 0)
        if self.c == NULL or self.c.closing:
            raise self._error(FC_ECLOSED, None, None, None, 0, 0, 0)
        return 0

    cdef bint forked(self) noexcept:
        return self.c != NULL and self.c.fork_gen != fork_generation()

    def _forked(self):
        """Whether this is a child of the process that opened the store."""
        return self.forked()

    cdef int32_t key(self, object layer, object expert) except -1:
        cdef Py_ssize_t l = PyNumber_AsSsize_t(layer, OverflowError)
        cdef Py_ssize_t e = PyNumber_AsSsize_t(expert, OverflowError)
        cdef int32_t i = self.layer_index[l] if 0 <= l <= self.max_layer else -1
        if (i < 0 or e < 0 or e >= self.layer_first[i + 1] - self.layer_first[i]
                or self.c.span[self.layer_first[i] + e] < 0):
            raise self._error(-2, l, e, None, 0, 0, 0)
        return self.layer_first[i] + <int32_t>e

    def _same_process(self):
        """Nothing, or in a forked child the exception."""
        if self.forked():
            raise self._error(-1, None, None, None, 0, 0, 0)

    def _key(self, layer, expert):
        return self.key(layer, expert)

    def _where(self, int32_t key):
        """(layer, expert) of a dense key."""
        cdef int32_t i = self.c.table.layer_of[key]
        return self.layer_numbers[i], key - self.layer_first[i]

    cdef object failure(self, const fc_node *node):
        layer, expert = self._where(node.key)
        path = None
        if self.fileset is not None and 0 <= node.error_file < self.fileset.n_files:
            path = self.fileset.paths[node.error_file]
        return self._error(node.error, layer, expert, path, node.error_offset, node.error_wanted, node.error_got)

    def _is_resident(self, layer, expert):
        self.check()
        cdef int32_t slot = self.c.table.slot_of[self.key(layer, expert)]
        return slot >= 0 and self.c.table.slots[slot].state == 2

    # ---- what it says of itself

    def _counters(self, bint by_layer=False):
        """{name: int}; with `by_layer` also {layer: {name: int}}, from one untorn snapshot."""
        cdef int64_t out[N_COUNTERS]
        cdef int64_t *layers = NULL
        cdef int i, j
        if self.c == NULL or self.c.fork_gen != fork_generation():
            self.check()
        if by_layer:
            layers = <int64_t *>malloc(self.n_layers * N_LAYER_COUNTERS * sizeof(int64_t) + 1)
            if layers == NULL:
                raise MemoryError
        counters_read(&self.c.counters, out, layers, self.n_layers)
        values = {NAMES[i]: out[i] for i in range(N_COUNTERS)}
        values["bytes_submitted"] = fc_load64(&self.c.bytes_submitted)
        values["bytes_direct"] = fc_load64(&self.c.bytes_direct)
        if not by_layer:
            return values, {}
        try:
            return values, {
                self.layer_numbers[i]: {LAYER_NAMES[j]: layers[i * N_LAYER_COUNTERS + j] for j in range(N_LAYER_COUNTERS)}
                for i in range(self.n_layers)
            }
        finally:
            free(layers)

    def _memory(self):
        """What the kernel really gave: bytes, and errnos where it refused. As it was at close, afterwards."""
        cdef fc_arena *a
        cdef int error = 0, pieces = 0, flags = 0
        cdef int32_t i, leased = 0
        cdef int64_t registered = 0
        if self.forked():
            self.check()
        if self.c == NULL or self.shutting or self.c.arena == NULL:
            return dict(self.last or {})
        a = self.c.arena
        if self.ring != NULL:           # before anything lets the GIL go: close() in another thread frees the ring
            flags = uring_flags(self.ring)
            pieces = uring_registered(self.ring, &error)
            for i in range(pieces):
                registered += a.piece_bytes[i]
        for i in range(a.n_slots):
            leased += fc_load32(&a.leases[i]) > 0
        arena_ref(a)
        try:
            huge = huge_bytes(<uintptr_t>a.base, a.nbytes) if a.nbytes else 0
        finally:
            arena_unref(a)
        if self.shutting:
            return dict(self.last or {})
        return {
            "arena_bytes": a.nbytes,
            "slots": a.n_slots,
            "leased_slots": leased,
            "populated_bytes": min(fc_load64(&a.populated), a.nbytes),
            "huge_bytes": huge,
            "huge_errno": a.huge_errno,
            "locked_bytes": fc_load64(&a.locked),
            "registered_bytes": registered,
            "registration_errno": error,
            "populate_errno": fc_load32(&self.worker.populate_errno),
            "mlock_errno": fc_load32(&self.worker.mlock_errno),
            "settled": bool(fc_load32(&self.worker.settled)),
            "overflow_bytes": fc_load64(&a.overflow_bytes),
            "overflow_peak": fc_load64(&a.overflow_peak),
            "ring_flags": flags,
        }

    def _progress(self):
        """(populated bytes, whether memory is settled, errno of populating): cheap enough to poll."""
        if self.c == NULL or self.c.arena == NULL:
            return 0, True, 0
        return (min(fc_load64(&self.c.arena.populated), self.c.arena.nbytes),
                bool(fc_load32(&self.worker.settled)), fc_load32(&self.worker.populate_errno))

    def _holders(self):
        """[(layer, expert, bytes)] of live pass-through buffers, largest first, as far as they can be named."""
        cdef int32_t i, key
        found = []
        if self.c != NULL and self.c.arena != NULL:
            for i in range(FC_HOLDERS):
                key = fc_load32(&self.c.arena.holders[i].key)
                if key >= 0:
                    found.append((*self._where(key), self.c.arena.holders[i].nbytes))
        return sorted(found, key=lambda holder: -holder[2])

    def _check(self):
        """0, or the number of a broken invariant. Walks every slot: for tests."""
        cdef int rc = 0
        if self.c != NULL and self.c.arena != NULL:
            core_lock(self.c)
            rc = table_check(&self.c.table)
            core_unlock(self.c)
        return rc
