# Size classes trade slabs of the arena. Pure, as the table: the store's mutex is held by whoever calls.
from libc.stdint cimport int32_t, int64_t

from fastcache_ext.table cimport fc_table

# A demand that found `key` absent is about to reserve a slot, for a load of `generation`: have the key's class take a slab over,
# if it is due one. Returns how many residents went for it, which table.trading has in `gone`; -1: nothing was traded.
cdef int trade_for(fc_table *t, int32_t key, int64_t generation) noexcept nogil
# It found none.
cdef void trade_refused(fc_table *t, int32_t key) noexcept nogil
