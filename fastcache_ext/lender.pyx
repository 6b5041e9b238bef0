"""Lender: a store that turns Holds into ExpertLeases. May import report and views."""
from libc.stdint cimport int32_t

from fastcache_ext.arguments cimport seconds
from fastcache_ext.hold cimport Hold
from fastcache_ext.report cimport Reporter
from fastcache_ext.views cimport Catalog, ExpertLease, make_lease


cdef class Lender(Reporter):
    """A Reporter with a Catalog, which must be set before the first acquire."""

    def _set_catalog(self, Catalog catalog not None):
        self.catalog = catalog

    def _set_timeout(self, timeout):
        self.timeout = seconds(timeout, -1.0)

    cdef ExpertLease lease(self, Hold hold, int32_t key):
        cdef int32_t i = self.c.table.layer_of[key]
        return make_lease(self.catalog, hold, key, self.layer_number[i], key - self.layer_first[i])
