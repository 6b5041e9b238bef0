"""Hold: the object whose life is a lease.

Referenced by the lease, by every array's base and by every buffer export; its end is the lease's end, wherever that happens.
Refers to the plain-C arena, never to the store. May import arena.
"""
cimport cython
from libc.stdint cimport int32_t

from fastcache_ext.arena cimport fork_word, lease_drop, private_unref
from fastcache_ext.monitor cimport fc_core

cdef const int32_t *FORKS = fork_word()


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class Hold:
    """One lease, as long as this object lives. Its memory outlives the store."""

    def __dealloc__(self):
        if self.arena == NULL or self.arena.fork_gen != FORKS[0]:
            return                      # a child after fork frees nothing of its parent's
        if self.priv != NULL:
            private_unref(self.priv)
        else:
            lease_drop(self.arena, self.slot)
        unhold_arena(self.arena)

    cdef void fill(self, fc_core *c, int32_t slot) noexcept:
        self.arena = c.arena
        hold_arena(c.arena)
        self.slot = slot
        self.data = c.arena.addr[slot]
        self.generation = c.table.slots[slot].generation
