# How likely a visit of a layer is to pick each of its experts: a blend of moving averages of picks per visit, in a row (rows.pxd).
from libc.stdint cimport int32_t, uint32_t

from fastcache_ext.rows cimport fc_learn, fc_picked

ctypedef struct fc_blend:       # of one layer
    float *row                  # [blocks * FC_ROW] picks in units of `base`
    int32_t blocks
    int32_t experts
    uint32_t visits
    uint32_t base               # visit at which a pick is written down at its rate
    float weight[4]             # of the averages; sum about 1
    float mult[4]               # what the averages in the row are multiplied by: weight and decay over what is gathered
    double rate[4]              # what a visit adds to the weight that an average has gathered, of what is missing
    double missing[4]           # 1 - the weight that it has gathered
    double decay[4]             # since `base`
    double per[4]               # what a pick adds: rate / decay
    double grows[4]             # by a visit: 1 / (1 - rate)
    double picks                # of the last 32 visits or so, older ones for less
    double counted              # those visits

ctypedef struct fc_visit:       # the one that is open
    float expected[4]           # what its layer's averages were multiplied by before it, weight aside; 0: unknown
    float adds[4]               # what a pick adds to the averages
    float step                  # how far it moves the weights, at the most

cdef void blend_init(fc_blend *b, float *row, int32_t blocks, int32_t experts) noexcept nogil       # a row of zeros
cdef void blend_visit(fc_blend *b, fc_visit *v) noexcept nogil      # one begins; all of it is O(1) but every 32nd

# The open visit picks the expert at `x`. `usual`: the chance at which experts are evicted.
cdef inline void blend_pick(fc_blend *b, const fc_visit *v, float *x, float usual) noexcept nogil:
    b.picks += 1
    fc_learn(b.weight, v.expected, x, v.step, usual)
    fc_picked(x, v.adds)
