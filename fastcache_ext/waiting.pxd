# Guesses that wait: a guess has a place in the queue, and no slot until its first read is about to be taken from there.
from libc.stdint cimport int32_t

from fastcache_ext.ioqueue cimport fc_load
from fastcache_ext.monitor cimport fc_core

# The load of `key` on its way, be it that a guess waits; or NULL. The mutex is held, here and below.
cdef fc_load *flying(fc_core *c, int32_t key) noexcept nogil
# A load for a guess of `key` that waits; NULL: as many guesses are under way as its class has slots.
cdef fc_load *waiting_new(fc_core *c, int32_t key) noexcept nogil
cdef void waiting_free(fc_core *c, fc_load *load) noexcept nogil
# A slot for a guess that waits: the load that stands there from now on, or NULL. `mode` = FC_MODE_*; `phase`: of who wants it now.
# `guilty`: what it evicts for that is the guess's doing.
cdef fc_load *waiting_begin(fc_core *c, fc_load *load, int mode, int phase, bint guilty) noexcept nogil
# 0, or the number of what does not hold of loads, queues, places and the evidence's lists: 8 and two digits. Walks everything; for
# tests. The mutex is held, and was free before.
cdef int waiting_check(const fc_core *c) noexcept nogil
