"""What as_ready and prefetch return. Made by serve.pyx.

May import lender, batch and what is below.
"""
from libc.stdint cimport int32_t

from fastcache_ext.arguments cimport seconds
from fastcache_ext.atomics cimport fc_load32
from fastcache_ext.batch cimport Batch, new_batch
from fastcache_ext.ioqueue cimport FC_ECANCELLED, FC_ENOROOM
from fastcache_ext.lender cimport Lender
from fastcache_ext.monitor cimport *
from fastcache_ext.requests cimport core_retry
from fastcache_ext.sealed cimport seal
from fastcache_ext.views cimport ExpertLease

cdef enum:
    WINDOW = 4              # pass-through reads that as_ready keeps in flight


cdef class Ready:
    """Iterator over (expert, lease) of one as_ready call."""

    def __reduce_ex__(self, protocol):
        raise TypeError("an as_ready iterator cannot be copied or pickled")

    def __iter__(self):
        return self

    cdef tuple give(self, Batch batch, int i):
        cdef int32_t key = batch.nodes[i].key
        cdef ExpertLease lease = self.server.lease(batch.hold(i), key)
        return lease.expert, lease

    cdef int find_room(self, Batch batch) except -1:
        """Slots that the caller has freed since go to what waits; with nothing in flight, pass through."""
        cdef int i, private = 0
        cdef fc_node *node
        while self.waiting:
            i = self.waiting[0]
            node = &batch.nodes[i]
            if core_retry(self.server.c, &batch.w, node, NULL) != 0:
                self.server.check()
            if node_is(node, FC_NODE_NO_ROOM) and (private >= WINDOW or (private == 0 and fc_load32(&batch.w.pending) > 0)):
                return 0
            self.waiting.pop(0)                 # before anything that runs Python
            if node_is(node, FC_NODE_NO_ROOM):
                private += 1
                batch.make_room(i)
                if node_is(node, FC_NODE_FAILED) and node.generation == 0:      # refused: it never flew, so it will not land
                    self.failed[self.server._where(node.key)] = self.server.failure(node)
            else:
                batch.fill(i)
            if node_is(node, FC_NODE_HELD) and node.was_resident:
                return i + 1
        return 0

    def __next__(self):
        cdef Batch batch = self.batch           # close() may come while this call waits
        if batch is None:
            raise StopIteration
        self.server.same_process()
        if self.running:
            raise ValueError("as_ready is already executing, in another thread or in a source's read_expert")
        self.running = True
        try:
            item = self.advance(batch)
        finally:
            self.running = False
        if item is not None:
            return item
        failed, self.failed = self.failed, {}
        self.close()
        if failed:
            raise self.server._batch_error(failed)
        raise StopIteration

    cdef tuple advance(self, Batch batch):
        """The next (expert, lease), or None at the end."""
        cdef fc_node *node
        cdef int i, pending
        while self.hit < batch.n:
            i = self.hit
            self.hit += 1
            if node_is(&batch.nodes[i], FC_NODE_HELD) and batch.nodes[i].was_resident:
                return self.give(batch, i)
        while self.batch is batch:
            i = self.find_room(batch)
            if i > 0:
                return self.give(batch, i - 1)
            pending = fc_load32(&batch.w.pending)           # read before the list: what lands in between still is in the list
            node = core_next_landed(self.server.c, &batch.w)
            if node != NULL:
                if node_is(node, FC_NODE_HELD):
                    return self.give(batch, <int>(node - batch.nodes))
                self.failed[self.server._where(node.key)] = self.server.failure(node)
                continue
            if pending == 0 and not self.waiting:
                return None
            if not batch.wait(self.timeout):
                raise batch.timed_out()
        return None

    def close(self):
        """Release what was not taken; reads under way land in the cache."""
        self.batch = None


cdef class Prefetch:
    """A prefetch under way. Holds nothing: residency after it is not promised. Dropping it cancels nothing."""
    def __reduce_ex__(self, protocol):
        raise TypeError("a Prefetch cannot be copied or pickled")

    def __repr__(self):
        if self.server.forked():
            state = "of the process that opened the store"
        else:
            state = "under way" if fc_load32(&self.batch.w.pending) else "done"
        return f"<Prefetch of {self.batch.n} experts, {state}>"

    def done(self):
        """Whether every read has landed, failed or been cancelled."""
        self.server.same_process()
        return fc_load32(&self.batch.w.pending) == 0

    def cancel(self):
        """Stop what has not been read and nobody waits for. True if anything was stopped."""
        self.server.same_process()
        return core_cancel(self.server.c, &self.batch.w) > 0

    def wait(self, timeout=None):
        """Wait at most `timeout` seconds (None: no limit). True when done."""
        self.server.same_process()
        return bool(self.batch.wait(seconds(timeout, -1.0)))

    def result(self, timeout=None):
        """Return {ExpertKey: what became of it}, waiting at most `timeout` seconds.

        "resident" (it was), "loaded", "late" (a demand came for it before it had landed), "no_room", "cancelled" (by
        cancel(), or because its layer was visited without it before its read had begun),
        "failed", or "declined": speculation does not pay for this predictor now (see `describe()["speculation"]`).

        Raises
        ------
        ReadTimeout
        """
        cdef int i
        cdef fc_node *node
        if not self.wait(timeout):
            raise self.batch.timed_out()
        out = {}
        for i in range(self.batch.n):
            node = &self.batch.nodes[i]
            if node_is(node, FC_NODE_HELD):
                what = "resident" if node.was_resident else "late" if node.late else "loaded"
                if node.slot < 0:       # it watched a pass-through, which leaves nothing resident
                    what = "no_room"
            elif node_is(node, FC_NODE_NO_ROOM):
                what = "no_room"
            elif node_is(node, FC_NODE_DECLINED):
                what = "declined"
            else:
                what = ("cancelled" if node.error == FC_ECANCELLED else "no_room" if node.error == FC_ENOROOM
                        else "failed")
            out[self.server.catalog.key_type(*self.server._where(node.key))] = what
        return out

    def _errors(self):
        """Return {(layer, expert): error} of what failed."""
        return {self.server._where(self.batch.nodes[i].key): self.server.failure(&self.batch.nodes[i])
                for i in range(self.batch.n) if node_is(&self.batch.nodes[i], FC_NODE_FAILED)}

    def _fill(self):
        """For Python sources: read what this prefetch issued, in the calling thread."""
        cdef int i
        for i in range(self.batch.n):
            self.batch.fill(i)

    def add_done_callback(self, callback):
        """Call `callback(prefetch)` when done: at once if it is, else from the store's Python worker."""
        if self.done():
            callback(self)
        else:
            self.server._call_when_done(self, callback)


cdef Ready new_ready(Lender server, double timeout):
    cdef Ready ready = Ready.__new__(Ready)
    ready.server, ready.batch, ready.timeout, ready.failed = server, new_batch(), timeout, {}
    return ready


cdef Prefetch new_prefetch(Lender server):
    cdef Prefetch handle = Prefetch.__new__(Prefetch)
    handle.server, handle.batch = server, new_batch()
    return handle


seal(Ready)
seal(Prefetch)
