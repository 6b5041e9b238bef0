"""When layers come round.

A layer is expected after as long as those gaps, of all layers, that lasted longer than its own has by now: in a cycle that is a
round, and for one left while a prompt's tokens go through it, or while another model runs, the time that such take. As one
more such gap counts that its own lasts twice as long, which is all there is to go by where none was as long: it may have stopped
coming round. No layer is expected before the mean of its own gaps; and that of those to come takes in the one that it is in, the
less the more there were that were as long. May import libc.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free

cdef extern from *:
    int leading_zeros "__builtin_clzll"(unsigned long long x) noexcept nogil

cdef enum:
    MEMORY = 128            # gaps of a layer that its mean is of
    OPEN = 16                # for how many of them the one counts that it is in
    REMEMBERED = 64         # gaps per layer that are counted before all count for half
    LOOK = 32               # visits from one look at all layers to the next, at the least


cdef int rounds_init(fc_rounds *r, int32_t n_layers) noexcept nogil:
    cdef int32_t i
    r.n_layers = n_layers
    r.look_at = max(n_layers, <int32_t>LOOK)
    r.left = -1
    r.layers = <fc_round *>calloc(n_layers + 1, sizeof(fc_round))
    if r.layers == NULL:
        return -ENOMEM
    for i in range(n_layers):       # as if a round in order had just ended
        r.layers[i].last = i - n_layers
        r.layers[i].mean = r.layers[i].gap = n_layers
        r.layers[i].back = i
    return 0


cdef void rounds_free(fc_rounds *r) noexcept nogil:
    free(r.layers)
    r.layers = NULL


cdef inline int class_of(int64_t gap) noexcept nogil:
    """Its highest bit and the two below that."""
    cdef int high
    if gap < 4:
        return <int>max(gap, 0)
    high = 63 - leading_zeros(gap)
    return min(4 * high - 4 + <int>((gap >> (high - 2)) & 3), FC_GAPS - 1)


cdef inline double newest(const fc_round *l) noexcept nogil:
    """What share of the mean one gap more is."""
    return 1.0 / MEMORY if l.visits + 1 >= MEMORY else 1.0 / (l.visits + 1)


cdef void expect(fc_rounds *r, fc_round *l) noexcept nogil:
    cdef int64_t since = r.now - l.last
    cdef int n = class_of(since)
    cdef double longer, whole
    if r.sum[n] < since * r.count[n]:
        n += 1          # those of its own class were shorter
    longer = 1.0 + r.longer[n]
    whole = max((2.0 * since + r.lasted[n]) / longer, l.mean)
    l.back = l.last + whole
    l.gap = l.mean + (whole - l.mean) * min(OPEN * newest(l), 1.0) / longer


cdef void rounds_visit(fc_rounds *r, int32_t layer) noexcept nogil:
    cdef fc_round *l = &r.layers[layer]
    cdef int64_t gap = r.now - l.last
    cdef int i
    l.visits += 1
    if l.visits > 1:
        l.mean += (gap - l.mean) * newest(l)
        i = class_of(gap)
        r.count[i] += 1
        r.sum[i] += gap
        r.counted += 1
        if r.counted >= REMEMBERED * r.n_layers:
            r.counted //= 2
            for i in range(FC_GAPS):
                r.count[i] *= 0.5
                r.sum[i] *= 0.5
    l.last = r.now
    l.gap = l.mean
    l.back = l.last + l.mean
    r.now += 1
    if r.left >= 0 and r.left != layer:
        expect(r, &r.layers[r.left])
    r.left = layer


cdef bint rounds_look(fc_rounds *r) noexcept nogil:
    cdef int32_t i
    if r.now < r.look_at:
        return False
    r.look_at = r.now + max(r.n_layers, <int32_t>LOOK)
    for i in range(FC_GAPS - 1, -1, -1):
        r.longer[i] = r.longer[i + 1] + r.count[i]
        r.lasted[i] = r.lasted[i + 1] + r.sum[i]
    for i in range(r.n_layers):
        if i != r.left:
            expect(r, &r.layers[i])
    return True
