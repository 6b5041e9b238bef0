from libc.stdint cimport int64_t

from fastcache_ext.core cimport Core

cdef class Reporter(Core):
    cdef dict layers_of(self, const int64_t *layers, int first, int end)
