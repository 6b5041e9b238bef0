"""How likely a visit of a layer is to pick each of its experts.

Four moving averages of an expert's picks per visit: over 2 visits, over WIDE times as many as a pick of each of the layer's experts
takes (LEAST_WIDE at the least), and two between, each as many times as far as the last. All start empty, so each is divided by
the weight that it has gathered so far. They are blended by weights which the traffic teaches, each layer for itself: an average is
a guess at who is picked next, and each pick moves the weights towards those that had expected it (the expectation-maximisation of
a mixture, one pick at a time). A visit fixes the weights that its layer's chances are made of, so those move only with its visits.
Nothing decays: a pick is written down larger the later it comes, in units that a layer's whole row shares and that are taken down
every RESCALE visits. May import libc and rows.
"""
from libc.math cimport cbrt, fabs, pow
from libc.stdint cimport int32_t

from fastcache_ext.rows cimport FC_AVERAGES, fc_row_scale

cdef enum:
    RESCALE = 32            # visits between two rewritings of a layer's row
    WIDE = 12               # picks per expert that the slowest average is over,
    LEAST_WIDE = 128        # and visits, at the least
    COUNTED = 32            # visits that picks are counted over

cdef double MEMORY = 12.0   # picks that the weights remember, and those of two visits
cdef double GATHERED = 1e-12        # missing weight that counts as none


cdef void spread(fc_blend *b, double widest) noexcept nogil:
    cdef double apart = cbrt(widest / 2), wide = 2
    cdef int j
    for j in range(FC_AVERAGES):
        b.rate[j] = 1.0 / wide
        b.grows[j] = 1.0 / (1.0 - b.rate[j])
        wide *= apart


cdef void blend_init(fc_blend *b, float *row, int32_t blocks, int32_t experts) noexcept nogil:
    cdef int j
    b.row = row
    b.blocks = blocks
    b.experts = experts
    b.visits = b.base = 0
    b.picks = b.counted = 0
    spread(b, LEAST_WIDE)
    for j in range(FC_AVERAGES):
        b.missing[j] = b.decay[j] = 1.0
        b.per[j] = b.rate[j]
        b.mult[j] = 0
        b.weight[j] = 0.25


cdef void renew(fc_blend *b) noexcept nogil:
    """Before the units grow out of a float: take the row down, and fit the averages to how many experts a visit picks."""
    cdef double widest = max(WIDE * b.experts * b.counted / max(b.picks, 0.1 * b.counted), <double>LEAST_WIDE), gathered
    cdef bint other = fabs(widest * b.rate[FC_AVERAGES - 1] - 1) > 0.1
    cdef float factor[4]
    cdef int j
    if other:
        spread(b, widest)
    for j in range(FC_AVERAGES):
        factor[j] = <float>b.decay[j]
        if other:           # an average stays what it is, and what it has gathered is what it would have at its new rate
            gathered = 1.0 - b.missing[j]
            b.missing[j] = pow(1.0 - b.rate[j], b.visits)
            factor[j] *= <float>((1.0 - b.missing[j]) / gathered)
        b.decay[j] = 1.0
        b.per[j] = b.rate[j]
    fc_row_scale(b.row, b.blocks, factor)
    b.base = b.visits


cdef void blend_visit(fc_blend *b, fc_visit *v) noexcept nogil:
    cdef bint first = b.visits == 0
    cdef int j
    if b.visits == 1 or b.visits - b.base >= RESCALE:
        renew(b)
    v.step = 0 if first else <float>(b.counted / (MEMORY * b.counted + 2 * b.picks))
    b.picks *= 1.0 - 1.0 / COUNTED
    b.counted = b.counted * (1.0 - 1.0 / COUNTED) + 1
    b.visits += 1
    for j in range(FC_AVERAGES):
        v.expected[j] = <float>b.decay[j]
        b.decay[j] *= 1.0 - b.rate[j]
        b.per[j] *= b.grows[j]
        v.adds[j] = <float>b.per[j]
        b.mult[j] = b.weight[j] * <float>b.decay[j]
        if b.missing[j] > 0:        # young
            v.expected[j] = 0 if first else v.expected[j] / <float>(1.0 - b.missing[j])
            b.missing[j] *= 1.0 - b.rate[j]
            b.mult[j] /= <float>(1.0 - b.missing[j])
            if b.missing[j] < GATHERED:
                b.missing[j] = 0
