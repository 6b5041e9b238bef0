from fastcache_ext.recorder cimport fc_recorder

cdef class Tape:
    cdef fc_recorder *r     # owned; leaked where its thread has not ended
    cdef int forks          # process generation that started it
