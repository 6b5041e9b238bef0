# Key <-> slot, slot states, provenance, free slots. Pure: the store's mutex is held by whoever calls.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint8_t

from fastcache_ext.arena cimport fc_arena
from fastcache_ext.policy cimport fc_policy

cdef enum:                  # the life of a slot
    FC_EMPTY = 0
    FC_INFLIGHT = 1
    FC_RESIDENT = 2

cdef enum:                  # why a load happened
    FC_FROM_DEMAND = 0
    FC_FROM_PREFETCH = 1

ctypedef struct fc_slot:
    uint8_t state
    uint8_t origin          # FC_FROM_*: of its load
    uint8_t pinned          # the user said keep: the table holds one lease for it
    int64_t generation      # of its load

ctypedef struct fc_evicted:     # what made room
    int32_t key             # or -1: the slot was free
    uint8_t origin
    uint8_t unread

ctypedef struct fc_trading:     # who has which slab, and what is known of who needs more: see trade.pyx
    uint8_t *owner          # [slabs] class
    int32_t *used           # [slabs] slots of it that are not EMPTY
    int32_t *prev_free      # [n_slots] with next_free: slabs leave the free slots of a class from anywhere
    uint32_t *left          # [n_keys] number of the eviction, among those of its class, that took the key last; 0: none did
    uint32_t evictions[16]  # per class
    int64_t missed[16]      # per class: reads that more slots would have spared, since it last won or lost a slab
    int64_t ask_at[16]      # per class: of those, how many there are when it looks for a slab again
    int32_t searched        # 1: the last demand that may have traded asked the policy for a victim
    int32_t hand            # slab at which the next look begins
    int64_t trades
    int64_t given_up        # residents that trades evicted
    fc_evicted *gone        # [FC_MAX_PER_SLAB] what the last trade evicted
    int32_t *gone_from      # [FC_MAX_PER_SLAB] the slots of those

ctypedef struct fc_table:
    int32_t n_keys
    int32_t n_slots
    int32_t n_layers
    int32_t *layer_first    # [n_layers + 1]
    int32_t *layer_of       # [n_keys]
    uint8_t *cls_of         # [n_keys] size class a key needs; 255: larger than any slot
    int32_t *slot_of        # [n_keys] slot or -1
    int32_t *key_of         # [n_slots] key or -1
    uint8_t *unread         # [n_slots] 1 while no demand has had the load
    fc_slot *slots          # [n_slots]
    int32_t *next_free      # [n_slots]
    int32_t free_head[16]   # per class, or -1
    int32_t n_of[16]        # slots that a class has now
    fc_trading *trading     # owned; NULL: classes trade no slabs
    int32_t n_resident
    int32_t n_inflight
    int32_t n_pinned[16]    # per class
    fc_arena *arena         # borrowed
    fc_policy policy

cdef int table_init(fc_table *t, fc_arena *arena, int32_t n_layers, const int32_t *layer_first, const uint8_t *cls_of,
                    int policy) noexcept nogil                      # 0 or -ENOMEM
cdef void table_destroy(fc_table *t) noexcept nogil
# A slot for `key`, INFLIGHT and leased by its read; or -1 when nothing may go. `mode` = FC_FOR_*.
cdef int32_t table_reserve(fc_table *t, int32_t key, int origin, int mode, int64_t generation, fc_evicted *evicted) noexcept nogil
cdef void table_publish(fc_table *t, int32_t slot) noexcept nogil       # INFLIGHT -> RESIDENT, and the read's lease ends
cdef void table_abort(fc_table *t, int32_t slot) noexcept nogil         # INFLIGHT -> EMPTY, and every lease on it ends
# A RESIDENT slot -> EMPTY, free.
cdef void table_evict(fc_table *t, int32_t slot, fc_evicted *evicted) noexcept nogil
# The free slot `slot` belongs to its class no longer, or does now.
cdef void table_unlist(fc_table *t, int32_t slot) noexcept nogil
cdef void table_list(fc_table *t, int32_t slot) noexcept nogil
cdef void table_drain(fc_table *t) noexcept nogil                       # tell the policy which parked slots were released
# Put `fresh`, made over the table's own view, in the place of the policy, which `fresh` then is. `order`: the n slots that hold
# anything; it hears of them as of demands, and of unread guesses as of guesses, that come in that order. O(n).
cdef void table_switch(fc_table *t, fc_policy *fresh, const int32_t *order, int32_t n) noexcept nogil
# Whether `slot` is one of those that its class has now.
cdef bint table_here(const fc_table *t, int32_t slot) noexcept nogil
# Whether an acquire of `key` would be a hit.
cdef bint table_resident(const fc_table *t, int32_t key) noexcept nogil
# 0, or the number of the invariant that does not hold, times 100, plus a detail.
cdef int table_check(fc_table *t) noexcept nogil
