from fastcache_ext.core cimport Core

cdef class Reporter(Core):
    pass
