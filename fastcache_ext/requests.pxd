# Hits, joins, misses.
from libc.stdint cimport int32_t

from fastcache_ext.arena cimport fc_private
from fastcache_ext.monitor cimport fc_core, fc_node, fc_wait

# The hit path: one lease on the slot of `key`, or -1 when it is not resident. Counts the request if it is a hit.
cdef int32_t core_hit(fc_core *c, int32_t key) noexcept nogil

# The same for n distinct keys: all of them, or none (False).
cdef bint core_hit_many(fc_core *c, const int32_t *keys, int n, int32_t *slots) noexcept nogil

# Reserve, queue, attach: phases 1 and 2 of the batch. 0 or -FC_ECLOSED. Nodes for which nothing could go are NO_ROOM.
cdef int core_begin(fc_core *c, fc_wait *w) noexcept nogil
# Try a NO_ROOM node again; `priv` (owned, or NULL) is where it goes when there still is no room.
cdef int core_retry(fc_core *c, fc_wait *w, fc_node *node, fc_private *priv) noexcept nogil
# A NO_ROOM node that gets no private buffer either: count it as failed.
cdef void core_refuse(fc_core *c, fc_wait *w, fc_node *node, int error) noexcept nogil
