from libc.stdint cimport int32_t, int64_t, uint8_t

from fastcache_ext.arena cimport arena_ref, arena_unref, fc_arena, fc_private
from fastcache_ext.monitor cimport fc_core

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    #define fc_holds_add(p, v) __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST)
    #else
    #define fc_holds_add(p, v) (*(p) += (v))
    #endif
    """
    int64_t fc_holds_add(int64_t *p, int v) noexcept

# What keeps the arena for Holds, with the GIL: counted apart from its references, since under the GIL that takes no atomic step.
# An open store counts itself, so that not even a first Hold takes a reference.
cdef inline void hold_arena(fc_arena *a) noexcept:
    if fc_holds_add(&a.holds, 1) == 1:
        arena_ref(a)

cdef inline void unhold_arena(fc_arena *a) noexcept:
    if fc_holds_add(&a.holds, -1) == 0:
        arena_unref(a)

cdef class Hold:
    cdef fc_arena *arena            # kept by hold_arena()
    cdef fc_private *priv           # owned reference, or NULL
    cdef int32_t slot               # leased slot, or -1
    cdef uint8_t *data              # first byte of the expert's slot or buffer
    cdef int64_t generation

    cdef void fill(self, fc_core *c, int32_t slot) noexcept     # take over a lease that is counted already
