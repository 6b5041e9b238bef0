"""Stack distances over a bounded set of keys: Mattson's algorithm with a Fenwick tree over the times of last requests.

The line of times has two places per key; when it is used up, what stands on it moves together, so that a request costs
O(log keys) and memory never grows. May import libc.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, uint16_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset


cdef int stack_init(fc_stack *s, int32_t n_keys) noexcept nogil:
    s.n_keys = n_keys
    s.n_times = 2 * n_keys + 2
    s.now = 1
    s.time_of = <uint16_t *>calloc(n_keys + 1, sizeof(uint16_t))
    s.key_at = <uint16_t *>calloc(s.n_times + 1, sizeof(uint16_t))
    s.tree = <uint16_t *>calloc(s.n_times + 1, sizeof(uint16_t))
    s.hist = <uint32_t *>calloc(n_keys + 1, sizeof(uint32_t))
    if s.time_of == NULL or s.key_at == NULL or s.tree == NULL or s.hist == NULL:
        return -ENOMEM
    return 0


cdef void stack_destroy(fc_stack *s) noexcept nogil:
    free(s.time_of)
    free(s.key_at)
    free(s.tree)
    free(s.hist)


cdef inline void mark(fc_stack *s, int32_t at, int by) noexcept nogil:
    while at <= s.n_times:
        s.tree[at] = <uint16_t>(s.tree[at] + by)
        at += at & -at


cdef inline int32_t marks_upto(const fc_stack *s, int32_t at) noexcept nogil:
    cdef int32_t n = 0
    while at > 0:
        n += s.tree[at]
        at -= at & -at
    return n


cdef void close_ranks(fc_stack *s) noexcept nogil:
    cdef int32_t at, to = 1
    cdef uint16_t key
    for at in range(1, s.n_times + 1):
        key = s.key_at[at]
        if key > 0:
            s.key_at[at] = 0
            s.key_at[to] = key
            s.time_of[key - 1] = <uint16_t>to
            to += 1
    s.now = to
    memset(s.tree, 0, (s.n_times + 1) * sizeof(uint16_t))
    for at in range(1, s.n_times + 1):
        s.tree[at] = <uint16_t>(s.tree[at] + (at < to))
        if at + (at & -at) <= s.n_times:
            s.tree[at + (at & -at)] = <uint16_t>(s.tree[at + (at & -at)] + s.tree[at])


cdef int32_t stack_ask(fc_stack *s, int32_t key) noexcept nogil:
    cdef int32_t was, distance = 0
    if s.now > s.n_times:
        close_ranks(s)
    was = s.time_of[key]
    if was > 0:
        distance = s.distinct - marks_upto(s, was) + 1
        mark(s, was, -1)
        s.key_at[was] = 0
    else:
        s.distinct += 1
    s.time_of[key] = <uint16_t>s.now
    s.key_at[s.now] = <uint16_t>(key + 1)
    mark(s, s.now, 1)
    s.now += 1
    s.hist[distance] += 1
    s.requests += 1
    return distance


cdef void stack_halve(fc_stack *s) noexcept nogil:
    cdef int32_t d
    s.requests = 0
    for d in range(s.n_keys + 1):
        s.hist[d] >>= 1
        s.requests += s.hist[d]
