"""Batch: one call's wait over distinct experts, from reserve to hand-over.

May import core, hold, monitor.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from fastcache_ext.arena cimport fc_private, fork_generation, private_new
from fastcache_ext.core cimport Core
from fastcache_ext.counters cimport FC_ERROR_TIMEOUT, FC_FIRST_ERROR, count_begin, count_end, count_in, fc_counters
from fastcache_ext.hold cimport Hold, hold_arena
from fastcache_ext.ioqueue cimport FC_ESOURCE, fc_load
from fastcache_ext.monitor cimport *
from fastcache_ext.recorder cimport T_TIMED_OUT, note
from fastcache_ext.requests cimport core_begin, core_refuse, core_retry
from fastcache_ext.sealed cimport seal
from fastcache_ext.threads cimport fc_now_ns

cdef enum:
    FC_ETIMEOUT = -3

cdef int64_t SLICE_NS = 200000000       # a wait looks for signals this often


@cython.no_gc_clear         # __dealloc__ needs the core, in a garbage cycle too
cdef class Batch:
    """One call's wait over distinct experts. What it did not hand out is dropped when it goes."""

    def __dealloc__(self):
        cdef int i
        if self.begun and self.core.c.fork_gen == fork_generation():
            for i in range(self.n if self.core.c.by_hand else 0):
                core_abandon(self.core.c, &self.nodes[i])
            wait_done(&self.w, self.core.c)
        free(self.nodes)

    cdef int begin(self, Core core, int mode, bint each, const int32_t *keys, int n, int predictor=-1) except -1:
        cdef int i, rc
        core.check()
        self.core = core
        self.n = n
        self.nodes = <fc_node *>calloc(n + 1, sizeof(fc_node))
        if self.nodes == NULL:
            raise MemoryError
        for i in range(n):
            self.nodes[i].key = keys[i]
        wait_init(&self.w, core.c, mode, each, self.nodes, n)
        if predictor >= 0:
            self.w.predictor = predictor
        self.begun = True
        rc = core_begin(core.c, &self.w)
        if rc != 0:
            raise core._error(-rc, None, None, None, 0, 0, 0)
        if core.c.by_hand and mode != FC_MODE_GUESS:
            for i in range(n):
                self.fill(i)
        return 0

    cdef int make_room(self, int i) except -1:
        """Serve node i by pass-through: it found no slot. A failure is the node's, not the call's."""
        cdef fc_core *c = self.core.c
        cdef fc_node *node = &self.nodes[i]
        cdef fc_private *p
        cdef int error = 0, rc
        if not node_is(node, FC_NODE_NO_ROOM):
            return 0
        self.core.check()
        p = private_new(c.arena, node.key, max(c.span[node.key], 1), c.overflow_limit, &error)
        if p == NULL:
            core_refuse(c, &self.w, node, error)
            return 0
        rc = core_retry(c, &self.w, node, p)
        if rc != 0:
            raise self.core._error(-rc, None, None, None, 0, 0, 0)
        if node_is(node, FC_NODE_NO_ROOM):      # not even memory for the load
            core_refuse(c, &self.w, node, ENOMEM)
        self.fill(i)
        return 0

    cpdef fill(self, int i):
        """Let the Python source produce node i, if nobody has begun to."""
        cdef fc_node *node = &self.nodes[i]
        cdef fc_load *load
        cdef Py_buffer view
        if not self.core.c.by_hand or not core_claim(self.core.c, node):
            return
        load = node.load                # stays: it lands by this call alone
        try:
            layer, expert = self.core._where(node.key)
            data = self.core._read_expert(layer, expert)
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
            try:
                if view.len != load.payload:
                    raise ValueError(f"read_expert({layer}, {expert}) gave {view.len} bytes; "
                                     f"expert_nbytes says {load.payload}")
                memcpy(load.dest, view.buf, <size_t>view.len)
            finally:
                PyBuffer_Release(&view)
        except BaseException as error:
            self.core._source_failed(node.key, error)
            core_finish_by_hand(self.core.c, load, FC_ESOURCE)
            if not isinstance(error, Exception):
                raise
        else:
            core_finish_by_hand(self.core.c, load, 0)

    cdef int wait(self, double timeout) except -1:
        """1 when the wait is over, 0 when `timeout` seconds (< 0: none) passed. Signals are looked at between slices."""
        cdef int64_t deadline = fc_now_ns() + <int64_t>(min(timeout, 1e8) * 1e9) if timeout >= 0 else -1
        cdef int64_t until
        cdef int over, i
        while True:
            until = fc_now_ns() + SLICE_NS
            if deadline >= 0 and deadline < until:
                until = deadline
            with nogil:
                over = core_sleep(self.core.c, &self.w, until)
            if over:
                return 1
            PyErr_CheckSignals()
            for i in range(self.n if self.core.c.by_hand else 0):
                self.fill(i)            # what another call began and left
            if deadline >= 0 and fc_now_ns() >= deadline:
                return 0

    cdef object timed_out(self):
        """The error of a call whose wait passed its timeout; counts it."""
        cdef fc_counters *n = &self.core.c.counters
        core_lock(self.core.c)
        count_begin(n)
        count_in(n, self.nodes[0].phase, FC_FIRST_ERROR + FC_ERROR_TIMEOUT, 1)
        count_end(n)
        note(self.core.c.recorder, T_TIMED_OUT, 0, self.nodes[0].phase, self.nodes[0].key)
        core_unlock(self.core.c)
        return self.core._error(FC_ETIMEOUT, *self.core._where(self.nodes[0].key), None, 0, 0, 0)

    cdef Hold hold(self, int i):
        """Hand node i's lease over to a new Hold."""
        cdef Hold h = Hold.__new__(Hold)
        self.hand_over(i, h)
        return h

    cdef void hand_over(self, int i, Hold h) noexcept:
        """Hand node i's lease over to a Hold that holds nothing yet."""
        cdef fc_node *node = &self.nodes[i]
        h.slot = node.slot
        h.priv = node.priv
        h.data = node.data
        h.generation = node.generation
        node.priv = NULL
        node_set(node, FC_NODE_TAKEN)
        h.arena = self.w.arena
        hold_arena(h.arena)


cdef Batch new_batch():
    return Batch.__new__(Batch)


seal(Batch)
