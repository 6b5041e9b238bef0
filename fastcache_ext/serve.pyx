"""The calls: acquire, acquire_many, as_ready, prefetch, pin.

Owns Server, a Guesser. The GIL is let go once per wait, never on a hit. May import guesses, handles and what is below.
"""
from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc

from fastcache_ext.arena cimport fc_arena, fork_word
from fastcache_ext.arguments cimport Keys, Leases, distinct, read_plain, seconds
from fastcache_ext.atomics cimport fc_load32
from fastcache_ext.batch cimport Batch, new_batch
from fastcache_ext.given cimport key_parts, shown
from fastcache_ext.guesses cimport Guesser
from fastcache_ext.handles cimport Prefetch, Ready, new_prefetch, new_ready
from fastcache_ext.hold cimport Hold
from fastcache_ext.monitor cimport *
from fastcache_ext.requests cimport core_hit, core_hit_many
from fastcache_ext.table cimport FC_RESIDENT, table_here
from fastcache_ext.views cimport ExpertLease

cdef const int32_t *FORKS = fork_word()

cdef enum:
    FC_EPINS = -4
    SMALL = 64              # keys that need no allocation


cdef class Server(Guesser):
    """A store's calls."""

    cdef ExpertLease get(self, object layer, object expert, object timeout):
        cdef int32_t key, slot
        cdef Hold hold
        cdef double limit = self.timeout if timeout is None else seconds(timeout, -1.0)
        if self.c == NULL or fc_load32(&self.c.closing) or self.c.fork_gen != FORKS[0]:
            self.check()                # says which
        key = self.key(layer, expert)
        hold = Hold.__new__(Hold)       # before the lease is counted: an allocation may run the collector
        slot = core_hit(self.c, key)
        if slot < 0:
            return self.miss(key, limit)
        hold.fill(self.c, slot)
        return self.lease(hold, key)

    cdef ExpertLease miss(self, int32_t key, double timeout):
        cdef Batch batch = new_batch()
        cdef fc_node *node
        batch.begin(self, FC_MODE_DEMAND, False, &key, 1)
        batch.make_room(0)
        node = &batch.nodes[0]
        if not node_is(node, FC_NODE_FAILED) and not batch.wait(timeout):
            raise batch.timed_out()
        if not node_is(node, FC_NODE_HELD):
            raise self.failure(node)
        return self.lease(batch.hold(0), key)

    def __getitem__(self, key):
        if type(key) is not tuple and not isinstance(key, tuple):
            raise TypeError(f"store[layer, expert], or store[ExpertKey(layer, expert)]; got {shown(key)}")
        if len(key) != 2:
            raise TypeError(f"store[layer, expert] takes two integers; got {len(key)}: {shown(key)}")
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
            layer, expert = key_parts(layer)
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
        cdef int i, n, count
        cdef int32_t plain[SMALL]
        cdef int32_t slots[SMALL]
        cdef int32_t *keys = plain      # [n] distinct
        cdef int32_t *index = NULL      # [count] input -> key; NULL: one for one
        cdef list holds = None
        cdef double limit = seconds(timeout, self.timeout)
        self.check()
        n = count = read_plain(self, layer, experts, keys, SMALL)
        if n > 0:
            holds = [Hold.__new__(Hold) for _ in range(n)]      # before the leases are counted, as in get()
            if core_hit_many(self.c, keys, n, slots):
                for i in range(n):
                    (<Hold>holds[i]).fill(self.c, slots[i])
                return self.leases(holds, keys, NULL, n)
        if n == 0 or not distinct(keys, n):
            k = Keys.__new__(Keys)
            if n > 0:
                k.adopt(keys, n)
            else:
                k.read(self, layer, experts)
            keys, index, n, count = k.keys, k.index, k.n, k.count
        batch = new_batch()
        batch.begin(self, FC_MODE_DEMAND, False, keys, n)
        for i in range(n):
            batch.make_room(i)
        if not batch.wait(limit):
            raise batch.timed_out()
        if holds is None:
            holds = [Hold.__new__(Hold) for _ in range(n)]
        for i in range(n):
            if node_is(&batch.nodes[i], FC_NODE_FAILED):
                raise self._batch_error(self.failures(batch))
            batch.hand_over(i, <Hold>holds[i])
        return self.leases(holds, keys, index, count)

    cdef Leases leases(self, list holds, const int32_t *keys, const int32_t *index, int count):
        """Leases of keys[index[i]] by holds[index[i]]; without an index, of each in its order."""
        cdef Leases them = Leases.__new__(Leases)
        cdef int i, j
        for i in range(count):
            j = i if index == NULL else index[i]
            (<list>them).append(self.lease(<Hold>holds[j], keys[j]))
        return them

    cdef dict failures(self, Batch batch):
        cdef int i
        return {self._where(batch.nodes[i].key): self.failure(&batch.nodes[i])
                for i in range(batch.n) if node_is(&batch.nodes[i], FC_NODE_FAILED)}

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
        cdef Ready ready
        self.check()
        k.read(self, layer, experts)
        ready = new_ready(self, seconds(timeout, self.timeout))
        ready.batch.begin(self, FC_MODE_DEMAND, True, k.keys, k.n)
        ready.waiting = [i for i in range(k.n) if node_is(&ready.batch.nodes[i], FC_NODE_NO_ROOM)]
        return ready

    def _fit(self, layer, experts):
        """Part a layer's distinct experts into what one batch would find slots for now, and the rest.

        Resident experts come first, then those whose reads are under way, then others while slots of their class stand
        without a lease. Counts nothing, and is a look only: another thread may take the room. Walks the slots until it has
        met as many without a lease as there are experts.
        """
        cdef Keys k = Keys.__new__(Keys)
        cdef fc_arena *a
        cdef int room[256]
        cdef int32_t s
        cdef int32_t *slot
        cdef int i, c
        cdef list fits = [], rest = []
        self.check()
        k.read(self, layer, experts)
        slot = <int32_t *>malloc((k.n + 1) * sizeof(int32_t))
        if slot == NULL:
            raise MemoryError
        try:
            self.check()                # reading the keys ran the caller's code
            a = self.c.arena
            for c in range(256):
                room[c] = -1            # not counted yet
            for i in range(k.n):        # before the mutex: leases are atomic, and slots may be many
                c = self.c.table.cls_of[k.keys[i]]
                if room[c] < 0:
                    room[c] = 0
                    if c < a.n_classes:
                        for s in range(a.class_first[c], a.class_first[c + 1]):
                            if room[c] == k.n:
                                break
                            room[c] += fc_load32(&a.leases[s]) == 0 and table_here(&self.c.table, s)
            core_lock(self.c)
            for i in range(k.n):
                s = slot[i] = self.c.table.slot_of[k.keys[i]]
                if s >= 0 and fc_load32(&a.leases[s]) == 0:
                    room[self.c.table.cls_of[k.keys[i]]] -= 1       # a member of the batch makes no room for another
                if s >= 0 and self.c.table.slots[s].state != FC_RESIDENT:
                    slot[i] = -2
            core_unlock(self.c)
            for i in range(k.n):
                if slot[i] >= 0:
                    fits.append(self._where(k.keys[i])[1])
            for i in range(k.n):
                if slot[i] == -2:
                    fits.append(self._where(k.keys[i])[1])
            for i in range(k.n):
                if slot[i] == -1:
                    c = self.c.table.cls_of[k.keys[i]]
                    room[c] -= 1
                    (fits if room[c] >= 0 else rest).append(self._where(k.keys[i])[1])
            return fits, rest
        finally:
            free(slot)

    def _prefetch(self, layer, experts, predictor=None):
        cdef Keys k = Keys.__new__(Keys)
        cdef Prefetch p = new_prefetch(self)
        cdef int whose
        self.check()
        whose = self.predictor(predictor)
        k.read(self, layer, experts)
        p.batch.begin(self, FC_MODE_GUESS, False, k.keys, k.n, whose)
        return p

    def _warm(self, list keys):
        """Start reading experts, and lease them while the handle lives: at a demand's speed, with a guess's rights."""
        cdef Keys k = Keys.__new__(Keys)
        cdef Prefetch p = new_prefetch(self)
        self.check()
        k.read(self, keys, None)
        p.batch.begin(self, FC_MODE_WARM, False, k.keys, k.n)
        return p

    def pin(self, layer, experts=None, *, timeout=None):
        """Read experts if needed, and keep them resident until unpin(). Idempotent. Waits for the reads.

        Raises
        ------
        BudgetTooSmall
            If fewer than one slot would be left for everything else; nothing is pinned then.
        PinsDoNotFit
            If no slot could be freed for some (it is a BudgetTooSmall and a BatchFailed); the others stay pinned.
        BatchFailed
            If reads failed.
        """
        cdef Keys k = Keys.__new__(Keys)
        cdef Batch batch = new_batch()
        cdef double limit = seconds(timeout, self.timeout)
        cdef int i
        cdef list mine = [], again = []
        self.check()
        k.read(self, layer, experts)
        self.check()                    # reading the keys ran the caller's code
        self.room_for_pins(k)
        batch.begin(self, FC_MODE_PIN, False, k.keys, k.n)
        if not batch.wait(limit):
            raise batch.timed_out()
        failed = self.failures(batch)
        for i in range(k.n):
            where = self._where(k.keys[i])
            if node_is(&batch.nodes[i], FC_NODE_HELD) and batch.nodes[i].slot >= 0:
                was = self.c.table.slots[batch.nodes[i].slot].pinned
                if not core_pin(self.c, &batch.w, &batch.nodes[i]):
                    for key in mine:
                        core_unpin(self.c, key)
                    raise self._error(FC_EPINS, None, None, None, 0, k.n, 1)
                if not was:
                    mine.append(k.keys[i])
            elif node_is(&batch.nodes[i], FC_NODE_HELD):     # joined a pass-through: landed, but in no slot
                again.append(where)
            elif node_is(&batch.nodes[i], FC_NODE_NO_ROOM):
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
        core_lock(self.c)
        for i in range(k.n):
            slot = self.c.table.slot_of[k.keys[i]]
            if slot < 0 or not self.c.table.slots[slot].pinned:
                wanted[self.c.table.cls_of[k.keys[i]]] += 1
        core_unlock(self.c)
        for c in range(256):
            slots = self.c.table.n_of[c] if c < self.c.arena.n_classes else 0
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
