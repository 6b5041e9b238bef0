"""Least recently used, by request order.

A list per size class in request order holds every slot that is not parked. A leased slot met at the tail is parked: taken out of
the list until its last lease ends, then put into a heap by the time of its last request. So a search never meets the same leased
slot twice, and a release changes no order. May import libc, atomics and policy.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free

from fastcache_ext.atomics cimport fc_store8
from fastcache_ext.policy cimport FC_FOR_GUESS, fc_policy, is_leased, park

cdef enum:
    NOWHERE = 0
    LISTED = 1
    PARKED = 2
    HEAPED = 3
    GUESS_WALK = 64         # listed slots that a guess looks at before it gives up

ctypedef struct lru_state:
    int64_t clock
    int64_t *stamp          # [n_slots] clock of the last request
    int32_t *prev           # [n_slots + n_classes] the ends of class c's list are at n_slots + c
    int32_t *next
    uint8_t *where          # [n_slots]
    int32_t *heap           # [n_slots] class c's heap starts at heap_first[c]; least stamp on top
    int32_t *heap_pos       # [n_slots]
    int32_t *heap_first     # [n_classes]
    int32_t *heap_len       # [n_classes]


cdef int lru_init(fc_policy *p) noexcept nogil:
    cdef lru_state *u = <lru_state *>calloc(1, sizeof(lru_state))
    cdef int32_t n = p.v.n_slots, c, s, at = 0
    if u == NULL:
        return -ENOMEM
    p.state = u
    p.destroy = lru_destroy
    u.stamp = <int64_t *>calloc(n + 1, sizeof(int64_t))
    u.prev = <int32_t *>calloc(n + p.v.n_classes + 1, sizeof(int32_t))
    u.next = <int32_t *>calloc(n + p.v.n_classes + 1, sizeof(int32_t))
    u.where = <uint8_t *>calloc(n + 1, 1)
    u.heap = <int32_t *>calloc(n + 1, sizeof(int32_t))
    u.heap_pos = <int32_t *>calloc(n + 1, sizeof(int32_t))
    u.heap_first = <int32_t *>calloc(p.v.n_classes + 1, sizeof(int32_t))
    u.heap_len = <int32_t *>calloc(p.v.n_classes + 1, sizeof(int32_t))
    if (u.stamp == NULL or u.prev == NULL or u.next == NULL or u.where == NULL or u.heap == NULL or u.heap_pos == NULL
            or u.heap_first == NULL or u.heap_len == NULL):
        lru_destroy(p)
        return -ENOMEM
    for c in range(p.v.n_classes):
        u.prev[n + c] = u.next[n + c] = n + c
        u.heap_first[c] = at
        for s in range(n):
            at += p.v.cls[s] == c
    p.request = lru_request
    p.admit = lru_admit
    p.victim = lru_victim
    p.forget = lru_forget
    p.released = lru_released
    p.rate = lru_rate
    return 0


cdef void lru_destroy(fc_policy *p) noexcept nogil:
    cdef lru_state *u = <lru_state *>p.state
    if u == NULL:
        return
    free(u.stamp)
    free(u.prev)
    free(u.next)
    free(u.where)
    free(u.heap)
    free(u.heap_pos)
    free(u.heap_first)
    free(u.heap_len)
    free(u)
    p.state = NULL


cdef inline void unlink(lru_state *u, int32_t s) noexcept nogil:
    u.next[u.prev[s]] = u.next[s]
    u.prev[u.next[s]] = u.prev[s]


cdef inline void push_front(fc_policy *p, lru_state *u, int32_t s) noexcept nogil:
    cdef int32_t end = p.v.n_slots + p.v.cls[s]
    u.next[s] = u.next[end]
    u.prev[s] = end
    u.prev[u.next[s]] = s
    u.next[end] = s
    u.where[s] = LISTED


cdef inline void heap_put(lru_state *u, int32_t *heap, int32_t i, int32_t s) noexcept nogil:
    heap[i] = s
    u.heap_pos[s] = i


cdef void heap_up(lru_state *u, int32_t *heap, int32_t i) noexcept nogil:
    cdef int32_t s = heap[i]
    while i > 0 and u.stamp[heap[(i - 1) // 2]] > u.stamp[s]:
        heap_put(u, heap, i, heap[(i - 1) // 2])
        i = (i - 1) // 2
    heap_put(u, heap, i, s)


cdef void heap_down(lru_state *u, int32_t *heap, int32_t n, int32_t i) noexcept nogil:
    cdef int32_t s = heap[i], child
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and u.stamp[heap[child + 1]] < u.stamp[heap[child]]:
            child += 1
        if u.stamp[heap[child]] >= u.stamp[s]:
            break
        heap_put(u, heap, i, heap[child])
        i = child
    heap_put(u, heap, i, s)


cdef void heap_remove(fc_policy *p, lru_state *u, int32_t s) noexcept nogil:
    cdef int c = p.v.cls[s]
    cdef int32_t *heap = u.heap + u.heap_first[c]
    cdef int32_t i = u.heap_pos[s], last
    u.heap_len[c] -= 1
    last = heap[u.heap_len[c]]
    if last != s:
        heap_put(u, heap, i, last)
        heap_up(u, heap, i)
        heap_down(u, heap, u.heap_len[c], u.heap_pos[last])


cdef void leave(fc_policy *p, lru_state *u, int32_t s) noexcept nogil:
    if u.where[s] == LISTED:
        unlink(u, s)
    elif u.where[s] == HEAPED:
        heap_remove(p, u, s)
    elif u.where[s] == PARKED:
        fc_store8(&p.v.parked[s], 0)
    u.where[s] = NOWHERE


cdef void lru_request(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef lru_state *u = <lru_state *>p.state
    u.clock += 1
    if slot >= 0:
        leave(p, u, slot)
        u.stamp[slot] = u.clock
        push_front(p, u, slot)


cdef void lru_admit(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    cdef lru_state *u = <lru_state *>p.state
    u.clock += 1
    u.stamp[slot] = u.clock
    push_front(p, u, slot)


cdef double lru_rate(fc_policy *p, int32_t slot) noexcept nogil:
    cdef lru_state *u = <lru_state *>p.state
    return 1.0 / (u.clock - u.stamp[slot] + 1)


cdef void lru_forget(fc_policy *p, int32_t key, int32_t slot) noexcept nogil:
    leave(p, <lru_state *>p.state, slot)


cdef void lru_released(fc_policy *p, int32_t slot) noexcept nogil:
    cdef lru_state *u = <lru_state *>p.state
    cdef int c = p.v.cls[slot]
    cdef int32_t *heap = u.heap + u.heap_first[c]
    if u.where[slot] != PARKED:
        return
    fc_store8(&p.v.parked[slot], 0)
    u.where[slot] = HEAPED
    heap_put(u, heap, u.heap_len[c], slot)
    u.heap_len[c] += 1
    heap_up(u, heap, u.heap_len[c] - 1)


cdef int32_t oldest_read(fc_policy *p, lru_state *u, int cls) noexcept nogil:
    """The oldest slot among the heap's first, which are its old ones, that a guess may take; or -1."""
    cdef int32_t *heap = u.heap + u.heap_first[cls]
    cdef int32_t i, best = -1
    for i in range(min(u.heap_len[cls], <int32_t>GUESS_WALK)):
        if p.v.unread[heap[i]] or is_leased(p, heap[i]):
            continue
        if best < 0 or u.stamp[heap[i]] < u.stamp[best]:
            best = heap[i]
    return best


cdef int32_t lru_victim(fc_policy *p, int cls, int mode) noexcept nogil:
    cdef lru_state *u = <lru_state *>p.state
    cdef int32_t *heap = u.heap + u.heap_first[cls]
    cdef int32_t end = p.v.n_slots + cls
    cdef int32_t s = u.prev[end], before, top
    cdef int walked = 0
    # Skip what is leased: parked on the way, so that the next search does not meet it.
    while s != end:
        before = u.prev[s]
        if park(p, s):
            unlink(u, s)
            u.where[s] = PARKED
        elif mode == FC_FOR_GUESS and p.v.unread[s] and walked < GUESS_WALK:
            walked += 1
        else:
            break
        s = before
    if s != end and mode == FC_FOR_GUESS and p.v.unread[s]:
        s = end
    while u.heap_len[cls] > 0:
        top = heap[0]
        if park(p, top):
            heap_remove(p, u, top)
            u.where[top] = PARKED
            continue
        if mode == FC_FOR_GUESS and p.v.unread[top]:
            top = oldest_read(p, u, cls)
        if top >= 0 and (s == end or u.stamp[top] < u.stamp[s]):
            return top
        break
    return s if s != end else -1
