"""For tests: a table without reads, driven step by step.

May import arena, policy, table, trade and threads.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t

from collections import namedtuple

from fastcache_ext.arena cimport (
    FC_HUGE_OFF, arena_new, arena_unref, fc_arena, fc_slabs, lease_drop, lease_take, slabs_read,
)
from fastcache_ext.atomics cimport fc_load32
from fastcache_ext.policy import NAMES as POLICIES
from fastcache_ext.policy cimport fc_policy, policy_init
from fastcache_ext.table cimport (
    FC_RESIDENT, fc_evicted, fc_table, table_abort, table_check, table_destroy, table_drain, table_init, table_publish,
    table_reserve, table_switch,
)
from fastcache_ext.threads cimport fc_now_ns
from fastcache_ext.trade cimport trade_for, trade_refused

Evicted = namedtuple("Evicted", "key from_prefetch unread")


cdef object told(const fc_evicted *e):
    return Evicted(e.key, bool(e.origin), bool(e.unread))


cdef class Table:
    """A table and its arena: slots of one page, class c of `class_slots[c]` slots. Keys are dense."""
    cdef fc_table t
    cdef fc_arena *arena
    cdef bint made
    cdef int64_t generation

    def __cinit__(self, layer_sizes, cls_of, class_slots, policy, slabs=None):
        cdef int64_t nbytes[16]
        cdef int32_t slots[16]
        cdef int32_t first[1025]
        cdef int error = 0
        cdef fc_slabs plan
        cdef bytes classes = bytes(cls_of)
        if len(layer_sizes) > 1024 or len(class_slots) > 16:
            raise ValueError("too many layers or classes")
        for i in range(len(class_slots)):
            nbytes[i], slots[i] = 4096 * (i + 1), class_slots[i]
        first[0] = 0
        for i in range(len(layer_sizes)):
            first[i + 1] = first[i] + <int32_t>layer_sizes[i]
        slabs_read(&plan, slabs)
        self.arena = arena_new(nbytes, slots, len(class_slots), &plan, FC_HUGE_OFF, 4096, &error)
        if self.arena == NULL or table_init(&self.t, self.arena, len(layer_sizes), first,
                                            <const uint8_t *><const char *>classes, POLICIES[policy]) != 0:
            raise MemoryError
        self.made = True

    def __dealloc__(self):
        if self.made:
            table_destroy(&self.t)
        arena_unref(self.arena)

    def request(self, int32_t key):
        """A demand for `key`, as the policy hears of it."""
        self.t.policy.request(&self.t.policy, key, self.t.slot_of[key])

    def reserve(self, int32_t key, int origin, int mode):
        """(slot or -1, Evicted or None)."""
        cdef fc_evicted evicted
        cdef int32_t slot
        self.generation += 1
        slot = table_reserve(&self.t, key, origin, mode, self.generation, &evicted)
        return slot, (told(&evicted) if evicted.key >= 0 else None)

    def trade(self, int32_t key):
        """What comes before a demand reserves: (what went for a slab that changed hands, or None: none did; whether the
        policy was asked for a victim)."""
        cdef int32_t i, n
        if self.t.trading == NULL:
            return None, False
        self.t.trading.searched = 0
        n = trade_for(&self.t, key, self.generation + 1)
        gone = [told(&self.t.trading.gone[i]) for i in range(n)]
        return (gone if n >= 0 else None), bool(self.t.trading.searched)

    def refused(self, int32_t key):
        trade_refused(&self.t, key)

    def trades(self):
        """(slabs that have changed hands, residents evicted for that)."""
        cdef int64_t trades = 0, gone = 0
        if self.t.trading != NULL:
            trades, gone = self.t.trading.trades, self.t.trading.given_up
        return trades, gone

    def slots_of(self):
        """Slots that each class has now."""
        cdef int c
        return [self.t.n_of[c] for c in range(self.arena.n_classes)]

    def place(self, int32_t slot):
        """(first byte, bytes) of a slot in the arena."""
        return self.arena.addr[slot] - self.arena.base, self.arena.class_bytes[self.arena.cls[slot]]

    def publish(self, int32_t slot):
        table_publish(&self.t, slot)

    def abort(self, int32_t slot):
        table_abort(&self.t, slot)

    def lease(self, int32_t slot):
        lease_take(self.arena, slot)

    def drop(self, int32_t slot):
        lease_drop(self.arena, slot)

    def read(self, int32_t slot):
        """A demand has had the load."""
        self.t.unread[slot] = 0

    def drain(self):
        table_drain(&self.t)

    def victim(self, int cls, int mode):
        """What reserve() would evict, if anything could be: a slot, or -1."""
        table_drain(&self.t)
        return self.t.policy.victim(&self.t.policy, cls, mode)

    def switch(self, policy, order):
        """Change the policy; `order`: the slots that hold anything, as it is to hear of them. Returns ns of the change itself."""
        cdef fc_policy fresh
        cdef int64_t start
        cdef int32_t slots[16384]
        cdef int32_t n = len(order)
        if n > 16384 or sorted(order) != [s for s in range(self.t.n_slots) if self.t.key_of[s] >= 0]:
            raise ValueError("the order must name each slot that holds anything once")
        for i in range(n):
            slots[i] = order[i]
        if policy_init(&fresh, POLICIES[policy], &self.t.policy.v) != 0:
            raise MemoryError
        start = fc_now_ns()
        table_switch(&self.t, &fresh, slots, n)
        start = fc_now_ns() - start
        fresh.destroy(&fresh)
        return start

    def churn(self, keys, int n):
        """Reserve (which evicts, once the table is full) and publish the next n absent ones of `keys`, round and round, as read
        demands. Returns ns per eviction."""
        cdef bytes copy = memoryview(keys).cast("B").tobytes()
        cdef const int32_t *order = <const int32_t *><const char *>copy
        cdef int32_t length = len(copy) // sizeof(int32_t)
        cdef fc_evicted evicted
        cdef int32_t key, slot
        cdef int done = 0, at = 0, evictions = 0
        cdef int64_t start = 0, spent = 0
        with nogil:
            while done < n:
                key = order[at]
                at = (at + 1) % length
                if self.t.slot_of[key] >= 0:
                    continue
                done += 1
                start = fc_now_ns()
                self.t.policy.request(&self.t.policy, key, -1)
                slot = table_reserve(&self.t, key, 0, 0, done, &evicted)
                table_publish(&self.t, slot)
                spent += fc_now_ns() - start
                self.t.unread[slot] = 0
                evictions += evicted.key >= 0
        return spent / max(evictions, 1)

    def check(self):
        return table_check(&self.t)

    def slot_of(self, int32_t key):
        return self.t.slot_of[key]

    def key_of(self, int32_t slot):
        return self.t.key_of[slot]

    def leases(self, int32_t slot):
        return fc_load32(&self.arena.leases[slot])

    def parked(self, int32_t slot):
        return bool(self.arena.parked[slot])

    def resident(self, int32_t slot):
        return self.t.slots[slot].state == FC_RESIDENT
