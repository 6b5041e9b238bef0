# From the last completion of a load to RESIDENT or EMPTY, and the engines' port.
from fastcache_ext.ioqueue cimport fc_load, fc_port
from fastcache_ext.monitor cimport fc_core

# The load is over: publish or abort, count, tell whoever waits. The mutex is held, and no read aims at its memory any more.
cdef void finish(fc_core *c, fc_load *load, int error) noexcept nogil
cdef void landing_port(fc_core *c, fc_port *port) noexcept nogil
# The worker's: put right one load that the ring has landed (see fc_core.to_move). 1 if there was one. Takes the mutex.
cdef int move_some(fc_core *c) noexcept nogil
