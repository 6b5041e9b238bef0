from fastcache_ext.core cimport Core
from fastcache_ext.recorder cimport fc_recorder

cdef class Tape:
    cdef fc_recorder *r     # owned; leaked where its thread has not ended
    cdef int forks          # process generation that started it

    cdef int started(self, Core core) except -1
