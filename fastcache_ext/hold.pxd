from libc.stdint cimport int32_t, int64_t, uint8_t

from fastcache_ext.arena cimport fc_arena, fc_private
from fastcache_ext.monitor cimport fc_core

cdef class Hold:
    cdef fc_arena *arena            # owned reference
    cdef fc_private *priv           # owned reference, or NULL
    cdef int32_t slot               # leased slot, or -1
    cdef uint8_t *data              # first byte of the expert's slot or buffer
    cdef int64_t generation

    cdef void fill(self, fc_core *c, int32_t slot) noexcept     # take over a lease that is counted already
