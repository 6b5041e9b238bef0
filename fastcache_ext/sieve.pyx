"""SIEVE (Zhang et al., NSDI 2024): a queue in order of admission, and a hand that goes from oldest to newest, round and round.

A request marks its slot. The hand takes marks off and gives up the first slot without one; what stays keeps its place. It passes
over what is leased, and for a guess over what is unread, and leaves its mark alone. The queue is two: what the hand has yet to
meet in this round, and what it has passed. The first demand for a guessed load is the admission that a miss would have been, and
leaves no mark. May import libc, order and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free

from fastcache_ext.order cimport (
    fc_order, order_append, order_first, order_free, order_init, order_leave, order_returned,
)
from fastcache_ext.policy cimport FC_FOR_DEMAND, FC_FOR_GUESS, all_slots, fc_policy

cdef enum:
    GUESS_WALK = 64         # unread slots that the hand passes for one guess

ctypedef struct sieve_state:
    fc_order order          # of class c: queues 2 * c and 2 * c + 1
    int64_t clock           # admissions; a slot's minor is the clock at its own
    uint8_t *marked         # [n_slots]
    uint8_t *kept           # [n_slots] the hand has taken a mark off
    uint8_t *guessed        # [n_slots] loaded for a guess, and no demand has come yet
    uint8_t *missed         # [n_keys] a demand came while it was not resident
    int32_t *older          # [n_slots] neighbours by admission, whatever is leased; -1
    int32_t *newer
    int32_t *newest         # [n_classes] slot or -1
    int64_t *last           # [n_classes] clock at the last admission
    int64_t *hand           # [n_classes] it has passed what is not newer than this clock; 0 at the start of a round
    uint8_t *ahead          # [n_classes] which of the two queues the hand has yet to meet


cdef int sieve_init(fc_policy *p) noexcept nogil:
    cdef sieve_state *u = <sieve_state *>calloc(1, sizeof(sieve_state))
    cdef int32_t n = p.v.n_slots, c
    if u == NULL:
        return -ENOMEM
    p.state = u
    p.destroy = destroy
    u.marked = <uint8_t *>calloc(n + 1, 1)
    u.kept = <uint8_t *>calloc(n + 1, 1)
    u.last = <int64_t *>calloc(p.v.n_classes + 1, sizeof(int64_t))
    u.guessed = <uint8_t *>calloc(n + 1, 1)
    u.missed = <uint8_t *>calloc(p.v.n_keys + 1, 1)
    u.older = <int32_t *>calloc(n + 1, sizeof(int32_t))
    u.newer = <int32_t *>calloc(n + 1, sizeof(int32_t))
    u.newest = <int32_t *>calloc(p.v.n_classes + 1, sizeof(int32_t))
    u.hand = <int64_t *>calloc(p.v.n_classes + 1, sizeof(int64_t))
    u.ahead = <uint8_t *>calloc(p.v.n_classes + 1, 1)
    if (u.last == NULL or u.marked == NULL or u.kept == NULL or u.guessed == NULL or u.missed == NULL or u.older == NULL
            or u.newer == NULL or u.newest == NULL or u.hand == NULL or u.ahead == NULL or order_init(&u.order, &p.v, 2) != 0):
        destroy(p)
        return -ENOMEM
    for c in range(p.v.n_classes):
        u.newest[c] = -1
    p.request = request
    p.admit = admit
    p.victim = victim
    p.forget = forget
    p.released = released
    p.rate = rate
    return 0


cdef void destroy(fc_policy *p) noexcept nogil:
    cdef sieve_state *u = <sieve_state *>p.state
    if u == NULL:
        return
    order_free(&u.order)
    free(u.marked)
    free(u.kept)
    free(u.last)
    free(u.guessed)
    free(u.missed)
    free(u.older)
    free(u.newer)
    free(u.newest)
    free(u.hand)
    free(u.ahead)
    free(u)
    p.state = NULL


cdef inline int queue_ahead(const sieve_state *u, int c) noexcept nogil:
    return 2 * c + u.ahead[c]


cdef inline int queue_passed(const sieve_state *u, int c) noexcept nogil:
    return 2 * c + 1 - u.ahead[c]


cdef inline void new_round(sieve_state *u, int c) noexcept nogil:
    u.ahead[c] = 1 - u.ahead[c]
    u.hand[c] = 0


cdef void request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef sieve_state *u = <sieve_state *>p.state
    if slot < 0:
        u.missed[key] = 1
    elif u.guessed[slot]:
        u.guessed[slot] = 0
    else:
        u.marked[slot] = 1


cdef void admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef sieve_state *u = <sieve_state *>p.state
    cdef int c = p.v.cls[slot]
    # A hand that stands behind the newest slot starts again from the oldest: what comes now is not what it meets next.
    if u.newest[c] >= 0 and u.order.minor[u.newest[c]] <= u.hand[c]:
        new_round(u, c)
    u.clock += 1
    u.marked[slot] = 0
    u.kept[slot] = 0
    u.last[c] = u.clock
    u.guessed[slot] = not u.missed[key]
    u.missed[key] = 0
    u.older[slot] = u.newest[c]
    u.newer[slot] = -1
    if u.newest[c] >= 0:
        u.newer[u.newest[c]] = slot
    u.newest[c] = slot
    order_append(&u.order, queue_ahead(u, c), slot, 0, u.clock)


cdef double rate(fc_policy *p, int32_t slot) noexcept nogil:
    """Its mark, and that the hand has taken one off, count a use each, and half a one more. The hand comes by at no known time, so
    all are as old; but a class that admits nobody is used less and less."""
    cdef sieve_state *u = <sieve_state *>p.state
    return (u.marked[slot] + u.kept[slot] + 0.5) / (all_slots(p) + u.clock - u.last[p.v.cls[slot]])


cdef void forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef sieve_state *u = <sieve_state *>p.state
    if u.newer[slot] >= 0:
        u.older[u.newer[slot]] = u.older[slot]
    else:
        u.newest[p.v.cls[slot]] = u.older[slot]
    if u.older[slot] >= 0:
        u.newer[u.older[slot]] = u.newer[slot]
    order_leave(p, &u.order, slot)


cdef void released(fc_policy *p, int32_t slot) noexcept nogil:
    cdef sieve_state *u = <sieve_state *>p.state
    cdef int c = p.v.cls[slot]
    # The hand may have passed its place while it was leased.
    u.order.queue[slot] = queue_ahead(u, c) if u.order.minor[slot] > u.hand[c] else queue_passed(u, c)
    order_returned(p, &u.order, slot)


cdef int32_t victim(fc_policy *p, int cls, int mode) noexcept nogil:
    cdef sieve_state *u = <sieve_state *>p.state
    cdef int32_t s
    cdef int walked = 0
    cdef bint turned = False
    while walked < GUESS_WALK:
        s = order_first(p, &u.order, queue_ahead(u, cls), FC_FOR_DEMAND)
        if s < 0:
            if turned:
                break
            turned = True
            new_round(u, cls)
            continue
        turned = False
        if mode == FC_FOR_GUESS and p.v.unread[s]:
            walked += 1
        elif u.marked[s]:
            u.marked[s] = 0
            u.kept[s] = 1
        else:
            u.hand[cls] = u.order.minor[s] - 1      # past what is leased before it
            return s
        u.hand[cls] = u.order.minor[s]
        order_leave(p, &u.order, s)
        order_append(&u.order, queue_passed(u, cls), s, 0, u.order.minor[s])
    return -1
