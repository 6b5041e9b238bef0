"""Queues of slots that searches take from the front, without meeting a leased slot twice.

A queue is a list, in order, and two heaps. A search that meets a leased slot parks it: out of the list until its last lease ends,
then into the first heap. One for a guess that meets an unread slot shelves it: into the second heap, which only demands look at,
until a demand asks for it. Places never change by that, so the front of a queue is the least of three fronts, and a release
changes no order. May import libc, atomics and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from fastcache_ext.atomics cimport fc_store8
from fastcache_ext.policy cimport FC_FOR_GUESS, fc_policy, fc_view, park

cdef enum:
    NOWHERE = 0
    LISTED = 1
    PARKED = 2
    BACK = 3                # in the first heap
    SHELVED = 4             # in the second


cdef int order_init(fc_order *o, const fc_view *v, int per_class) noexcept nogil:
    cdef int32_t n = v.n_slots, q = v.n_classes * per_class, c, s, i, at = 0, members
    memset(o, 0, sizeof(fc_order))
    o.n_slots = n
    o.n_queues = q
    o.major = <int64_t *>calloc(n + 1, sizeof(int64_t))
    o.minor = <int64_t *>calloc(n + 1, sizeof(int64_t))
    o.prev = <int32_t *>calloc(n + q + 1, sizeof(int32_t))
    o.next = <int32_t *>calloc(n + q + 1, sizeof(int32_t))
    o.queue = <int32_t *>calloc(n + 1, sizeof(int32_t))
    o.where = <uint8_t *>calloc(n + 1, 1)
    o.pos = <int32_t *>calloc(n + 1, sizeof(int32_t))
    o.heap = <int32_t **>calloc(2 * q + 1, sizeof(int32_t *))
    o.len = <int32_t *>calloc(2 * q + 1, sizeof(int32_t))
    o.space = <int32_t *>calloc(2 * per_class * n + 1, sizeof(int32_t))
    if (o.major == NULL or o.minor == NULL or o.prev == NULL or o.next == NULL or o.queue == NULL or o.where == NULL
            or o.pos == NULL or o.heap == NULL or o.len == NULL or o.space == NULL):
        order_free(o)
        return -ENOMEM
    for c in range(v.n_classes):
        members = 0
        for s in range(n):
            members += v.cls[s] == c
        for i in range(2 * per_class):
            o.heap[2 * per_class * c + i] = o.space + at
            at += members
    for i in range(q):
        o.prev[n + i] = o.next[n + i] = n + i
    return 0


cdef void order_free(fc_order *o) noexcept nogil:
    free(o.major)
    free(o.minor)
    free(o.prev)
    free(o.next)
    free(o.queue)
    free(o.where)
    free(o.pos)
    free(o.heap)
    free(o.len)
    free(o.space)
    memset(o, 0, sizeof(fc_order))


cdef inline bint before(const fc_order *o, int32_t a, int32_t b) noexcept nogil:
    return o.major[a] < o.major[b] or (o.major[a] == o.major[b] and o.minor[a] < o.minor[b])


cdef inline void place(fc_order *o, int32_t *heap, int32_t i, int32_t s) noexcept nogil:
    heap[i] = s
    o.pos[s] = i


cdef void up(fc_order *o, int32_t *heap, int32_t i) noexcept nogil:
    cdef int32_t s = heap[i]
    while i > 0 and before(o, s, heap[(i - 1) // 2]):
        place(o, heap, i, heap[(i - 1) // 2])
        i = (i - 1) // 2
    place(o, heap, i, s)


cdef void down(fc_order *o, int32_t *heap, int32_t n, int32_t i) noexcept nogil:
    cdef int32_t s = heap[i], child
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and before(o, heap[child + 1], heap[child]):
            child += 1
        if not before(o, heap[child], s):
            break
        place(o, heap, i, heap[child])
        i = child
    place(o, heap, i, s)


cdef inline int heap_of(const fc_order *o, int32_t s) noexcept nogil:
    return 2 * o.queue[s] + (o.where[s] == SHELVED)


cdef void heap_in(fc_order *o, int32_t s, uint8_t where) noexcept nogil:
    cdef int h
    o.where[s] = where
    h = heap_of(o, s)
    place(o, o.heap[h], o.len[h], s)
    o.len[h] += 1
    up(o, o.heap[h], o.len[h] - 1)


cdef void heap_out(fc_order *o, int32_t s) noexcept nogil:
    cdef int h = heap_of(o, s)
    cdef int32_t i = o.pos[s], last
    o.len[h] -= 1
    last = o.heap[h][o.len[h]]
    if last != s:
        place(o, o.heap[h], i, last)
        up(o, o.heap[h], i)
        down(o, o.heap[h], o.len[h], o.pos[last])


cdef inline void unlink(fc_order *o, int32_t s) noexcept nogil:
    o.next[o.prev[s]] = o.next[s]
    o.prev[o.next[s]] = o.prev[s]


cdef void order_append(fc_order *o, int queue, int32_t slot, int64_t major, int64_t minor) noexcept nogil:
    cdef int32_t end = o.n_slots + queue
    o.major[slot] = major
    o.minor[slot] = minor
    o.queue[slot] = queue
    o.where[slot] = LISTED
    o.next[slot] = o.next[end]
    o.prev[slot] = end
    o.prev[o.next[slot]] = slot
    o.next[end] = slot


cdef void order_wait(fc_policy *p, fc_order *o, int queue, int32_t slot, int64_t major, int64_t minor) noexcept nogil:
    o.major[slot] = major
    o.minor[slot] = minor
    o.queue[slot] = queue
    o.where[slot] = PARKED
    fc_store8(&p.v.parked[slot], 1)


cdef void order_rise(fc_order *o, int32_t slot, int64_t major, int64_t minor) noexcept nogil:
    cdef int h
    o.major[slot] = major
    o.minor[slot] = minor
    if o.where[slot] >= BACK:
        h = heap_of(o, slot)
        down(o, o.heap[h], o.len[h], o.pos[slot])


cdef void order_heard(fc_order *o, int32_t slot) noexcept nogil:
    if o.where[slot] == SHELVED:
        heap_out(o, slot)
        heap_in(o, slot, BACK)


cdef void order_leave(fc_policy *p, fc_order *o, int32_t slot) noexcept nogil:
    if o.where[slot] == LISTED:
        unlink(o, slot)
    elif o.where[slot] == PARKED:
        fc_store8(&p.v.parked[slot], 0)
    elif o.where[slot] >= BACK:
        heap_out(o, slot)
    o.where[slot] = NOWHERE


cdef void order_returned(fc_policy *p, fc_order *o, int32_t slot) noexcept nogil:
    if o.where[slot] == PARKED:
        fc_store8(&p.v.parked[slot], 0)
        heap_in(o, slot, BACK)


cdef int32_t order_first(fc_policy *p, fc_order *o, int queue, int mode) noexcept nogil:
    cdef int32_t end = o.n_slots + queue, first = o.prev[end], top
    cdef int h
    while first != end:
        if park(p, first):
            unlink(o, first)
            o.where[first] = PARKED
        elif mode == FC_FOR_GUESS and p.v.unread[first]:
            unlink(o, first)
            heap_in(o, first, SHELVED)
        else:
            break
        first = o.prev[end]
    if first == end:
        first = -1
    for h in range(2 * queue, 2 * queue + (1 if mode == FC_FOR_GUESS else 2)):
        while o.len[h] > 0:
            top = o.heap[h][0]
            if park(p, top):
                heap_out(o, top)
                o.where[top] = PARKED
            elif mode == FC_FOR_GUESS and p.v.unread[top]:
                heap_out(o, top)
                heap_in(o, top, SHELVED)
            else:
                if first < 0 or before(o, top, first):
                    first = top
                break
    return first
