"""Least frequently used, with ageing: every count is halved each time as many demands have come as there are experts.

Counts are kept for all experts, resident or not: an expert that comes back is not a stranger. The half-life is the traffic in
which each expert would be asked for once if all were alike, so it grows with the pool and has no unit of its own. Nothing is
halved in fact: a demand adds twice as much in each half-life as in the one before, which leaves the order between two experts
alone until one of them is asked for. Of equal counts the one asked for longest ago goes. May import libc, order and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport calloc, free

from fastcache_ext.order cimport (
    fc_order, order_first, order_free, order_heard, order_init, order_leave, order_returned, order_rise, order_wait,
)
from fastcache_ext.policy cimport fc_policy

cdef extern from *:
    int leading_zeros "__builtin_clz"(unsigned int x) noexcept nogil

cdef enum:
    ONE = 1024              # a demand: counts have ten binary places
    MOST_HALF_LIFE = 1 << 20        # a count stays below 2 * ONE * half-life, which fits in 32 bits

ctypedef struct lfu_state:
    fc_order order          # one queue per class; all in heaps: (size, clock of the last demand or admission)
    int64_t clock
    int64_t demands
    int64_t half_life       # demands
    uint32_t *count         # [n_keys] in units of its own half-life
    uint32_t *epoch         # [n_keys] half-life in which it was last asked for


cdef int lfu_init(fc_policy *p) noexcept nogil:
    cdef lfu_state *u = <lfu_state *>calloc(1, sizeof(lfu_state))
    if u == NULL:
        return -ENOMEM
    p.state = u
    p.destroy = destroy
    u.half_life = max(1, min(p.v.n_keys, <int32_t>MOST_HALF_LIFE))
    u.count = <uint32_t *>calloc(p.v.n_keys + 1, sizeof(uint32_t))
    u.epoch = <uint32_t *>calloc(p.v.n_keys + 1, sizeof(uint32_t))
    if u.count == NULL or u.epoch == NULL or order_init(&u.order, &p.v, 1) != 0:
        destroy(p)
        return -ENOMEM
    p.request = request
    p.admit = admit
    p.victim = victim
    p.forget = forget
    p.released = released
    p.rate = rate
    return 0


cdef void destroy(fc_policy *p) noexcept nogil:
    cdef lfu_state *u = <lfu_state *>p.state
    if u == NULL:
        return
    order_free(&u.order)
    free(u.count)
    free(u.epoch)
    free(u)
    p.state = NULL


cdef inline int64_t size_of(const lfu_state *u, int32_t key) noexcept nogil:
    """count * 2 ** epoch as an integer in the same order: where its first bit is, then its bits."""
    cdef uint32_t c = u.count[key]
    cdef int bits
    if c == 0:
        return 0
    bits = leading_zeros(c)
    return (<int64_t>(u.epoch[key] + 32 - bits) << 32) | <int64_t>(c << bits)


cdef void request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef lfu_state *u = <lfu_state *>p.state
    cdef uint32_t epoch = <uint32_t>(u.demands // u.half_life), passed = epoch - u.epoch[key]
    u.count[key] = (u.count[key] >> passed if passed < 32 else 0) + ONE
    u.epoch[key] = epoch
    u.demands += 1
    u.clock += 1
    if slot >= 0:
        order_rise(&u.order, slot, size_of(u, key), u.clock)
        order_heard(&u.order, slot)


cdef void admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef lfu_state *u = <lfu_state *>p.state
    u.clock += 1
    order_wait(p, &u.order, p.v.cls[slot], slot, size_of(u, key), u.clock)


cdef double rate(fc_policy *p, int32_t slot) noexcept nogil:
    cdef lfu_state *u = <lfu_state *>p.state
    cdef int32_t key = p.v.key_of[slot]
    cdef uint32_t passed = <uint32_t>(u.demands // u.half_life) - u.epoch[key]
    return (u.count[key] >> passed if passed < 32 else 0) + 1.0


cdef void forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    order_leave(p, &(<lfu_state *>p.state).order, slot)


cdef void released(fc_policy *p, int32_t slot) noexcept nogil:
    order_returned(p, &(<lfu_state *>p.state).order, slot)


cdef int32_t victim(fc_policy *p, int cls, int mode) noexcept nogil:
    return order_first(p, &(<lfu_state *>p.state).order, cls, mode)
