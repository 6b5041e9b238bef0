# A slot for a load: what goes for it, and the books of that. The mutex is held.
from libc.stdint cimport int32_t

from fastcache_ext.monitor cimport fc_core

# A slot for the load of `key` by a wait of `mode`, INFLIGHT; or -1: there is no room. `phase`: that evictions count in.
# *displaced: the expert it had, or -1.
cdef int32_t room_for(fc_core *c, int32_t key, int origin, int mode, int phase, int32_t *displaced) noexcept nogil
# Whether a guess would have to evict, while guesses that hold slots hold their share of them: they would crowd demands out.
cdef bint crowded(const fc_core *c, int32_t key) noexcept nogil
