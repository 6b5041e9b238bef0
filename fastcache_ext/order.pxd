# Slots that stand in queues, each queue in ascending order of (major, minor), with leased ones out of the way. For policies.
# A search parks a leased slot that it meets, and shelves an unread one that it meets for a guess; both keep their place.
from libc.stdint cimport int32_t, int64_t, uint8_t

from fastcache_ext.policy cimport fc_policy, fc_view

ctypedef struct fc_order:
    int32_t n_slots
    int32_t n_queues        # queue i of class c is number c * (queues per class) + i
    int64_t *major          # [n_slots] place in its queue; the policy writes it through append(), wait() and rise()
    int64_t *minor          # [n_slots]
    int32_t *prev           # [n_slots + n_queues] the ends of queue q's list are at n_slots + q
    int32_t *next
    int32_t *queue          # [n_slots]
    uint8_t *where          # [n_slots]
    int32_t *pos            # [n_slots] index in its heap
    int32_t **heap          # [2 * n_queues] of queue q: at 2 * q what came back, at 2 * q + 1 what is shelved; least on top
    int32_t *len            # [2 * n_queues]
    int32_t *space          # what the heaps point into

cdef int order_init(fc_order *o, const fc_view *v, int per_class) noexcept nogil        # 0 or -ENOMEM
cdef void order_free(fc_order *o) noexcept nogil
# `slot` joins `queue` behind all that is in it: its place must be the greatest. O(1).
cdef void order_append(fc_order *o, int queue, int32_t slot, int64_t major, int64_t minor) noexcept nogil
# `slot`, leased by its read, belongs to `queue`; it is seen after its release. O(1).
cdef void order_wait(fc_policy *p, fc_order *o, int queue, int32_t slot, int64_t major, int64_t minor) noexcept nogil
# `slot` moves back in the queue that it is in, where that is a heap. O(log n).
cdef void order_rise(fc_order *o, int32_t slot, int64_t major, int64_t minor) noexcept nogil
# A demand asked for `slot`: guesses may take it again. O(1), or O(log n) when it was shelved.
cdef void order_heard(fc_order *o, int32_t slot) noexcept nogil
cdef void order_leave(fc_policy *p, fc_order *o, int32_t slot) noexcept nogil
# A parked slot lost its last lease. O(log n).
cdef void order_returned(fc_policy *p, fc_order *o, int32_t slot) noexcept nogil
# The first of a queue that may go (mode: FC_FOR_*), or -1. O(log n) for each slot that is parked or shelved on the way.
cdef int32_t order_first(fc_policy *p, fc_order *o, int queue, int mode) noexcept nogil
