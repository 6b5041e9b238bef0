"""The store without bytes: its own table and policies over a trace, at native speed.

Owns Simulator, which does to the table what a live store does for a batch of demands, one caller and no prefetch. Slots are never
touched: they are address space of one byte each. Knows no file format. May import arena, table and policy.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free

from fastcache_ext.arena cimport (
    FC_HUGE_OFF, FC_MAX_CLASSES, FC_MAX_PER_SLAB, arena_new, arena_unref, fc_arena, fc_slabs, lease_drop, lease_take, slabs_read,
)
from fastcache_ext.policy cimport FC_FOR_DEMAND
from fastcache_ext.policy import NAMES as POLICIES
from fastcache_ext.table cimport (
    FC_FROM_DEMAND, fc_evicted, fc_table, table_check, table_destroy, table_init, table_publish, table_reserve,
)
from fastcache_ext.trade cimport trade_for, trade_refused


cdef class Simulator:
    """A store of `class_slots[c]` slots per size class, empty. Not for two threads at once.

    Parameters
    ----------
    layer_first : int32 buffer [layers + 1]
        First dense key of each layer, and the number of keys.
    cls_of : uint8 buffer [keys]
        Size class of each key; 255: it fits into no slot.
    nbytes : int64 buffer [keys]
        Bytes of each key, for `bytes_missed`.
    class_slots : sequence of int
        Those outside slabs.
    policy : str
    slabs : None or tuple
        What classes trade, as a store takes it.
    """
    cdef fc_table t
    cdef fc_arena *arena
    cdef bint made
    cdef int32_t *slots         # [n_keys] of the batch being served: the slot of its i-th key, or -1
    cdef int64_t *nbytes        # [n_keys]
    cdef int64_t *asked         # [n_keys] number of the batch that last had the key, as the check of the input counts them
    cdef int64_t batches        # checked so far
    cdef readonly int64_t hits
    cdef readonly int64_t misses
    cdef readonly int64_t evictions
    cdef readonly int64_t pass_throughs
    cdef readonly int64_t bytes_missed

    def __cinit__(self, layer_first, cls_of, nbytes, class_slots, policy, slabs=None):
        cdef int64_t one[FC_MAX_CLASSES]
        cdef int32_t counts[FC_MAX_CLASSES]
        cdef bytes first = memoryview(layer_first).cast("B").tobytes()
        cdef bytes classes = memoryview(cls_of).cast("B").tobytes()
        cdef bytes sizes = memoryview(nbytes).cast("B").tobytes()
        cdef const int32_t *edges = <const int32_t *><const char *>first
        cdef int32_t layers = len(first) // 4 - 1, k, n_keys
        cdef fc_slabs plan
        cdef int error = 0
        if layers < 0 or len(class_slots) > FC_MAX_CLASSES:
            raise ValueError("no layers, or too many classes")
        n_keys = edges[layers]
        if len(classes) != n_keys or len(sizes) != 8 * n_keys:
            raise ValueError("cls_of and nbytes need one entry per key")
        for i in range(len(class_slots)):
            one[i], counts[i] = 1, class_slots[i]
        slabs_read(&plan, slabs)
        plan.nbytes = FC_MAX_PER_SLAB
        self.arena = arena_new(one, counts, len(class_slots), &plan, FC_HUGE_OFF, 1, &error)
        self.slots = <int32_t *>calloc(n_keys + 1, sizeof(int32_t))
        self.nbytes = <int64_t *>calloc(n_keys + 1, sizeof(int64_t))
        self.asked = <int64_t *>calloc(n_keys + 1, sizeof(int64_t))
        if (self.arena == NULL or self.slots == NULL or self.nbytes == NULL or self.asked == NULL
                or table_init(&self.t, self.arena, layers, edges, <const uint8_t *><const char *>classes,
                              POLICIES[policy]) != 0):
            raise MemoryError
        self.made = True
        for k in range(n_keys):
            self.nbytes[k] = (<const int64_t *><const char *>sizes)[k]

    def __dealloc__(self):
        if self.made:
            table_destroy(&self.t)
        arena_unref(self.arena)
        free(self.slots)
        free(self.nbytes)
        free(self.asked)

    def run(self, keys, sizes):
        """Serve batches of demands, in order.

        Parameters
        ----------
        keys : int32 buffer
            Dense keys, batch after batch, distinct inside each.
        sizes : int64 buffer
            How many of the keys belong to each batch.

        Raises
        ------
        ValueError
            The sizes do not add up to the keys, a key is none of the model's, or twice in a batch. Nothing was served then.
        """
        cdef Py_buffer k, s
        PyObject_GetBuffer(keys, &k, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(sizes, &s, PyBUF_SIMPLE)
            try:
                self.serve_all(<const int32_t *>k.buf, k.len // 4, <const int64_t *>s.buf, s.len // 8)
            finally:
                PyBuffer_Release(&s)
        finally:
            PyBuffer_Release(&k)

    cdef int serve_all(self, const int32_t *keys, int64_t n_keys, const int64_t *sizes, int64_t n) except -1:
        cdef int64_t i, at = 0
        cdef bint sound = False
        with nogil:
            sound = self.sound(keys, n_keys, sizes, n)
        if not sound:
            raise ValueError("batches do not add up to the keys, a key is none of the model's, or one is twice in a batch")
        with nogil:
            for i in range(n):
                self.serve(keys + at, <int32_t>sizes[i])
                at += sizes[i]
        return 0

    cdef bint sound(self, const int32_t *keys, int64_t n_keys, const int64_t *sizes, int64_t n) noexcept nogil:
        cdef int64_t i, j, at = 0
        for i in range(n):
            if sizes[i] < 0 or sizes[i] > n_keys - at:
                return False
            self.batches += 1
            for j in range(at, at + sizes[i]):
                if keys[j] < 0 or keys[j] >= self.t.n_keys or self.asked[keys[j]] == self.batches:
                    return False
                self.asked[keys[j]] = self.batches
            at += sizes[i]
        return at == n_keys

    cdef void serve(self, const int32_t *keys, int32_t n) noexcept nogil:
        cdef fc_evicted evicted
        cdef int32_t i, slot
        # Phase 1: what is here is leased before anything is evicted. Nothing is on its way between batches.
        for i in range(n):
            slot = self.t.slot_of[keys[i]]
            self.slots[i] = slot
            if slot >= 0:
                lease_take(self.arena, slot)
        # Phase 2, in the order of the request.
        for i in range(n):
            slot = self.slots[i]
            self.t.policy.request(&self.t.policy, keys[i], slot)
            if slot >= 0:
                self.hits += 1
                continue
            self.misses += 1
            self.bytes_missed += self.nbytes[keys[i]]
            self.evictions += max(trade_for(&self.t, keys[i], self.misses), 0)
            slot = table_reserve(&self.t, keys[i], FC_FROM_DEMAND, FC_FOR_DEMAND, self.misses, &evicted)
            self.slots[i] = ~slot                   # below 0 where a read has to land
            if slot < 0:
                trade_refused(&self.t, keys[i])
                self.slots[i] = self.t.n_slots      # pass-through: a buffer of its own
                self.pass_throughs += 1
                continue
            self.evictions += evicted.key >= 0
            lease_take(self.arena, slot)            # the waiter's
        # Phase 3: every read lands, and then the caller lets go.
        for i in range(n):
            if self.slots[i] < 0:
                self.slots[i] = ~self.slots[i]
                self.t.unread[self.slots[i]] = 0
                table_publish(&self.t, self.slots[i])
        for i in range(n):
            if self.slots[i] < self.t.n_slots:
                lease_drop(self.arena, self.slots[i])

    def bytes_resident(self):
        """Return the bytes of the experts that are here."""
        cdef int32_t k
        cdef int64_t total = 0
        for k in range(self.t.n_keys):
            total += self.nbytes[k] if self.t.slot_of[k] >= 0 else 0
        return total

    def trading(self):
        """Return ([slots that each class has now], slabs that have changed hands, residents evicted for that)."""
        cdef int c
        cdef int64_t trades = 0, gone = 0
        if self.t.trading != NULL:
            trades, gone = self.t.trading.trades, self.t.trading.given_up
        return [self.t.n_of[c] for c in range(self.arena.n_classes)], trades, gone

    def check(self):
        """0, or the number of the table's invariant that does not hold."""
        return table_check(&self.t)
