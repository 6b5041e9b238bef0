"""S3-FIFO (Yang et al., SOSP 2023): a small queue for newcomers, a main queue, and a ghost of what the small one gave up.

Both queues are in order of arrival. A newcomer goes to the small queue, or to the main one if the ghost still knows it. The small
queue gives up slots while it has a tenth of the capacity or more: its oldest goes into the ghost, or moves on to the main queue if
two demands came after the one that loaded it. Else the main queue does: its oldest goes, or to its end for one of its demands, of
which three count. The ghost holds as many keys as the main queue has slots. One slot is given up at a time, and the choice of the
queue is made again after every move. The first demand for a guessed load is the admission that a miss would have been.
May import libc, order and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free

from fastcache_ext.order cimport (
    fc_order, order_append, order_first, order_free, order_heard, order_init, order_leave, order_returned,
)
from fastcache_ext.policy cimport all_slots, fc_policy

cdef enum:
    SMALL = 0
    MAIN = 1
    SMALL_SHARE = 10        # the small queue's part of the capacity: one in so many
    MOST = 3                # demands that count
    NOT_IN_GHOST = -1

ctypedef struct s3_state:
    fc_order order          # of class c: queues 2 * c + SMALL and 2 * c + MAIN
    int64_t clock           # arrivals in a queue
    uint8_t *freq           # [n_slots] demands since it arrived in its queue, MOST at the most
    uint8_t *guessed        # [n_slots] loaded for a guess, and no demand has come yet
    uint8_t *missed         # [n_keys] a demand came while it was not resident
    int64_t *ghost          # [n_keys] which arrival in its class's ghost it was, or NOT_IN_GHOST
    int64_t *ghosts         # [n_classes] arrivals in the ghost so far
    int32_t *small          # [n_classes] slots in the small queue, leased ones too
    int32_t leaving         # what victim() named last: if it is forgotten now, then because it was given up


cdef int s3fifo_init(fc_policy *p) noexcept nogil:
    cdef s3_state *u = <s3_state *>calloc(1, sizeof(s3_state))
    cdef int32_t i
    if u == NULL:
        return -ENOMEM
    p.state = u
    p.destroy = destroy
    u.leaving = -1
    u.freq = <uint8_t *>calloc(p.v.n_slots + 1, 1)
    u.guessed = <uint8_t *>calloc(p.v.n_slots + 1, 1)
    u.missed = <uint8_t *>calloc(p.v.n_keys + 1, 1)
    u.ghost = <int64_t *>calloc(p.v.n_keys + 1, sizeof(int64_t))
    u.ghosts = <int64_t *>calloc(p.v.n_classes + 1, sizeof(int64_t))
    u.small = <int32_t *>calloc(p.v.n_classes + 1, sizeof(int32_t))
    if (u.freq == NULL or u.guessed == NULL or u.missed == NULL or u.ghost == NULL or u.ghosts == NULL
            or u.small == NULL or order_init(&u.order, &p.v, 2) != 0):
        destroy(p)
        return -ENOMEM
    for i in range(p.v.n_keys):
        u.ghost[i] = NOT_IN_GHOST
    p.request = request
    p.admit = admit
    p.victim = victim
    p.forget = forget
    p.released = released
    p.rate = rate
    return 0


cdef void destroy(fc_policy *p) noexcept nogil:
    cdef s3_state *u = <s3_state *>p.state
    if u == NULL:
        return
    order_free(&u.order)
    free(u.freq)
    free(u.guessed)
    free(u.missed)
    free(u.ghost)
    free(u.ghosts)
    free(u.small)
    free(u)
    p.state = NULL


cdef void enter(s3_state *u, int c, int which, int32_t slot, int32_t count) noexcept nogil:
    u.clock += 1
    u.freq[slot] = <uint8_t>count
    u.small[c] += which == SMALL
    order_append(&u.order, 2 * c + which, slot, 0, u.clock)


cdef int leave(fc_policy *p, s3_state *u, int c, int32_t slot) noexcept nogil:
    """Take a slot out of its queue; which that was."""
    cdef int which = u.order.queue[slot] - 2 * c
    u.small[c] -= which == SMALL
    order_leave(p, &u.order, slot)
    return which


cdef void request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef s3_state *u = <s3_state *>p.state
    if slot < 0:
        u.missed[key] = 1
        return
    order_heard(&u.order, slot)
    if u.guessed[slot]:
        u.guessed[slot] = 0
    elif u.freq[slot] < MOST:
        u.freq[slot] += 1


cdef void admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef s3_state *u = <s3_state *>p.state
    cdef int c = p.v.cls[slot]
    cdef int64_t room = p.v.capacity[c] - p.v.capacity[c] // SMALL_SHARE
    cdef bint known = u.ghost[key] != NOT_IN_GHOST and u.ghosts[c] - u.ghost[key] <= room
    u.ghost[key] = NOT_IN_GHOST
    u.guessed[slot] = not u.missed[key]
    u.missed[key] = 0
    enter(u, c, MAIN if known else SMALL, slot, 0)


cdef double rate(fc_policy *p, int32_t slot) noexcept nogil:
    """Uses that count since it entered its queue, with the one that the main queue was entered for, and half a one more. A newcomer
    is one of which not much is known."""
    cdef s3_state *u = <s3_state *>p.state
    cdef bint in_main = u.order.queue[slot] == 2 * p.v.cls[slot] + MAIN
    return (u.freq[slot] + in_main + 0.5) / max(u.clock - u.order.minor[slot], all_slots(p))


cdef void forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef s3_state *u = <s3_state *>p.state
    cdef int c = p.v.cls[slot]
    if leave(p, u, c, slot) == SMALL and slot == u.leaving:
        u.ghost[key] = u.ghosts[c]
        u.ghosts[c] += 1
    u.leaving = -1


cdef void released(fc_policy *p, int32_t slot) noexcept nogil:
    order_returned(p, &(<s3_state *>p.state).order, slot)


cdef int32_t victim(fc_policy *p, int cls, int mode) noexcept nogil:
    cdef s3_state *u = <s3_state *>p.state
    cdef int32_t s
    cdef int which
    while True:
        which = SMALL if SMALL_SHARE * u.small[cls] >= p.v.capacity[cls] else MAIN
        s = order_first(p, &u.order, 2 * cls + which, mode)
        if s < 0:
            which = 1 - which
            s = order_first(p, &u.order, 2 * cls + which, mode)
        if s < 0 or u.freq[s] <= (1 if which == SMALL else 0):
            u.leaving = s
            return s
        leave(p, u, cls, s)
        enter(u, cls, MAIN, s, 0 if which == SMALL else u.freq[s] - 1)
