from libc.stdint cimport int32_t

from fastcache_ext.core cimport Core
from fastcache_ext.hold cimport Hold
from fastcache_ext.monitor cimport fc_node, fc_wait

cdef class Batch:
    cdef readonly Core core
    cdef fc_wait w
    cdef fc_node *nodes
    cdef int n
    cdef bint begun

    cdef int begin(self, Core core, int mode, bint each, const int32_t *keys, int n, int predictor=*) except -1
    cdef int make_room(self, int i) except -1
    cpdef fill(self, int i)
    cdef int wait(self, double timeout) except -1
    cdef object timed_out(self)
    cdef Hold hold(self, int i)
    cdef void hand_over(self, int i, Hold h) noexcept

# Of no call yet: begin() is next.
cdef Batch new_batch()
