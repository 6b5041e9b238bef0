# A slot for a load: what goes for it, and the books of that. The mutex is held.
from libc.stdint cimport int32_t

from fastcache_ext.monitor cimport fc_core

# A slot for the load of `key` by a wait of `mode`, INFLIGHT; or -1: there is no room. *displaced: the expert it had, or -1.
cdef int32_t room_for(fc_core *c, int32_t key, int origin, int mode, int32_t *displaced) noexcept nogil
