# The ghosts at work on a store: its traffic to them, and their choice back to it.
from fastcache_ext.monitor cimport fc_core

# Serve what was heard: a piece of it, or all. Takes the ghosts' `busy` and the store's mutex, and may change the policy.
cdef void ghosts_work(fc_core *c, bint everything) noexcept nogil
# Change the policy of a running store: its residents go over in the order of their last requests. 0 or -errno.
# The mutex is held for about 50 ns per resident.
cdef int core_switch(fc_core *c, int kind) noexcept nogil
