"""The calls: acquire, acquire_many, as_ready, prefetch, pin.

Owns Server (a Reporter that hands out ExpertLeases), Ready and Prefetch. The GIL is let go once per wait, never on a hit.
May import core, monitor's declarations and views.
"""
from libc.stdint cimport int32_t

from fastcache_ext.arguments import Leases

from fastcache_ext.arena cimport fork_generation
from fastcache_ext.arguments cimport Keys, read_plain, seconds
from fastcache_ext.batch cimport Batch
from fastcache_ext.report cimport Reporter
from fastcache_ext.hold cimport Hold
from fastcache_ext.ioqueue cimport FC_ECANCELLED
from fastcache_ext.monitor cimport *
from fastcache_ext.requests cimport core_hit, core_hit_many, core_retry
from fastcache_ext.views cimport Catalog, ExpertLease, make_lease

cdef enum:
    FC_EFORK = -1
    FC_EUNKNOWN = -2
    FC_ETIMEOUT = -3
    FC_EPINS = -4
    SMALL = 64              # keys that need no allocation
    WINDOW = 4              # pass-through reads that as_ready keeps in flight


cdef class Server(Reporter):
    """A store's calls. The catalog must be set before the first acquire."""
    cdef Catalog catalog

    def _set_catalog(self, Catalog catalog):
        self.catalog = catalog

    def _set_timeout(self, timeout):
        self.timeout = seconds(timeout, -1.0)

    cdef ExpertLease lease(self, Hold hold, int32_t key):
        cdef int32_t i = self.c.table.layer_of[key]
        return make_lease(self.catalog, hold, key, self.layer_number[i], key - self.layer_first[i])

    cdef ExpertLease get(self, object layer, object expert, object timeout):
        cdef int32_t key, slot
        cdef Hold hold
        self.check()
        key = self.key(layer, expert)
        hold = Hold.__new__(Hold)       # before the lease is counted: an allocation may run the collector
        slot = core_hit(self.c, key)
        if slot < 0:
            return self.miss(key, seconds(timeout, self.timeout))
        hold.fill(self.c, slot)
        return self.lease(hold, key)

    cdef ExpertLease miss(self, int32_t key, double timeout):
        cdef Batch batch = Batch.__new__(Batch)
        cdef fc_node *node
        batch.begin(self, FC_MODE_DEMAND, False, &key, 1)
        batch.make_room(0)
        node = &batch.nodes[0]
        if node.status != FC_NODE_FAILED and not batch.wait(timeout):
            raise self._error(FC_ETIMEOUT, *self._where(key), None, 0, 0, 0)
        if node.status != FC_NODE_HELD:
            raise self.failure(node)
        return self.lease(batch.hold(0), key)

    def __getitem__(self, key):
        if type(key) is not tuple and not isinstance(key, tuple):
            raise TypeError("store[layer, expert], or store[ExpertKey(layer, expert)]")
        if len(key) != 2:
            raise TypeError(f"store[layer, expert] takes two integers, got {len(key)}")
        return self.get(key[0], key[1], None)

    def acquire(self, layer, expert=None, *, timeout=None):
        """Return a lease of one expert, reading it if it is not resident.

        Parameters
        ----------
        layer : int or ExpertKey
        expert : int
        timeout : float, optional
            Seconds to wait; None means the store's.

        Raises
        ------
        UnknownExpert, ReadFailed, ShortRead, CheckpointChanged, ReadTimeout, OverflowLimit, StoreClosed, ForkedStore

        Notes
        -----
        A hit costs about as much as a dictionary LRU. A miss lets the GIL go once, while it waits. Thread-safe.
        """
        if expert is None:
            layer, expert = layer
        return self.get(layer, expert, timeout)

    def acquire_many(self, layer, experts=None, *, timeout=None):
        """Return the leases of several experts, in input order; duplicates give several handles of one request.

        All misses are submitted before the first wait. Waits for all.

        Raises
        ------
        BatchFailed
            If any failed: `.failed` says which and why. The others stay resident, but no lease of them is kept.
        """
        cdef Keys k
        cdef Batch batch
        cdef int i, n
        cdef int32_t keys[SMALL]
        cdef int32_t slots[SMALL]
        cdef list holds
        cdef double limit = seconds(timeout, self.timeout)
        self.check()
        n = read_plain(self, layer, experts, keys, SMALL)
        if n > 0:
            holds = [Hold.__new__(Hold) for _ in range(n)]      # before the leases are counted, as in get()
            if core_hit_many(self.c, keys, n, slots):
                for i in range(n):
                    (<Hold>holds[i]).fill(self.c, slots[i])
                return Leases([self.lease(<Hold>holds[i], keys[i]) for i in range(n)])
        k = Keys.__new__(Keys)
        k.read(self, layer, experts)
        holds = [None] * k.n
        batch = Batch.__new__(Batch)
        batch.begin(self, FC_MODE_DEMAND, False, k.keys, k.n)
        for i in range(k.n):
            batch.make_room(i)
        if not batch.wait(limit):
            raise self._error(FC_ETIMEOUT, *self._where(k.keys[0]), None, 0, 0, 0)
        failed = self.failures(batch)
        if failed:
            raise self._batch_error(failed)
        for i in range(k.n):
            holds[i] = batch.hold(i)
        return Leases([self.lease(<Hold>holds[k.index[i]], k.keys[k.index[i]]) for i in range(k.count)])

    cdef dict failures(self, Batch batch):
        cdef int i
        return {self._where(batch.nodes[i].key): self.failure(&batch.nodes[i])
                for i in range(batch.n) if batch.nodes[i].status == FC_NODE_FAILED}

    def as_ready(self, layer, experts=None, *, timeout=None):
        """Iterate (expert, lease) over distinct experts: hits first, then misses as they land.

        Reserves and submits at the call. What was not taken when the iterator is closed or dropped is released.

        Raises
        ------
        BatchFailed
            At the end, if any failed.

        Notes
        -----
        Arrival order is not the router's: keep each expert's part and sum in router order, or results depend on the disk.
        """
        cdef Keys k = Keys.__new__(Keys)
        cdef Ready ready = Ready.__new__(Ready)
        self.check()
        k.read(self, layer, experts)
        ready.timeout = seconds(timeout, self.timeout)
        ready.server = self
        ready.batch = Batch.__new__(Batch)
        ready.batch.begin(self, FC_MODE_DEMAND, True, k.keys, k.n)
        ready.waiting = [i for i in range(k.n) if ready.batch.nodes[i].status == FC_NODE_NO_ROOM]
        ready.failed = {}
        return ready

    def _prefetch(self, layer, experts):
        cdef Keys k = Keys.__new__(Keys)
        cdef Prefetch p = Prefetch.__new__(Prefetch)
        self.check()
        k.read(self, layer, experts)
        p.server = self
        p.batch = Batch.__new__(Batch)
        p.batch.begin(self, FC_MODE_GUESS, False, k.keys, k.n)
        return p

    def pin(self, layer, experts=None, *, timeout=None):
        """Read experts if needed, and keep them resident until unpin(). Idempotent. Waits for the reads.

        Raises
        ------
        BudgetTooSmall
            If fewer than one slot would be left for everything else; nothing is pinned then.
        BatchFailed
            If reads failed, or no slot could be freed for them.
        """
        cdef Keys k = Keys.__new__(Keys)
        cdef Batch batch = Batch.__new__(Batch)
        cdef double limit = seconds(timeout, self.timeout)
        cdef int i
        cdef list mine = [], again = []
        self.check()
        k.read(self, layer, experts)
        self.check()                    # reading the keys ran the caller's code
        self.room_for_pins(k)
        batch.begin(self, FC_MODE_PIN, False, k.keys, k.n)
        if not batch.wait(limit):
            raise self._error(FC_ETIMEOUT, *self._where(k.keys[0]), None, 0, 0, 0)
        failed = self.failures(batch)
        for i in range(k.n):
            where = self._where(k.keys[i])
            if batch.nodes[i].status == FC_NODE_HELD and batch.nodes[i].slot >= 0:
                was = self.c.table.slots[batch.nodes[i].slot].pinned
                if not core_pin(self.c, &batch.w, &batch.nodes[i]):
                    for key in mine:
                        core_unpin(self.c, key)
                    raise self._error(FC_EPINS, None, None, None, 0, k.n, 1)
                if not was:
                    mine.append(k.keys[i])
            elif batch.nodes[i].status == FC_NODE_HELD:     # joined a pass-through: landed, but in no slot
                again.append(where)
            elif batch.nodes[i].status == FC_NODE_NO_ROOM:
                failed[where] = self._error(FC_EPINS, *where, None, 0, 1, 0)
        batch = None
        if again:
            Server.pin(self, again, timeout=timeout)
        if failed:
            raise self._batch_error(failed)

    cdef int room_for_pins(self, Keys k) except -1:
        """Nothing, or BudgetTooSmall before anything is read; core_pin decides."""
        cdef int wanted[256]
        cdef int i, c, slots
        cdef int32_t slot
        for c in range(256):
            wanted[c] = 0
        for i in range(k.n):
            slot = self.c.table.slot_of[k.keys[i]]
            if slot < 0 or not self.c.table.slots[slot].pinned:
                wanted[self.c.table.cls_of[k.keys[i]]] += 1
        for c in range(256):
            slots = self.c.arena.class_first[c + 1] - self.c.arena.class_first[c] if c < self.c.arena.n_classes else 0
            if wanted[c] and (slots == 0 or self.c.table.n_pinned[c] + wanted[c] >= slots):
                raise self._error(FC_EPINS, None, None, None, 0, wanted[c],
                                  slots - self.c.table.n_pinned[c] if slots else 0)
        return 0

    def unpin(self, layer, experts=None):
        """Let pinned experts be evicted again. Experts that are not pinned are left alone."""
        cdef Keys k = Keys.__new__(Keys)
        cdef int i
        self.check()
        k.read(self, layer, experts)
        for i in range(k.n):
            core_unpin(self.c, k.keys[i])

    def _batch_error(self, failed):
        return ExceptionGroup("experts failed", list(failed.values()))


cdef class Ready:
    """Iterator over (expert, lease) of one as_ready call."""
    cdef Server server
    cdef Batch batch
    cdef double timeout
    cdef int hit                # next node to look at for a hit
    cdef list waiting           # nodes that found no room yet, in order
    cdef dict failed
    cdef bint running           # a call of __next__ is under way

    def __init__(self):
        raise TypeError("made by store.as_ready")

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
            if node.status == FC_NODE_NO_ROOM and (private >= WINDOW or (private == 0 and batch.w.pending > 0)):
                return 0
            self.waiting.pop(0)                 # before anything that runs Python
            if node.status == FC_NODE_NO_ROOM:
                private += 1
                batch.make_room(i)
                if node.status == FC_NODE_FAILED and node.landed == NULL and batch.w.landed_last != node:
                    self.failed[self.server._where(node.key)] = self.server.failure(node)       # refused: it never flew
            else:
                batch.fill(i)
            if node.status == FC_NODE_HELD and node.was_resident:
                return i + 1
        return 0

    def __next__(self):
        cdef Batch batch = self.batch           # close() may come while this call waits
        if batch is None:
            raise StopIteration
        if self.server.c.fork_gen != fork_generation():
            raise self.server._error(FC_EFORK, None, None, None, 0, 0, 0)
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
            if batch.nodes[i].status == FC_NODE_HELD and batch.nodes[i].was_resident:
                return self.give(batch, i)
        while self.batch is batch:
            i = self.find_room(batch)
            if i > 0:
                return self.give(batch, i - 1)
            pending = batch.w.pending           # read before the list: what lands in between still is in the list
            node = core_next_landed(self.server.c, &batch.w)
            if node != NULL:
                if node.status == FC_NODE_HELD:
                    return self.give(batch, <int>(node - batch.nodes))
                self.failed[self.server._where(node.key)] = self.server.failure(node)
                continue
            if pending == 0 and not self.waiting:
                return None
            if not batch.wait(self.timeout):
                raise self.server._error(FC_ETIMEOUT, *self.server._where(batch.nodes[0].key), None, 0, 0, 0)
        return None

    def close(self):
        """Release what was not taken; reads under way land in the cache."""
        self.batch = None


cdef class Prefetch:
    """A prefetch under way. Holds nothing: residency after it is not promised. Dropping it cancels nothing."""
    cdef readonly Server server
    cdef Batch batch

    def __init__(self):
        raise TypeError("made by store.prefetch")

    def __reduce_ex__(self, protocol):
        raise TypeError("a Prefetch cannot be copied or pickled")

    def done(self):
        """Whether every read has landed, failed or been cancelled."""
        self.same_process()
        return self.batch.w.pending == 0

    def cancel(self):
        """Stop what has not been read and nobody waits for. True if anything was stopped."""
        self.same_process()
        return core_cancel(self.server.c, &self.batch.w) > 0

    def wait(self, timeout=None):
        """Wait at most `timeout` seconds (None: no limit). True when done."""
        self.same_process()
        return bool(self.batch.wait(seconds(timeout, -1.0)))

    def result(self, timeout=None):
        """Return {ExpertKey: what became of it}, waiting at most `timeout` seconds.

        "resident" (it was), "loaded", "late" (a demand came for it before it had landed), "no_room", "cancelled" or "failed".

        Raises
        ------
        ReadTimeout
        """
        cdef int i
        cdef fc_node *node
        if not self.wait(timeout):
            raise self.server._error(FC_ETIMEOUT, *self.server._where(self.batch.nodes[0].key), None, 0, 0, 0)
        out = {}
        for i in range(self.batch.n):
            node = &self.batch.nodes[i]
            if node.status == FC_NODE_HELD:
                what = "resident" if node.was_resident else "late" if node.late else "loaded"
                if node.slot < 0:       # it watched a pass-through, which leaves nothing resident
                    what = "no_room"
            elif node.status == FC_NODE_NO_ROOM:
                what = "no_room"
            else:
                what = "cancelled" if node.error == FC_ECANCELLED else "failed"
            out[self.server.catalog.key_type(*self.server._where(node.key))] = what
        return out

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

    cdef int same_process(self) except -1:
        if self.server.c.fork_gen != fork_generation():
            raise self.server._error(FC_EFORK, None, None, None, 0, 0, 0)
        return 0
