from fastcache_ext.batch cimport Batch
from fastcache_ext.lender cimport Lender

cdef class Ready:
    cdef Lender server
    cdef Batch batch
    cdef double timeout
    cdef int hit                # next node to look at for a hit
    cdef list waiting           # nodes that found no room yet, in order
    cdef dict failed
    cdef bint running           # a call of __next__ is under way

    cdef tuple give(self, Batch batch, int i)
    cdef int find_room(self, Batch batch) except -1
    cdef tuple advance(self, Batch batch)

cdef class Prefetch:
    cdef readonly Lender server
    cdef Batch batch

# Of no call yet: their batch's begin() is next.
cdef Ready new_ready(Lender server, double timeout)
cdef Prefetch new_prefetch(Lender server)
