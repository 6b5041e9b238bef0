# Which resident expert to give up. One interface, one struct per policy behind it; the store and the simulator run the same code.
# Pure: no lock, no system call, no clock but a counter. The store calls it under its mutex, in request order.
from libc.stdint cimport int32_t, int64_t, uint8_t

from fastcache_ext.atomics cimport fc_load32, fc_store8

cdef enum:
    FC_LRU = 0
    FC_NEXT_USE = 1
    FC_LFU = 2
    FC_S3FIFO = 3
    FC_SIEVE = 4

cdef enum:
    FC_FOR_DEMAND = 0       # any slot without a lease
    FC_FOR_GUESS = 1        # and whose load has been read: a guess never displaces an unread guess

ctypedef struct fc_view:        # what a policy may read of the table and the arena; it writes `parked` alone
    int32_t n_slots
    int32_t n_classes
    int32_t n_layers
    int32_t n_keys
    const int32_t *layer_first      # [n_layers + 1] keys of layer l: [layer_first[l], layer_first[l + 1])
    const int32_t *layer_of         # [n_keys]
    const int32_t *slot_of          # [n_keys] slot or -1
    const int32_t *key_of           # [n_slots] key or -1
    const uint8_t *cls              # [n_slots]
    const int32_t *capacity         # [n_classes] slots that the class has now; of those numbered for it
    const uint8_t *unread           # [n_slots] 1 while nobody has consumed the load
    int32_t *leases                 # [n_slots] atomic
    uint8_t *parked                 # [n_slots] atomic

ctypedef struct fc_witness:     # hears what a search learns of leases, which end without the mutex; a replay answers instead
    void *ctx
    bint (*leased)(void *ctx, int32_t slot, bint leased) noexcept nogil     # returns what the policy is to believe
    void (*released)(void *ctx, int32_t slot) noexcept nogil                # before the policy hears of it
    int32_t (*told)(void *ctx) noexcept nogil       # NULL, or in a replay: the next released slot, instead of the arena's; or -1

ctypedef struct fc_policy:
    int kind
    fc_witness *witness         # NULL, or borrowed
    fc_view v
    void *state
    # A demand request for `key`, in request order; `slot` = -1 when it is not resident or on its way. To next_use, a key behind
    # all layers' own, with layer_of set, marks a visit of that layer.
    void (*request)(fc_policy *p, int32_t key, int32_t slot) noexcept nogil
    # `key` got `slot`; it is leased by its read until that lands.
    void (*admit)(fc_policy *p, int32_t key, int32_t slot) noexcept nogil
    # A slot of class `cls` to give up, or -1. It stays known until forget().
    int32_t (*victim)(fc_policy *p, int cls, int mode) noexcept nogil
    # `slot` no longer holds `key`.
    void (*forget)(fc_policy *p, int32_t key, int32_t slot) noexcept nogil
    # How often `slot`, which holds something, is used per request, by what the policy knows: to be compared with its other slots.
    double (*rate)(fc_policy *p, int32_t slot) noexcept nogil
    # A parked slot lost its last lease.
    void (*released)(fc_policy *p, int32_t slot) noexcept nogil
    void (*destroy)(fc_policy *p) noexcept nogil

cdef int policy_init(fc_policy *p, int kind, const fc_view *view) noexcept nogil       # 0 or -ENOMEM

# Slots of all classes: in as many admissions a policy without a clock of its own takes everything to have been used.
cdef inline int64_t all_slots(const fc_policy *p) noexcept nogil:
    cdef int64_t n = 0
    cdef int c
    for c in range(p.v.n_classes):
        n += p.v.capacity[c]
    return n

# Whether `slot` is leased. Policies ask through this or park(), never the count itself: a replay gives the same answers.
cdef inline bint is_leased(const fc_policy *p, int32_t slot) noexcept nogil:
    cdef bint leased = fc_load32(&p.v.leases[slot]) != 0
    if p.witness != NULL:
        leased = p.witness.leased(p.witness.ctx, slot, leased)
    return leased

# True when `slot` is leased; it is then left out of searches until released() speaks of it.
cdef inline bint park(fc_policy *p, int32_t slot) noexcept nogil:
    cdef bint leased = fc_load32(&p.v.leases[slot]) != 0
    if leased:
        # Dekker with arena.lease_drop: either we see the count at 0 here, or the last holder sees the mark.
        fc_store8(&p.v.parked[slot], 1)
        leased = fc_load32(&p.v.leases[slot]) != 0
        if not leased:
            fc_store8(&p.v.parked[slot], 0)
    if p.witness != NULL:
        leased = p.witness.leased(p.witness.ctx, slot, leased)
        fc_store8(&p.v.parked[slot], leased)
    return leased
