from libc.stdint cimport int32_t

from fastcache_ext.hold cimport Hold
from fastcache_ext.report cimport Reporter
from fastcache_ext.views cimport Catalog, ExpertLease

cdef class Lender(Reporter):
    cdef Catalog catalog

    cdef ExpertLease lease(self, Hold hold, int32_t key)
