# From the last completion of a load to RESIDENT or EMPTY.
from libc.stdint cimport int32_t

from fastcache_ext.ioqueue cimport fc_load
from fastcache_ext.monitor cimport fc_core

cdef enum:
    FC_WAKES = 4            # waits woken after the mutex is free; the rest, of an expert that many wait for, before

ctypedef struct fc_wakes:
    int n
    int32_t *words[FC_WAKES]    # what callers sleep on. Only addresses: a caller that is awake by itself may have freed it

# The load is over: publish or abort, count, tell whoever waits. The mutex is held, and no read aims at its memory any more.
cdef void finish(fc_core *c, fc_load *load, int error) noexcept nogil
# The turn of a guess that waits has come. False: no slot for it, nor for those of its class that wait behind it; they are over.
cdef bint guess_begin(fc_core *c, fc_load *load) noexcept nogil
# End the guesses that waited until their layer was visited without them.
cdef void guesses_gone(fc_core *c) noexcept nogil
# All reads of `load` are over. The mutex is held, and left in between. Whoever is to be woken stands in `later` afterwards.
cdef void land(fc_core *c, fc_load *load, fc_wakes *later) noexcept nogil
# Wake them: the mutex is free, so that nobody wakes up only to sleep for it.
cdef void wake_all(fc_wakes *later) noexcept nogil
# The worker's: put right one load that the ring has landed (see fc_core.to_move). 1 if there was one. Takes the mutex.
cdef int move_some(fc_core *c) noexcept nogil
